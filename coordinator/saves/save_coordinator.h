#pragma once

// Tracks one job's saves that are under way, and decides on each message about them. Pure: no
// clock, no store, no messages. The controller tells it what it heard and carries out what it
// answers. A save is known by (step, epoch, save attempt); its record, once there is one, is what
// answers everything that is said about it later.

#include <compare>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "common/ckpt/manifest.h"
#include "coordinator/fleet/fleet_messages.h"
#include "coordinator/store/job_record.h"
#include "coordinator/store/job_store.h"

namespace ravel::coordinator {

struct SaveKey {
  int64_t step = 0;
  int64_t epoch = 0;
  int64_t attempt = 0;
  auto operator<=>(const SaveKey&) const = default;
};
SaveKey KeyOf(const SaveRecord& record);
std::set<std::string> SaveIds(const std::vector<SaveRecord>& saves);

// A save until its result is there.
struct PendingSave {
  std::map<int64_t, ckpt::Seal> seals;  // by writer
  int64_t sequence = 0;                 // newest request that it serves
  int64_t since_ms = 0;                 // monotonic
  bool committing = false;
};

// A save that ended without a commit, which nobody knew yet.
struct EndedSave {
  SaveKey key;
  int64_t sequence = 0;
  std::string reason;  // one word in CamelCase
  std::string message;
  int64_t rank = -1;  // whose word it was; -1: the coordinator's
};

// The answer to a seal.
struct SealAnswer {
  enum class Kind {
    kKept,       // new, or known and not decided yet
    kCommitted,  // tell the rank so
    kRefused     // tell the rank why
  };
  Kind kind = Kind::kKept;
  std::string reason = {};
  bool all_ended = false;  // of a save that was ended: no rank writes in its folder any more
};

// The answer to a rank's failed save.
struct SaveFailureAnswer {
  std::optional<EndedSave> ended;  // the first word: the save ends for all ranks
  bool skipped = false;            // new: a save that was due did not begin
  bool all_ended = false;          // no rank writes in the attempt's folder any more
};

class SaveCoordinator {
 public:
  // The saves that follow are of this epoch; what was under way in another one is forgotten. Cheap
  // when it is the same.
  void Enter(int64_t epoch, int64_t ranks);
  // The run stops: what is not being committed will never be whole.
  void DropUncommitted();
  // Nothing is under way.
  bool idle() const { return pending_.empty(); }
  const std::map<SaveKey, PendingSave>& pending() const { return pending_; }

  void OnStarted(const SaveStarted& started,
                 int64_t now_ms,
                 const std::vector<SaveRecord>& records);
  // `committed_step`: the newest of the job. A seal that was heard before changes nothing.
  SealAnswer OnSeal(int64_t rank,
                    const ckpt::Seal& seal,
                    int64_t committed_step,
                    int64_t now_ms,
                    const std::vector<SaveRecord>& records);
  SaveFailureAnswer OnFailed(int64_t rank,
                             const SaveFailed& failed,
                             const std::vector<SaveRecord>& records);
  // Saves that had no result for `timeout_ms`.
  std::vector<EndedSave> Expire(int64_t now_ms, int64_t timeout_ms);

  // The oldest save that all ranks have sealed, unless one is being committed: commits of a job
  // happen in the order of steps. It is committing from then on.
  std::optional<SaveKey> NextCommit();
  // The seals of a save that is committing.
  std::vector<ckpt::Seal> TakeSeals(const SaveKey& key);
  // The result is there. After a commit, older saves under way are of no use any more and are
  // returned.
  std::vector<EndedSave> OnResult(const SaveKey& key, bool committed);

  // True if all ranks have sealed a save of a later step.
  bool HasNewerWhole(const SaveKey& key) const;

  // Highest sequence of a save of this epoch that is committed.
  int64_t committed_sequence() const { return committed_sequence_; }
  int64_t skipped() const { return skipped_; }

  // Describes in words what an open operation waits for. `training`: the job takes steps.
  std::string WaitsFor(const OperationRecord& operation, bool training) const;

 private:
  // True when all ranks have stopped writing that save: it is forgotten.
  bool NoteEnded(std::map<SaveKey, std::set<int64_t>>::iterator stopping, int64_t rank);
  std::string PhaseOf(const SaveKey& key, const PendingSave& save) const;
  std::string RanksWithoutSeal(const PendingSave& save) const;

  int64_t epoch_ = 0;
  int64_t ranks_ = 0;
  int64_t committed_sequence_ = -1;
  std::map<SaveKey, PendingSave> pending_;
  // Saves that were ended here, and the ranks that have stopped writing them; forgotten when all
  // have.
  std::map<SaveKey, std::set<int64_t>> stopping_;
  int64_t skipped_ = 0;  // in this coordinator's life
  int64_t skipped_step_ = -1;
};

// The reason in the record of a save that trainers removed during an outage of the coordinator, as
// newer ones were whole: no failure.
inline constexpr const char* kReplacedInOutage =
    "its trainers kept newer saves while no coordinator was there";

// Durable counters of a job's saves, from its records.
struct SaveCounts {
  int64_t failed = 0;
  int64_t failed_in_a_row = 0;  // since the newest commit
  int64_t committed_ms = 0;     // wall time of the newest commit; 0: none
  std::string last_reason;      // of the newest failure after that commit
};
SaveCounts CountSaves(const std::vector<SaveRecord>& records);

struct FreshnessInput {
  const plan::CheckpointSpec* spec = nullptr;
  SaveCounts counts;
  int64_t step = 0;              // newest commit, -1: none
  int64_t trained_since_ms = 0;  // wall time since when this attempt trains
  int64_t now_ms = 0;            // wall time
};
// CheckpointFresh: false when the last save failed, or when the newest commit is older than three
// intervals and than maxAge.
JobCondition CheckpointFresh(const FreshnessInput& input);
// Puts a condition in its place; keeps the time of one whose status is the same. Whether anything
// but the time has changed.
bool SetCondition(std::vector<JobCondition>& conditions, JobCondition now);
// CheckpointTooOld or SavesFailing when the job's limits on its saves are passed. The age counts
// from the newest commit, or from the moment when this attempt began to train if that is later.
struct SaveLimit {
  std::string reason;
  std::string message;
};
std::optional<SaveLimit> PassedLimit(const FreshnessInput& input);

}  // namespace ravel::coordinator
