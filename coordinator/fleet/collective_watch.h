#pragma once

// Watches if the ranks of an epoch issue the same collectives, and finds the rank that is late: a
// pure core. Beats come in; questions to ranks and findings come out.

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "coordinator/fleet/fleet_messages.h"

namespace ravel::coordinator {

struct CollectiveLimits {
  int64_t detection_ms = 5000;
  double step_seconds = 0;  // the rolling p99 of what a step takes; 0: not known yet
  double stall_factor = 5;  // that many steps are no hiccup
  // From here on a stall that is not the phase's own business ends the epoch.
  int64_t stall_ms() const;
  // From here on it is told.
  int64_t notice_ms() const;
};

struct CollectiveReport {
  std::string reason;  // CollectiveMismatch, Stall
  std::string message;
  int64_t rank = -1;  // the one to look at
  bool fatal = false;
};

// Used only from the controller's strand.
class CollectiveWatch {
 public:
  // Most entries of a ledger that is asked for.
  static constexpr int64_t kMost = 4096;

  struct Beat {
    int64_t step = 0;
    std::string phase;
    std::vector<CollectiveState> groups;
  };
  void OnBeat(int64_t rank, Beat beat);
  void OnLedger(int64_t rank, LedgerReport ledger);

  struct Outcome {
    std::vector<int64_t> ask;                // ranks whose ledgers are wanted
    std::optional<CollectiveReport> report;  // each finding is reported once, and once more when it
                                             // becomes fatal
  };
  Outcome Judge(int64_t now_ms, const CollectiveLimits& limits);

  // Describes the collectives in which others wait for a rank that has ended. Empty: none.
  std::string LastWord(int64_t rank) const;

 private:
  using GroupKey = std::pair<std::string, int64_t>;  // name, first member
  enum class Kind { kNone, kMismatch, kDeadlock, kStall };
  // Two ranks of a group that do not go together. kMismatch: their hashes at `sequence` differ.
  // Else `other` waits in `sequence`, which `rank` has not issued; kDeadlock: `rank` waits
  // elsewhere.
  struct Finding {
    Kind kind = Kind::kNone;
    GroupKey key;
    uint64_t sequence = 0;
    int64_t rank = -1;
    int64_t other = -1;
  };
  static const CollectiveState* StateOf(const Beat& beat, const GroupKey& key);
  Finding FindMismatch() const;
  // The rank that is furthest behind in a group where somebody waits that long.
  Finding FindLate(int64_t waited_ms) const;
  Finding LateFor(int64_t waiter, int64_t waited_ms) const;
  bool IsWaiting(int64_t rank, int64_t waited_ms) const;
  std::vector<int64_t> WitnessesOf(const Finding& finding) const;
  // Describes the call that a rank issued there: from its ledger, or from its beat if it waits
  // there.
  std::string Name(int64_t rank, const GroupKey& key, uint64_t sequence) const;
  const LedgerEntry* EntryAt(int64_t rank, const GroupKey& key, uint64_t sequence) const;
  std::string DescribeMismatch(const Finding& finding) const;
  std::string DescribeLate(const Finding& finding) const;
  std::string Waits(const Finding& finding) const;
  bool MayBeSlow(const Finding& finding) const;

  std::map<int64_t, Beat> beats_;  // by rank
  std::map<int64_t, LedgerReport> ledgers_;
  Finding finding_;
  int64_t asked_ms_ = 0;
  bool told_ = false;
  bool told_fatal_ = false;
  std::string last_word_;
};

}  // namespace ravel::coordinator
