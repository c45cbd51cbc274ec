#include "coordinator/jobs/planner_driver.h"

#include <absl/strings/str_cat.h>

#include "common/crypto.h"
#include "common/plan/plan_proto.h"
#include "common/plan/report/plan_fit.h"
#include "common/plan/save/save_headers.h"

namespace ravel::coordinator {
namespace {

std::string BytesOf(const Sha256Digest& digest) {
  return std::string(reinterpret_cast<const char*>(digest.data()), digest.size());
}

std::string DigestOf(const std::string& bytes) {
  return BytesOf(Sha256(bytes));
}

}  // namespace

absl::StatusOr<std::shared_ptr<const PlannedWorld>> PlannerDriver::Plan(const plan::JobSpec& spec,
                                                                        int64_t ranks,
                                                                        bool shared_memory) {
  const std::string key = absl::StrCat(DigestOf(EncodeSpec(spec)), "/", ranks, "/", shared_memory);
  {
    MutexLock lock(mutex_);
    const auto found = by_key_.find(key);
    if (found != by_key_.end()) {
      return found->second;
    }
  }
  plan::PlanRequest request{spec, ranks, shared_memory};
  ASSIGN_OR_RETURN(plan::ShardingPlan made, plan::BuildFittingPlan(request));
  auto world = std::make_shared<PlannedWorld>();
  world->bytes = plan::SerializePlan(made);
  world->digest = DigestOf(world->bytes);
  ASSIGN_OR_RETURN(const plan::SavePlan save_plan, plan::BuildSavePlan(made));
  world->save_plan_hash = BytesOf(plan::SavePlanHash(save_plan));
  world->plan = std::move(made);
  MutexLock lock(mutex_);
  std::erase_if(held_, [](const auto& entry) { return entry.second.expired(); });
  held_[world->digest] = world;
  if (by_key_.emplace(key, world).second) {
    oldest_first_.push_back(key);
  }
  if (oldest_first_.size() > kMaxPlans) {
    by_key_.erase(oldest_first_.front());
    oldest_first_.pop_front();
  }
  return std::shared_ptr<const PlannedWorld>(std::move(world));
}

std::shared_ptr<const PlannedWorld> PlannerDriver::Find(const std::string& digest) {
  MutexLock lock(mutex_);
  for (const auto& [key, world] : by_key_) {
    if (world->digest == digest) {
      return world;
    }
  }
  const auto held = held_.find(digest);
  return held == held_.end() ? nullptr : held->second.lock();
}

absl::StatusOr<RankMemory> PlannerDriver::Check(const plan::JobSpec& spec,
                                                int64_t ranks,
                                                bool shared_memory) {
  ASSIGN_OR_RETURN(const plan::ShardingPlan made,
                   plan::BuildFittingPlan({spec, ranks, shared_memory}));
  return MemoryOf(made);
}

std::string PlannerDriver::EncodeSpec(const plan::JobSpec& spec) {
  return plan::SerializeJob(spec);
}

absl::StatusOr<plan::JobSpec> PlannerDriver::DecodeSpec(const std::string& planned) {
  return plan::ParseJob(planned);
}

absl::Status CheckAllSizes(Planner& planner,
                           const plan::JobSpec& spec,
                           const std::function<absl::Status()>& give_up) {
  for (const int64_t size : spec.elastic.sizes) {
    if (size <= spec.device_count) {
      RETURN_IF_ERROR(give_up());
      RETURN_IF_ERROR(
          Annotate(planner.Check(spec, size, true).status(), absl::StrCat("at size ", size)));
    }
  }
  return absl::OkStatus();
}

}  // namespace ravel::coordinator
