#pragma once

// Reports the memory of a trainer process: the bytes that its plan sets aside, by use, and those
// that the system counts, inside and outside of the plan's arena.

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
  std::string what;             // "weights", "data files"
  int64_t planned_bytes = -1;   // -1: no plan speaks of it
  int64_t measured_bytes = -1;  // -1: parts of the arena share addresses and are not told apart
  bool operator==(const MemoryLine&) const = default;
};

struct MemoryReport {
  // By use: what the plan sets aside. Temporaries share addresses, so the sum may exceed the arena.
  std::vector<MemoryLine> uses;
  // Proportional set size by purpose, the arena first; of the save staging what is resident. Their
  // sum is that of the process.
  std::vector<MemoryLine> process;
  int64_t process_bytes() const;
};

// Addresses and names by which mappings of the process are recognised.
struct MappedPlaces {
  int64_t arena_planned_bytes = 0;
  // A mapping that holds the begin of one of these is of the arena.
  std::vector<std::span<const std::byte>> arenas;
  std::vector<std::string> data_files;
  std::span<const std::byte> save_staging;
  std::span<const std::byte> offloaded = {};  // state outside of memory: its mapping
};

// Bytes of the pages of a range that are in memory, asked of the system. 0 where it cannot say.
int64_t ResidentBytes(std::span<const std::byte> range);

// Bytes that the plan sets aside, by use.
absl::StatusOr<std::vector<MemoryLine>> MemoryByUse(const plan::ShardingPlan& plan);
// From the text of /proc/self/smaps.
std::vector<MemoryLine> MemoryOfProcess(const std::string& smaps, const MappedPlaces& places);
// Returns the memory of this process, now.
absl::StatusOr<std::vector<MemoryLine>> MemoryOfProcess(const MappedPlaces& places);

// "by use, planned: weights 1.2 MiB, ...; process 20 MiB: arena 9 MiB of 9 MiB planned, ...".
std::string MemoryText(const MemoryReport& report);
// {"uses": [{"what", "plannedBytes", "measuredBytes"}], "process": [...], "processBytes"}.
json::Value MemoryJson(const MemoryReport& report);

}  // namespace ravel::trainer
