// Decides which nodes are there. Each node is measured by when it was last heard: silent for a
// while it is SUSPECT, for longer LOST. A stream that breaks gives the same incarnation a grace
// period to return; a daemon that had drained and had no trainers left has LEFT after it. If more
// than 30 % of at least ten nodes are silent at once, the fault is probably in the network between,
// and every limit is extended by twice the detection time. A job with a shorter detection time of
// its own judges its nodes earlier than the fleet does.
// Some beats and their acknowledgements are longer than a frame: where these do not come through,
// the node is lost although short messages do. It is SUSPECT from its Hello until the first of them
// has come back.

#include "coordinator/fleet/membership.h"

#include <algorithm>
#include <utility>

#include <absl/strings/str_cat.h>

#include "common/plain_text.h"
#include "common/version.h"

namespace ravel::coordinator {
namespace {

constexpr int64_t kMassSilenceNodes =
    10;  // below this a third of the fleet may well be one broken host
constexpr size_t kMaxNodeIdLength = 128;
constexpr size_t kMaxFactLength = 4096;
constexpr size_t kMaxDevices = 1024;
constexpr size_t kMaxNetworks = 256;
constexpr char kPathIsTried[] = "messages of more than a frame are tried on its path";

std::string Refusal(const HelloMessage& hello) {
  if (hello.node_id.empty() || hello.node_id.size() > kMaxNodeIdLength) {
    return "hello.node_id: expected 1 to 128 characters";
  }
  if (hello.incarnation.empty() || hello.incarnation.size() > kMaxNodeIdLength) {
    return "hello.incarnation: expected a random id";
  }
  const std::pair<const char*, const std::string*> texts[] = {
      {"hello.node_id", &hello.node_id},
      {"hello.incarnation", &hello.incarnation},
      {"hello.data_address", &hello.data_address},
      {"hello.host_id", &hello.host_id},
      {"hello.cpu_isa", &hello.cpu_isa},
      {"hello.version", &hello.version},
      {"hello.device_message", &hello.device_message},
  };
  for (const auto& [field, text] : texts) {  // people see them in lists and logs
    if (text->size() > kMaxFactLength || HasControlText(*text)) {
      return absl::StrCat(field, ": expected at most 4 KiB of text without control characters");
    }
  }
  for (const DeviceFacts& device : hello.devices) {
    for (const std::string* text : {&device.kind, &device.model, &device.uuid}) {
      if (text->size() > kMaxFactLength || HasControlText(*text)) {
        return "hello.devices: expected at most 4 KiB of text without control characters";
      }
    }
  }
  if (hello.networks.size() > kMaxNetworks) {
    return absl::StrCat(
        "hello.networks: at most ", kMaxNetworks, " are expected, got ", hello.networks.size());
  }
  for (const std::string& network : hello.networks) {
    if (network.size() > kMaxFactLength || HasControlText(network)) {
      return "hello.networks: expected at most 4 KiB of text without control characters";
    }
  }
  if (AgreedProtocol(kFleetProtocols, {hello.oldest_protocol, hello.protocol}) == 0) {
    return absl::StrCat("hello.protocol: this coordinator (release ",
                        kVersion,
                        ") speaks ",
                        kFleetProtocols.oldest,
                        " to ",
                        kFleetProtocols.newest,
                        ", the daemon (release ",
                        hello.version,
                        ") ",
                        hello.oldest_protocol > 0 ? hello.oldest_protocol : hello.protocol,
                        " to ",
                        hello.protocol);
  }
  if (hello.devices.size() > kMaxDevices) {
    return absl::StrCat(
        "hello.devices: at most ", kMaxDevices, " are expected, got ", hello.devices.size());
  }
  return "";
}

}  // namespace

std::string_view NodeStateName(NodeState state) {
  switch (state) {
    case NodeState::kReady:
      return "READY";
    case NodeState::kSuspect:
      return "SUSPECT";
    case NodeState::kLost:
      return "LOST";
    case NodeState::kDraining:
      return "DRAINING";
    case NodeState::kLeft:
      return "LEFT";
  }
  return "UNKNOWN";
}

std::string_view NodeHoldName(NodeHold hold) {
  switch (hold) {
    case NodeHold::kNone:
      return "";
    case NodeHold::kDrained:
      return "DRAINED";
    case NodeHold::kQuarantined:
      return "QUARANTINED";
  }
  return "UNKNOWN";
}

bool Membership::SetHold(const std::string& node_id, NodeHold hold, const std::string& reason) {
  const auto node = nodes_.find(node_id);
  if (node == nodes_.end()) {
    return false;
  }
  node->second.hold = hold;
  node->second.hold_reason = reason;
  changed_.insert(node_id);
  return true;
}

void Membership::Remember(const std::string& node_id, const GoneNode& gone) {
  NodeRecord& node = nodes_[node_id];
  node.facts.node_id = node_id;
  node.state = gone.has_left ? NodeState::kLeft : NodeState::kLost;
  node.message = gone.message.empty() ? "not here since the coordinator started" : gone.message;
  node.heard_wall_ms = gone.heard_wall_ms;
  node.remembered_wall_ms = gone.wall_ms;
}

std::string Membership::NameTaken(const HelloMessage& hello,
                                  StreamId stream,
                                  int64_t now_ms) const {
  const NodeRecord* node = Find(hello.node_id);
  const bool here = node != nullptr && node->stream && *node->stream != stream && !node->IsGone() &&
                    now_ms - node->heard_ms < TimesOf(hello.node_id).lost_ms() &&
                    node->facts.incarnation != hello.incarnation;
  // The lock on a work folder goes with its process: who has it now came after the other's end.
  const bool successor = here && !hello.work_lock.empty() && !hello.host_id.empty() &&
                         node->facts.work_lock == hello.work_lock &&
                         node->facts.host_id == hello.host_id;
  if (!here || successor) {
    return "";
  }
  return absl::StrCat("another daemon is node ",
                      hello.node_id,
                      " (at ",
                      node->facts.data_address.empty() ? "?" : node->facts.data_address,
                      ", heard ",
                      now_ms - node->heard_ms,
                      " ms ago): give this one another --node-id, or stop the other one first");
}

HelloOutcome Membership::OnHello(StreamId stream,
                                 const HelloMessage& hello,
                                 int64_t now_ms,
                                 int64_t wall_ms) {
  HelloOutcome outcome;
  outcome.rejected = Refusal(hello);
  if (outcome.rejected.empty()) {
    outcome.rejected = NameTaken(hello, stream, now_ms);
  }
  if (!outcome.rejected.empty()) {
    return outcome;
  }
  NodeRecord& node = nodes_[hello.node_id];
  outcome.new_incarnation = node.facts.incarnation != hello.incarnation;
  if (node.stream && *node.stream != stream) {
    outcome.replaced = node.stream;
    by_stream_.erase(*node.stream);
  }
  by_stream_[stream] = hello.node_id;
  changed_.insert(hello.node_id);
  node.facts = hello;
  node.facts.trainers.clear();
  node.path_is_tried = hello.path_bytes == 0;
  node.next_bytes = hello.path_bytes;
  node.answered_ms = 0;
  node.unanswered_ms = 0;
  node.state = hello.draining       ? NodeState::kDraining
               : node.path_is_tried ? NodeState::kReady
                                    : NodeState::kSuspect;
  node.stream = stream;
  node.heard_ms = now_ms;
  node.heard_wall_ms = wall_ms;
  node.message = hello.draining       ? "draining"
                 : node.path_is_tried ? hello.device_message
                                      : kPathIsTried;
  node.ended = false;
  if (outcome.new_incarnation) {
    node.drain_reason.clear();
  }
  return outcome;
}

bool Membership::OnHeard(StreamId stream, int64_t now_ms, int64_t wall_ms) {
  NodeRecord* node = MutableByStream(stream);
  if (node == nullptr || node->IsGone()) {
    return false;
  }
  node->heard_ms = std::max(node->heard_ms, now_ms);
  node->heard_wall_ms = wall_ms;
  if (node->state == NodeState::kSuspect && node->path_is_tried) {
    node->state = NodeState::kReady;
    changed_.insert(node->facts.node_id);
  }
  return true;
}

bool Membership::OnBeat(StreamId stream, const BeatMessage& beat, int64_t now_ms) {
  NodeRecord* node = MutableByStream(stream);
  if (node == nullptr || node->facts.path_bytes == 0) {
    return false;
  }
  node->next_bytes = beat.next_bytes;
  node->unanswered_ms = beat.unanswered_ms;
  if (beat.unanswered_ms == 0) {
    node->answered_ms = 0;
  }
  if (!beat.padding.empty() && node->answered_ms == 0) {
    node->answered_ms = now_ms;
  }
  if (node->path_is_tried || beat.answered_bytes < node->facts.path_bytes) {
    return false;
  }
  node->path_is_tried = true;
  if (node->message == kPathIsTried) {
    node->message = node->facts.device_message;
  }
  if (node->state == NodeState::kSuspect) {
    node->state = NodeState::kReady;
  }
  changed_.insert(node->facts.node_id);
  return true;
}

void Membership::OnClosed(StreamId stream, int64_t now_ms, NodeLoad load) {
  if (NodeRecord* node = MutableByStream(stream)) {
    node->stream.reset();
    by_stream_.erase(stream);
    changed_.insert(node->facts.node_id);
    node->disconnected_ms = now_ms;
    node->ended = node->state == NodeState::kDraining && load == NodeLoad::kIdle;
    if (node->state == NodeState::kReady) {
      node->state = NodeState::kSuspect;
    }
  }
}

void Membership::OnDrain(StreamId stream, const std::string& reason) {
  if (NodeRecord* node = MutableByStream(stream)) {
    node->state = NodeState::kDraining;
    changed_.insert(node->facts.node_id);
    node->message = absl::StrCat("draining: ", reason);
    node->drain_reason = reason;
  }
}

bool Membership::Watch(const std::string& node_id,
                       const std::string& job_uid,
                       int64_t detection_ms,
                       int64_t now_ms) {
  const int64_t before_ms = TimesOf(node_id).detection_ms;
  watchers_[node_id].insert({job_uid, {detection_ms, now_ms, false}});
  return TimesOf(node_id).detection_ms != before_ms;
}

bool Membership::Unwatch(const std::string& node_id, const std::string& job_uid) {
  const auto node = watchers_.find(node_id);
  if (node == watchers_.end()) {
    return false;
  }
  const int64_t before_ms = TimesOf(node_id).detection_ms;
  node->second.erase(job_uid);
  if (node->second.empty()) {
    watchers_.erase(node);
  }
  return TimesOf(node_id).detection_ms != before_ms;
}

DetectionTimes Membership::TimesOf(const std::string& node_id) const {
  const auto node = watchers_.find(node_id);
  return node == watchers_.end() ? times_ : TimesOf(node->second);
}

DetectionTimes Membership::TimesOf(const Watchers& watchers) const {
  DetectionTimes times = times_;
  for (const auto& [uid, watcher] : watchers) {
    times.detection_ms = std::min(times.detection_ms, watcher.detection_ms);
  }
  return times;
}

bool Membership::MassSilence(int64_t now_ms) const {
  int64_t silent = 0;
  int64_t watched = 0;
  for (const auto& [id, node] : nodes_) {
    if (!node.IsGone()) {
      ++watched;
      silent += now_ms - node.heard_ms >= TimesOf(id).suspect_ms() ? 1 : 0;
    }
  }
  return watched >= kMassSilenceNodes && silent * 10 > watched * 3;
}

std::string Membership::Verdict(
    const NodeRecord& node, int64_t detection_ms, int64_t since_ms, int64_t now_ms, bool hold) {
  const DetectionTimes times{detection_ms};
  const int64_t hold_ms = hold ? 2 * detection_ms : 0;
  const int64_t silent_ms = now_ms - std::max(node.heard_ms, since_ms);
  const int64_t away_ms = now_ms - std::max(node.disconnected_ms, since_ms);
  if (!node.stream && away_ms >= times.reset_ms() + hold_ms) {
    return absl::StrCat("its stream broke and it did not return within ", times.reset_ms(), " ms");
  }
  if (silent_ms >= times.lost_ms() + hold_ms) {
    return absl::StrCat("no beat for ",
                        silent_ms,
                        " ms",
                        node.stream && node.next_bytes > 0
                            ? absl::StrCat("; the next one has more than ",
                                           node.next_bytes,
                                           " bytes: if the host is well, see the MTU of the path")
                            : "");
  }
  const bool back_is_cut =
      node.answered_ms != 0 && node.unanswered_ms >= times.lost_ms() &&
      now_ms - std::max(node.answered_ms, since_ms) >= times.lost_ms() + hold_ms;
  return back_is_cut ? absl::StrCat(
                           "its beats arrive, but messages of more than a frame do not "
                           "reach it, for ",
                           node.unanswered_ms,
                           " ms: the MTU of the path is smaller than this host believes")
                     : "";
}

void Membership::JudgeForJobs(const std::string& node_id,
                              NodeRecord& node,
                              int64_t now_ms,
                              bool hold,
                              std::vector<LostNode>& lost) {
  const auto watchers = watchers_.find(node_id);
  if (watchers == watchers_.end()) {
    return;
  }
  for (auto& [uid, rule] : watchers->second) {
    std::string reason = Verdict(node, rule.detection_ms, rule.since_ms, now_ms, hold);
    if (reason.empty() || rule.told) {
      continue;
    }
    lost.push_back({node_id, std::move(reason), uid});
    rule.told = true;
    if (node.state == NodeState::kReady) {  // nothing new goes there until it is heard again
      node.state = NodeState::kSuspect;
      changed_.insert(node_id);
    }
  }
}

std::vector<LostNode> Membership::Evaluate(int64_t now_ms, const ArrivalFunction& arrival) {
  bool any_silent = false;
  // Both maps are in the order of ids and are walked together: this runs at each tick, and a search
  // per node took 2 % of a coordinator with 1,000 nodes.
  auto watchers = watchers_.begin();
  for (auto& [id, node] : nodes_) {
    while (watchers != watchers_.end() && watchers->first < id) {
      ++watchers;
    }
    const bool watched = watchers != watchers_.end() && watchers->first == id;
    const int64_t suspect_ms = (watched ? TimesOf(watchers->second) : times_).suspect_ms();
    // A message that has arrived counts, although the strand did not get to it yet.
    if (arrival && node.stream && now_ms - node.heard_ms >= suspect_ms) {
      node.heard_ms = std::max(node.heard_ms, std::min(now_ms, arrival(*node.stream)));
    }
    any_silent = any_silent || !node.stream || now_ms - node.heard_ms >= suspect_ms ||
                 node.unanswered_ms >= suspect_ms;
  }
  std::vector<LostNode> lost;
  if (!any_silent) {
    return lost;
  }
  const bool hold = MassSilence(now_ms);
  for (auto& [id, node] : nodes_) {
    JudgeForJobs(id, node, now_ms, hold, lost);
    if (node.IsGone()) {
      continue;
    }
    std::string reason = Verdict(node, times_.detection_ms, 0, now_ms, hold);
    if (!reason.empty()) {
      if (node.ended) {
        reason = absl::StrCat("its daemon drained and ended",
                              node.drain_reason.empty() ? "" : ": ",
                              node.drain_reason);
      }
      node.state = node.ended ? NodeState::kLeft : NodeState::kLost;
      changed_.insert(id);
      node.message = reason;
      lost.push_back({id, reason, "", node.ended});
    } else if (now_ms - node.heard_ms >= times_.suspect_ms() && node.state == NodeState::kReady) {
      node.state = NodeState::kSuspect;
      changed_.insert(id);
    }
  }
  return lost;
}

void Membership::Forgive(int64_t paused_ms, int64_t now_ms) {
  for (auto& [id, node] : nodes_) {
    node.heard_ms = std::min(now_ms, node.heard_ms + paused_ms);
    node.disconnected_ms = std::min(now_ms, node.disconnected_ms + paused_ms);
    if (node.answered_ms != 0) {
      node.answered_ms = std::min(now_ms, node.answered_ms + paused_ms);
    }
  }
  for (auto& [id, watchers] : watchers_) {
    for (auto& [uid, watcher] : watchers) {
      watcher.since_ms = std::min(now_ms, watcher.since_ms + paused_ms);
    }
  }
}

bool Membership::Forget(const std::string& node_id) {
  const auto found = nodes_.find(node_id);
  if (found == nodes_.end() || !found->second.IsGone()) {
    return false;
  }
  if (found->second.stream) {
    by_stream_.erase(*found->second.stream);
  }
  changed_.insert(node_id);
  nodes_.erase(found);
  return true;
}

const NodeRecord* Membership::Find(const std::string& node_id) const {
  const auto found = nodes_.find(node_id);
  return found == nodes_.end() ? nullptr : &found->second;
}

bool Membership::HasUntried() const {
  return std::any_of(nodes_.begin(), nodes_.end(), [](const auto& node) {
    return node.second.stream && !node.second.path_is_tried && !node.second.IsGone();
  });
}

const NodeRecord* Membership::FindByStream(StreamId stream) const {
  const auto found = by_stream_.find(stream);
  return found == by_stream_.end() ? nullptr : Find(found->second);
}

NodeRecord* Membership::MutableByStream(StreamId stream) {
  return const_cast<NodeRecord*>(FindByStream(stream));
}

}  // namespace ravel::coordinator
