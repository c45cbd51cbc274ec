#include "coordinator/membership.h"

#include <utility>

#include <absl/strings/str_cat.h>

#include "common/plain_text.h"

namespace ravel::coordinator {
namespace {

constexpr int64_t kProtocol = 1;
constexpr int64_t kMassSilenceNodes =
    10;  // below this a third of the fleet may well be one broken host
constexpr size_t kMaxNodeIdLength = 128;
constexpr size_t kMaxFactLength = 4096;
constexpr size_t kMaxDevices = 1024;

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
  if (hello.protocol != kProtocol) {
    return absl::StrCat(
        "hello.protocol: this coordinator speaks ", kProtocol, ", the daemon ", hello.protocol);
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
  }
  return "UNKNOWN";
}

HelloOutcome Membership::OnHello(StreamId stream,
                                 const HelloMessage& hello,
                                 int64_t now_ms,
                                 int64_t wall_ms) {
  HelloOutcome outcome;
  outcome.rejected = Refusal(hello);
  if (!outcome.rejected.empty()) {
    return outcome;
  }
  NodeRecord& node = nodes_[hello.node_id];
  outcome.new_incarnation = node.facts.incarnation != hello.incarnation;
  if (node.stream && *node.stream != stream) {
    outcome.replaced = node.stream;
  }
  node.facts = hello;
  node.facts.trainers.clear();
  node.state = NodeState::kReady;
  node.stream = stream;
  node.heard_ms = now_ms;
  node.heard_wall_ms = wall_ms;
  node.message = hello.device_message;
  return outcome;
}

bool Membership::OnHeard(StreamId stream, int64_t now_ms, int64_t wall_ms) {
  NodeRecord* node = MutableByStream(stream);
  if (node == nullptr || node->state == NodeState::kLost) {
    return false;
  }
  node->heard_ms = now_ms;
  node->heard_wall_ms = wall_ms;
  if (node->state == NodeState::kSuspect) {
    node->state = NodeState::kReady;
  }
  return true;
}

void Membership::OnClosed(StreamId stream, int64_t now_ms) {
  if (NodeRecord* node = MutableByStream(stream)) {
    node->stream.reset();
    node->disconnected_ms = now_ms;
    if (node->state == NodeState::kReady) {
      node->state = NodeState::kSuspect;
    }
  }
}

void Membership::OnDrain(StreamId stream, const std::string& reason) {
  if (NodeRecord* node = MutableByStream(stream)) {
    node->state = NodeState::kDraining;
    node->message = absl::StrCat("draining: ", reason);
  }
}

bool Membership::MassSilence(int64_t now_ms) const {
  int64_t silent = 0;
  int64_t watched = 0;
  for (const auto& [id, node] : nodes_) {
    if (node.state != NodeState::kLost) {
      ++watched;
      silent += now_ms - node.heard_ms >= times_.suspect_ms() ? 1 : 0;
    }
  }
  return watched >= kMassSilenceNodes && silent * 10 > watched * 3;
}

std::vector<LostNode> Membership::Evaluate(int64_t now_ms) {
  std::vector<LostNode> lost;
  const int64_t hold_ms = MassSilence(now_ms) ? 2 * times_.detection_ms : 0;
  for (auto& [id, node] : nodes_) {
    if (node.state == NodeState::kLost) {
      continue;
    }
    const int64_t silent_ms = now_ms - node.heard_ms;
    std::string reason;
    if (!node.stream && now_ms - node.disconnected_ms >= times_.reset_ms() + hold_ms) {
      reason =
          absl::StrCat("its stream broke and it did not return within ", times_.reset_ms(), " ms");
    } else if (silent_ms >= times_.lost_ms() + hold_ms) {
      reason = absl::StrCat("no beat for ", silent_ms, " ms");
    } else if (silent_ms >= times_.suspect_ms() && node.state == NodeState::kReady) {
      node.state = NodeState::kSuspect;
    }
    if (!reason.empty()) {
      node.state = NodeState::kLost;
      node.message = reason;
      lost.push_back({id, reason});
    }
  }
  return lost;
}

void Membership::Forgive(int64_t slept_ms) {
  for (auto& [id, node] : nodes_) {
    node.heard_ms += slept_ms;
    node.disconnected_ms += slept_ms;
  }
}

bool Membership::Forget(const std::string& node_id) {
  const auto found = nodes_.find(node_id);
  if (found == nodes_.end() || found->second.state != NodeState::kLost) {
    return false;
  }
  nodes_.erase(found);
  return true;
}

const NodeRecord* Membership::Find(const std::string& node_id) const {
  const auto found = nodes_.find(node_id);
  return found == nodes_.end() ? nullptr : &found->second;
}

const NodeRecord* Membership::FindByStream(StreamId stream) const {
  for (const auto& [id, node] : nodes_) {
    if (node.stream == stream) {
      return &node;
    }
  }
  return nullptr;
}

NodeRecord* Membership::MutableByStream(StreamId stream) {
  return const_cast<NodeRecord*>(FindByStream(stream));
}

}  // namespace ravel::coordinator
