// Identities are changed by system calls, not by the C library's functions: those change all
// threads of a process, and are no good between fork and exec.

#include "worker/daemon/trainer_user.h"

#include <array>
#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <system_error>
#include <thread>
#include <utility>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <grp.h>
#include <linux/capability.h>
#include <pwd.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace ravel::daemon {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kMaxEntryBytes = 64 << 10;
constexpr int kLastCapability = 63;
constexpr mode_t kPass = 0710;
constexpr mode_t kOfTrainers = 0750;
constexpr mode_t kInherited = 02750;  // the group of what is made beneath is the folder's

using Capabilities = std::array<__user_cap_data_struct, 2>;

absl::StatusOr<Capabilities> MyCapabilities() {
  __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
  Capabilities sets = {};
  return syscall(SYS_capget, &header, sets.data()) == 0
             ? absl::StatusOr<Capabilities>(sets)
             : absl::StatusOr<Capabilities>(ErrnoStatus(errno, "capget"));
}

absl::StatusOr<gid_t> FindGroup(const std::string& name) {
  std::string buffer(kMaxEntryBytes, '\0');
  group entry = {};
  group* found = nullptr;
  const int error = getgrnam_r(name.c_str(), &entry, buffer.data(), buffer.size(), &found);
  if (error != 0) {
    return ErrnoStatus(error, name);
  }
  return found == nullptr
             ? absl::StatusOr<gid_t>(absl::NotFoundError(absl::StrCat("no group ", name, " here")))
             : found->gr_gid;
}

absl::Status Chown(const std::string& path, uid_t uid, gid_t gid) {
  return lchown(path.c_str(), uid, gid) == 0 ? absl::OkStatus() : ErrnoStatus(errno, path);
}

// Leaves a folder that has this mode: one that was given away before is not this process's to
// change.
absl::Status Chmod(const std::string& path, mode_t mode) {
  struct stat facts = {};
  if (stat(path.c_str(), &facts) == 0 && (facts.st_mode & 07777) == mode) {
    return absl::OkStatus();
  }
  return chmod(path.c_str(), mode) == 0 ? absl::OkStatus() : ErrnoStatus(errno, path);
}

// The data cache may hold sets from before there was a trainer user.
absl::Status ShareTree(const std::string& folder, gid_t gid) {
  constexpr uid_t kSame = static_cast<uid_t>(-1);
  RETURN_IF_ERROR(Chown(folder, kSame, gid));
  RETURN_IF_ERROR(Chmod(folder, kInherited));
  std::error_code error;
  for (fs::recursive_directory_iterator entry(folder, error), end; !error && entry != end;
       entry.increment(error)) {
    RETURN_IF_ERROR(Chown(entry->path(), kSame, gid));
    std::error_code ignored;
    if (entry->is_directory(ignored) && !entry->is_symlink(ignored)) {
      RETURN_IF_ERROR(Chmod(entry->path(), kInherited));
    }
  }
  return error ? absl::FailedPreconditionError(absl::StrCat(folder, ": ", error.message()))
               : absl::OkStatus();
}

}  // namespace

absl::StatusOr<TrainerUser> FindTrainerUser(const std::string& text) {
  const std::size_t colon = text.find(':');
  TrainerUser user{.name = text.substr(0, colon), .home = "/"};
  std::string buffer(kMaxEntryBytes, '\0');
  passwd entry = {};
  passwd* found = nullptr;
  const int error = getpwnam_r(user.name.c_str(), &entry, buffer.data(), buffer.size(), &found);
  if (error != 0) {
    return ErrnoStatus(error, user.name);
  }
  if (found == nullptr) {
    return absl::NotFoundError(absl::StrCat("no user ", user.name, " here"));
  }
  user.uid = found->pw_uid;
  user.gid = found->pw_gid;
  user.home = found->pw_dir;
  if (colon != std::string::npos) {
    ASSIGN_OR_RETURN(user.gid, FindGroup(text.substr(colon + 1)));
  }
  if (user.uid == 0 || user.gid == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(text, ": expected a user and a group other than root"));
  }
  if (user.uid == geteuid() || user.uid == getuid()) {
    return absl::InvalidArgumentError(
        absl::StrCat(text, ": expected a user other than the daemon's own"));
  }
  return user;
}

