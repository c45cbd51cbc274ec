#include "coordinator/ctl/plan_json.h"

namespace ravel::ctl {
namespace {

int64_t PaddingElements(const plan::ShardingPlan& plan) {
  int64_t padding = 0;
  for (const plan::GroupLayout& group : plan.groups) {
    padding += group.layout.padding_elements;
  }
  return padding;
}

}  // namespace

json::Value PlanJson(const plan::ShardingPlan& plan) {
  json::Value out;
  out.Set("schemaVersion", "ravel/v1");
  out.Set("ranks", plan.ranks);
  out.Set("lanes", plan.lanes.lanes);
  out.Set("turns", plan.lanes.turns());
  out.Set("microBatch", plan.micro_batch.sequences);
  out.Set("sequenceLength", plan.micro_batch.sequence_tokens);
  out.Set("parameters", plan.inventory.parameter_count());
  out.Set("units", static_cast<int64_t>(plan.inventory.units.size()));
  out.Set("paddingElements", PaddingElements(plan));
  out.Set("arenaBytes", plan.memory.packed_bytes());
  out.Set("arenaLowerBoundBytes", plan.memory.lower_bound_bytes);
  out.Set("wireBytesPerStep", plan::WireBytesPerStep(plan));
  json::Value memory{json::Array()};
  for (const plan::MemoryLine& line : plan::MemoryTable(plan)) {
    json::Value entry;
    entry.Set("category", line.category);
    entry.Set("bytes", line.bytes);
    memory.Append(std::move(entry));
  }
  out.Set("memory", std::move(memory));
  return out;
}

}  // namespace ravel::ctl
