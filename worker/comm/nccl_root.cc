#include "worker/comm/nccl_root.h"

#include <algorithm>
#include <cstdint>
#include <thread>
#include <utility>

#include <absl/strings/str_cat.h>
#include <sys/statvfs.h>

namespace ravel::comm {
namespace {

using std::chrono::steady_clock;

// A wait looks often at first, then every so often: most end soon.
constexpr int kEagerLooks = 2000;
constexpr std::chrono::microseconds kBetweenLooks{200};

}  // namespace

void NcclRoot::Join(std::shared_ptr<NcclPart> part) {
  {
    MutexLock lock(mutex_);
    parts_.push_back(part);
  }
  if (!failure_.Get().ok()) {
    part->group().Abort();
  }
}

void NcclRoot::Leave(const NcclPart* part) {
  MutexLock lock(mutex_);
  parts_.erase(std::remove_if(parts_.begin(),
                              parts_.end(),
                              [part](const auto& joined) { return joined.get() == part; }),
               parts_.end());
}

absl::Status NcclRoot::Fail(absl::Status status) {
  status = failure_.Set(std::move(status));
  {
    MutexLock lock(mutex_);
    failed_.NotifyAll();
  }
  AbortAll();
  return status;
}

void NcclRoot::AbortAll() {
  MutexLock abort_lock(abort_mutex_);
  std::vector<std::shared_ptr<NcclPart>> parts;
  {
    MutexLock lock(mutex_);
    parts = parts_;
  }
  std::vector<kernels::NcclGroup*> groups;
  groups.reserve(parts.size());
  for (const std::shared_ptr<NcclPart>& part : parts) {
    groups.push_back(&part->group());
  }
  kernels::NcclGroup::AbortTogether(groups);
}

absl::Status NcclRoot::Poll() {
  RETURN_IF_ERROR(failure_.Get());
  std::vector<std::shared_ptr<NcclPart>> parts;
  {
    MutexLock lock(mutex_);
    parts = parts_;
  }
  for (const std::shared_ptr<NcclPart>& part : parts) {
    if (absl::Status found = part->Poll(); !found.ok()) {
      return failure_.Set(std::move(found));
    }
  }
  return failure_.Get();
}

absl::Status NcclRoot::Wait(const Done& done, const std::function<absl::Status()>& give_up) {
  for (int look = 0;; ++look) {
    RETURN_IF_ERROR(failure_.Get());
    absl::StatusOr<bool> is_done = done();
    if (is_done.ok() && *is_done) {
      return absl::OkStatus();
    }
    const absl::Status given_up = is_done.ok() && give_up != nullptr ? give_up() : is_done.status();
    if (!given_up.ok()) {
      return Fail(given_up);
    }
    if (look < kEagerLooks) {
      std::this_thread::yield();
    } else {
      MutexLock lock(mutex_);
      failed_.WaitFor(mutex_, kBetweenLooks);
    }
  }
}

absl::Status NcclRoot::WaitFor(const Done& done) {
  return Wait(done, nullptr);
}

absl::Status NcclRoot::WaitForSetup(const std::string& what, const Done& done) {
  const steady_clock::time_point deadline = steady_clock::now() + options_.setup_timeout;
  const Done described = [&]() -> absl::StatusOr<bool> {
    absl::StatusOr<bool> is_done = done();
    return is_done.ok() ? is_done
                        : Annotate(is_done.status(), what + SmallSharedMemory("/dev/shm"));
  };
  return Wait(described, [&]() -> absl::Status {
    if (options_.keep_going != nullptr) {
      RETURN_IF_ERROR(Annotate(options_.keep_going(), what));
    }
    if (steady_clock::now() < deadline) {
      return absl::OkStatus();
    }
    return absl::DeadlineExceededError(absl::StrCat(
        "NCCL: ", what, ": not all ranks came within ", options_.setup_timeout.count(), " ms"));
  });
}

std::string SmallSharedMemory(const std::string& folder) {
  constexpr uint64_t kEnough = uint64_t{512} << 20;
  struct statvfs room = {};
  if (statvfs(folder.c_str(), &room) != 0) {
    return absl::StrCat(" (there is no ", folder, ", which NCCL may need: mount memory there)");
  }
  const uint64_t bytes = uint64_t{room.f_blocks} * room.f_frsize;
  return bytes >= kEnough ? ""
                          : absl::StrCat(" (",
                                         folder,
                                         " has ",
                                         bytes,
                                         " bytes, and NCCL may need more: mount memory there)");
}

}  // namespace ravel::comm
