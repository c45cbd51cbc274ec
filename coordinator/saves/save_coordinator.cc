// Tracks saves of one epoch by (step, epoch, attempt): started, sealed by some ranks, sealed by
// all, committing, done. Once a save has a record, the record answers everything said about it
// later; a seal may come again after any restart, and the answer must not change. Only the oldest
// save that all have sealed may commit, and a commit makes older saves useless. Everything is a
// function of what was told; time comes in as an argument.

#include "coordinator/saves/save_coordinator.h"

#include <algorithm>
#include <utility>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>

#include "common/check.h"

namespace ravel::coordinator {
namespace {

const SaveRecord* Find(const std::vector<SaveRecord>& records, const SaveKey& key) {
  // Newest first: what is asked about happened just now.
  const auto found = std::find_if(records.rbegin(), records.rend(), [&](const SaveRecord& record) {
    return KeyOf(record) == key;
  });
  return found == records.rend() ? nullptr : &*found;
}

std::string Seconds(int64_t ms) {
  return absl::StrCat((ms + 500) / 1000, " s");
}

}  // namespace

SaveKey KeyOf(const SaveRecord& record) {
  return {record.step, record.epoch, record.attempt};
}

std::set<std::string> SaveIds(const std::vector<SaveRecord>& saves) {
  std::set<std::string> ids;
  for (const SaveRecord& save : saves) {
    ids.insert(save.save_id);
  }
  return ids;
}

void SaveCoordinator::Enter(int64_t epoch, int64_t ranks) {
  ranks_ = ranks;
  if (epoch == epoch_) {
    return;
  }
  epoch_ = epoch;
  committed_sequence_ = -1;
  skipped_step_ = -1;
  pending_.clear();
  stopping_.clear();
}

void SaveCoordinator::DropUncommitted() {
  std::erase_if(pending_, [](const auto& save) { return !save.second.committing; });
}

void SaveCoordinator::OnStarted(const SaveStarted& started,
                                int64_t now_ms,
                                const std::vector<SaveRecord>& records) {
  const SaveKey key{started.step, epoch_, started.attempt};
  if (Find(records, key) != nullptr || stopping_.contains(key)) {
    return;  // it has ended already
  }
  const auto [save, is_new] = pending_.try_emplace(key);
  if (is_new) {
    save->second.since_ms = now_ms;
  }
  save->second.sequence = std::max(save->second.sequence, started.sequence);
}

SealAnswer SaveCoordinator::OnSeal(int64_t rank,
                                   const ckpt::Seal& seal,
                                   int64_t committed_step,
                                   int64_t now_ms,
                                   const std::vector<SaveRecord>& records) {
  const SaveKey key{seal.step, seal.epoch, seal.attempt};
  if (const auto stopping = stopping_.find(key); stopping != stopping_.end()) {
    const bool all_ended = NoteEnded(stopping, rank);
    const SaveRecord* record = Find(records, key);
    return {SealAnswer::Kind::kRefused,
            record == nullptr ? "the save was ended" : record->reason,
            all_ended};
  }
  if (const SaveRecord* record = Find(records, key); record != nullptr) {
    switch (record->state) {
      case SaveState::kIntended:
        return {};  // answered when its commit is through
      case SaveState::kCommitted:
        return {SealAnswer::Kind::kCommitted, ""};
      case SaveState::kDeleted:
        return {SealAnswer::Kind::kRefused, "it was committed, and deleted by retention"};
      case SaveState::kBad:
        return {SealAnswer::Kind::kRefused, "it was committed, and found to be damaged"};
      case SaveState::kRolledBack:
        return {SealAnswer::Kind::kRefused, "it was committed, and rolled back"};
      case SaveState::kFailed:
        return {SealAnswer::Kind::kRefused, record->reason};
    }
  }
  if (seal.step <= committed_step) {
    return {SealAnswer::Kind::kRefused, absl::StrCat("step ", committed_step, " is committed")};
  }
  PendingSave& save = pending_[key];
  if (save.seals.empty() && save.since_ms == 0) {
    save.since_ms = now_ms;
  }
  save.sequence = std::max(save.sequence, seal.sequence);
  if (!save.committing) {
    save.seals.emplace(rank, seal);
  }
  return {};
}

bool SaveCoordinator::NoteEnded(std::map<SaveKey, std::set<int64_t>>::iterator stopping,
                                int64_t rank) {
  stopping->second.insert(rank);
  const bool all = static_cast<int64_t>(stopping->second.size()) >= ranks_;
  if (all) {
    stopping_.erase(stopping);
  }
  return all;
}

SaveFailureAnswer SaveCoordinator::OnFailed(int64_t rank,
                                            const SaveFailed& failed,
                                            const std::vector<SaveRecord>& records) {
  SaveFailureAnswer answer;
  if (failed.skipped) {
    answer.skipped = failed.step > skipped_step_;
    skipped_step_ = std::max(skipped_step_, failed.step);
    skipped_ += answer.skipped ? 1 : 0;
    return answer;
  }
  const SaveKey key{failed.step, epoch_, failed.attempt};
  const auto stopping = stopping_.find(key);
  if (stopping != stopping_.end()) {
    answer.all_ended = NoteEnded(stopping, rank);
    return answer;
  }
  const auto pending = pending_.find(key);
  const bool committing = pending != pending_.end() && pending->second.committing;
  if (committing || Find(records, key) != nullptr) {
    return answer;  // heard before, or of a rank that has sealed it
  }
  answer.ended = EndedSave{key, failed.sequence, failed.reason, failed.message, rank};
  std::set<int64_t> ended = {rank};
  if (pending != pending_.end()) {
    answer.ended->sequence = std::max(failed.sequence, pending->second.sequence);
    for (const auto& [writer, seal] : pending->second.seals) {
      ended.insert(writer);
    }
    pending_.erase(pending);
  }
  answer.all_ended = static_cast<int64_t>(ended.size()) >= ranks_;
  if (!answer.all_ended) {
    stopping_[key] = std::move(ended);
  }
  return answer;
}

std::string SaveCoordinator::RanksWithoutSeal(const PendingSave& save) const {
  constexpr int64_t kMostNamed = 8;
  std::vector<int64_t> missing;
  for (int64_t rank = 0; rank < ranks_; ++rank) {
    if (!save.seals.contains(rank)) {
      missing.push_back(rank);
    }
  }
  const auto more = static_cast<int64_t>(missing.size()) - kMostNamed;
  missing.resize(std::min<size_t>(missing.size(), kMostNamed));
  return absl::StrCat(absl::StrJoin(missing, ", "),
                      more > 0 ? absl::StrCat(" and ", more, " more") : "");
}

std::vector<EndedSave> SaveCoordinator::Expire(int64_t now_ms, int64_t timeout_ms) {
  std::vector<EndedSave> expired;
  for (auto save = pending_.begin(); save != pending_.end();) {
    const bool complete = static_cast<int64_t>(save->second.seals.size()) == ranks_;
    if (save->second.committing || complete || now_ms - save->second.since_ms < timeout_ms) {
      ++save;
      continue;
    }
    expired.push_back({save->first,
                       save->second.sequence,
                       "SaveTimeout",
                       absl::StrCat("only ",
                                    save->second.seals.size(),
                                    " of ",
                                    ranks_,
                                    " ranks sealed step ",
                                    save->first.step,
                                    " in ",
                                    Seconds(timeout_ms),
                                    "; ranks without a seal: ",
                                    RanksWithoutSeal(save->second)),
                       -1});
    std::set<int64_t>& ended = stopping_[save->first];
    for (const auto& [writer, seal] : save->second.seals) {
      ended.insert(writer);
    }
    save = pending_.erase(save);
  }
  return expired;
}

std::optional<SaveKey> SaveCoordinator::NextCommit() {
  for (const auto& [key, save] : pending_) {
    if (save.committing) {
      return std::nullopt;
    }
  }
  for (auto& [key, save] : pending_) {
    if (ranks_ > 0 && static_cast<int64_t>(save.seals.size()) == ranks_) {
      save.committing = true;
      return key;
    }
  }
  return std::nullopt;
}

std::vector<ckpt::Seal> SaveCoordinator::TakeSeals(const SaveKey& key) {
  std::vector<ckpt::Seal> seals;
  for (auto& [writer, seal] : pending_.at(key).seals) {
    seals.push_back(std::move(seal));
  }
  return seals;
}

bool SaveCoordinator::HasNewerWhole(const SaveKey& key) const {
  return std::any_of(pending_.begin(), pending_.end(), [&](const auto& entry) {
    return entry.first.step > key.step && static_cast<int64_t>(entry.second.seals.size()) == ranks_;
  });
}

std::vector<EndedSave> SaveCoordinator::OnResult(const SaveKey& key, bool committed) {
  const auto found = pending_.find(key);
  if (found != pending_.end()) {
    committed_sequence_ =
        committed ? std::max(committed_sequence_, found->second.sequence) : committed_sequence_;
    pending_.erase(found);
  }
  std::vector<EndedSave> superseded;
  if (!committed || key.epoch != epoch_) {
    return superseded;
  }
  while (!pending_.empty() && pending_.begin()->first < key) {
    const auto& [older, save] = *pending_.begin();
    superseded.push_back({older,
                          save.sequence,
                          "Superseded",
                          absl::StrCat("step ", key.step, " was committed first"),
                          -1});
    pending_.erase(pending_.begin());
  }
  return superseded;
}

std::string SaveCoordinator::WaitsFor(const OperationRecord& operation, bool training) const {
  if (operation.state == OperationState::kSealed) {
    return absl::StrCat("committing step ", operation.step);
  }
  const auto serving = std::find_if(pending_.begin(), pending_.end(), [&](const auto& save) {
    return save.second.sequence >= operation.sequence;
  });
  if (serving != pending_.end()) {
    return PhaseOf(serving->first, serving->second);
  }
  if (!training) {
    return "not asked yet: the job does not train";
  }
  return pending_.empty()
             ? "waiting for the step boundary"
             : absl::StrCat("waiting for the save before it: ",
                            PhaseOf(pending_.begin()->first, pending_.begin()->second));
}

std::string SaveCoordinator::PhaseOf(const SaveKey& key, const PendingSave& save) const {
  if (save.committing) {
    return absl::StrCat("committing step ", key.step);
  }
  return save.seals.empty()
             ? absl::StrCat("writing step ", key.step, " on ranks ", RanksWithoutSeal(save))
             : absl::StrCat(
                   "sealing step ", key.step, ": ranks ", RanksWithoutSeal(save), " are missing");
}

SaveCounts CountSaves(const std::vector<SaveRecord>& records) {
  SaveCounts counts;
  for (const SaveRecord& record : records) {
    const bool committed = record.state == SaveState::kCommitted ||
                           record.state == SaveState::kDeleted || record.state == SaveState::kBad ||
                           record.state == SaveState::kRolledBack;
    if (committed) {
      counts.failed_in_a_row = 0;
      counts.last_reason.clear();
      counts.committed_ms = std::max(counts.committed_ms, record.created_ms);
    } else if (record.state == SaveState::kFailed && record.reason != kReplacedInOutage) {
      counts.failed += 1;
      counts.failed_in_a_row += 1;
      counts.last_reason = record.reason;
    }
  }
  return counts;
}

namespace {

int64_t AgeMs(const FreshnessInput& input) {
  return input.now_ms - std::max(input.counts.committed_ms, input.trained_since_ms);
}

}  // namespace

JobCondition CheckpointFresh(const FreshnessInput& input) {
  constexpr int64_t kIntervals = 3;
  JobCondition condition = {.type = "CheckpointFresh", .status = true};
  const int64_t limit_ms = std::max(kIntervals * input.spec->every_ms, input.spec->max_age_ms);
  if (input.counts.failed_in_a_row > 0) {
    condition.status = false;
    condition.reason = "SaveFailed";
    condition.message = absl::StrCat(input.counts.failed_in_a_row,
                                     " saves in a row failed, the last: ",
                                     input.counts.last_reason);
  } else if (limit_ms > 0 && AgeMs(input) > limit_ms) {
    condition.status = false;
    condition.reason = "TooOld";
    condition.message =
        input.step < 0
            ? absl::StrCat("nothing is committed after more than ", Seconds(limit_ms))
            : absl::StrCat(
                  "step ", input.step, " was committed more than ", Seconds(limit_ms), " ago");
  } else {
    condition.reason = input.step < 0 ? "NotDueYet" : "Committed";
    condition.message = input.step < 0 ? "" : absl::StrCat("step ", input.step, " is committed");
  }
  return condition;
}

bool SetCondition(std::vector<JobCondition>& conditions, JobCondition now) {
  const auto known = std::find_if(
      conditions.begin(), conditions.end(), [&](const auto& one) { return one.type == now.type; });
  if (known == conditions.end()) {
    conditions.push_back(std::move(now));
    return true;
  }
  if (known->status == now.status) {
    now.time_ms = known->time_ms;
  }
  const bool changed =
      known->status != now.status || known->reason != now.reason || known->message != now.message;
  *known = std::move(now);
  return changed;
}

std::optional<SaveLimit> PassedLimit(const FreshnessInput& input) {
  const int64_t most = input.spec->max_failed_saves;
  if (most > 0 && input.counts.failed_in_a_row > most) {
    return SaveLimit{"SavesFailing",
                     absl::StrCat(input.counts.failed_in_a_row,
                                  " saves in a row failed, checkpoint.maxFailedSaves is ",
                                  most,
                                  "; the last: ",
                                  input.counts.last_reason)};
  }
  if (input.spec->max_age_ms > 0 && AgeMs(input) > input.spec->max_age_ms) {
    return SaveLimit{"CheckpointTooOld",
                     absl::StrCat("no commit for ",
                                  Seconds(AgeMs(input)),
                                  ", checkpoint.maxAge is ",
                                  Seconds(input.spec->max_age_ms))};
  }
  return std::nullopt;
}

}  // namespace ravel::coordinator
