#include "coordinator/saves/rollback.h"

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>

#include "common/ckpt/step_layout.h"
#include "coordinator/saves/checkpoint_leftovers.h"
#include "coordinator/saves/retention.h"

namespace ravel::coordinator {
namespace {

using store::JoinPath;
using store::ListedEntry;

// Steps are renamed into these: by rollbacks, new histories, and saves that replace a BAD step.
bool TakesSteps(const ListedEntry& folder) {
  return folder.is_directory && (absl::StartsWith(folder.name, std::string(kRolledBackPrefix)) ||
                                 absl::StartsWith(folder.name, std::string(kOldPrefix)) ||
                                 folder.name == ckpt::kBadFolder);
}

}  // namespace

absl::Status EndCutOffMoves(store::ObjectStore& store, int64_t first_step, int64_t last_step) {
  if (store.RenamesWhole()) {
    return absl::OkStatus();
  }
  ASSIGN_OR_RETURN(const std::vector<ListedEntry> root, store.List(""));
  for (const ListedEntry& folder : root) {
    if (!TakesSteps(folder)) {
      continue;
    }
    ASSIGN_OR_RETURN(const std::vector<ListedEntry> entries, store.List(folder.name));
    for (const ListedEntry& entry : entries) {
      // "step-0000000020", or "step-0000000020.e5.a1.step" of a BAD one.
      const std::string name = entry.name.substr(0, entry.name.find('.'));
      const bool there = std::any_of(
          root.begin(), root.end(), [&name](const ListedEntry& at) { return at.name == name; });
      const int64_t step = ckpt::ParseStepName(name).value_or(-1);
      if (!entry.is_directory || !there || step < first_step || step > last_step) {
        continue;
      }
      const absl::Status ended = store.PublishIfAbsent(name, JoinPath(folder.name, entry.name));
      // AlreadyExists: an earlier step of that number. NotFound: another coordinator was faster.
      if (!absl::IsAlreadyExists(ended) && !absl::IsNotFound(ended)) {
        RETURN_IF_ERROR(ended);
      }
    }
  }
  return absl::OkStatus();
}

absl::Status RollBack(store::ObjectStore& store, const RollbackTarget& target) {
  // They go first: another coordinator could publish one after the steps were listed.
  RETURN_IF_ERROR(CleanAttemptsOf(store, target.job, target.end_epoch));
  RETURN_IF_ERROR(EndCutOffMoves(store, target.step + 1, std::numeric_limits<int64_t>::max()));
  return MoveStepsAbove(
             store, target.step, absl::StrCat(std::string(kRolledBackPrefix), "e", target.epoch))
      .status();
}

}  // namespace ravel::coordinator
