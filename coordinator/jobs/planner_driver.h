#pragma once

#include <cstddef>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include <absl/base/thread_annotations.h>

#include "common/mutex.h"
#include "coordinator/jobs/planner.h"

namespace ravel::coordinator {

// Planner over common/plan, with the newest plans kept, and those that somebody holds.
// Thread-safe.
class PlannerDriver : public Planner {
 public:
  absl::StatusOr<std::shared_ptr<const PlannedWorld>> Plan(const plan::JobSpec& spec,
                                                           int64_t ranks,
                                                           bool shared_memory) override;
  absl::StatusOr<RankMemory> Check(const plan::JobSpec& spec,
                                   int64_t ranks,
                                   bool shared_memory) override;
  std::shared_ptr<const PlannedWorld> Find(const std::string& digest) override;
  std::string EncodeSpec(const plan::JobSpec& spec) override;
  absl::StatusOr<plan::JobSpec> DecodeSpec(const std::string& planned) override;

 private:
  static constexpr size_t kMaxPlans = 64;

  Mutex mutex_;
  // By spec, ranks and memory; the digest of the plan.
  std::map<std::string, std::shared_ptr<const PlannedWorld>> by_key_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::string> oldest_first_ ABSL_GUARDED_BY(mutex_);
  // By digest, as long as a run holds it: a launch fetches its plan however many came after it.
  std::map<std::string, std::weak_ptr<const PlannedWorld>> held_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ravel::coordinator
