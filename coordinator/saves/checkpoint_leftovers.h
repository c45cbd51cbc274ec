#pragma once

// Entries of a checkpoint folder beside its steps: unfinished saves, damaged folders, copies of bad
// steps, histories that were moved aside. Listed for people, and removed when old.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "common/status.h"
#include "common/store/object_store.h"

namespace ravel::coordinator {

// Folders that earlier steps move to: at the start of a new history, and by a rollback.
inline constexpr std::string_view kOldPrefix = "old-";
inline constexpr std::string_view kRolledBackPrefix = "rolled-back-";

enum class LeftoverKind {
  kUnfinishedSave,  // an attempt
  kForeignSave,     // an attempt of another job: only listed
  kUnfinishedCopy,  // of `ravelctl checkpoints copy`; copy_marks.h says when it goes
  kDamagedStep,     // a step's folder that is not loadable; removed only if it never was a step
  kBadCopy,         // bad/*.step: made room for another save of its number
  kOldHistory,      // old-UID: steps of another job that were in the way of UID
  kRolledBack,      // rolled-back-*: steps above a rollback's target; never removed by itself
};
std::string_view LeftoverKindName(LeftoverKind kind);

struct Leftover {
  LeftoverKind kind = LeftoverKind::kUnfinishedSave;
  std::string path;        // relative to the folder
  std::string reason;      // of a damaged step
  int64_t changed_ms = 0;  // Unix time; 0: not known
  bool removable = false;  // by RemoveOldLeftovers, once it is old enough
};

// `job_uid`: whose folder it is; empty: not known, and nothing is foreign or removable.
absl::StatusOr<std::vector<Leftover>> ListLeftovers(const store::ObjectStore& store,
                                                    std::string_view job_uid);

// Two weeks: enough for somebody to come back from leave and look.
inline constexpr int64_t kLeftoverAgeMs = int64_t{14} * 24 * 3600 * 1000;
// Removes what is removable and was last changed `age_ms` or more before `now_ms`, and what killed
// copies left. Returns the paths.
absl::StatusOr<std::vector<std::string>> RemoveOldLeftovers(store::ObjectStore& store,
                                                            std::string_view job_uid,
                                                            int64_t now_ms,
                                                            int64_t age_ms = kLeftoverAgeMs);

}  // namespace ravel::coordinator
