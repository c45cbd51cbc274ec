#include "coordinator/jobs/job_start.h"

#include <utility>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_replace.h>

#include "common/time_text.h"

namespace ravel::coordinator {

namespace {

// Data first, which may take hours, then the program, then the state.
int StageOf(const TrainerSlot& slot) {
  if (slot.phase == "waiting") {
    return 3;
  }
  if (slot.phase == "restoring") {
    return 2;
  }
  return slot.phase == "starting" ? 1 : 0;  // launching, fetching_data, or not heard of
}

// True if the first one has further to go: bytes of different stages do not compare.
bool IsBehind(const TrainerSlot& a, const TrainerSlot& b) {
  return std::pair(StageOf(a), a.moved_bytes) < std::pair(StageOf(b), b.moved_bytes);
}

}  // namespace

std::string WhatStarts(const JobRun& run) {
  if (run.failure.has_value()) {
    return "";
  }
  if (run.phase == RunPhase::kPreparing) {
    return "its checkpoints are looked at, and it is planned";
  }
  if (run.phase != RunPhase::kBootstrapping || run.AllReady() || run.slots.empty()) {
    return "";
  }
  size_t ready = 0;
  size_t last = run.slots.size();  // of those that are not ready, the one with the longest way
  for (size_t rank = 0; rank < run.slots.size(); ++rank) {
    const TrainerSlot& slot = run.slots[rank];
    ready += slot.ready ? 1 : 0;
    if (!slot.ready && (last == run.slots.size() || IsBehind(slot, run.slots[last]))) {
      last = rank;
    }
  }
  const TrainerSlot& slot = run.slots[last];
  std::string text = absl::StrCat(ready,
                                  " of ",
                                  run.slots.size(),
                                  " ranks are ready; the last, rank ",
                                  last,
                                  " on ",
                                  slot.place.node_id);
  const std::string& doing = slot.phase.empty() ? slot.state : slot.phase;
  if (!doing.empty()) {
    absl::StrAppend(&text, ": ", absl::StrReplaceAll(doing, {{"_", " "}}));
  }
  if (slot.moved_bytes > 0) {
    absl::StrAppend(&text, ", ", FormatBytes(slot.moved_bytes), " so far");
  }
  return text;
}

}  // namespace ravel::coordinator
