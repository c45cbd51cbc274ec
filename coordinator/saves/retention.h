#pragma once

// Which steps stay, and how the others go. Only committed steps count; deletion may be interrupted
// anywhere and repeated.

#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "common/ckpt/step_layout.h"
#include "common/status.h"
#include "common/store/object_store.h"
#include "coordinator/saves/saves.h"

namespace ravel::coordinator {

inline constexpr int64_t kEveryEpoch = std::numeric_limits<int64_t>::max();

struct RetentionPolicy {
  int64_t keep_last = 3;    // >= 1
  int64_t every_steps = 0;  // also every step divisible by this; 0: none
};

// Steps that may be deleted, oldest first. Never: the newest good step, the `keep_last` newest good
// ones, pinned or BAD ones, those in `in_use` (being read, or the last one verified by a read).
// Pure.
std::vector<int64_t> StepsToDelete(std::span<const CommittedStepInfo> steps,
                                   const RetentionPolicy& policy,
                                   const std::set<int64_t>& in_use);

// DELETED is written (durable: the step is gone); then the folder gets another name and is removed.
// Pins do not count.
absl::Status DeleteStep(store::ObjectStore& store, int64_t step);
// Ends deletions that were interrupted, then deletes what the policy says. Returns the deleted
// steps.
// `gate`, if there is one, is asked right before each deletion; false: that step stays. Pins count
// until they expire, at Unix time `now_s`; expired ones are removed.
using DeletionGate = std::function<bool(int64_t step)>;
absl::StatusOr<std::vector<int64_t>> ApplyRetention(store::ObjectStore& store,
                                                    const RetentionPolicy& policy,
                                                    const std::set<int64_t>& in_use,
                                                    int64_t now_s = 0,
                                                    const DeletionGate& gate = nullptr);
// Moves every step folder above `step` that `job` did not commit, with its marks, into old-<job>/:
// a new history begins there in a folder that holds one. Withdrawn steps are removed. May be
// interrupted anywhere and repeated. Returns what moved.
absl::StatusOr<std::vector<std::string>> SetAside(store::ObjectStore& store,
                                                  const std::string& job,
                                                  int64_t step);
// Deletes the committed steps of a job that is deleted, but for pinned ones; steps of others stay.
// Ends deletions that were interrupted. May be interrupted anywhere and repeated. Returns the
// deleted steps.
absl::StatusOr<std::vector<int64_t>> RemoveStepsOf(store::ObjectStore& store,
                                                   const std::string& job,
                                                   int64_t now_s);
// Moves every step folder above `step`, with its marks, into `aside`/: what a rollback leaves
// behind. Withdrawn steps are removed. May be interrupted anywhere and repeated. Returns what
// moved.
absl::StatusOr<std::vector<std::string>> MoveStepsAbove(store::ObjectStore& store,
                                                        int64_t step,
                                                        const std::string& aside);
// Removes an attempt's folder, fine when there is none. It gets another name first: where a folder
// is renamed as a whole (a file system, a ravel-store), a coordinator that publishes the attempt at
// the same time publishes all of it or finds it gone.
absl::Status WithdrawAttempt(store::ObjectStore& store, const ckpt::AttemptKey& key);
// Removes the attempts of epochs below `end_epoch` whose names carry this tag (none: those without
// one), but for those of copies (copy_marks.h). Returns what was removed.
absl::StatusOr<std::vector<ckpt::AttemptKey>> CleanAttempts(store::ObjectStore& store,
                                                            std::optional<uint32_t> job_tag,
                                                            int64_t end_epoch = kEveryEpoch);
// Attempts of the job in epochs below `end_epoch`: nobody should write there any more. Later ones
// are those of a coordinator that knows more than this one. Those of other jobs stay.
absl::Status CleanAttemptsOf(store::ObjectStore& store,
                             const std::string& job,
                             int64_t end_epoch = kEveryEpoch);
// Steps and attempts of a job that is deleted; OK when only pinned steps are left at Unix time
// `now_s`. Never NotFound: what was listed and went meanwhile, by retention, is looked at again,
// and Unavailable when that happens too often.
absl::Status RemoveAllOf(store::ObjectStore& store, const std::string& job, int64_t now_s);

}  // namespace ravel::coordinator
