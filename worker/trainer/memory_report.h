#pragma once

// Where the memory of a trainer process is: what its plan sets aside and what the engine has bound,
// by use, and what lies outside of the plan's arena.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "common/json.h"
#include "common/plan/sharding_plan.h"
#include "common/status.h"

namespace ravel::trainer {

// Bytes of one rank.
struct MemoryLine {
  std::string what;            // "weights", "data files"
  int64_t planned_bytes = -1;  // -1: no plan speaks of it
  int64_t measured_bytes = 0;
  bool operator==(const MemoryLine&) const = default;
};

struct MemoryReport {
  // By use: what the plan sets aside, and what the engine has bound. Temporaries share addresses,
  // so the sum may exceed the arena.
  std::vector<MemoryLine> uses;
  // Proportional set size by purpose, the arena first; of the save staging what is resident. Their
  // sum is that of the process.
  std::vector<MemoryLine> process;
  int64_t process_bytes() const;
};

// What is looked for among the mappings of the process.
struct MappedPlaces {
  int64_t arena_planned_bytes = 0;
  std::vector<const void*> arenas;  // a mapping that holds one of these is of the arena
  std::vector<std::string> data_files;
  std::span<const std::byte> save_staging;
};

// By use; `bound`: per buffer of the plan (shard/bound_bytes.h).
absl::StatusOr<std::vector<MemoryLine>> MemoryByUse(
    const plan::ShardingPlan& plan, const plan::IdVector<plan::BufferId, int64_t>& bound);
// From the text of /proc/self/smaps.
std::vector<MemoryLine> MemoryOfProcess(const std::string& smaps, const MappedPlaces& places);
// Of this process, now.
absl::StatusOr<std::vector<MemoryLine>> MemoryOfProcess(const MappedPlaces& places);

// "by use, bound of planned: weights 1.2 MiB of 1.2 MiB, ...; process 20 MiB: arena ...".
std::string MemoryText(const MemoryReport& report);
// {"uses": [{"what", "plannedBytes", "measuredBytes"}], "process": [...], "processBytes"}.
json::Value MemoryJson(const MemoryReport& report);

}  // namespace ravel::trainer
