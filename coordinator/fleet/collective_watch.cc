// Finds out which rank holds a collective up. Beats carry, for each group, how many collectives a
// rank has issued, a hash of them, and how long it has been waiting. Two ranks with different
// hashes at one sequence number issued different things: a mismatch. Otherwise the late rank is the
// one furthest behind in a group where somebody waits; since it may itself wait in another group,
// the search follows the chain, and a cycle is a deadlock. Before an epoch is ended, the ranks
// concerned are asked for their ledgers, so that the message names the calls.

#include "coordinator/fleet/collective_watch.h"

#include <algorithm>
#include <set>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>
#include <absl/strings/str_join.h>

namespace ravel::coordinator {
namespace {

constexpr double kNoticeFactor = 2;
// One witness ends an epoch only after that long: cold storage, page faults and hot chips keep a
// healthy rank for tens of seconds. A dead process, a device or a communicator says so itself.
constexpr int64_t kLeastStallMs = 60'000;
// For the answers of ranks that were asked, of which one may be gone for good.
constexpr int64_t kMostAnswerMs = 1000;

std::string Describe(const LedgerEntry& entry) {
  const std::string amount =
      entry.element_bytes == 1
          ? absl::StrCat(entry.elements, " bytes")
          : absl::StrCat(entry.elements, " elements of ", entry.element_bytes, " bytes");
  return absl::StrCat(entry.kind,
                      " #",
                      entry.sequence,
                      " (",
                      entry.op,
                      " of ",
                      entry.unit.empty() ? "step" : entry.unit,
                      ", call ",
                      entry.call,
                      ", phase ",
                      entry.phase,
                      ", generation ",
                      entry.generation,
                      ", ",
                      amount,
                      ")");
}

}  // namespace

int64_t CollectiveLimits::stall_ms() const {
  return std::max(
      {2 * detection_ms, kLeastStallMs, static_cast<int64_t>(stall_factor * step_seconds * 1000)});
}

int64_t CollectiveLimits::notice_ms() const {
  return std::max(detection_ms, static_cast<int64_t>(kNoticeFactor * step_seconds * 1000));
}

void CollectiveWatch::OnBeat(int64_t rank, Beat beat) {
  beats_[rank] = std::move(beat);
}

void CollectiveWatch::OnLedger(int64_t rank, LedgerReport ledger) {
  ledgers_[rank] = std::move(ledger);
}

const CollectiveState* CollectiveWatch::StateOf(const Beat& beat, const GroupKey& key) {
  for (const CollectiveState& state : beat.groups) {
    if (state.group == key.first && state.first_member == key.second) {
      return &state;
    }
  }
  return nullptr;
}

CollectiveWatch::Finding CollectiveWatch::FindMismatch() const {
  struct Seen {
    int64_t rank = 0;
    uint64_t hash = 0;
  };
  std::map<std::pair<GroupKey, uint64_t>, Seen> seen;
  for (const auto& [rank, beat] : beats_) {
    for (const CollectiveState& state : beat.groups) {
      const GroupKey key = {state.group, state.first_member};
      for (const auto& [sequence, hash] : {std::pair(state.sequence, state.hash),
                                           std::pair(state.mark_sequence, state.mark_hash)}) {
        const auto [first, is_new] = seen.insert({{key, sequence}, {rank, hash}});
        if (!is_new && first->second.hash != hash) {
          return {Kind::kMismatch, key, sequence, rank, first->second.rank};
        }
      }
    }
  }
  return {};
}

bool CollectiveWatch::IsWaiting(int64_t rank, int64_t waited_ms) const {
  const auto beat = beats_.find(rank);
  return beat != beats_.end() && std::any_of(beat->second.groups.begin(),
                                             beat->second.groups.end(),
                                             [waited_ms](const CollectiveState& state) {
                                               return state.waiting_ms >= waited_ms;
                                             });
}

// Whom a rank waits for: the one that is furthest behind in the group where it waits.
CollectiveWatch::Finding CollectiveWatch::LateFor(int64_t waiter, int64_t waited_ms) const {
  Finding late;
  uint64_t least = 0;
  for (const CollectiveState& waits : beats_.at(waiter).groups) {
    if (waits.waiting_ms < waited_ms) {
      continue;
    }
    const GroupKey key = {waits.group, waits.first_member};
    for (const auto& [rank, beat] : beats_) {
      const CollectiveState* state = StateOf(beat, key);
      if (state != nullptr && state->sequence < waits.sequence &&
          (late.kind == Kind::kNone || state->sequence < least)) {
        least = state->sequence;
        late = {Kind::kStall, key, state->sequence + 1, rank, waiter};
      }
    }
  }
  return late;
}

CollectiveWatch::Finding CollectiveWatch::FindLate(int64_t waited_ms) const {
  for (const auto& [waiter, beat] : beats_) {
    Finding late = IsWaiting(waiter, waited_ms) ? LateFor(waiter, waited_ms) : Finding();
    std::set<int64_t> visited = {waiter};
    // The late rank may itself wait for another.
    while (late.kind == Kind::kStall && IsWaiting(late.rank, waited_ms)) {
      const Finding next = LateFor(late.rank, waited_ms);
      if (next.kind == Kind::kNone) {
        break;
      }
      if (!visited.insert(late.rank).second) {
        late.kind = Kind::kDeadlock;
        break;
      }
      late = next;
    }
    if (late.kind != Kind::kNone) {
      return late;
    }
  }
  return {};
}

std::vector<int64_t> CollectiveWatch::WitnessesOf(const Finding& finding) const {
  return finding.rank == finding.other ? std::vector<int64_t>{finding.rank}
                                       : std::vector<int64_t>{finding.rank, finding.other};
}

const LedgerEntry* CollectiveWatch::EntryAt(int64_t rank,
                                            const GroupKey& key,
                                            uint64_t sequence) const {
  const auto ledger = ledgers_.find(rank);
  if (ledger == ledgers_.end()) {
    return nullptr;
  }
  for (const LedgerOfGroup& group : ledger->second.groups) {
    if (group.group != key.first || group.members.empty() || group.members.front() != key.second) {
      continue;
    }
    for (const LedgerEntry& entry : group.entries) {
      if (entry.sequence == sequence) {
        return &entry;
      }
    }
  }
  return nullptr;
}

std::string CollectiveWatch::Name(int64_t rank, const GroupKey& key, uint64_t sequence) const {
  const LedgerEntry* entry = EntryAt(rank, key, sequence);
  if (entry != nullptr) {
    return Describe(*entry);
  }
  const CollectiveState* state = StateOf(beats_.at(rank), key);
  if (state != nullptr && state->sequence == sequence && !state->waiting_in.empty()) {
    return state->waiting_in;
  }
  return absl::StrCat("collective #", sequence);
}

std::string CollectiveWatch::DescribeMismatch(const Finding& finding) const {
  const std::string head =
      absl::StrCat("collectives differ between ranks in group ", finding.key.first, ": ");
  const uint64_t kept = static_cast<uint64_t>(kMost);
  uint64_t sequence = finding.sequence > kept ? finding.sequence - kept : 1;
  for (; sequence <= finding.sequence; ++sequence) {
    const LedgerEntry* own = EntryAt(finding.rank, finding.key, sequence);
    const LedgerEntry* others = EntryAt(finding.other, finding.key, sequence);
    if (own != nullptr && others != nullptr && own->hash != others->hash) {
      return absl::StrCat(head,
                          "rank ",
                          finding.other,
                          " issued ",
                          Describe(*others),
                          ", rank ",
                          finding.rank,
                          " issued ",
                          Describe(*own));
    }
  }
  return absl::StrCat(head,
                      "ranks ",
                      finding.other,
                      " and ",
                      finding.rank,
                      " at or before collective #",
                      finding.sequence,
                      " (their ledgers do not reach it)");
}

// "ranks 0,2 wait since 1.2 s"
std::string CollectiveWatch::Waits(const Finding& finding) const {
  std::vector<int64_t> ranks;
  int64_t longest_ms = 0;
  for (const auto& [rank, beat] : beats_) {
    const CollectiveState* state = StateOf(beat, finding.key);
    if (rank != finding.rank && state != nullptr && state->sequence >= finding.sequence &&
        state->waiting_ms > 0) {
      ranks.push_back(rank);
      longest_ms = std::max(longest_ms, state->waiting_ms);
    }
  }
  return absl::StrFormat("rank%s %s wait%s since %.1f s",
                         ranks.size() == 1 ? "" : "s",
                         absl::StrJoin(ranks, ","),
                         ranks.size() == 1 ? "s" : "",
                         static_cast<double>(longest_ms) / 1000);
}

std::string CollectiveWatch::DescribeLate(const Finding& finding) const {
  const Beat& late = beats_.at(finding.rank);
  std::string text = absl::StrCat("rank ",
                                  finding.rank,
                                  " has not issued ",
                                  Name(finding.other, finding.key, finding.sequence),
                                  " of step ",
                                  late.step + 1,
                                  " in group ",
                                  finding.key.first,
                                  "; ",
                                  Waits(finding));
  for (const CollectiveState& state : late.groups) {
    if (finding.kind == Kind::kDeadlock && state.completed < state.sequence) {
      const GroupKey key = {state.group, state.first_member};
      absl::StrAppend(&text,
                      ", but rank ",
                      finding.rank,
                      " waits in ",
                      Name(finding.rank, key, state.sequence),
                      " of group ",
                      state.group);
    }
  }
  if (finding.kind == Kind::kStall) {
    absl::StrAppend(&text, "; its phase is ", late.phase.empty() ? "unknown" : late.phase);
    if (ledgers_.count(finding.rank) == 0) {
      absl::StrAppend(&text, " and it does not answer");
    }
  }
  return text;
}

// Saves, evaluation and restores have allowances of their own.
bool CollectiveWatch::MayBeSlow(const Finding& finding) const {
  const std::string& phase = beats_.at(finding.rank).phase;
  return phase != "training" && phase != "waiting";
}

CollectiveWatch::Outcome CollectiveWatch::Judge(int64_t now_ms, const CollectiveLimits& limits) {
  Finding found = FindMismatch();
  if (found.kind == Kind::kNone) {
    found = FindLate(limits.notice_ms());
  }
  Outcome outcome;
  const bool same = found.kind == finding_.kind && found.key == finding_.key &&
                    found.sequence == finding_.sequence && found.rank == finding_.rank;
  if (!same) {
    finding_ = found;
    ledgers_.clear();
    told_ = told_fatal_ = false;
    asked_ms_ = now_ms;
    last_word_.clear();
    if (found.kind != Kind::kNone) {
      outcome.ask = WitnessesOf(found);
    }
    return outcome;
  }
  if (found.kind == Kind::kNone || (found.kind == Kind::kStall && MayBeSlow(found))) {
    return outcome;
  }
  found = finding_;  // with the witness that was asked
  const std::vector<int64_t> asked = WitnessesOf(found);
  const bool answered = std::all_of(
      asked.begin(), asked.end(), [this](int64_t rank) { return ledgers_.count(rank) != 0; });
  if (!answered && now_ms - asked_ms_ < std::min(kMostAnswerMs, limits.detection_ms / 2)) {
    return outcome;
  }
  // The time of a first step is not known beforehand.
  const bool stuck =
      limits.step_seconds > 0 && now_ms - asked_ms_ + limits.notice_ms() >= limits.stall_ms();
  const bool fatal = found.kind != Kind::kStall || stuck;
  if (told_fatal_ || (told_ && !fatal)) {
    return outcome;
  }
  told_ = true;
  told_fatal_ = fatal;
  const bool mismatch = found.kind == Kind::kMismatch;
  last_word_ = mismatch ? DescribeMismatch(found) : DescribeLate(found);
  outcome.report = CollectiveReport{
      found.kind == Kind::kStall ? "Stall" : "CollectiveMismatch", last_word_, found.rank, fatal};
  return outcome;
}

std::string CollectiveWatch::LastWord(int64_t rank) const {
  if (rank == finding_.rank && !last_word_.empty()) {
    return last_word_;
  }
  const Finding late = FindLate(1);
  return late.rank == rank ? DescribeLate(late) : "";
}

}  // namespace ravel::coordinator
