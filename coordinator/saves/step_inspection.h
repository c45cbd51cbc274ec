#pragma once

// May a committed step be restored from, and if not: is it damaged, or can it not be read now? Only
// bytes that were read twice and contradict their checksums or each other prove damage. What is
// missing, short or unreadable proves nothing: a mount that lags looks the same.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "common/status.h"
#include "common/store/object_store.h"
#include "coordinator/saves/saves.h"

namespace ravel::coordinator {

enum class StepCondition {
  kGood,
  kDamaged,     // proven by two reads
  kUnreadable,  // something is missing, short, or answers with an error; may pass
};
struct StepInspection {
  StepCondition condition = StepCondition::kGood;
  std::string reason = {};  // "manifest.pb: checksum is not COMMIT's"
};

// COMMIT, manifest, sizes and headers; with `deep` also every byte. A step that looks damaged is
// read a second time.
enum class InspectionDepth { kQuick, kDeep };
StepInspection InspectStep(const store::ObjectStore& store,
                           int64_t step,
                           InspectionDepth depth = InspectionDepth::kQuick);

// Which steps a restore may take.
struct RestoreWindow {
  std::string job_uid;          // its own steps, and those up to `committed_step`
  int64_t committed_step = -1;  // the job's newest commit as recorded; -1: none
  bool has_commit = false;      // it has, or had, commits
};
struct RestoreChoice {
  int64_t step = -1;  // -1: the job has no commit and its folder holds none of its own
  std::string directory = {};
  // Why `step` is below the recorded commit: each newer step and its proven damage.
  std::string fallback_reason = {};
};
// The newest step of the job that is good; damage that was proven is marked BAD. DataLoss, naming
// each step and why, when all are damaged; Unavailable when a step that is newer than every good
// one, or the recorded one, cannot be read: progress never falls because of a read that failed.
absl::StatusOr<RestoreChoice> ChooseRestore(store::ObjectStore& store, const RestoreWindow& window);

}  // namespace ravel::coordinator
