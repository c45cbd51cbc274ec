// JobRules: how a job is split, and which tensors are frozen. Names of strategies come from the
// planner's table, so a new strategy needs no change here; whether a choice has placements at all
// is asked of the planner with a small mesh.

#include <algorithm>
#include <bit>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>

#include "common/model/freeze.h"
#include "common/model/model_inventory.h"
#include "common/name_suggestion.h"
#include "common/plan/layout/strategy_table.h"
#include "common/plan/program/step_program.h"
#include "coordinator/api/field_rules_proto.h"
#include "coordinator/api/job_rules_proto.h"

namespace ravel {
namespace {

std::string NameOf(plan::Strategy strategy) {
  return std::string(plan::RowOf(strategy).name);
}

// Checks that the placements of this choice exist, for a tensor that nothing else cuts.
absl::Status CheckChoice(const plan::StrategyChoice& choice, int64_t replicas) {
  const absl::StatusOr<plan::Mesh> mesh =
      plan::Mesh::Create({{plan::kReplicateAxis, replicas}, {plan::kShardAxis, 2}});
  RETURN_IF_ERROR(mesh.status());
  return plan::PlacementsOf(choice, {"model", {replicas * 2, 256}}, {}, *mesh).status();
}

}  // namespace

void JobRules::CheckParallelism() {
  v1::ParallelismSpec& parallelism = *job().mutable_parallelism();
  CheckStrategy();
  constexpr plan::RecomputePolicy kPolicies[] = {plan::RecomputePolicy::kNone,
                                                 plan::RecomputePolicy::kNorm,
                                                 plan::RecomputePolicy::kMlp,
                                                 plan::RecomputePolicy::kBlock};
  constexpr plan::WireType kWires[] = {plan::WireType::kF32, plan::WireType::kBF16};
  constexpr plan::Transport kTransports[] = {
      plan::Transport::kAuto, plan::Transport::kShm, plan::Transport::kGloo};
  using Spec = v1::ParallelismSpec;
  spec().recompute = kPolicies[ChosenIndex(parallelism, Spec::kRecomputeFieldNumber)];
  spec().gradient_wire = kWires[ChosenIndex(parallelism, Spec::kGradientWireFieldNumber)];
  spec().transport = kTransports[ChosenIndex(parallelism, Spec::kTransportFieldNumber)];
  spec().communication_blocks = parallelism.communication_blocks();
  spec().allow_padding = parallelism.allow_padding();
  spec().gather_window_bytes = SizeOf(parallelism.gather_window());
  spec().staging_window_bytes = SizeOf(parallelism.staging_window());
}

void JobRules::CheckStrategy() {
  v1::ParallelismSpec& parallelism = *job().mutable_parallelism();
  const std::string path = "spec.parallelism.";
  if (parallelism.strategy().empty()) {
    parallelism.set_strategy("optim_grads_params");
  }
  const absl::StatusOr<plan::NamedStrategy> named = plan::FindStrategy(parallelism.strategy());
  if (!named.ok()) {
    const std::string message(named.status().message());
    std::vector<std::string> names;
    for (const plan::NamedStrategy& one : plan::NamedStrategies()) {
      names.emplace_back(one.name);
    }
    const std::string near = SuggestName(parallelism.strategy(), names);
    Fail(path + "strategy",
         absl::StrCat(message.substr(message.find("expected ") + 9),
                      near.empty() ? "" : absl::StrCat(" (did you mean '", near, "'?)")),
         QuotedOrNothing(parallelism.strategy()));
    return;
  }
  parallelism.set_strategy(std::string(named->name));
  parallelism.set_replicas(parallelism.replicas() == 0 ? 1 : parallelism.replicas());
  const int64_t replicas = parallelism.replicas();
  if (replicas < 1 || !std::has_single_bit(static_cast<uint64_t>(replicas))) {
    Fail(path + "replicas", "a power of two", absl::StrCat(replicas));
    return;
  }
  if (named->two_axes && replicas < 2) {
    Fail(path + "replicas",
         absl::StrCat("2 or more with strategy ", parallelism.strategy()),
         absl::StrCat(replicas));
    return;
  }
  plan::StrategyChoice choice = named->choice;
  if (!parallelism.replicate_strategy().empty() && named->two_axes) {
    const std::string given = parallelism.replicate_strategy();
    if (given != NameOf(choice.replicate)) {
      Fail(path + "replicateStrategy",
           absl::StrCat(
               NameOf(choice.replicate), ", what strategy ", parallelism.strategy(), " says"),
           QuotedOrNothing(given));
    }
  } else if (!named->two_axes) {
    choice.replicate = parallelism.replicate_strategy() == "optim" ? plan::Strategy::kOptim
                                                                   : plan::Strategy::kNoShard;
  }
  parallelism.set_replicate_strategy(NameOf(choice.replicate));
  const absl::Status possible = CheckChoice(choice, std::max<int64_t>(replicas, 2));
  if (!possible.ok()) {
    Fail(path + "replicateStrategy",
         absl::StrCat("a strategy that goes with strategy ", parallelism.strategy()),
         absl::StrCat("'", NameOf(choice.replicate), "': ", std::string(possible.message())));
  }
  if (replicas == 1 && choice.replicate != plan::Strategy::kNoShard) {
    Fail(path + "replicateStrategy", "no_shard without replicas", NameOf(choice.replicate));
  }
  spec().strategy = choice.shard;
  spec().replicate_strategy = choice.replicate;
  spec().replicas = replicas;
}

void JobRules::CheckReplicas() {
  const int64_t replicas = spec().replicas;
  if (Failed("spec.parallelism.replicas") || Failed("spec.elastic.sizes")) {
    return;
  }
  for (const int64_t size : spec().elastic.sizes) {
    if (size % replicas != 0) {
      const bool listed = spec().elastic.sizes.size() > 1;
      Fail(listed ? "spec.elastic.sizes" : "spec.devices.count",
           absl::StrCat(listed ? "multiples of the " : "a multiple of the ",
                        replicas,
                        " replicas (parallelism.replicas)"),
           absl::StrCat(size));
      return;
    }
  }
}

void JobRules::CheckFreeze() {
  const v1::TrainingSpec& training = job().training();
  spec().freeze = {training.freeze().begin(), training.freeze().end()};
  for (int i = 0; i < training.freeze_size(); ++i) {
    if (training.freeze(i).empty()) {
      Fail(absl::StrCat("spec.training.freeze[", i, "]"), "a pattern of tensor names", "nothing");
      return;
    }
  }
  if (spec().freeze.empty() || !spec().model.has_value()) {
    return;
  }
  plan::ModelInventory inventory =
      plan::BuildInventory(*spec().model, {.sequences = 1, .sequence_tokens = 1});
  const absl::Status frozen = plan::ApplyFreeze(spec().freeze, inventory);
  if (!frozen.ok()) {
    FailAs(frozen);
  }
}

}  // namespace ravel
