#include "common/plan/plan_printer.h"

#include <algorithm>
#include <array>
#include <cstddef>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>
#include <absl/strings/str_join.h>

namespace ravel::plan {
namespace {

const std::string& UnitName(const ShardingPlan& plan, int unit) {
  return plan.inventory.units[static_cast<size_t>(unit)].name;
}

double Percent(int64_t part, int64_t whole) {
  return whole == 0 ? 0.0 : 100.0 * static_cast<double>(part) / static_cast<double>(whole);
}

void AddMemory(const ShardingPlan& plan, std::string& text) {
  absl::StrAppend(&text, "\nmemory per rank\n");
  int64_t total = 0;
  for (const MemoryLine& line : MemoryTable(plan)) {
    absl::StrAppendFormat(&text, "  %-14s %12s\n", line.category, BytesText(line.bytes));
    total += line.bytes;
  }
  absl::StrAppendFormat(&text, "  %-14s %12s\n", "total", BytesText(total));
  absl::StrAppendFormat(
      &text,
      "  arenas: private %s, symmetric %s, common %s for all ranks of a host; %.3f x lower bound\n",
      BytesText(plan.memory.private_bytes),
      BytesText(plan.memory.symmetric_bytes),
      BytesText(plan.memory.common_bytes),
      static_cast<double>(plan.memory.packed_bytes()) /
          static_cast<double>(std::max<int64_t>(1, plan.memory.lower_bound_bytes)));
}

void AddUnits(const ShardingPlan& plan, std::string& text) {
  absl::StrAppendFormat(&text,
                        "\n%-12s %7s %12s %12s %10s %8s %12s %12s\n",
                        "unit",
                        "tensors",
                        "elements",
                        "shard",
                        "padding",
                        "%",
                        "gathered",
                        "activations");
  for (size_t unit = 0; unit < plan.groups.size(); ++unit) {
    const FlatLayout& layout = plan.groups[unit].layout;
    const UnitSpec& spec = plan.inventory.units[unit];
    absl::StrAppendFormat(
        &text,
        "%-12s %7d %12d %12d %10d %8.2f %12s %12s\n",
        spec.name,
        spec.tensors.size(),
        layout.total_elements() - layout.padding_elements,
        layout.shard_elements,
        layout.padding_elements,
        Percent(layout.padding_elements, layout.total_elements() - layout.padding_elements),
        BytesText(layout.total_elements() * 4),
        BytesText(ActivationOffsets(spec.saved).back()));
  }
}

std::string BufferText(const ShardingPlan& plan, int buffer) {
  return absl::StrFormat("%s @%d",
                         plan.buffers[static_cast<size_t>(buffer)].name,
                         plan.memory.offsets[static_cast<size_t>(buffer)]);
}

// What an instruction works on, besides its unit.
std::string ObjectText(const ShardingPlan& plan, const Instruction& at) {
  switch (at.op) {
    case OpCode::kGather:
      return absl::StrCat("-> ", BufferText(plan, at.gathered));
    case OpCode::kFree:
      return plan.buffers[static_cast<size_t>(at.freed)].name;
    case OpCode::kAllocStaging:
      return absl::StrCat("-> ", BufferText(plan, at.staging));
    case OpCode::kForward:
    case OpCode::kBackward:
      return at.borrowed_unit < 0 ? "" : absl::StrCat("with ", UnitName(plan, at.borrowed_unit));
    case OpCode::kReduceScatter:
      return at.call == 0 ? "" : absl::StrCat("call ", at.call);
    case OpCode::kStatsReduce:
    case OpCode::kDecideStep:
    case OpCode::kOptimizerStep:
    case OpCode::kEndPhase:
    case OpCode::kRecompute:
    case OpCode::kAccumulateGrad:
    case OpCode::kOuterReduce:
    case OpCode::kOuterGather:
    case OpCode::kJoinGradients:
    case OpCode::kGatherGradient:
      break;
  }
  return "";
}

}  // namespace

std::string BytesText(int64_t bytes) {
  constexpr std::array<const char*, 5> kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  if (bytes < 1024) {
    return absl::StrCat(bytes, " B");
  }
  auto value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < kUnits.size()) {
    value /= 1024;
    ++unit;
  }
  return absl::StrFormat(value < 10 ? "%.2f %s" : "%.1f %s", value, kUnits[unit]);
}

std::string PlanSummary(const ShardingPlan& plan) {
  const ModelConfig& config = plan.inventory.config;
  std::string text = absl::StrFormat(
      "%d parameters in %d units; %d rank(s), %d lanes, %d turn(s) of %d x %d tokens per lane\n",
      plan.inventory.parameter_count(),
      plan.inventory.units.size(),
      plan.ranks,
      plan.lanes.lanes,
      plan.lanes.turns(),
      plan.micro_batch.sequences,
      plan.micro_batch.sequence_tokens);
  absl::StrAppendFormat(&text,
                        "gathers %s, peers' gradients %s; windows: gather %s, staging %s\n",
                        plan.options.gather_in_place ? "in place" : "copied",
                        plan.options.read_peers_in_place ? "read in place" : "received",
                        BytesText(plan.options.gather_window_bytes),
                        BytesText(plan.options.staging_window_bytes));
  absl::StrAppendFormat(&text,
                        "wire per rank and step: %s; compute: %.3g FLOPs per token\n",
                        BytesText(WireBytesPerStep(plan)),
                        TrainingFlopsPerToken(config, plan.micro_batch.sequence_tokens));
  AddMemory(plan, text);
  AddUnits(plan, text);
  return text;
}

std::string ProgramListing(const ShardingPlan& plan, const StepProgram& program) {
  std::string text = absl::StrCat("program ", PhaseName(program.phase), "\n");
  for (size_t i = 0; i < program.instructions.size(); ++i) {
    const Instruction& at = program.instructions[i];
    std::string line = absl::StrFormat("%4d  %-8s %-14s %-10s %s",
                                       i,
                                       StreamName(at.stream),
                                       OpName(at.op),
                                       at.unit >= 0 ? UnitName(plan, at.unit) : "",
                                       ObjectText(plan, at));
    if (!at.waits.empty()) {
      absl::StrAppendFormat(&line, "  waits %s", absl::StrJoin(at.waits, ", "));
    }
    line.erase(line.find_last_not_of(' ') + 1);
    absl::StrAppend(&text, line, "\n");
  }
  return text;
}

}  // namespace ravel::plan
