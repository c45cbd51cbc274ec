#include "worker/daemon/preflight.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include <absl/strings/ascii.h>
#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/string_view.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/signed_size.h"
#include "common/token_check.h"

namespace ravel::daemon {
namespace {

// The rights of the thread decide, which may be those of the trainers' user.
absl::Status CheckWritable(const std::string& folder) {
  return faccessat(AT_FDCWD, folder.c_str(), W_OK | X_OK, AT_EACCESS) == 0
             ? absl::OkStatus()
             : ErrnoStatus(errno, folder);
}

absl::Status CheckRegular(const std::string& path) {
  struct stat facts {};
  if (stat(path.c_str(), &facts) != 0) {
    return ErrnoStatus(errno, path);
  }
  if (!S_ISREG(facts.st_mode)) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": not a regular file"));
  }
  if (faccessat(AT_FDCWD, path.c_str(), R_OK, AT_EACCESS) != 0) {
    return ErrnoStatus(errno, path);
  }
  return absl::OkStatus();
}

// It is copied into checkpoints, where others read it: no file of another kind is.
absl::Status CheckTokenizer(const std::string& path) {
  RETURN_IF_ERROR(CheckRegular(path));
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) {
    return ErrnoStatus(errno, path);
  }
  char beginning[64] = {};
  const ssize_t count = read(fd, beginning, sizeof(beginning));
  close(fd);
  const absl::string_view text(beginning, Size(std::max<ssize_t>(count, 0)));
  return absl::StartsWith(absl::StripLeadingAsciiWhitespace(text), "{")
             ? absl::OkStatus()
             : absl::InvalidArgumentError(absl::StrCat(path, ": expected a tokenizer.json"));
}

absl::Status CheckModel(const std::string& directory) {
  RETURN_IF_ERROR(CheckRegular(directory + "/config.json"));
  const absl::Status single = CheckRegular(directory + "/model.safetensors");
  return single.ok() ? single : CheckRegular(directory + "/model.safetensors.index.json");
}

// The folder itself need not be there yet: then the nearest one above it, in which it is made.
absl::Status CheckStore(std::string folder) {
  struct stat facts {};
  while (stat(folder.c_str(), &facts) != 0) {
    const size_t slash = folder.rfind('/');
    if (errno != ENOENT || slash == std::string::npos) {
      return ErrnoStatus(errno, folder);
    }
    folder = slash == 0 ? "/" : folder.substr(0, slash);
  }
  if (!S_ISDIR(facts.st_mode)) {
    return absl::FailedPreconditionError(absl::StrCat(folder, ": not a folder"));
  }
  return CheckWritable(folder);
}

// Unlike the store's, it has to be there.
absl::Status CheckOffload(const std::string& folder) {
  struct stat facts = {};
  if (stat(folder.c_str(), &facts) != 0) {
    return ErrnoStatus(errno, folder);
  }
  if (!S_ISDIR(facts.st_mode)) {
    return absl::FailedPreconditionError(absl::StrCat(folder, ": not a folder"));
  }
  return CheckWritable(folder);
}

}  // namespace

PreflightResult CheckPaths(const PreflightPaths& paths) {
  for (const std::string& path : paths.token_files) {
    const absl::Status opened = CheckTokenFile(path, paths.format, {}).status();
    if (!opened.ok()) {
      return {Annotate(opened, "data"), "DataError"};
    }
  }
  absl::Status found = paths.tokenizer.empty()
                           ? absl::OkStatus()
                           : Annotate(CheckTokenizer(paths.tokenizer), "tokenizer");
  if (found.ok() && !paths.model_directory.empty()) {
    found = Annotate(CheckModel(paths.model_directory), "model.from");
  }
  if (found.ok() && !paths.offload_folder.empty()) {
    found = Annotate(CheckOffload(paths.offload_folder), "training.optimizer.offload.path");
  }
  if (!found.ok()) {
    return {found, "DataError"};
  }
  // A store that is a service is asked by the trainer itself, before its first step.
  if (!paths.checkpoint_root.empty() && paths.checkpoint_root.find("://") == std::string::npos) {
    found = Annotate(CheckStore(paths.checkpoint_root), "checkpoint.store");
  }
  return {found, found.ok() ? "" : "StoreUnavailable"};
}

PreflightResult CheckPathsBeneath(const PathRoots& roots, const PreflightPaths& paths) {
  absl::Status allowed = roots.CheckAll(paths.named);
  return allowed.ok() ? CheckPaths(paths) : PreflightResult{std::move(allowed), "DataError"};
}

std::function<PreflightResult(const PreflightPaths&)> LookAs(const std::optional<TrainerUser>& user,
                                                             const PathRoots& roots) {
  return [user, roots](const PreflightPaths& paths) -> PreflightResult {
    absl::Status taken = user ? TakeFileRights(*user) : absl::OkStatus();
    return taken.ok() ? CheckPathsBeneath(roots, paths)
                      : PreflightResult{std::move(taken), "PreflightFailed"};
  };
}

Preflight::Preflight(boost::asio::io_context& context, std::chrono::milliseconds limit, Look look)
    : limit_(limit), look_(std::move(look)), threads_(context, kMostHanging) {}

void Preflight::Start(PreflightPaths paths, std::function<void(PreflightResult)> done) {
  const bool started = threads_.Run(
      {limit_, limit_},
      [look = look_, paths = std::move(paths), done](WorkProgress& /*progress*/) {
        return [done, result = look(paths)]() mutable { done(std::move(result)); };
      },
      [done](const std::string& /*part*/, std::chrono::milliseconds limit) {
        done({absl::DeadlineExceededError(
                  absl::StrCat("the job's paths did not answer within ", limit.count(), " ms")),
              "PreflightFailed"});
      });
  if (!started) {
    done({absl::ResourceExhaustedError("earlier checks of paths still hang in file systems"),
          "PreflightFailed"});
  }
}

}  // namespace ravel::daemon
