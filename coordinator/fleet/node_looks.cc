// Spreads looks at paths over nodes. A look goes to the node of the right kind that has the fewest,
// or, as one part for each, to all of them; it waits when all are busy and is given up at its
// deadline, or when its node or its asker is gone. Answers are matched by id and stream, and ids
// are unique over coordinator processes, so an answer to a predecessor's question cannot be taken
// for one of ours.

#include "coordinator/fleet/node_looks.h"

#include <algorithm>
#include <utility>

#include <absl/strings/str_cat.h>

#include "common/version.h"

namespace ravel::coordinator {
namespace {

bool HasDevice(const NodeRecord& node, bool cpu) {
  return std::any_of(node.facts.devices.begin(),
                     node.facts.devices.end(),
                     [cpu](const DeviceFacts& device) { return (device.kind == "cpu") == cpu; });
}

// A daemon of an older release does not know the message, or not the needs in it.
bool Understands(const NodeRecord& node, const LookWish& wish) {
  return AgreedProtocol(kFleetProtocols, {node.facts.oldest_protocol, node.facts.protocol}) >=
         (wish.query.needs.empty() ? kLookProtocol : kNeedsProtocol);
}

bool IsHere(const NodeRecord& node) {
  return node.stream.has_value() && !node.IsGone();
}

absl::Status NobodyHere(const LookWish& wish) {
  return absl::NotFoundError(
      absl::StrCat("no ", wish.cpu_devices ? "cpu" : "gpu", " worker is here"));
}

bool Wanted(const LookWish& wish) {
  return !wish.wanted || wish.wanted();
}

}  // namespace

void NodeLooks::Part::Answer(absl::Status status, const std::string& from, PathFacts facts) const {
  wish.done({std::move(status), from, std::move(facts), answers, unasked});
}

const NodeRecord* NodeLooks::Choose(const Part& part, const Membership& members, bool* any) const {
  const NodeRecord* best = nullptr;
  int64_t fewest = kMaxOfNode;
  *any = false;
  const auto consider = [&](const std::string& id, const NodeRecord& node) {
    *any = true;
    const auto found = of_node_.find(id);
    const int64_t looks = found == of_node_.end() ? 0 : found->second;
    if (looks < fewest) {
      fewest = looks;
      best = &node;
    }
  };
  if (!part.node_id.empty()) {
    const NodeRecord* const node = members.Find(part.node_id);
    if (node != nullptr && IsHere(*node) && Understands(*node, part.wish)) {
      consider(part.node_id, *node);
    }
    return best;
  }
  for (const auto& [id, node] : members.nodes()) {
    if (node.TakesWork() && Understands(node, part.wish) &&
        HasDevice(node, part.wish.cpu_devices) && !part.wish.but_not.contains(id)) {
      consider(id, node);
    }
  }
  return best;
}

std::vector<NodeLooks::Part> NodeLooks::PartsOf(LookWish wish,
                                                const Membership& members,
                                                bool await_nodes) {
  if (!wish.each) {
    return {{std::move(wish)}};
  }
  std::vector<std::string> nodes;
  int64_t unasked = await_nodes ? 1 : 0;
  for (const auto& [id, node] : members.nodes()) {
    if (!IsHere(node) || !HasDevice(node, wish.cpu_devices) || wish.but_not.contains(id)) {
      continue;
    }
    if (Understands(node, wish) && nodes.size() < kMaxEach) {
      nodes.push_back(id);
    } else {
      ++unasked;
    }
  }
  if (nodes.empty()) {  // the first that comes is asked, or none
    return {{.wish = std::move(wish), .unasked = unasked}};
  }
  std::vector<Part> parts;
  for (std::string& id : nodes) {
    parts.push_back({wish, std::move(id), std::ssize(nodes), unasked});
  }
  return parts;
}

void NodeLooks::Add(LookWish wish, const Membership& members, bool await_nodes, int64_t now_ms) {
  const bool full = waiting_.size() >= kMaxWaiting;
  for (Part& part : PartsOf(std::move(wish), members, await_nodes)) {
    bool any = false;
    Choose(part, members, &any);
    if (!any && !await_nodes) {
      part.Answer(NobodyHere(part.wish));
    } else if (full) {
      part.Answer(absl::ResourceExhaustedError("too many looks at paths wait for a node"));
    } else {
      const int64_t limit_ms = part.wish.limit_ms;
      waiting_.push_back({std::move(part), now_ms + limit_ms + GraceMs(limit_ms)});
    }
  }
}

void NodeLooks::OnResult(StreamId stream, const LookResult& result) {
  const auto found = open_.find(result.look_id);
  if (found == open_.end() || found->second.stream != stream) {
    return;
  }
  const Open open = std::move(found->second);
  open_.erase(found);
  --of_node_[open.node_id];
  if (!Wanted(open.part.wish)) {
    return;
  }
  absl::Status status;
  if (!result.refused.empty()) {
    status = absl::UnavailableError(absl::StrCat("node ", open.node_id, ": ", result.refused));
  } else if (result.facts.silent_field.empty() && result.facts.refused_field.empty() &&
             result.facts.token_files.size() != open.part.wish.query.token_files.size()) {
    status =
        absl::UnavailableError(absl::StrCat("node ", open.node_id, " answered another question"));
  }
  open.part.Answer(std::move(status), open.node_id, result.facts);
}

void NodeLooks::GiveUpWaiting(const Membership& members, bool await_nodes, int64_t now_ms) {
  std::erase_if(waiting_, [&](Waiting& waiting) {
    const Part& part = waiting.part;
    if (!Wanted(part.wish)) {
      return true;
    }
    bool any = false;
    Choose(part, members, &any);
    if ((any || await_nodes) && now_ms < waiting.due_ms) {
      return false;
    }
    part.Answer(any ? absl::UnavailableError("all nodes are busy with other looks at paths")
                    : NobodyHere(part.wish));
    return true;
  });
}

void NodeLooks::GiveUpOpen(const Membership& members, int64_t now_ms) {
  std::erase_if(open_, [&](const auto& entry) {
    const Open& open = entry.second;
    const NodeRecord* node = members.Find(open.node_id);
    const bool gone = node == nullptr || node->stream != open.stream || node->IsGone();
    const bool wanted = Wanted(open.part.wish);
    if (wanted && !gone && now_ms < open.due_ms) {
      return false;
    }
    --of_node_[open.node_id];
    if (wanted) {
      open.part.Answer(absl::UnavailableError(absl::StrCat("node ",
                                                           open.node_id,
                                                           gone ? " went away" : " did not answer",
                                                           " while it looked at the paths")),
                       open.node_id);
    }
    return true;
  });
  std::erase_if(of_node_, [](const auto& count) { return count.second == 0; });
}

std::vector<LookOrder> NodeLooks::Advance(const Membership& members,
                                          bool await_nodes,
                                          int64_t now_ms) {
  GiveUpOpen(members, now_ms);
  GiveUpWaiting(members, await_nodes, now_ms);
  std::vector<LookOrder> orders;
  for (auto next = waiting_.begin(); next != waiting_.end();) {
    bool any = false;
    const NodeRecord* node = Choose(next->part, members, &any);
    if (node == nullptr) {
      ++next;
      continue;
    }
    const int64_t id = ++last_id_;
    const int64_t limit_ms = next->part.wish.limit_ms;
    orders.push_back({*node->stream, {id, next->part.wish.query, limit_ms}});
    ++of_node_[node->facts.node_id];
    open_[id] = {std::move(next->part),
                 now_ms + limit_ms + GraceMs(limit_ms),
                 node->facts.node_id,
                 *node->stream};
    next = waiting_.erase(next);
  }
  return orders;
}

}  // namespace ravel::coordinator
