#pragma once

// The coordinator's part of a save: seals in, a committed step out. Synchronous functions over a
// store that is rooted at the job's checkpoint folder; every one may be repeated after a crash at
// any point of it.

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "common/ckpt/manifest.h"
#include "common/ckpt/step_layout.h"
#include "common/plan/save/save_plan.h"
#include "common/status.h"
#include "common/store/object_store.h"

namespace ravel::coordinator {

// Facts about a save that its seals do not have; they go into the manifest.
struct SaveContext {
  std::string job;  // uid
  ckpt::AttemptKey key;
  int64_t created_ns = 0;
  std::string build;
  std::string numerics;
  int64_t virtual_ranks = 0;
  std::vector<ckpt::MeshAxisRecord> mesh;  // every axis, outermost first
  int64_t ranks = 0;                       // of it
};

// "replicate 2, shard 1": every axis of the job, as in listings of a folder.
std::string MeshText(std::span<const ckpt::MeshAxisRecord> mesh);

// All seals of a save against its plan: one per writer, the same (step, epoch, attempt) and plan
// hash, every file and chunk of the plan with its sizes, nothing else but hf/*. Errors name writer,
// file, tensor.
absl::Status VerifySeals(const plan::SavePlan& plan,
                         const SaveContext& context,
                         std::span<const ckpt::Seal> seals);

// The manifest of verified seals: chunks joined, digests added.
ckpt::Manifest BuildManifest(const plan::SavePlan& plan,
                             const SaveContext& context,
                             std::span<const ckpt::Seal> seals);

struct CommittedStepInfo {
  int64_t step = 0;
  std::string directory;  // "step-0000000020"
  ckpt::CommitRecord commit;
  bool bad = false;
  std::string bad_reason;
  bool pinned = false;
  std::vector<ckpt::PinName> pins = {};
};

// A store that does not rename a folder as a whole (ObjectStore::RenamesWhole) can have lost files
// of a step to a removal that began before the step was published. DataLoss: they were missing, and
// what was left of the step is removed.
absl::Status CheckPublished(store::ObjectStore& store, int64_t step);

// Verify, describe (manifest.pb, COMMIT; synced), publish (rename without replacing; synced).
// AlreadyExists when another save of that step, also one of another job, was committed, naming it;
// OK when this one already was. The attempt's folder is left alone on failure.
absl::StatusOr<CommittedStepInfo> CommitSave(store::ObjectStore& store,
                                             const plan::SavePlan& plan,
                                             const SaveContext& context,
                                             std::span<const ckpt::Seal> seals);

// The fate of an attempt after the coordinator, or both sides, died in the middle.
enum class SettledState {
  kCommitted,   // now, or before
  kIncomplete,  // seals are missing or COMMIT was never written; not changed
  kLost,        // another save of that step is committed
};
struct SettleResult {
  SettledState state = SettledState::kIncomplete;
  std::optional<CommittedStepInfo> committed = {};  // of kCommitted
  std::string reason = {};                          // of the others
};
// Finishes the attempt of `context.key` if its seals/ are complete or its COMMIT is there. `plan`
// is the one it was made with.
absl::StatusOr<SettleResult> SettleAttempt(store::ObjectStore& store,
                                           const plan::SavePlan& plan,
                                           const SaveContext& context);
// Publishes the attempt if its COMMIT is there and its manifest matches; needs no plan.
absl::StatusOr<SettleResult> SettleDescribedAttempt(store::ObjectStore& store,
                                                    std::string_view job,
                                                    const ckpt::AttemptKey& key);

// Attempt folders in the store, by (step, epoch, attempt).
absl::StatusOr<std::vector<ckpt::AttemptKey>> ListAttempts(const store::ObjectStore& store);
// The seals of an attempt that parse, by writer.
absl::StatusOr<std::vector<ckpt::Seal>> ReadSeals(const store::ObjectStore& store,
                                                  const ckpt::AttemptKey& key);

struct StepListing {
  std::vector<CommittedStepInfo> steps;  // newest first; BAD ones included and marked
  // Folders with a step name that are not loadable: directory and why (COMMIT missing, damaged,
  // ...).
  struct Damaged {
    std::string directory;
    std::string reason;
    bool withdrawn = false;  // its deletion was begun
  };
  std::vector<Damaged> damaged;
  // True if retention is to end the deletion of all that is not loadable: nobody's steps any more.
  bool OthersAreWithdrawn() const;
};
// Reads every COMMIT and checks it against its manifest's length; an absent root is an empty
// listing. Pins that have expired at Unix time `now_s` do not count.
absl::StatusOr<StepListing> ListSteps(const store::ObjectStore& store, int64_t now_s = 0);

// Writes bad/<step> with the reason; a step that is marked already stays as it is.
absl::Status MarkBad(store::ObjectStore& store, int64_t step, std::string_view reason);
// Removes that mark; NotFound when there is none.
absl::Status UnmarkBad(store::ObjectStore& store, int64_t step);

}  // namespace ravel::coordinator
