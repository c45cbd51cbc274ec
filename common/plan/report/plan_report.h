#pragma once

// What a plan says, as tables: parameter groups, memory by category. Text and JSON are made of it.

#include <cstdint>
#include <string>
#include <vector>

#include "common/plan/program/program_offload.h"
#include "common/plan/report/wire_table.h"
#include "common/plan/sharding_plan.h"

namespace ravel::plan {

struct BufferRow {
  std::string name;
  std::string memory;   // "private", "symmetric", "common", "offload"
  int64_t address = 0;  // in the arena of its memory kind, for rank 0
  int64_t bytes = 0;
  std::string rounded_type;  // "bf16" of a lane's gradient that is staged so, else empty
  bool operator==(const BufferRow&) const = default;
};

struct GroupRow {
  std::string unit;
  std::string name;         // "layers.0", or "layers.0:1" of the second of several
  std::string weight_type;  // "fp32", "bf16", "fp16", or the recipe of its codes
  bool trainable = true;
  // On the data axes, outer first: "R", "F", "R,F".
  std::string parameter;
  std::string gradient;  // at the step; "-" of frozen groups
  std::string optimizer;
  int64_t tensors = 0;
  int64_t elements = 0;  // of one rank of the tensor axis
  int64_t shard_elements = 0;
  int64_t padding = 0;
  int64_t largest_gap = 0;  // elements between two tensors or after the last
  int64_t atom = 0;         // the coarsest of its tensors, in elements
  WireBytes wire;           // per step
  std::vector<BufferRow> buffers;
  double padding_percent() const;
  bool operator==(const GroupRow&) const = default;
};
std::vector<GroupRow> GroupTable(const ShardingPlan& plan);

enum class MemoryCategory { kPersistent, kWindows, kActivations, kWorkspace, kAlignment };
const char* CategoryName(MemoryCategory category);
MemoryCategory CategoryOf(BufferKind kind);

// Bytes of one rank. What is alive at the worst moment of any program; blocks that the ranks of a
// host share count with the rank's part.
struct MemoryReport {
  struct Line {
    MemoryCategory category = MemoryCategory::kPersistent;
    std::string what;  // a buffer kind: "main weight"
    int64_t bytes = 0;
  };
  std::vector<Line> lines;  // by category, largest first
  int64_t total_bytes = 0;  // the predicted peak
  // Outside of memory, and so not in the lines, but for what is in memory at a time.
  OffloadFacts offload;
  int64_t category_bytes(MemoryCategory category) const;
};
MemoryReport ReportMemory(const ShardingPlan& plan);
// "layers.0", or "layers.0:1" of the second of several groups of a unit.
IdVector<GroupId, std::string> GroupNames(const ShardingPlan& plan);
// The predicted peak alone.
int64_t PeakBytes(const ShardingPlan& plan);

// The recipe as a plan reports it; no matrices where nothing is quantized.
struct RecipeReport {
  std::string recipe;  // RecipeName of the first quantized matrix: a plan has one recipe
  std::string path;    // how its gemms are computed: GemmPathName
  bool emulated = false;
  bool decodes = false;           // operands are decoded before gemms read them
  std::string fast_accumulation;  // FastAccumulationName; empty where the path has no such choice
  int64_t matrices = 0;
  int64_t parameters = 0;  // of these matrices
  int64_t kept = 0;        // trained matrices of layers that stay bf16
  int64_t amax_bytes = 0;  // that the ranks reduce once per step
};
RecipeReport ReportRecipe(const ShardingPlan& plan);

}  // namespace ravel::plan
