#pragma once

// Which nodes are there: a pure core. Time comes in as an argument; who is lost comes out. A node
// is its newest incarnation; work of any older one is over.

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "coordinator/fleet_messages.h"

namespace ravel::coordinator {

enum class NodeState { kReady, kSuspect, kLost, kDraining };
std::string_view NodeStateName(NodeState state);

// All from one knob, T (service.md section 7).
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
};

struct HelloOutcome {
  std::string rejected;              // not empty: refuse the stream for good
  bool new_incarnation = false;      // all work of the incarnation before is over
  std::optional<StreamId> replaced;  // an older stream of the node that is still open: close it
};

struct LostNode {
  std::string node_id;
  std::string reason;
};

// Used only from the controller's strand.
class Membership {
 public:
  explicit Membership(int64_t detection_ms) { times_.detection_ms = detection_ms; }

  const DetectionTimes& times() const { return times_; }
  void SetDetection(int64_t detection_ms) { times_.detection_ms = detection_ms; }

  HelloOutcome OnHello(StreamId stream, const HelloMessage& hello, int64_t now_ms, int64_t wall_ms);
  // Any message counts as a sign of life. False: the stream is not a node's present one, or the
  // node was judged lost: it has to say Hello again.
  bool OnHeard(StreamId stream, int64_t now_ms, int64_t wall_ms);
  void OnClosed(StreamId stream, int64_t now_ms);
  void OnDrain(StreamId stream, const std::string& reason);

  // Judges everybody; each lost node is returned once.
  std::vector<LostNode> Evaluate(int64_t now_ms);
  // The judge itself slept that long: nobody is blamed for it.
  void Forgive(int64_t slept_ms);

  // Out of the list, if it is lost; a daemon of that name may introduce itself again.
  bool Forget(const std::string& node_id);

  const std::map<std::string, NodeRecord>& nodes() const { return nodes_; }
  const NodeRecord* Find(const std::string& node_id) const;
  // The node of a stream, or null.
  const NodeRecord* FindByStream(StreamId stream) const;

 private:
  NodeRecord* MutableByStream(StreamId stream);
  bool MassSilence(int64_t now_ms) const;

  DetectionTimes times_;
  std::map<std::string, NodeRecord> nodes_;
};

}  // namespace ravel::coordinator
