// Starts one trainer with fork and exec. The daemon has threads, so the child may use only
// async-signal-safe calls between the two: everything else (arguments, environment, descriptors) is
// prepared before the fork. The child's environment is an allow-list, so a job does not see the
// daemon's secrets, and settings that could redirect communicators are removed. PR_SET_PDEATHSIG
// kills the child when the daemon dies; a check of the parent closes the race in which it dies
// first.

#include "worker/daemon/child_process.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <utility>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/string_view.h>
#include <absl/types/span.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/store/store_refusal.h"
#include "worker/child_link.h"

namespace ravel::daemon {
namespace {

constexpr int kExecFailed = 127;
// Beyond the descriptors that the child will use, so that moving one never closes another.
constexpr int kLowestSafeFd = 64;

void CloseAll(std::initializer_list<int> fds) {
  for (int fd : fds) {
    if (fd >= 0) {
      close(fd);
    }
  }
}

bool StartsWithAny(absl::string_view text, absl::Span<const absl::string_view> beginnings) {
  return std::any_of(beginnings.begin(), beginnings.end(), [text](absl::string_view beginning) {
    return absl::StartsWith(text, beginning);
  });
}

// Returns true for variables that a program needs to run or that steer its devices, its network and
// its checkers. All others stay with the daemon: a job is not to know cloud keys or proxies.
bool ReachesTrainers(absl::string_view variable) {
  static constexpr absl::string_view kAllowed[] = {
      "PATH=",       "HOME=",   "USER=",  "LOGNAME=",      "SHELL=",
      "LANG=",       "LC_",     "TZ=",    "TMPDIR=",       "LD_LIBRARY_PATH=",
      "LD_PRELOAD=", "RAVEL_",  "CUDA_",  "NVIDIA_",       "NCCL_",
      "GLOO_",       "UCX_",    "OMP_",   "CUDNN_",        "CUBLAS",
      "OPENBLAS_",   "MALLOC_", "GLIBC_", "ASAN_OPTIONS=", "FI_",
      "GCOV_",       "UBSAN_",  "LSAN_",  "TSAN_OPTIONS=", "LLVM_PROFILE_FILE="};
  // One thread per rank everywhere; a communicator's address comes from the plan alone.
  static constexpr absl::string_view kScrubbed[] = {"NCCL_COMM_ID=",
                                                    "NCCL_RAS_ADDR=",
                                                    "OPENBLAS_NUM_THREADS=",
                                                    "RAVEL_S3_KEYS_OF_JOB=",
                                                    "OMP_NUM_THREADS=",
                                                    "CUDA_DEVICE_ORDER="};
  return StartsWithAny(variable, kAllowed) && !StartsWithAny(variable, kScrubbed);
}

bool IsStoreKey(absl::string_view variable) {
  static constexpr absl::string_view kKeys[] = {
      "RAVEL_S3_ACCESS_KEY_ID=", "RAVEL_S3_SECRET_ACCESS_KEY=", "RAVEL_S3_SESSION_TOKEN="};
  return StartsWithAny(variable, kKeys);
}

std::vector<std::string> ChildEnvironment() {
  // GPUs are numbered as the driver's management library does, which the daemon asks.
  std::vector<std::string> environment = {
      "OPENBLAS_NUM_THREADS=1", "OMP_NUM_THREADS=1", "CUDA_DEVICE_ORDER=PCI_BUS_ID"};
  if (getenv("NCCL_DEBUG") == nullptr) {
    environment.push_back("NCCL_DEBUG=WARN");  // on stdout, and so in the job's log
  }
  if (getenv("CUDA_DEVICE_MAX_CONNECTIONS") == nullptr) {
    // The driver's own 8 queues are fewer than a rank's streams and those of its communicators:
    // two streams of one queue wait for each other.
    environment.push_back("CUDA_DEVICE_MAX_CONNECTIONS=32");
  }
  for (char** entry = environ; *entry != nullptr; ++entry) {
    if (ReachesTrainers(*entry)) {
      environment.emplace_back(*entry);
    }
  }
  return environment;
}

std::vector<char*> Pointers(const std::vector<std::string>& texts) {
  std::vector<char*> pointers;
  for (const std::string& text : texts) {
    pointers.push_back(const_cast<char*>(text.c_str()));  // execve does not write to them
  }
  pointers.push_back(nullptr);
  return pointers;
}

struct ChildEnds {
  int null = -1;
  int socket = -1;
  int out = -1;
  int err = -1;
};

// As far as the daemon may: networks register memory that is locked, and NCCL opens a socket or
// more for each peer and channel.
void RaiseLimits() {
  constexpr rlim_t kMostFiles = 65536;
  rlimit limit = {};
  if (getrlimit(RLIMIT_MEMLOCK, &limit) == 0) {
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_MEMLOCK, &limit);
  }
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < kMostFiles) {
    limit.rlim_cur = std::min(limit.rlim_max, kMostFiles);
    setrlimit(RLIMIT_NOFILE, &limit);
  }
}

// On the child's stderr, which is the job's log.
void Say(std::initializer_list<const char*> texts) {
  for (const char* text : texts) {
    if (text != nullptr && write(STDERR_FILENO, text, strlen(text)) < 0) {
      break;
    }
  }
}

