// A plan as the text of `ravelctl plan`: groups, memory, wire, programs. The text is compared with
// golden files, so a change here is a change of what users read.

#include "common/plan/report/plan_printer.h"

#include <algorithm>
#include <array>
#include <cstddef>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>
#include <absl/strings/str_join.h>
#include <absl/strings/str_split.h>

#include "common/model/gemm_paths.h"
#include "common/plan/layer_drop.h"
#include "common/plan/program/program_uses.h"
#include "common/plan/report/plan_report.h"

namespace ravel::plan {
namespace {

void AppendId(std::string* text, InstructionId id) {
  absl::StrAppend(text, id.value());
}

const std::string& UnitName(const ShardingPlan& plan, UnitId unit) {
  return plan.inventory.units[unit].name;
}

void AddWire(const ShardingPlan& plan, std::string& text) {
  const WireBytes wire = StepWire(plan);
  absl::StrAppendFormat(&text,
                        "wire per rank and step: %s; shard axis: gathers %s, reduces %s",
                        BytesText(wire.total()),
                        BytesText(wire.gathers),
                        BytesText(wire.reduces));
  if (plan.lanes.replicas > 1) {
    absl::StrAppendFormat(&text,
                          "; replicate axis: reduces %s, gathers %s",
                          BytesText(wire.outer_reduces),
                          BytesText(wire.outer_gathers));
  }
  if (wire.tensor() > 0) {
    absl::StrAppendFormat(&text,
                          "; tensor axis: reduces %s, gathers %s",
                          BytesText(wire.tensor_reduces),
                          BytesText(wire.tensor_gathers));
  }
  absl::StrAppend(&text, "\n");
  if (RoundsGradients(plan)) {
    const auto staged =
        std::count_if(plan.buffers.begin(), plan.buffers.end(), [](const ProgramBuffer& buffer) {
          return buffer.kind == BufferKind::kStaging && buffer.dtype != kGradientType;
        });
    absl::StrAppend(&text, "gradients travel as bf16");
    if (staged > 0) {
      absl::StrAppend(&text, ", and ", staged, " groups stage them so");
    }
    if (const int64_t rounded = RoundedInPlaceBytes(plan); rounded > 0) {
      absl::StrAppendFormat(&text,
                            "; rounding %s costs %s of memory traffic%s",
                            staged > 0 ? "the others" : "them",
                            BytesText(rounded),
                            plan.options.read_peers_in_place
                                ? ", more than peers on this host save by reading half"
                                : "");
    }
    absl::StrAppend(&text, "\n");
  }
}

// Names layers that a micro-batch does not call exactly once.
void AddLayerCalls(const ShardingPlan& plan, std::string& text) {
  if (plan.inventory.config.layer_sharing) {
    absl::StrAppend(&text, "layerSharing: every layer runs twice in a row\n");
  }
  if (plan.options.layer_drop > 0) {
    absl::StrAppend(&text,
                    "layerDrop: a micro-batch leaves out each layer with probability ",
                    LayerDropText(plan.options.layer_drop),
                    "; FLOPs and times are those to be expected; no CUDA graphs\n");
  }
}

const char* SumsText(const ShardingPlan& plan) {
  if (!MayAccumulateFast(plan.options.gemm_path)) {
    return "sums are full";
  }
  switch (plan.options.fast_accumulation) {
    case FastAccumulation::kNone:
      return "sums are full";
    case FastAccumulation::kForward:
      return "sums of forward are fast ones, others full";
    case FastAccumulation::kForwardAndInputGradient:
      return "sums of forward and of input gradients are fast ones, others full";
  }
  return "";
}

void AddRecipe(const ShardingPlan& plan, std::string& text) {
  const RecipeReport report = ReportRecipe(plan);
  if (report.matrices > 0) {
    absl::StrAppendFormat(&text,
                          "recipe %s: %d matrices of layers with %.1f M parameters are codes%s; "
                          "%s of amaxes per step\n"
                          "gemm path %s, %s, of %s: %s\n",
                          report.recipe,
                          report.matrices,
                          static_cast<double>(report.parameters) / 1e6,
                          report.kept > 0 ? absl::StrCat(", ", report.kept, " stay bf16") : "",
                          BytesText(report.amax_bytes),
                          report.path,
                          report.emulated ? "an emulation" : "of codes",
                          absl::StrJoin(kGemmClasses, ", "),
                          report.decodes
                              ? "decodes before it multiplies; it shows the numbers of a recipe, "
                                "not its speed"
                              : absl::StrCat(SumsText(plan), "; not yet run on a GPU"));
  }
}

// Adds what lies on a disk or in memory of a device's host, and what could not go there.
void AddOffload(const ShardingPlan& plan, const OffloadFacts& facts, std::string& text) {
  if (plan.options.offload_fraction <= 0) {
    return;
  }
  const IdVector<GroupId, std::string> names = GroupNames(plan);
  std::vector<std::string> offloaded;
  for (const GroupId group : facts.groups) {
    offloaded.push_back(names[group]);
  }
  absl::StrAppendFormat(&text,
                        "  offloaded to %-9s %12s of %s optimizer state (fraction %g): %s\n",
                        plan.options.offload_copies ? "the host" : "disk",
                        BytesText(facts.offloaded_bytes),
                        BytesText(facts.optimizer_bytes),
                        plan.options.offload_fraction,
                        offloaded.empty() ? "no group fits" : absl::StrJoin(offloaded, ", "));
  if (plan.options.weight_type == plan.options.main_type) {
    absl::StrAppend(&text, "  main weights stay in memory, where gathers take them from\n");
  }
  if (plan.options.offload_copies) {
    absl::StrAppendFormat(&text,
                          "  memory of the host     %12s per rank: state %s, pinned for copies %s, "
                          "kept until a step is decided %s\n",
                          BytesText(facts.host_bytes()),
                          BytesText(facts.offloaded_bytes),
                          BytesText(facts.pinned_bytes),
                          BytesText(facts.kept_bytes));
  }
}

void AddMemory(const ShardingPlan& plan, std::string& text) {
  const MemoryReport report = ReportMemory(plan);
  absl::StrAppend(&text, "\nmemory per rank\n");
  for (size_t i = 0; i < report.lines.size(); ++i) {
    const MemoryReport::Line& line = report.lines[i];
    if (i == 0 || report.lines[i - 1].category != line.category) {
      absl::StrAppendFormat(&text,
                            "  %-22s %12s\n",
                            CategoryName(line.category),
                            BytesText(report.category_bytes(line.category)));
    }
    absl::StrAppendFormat(&text, "    %-20s %12s\n", line.what, BytesText(line.bytes));
  }
  absl::StrAppendFormat(&text, "  %-22s %12s\n", "predicted peak", BytesText(report.total_bytes));
  AddOffload(plan, report.offload, text);
  absl::StrAppendFormat(
      &text,
      "  arenas: private %s, symmetric %s, common %s for all ranks of a host; %.3f x lower bound\n",
      BytesText(plan.memory.private_bytes),
      BytesText(plan.memory.symmetric_bytes),
      BytesText(plan.memory.common_bytes),
      static_cast<double>(plan.memory.packed_bytes()) /
          static_cast<double>(std::max<int64_t>(1, plan.memory.lower_bound_bytes)));
}

// The groups of consecutive units that differ in nothing but the units.
struct UnitRun {
  size_t first = 0;  // row of the first unit's first group
  size_t last = 0;   // of the last unit's
  size_t groups = 0;
  int64_t units = 0;
};

bool Alike(GroupRow a, const GroupRow& b) {
  a.unit = b.unit;
  a.name = b.name;
  a.buffers = b.buffers;
  return a == b;
}

std::vector<UnitRun> RunsOf(const std::vector<GroupRow>& rows, bool every_unit) {
  std::vector<UnitRun> runs;
  for (size_t begin = 0; begin < rows.size();) {
    size_t groups = 1;
    while (begin + groups < rows.size() && rows[begin + groups].unit == rows[begin].unit) {
      ++groups;
    }
    bool alike = !every_unit && !runs.empty() && runs.back().groups == groups;
    for (size_t i = 0; alike && i < groups; ++i) {
      alike = Alike(rows[runs.back().last + i], rows[begin + i]);
    }
    if (alike) {
      runs.back().last = begin;
      ++runs.back().units;
    } else {
      runs.push_back({.first = begin, .last = begin, .groups = groups, .units = 1});
    }
    begin += groups;
  }
  return runs;
}

void AddGroup(const GroupRow& row,
              const std::string& name,
              int64_t units,
              int name_width,
              std::string& text) {
  absl::StrAppendFormat(&text,
                        "%-*s %-5s %-5s %-4s %-4s %7d %13d %13d %11d %7.2f %9d %9d %10s\n",
                        name_width,
                        name,
                        row.weight_type,
                        row.parameter,
                        row.gradient,
                        row.optimizer,
                        row.tensors,
                        row.elements,
                        row.shard_elements,
                        row.padding,
                        row.padding_percent(),
                        row.largest_gap,
                        row.atom,
                        BytesText(row.wire.total() * units));
}

void AddGroupTitle(size_t width, std::string& text) {
  absl::StrAppendFormat(&text,
                        "\n%-*s %-5s %-5s %-4s %-4s %7s %13s %13s %11s %7s %9s %9s %10s\n",
                        static_cast<int>(width),
                        "group",
                        "dtype",
                        "param",
                        "grad",
                        "opt",
                        "tensors",
                        "elements",
                        "S",
                        "padding",
                        "%",
                        "gap",
                        "atom",
                        "wire/step");
}

void AddGroups(const ShardingPlan& plan, const SummaryOptions& options, std::string& text) {
  const std::vector<GroupRow> rows = GroupTable(plan);
  const std::vector<UnitRun> runs = RunsOf(rows, options.verbose);
  const auto name_of = [&](const UnitRun& run, size_t i) {
    const std::string& first = rows[run.first + i].name;
    return run.units == 1
               ? first
               : absl::StrCat(first, " .. ", rows[run.last + i].name, " (", run.units, ")");
  };
  size_t width = 5;
  for (const UnitRun& run : runs) {
    width = std::max(width, name_of(run, run.groups - 1).size());
  }
  AddGroupTitle(width, text);
  for (const UnitRun& run : runs) {
    for (size_t i = 0; i < run.groups; ++i) {
      const GroupRow& row = rows[run.first + i];
      AddGroup(row, name_of(run, i), run.units, static_cast<int>(width), text);
      for (size_t b = 0; options.verbose && b < row.buffers.size(); ++b) {
        const BufferRow& buffer = row.buffers[b];
        absl::StrAppendFormat(&text,
                              "    %-28s %-9s @%-14d %12s%s\n",
                              buffer.name,
                              buffer.memory,
                              buffer.address,
                              BytesText(buffer.bytes),
                              buffer.rounded_type.empty() ? "" : " " + buffer.rounded_type);
      }
    }
  }
}

std::string BufferText(const ShardingPlan& plan, BufferId buffer) {
  return absl::StrFormat("%s @%d", plan.buffers[buffer].name, plan.memory.offsets[buffer]);
}

// " attention_norm attention", " mlp_residual over tensor" of a step of a pass.
std::string StepText(const ShardingPlan& plan, const Instruction& at) {
  std::string text;
  if (at.segment < 0) {
    return text;
  }
  for (const SegmentSpec& segment : SegmentsOfStep(plan.inventory, at)) {
    absl::StrAppend(&text, " ", SegmentName(segment.kind));
  }
  return text + (at.move < 0 ? "" : absl::StrCat(" over ", kTensorAxis));
}

// What an instruction works on, besides its unit.
std::string ObjectText(const ShardingPlan& plan, const Instruction& at) {
  switch (at.op) {
    case OpCode::kGather:
      return BufferOf(at, Role::kWeights) < 0
                 ? ""
                 : absl::StrCat("-> ", BufferText(plan, BufferOf(at, Role::kWeights)));
    case OpCode::kFree:
      return plan.buffers[at.freed].name;
    case OpCode::kAllocStaging:
      return absl::StrCat("-> ", BufferText(plan, BufferOf(at, Role::kGradient)));
    case OpCode::kForward:
    case OpCode::kBackward: {
      std::string text = at.call == 0 ? "" : absl::StrCat("call ", at.call);
      for (const BufferId weights : BuffersOf(at, Role::kWeights)) {
        const UnitId unit = plan.buffers[weights].unit;
        if (unit != at.unit) {
          absl::StrAppend(&text, text.empty() ? "with " : ", with ", UnitName(plan, unit));
        }
      }
      return text + StepText(plan, at);
    }
    case OpCode::kReduce:
      return at.call == 0 || !SumsLanes(plan.moves.moves[at.move]) ? ""
                                                                   : absl::StrCat("call ", at.call);
    case OpCode::kStatsReduce:
    case OpCode::kDecideStep:
    case OpCode::kOptimizerStep:
    case OpCode::kEndPhase:
    case OpCode::kRecompute:
      return StepText(plan, at);
    case OpCode::kAccumulateGrad:
    case OpCode::kJoinGradients:
    case OpCode::kAmaxReduce:
    case OpCode::kRefreshWeights:
    case OpCode::kOffloadGradient:
      break;
  }
  return "";
}

}  // namespace

std::vector<std::string> GroupTableLines(const ShardingPlan& plan) {
  const std::vector<GroupRow> rows = GroupTable(plan);
  std::string text;
  size_t width = 5;
  for (const GroupRow& row : rows) {
    width = std::max(width, row.name.size());
  }
  AddGroupTitle(width, text);
  for (const GroupRow& row : rows) {
    AddGroup(row, row.name, 1, static_cast<int>(width), text);
  }
  return absl::StrSplit(text, '\n', absl::SkipEmpty());
}

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
  return absl::StrFormat("%.*f %s", value < 10 ? 2 : 1, value, kUnits[unit]);
}

