// The plan as one JSON document: groups and buffers, memory by category, wire bytes by axis,
// timeline, remedies. It holds the numbers behind the text that `ravelctl plan` prints, in bytes
// and nanoseconds without rounding, so tools need not parse tables.

#include "coordinator/ctl/plan_json.h"

#include <utility>

#include "common/model/compute_type.h"
#include "common/model/gemm_paths.h"
#include "common/plan/report/plan_report.h"
#include "common/plan/report/step_timeline.h"

namespace ravel::ctl {
namespace {

json::Value WireJson(const plan::WireBytes& wire) {
  json::Value out;
  out.Set("total", wire.total());
  json::Value shard;
  shard.Set("gathers", wire.gathers).Set("reduces", wire.reduces);
  json::Value replicate;
  replicate.Set("gathers", wire.outer_gathers).Set("reduces", wire.outer_reduces);
  out.Set("shard", std::move(shard)).Set("replicate", std::move(replicate));
  if (wire.tensor() > 0) {
    json::Value axis;
    axis.Set("gathers", wire.tensor_gathers).Set("reduces", wire.tensor_reduces);
    out.Set("tensor", std::move(axis));
  }
  return out;
}

json::Value GroupJson(const plan::GroupRow& row) {
  json::Value out;
  out.Set("unit", row.unit).Set("group", row.name).Set("dtype", row.weight_type);
  out.Set("trainable", row.trainable);
  out.Set("parameter", row.parameter).Set("gradient", row.gradient);
  out.Set("optimizer", row.optimizer);
  out.Set("tensors", row.tensors).Set("elements", row.elements);
  out.Set("shardElements", row.shard_elements).Set("paddingElements", row.padding);
  out.Set("paddingPercent", row.padding_percent()).Set("largestGapElements", row.largest_gap);
  out.Set("atomElements", row.atom).Set("wireBytesPerStep", WireJson(row.wire));
  json::Value buffers{json::Array()};
  for (const plan::BufferRow& buffer : row.buffers) {
    json::Value entry;
    entry.Set("name", buffer.name).Set("memory", buffer.memory);
    entry.Set("address", buffer.address).Set("bytes", buffer.bytes);
    if (!buffer.rounded_type.empty()) {
      entry.Set("dtype", buffer.rounded_type);
    }
    buffers.Append(std::move(entry));
  }
  out.Set("buffers", std::move(buffers));
  return out;
}

json::Value MemoryJson(const plan::MemoryReport& report) {
  json::Value out{json::Array()};
  for (const plan::MemoryReport::Line& line : report.lines) {
    json::Value entry;
    entry.Set("category", plan::CategoryName(line.category));
    entry.Set("what", line.what).Set("bytes", line.bytes);
    out.Append(std::move(entry));
  }
  return out;
}

json::Value OffloadJson(const plan::ShardingPlan& plan, const plan::OffloadFacts& facts) {
  const plan::IdVector<plan::GroupId, std::string> names = plan::GroupNames(plan);
  json::Value groups{json::Array()};
  for (const plan::GroupId group : facts.groups) {
    groups.Append(json::Value(names[group]));
  }
  json::Value out;
  out.Set("fraction", plan.options.offload_fraction).Set("bytes", facts.offloaded_bytes);
  out.Set("optimizerBytes", facts.optimizer_bytes).Set("windowBytes", facts.window_bytes);
  if (facts.host_bytes() > 0) {  // of gpu jobs
    out.Set("pinnedBytes", facts.pinned_bytes).Set("hostBytes", facts.host_bytes());
  }
  out.Set("groups", std::move(groups));
  return out;
}

json::Value TimelineJson(const PlanDocument& document) {
  const plan::ShardingPlan& plan = document.plan;
  const plan::StepTimes times = plan::PredictStep(plan, document.device);
  const plan::StepSlot slot = plan::SlotOf(plan.lanes, plan.lanes.programs() - 1);
  const plan::StepProgram& program = plan.program(slot.phase, slot.part);
  json::Value out;
  out.Set("programs", plan.lanes.programs());
  out.Set("stepNanoseconds", times.step_ns).Set("computeNanoseconds", times.compute_ns);
  out.Set("ratesKnown", document.device.known).Set("program", plan::PhaseName(slot.phase));
  json::Value instructions{json::Array()};
  const int64_t contributors = plan.lanes.Inner().LaneCount(plan.lanes.blocks ? 0 : slot.turn);
  for (const plan::TimedInstruction& at :
       plan::SimulateProgram(plan, program, document.device, contributors)) {
    const plan::Instruction& instruction = program.instructions[at.index];
    json::Value entry;
    entry.Set("op", plan::OpName(plan::LabelOf(plan.moves, instruction)));
    entry.Set("stream", plan::StreamName(instruction.stream));
    if (instruction.unit >= 0) {
      entry.Set("unit", plan.inventory.units[instruction.unit].name);
    }
    entry.Set("beginNanoseconds", at.begin_ns).Set("endNanoseconds", at.end_ns);
    instructions.Append(std::move(entry));
  }
  out.Set("instructions", std::move(instructions));
  return out;
}

json::Value FitJson(const PlanDocument& document) {
  json::Value out;
  out.Set("fits", document.fits).Set("peakBytes", plan::PeakBytes(document.plan));
  out.Set("usableBytes", document.device.usable_bytes());
  json::Value remedies{json::Array()};
  for (const plan::Remedy& remedy : document.remedies) {
    json::Value entry;
    entry.Set("change", remedy.change).Set("fits", remedy.fits);
    if (remedy.status.ok()) {
      entry.Set("peakBytes", remedy.peak_bytes).Set("savedBytes", remedy.saved_bytes);
    } else {
      entry.Set("error", std::string(remedy.status.message()));
    }
    remedies.Append(std::move(entry));
  }
  out.Set("remedies", std::move(remedies));
  return out;
}

json::Value RecipeJson(const plan::RecipeReport& recipe) {
  json::Value paths;
  for (const char* gemm : plan::kGemmClasses) {
    paths.Set(gemm, recipe.path);
  }
  json::Value entry;
  entry.Set("name", recipe.recipe).Set("gemmPaths", std::move(paths));
  entry.Set("emulated", recipe.emulated);
  if (!recipe.fast_accumulation.empty()) {
    entry.Set("fastAccum", recipe.fast_accumulation);
  }
  entry.Set("matrices", recipe.matrices).Set("parameters", recipe.parameters);
  entry.Set("keptBf16", recipe.kept).Set("amaxBytes", recipe.amax_bytes);
  return entry;
}

json::Value TypesJson(const plan::ProgramOptions& options) {
  json::Value types;
  types.Set("compute", plan::ComputeName(options.weight_type));
  types.Set("mainWeight", options.main_type == DType::kI16 ? "bf16_remainder" : "fp32");
  types.Set("gradient", "fp32");
  types.Set("moments", plan::StateTypesText(options.state_types));
  types.Set("gradientWire", options.gradient_wire == plan::WireType::kBF16 ? "bf16" : "fp32");
  return types;
}

}  // namespace

json::Value PlanJson(const PlanDocument& document) {
  const plan::ShardingPlan& plan = document.plan;
  const plan::MemoryReport report = plan::ReportMemory(plan);
  json::Value out;
  out.Set("schemaVersion", "ravel/v1").Set("digest", document.digest);
  out.Set("device", document.device.name).Set("ranks", plan.ranks);
  json::Value mesh{json::Array()};
  for (const plan::MeshAxis& axis : plan.mesh.axes()) {
    json::Value entry;
    entry.Set("axis", axis.name).Set("size", axis.size);
    mesh.Append(std::move(entry));
  }
  out.Set("mesh", std::move(mesh));
  out.Set("lanes", plan.lanes.lanes).Set("turns", plan.lanes.turns());
  out.Set("microBatchesPerLane", plan.lanes.micro_batches);
  out.Set("tensorParts", plan.options.tensor_parts);
  out.Set("tensorChunks", plan.inventory.cut.chunks);
  out.Set("microBatch", plan.micro_batch.sequences);
  out.Set("sequenceLength", plan.micro_batch.sequence_tokens);
  out.Set("weightElementBytes", DTypeBytes(plan.options.weight_type));
  out.Set("attentionWorkspaceBytes", plan.options.attention_workspace_bytes);
  out.Set("logitsChunkTokens", plan.options.logits_chunk_tokens);
  out.Set("types", TypesJson(plan.options));
  out.Set("parameters", plan.inventory.parameter_count());
  out.Set("units", static_cast<int64_t>(plan.inventory.units.size()));
  if (plan.inventory.config.layer_sharing) {
    out.Set("layerSharing", true);
  }
  if (plan.options.layer_drop > 0) {
    out.Set("layerDrop", plan.options.layer_drop);
  }
  if (const plan::RecipeReport recipe = plan::ReportRecipe(plan); recipe.matrices > 0) {
    out.Set("recipe", RecipeJson(recipe));
  }
  int64_t padding = 0;
  json::Value groups{json::Array()};
  const std::vector<plan::GroupRow> rows = plan::GroupTable(plan);
  for (size_t i = 0; i < rows.size(); ++i) {
    padding += rows[i].padding;
    json::Value group = GroupJson(rows[i]);
    if (!document.strategies.empty()) {
      const plan::UnitChoice& choice = document.strategies[plan.groups[static_cast<int>(i)].unit];
      group.Set("strategy", std::string(plan::RowOf(choice.strategies.shard).name));
      if (plan.lanes.replicas > 1) {
        group.Set("replicateStrategy", std::string(plan::RowOf(choice.strategies.replicate).name));
      }
    }
    groups.Append(std::move(group));
  }
  out.Set("paddingElements", padding);
  out.Set("arenaBytes", plan.memory.packed_bytes());
  out.Set("arenaLowerBoundBytes", plan.memory.lower_bound_bytes);
  out.Set("gatherWindowBytes", plan.options.gather_window_bytes);
  out.Set("stagingWindowBytes", plan.options.staging_window_bytes);
  out.Set("wireBytesPerStep", WireJson(plan::StepWire(plan)));
  out.Set("memory", MemoryJson(report));
  if (plan.options.offload_fraction > 0) {
    out.Set("offload", OffloadJson(plan, report.offload));
  }
  out.Set("fit", FitJson(document));
  out.Set("timeline", TimelineJson(document));
  out.Set("groups", std::move(groups));
  return out;
}

}  // namespace ravel::ctl
