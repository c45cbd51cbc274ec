// Spreads looks at paths over nodes. A look goes to the node of the right kind that has the fewest;
// it waits when all are busy and is given up at its deadline, or when its node or its asker is
// gone. Answers are matched by id and stream, and ids are unique over coordinator processes, so an
// answer to a predecessor's question cannot be taken for one of ours.

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

// A daemon of an older release does not know the message.
bool Looks(const NodeRecord& node) {
  return AgreedProtocol(kFleetProtocols, {node.facts.oldest_protocol, node.facts.protocol}) >=
         kLookProtocol;
}

absl::Status NobodyHere(const LookWish& wish) {
  return absl::NotFoundError(
      absl::StrCat("no ", wish.cpu_devices ? "cpu" : "gpu", " worker is here"));
}

bool Wanted(const LookWish& wish) {
  return !wish.wanted || wish.wanted();
}

}  // namespace

const NodeRecord* NodeLooks::Choose(const LookWish& wish,
                                    const Membership& members,
                                    bool* any) const {
  const NodeRecord* best = nullptr;
  int64_t fewest = kMaxOfNode;
  *any = false;
  for (const auto& [id, node] : members.nodes()) {
    if (!node.TakesWork() || !Looks(node) || !HasDevice(node, wish.cpu_devices) ||
        wish.but_not.contains(id)) {
      continue;
    }
    *any = true;
    const auto found = of_node_.find(id);
    const int64_t looks = found == of_node_.end() ? 0 : found->second;
    if (looks < fewest) {
      fewest = looks;
      best = &node;
    }
  }
  return best;
}

void NodeLooks::Add(LookWish wish, const Membership& members, bool await_nodes, int64_t now_ms) {
  bool any = false;
  Choose(wish, members, &any);
  if (!any && !await_nodes) {
    wish.done({NobodyHere(wish)});
  } else if (waiting_.size() >= kMaxWaiting) {
    wish.done({absl::ResourceExhaustedError("too many looks at paths wait for a node")});
  } else {
    const int64_t due_ms = now_ms + wish.limit_ms + GraceMs(wish.limit_ms);
    waiting_.push_back({std::move(wish), due_ms});
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
  if (!Wanted(open.wish)) {
    return;
  }
  LookAnswer answer{absl::OkStatus(), open.node_id, result.facts};
  if (!result.refused.empty()) {
    answer.status =
        absl::UnavailableError(absl::StrCat("node ", open.node_id, ": ", result.refused));
  } else if (result.facts.silent_field.empty() &&
             result.facts.token_files.size() != open.wish.query.token_files.size()) {
    answer.status =
        absl::UnavailableError(absl::StrCat("node ", open.node_id, " answered another question"));
  }
  open.wish.done(std::move(answer));
}

void NodeLooks::GiveUpWaiting(const Membership& members, bool await_nodes, int64_t now_ms) {
  std::erase_if(waiting_, [&](Waiting& waiting) {
    if (!Wanted(waiting.wish)) {
      return true;
    }
    bool any = false;
    Choose(waiting.wish, members, &any);
    if ((any || await_nodes) && now_ms < waiting.due_ms) {
      return false;
    }
    waiting.wish.done({any ? absl::UnavailableError("all nodes are busy with other looks at paths")
                           : NobodyHere(waiting.wish)});
    return true;
  });
}

void NodeLooks::GiveUpOpen(const Membership& members, int64_t now_ms) {
  std::erase_if(open_, [&](const auto& entry) {
    const Open& open = entry.second;
    const NodeRecord* node = members.Find(open.node_id);
    const bool gone = node == nullptr || node->stream != open.stream || node->IsGone();
    const bool wanted = Wanted(open.wish);
    if (wanted && !gone && now_ms < open.due_ms) {
      return false;
    }
    --of_node_[open.node_id];
    if (wanted) {
      open.wish.done({absl::UnavailableError(absl::StrCat("node ",
                                                          open.node_id,
                                                          gone ? " went away" : " did not answer",
                                                          " while it looked at the paths")),
                      open.node_id});
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
    const NodeRecord* node = Choose(next->wish, members, &any);
    if (node == nullptr) {
      ++next;
      continue;
    }
    const int64_t id = ++last_id_;
    const int64_t limit_ms = next->wish.limit_ms;
    orders.push_back({*node->stream, {id, next->wish.query, limit_ms}});
    ++of_node_[node->facts.node_id];
    open_[id] = {std::move(next->wish),
                 now_ms + limit_ms + GraceMs(limit_ms),
                 node->facts.node_id,
                 *node->stream};
    next = waiting_.erase(next);
  }
  return orders;
}

}  // namespace ravel::coordinator
