#pragma once

// Which nodes are there: a pure core. Time comes in as an argument; who is lost comes out. A node
// is its newest incarnation; work of any older one is over.

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "coordinator/fleet/fleet_messages.h"

namespace ravel::coordinator {

// kLeft: its daemon drained and ended after its last trainer. kLost: it vanished.
enum class NodeState { kReady, kSuspect, kLost, kDraining, kLeft };
std::string_view NodeStateName(NodeState state);

// Why a node gets no new work although it is here. Outlives its daemon and the coordinator. On
// disk: do not renumber.
enum class NodeHold { kNone = 0, kDrained = 1, kQuarantined = 2 };
std::string_view NodeHoldName(NodeHold hold);

// All times of failure detection, from one knob: T.
struct DetectionTimes {
  int64_t detection_ms = 5000;
  int64_t beat_ms() const { return detection_ms / 5; }
  int64_t suspect_ms() const { return detection_ms * 3 / 5; }
  int64_t lost_ms() const { return detection_ms; }
  // After a stream reset: time for the same incarnation to return.
  int64_t reset_ms() const { return detection_ms * 2 / 5; }
};

struct NodeRecord {
  HelloMessage facts;  // of the newest Hello, without trainers
  NodeState state = NodeState::kReady;
  std::optional<StreamId> stream;
  int64_t heard_ms = 0;         // monotonic: newest sign of life
  int64_t disconnected_ms = 0;  // monotonic, while there is no stream
  int64_t heard_wall_ms = 0;    // for people
  std::string message;
  std::string drain_reason;  // of its daemon's notice
  bool ended = false;        // drained, and its stream was closed when no trainer was left there
  NodeHold hold = NodeHold::kNone;
  std::string hold_reason;
  int64_t remembered_wall_ms = 0;  // of a node that was not here since the coordinator started
  // No new work before messages of more than a frame have come through on this stream, both ways.
  bool path_is_tried = false;
  int64_t next_bytes = 0;  // of padding in its next beat
  // The path back: since when a padded acknowledgement is on its way (monotonic; 0: none), and how
  // long the node has waited for it by its own clock.
  int64_t answered_ms = 0;
  int64_t unanswered_ms = 0;

  // Out of the fleet until its daemon says Hello again.
  bool IsGone() const { return state == NodeState::kLost || state == NodeState::kLeft; }
  bool TakesWork() const {
    return state == NodeState::kReady && stream.has_value() && hold == NodeHold::kNone;
  }
};

// A node that is not here, as the database tells of it.
struct GoneNode {
  bool has_left = false;      // LEFT, else LOST
  std::string message = {};   // empty: not known
  int64_t heard_wall_ms = 0;  // 0: not known
  int64_t wall_ms = 0;        // now
};

struct HelloOutcome {
  std::string rejected;              // not empty: refuse the stream for good
  bool new_incarnation = false;      // all work of the incarnation before is over
  std::optional<StreamId> replaced;  // an older stream of the node that is still open: close it
};

struct LostNode {
  std::string node_id;
  std::string reason;
  std::string job_uid;  // not empty: lost for this job only, by its own T
  bool left = false;    // it ended in order
};

// Trainers that the coordinator knows on a node when its stream closes.
enum class NodeLoad { kIdle, kHasTrainers };

// The newest message of a stream that has arrived, also while nobody has looked at it; 0: not
// known.
using ArrivalFunction = std::function<int64_t(StreamId)>;

// Used only from the controller's strand.
class Membership {
 public:
  explicit Membership(int64_t detection_ms) { times_.detection_ms = detection_ms; }

  const DetectionTimes& times() const { return times_; }
  // The job has ranks on the node and its own T, from now on. True: the node's beats change.
  bool Watch(const std::string& node_id,
             const std::string& job_uid,
             int64_t detection_ms,
             int64_t now_ms);
  bool Unwatch(const std::string& node_id, const std::string& job_uid);
  // Returns the times for the node's beats: by the shortest T of the jobs with ranks there, or of
  // the coordinator.
  DetectionTimes TimesOf(const std::string& node_id) const;

  HelloOutcome OnHello(StreamId stream, const HelloMessage& hello, int64_t now_ms, int64_t wall_ms);
  // Any message counts as a sign of life, at its arrival. False: the stream is not a node's present
  // one, or the node is gone: it has to say Hello again.
  bool OnHeard(StreamId stream, int64_t now_ms, int64_t wall_ms);
  // After OnHeard. The beat is acknowledged now. True: the node takes work from here on.
  bool OnBeat(StreamId stream, const BeatMessage& beat, int64_t now_ms);
  void OnClosed(StreamId stream, int64_t now_ms, NodeLoad load);
  void OnDrain(StreamId stream, const std::string& reason);
  // False: no such node.
  bool SetHold(const std::string& node_id, NodeHold hold, const std::string& reason);
  // A node from before this coordinator started that is not here: LOST or LEFT.
  void Remember(const std::string& node_id, const GoneNode& gone);

  // Judges everybody by what has arrived; each node that is gone is returned once, also for each
  // job.
  std::vector<LostNode> Evaluate(int64_t now_ms, const ArrivalFunction& arrival = {});
  // This process itself did not run for that long: nobody is blamed for it. Never for being busy.
  void Forgive(int64_t paused_ms, int64_t now_ms);

  // Out of the list, if it is gone; a daemon of that name may introduce itself again.
  bool Forget(const std::string& node_id);

  const std::map<std::string, NodeRecord>& nodes() const { return nodes_; }
  const NodeRecord* Find(const std::string& node_id) const;
  // The path of a node that is here is still tried.
  bool HasUntried() const;
  // The node of a stream, or null.
  const NodeRecord* FindByStream(StreamId stream) const;
  // Nodes whose facts or state have changed since the last call.
  std::set<std::string> TakeChanged() { return std::exchange(changed_, {}); }
  bool has_changed() const { return !changed_.empty(); }

 private:
  // A job that has ranks on a node.
  struct Watcher {
    int64_t detection_ms = 0;
    int64_t since_ms = 0;  // nobody is late by a rule that was not told yet
    bool told = false;     // its verdict
  };
  using Watchers = std::map<std::string, Watcher>;  // by job
  DetectionTimes TimesOf(const Watchers& watchers) const;
  NodeRecord* MutableByStream(StreamId stream);
  // Why a daemon may not take the name of one that is here; empty: it may.
  std::string NameTaken(const HelloMessage& hello, StreamId stream, int64_t now_ms) const;
  bool MassSilence(int64_t now_ms) const;
  // The reason, or empty while it is not lost.
  static std::string Verdict(
      const NodeRecord& node, int64_t detection_ms, int64_t since_ms, int64_t now_ms, bool hold);
  void JudgeForJobs(const std::string& node_id,
                    NodeRecord& node,
                    int64_t now_ms,
                    bool hold,
                    std::vector<LostNode>& lost);

  DetectionTimes times_;
  std::map<std::string, NodeRecord> nodes_;
  std::unordered_map<StreamId, std::string> by_stream_;  // the present stream of each node
  std::map<std::string, Watchers> watchers_;             // by node
  std::set<std::string> changed_;
};

}  // namespace ravel::coordinator