absl::Status CheckMayBecome(const TrainerUser& user) {
  constexpr std::pair<int, const char*> kNeeded[] = {{CAP_SETUID, "CAP_SETUID"},
                                                     {CAP_SETGID, "CAP_SETGID"},
                                                     {CAP_KILL, "CAP_KILL"},
                                                     {CAP_CHOWN, "CAP_CHOWN"},
                                                     {CAP_FSETID, "CAP_FSETID"}};
  ASSIGN_OR_RETURN(const Capabilities sets, MyCapabilities());
  std::vector<std::string> missing;
  for (const auto& [capability, name] : kNeeded) {
    if ((sets[0].effective & (uint32_t{1} << capability)) == 0) {
      missing.emplace_back(name);
    }
  }
  return missing.empty()
             ? absl::OkStatus()
             : absl::PermissionDeniedError(absl::StrCat(
                   user.name,
                   ": expected root or a process with these capabilities, which this one lacks: ",
                   absl::StrJoin(missing, ", ")));
}

bool BecomeTrainerUser(uid_t uid, gid_t gid) {
  for (int capability = 0; capability <= kLastCapability; ++capability) {
    prctl(PR_CAPBSET_DROP, capability, 0, 0, 0);  // needs CAP_SETPCAP; the sets below hold anyway
  }
  if (syscall(SYS_setgroups, 0, nullptr) != 0 || syscall(SYS_setresgid, gid, gid, gid) != 0 ||
      syscall(SYS_setresuid, uid, uid, uid) != 0) {
    return false;
  }
  __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
  __user_cap_data_struct none[2] = {};
  prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
  return syscall(SYS_capset, &header, none) == 0 && prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0;
}

absl::Status TakeFileRights(const TrainerUser& user) {
  // They do not fail but are without effect: the second call tells.
  syscall(SYS_setgroups, 0, nullptr);
  syscall(SYS_setfsgid, user.gid);
  syscall(SYS_setfsuid, user.uid);
  const bool done = syscall(SYS_setfsgid, static_cast<gid_t>(-1)) == static_cast<long>(user.gid) &&
                    syscall(SYS_setfsuid, static_cast<uid_t>(-1)) == static_cast<long>(user.uid);
  return done ? absl::OkStatus()
              : absl::PermissionDeniedError(
                    absl::StrCat("this process cannot open files as ", user.name));
}

absl::Status AsTrainerUser(const TrainerUser& user, const std::function<absl::Status()>& work) {
  absl::Status status;
  std::thread thread([&] {
    status = TakeFileRights(user);
    if (status.ok()) {
      status = work();
    }
  });
  thread.join();
  return status;
}

std::vector<std::string> UserVariables(const TrainerUser& user) {
  return {"HOME=" + user.home, "USER=" + user.name, "LOGNAME=" + user.name};
}

absl::Status ShareFolders(const TrainerUser& user, const SharedFolders& folders) {
  if (!folders.work_dir.empty()) {
    RETURN_IF_ERROR(Chown(folders.work_dir, static_cast<uid_t>(-1), user.gid));
    RETURN_IF_ERROR(Chmod(folders.work_dir, kPass));
  }
  if (!folders.gemm_cache.empty()) {
    std::error_code error;
    fs::create_directories(folders.gemm_cache, error);
    if (error) {
      return absl::FailedPreconditionError(absl::StrCat(folders.gemm_cache, ": ", error.message()));
    }
    RETURN_IF_ERROR(Chmod(folders.gemm_cache, kOfTrainers));
    RETURN_IF_ERROR(Chown(folders.gemm_cache, user.uid, user.gid));
    for (const auto& entry : fs::directory_iterator(folders.gemm_cache, error)) {
      RETURN_IF_ERROR(Chown(entry.path(), user.uid, user.gid));
    }
  }
  return folders.data_cache.empty() ? absl::OkStatus() : ShareTree(folders.data_cache, user.gid);
}

}  // namespace ravel::daemon
