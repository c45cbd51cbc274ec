#pragma once

// Plans whose ranks compute each unit in groups, before tensors are cut: what moves between ranks
// of a tensor axis, without what they would compute.

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "common/check.h"
#include "common/model/segments.h"
#include "common/plan/check/program_checker.h"
#include "common/plan/program/program_uses.h"
#include "common/plan/sharding_plan.h"
#include "common/status.h"

namespace ravel::plan {

struct TensorPlanArgs {
  JobSpec spec;
  int64_t data_ranks = 1;
  int64_t tensor_ranks = 2;
  int64_t chunks = 1;
  bool shared_memory = true;
};

// The plan of the job on data ranks, on a mesh with a tensor axis; every rank has whole tensors.
// Checked.
inline absl::StatusOr<ShardingPlan> TensorPlan(const TensorPlanArgs& args) {
  ASSIGN_OR_RETURN(
      ShardingPlan plan,
      BuildShardingPlan(
          {.spec = args.spec, .ranks = args.data_ranks, .shared_memory = args.shared_memory}));
  plan.ranks *= args.tensor_ranks;
  plan.options.ranks = plan.ranks;
  plan.options.gather_in_place = false;
  plan.options.gather_window_bytes = 0;
  plan.options.staging_window_bytes = 0;
  plan.inventory.cut = {
      .parts = args.tensor_ranks, .degree = args.tensor_ranks, .chunks = args.chunks};
  UnitSpec& head = plan.inventory.units.back();
  // Two chunks of tokens.
  const size_t logits =
      static_cast<size_t>(FindActivation(head.workspace, "logits") - head.workspace.data());
  const int64_t chunk = DivCeil(head.workspace[logits].shape[0], 2);
  head.workspace[logits].shape[0] = chunk;
  head.workspace.push_back({"vocabulary", {3 * args.tensor_ranks, chunk}});
  std::vector<MeshAxis> axes = plan.mesh.axes();
  axes.push_back({.name = kTensorAxis, .size = args.tensor_ranks});
  ASSIGN_OR_RETURN(plan.mesh, Mesh::Create(std::move(axes)));
  RETURN_IF_ERROR(PlanPrograms(plan));
  RETURN_IF_ERROR(CheckPlan(plan));
  return plan;
}

// The steps of a pass: "attention_norm attention", "attention_residual*" where rows of all ranks
// are put together, "attention_residual+" where a sum's rows stay with their owners.
inline std::vector<std::string> StepTexts(const ShardingPlan& plan, UnitId unit, UnitPass pass) {
  const std::vector<SegmentSpec> segments = SegmentsOf(plan.inventory, unit, pass);
  std::vector<std::string> texts;
  for (const SegmentStep& step : StepsOf(plan.inventory, unit, pass)) {
    std::string text;
    for (SegmentId id = step.first; id < step.end; ++id) {
      text += (text.empty() ? "" : " ") +
              std::string(SegmentName(segments[static_cast<size_t>(id.value())].kind));
    }
    texts.push_back(text + (GathersRows(step.move)                   ? "*"
                            : step.move == SegmentMove::kScatterRows ? "+"
                                                                     : ""));
  }
  return texts;
}

}  // namespace ravel::plan
