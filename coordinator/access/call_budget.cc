#include "coordinator/access/call_budget.h"

#include <algorithm>

#include <absl/strings/str_cat.h>

namespace ravel::coordinator {
namespace {

constexpr int64_t kOne = 1000;
constexpr size_t kForgetFrom = 1024;

}  // namespace

int64_t CallBudget::Filled(const Bucket& bucket, int64_t now_ms) const {
  // Longer than a second per burst, and a product that cannot overflow.
  const int64_t idle_ms =
      std::clamp<int64_t>(now_ms - bucket.at_ms, 0, rate_.burst * kOne / rate_.per_second + 1);
  return std::min(bucket.thousandths + idle_ms * rate_.per_second, rate_.burst * kOne);
}

void CallBudget::ForgetFull(int64_t now_ms) {
  if (buckets_.size() < forget_at_) {
    return;
  }
  std::erase_if(buckets_, [&](const auto& entry) {
    return Filled(entry.second, now_ms) == rate_.burst * kOne;
  });
  forget_at_ = std::max(kForgetFrom, 2 * buckets_.size());
}

absl::Status CallBudget::Take(const std::string& identity) {
  const int64_t now_ms = clock_.MonotonicMs();
  MutexLock lock(mutex_);
  ForgetFull(now_ms);
  const auto [found, first] =
      buckets_.try_emplace(identity, Bucket{.thousandths = rate_.burst * kOne, .at_ms = now_ms});
  Bucket& bucket = found->second;
  bucket.thousandths = Filled(bucket, now_ms);
  bucket.at_ms = now_ms;
  if (bucket.thousandths >= kOne) {
    bucket.thousandths -= kOne;
    return absl::OkStatus();
  }
  ++refused_;
  const int64_t wait_ms = (kOne - bucket.thousandths + rate_.per_second - 1) / rate_.per_second;
  return absl::ResourceExhaustedError(absl::StrCat(identity,
                                                   " calls more than ",
                                                   rate_.per_second,
                                                   " times a second; try again in ",
                                                   wait_ms,
                                                   " ms"));
}

int64_t CallBudget::refused() const {
  MutexLock lock(mutex_);
  return refused_;
}

}  // namespace ravel::coordinator
