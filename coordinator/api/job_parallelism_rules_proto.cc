// JobRules: how a job is split, and which tensors are frozen. Names of strategies come from the
// planner's table, so a new strategy needs no change here; whether a choice has placements at all
// is asked of the planner with a small mesh.

#include <algorithm>
#include <bit>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>

#include "common/model/freeze.h"
#include "common/model/model_inventory.h"
#include "common/model/tensor_cuts.h"
#include "common/name_suggestion.h"
#include "common/plan/layout/strategy_table.h"
#include "common/plan/program/group_roles.h"
#include "common/plan/program/step_program.h"
#include "coordinator/api/field_rules_proto.h"
#include "coordinator/api/job_rules_proto.h"

namespace ravel {
namespace {

std::string NameOf(plan::Strategy strategy) {
  return std::string(plan::RowOf(strategy).name);
}

constexpr int kMostUnits = 256;

// Checks that these strategies run, for a tensor that nothing else cuts.
absl::Status CheckRuns(const plan::StrategyChoice& choice, const plan::PlacedTensor& tensor) {
  constexpr plan::LaneMap lanes = {.lanes = 4, .ranks = 4, .replicas = 2};
  ASSIGN_OR_RETURN(const plan::Mesh mesh, plan::MeshOf(lanes));
  return plan::CheckChoice(choice, tensor, lanes, mesh);
}

}  // namespace

void JobRules::CheckParallelism() {
  v1::ParallelismSpec& parallelism = *job().mutable_parallelism();
  CheckStrategy();
  CheckTensor();
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

std::optional<plan::NamedStrategy> JobRules::StrategyAt(const std::string& path,
                                                        std::string* text,
                                                        bool of_one_axis) {
  const absl::StatusOr<plan::NamedStrategy> named = plan::FindStrategy(*text, of_one_axis);
  if (named.ok()) {
    *text = std::string(named->name);
    return *named;
  }
  const std::string message(named.status().message());
  std::vector<std::string> names;
  for (const plan::NamedStrategy& one : plan::NamedStrategies()) {
    if (!of_one_axis || !one.two_axes) {
      names.emplace_back(one.name);
    }
  }
  const std::string near = SuggestName(*text, names);
  Fail(path,
       absl::StrCat(message.substr(message.find("expected ") + 9),
                    near.empty() ? "" : absl::StrCat(" (did you mean '", near, "'?)")),
       QuotedOrNothing(*text));
  return std::nullopt;
}

bool JobRules::CheckReplicate(const std::string& path,
                              bool inherited,
                              const plan::StrategyChoice& choice) {
  const int64_t replicas = job().parallelism().replicas();
  if (replicas == 1) {
    const bool nothing = choice.replicate == plan::Strategy::kNoShard;
    if (!nothing) {
      Fail(path, "no_shard without replicas", NameOf(choice.replicate));
    }
    return nothing;
  }
  plan::PlacedTensor tensor = {"model", {256, 256}};
  if (spec().model.has_value()) {
    const plan::ModelInventory inventory =
        plan::BuildInventory(*spec().model, {.sequences = 1, .sequence_tokens = 1});
    tensor = {inventory.tensors.front().name, inventory.tensors.front().shape};
  }
  const absl::Status runs = CheckRuns(choice, tensor);
  if (!runs.ok()) {
    const std::string within = NameOf(choice.shard);
    const std::string between = NameOf(choice.replicate);
    Fail(path,
         inherited ? absl::StrCat("a strategy that goes with replicateStrategy ", between)
                   : absl::StrCat("a strategy that goes with strategy ", within),
         absl::StrCat("'", inherited ? within : between, "': ", std::string(runs.message())));
  }
  return runs.ok();
}

void JobRules::CheckStrategy() {
  v1::ParallelismSpec& parallelism = *job().mutable_parallelism();
  const std::string path = "spec.parallelism.";
  if (parallelism.strategy().empty()) {
    parallelism.set_strategy("optim_grads_params");
  }
  const std::optional<plan::NamedStrategy> named =
      StrategyAt(path + "strategy", parallelism.mutable_strategy(), false);
  if (!named.has_value()) {
    return;
  }
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
  if (!parallelism.replicate_strategy().empty()) {
    const std::optional<plan::NamedStrategy> given =
        StrategyAt(path + "replicateStrategy", parallelism.mutable_replicate_strategy(), true);
    if (!given.has_value()) {
      return;
    }
    if (!named->two_axes) {
      choice.replicate = given->choice.shard;
    } else if (given->choice.shard != choice.replicate) {
      Fail(path + "replicateStrategy",
           absl::StrCat(
               NameOf(choice.replicate), ", what strategy ", parallelism.strategy(), " says"),
           absl::StrCat("'", NameOf(given->choice.shard), "'"));
    }
  }
  parallelism.set_replicate_strategy(NameOf(choice.replicate));
  CheckReplicate(path + "replicateStrategy", false, choice);
  spec().strategy = choice.shard;
  spec().replicate_strategy = choice.replicate;
  spec().replicas = replicas;
  CheckUnits(choice);
}

void JobRules::CheckUnits(const plan::StrategyChoice& of_job) {
  v1::ParallelismSpec& parallelism = *job().mutable_parallelism();
  if (parallelism.units_size() > kMostUnits) {
    Fail("spec.parallelism.units",
         absl::StrCat("at most ", kMostUnits, " entries"),
         absl::StrCat(parallelism.units_size()));
    return;
  }
  bool good = true;
  for (int i = 0; i < parallelism.units_size(); ++i) {
    v1::UnitStrategySpec& unit = *parallelism.mutable_units(i);
    const std::string path = absl::StrCat("spec.parallelism.units[", i, "].");
    if (unit.match().empty()) {
      Fail(path + "match", "a pattern of unit names", "nothing");
      good = false;
    }
    const bool given = !unit.replicate_strategy().empty();
    const auto shard = StrategyAt(path + "strategy", unit.mutable_strategy(), true);
    const auto replicate =
        given ? StrategyAt(path + "replicateStrategy", unit.mutable_replicate_strategy(), true)
              : std::nullopt;
    if (!shard.has_value() || given != replicate.has_value()) {
      good = false;
      continue;
    }
    plan::UnitStrategy entry = {
        .match = unit.match(), .strategy = shard->choice.shard, .replicate = {}};
    if (given) {
      entry.replicate = replicate->choice.shard;
    }
    good &= CheckReplicate(
        path + (given ? "replicateStrategy" : "strategy"),
        !given,
        {.replicate = entry.replicate.value_or(of_job.replicate), .shard = entry.strategy});
    spec().units.push_back(std::move(entry));
  }
  if (good) {
    CheckUnitNames();
  }
}

void JobRules::CheckUnitNames() {
  if (spec().units.empty() || !spec().model.has_value()) {
    return;
  }
  const absl::Status named =
      plan::ChoicesOf(spec(),
                      plan::BuildInventory(*spec().model, {.sequences = 1, .sequence_tokens = 1}))
          .status();
  if (!named.ok()) {
    FailAs(named);
  }
}

void JobRules::CheckReplicas() {
  const int64_t replicas = spec().replicas;
  const int64_t tensor = spec().tensor;
  if (Failed("spec.parallelism.replicas") || Failed("spec.parallelism.tensor") ||
      Failed("spec.elastic.sizes")) {
    return;
  }
  for (const int64_t size : spec().elastic.sizes) {
    if (size % (replicas * tensor) != 0) {
      const bool listed = spec().elastic.sizes.size() > 1;
      const std::string multiples = listed ? "multiples of the " : "a multiple of the ";
      Fail(listed ? "spec.elastic.sizes" : "spec.devices.count",
           tensor == 1 ? absl::StrCat(multiples, replicas, " replicas (parallelism.replicas)")
                       : absl::StrCat(multiples,
                                      replicas * tensor,
                                      " devices of the replicas and their tensor groups",
                                      " (parallelism.replicas times parallelism.tensor)"),
           absl::StrCat(size));
      return;
    }
  }
}

void JobRules::CheckTensor() {
  v1::ParallelismSpec& parallelism = *job().mutable_parallelism();
  if (parallelism.tensor() == 0) {
    parallelism.set_tensor(1);
  }
  spec().tensor = parallelism.tensor();
  spec().sequence_parallel = parallelism.sequence_parallel();
  const int64_t chunks = parallelism.tensor_chunks();
  spec().tensor_chunks = chunks < 1 || chunks > plan::kMostTensorChunks ? 1 : chunks;  // is named
  spec().tensor_across_nodes = parallelism.tensor_across_nodes();
  if (const absl::Status axis = plan::CheckDegrees(plan::TensorCutOf(spec())); !axis.ok()) {
    FailAs(axis);
    spec().tensor = 1;
    spec().sequence_parallel = false;
    spec().tensor_chunks = 1;
  }
  if (spec().tensor_across_nodes && spec().tensor == 1) {
    Fail("spec.parallelism.tensorAcrossNodes", "false without parallelism.tensor", "true");
  }
}

void JobRules::CheckTensorCuts() {
  if (!spec().model.has_value() || spec().tensor == 1) {
    return;
  }
  const plan::MicroBatchShape micro_batch = {.sequences = spec().micro_batch,
                                             .sequence_tokens = spec().data.sequence_length};
  const absl::Status cut = plan::CheckTensorAxis(
      plan::BuildInventory(*spec().model, micro_batch, spec().recompute, plan::TensorCutOf(spec())),
      micro_batch.sequences * micro_batch.sequence_tokens,
      false);
  if (!cut.ok()) {
    FailAs(cut);
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