// Between fork and exec of a process with threads: async-signal-safe calls only.
[[noreturn]] void RunChild(const ChildEnds& ends,
                           pid_t parent,
                           const TrainerUser* user,
                           char* const* arguments,
                           char* const* environment) {
  if (user != nullptr) {
    if (!BecomeTrainerUser(user->uid, user->gid)) {
      dup2(ends.err, STDERR_FILENO);
      Say({"cannot become the user of --trainer-user: ", strerrordesc_np(errno), "\n"});
      _exit(kExecFailed);
    }
  }
  prctl(PR_SET_PDEATHSIG, SIGKILL);  // a change of user clears it
  if (getppid() != parent) {
    _exit(kExecFailed);  // the daemon died in between
  }
  struct sigaction plain = {};
  plain.sa_handler = SIG_DFL;
  for (int signal_number : {SIGPIPE, SIGTERM, SIGINT, SIGHUP, SIGCHLD}) {
    sigaction(signal_number, &plain, nullptr);
  }
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  const rlimit no_core = {0, 0};
  setrlimit(RLIMIT_CORE, &no_core);
  RaiseLimits();
  dup2(ends.null, STDIN_FILENO);
  dup2(ends.out, STDOUT_FILENO);
  dup2(ends.err, STDERR_FILENO);
  dup2(ends.socket, kTrainerSocketFd);
  syscall(SYS_close_range, kTrainerSocketFd + 1, ~0U, 0);
  execve(arguments[0], arguments, environment);
  Say({"cannot execute ", arguments[0], ": ", strerrordesc_np(errno), "\n"});
  _exit(kExecFailed);
}

absl::Status MoveUp(int& fd) {
  const int moved = fcntl(fd, F_DUPFD_CLOEXEC, kLowestSafeFd);
  if (moved < 0) {
    return ErrnoStatus(errno, "descriptors for a trainer");
  }
  close(fd);
  fd = moved;
  return absl::OkStatus();
}

absl::Status OpenEnds(ChildProcess& ours, ChildEnds& theirs) {
  int pair[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0) {
    return ErrnoStatus(errno, "socketpair for a trainer");
  }
  ours.socket = pair[0];
  theirs.socket = pair[1];
  if (pipe2(pair, O_CLOEXEC) != 0) {
    return ErrnoStatus(errno, "pipe for a trainer");
  }
  ours.out = pair[0];
  theirs.out = pair[1];
  if (pipe2(pair, O_CLOEXEC) != 0) {
    return ErrnoStatus(errno, "pipe for a trainer");
  }
  ours.err = pair[0];
  theirs.err = pair[1];
  theirs.null = open("/dev/null", O_RDONLY | O_CLOEXEC);
  if (theirs.null < 0) {
    return ErrnoStatus(errno, "/dev/null");
  }
  for (int* fd : {&theirs.null, &theirs.socket, &theirs.out, &theirs.err}) {
    RETURN_IF_ERROR(MoveUp(*fd));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ChildProcess> StartChild(const std::vector<std::string>& arguments,
                                        const std::vector<std::string>& variables,
                                        const TrainerUser* user) {
  std::vector<std::string> environment = variables;
  const bool keys_of_job = std::any_of(variables.begin(), variables.end(), IsStoreKey);
  if (keys_of_job) {
    environment.push_back(absl::StrCat(store::kKeysOfJobVariable, "=1"));
  }
  if (user != nullptr) {
    for (std::string& variable : UserVariables(*user)) {
      environment.push_back(std::move(variable));
    }
  }
  for (std::string& variable : ChildEnvironment()) {
    if (keys_of_job && IsStoreKey(variable)) {
      continue;  // keys go together: the job's own have no token of the node's
    }
    const std::string name = variable.substr(0, variable.find('=') + 1);
    if (std::none_of(environment.begin(), environment.end(), [&](const std::string& given) {
          return absl::StartsWith(given, name);
        })) {
      environment.push_back(std::move(variable));
    }
  }
  const std::vector<char*> argument_pointers = Pointers(arguments);
  const std::vector<char*> environment_pointers = Pointers(environment);
  ChildProcess child;
  ChildEnds ends;
  absl::Status opened = OpenEnds(child, ends);
  if (opened.ok()) {
    const pid_t parent = getpid();
    child.pid = fork();
    if (child.pid == 0) {
      RunChild(ends, parent, user, argument_pointers.data(), environment_pointers.data());
    }
    if (child.pid < 0) {
      opened = ErrnoStatus(errno, "fork for a trainer");
    }
  }
  if (opened.ok()) {
    child.pidfd = static_cast<int>(syscall(SYS_pidfd_open, child.pid, 0));
    if (child.pidfd < 0) {
      opened = ErrnoStatus(errno, "pidfd of a trainer");
      kill(child.pid, SIGKILL);
      waitpid(child.pid, nullptr, 0);
    }
  }
  CloseAll({ends.null, ends.socket, ends.out, ends.err});
  if (!opened.ok()) {
    CloseAll({child.socket, child.out, child.err});
    return opened;
  }
  return child;
}

absl::StatusOr<ExitStatus> ReapChild(const ChildProcess& child) {
  int status = 0;
  const pid_t reaped = waitpid(child.pid, &status, WNOHANG);
  if (reaped == 0) {
    return absl::FailedPreconditionError(absl::StrCat("process ", child.pid, " still runs"));
  }
  if (reaped < 0) {
    return ErrnoStatus(errno, absl::StrCat("waiting for process ", child.pid));
  }
  if (WIFSIGNALED(status)) {
    return ExitStatus{.exit_code = -1, .signal = WTERMSIG(status)};
  }
  return ExitStatus{.exit_code = WEXITSTATUS(status), .signal = 0};
}

void KillChild(const ChildProcess& child) {
  syscall(SYS_pidfd_send_signal, child.pidfd, SIGKILL, nullptr, 0);
}

}  // namespace ravel::daemon
