#include "tests/testing/strategy_cases.h"

#include <functional>

#include <absl/strings/str_cat.h>

#include "common/check.h"
#include "common/plan/plan_proto.h"

namespace ravel::trainer {
namespace {

const char* RecomputeName(plan::RecomputePolicy policy) {
  switch (policy) {
    case plan::RecomputePolicy::kNone:
      return "none";
    case plan::RecomputePolicy::kNorm:
      return "norm";
    case plan::RecomputePolicy::kMlp:
      return "mlp";
    case plan::RecomputePolicy::kBlock:
      return "block";
  }
  return "";
}

}  // namespace

std::vector<NamedStrategy> MatrixStrategies() {
  using plan::Strategy;
  return {{.name = "ZeRO0", .shard = Strategy::kNoShard},
          {.name = "ZeRO1", .shard = Strategy::kOptim},
          {.name = "ZeRO2", .shard = Strategy::kOptimGrads},
          {.name = "ZeRO3", .shard = Strategy::kOptimGradsParams},
          {.name = "HSDP", .replicate = Strategy::kNoShard, .replicas = 2},
          {.name = "HFSDP", .replicate = Strategy::kOptim, .replicas = 2}};
}

NamedStrategy StrategyNamed(const std::string& name) {
  for (NamedStrategy& strategy : MatrixStrategies()) {
    if (strategy.name == name) {
      return std::move(strategy);
    }
  }
  CheckFailed(__FILE__, __LINE__, "strategy", name.c_str());
}

int StrategyCase::ranks() const {
  return static_cast<int>(width * StrategyNamed(strategy).replicas * tensor);
}

std::string StrategyCase::name() const {
  return absl::StrCat(strategy,
                      "_w",
                      width,
                      "_k",
                      micro_batches,
                      "_",
                      RecomputeName(recompute),
                      small_windows ? "_small" : "_large",
                      in_place ? "_inplace" : "",
                      tensor > 1 ? absl::StrCat("_t", tensor, sequence ? "_own" : "") : "",
                      chunks > 1 ? absl::StrCat("_c", chunks) : "");
}

plan::JobSpec JobOf(const StrategyCase& tested,
                    const std::string& base,
                    const std::string& folder) {
  const NamedStrategy strategy = StrategyNamed(tested.strategy);
  plan::JobSpec spec = CaseJob(base, folder);
  spec.virtual_ranks = kMatrixLanes;
  spec.global_batch = kMatrixLanes * tested.micro_batches;
  spec.micro_batch = 1;
  spec.strategy = strategy.shard;
  spec.replicate_strategy = strategy.replicate;
  spec.replicas = strategy.replicas;
  spec.recompute = tested.recompute;
  spec.tensor = tested.tensor;
  spec.sequence_parallel = tested.sequence;
  spec.tensor_chunks = tested.chunks;
  spec.allow_padding = true;
  if (tested.small_windows) {
    spec.gather_window_bytes = 1;
    spec.staging_window_bytes = 1;
  }
  return spec;
}

RecordArgs ArgsOf(const StrategyCase& tested, const plan::JobSpec& job) {
  RecordArgs args = {.spec = job, .ranks = tested.ranks()};
  if (!tested.in_place) {
    args.adjust = [](plan::ShardingPlan& plan) -> absl::Status {
      plan.options.gather_in_place = false;
      return plan::PlanPrograms(plan);
    };
  }
  return args;
}

std::string PlanHash(const StrategyCase& tested, const plan::JobSpec& job) {
  const RecordArgs args = ArgsOf(tested, job);
  auto plan = PlanLocalRanks({.spec = args.spec, .ranks = args.ranks, .adjust = args.adjust});
  CHECK_MSG(plan.ok(), std::string(plan.status().message()).c_str());
  plan->options = {.ranks = plan->ranks};
  return absl::StrCat(absl::Hex(std::hash<std::string>()(plan::SerializePlan(*plan))));
}

}  // namespace ravel::trainer
