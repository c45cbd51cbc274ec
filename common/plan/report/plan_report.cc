// Tables of a plan, before they are text or JSON: placements and padding of each group, memory by
// category at the worst moment.

#include "common/plan/report/plan_report.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <utility>

#include <absl/strings/str_cat.h>

#include "common/check.h"
#include "common/model/bundles.h"
#include "common/model/compute_type.h"
#include "common/model/gemm_paths.h"
#include "common/model/recipes.h"
#include "common/model/tensor_cuts.h"
#include "common/plan/layout/quant_layout.h"
#include "common/plan/plan_pieces.h"

namespace ravel::plan {
namespace {

const TensorSpec& TensorOf(const ShardingPlan& plan, TensorId tensor) {
  return plan.inventory.tensors[tensor];
}

// "R,F": outermost axis first.
std::string AxesText(const Mesh& mesh, const Placements& placements) {
  std::string text;
  for (const MeshAxis& axis : mesh.axes()) {
    if (axis.name == kTensorAxis) {
      continue;  // cuts tensors, each in its own way
    }
    const bool cut = PlacementOn(placements, axis.name).in_flat_family();
    absl::StrAppend(&text, text.empty() ? "" : ",", cut ? "F" : "R");
  }
  return text;
}

void FillPlacements(const ShardingPlan& plan, GroupId group, GroupRow& row) {
  const GroupRoles& roles = plan.roles[group];
  row.parameter = AxesText(plan.mesh, roles.parameter);
  row.trainable = plan.groups[group].trainable;
  row.gradient = row.trainable ? AxesText(plan.mesh, roles.at_step) : "-";
  row.optimizer = row.trainable ? AxesText(plan.mesh, roles.stored) : "-";
}

void FillLayout(const ShardingPlan& plan, const GroupLayout& group, GroupRow& row) {
  row.tensors = static_cast<int64_t>(group.tensors.size());
  row.shard_elements = group.layout.shard_elements;
  row.padding = group.layout.padding_elements;
  int64_t cursor = 0;
  for (size_t i = 0; i < group.tensors.size(); ++i) {
    const TensorSpec& tensor = TensorOf(plan, group.tensors[i]);
    row.elements += ItemElements(tensor);
    row.atom = std::max(row.atom, AtomElements(tensor));
    row.largest_gap = std::max(row.largest_gap, group.tensor_offsets[i] - cursor);
    cursor = group.tensor_offsets[i] + ItemElements(tensor);
  }
  row.largest_gap = std::max(row.largest_gap, group.layout.total_elements() - cursor);
}

// Per rank: blocks in common memory are shared by the ranks of a replica.
int64_t ShareOf(const ShardingPlan& plan, const ProgramBuffer& buffer) {
  const int64_t bytes = ArenaBytes(buffer);
  return buffer.memory == MemoryKind::kCommon ? DivCeil(bytes, plan.lanes.width()) : bytes;
}

}  // namespace

double GroupRow::padding_percent() const {
  return elements == 0 ? 0.0 : 100.0 * static_cast<double>(padding) / static_cast<double>(elements);
}

std::vector<GroupRow> GroupTable(const ShardingPlan& plan) {
  IdVector<GroupId, GroupRow> rows(plan.groups.size());
  std::map<UnitId, std::vector<GroupId>> of_unit;
  for (const GroupId g : plan.groups.ids()) {
    of_unit[plan.groups[g].unit].push_back(g);
  }
  const IdVector<GroupId, WireBytes> wire = WireTable(plan);
  for (const auto& [unit, groups] : of_unit) {
    for (size_t i = 0; i < groups.size(); ++i) {
      GroupRow& row = rows[groups[i]];
      row.unit = plan.inventory.units[unit].name;
      row.name = groups.size() == 1 ? row.unit : absl::StrCat(row.unit, ":", i);
      const Recipe recipe = plan.groups[groups[i]].recipe;
      row.weight_type =
          recipe != Recipe::kNone ? RecipeName(recipe) : ComputeName(plan.options.weight_type);
      row.wire = wire[groups[i]];
      FillPlacements(plan, groups[i], row);
      FillLayout(plan, plan.groups[groups[i]], row);
    }
  }
  for (const BufferId b : plan.buffers.ids()) {
    const ProgramBuffer& buffer = plan.buffers[b];
    if (buffer.group >= 0) {
      const bool staged =
          buffer.kind == BufferKind::kStaging || buffer.kind == BufferKind::kReceive;
      rows[buffer.group].buffers.push_back(
          {.name = buffer.name,
           .memory = MemoryKindName(buffer.memory),
           .address = BufferOffset(plan, b, 0),
           .bytes = buffer.bytes,
           .rounded_type = staged && buffer.dtype != kGradientType ? "bf16" : ""});
    }
  }
  return rows;
}

const char* CategoryName(MemoryCategory category) {
  switch (category) {
    case MemoryCategory::kPersistent:
      return "persistent";
    case MemoryCategory::kWindows:
      return "windows";
    case MemoryCategory::kActivations:
      return "activations";
    case MemoryCategory::kWorkspace:
      return "workspace";
    case MemoryCategory::kAlignment:
      return "alignment";
  }
  return "unknown";
}

MemoryCategory CategoryOf(BufferKind kind) {
  switch (kind) {
    case BufferKind::kMainWeight:
    case BufferKind::kModelWeight:
    case BufferKind::kState:
    case BufferKind::kStateScale:
    case BufferKind::kMainGrad:
    case BufferKind::kLocalGrad:
    case BufferKind::kOuterGrad:
    case BufferKind::kFullGrad:
    case BufferKind::kAmax:
    case BufferKind::kAmaxPart:
    case BufferKind::kAmaxReceive:
    case BufferKind::kDelayedScales:
    case BufferKind::kAmaxFlags:
    case BufferKind::kLeaves:
      return MemoryCategory::kPersistent;
    case BufferKind::kGathered:
    case BufferKind::kStaging:
    case BufferKind::kReceive:
    case BufferKind::kOuterReceive:
    case BufferKind::kTensorSum:
    case BufferKind::kTensorReceive:
      return MemoryCategory::kWindows;
    case BufferKind::kSaved:
    case BufferKind::kRemade:
    case BufferKind::kShared:
    case BufferKind::kAddend:
    case BufferKind::kAddendReceive:
    case BufferKind::kRows:
    case BufferKind::kInputGradient:
      return MemoryCategory::kActivations;
    case BufferKind::kWorkspace:
      return MemoryCategory::kWorkspace;
  }
  return MemoryCategory::kWorkspace;
}

int64_t MemoryReport::category_bytes(MemoryCategory category) const {
  int64_t bytes = 0;
  for (const Line& line : lines) {
    bytes += line.category == category ? line.bytes : 0;
  }
  return bytes;
}

IdVector<GroupId, std::string> GroupNames(const ShardingPlan& plan) {
  std::map<UnitId, int> counts;
  for (const GroupLayout& group : plan.groups) {
    ++counts[group.unit];
  }
  IdVector<GroupId, std::string> names;
  std::map<UnitId, int> seen;
  for (const GroupLayout& group : plan.groups) {
    const std::string& unit = plan.inventory.units[group.unit].name;
    const int at = seen[group.unit]++;
    names.push_back(counts[group.unit] == 1 ? unit : absl::StrCat(unit, ":", at));
  }
  return names;
}

int64_t PeakBytes(const ShardingPlan& plan) {
  return plan.memory.private_bytes + plan.memory.symmetric_bytes +
         DivCeil(plan.memory.common_bytes, plan.lanes.width()) +
         OffloadOf(plan.buffers, plan.groups, plan.options).window_bytes;
}

MemoryReport ReportMemory(const ShardingPlan& plan) {
  std::map<std::pair<MemoryCategory, std::string>, int64_t> bytes;
  const auto add = [&](const ProgramBuffer& buffer) {
    MemoryCategory category = CategoryOf(buffer.kind);
    std::string what = BufferLabel(plan.options, buffer);
    if (buffer.persistent && category == MemoryCategory::kWindows) {
      // A resident gathered buffer is where the weights are; kept staging is a gradient.
      category = MemoryCategory::kPersistent;
      what = buffer.memory == MemoryKind::kCommon && buffer.dtype == DType::kF32
                 ? BufferKindName(BufferKind::kMainWeight)
                 : absl::StrCat("resident ", what);
    }
    bytes[{category, what}] += ShareOf(plan, buffer);
  };
  for (const ProgramBuffer& buffer : plan.buffers) {
    if (buffer.persistent && buffer.inside < 0 && buffer.memory != MemoryKind::kOffload) {
      add(buffer);
    }
  }
  for (const MemoryKind memory :
       {MemoryKind::kPrivate, MemoryKind::kSymmetric, MemoryKind::kCommon}) {
    const bool any =
        std::any_of(plan.buffers.begin(), plan.buffers.end(), [&](const ProgramBuffer& buffer) {
          return buffer.memory == memory && !buffer.persistent;
        });
    if (!any) {
      continue;  // finding a peak is the dear part of a report
    }
    const absl::StatusOr<PeakCut> peak = FindPeak(plan.buffers, plan.programs, memory);
    CHECK_MSG(peak.ok(), "a checked plan has lifetimes");
    for (const BufferId id : peak->buffers) {
      add(plan.buffers[id]);
    }
  }
  MemoryReport report = {.lines = {},
                         .total_bytes = PeakBytes(plan),
                         .offload = OffloadOf(plan.buffers, plan.groups, plan.options)};
  if (report.offload.window_bytes > 0) {
    bytes[{MemoryCategory::kWindows, "offload"}] = report.offload.window_bytes;
  }
  int64_t explained = 0;
  for (const auto& [key, size] : bytes) {
    report.lines.push_back({.category = key.first, .what = key.second, .bytes = size});
    explained += size;
  }
  std::stable_sort(report.lines.begin(),
                   report.lines.end(),
                   [](const MemoryReport::Line& a, const MemoryReport::Line& b) {
                     return a.category != b.category ? a.category < b.category : a.bytes > b.bytes;
                   });
  if (report.total_bytes > explained) {
    report.lines.push_back({.category = MemoryCategory::kAlignment,
                            .what = "rounding, packing",
                            .bytes = report.total_bytes - explained});
  }
  return report;
}

RecipeReport ReportRecipe(const ShardingPlan& plan) {
  RecipeReport report;
  for (const TensorSpec& tensor : plan.inventory.tensors) {
    const bool of_layer = plan.inventory.units[tensor.unit].kind == UnitKind::kLayer;
    if (tensor.recipe != Recipe::kNone) {
      report.recipe = RecipeName(tensor.recipe);
      ++report.matrices;
      report.parameters += ElementCount(tensor.shape);
    } else if (of_layer && tensor.trainable && tensor.shape.size() == 2) {
      ++report.kept;
    }
  }
  if (report.matrices > 0) {
    report.path = GemmPathName(plan.options.gemm_path);
    report.emulated = IsEmulation(plan.options.gemm_path);
    report.decodes = DecodesOperands(plan.options.gemm_path);
    if (MayAccumulateFast(plan.options.gemm_path)) {
      report.fast_accumulation = FastAccumulationName(plan.options.fast_accumulation);
    }
    report.amax_bytes = QuantLayoutOf(plan.inventory).words * DTypeBytes(DType::kU32);
  }
  return report;
}

}  // namespace ravel::plan
