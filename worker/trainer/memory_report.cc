// Compares planned memory with what the kernel counts. /proc/self/smaps gives the proportional set
// size of each mapping; mappings are classified by address (arena) or by name (control block, data
// files, heap, libraries). The proportional size counts a page shared by n processes as 1/n, so the
// sum over ranks is the memory that really is in use.

#include "worker/trainer/memory_report.h"

#include <algorithm>
#include <cstdlib>
#include <sstream>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <sys/mman.h>

#include "common/check.h"
#include "common/file_writer.h"
#include "common/plan/memory/memory_ledger.h"
#include "common/plan/report/plan_printer.h"

namespace ravel::trainer {
namespace {

constexpr int64_t kPageBytes = 4096;
constexpr int64_t kMostMapsBytes = int64_t{64} << 20;

// Order of the lines of a process.
enum Purpose {
  kArena,
  kOffloaded,
  kControl,
  kDataFiles,
  kSaveStaging,
  kHeap,
  kStacks,
  kPrograms,
  kOther
};
constexpr const char* kPurposes[] = {"arena",
                                     "offloaded state",
                                     "communicator control blocks",
                                     "data files",
                                     "save staging",
                                     "heap",
                                     "main stack",
                                     "programs and libraries",
                                     "other anonymous memory"};

// One mapping of /proc/self/smaps.
struct Mapping {
  uint64_t begin = 0;
  uint64_t end = 0;
  std::string name;
};

// False for lines that are not the first of a mapping.
bool ReadHeader(const std::string& line, Mapping* mapping) {
  char* at = nullptr;
  const uint64_t begin = std::strtoull(line.c_str(), &at, 16);
  if (at == line.c_str() || *at != '-') {
    return false;
  }
  const uint64_t end = std::strtoull(at + 1, &at, 16);
  std::istringstream rest(at);
  std::string permissions, offset, device, inode, name;
  rest >> permissions >> offset >> device >> inode >> std::ws;
  std::getline(rest, name);
  *mapping = {.begin = begin, .end = end, .name = std::move(name)};
  return true;
}

bool BeginsIn(const Mapping& mapping, std::span<const std::byte> place) {
  const auto address = reinterpret_cast<uintptr_t>(place.data());
  return !place.empty() && address >= mapping.begin && address < mapping.end;
}

Purpose PurposeOf(const Mapping& mapping, const MappedPlaces& places) {
  for (const std::span<const std::byte> arena : places.arenas) {
    if (BeginsIn(mapping, arena)) {
      return kArena;
    }
  }
  if (BeginsIn(mapping, places.offloaded)) {
    return kOffloaded;
  }
  if (absl::StrContains(mapping.name, "memfd:ravel-group")) {
    return kControl;
  }
  const bool data = std::any_of(
      places.data_files.begin(), places.data_files.end(), [&](const std::string& prefix) {
        return absl::StartsWith(mapping.name, prefix);
      });
  if (data) {
    return kDataFiles;
  }
  if (mapping.name == "[heap]") {
    return kHeap;
  }
  if (mapping.name == "[stack]") {
    return kStacks;
  }
  return mapping.name.empty() || mapping.name[0] != '/' ? kOther : kPrograms;
}

json::Value LinesJson(const std::vector<MemoryLine>& lines) {
  json::Array items;
  for (const MemoryLine& line : lines) {
    json::Value item;
    item.Set("what", line.what);
    if (line.planned_bytes >= 0) {
      item.Set("plannedBytes", line.planned_bytes);
    }
    if (line.measured_bytes >= 0) {
      item.Set("measuredBytes", line.measured_bytes);
    }
    items.push_back(std::move(item));
  }
  return json::Value(std::move(items));
}

std::string LinesText(const std::vector<MemoryLine>& lines) {
  return absl::StrJoin(lines, ", ", [](std::string* out, const MemoryLine& line) {
    const bool measured = line.measured_bytes >= 0;
    absl::StrAppend(
        out, line.what, " ", plan::BytesText(measured ? line.measured_bytes : line.planned_bytes));
    if (measured && line.planned_bytes >= 0) {
      absl::StrAppend(out, " of ", plan::BytesText(line.planned_bytes), " planned");
    }
  });
}

}  // namespace

int64_t ResidentBytes(std::span<const std::byte> range) {
  const auto begin = reinterpret_cast<uintptr_t>(range.data()) / kPageBytes * kPageBytes;
  const auto end = reinterpret_cast<uintptr_t>(range.data()) + range.size();
  std::vector<unsigned char> pages((end - begin + kPageBytes - 1) / kPageBytes);
  if (range.empty() || mincore(reinterpret_cast<void*>(begin), end - begin, pages.data()) != 0) {
    return 0;
  }
  return kPageBytes * std::count_if(pages.begin(), pages.end(), [](unsigned char page) {
           return (page & 1) != 0;
         });
}

int64_t MemoryReport::process_bytes() const {
  int64_t sum = 0;
  for (const MemoryLine& line : process) {
    sum += line.measured_bytes;
  }
  return sum;
}

absl::StatusOr<std::vector<MemoryLine>> MemoryByUse(const plan::ShardingPlan& plan) {
  ASSIGN_OR_RETURN(const plan::BytesByUse planned, plan::MostAlive(plan));
  std::vector<MemoryLine> lines;
  for (size_t use = 0; use < plan::kMemoryUses; ++use) {
    if (static_cast<plan::MemoryUse>(use) == plan::MemoryUse::kOffload && planned[use] == 0) {
      continue;  // of most jobs
    }
    lines.push_back({.what = plan::MemoryUseName(static_cast<plan::MemoryUse>(use)),
                     .planned_bytes = planned[use]});
  }
  return lines;
}

std::vector<MemoryLine> MemoryOfProcess(const std::string& smaps, const MappedPlaces& places) {
  std::vector<MemoryLine> lines;
  for (const char* purpose : kPurposes) {
    lines.push_back({.what = purpose, .measured_bytes = 0});
  }
  lines[kArena].planned_bytes = places.arena_planned_bytes;
  lines[kSaveStaging].planned_bytes = static_cast<int64_t>(places.save_staging.size());
  std::istringstream text(smaps);
  std::string line;
  Mapping mapping;
  Purpose purpose = kOther;
  while (std::getline(text, line)) {
    if (ReadHeader(line, &mapping)) {
      purpose = PurposeOf(mapping, places);
    } else if (absl::StartsWith(line, "Pss:")) {
      lines[purpose].measured_bytes += std::atoll(line.c_str() + 4) * 1024;
    }
  }
  // It may share a mapping with other memory.
  const int64_t staged = std::min(ResidentBytes(places.save_staging), lines[kOther].measured_bytes);
  lines[kSaveStaging].measured_bytes = staged;
  lines[kOther].measured_bytes -= staged;
  return lines;
}

absl::StatusOr<std::vector<MemoryLine>> MemoryOfProcess(const MappedPlaces& places) {
  ASSIGN_OR_RETURN(const std::string smaps, ReadWholeFile("/proc/self/smaps", kMostMapsBytes));
  return MemoryOfProcess(smaps, places);
}

std::string MemoryText(const MemoryReport& report) {
  return absl::StrCat("by use, planned: ",
                      LinesText(report.uses),
                      "; process ",
                      plan::BytesText(report.process_bytes()),
                      ": ",
                      LinesText(report.process));
}

json::Value MemoryJson(const MemoryReport& report) {
  json::Value document;
  document.Set("uses", LinesJson(report.uses)).Set("process", LinesJson(report.process));
  document.Set("processBytes", report.process_bytes());
  return document;
}

}  // namespace ravel::trainer
