#include "tests/testing/process.h"

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include <absl/strings/match.h>
#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/testing/eventually.h"

namespace ravel::testing {
namespace {

int StatusOfShell(int status) {
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

// Only async-signal-safe calls: the child of a process that may have threads.
void RedirectOrExit(const char* path, int target) {
  const int file = ::open(path, O_WRONLY | O_CREAT | O_APPEND, 0644);
  if (file < 0 || ::dup2(file, target) < 0) {
    ::_exit(126);
  }
  ::close(file);
}

std::string OrNull(const std::string& path) {
  return path.empty() ? "/dev/null" : path;
}

}  // namespace

absl::StatusOr<std::unique_ptr<ChildProcess>> ChildProcess::Start(const ProcessOptions& options) {
  std::vector<std::string> environment;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    if (!options.environment.contains(text.substr(0, text.find('=')))) {
      environment.push_back(text);
    }
  }
  for (const auto& [name, value] : options.environment) {
    environment.push_back(absl::StrCat(name, "=", value));
  }
  std::vector<char*> argv;
  for (const std::string& argument : options.arguments) {
    argv.push_back(const_cast<char*>(argument.c_str()));
  }
  argv.push_back(nullptr);
  std::vector<char*> envp;
  for (std::string& entry : environment) {
    envp.push_back(entry.data());
  }
  envp.push_back(nullptr);
  const std::string out = OrNull(options.output_path);
  const std::string err = OrNull(options.error_path);

  const pid_t pid = ::fork();
  if (pid < 0) {
    return ErrnoStatus(errno, "fork");
  }
  if (pid == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    RedirectOrExit(out.c_str(), STDOUT_FILENO);
    RedirectOrExit(err.c_str(), STDERR_FILENO);
    if (!options.working_directory.empty() && ::chdir(options.working_directory.c_str()) != 0) {
      ::_exit(126);
    }
    ::execve(argv[0], argv.data(), envp.data());
    ::_exit(127);
  }
  return std::unique_ptr<ChildProcess>(new ChildProcess(pid));
}

ChildProcess::~ChildProcess() {
  Kill();
}

bool ChildProcess::Running() {
  int status = 0;
  if (!exit_.has_value() && ::waitpid(pid_, &status, WNOHANG) == pid_) {
    exit_ = StatusOfShell(status);
  }
  return !exit_.has_value();
}

void ChildProcess::Signal(int number) const {
  if (!exit_.has_value()) {
    ::kill(pid_, number);
  }
}

std::optional<int> ChildProcess::Wait(std::chrono::milliseconds deadline) {
  Eventually(deadline, [this] { return !Running(); });
  return exit_;
}

void ChildProcess::Kill() {
  if (Running()) {
    ::kill(pid_, SIGKILL);
    int status = 0;
    ::waitpid(pid_, &status, 0);
    exit_ = StatusOfShell(status);
  }
}

void ChildProcess::KillInner() {
  if (Running()) {
    for (const pid_t inner : ChildrenOf(pid_)) {
      ::kill(inner, SIGKILL);
    }
    Wait(std::chrono::seconds(10));
  }
  Kill();
}

RunResult RunProgram(ProcessOptions options,
                     const std::string& scratch,
                     std::chrono::milliseconds deadline) {
  static std::atomic<int> next = 0;
  const std::string stem = absl::StrCat(scratch, "/run", next++);
  options.output_path = stem + ".out";
  options.error_path = stem + ".err";
  RunResult result;
  absl::StatusOr<std::unique_ptr<ChildProcess>> child = ChildProcess::Start(options);
  if (!child.ok()) {
    result.err = std::string(child.status().message());
    return result;
  }
  result.exit_code = (*child)->Wait(deadline).value_or(-1);
  (*child)->Kill();
  result.out = ReadText(options.output_path);
  result.err = ReadText(options.error_path);
  std::remove(options.output_path.c_str());
  std::remove(options.error_path.c_str());
  return result;
}

std::vector<pid_t> ChildrenOf(pid_t parent) {
  std::vector<pid_t> children;
  const std::string tasks = absl::StrCat("/proc/", parent, "/task");
  std::error_code error;
  for (const auto& task : std::filesystem::directory_iterator(tasks, error)) {
    std::istringstream words(ReadText(task.path().string() + "/children"));
    pid_t child = 0;
    while (words >> child) {
      children.push_back(child);
    }
  }
  return children;
}

int64_t PssBytes(pid_t pid) {
  std::istringstream lines(ReadText(absl::StrCat("/proc/", pid, "/smaps_rollup")));
  std::string line;
  while (std::getline(lines, line)) {
    int64_t kib = 0;
    if (absl::StartsWith(line, "Pss:")) {
      std::istringstream(line.substr(4)) >> kib;
      return kib * 1024;
    }
  }
  return 0;
}

std::vector<std::filesystem::directory_entry> EntriesUnder(const std::string& folder) {
  std::vector<std::filesystem::directory_entry> found;
  std::vector<std::filesystem::path> folders = {folder};
  while (!folders.empty()) {
    std::error_code gone;
    std::filesystem::directory_iterator entry(folders.back(), gone);
    folders.pop_back();
    for (; !gone && entry != std::filesystem::directory_iterator(); entry.increment(gone)) {
      found.push_back(*entry);
      std::error_code ignored;
      if (entry->symlink_status(ignored).type() == std::filesystem::file_type::directory) {
        folders.push_back(entry->path());
      }
    }
  }
  return found;
}

std::string ReadText(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

void WriteText(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

ScratchFolder::ScratchFolder(const std::string& root) {
  const char* usual = std::getenv("TMPDIR");
  path_ = absl::StrCat(!root.empty()      ? root.c_str()
                       : usual != nullptr ? usual
                                          : "/tmp",
                       "/ravel-test-XXXXXX");
  if (::mkdtemp(path_.data()) == nullptr) {
    std::perror(path_.c_str());
    std::abort();
  }
}

ScratchFolder::~ScratchFolder() {
  if (::testing::Test::HasFailure()) {
    std::fprintf(stderr, "kept for inspection: %s\n", path_.c_str());
    return;
  }
  std::error_code error;
  std::filesystem::remove_all(path_, error);
}

}  // namespace ravel::testing