std::string StrategiesText(const ShardingPlan& plan, const UnitChoices& choices) {
  std::vector<UnitId> units;  // with tensors
  for (const UnitId unit : choices.ids()) {
    if (!plan.inventory.units[unit].tensors.empty()) {
      units.push_back(unit);
    }
  }
  std::string text = "\nstrategies of units\n";
  for (size_t begin = 0; begin < units.size();) {
    const StrategyChoice& choice = choices[units[begin]].strategies;
    size_t end = begin + 1;
    while (end < units.size() && choices[units[end]].strategies == choice) {
      ++end;
    }
    const std::string& first = UnitName(plan, units[begin]);
    absl::StrAppendFormat(
        &text,
        "  %-34s %s\n",
        end - begin == 1
            ? first
            : absl::StrCat(first, " .. ", UnitName(plan, units[end - 1]), " (", end - begin, ")"),
        ChoiceText(choice, plan.lanes));
    begin = end;
  }
  return text;
}

std::string PlanSummary(const ShardingPlan& plan, const SummaryOptions& options) {
  const ModelConfig& config = plan.inventory.config;
  std::string text = absl::StrFormat(
      "%d parameters in %d units, %d groups; %d rank(s), %d lanes, %d turn(s) of %d x %d "
      "tokens per lane%s; %s\n",
      plan.inventory.parameter_count(),
      plan.inventory.units.size(),
      plan.groups.size(),
      plan.ranks,
      plan.lanes.lanes,
      plan.lanes.turns(),
      plan.micro_batch.sequences,
      plan.micro_batch.sequence_tokens,
      plan.lanes.micro_batches > 1
          ? absl::StrCat(", ", plan.lanes.micro_batches, " micro-batches each")
          : "",
      plan.mesh.Text());
  absl::StrAppendFormat(&text,
                        "gathers %s, peers' gradients %s; windows: gather %s, staging %s\n",
                        plan.options.gather_in_place ? "in place" : "copied",
                        plan.options.read_peers_in_place ? "read in place" : "received",
                        BytesText(plan.options.gather_window_bytes),
                        BytesText(plan.options.staging_window_bytes));
  if (plan.options.tensor_parts > 1) {
    absl::StrAppend(&text, "sums in ", plan.options.tensor_parts, " parts\n");
  }
  if (const int64_t chunks = plan.inventory.cut.chunks; chunks > 1) {
    absl::StrAppend(&text, "activations exchanged in ", chunks, " chunks of tokens\n");
  }
  AddWire(plan, text);
  absl::StrAppendFormat(
      &text,
      "compute: %.3g FLOPs per token\n",
      TrainingFlopsPerToken(config, plan.micro_batch.sequence_tokens, plan.options.layer_drop));
  AddLayerCalls(plan, text);
  AddRecipe(plan, text);
  AddMemory(plan, text);
  AddGroups(plan, options, text);
  return text;
}

std::string ProgramListing(const ShardingPlan& plan, const StepProgram& program) {
  std::string text = absl::StrCat("program ", PhaseName(program.phase), "\n");
  for (size_t i = 0; i < program.instructions.size(); ++i) {
    const Instruction& at = program.instructions[i];
    std::string line = absl::StrFormat("%4d  %-8s %-14s %-10s %s",
                                       i,
                                       StreamName(at.stream),
                                       OpName(LabelOf(plan.moves, at)),
                                       at.unit >= 0 ? UnitName(plan, at.unit) : "",
                                       ObjectText(plan, at));
    if (!at.waits.empty()) {
      absl::StrAppendFormat(&line, "  waits %s", absl::StrJoin(at.waits, ", ", AppendId));
    }
    line.erase(line.find_last_not_of(' ') + 1);
    absl::StrAppend(&text, line, "\n");
  }
  return text;
}

}  // namespace ravel::plan
