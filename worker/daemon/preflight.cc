#include "worker/daemon/preflight.h"

#include <cerrno>
#include <thread>
#include <utility>

#include <absl/strings/str_cat.h>
#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <sys/stat.h>
#include <unistd.h>

#include "common/mutex.h"

namespace ravel::daemon {
namespace {

namespace asio = boost::asio;

absl::Status CheckRegular(const std::string& path) {
  struct stat facts {};
  if (stat(path.c_str(), &facts) != 0) {
    return ErrnoStatus(errno, path);
  }
  if (!S_ISREG(facts.st_mode)) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": not a regular file"));
  }
  if (access(path.c_str(), R_OK) != 0) {
    return ErrnoStatus(errno, path);
  }
  return absl::OkStatus();
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
  return access(folder.c_str(), W_OK | X_OK) == 0 ? absl::OkStatus() : ErrnoStatus(errno, folder);
}

}  // namespace

struct Preflight::Check {
  Check(asio::io_context& context, std::function<void(PreflightResult)> callback)
      : timer(context), done(std::move(callback)) {}
  asio::steady_timer timer;
  std::function<void(PreflightResult)> done;
};

struct Preflight::Gate {
  Mutex mutex;
  asio::io_context* context ABSL_GUARDED_BY(mutex) = nullptr;
};

PreflightResult CheckPaths(const PreflightPaths& paths) {
  for (const std::string& path : paths.token_files) {
    const absl::Status opened = TokenFile::Open(path, paths.format).status();
    if (!opened.ok()) {
      return {Annotate(opened, "data"), "DataError"};
    }
  }
  absl::Status found = paths.tokenizer.empty()
                           ? absl::OkStatus()
                           : Annotate(CheckRegular(paths.tokenizer), "tokenizer");
  if (found.ok() && !paths.model_directory.empty()) {
    found = Annotate(CheckModel(paths.model_directory), "model.from");
  }
  if (!found.ok()) {
    return {found, "DataError"};
  }
  if (!paths.checkpoint_root.empty()) {
    found = Annotate(CheckStore(paths.checkpoint_root), "checkpoint.store");
  }
  return {found, found.ok() ? "" : "StoreUnavailable"};
}

Preflight::Preflight(asio::io_context& context, std::chrono::milliseconds limit, Look look)
    : context_(context), limit_(limit), look_(std::move(look)), gate_(std::make_shared<Gate>()) {
  const MutexLock lock(gate_->mutex);
  gate_->context = &context;
}

Preflight::~Preflight() {
  const MutexLock lock(gate_->mutex);
  gate_->context = nullptr;
}

void Preflight::Start(PreflightPaths paths, std::function<void(PreflightResult)> done) {
  if (running_ >= kMostHanging) {
    done({absl::ResourceExhaustedError("earlier checks of paths still hang in file systems"),
          "PreflightFailed"});
    return;
  }
  const int64_t id = ++last_id_;
  Check& check = *(open_[id] = std::make_unique<Check>(context_, std::move(done)));
  check.timer.expires_after(limit_);
  check.timer.async_wait([this, id](boost::system::error_code error) {
    if (!error) {
      Answer(id,
             {absl::DeadlineExceededError(
                  absl::StrCat("the job's paths did not answer within ", limit_.count(), " ms")),
              "PreflightFailed"});
    }
  });
  ++running_;
  // Detached: nothing ends a thread that waits for a dead file server.
  std::thread([this, id, gate = gate_, look = look_, paths = std::move(paths)]() {
    PreflightResult result = look(paths);
    const MutexLock lock(gate->mutex);
    if (gate->context != nullptr) {
      asio::post(*gate->context, [this, id, result = std::move(result)]() mutable {
        --running_;
        Answer(id, std::move(result));
      });
    }
  }).detach();
}

void Preflight::Answer(int64_t id, PreflightResult result) {
  const auto found = open_.find(id);
  if (found == open_.end()) {
    return;
  }
  const std::function<void(PreflightResult)> done = std::move(found->second->done);
  open_.erase(found);
  done(std::move(result));
}

}  // namespace ravel::daemon
