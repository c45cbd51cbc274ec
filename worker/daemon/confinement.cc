// One ruleset: reading, listing and changing are denied but for what the rules name. Running
// programs, looking at names (stat) and sockets are not restricted: which of them there are says
// the image of the node. Of /dev only character devices are named, so that no disk is; a node with
// GPUs has all of it, since the driver makes devices when they are first used.

#include "worker/daemon/confinement.h"

#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <system_error>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_split.h>
#include <fcntl.h>
#include <linux/landlock.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "common/logging.h"

namespace ravel::daemon {
namespace {

constexpr uint64_t kTruncate = uint64_t{1} << 14;  // of version 3; older headers lack the name
constexpr uint64_t kReadFile = LANDLOCK_ACCESS_FS_READ_FILE;
constexpr uint64_t kRead = kReadFile | LANDLOCK_ACCESS_FS_READ_DIR;
constexpr uint64_t kChangeFile = LANDLOCK_ACCESS_FS_WRITE_FILE | kTruncate;
constexpr uint64_t kChange =
    kChangeFile | LANDLOCK_ACCESS_FS_REMOVE_DIR | LANDLOCK_ACCESS_FS_REMOVE_FILE |
    LANDLOCK_ACCESS_FS_MAKE_CHAR | LANDLOCK_ACCESS_FS_MAKE_DIR | LANDLOCK_ACCESS_FS_MAKE_REG |
    LANDLOCK_ACCESS_FS_MAKE_SOCK | LANDLOCK_ACCESS_FS_MAKE_FIFO | LANDLOCK_ACCESS_FS_MAKE_BLOCK |
    LANDLOCK_ACCESS_FS_MAKE_SYM | LANDLOCK_ACCESS_FS_REFER;

// The first one lets no file be moved to another folder, and the data cache does.
constexpr long kLeastVersion = 2;

uint64_t HandledBy(long version) {
  const uint64_t handled = kRead | kChange;
  return version < 3 ? handled & ~kTruncate : handled;
}

absl::Status AddRule(int ruleset, const std::string& path, uint64_t access) {
  const int fd = open(path.c_str(), O_PATH | O_CLOEXEC);
  struct stat facts = {};
  if (fd < 0 || fstat(fd, &facts) != 0) {
    const int error = errno;
    close(fd);
    return error == ENOENT || error == ENOTDIR || error == EACCES ? absl::OkStatus()
                                                                  : ErrnoStatus(error, path);
  }
  landlock_path_beneath_attr rule = {};
  rule.parent_fd = fd;
  rule.allowed_access = S_ISDIR(facts.st_mode) ? access : access & (kReadFile | kChangeFile);
  const long added = syscall(SYS_landlock_add_rule, ruleset, LANDLOCK_RULE_PATH_BENEATH, &rule, 0);
  const absl::Status status = added == 0 ? absl::OkStatus() : ErrnoStatus(errno, path);
  close(fd);
  return status;
}

absl::Status AddRules(int ruleset, const Confinement& confinement, uint64_t handled) {
  for (const std::string& path : confinement.readable) {
    RETURN_IF_ERROR(AddRule(ruleset, path, handled & kRead));
  }
  for (const std::string& path : confinement.writable) {
    RETURN_IF_ERROR(AddRule(ruleset, path, handled));
  }
  return absl::OkStatus();
}

void AddDevices(Confinement& confinement) {
  std::error_code ignored;
  if (std::filesystem::exists("/dev/nvidiactl", ignored)) {
    confinement.writable.emplace_back("/dev");
    return;
  }
  confinement.writable.emplace_back("/dev/shm");
  for (const auto& entry : std::filesystem::directory_iterator("/dev", ignored)) {
    const std::string name = entry.path().filename();
    if (entry.is_character_file(ignored) && name != "mem" && name != "kmem" && name != "port") {
      confinement.writable.push_back(entry.path());
    }
  }
}

void AddOfEnvironment(Confinement& confinement) {
  const auto value = [](const char* name) {
    const char* const text = std::getenv(name);
    return std::string(text == nullptr ? "" : text);
  };
  for (const char* file : {"RAVEL_S3_CREDENTIALS",
                           "RAVEL_S3_CA",
                           "RAVEL_CUDA_LIBRARY",
                           "RAVEL_CUBLASLT_LIBRARY",
                           "RAVEL_CUDNN_LIBRARY",
                           "SSL_CERT_FILE",
                           "NCCL_TOPO_FILE",
                           "NCCL_CONF_FILE"}) {
    AddFolderOf(value(file), confinement.readable);
  }
  for (const char* folder : {"RAVEL_STORE_IDENTITY", "SSL_CERT_DIR", "CUDA_HOME"}) {
    confinement.readable.push_back(value(folder));
  }
  for (const std::string& folder :
       std::vector<std::string>(absl::StrSplit(value("LD_LIBRARY_PATH"), ':', absl::SkipEmpty()))) {
    confinement.readable.push_back(folder);
  }
  confinement.writable.push_back(value("CUDA_CACHE_PATH"));
  confinement.writable.push_back(value("CUDA_MPS_PIPE_DIRECTORY"));
  if (!value("HOME").empty()) {
    confinement.writable.push_back(value("HOME") + "/.nv");
  }
}

absl::Status CheckApart(const char* flag,
                        const std::vector<std::string>& folders,
                        const std::string& work_dir,
                        const char* work_flag) {
  std::error_code error;
  const std::string work = std::filesystem::weakly_canonical(work_dir, error);
  for (const std::string& folder : folders) {
    const std::string root = std::filesystem::canonical(folder, error);
    if (error || !std::filesystem::is_directory(root, error)) {
      return absl::FailedPreconditionError(absl::StrCat(flag, folder, ": expected a folder"));
    }
    if (IsBeneath(root, work) || IsBeneath(work, root)) {
      return absl::FailedPreconditionError(
          absl::StrCat(flag, folder, ": expected a folder apart from ", work_flag, " ", work_dir));
    }
  }
  return absl::OkStatus();
}

// Names of hosts and certificates of authorities may be links to files elsewhere.
void AddLinkedFrom(const std::string& etc, Confinement& confinement) {
  std::error_code ignored;
  for (const char* file : {"/resolv.conf",
                           "/hosts",
                           "/nsswitch.conf",
                           "/ssl/certs/ca-certificates.crt",
                           "/ssl/ca-bundle.pem",
                           "/pki/tls/certs/ca-bundle.crt"}) {
    const std::filesystem::path real = std::filesystem::canonical(etc + file, ignored);
    if (!ignored && real.string().rfind(etc + "/", 0) != 0) {
      confinement.readable.push_back(real.parent_path());
    }
    ignored.clear();
  }
}

}  // namespace

absl::Status CheckRoots(const RootFolders& roots, const std::string& work_dir, const char* flag) {
  RETURN_IF_ERROR(CheckApart("--read-root ", roots.read, work_dir, flag));
  return CheckApart("--write-root ", roots.write, work_dir, flag);
}

Confinement ConfinementOf(const RootFolders& roots) {
  Confinement confinement;
  for (const char* folder : {"/usr",
                             "/lib",
                             "/lib32",
                             "/lib64",
                             "/bin",
                             "/sbin",
                             "/opt",
                             "/etc",
                             "/proc",
                             "/sys",
                             "/nix/store",
                             "/run/systemd/resolve",
                             "/run/nscd"}) {
    confinement.readable.emplace_back(folder);
  }
  AddDevices(confinement);
  AddOfEnvironment(confinement);
  AddLinkedFrom("/etc", confinement);
  confinement.readable.insert(confinement.readable.end(), roots.read.begin(), roots.read.end());
  confinement.writable.insert(confinement.writable.end(), roots.write.begin(), roots.write.end());
  return confinement;
}

void AddFolderOf(const std::string& file, std::vector<std::string>& paths) {
  if (file.empty()) {
    return;
  }
  std::error_code ignored;
  const std::filesystem::path path = std::filesystem::absolute(file, ignored);
  paths.push_back(path.parent_path() == "/" ? path : path.parent_path());
}

absl::Status Confine(const Confinement& confinement) {
  const long version =
      syscall(SYS_landlock_create_ruleset, nullptr, 0, LANDLOCK_CREATE_RULESET_VERSION);
  if (version < 1) {
    return absl::UnimplementedError(
        absl::StrCat("this kernel offers no Landlock (",
                     ErrnoStatus(errno, "landlock_create_ruleset").message(),
                     ")"));
  }
  if (version < kLeastVersion) {
    return absl::UnimplementedError("this kernel's Landlock lets no file move between folders");
  }
  landlock_ruleset_attr attributes = {};
  attributes.handled_access_fs = HandledBy(version);
  const int ruleset = static_cast<int>(
      syscall(SYS_landlock_create_ruleset, &attributes, sizeof attributes.handled_access_fs, 0));
  if (ruleset < 0) {
    return ErrnoStatus(errno, "landlock_create_ruleset");
  }
  absl::Status status = AddRules(ruleset, confinement, attributes.handled_access_fs);
  if (status.ok() && prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) {
    status = ErrnoStatus(errno, "PR_SET_NO_NEW_PRIVS");
  }
  if (status.ok() && syscall(SYS_landlock_restrict_self, ruleset, 0) != 0) {
    status = ErrnoStatus(errno, "landlock_restrict_self");
  }
  close(ruleset);
  return status;
}

absl::StatusOr<bool> ConfineDaemon(const DaemonConfinement& wish) {
  std::error_code ignored;
  const bool automatic = wish.mode == "auto";
  if (wish.mode == "off" || !wish.roots.any() ||
      (automatic && std::filesystem::exists("/dev/nvidiactl", ignored))) {
    return false;
  }
  Confinement confinement = ConfinementOf(wish.roots);
  for (const std::string& folder : wish.folders) {
    if (!folder.empty()) {
      confinement.writable.push_back(std::filesystem::absolute(folder, ignored));
    }
  }
  for (const std::string& folder : wish.read_folders) {
    if (!folder.empty()) {
      confinement.readable.push_back(std::filesystem::absolute(folder, ignored));
    }
  }
  for (const std::string& file : wish.read_files) {
    AddFolderOf(file, confinement.readable);
  }
  for (const std::string& file : wish.written_files) {
    AddFolderOf(file, confinement.writable);
  }
  const absl::Status confined = Confine(confinement);
  if (confined.ok()) {
    log::Info("this daemon and its trainers are confined to their folders (Landlock)");
    return true;
  }
  if (!automatic || !absl::IsUnimplemented(confined)) {
    return Annotate(confined, "--confine");
  }
  log::Warning(
      absl::StrCat("not confined, paths are checked before they are opened: ", confined.message()));
  return false;
}

}  // namespace ravel::daemon
