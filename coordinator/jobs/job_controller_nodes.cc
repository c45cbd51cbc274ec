// JobController: which nodes are to be trusted, and what an operator says of them. A failure is
// weighed against its node (NoteFailure); a node that fails several jobs is quarantined, and one
// job avoids places where it failed itself. Avoiding is a preference: it never makes a job smaller
// than it could be, and shunning never keeps it from running. Holds are durable; changes of a
// node's row are written one at a time, each composed when its turn comes.

#include <algorithm>
#include <map>
#include <utility>

#include <absl/strings/str_cat.h>

#include "common/logging.h"
#include "coordinator/jobs/job_controller.h"

namespace ravel::coordinator {

std::set<std::string> JobController::ShunnedNodes(const Entry& entry) const {
  std::set<std::string> nodes = entry.avoided.Nodes(kShunned, parts_.clock->MonotonicMs());
  nodes.insert(entry.unfit.begin(), entry.unfit.end());
  return nodes;
}

// To prefer is not to forbid: what is avoided leaves the job as large as it could be, what is
// shunned leaves it a size that is allowed, and else it takes what there is.
std::set<std::string> JobController::AvoidedNodes(const Entry& entry) const {
  const int64_t now_ms = parts_.clock->MonotonicMs();
  const plan::JobSpec& spec = entry.record.spec;
  // A cache that is too small stays so, as do the flags by which a node refused the job. Where no
  // other node can run it the job goes there all the same, to end with that refusal.
  std::set<std::string> never;
  if (!entry.unfit.empty() && FitsElsewhere(entry, "")) {
    never = entry.unfit;
  }
  const auto size_without = [&](const std::set<std::string>& nodes) {
    return ChooseSize(spec, scheduler_.Free(ShapeOf(spec, nodes)));
  };
  const auto with_never = [&never](std::set<std::string> nodes) {
    nodes.insert(never.begin(), never.end());
    return nodes;
  };
  std::set<std::string> avoided = entry.avoided.Nodes(1, now_ms);
  avoided.merge(penalties_.Nodes(now_ms));
  const int64_t size = size_without(never);
  if (avoided.empty() || size == 0) {
    return never;  // what comes next may be what is avoided
  }
  avoided = with_never(std::move(avoided));
  if (size_without(avoided) == size) {
    return avoided;
  }
  std::set<std::string> shunned = with_never(ShunnedNodes(entry));
  return size_without(shunned) > 0 ? shunned : never;
}

bool JobController::FitsElsewhere(const Entry& entry, const std::string& node_id) const {
  const plan::JobSpec& spec = entry.record.spec;
  const plan::Recipe recipe = RecipeOfGpus(spec);
  std::map<std::string, int64_t> hosts;
  for (const auto& [id, node] : membership_.nodes()) {
    if (id == node_id || entry.lacking.contains(id) || entry.unfit.contains(id) ||
        !node.TakesWork()) {
      continue;
    }
    hosts[HostOf(node.facts.host_id, id)] += std::count_if(
        node.facts.devices.begin(), node.facts.devices.end(), [&](const DeviceFacts& device) {
          return (device.kind == "cpu") == spec.cpu_devices &&
                 (recipe == plan::Recipe::kNone || !Has(RecipesLackedBy(device.model), recipe));
        });
  }
  const int64_t together = ShapeOf(spec).together;
  int64_t devices = 0;
  for (const auto& [host, here] : hosts) {
    devices += here / together * together;
  }
  return ChooseSize(spec, devices) > 0;
}

std::string JobController::ReasonOfRefusal(Entry& entry,
                                           const std::string& node_id,
                                           const std::string& said) {
  if (said.empty()) {
    return "StartFailed";
  }
  if (said == "DataCacheTooSmall") {
    entry.unfit.insert(node_id);
    return FitsElsewhere(entry, node_id) ? said : "DataCachesTooSmall";
  }
  if (said != "DataError" && said != "EnvironmentRefused") {
    return said;
  }
  entry.lacking.insert(node_id);
  return FitsElsewhere(entry, node_id) ? "PreflightFailed" : said;
}

std::vector<JobEventRecord> JobController::NoteFailure(Entry& entry, const FailureCause& cause) {
  std::vector<JobEventRecord> events;
  NodeFailure failure{.node = cause.node,
                      .reason = cause.reason,
                      .job_uid = entry.record.uid,
                      .attempt = entry.record.attempt,
                      .starting = cause.starting};
  const std::vector<TrainerSlot>& slots = entry.run.slots;
  if (cause.reason == "DeviceError" && cause.rank >= 0 &&
      cause.rank < static_cast<int64_t>(slots.size())) {
    failure.device = slots[static_cast<size_t>(cause.rank)].place.device;
  }
  const auto tell = [&](const std::string& type, std::string message) {
    JobEventRecord& event = events.emplace_back();
    event.time_ms = parts_.clock->WallMs();
    event.job_uid = entry.record.uid;
    event.epoch = entry.record.epoch;
    event.attempt = entry.record.attempt;
    event.step = cause.step;
    event.type = type;
    event.reason = cause.reason;
    event.node = cause.node;
    event.rank = cause.rank;
    event.message = std::move(message);
  };
  const int64_t now_ms = parts_.clock->MonotonicMs();
  const int64_t avoid_ms = entry.avoided.Add(failure, now_ms);
  if (avoid_ms > 0) {
    const std::string place =
        failure.device < 0 ? cause.node : absl::StrCat(cause.node, ":", failure.device);
    tell(
        "NodeAvoided",
        absl::StrCat("this job prefers other places than ", place, " for ", avoid_ms / 1000, " s"));
  }
  if (!penalties_.Add(failure, now_ms)) {
    return events;
  }
  int64_t here = 0;
  int64_t held = 0;
  for (const auto& [id, node] : membership_.nodes()) {
    here += node.IsGone() ? 0 : 1;
    held += node.hold == NodeHold::kQuarantined ? 1 : 0;
  }
  const NodeRecord* node = membership_.Find(cause.node);
  if (node == nullptr || node->hold != NodeHold::kNone || !MayQuarantine(here, held)) {
    return events;
  }
  Quarantine(entry, cause);
  return events;
}

// The event follows when the hold is durable; until then the job itself keeps away (`avoided`).
void JobController::Quarantine(Entry& entry, const FailureCause& cause) {
  const std::string reason = absl::StrCat(penalties_.Count(cause.node, parts_.clock->MonotonicMs()),
                                          " attempts failed there, the last with ",
                                          cause.reason);
  JobEventRecord event;
  event.time_ms = parts_.clock->WallMs();
  event.job_uid = entry.record.uid;
  event.epoch = entry.record.epoch;
  event.attempt = entry.record.attempt;
  event.step = cause.step;
  event.type = "NodeQuarantined";
  event.reason = cause.reason;
  event.node = cause.node;
  event.rank = cause.rank;
  event.message =
      absl::StrCat(reason, "; it gets no new work until `ravelctl nodes release ", cause.node, "`");
  SaveHold(cause.node, NodeHold::kQuarantined, reason, [=, this](const absl::Status& saved) {
    if (!saved.ok()) {
      log::Warning(absl::StrCat(
          "node ", event.node, " could not be quarantined: ", std::string(saved.message())));
      return;
    }
    log::Warning(absl::StrCat("node ", event.node, " is quarantined: ", reason));
    Record(event);
  });
}

NodeRow JobController::RowOf(const std::string& node_id) const {
  const NodeRecord* node = membership_.Find(node_id);
  NodeRow row{node_id, "", parts_.clock->WallMs()};
  if (node != nullptr) {
    row.incarnation = node->facts.incarnation;
    row.hold = static_cast<int64_t>(node->hold);
    row.hold_reason = node->hold_reason;
    if (node->IsGone()) {
      row.incarnation.clear();  // nobody waits for it after a restart
      row.has_left = node->state == NodeState::kLeft ? 1 : 0;
      row.gone_reason = node->message;
      row.seen_ms = std::max(node->heard_wall_ms, node->remembered_wall_ms);
    }
    row.host_id = node->facts.host_id;
    row.work_lock = node->facts.work_lock;
  }
  return row;
}

std::optional<HelloOutcome> JobController::AdmitNode(StreamId stream,
                                                     const HelloMessage& hello,
                                                     int64_t now_ms) {
  if (NameIsAwaited(hello)) {
    log::Info(
        absl::StrCat("node ", hello.node_id, ": another daemon of this name is awaited first"));
    parts_.fleet->Close(stream);
    return std::nullopt;
  }
  HelloOutcome outcome;
  if (!hello.cluster_id.empty() && hello.cluster_id != cluster_id_) {
    outcome.rejected = absl::StrCat("node ",
                                    hello.node_id,
                                    " belongs to cluster ",
                                    hello.cluster_id,
                                    ", this is ",
                                    cluster_id_);
  } else if (hello.term > term_) {
    // The daemon would not listen to an older coordinator; its trainers go on without one.
    log::Error(
        absl::StrCat("node ",
                     hello.node_id,
                     " has heard of term ",
                     hello.term,
                     ", this coordinator is of term ",
                     term_,
                     ": its state is older than what runs. If a backup was restored and no other "
                     "coordinator runs, start it once with --raise-term ",
                     hello.term + 1));
    parts_.fleet->Close(stream);
    return std::nullopt;
  } else {
    outcome = membership_.OnHello(stream, hello, now_ms, parts_.clock->WallMs());
  }
  if (!outcome.rejected.empty()) {
    log::Warning(absl::StrCat("a daemon was refused: ", outcome.rejected));
    Send(stream, Rejected{outcome.rejected});
    parts_.fleet->Close(stream);
    return std::nullopt;
  }
  known_nodes_.erase(hello.node_id);
  return outcome;
}

bool JobController::NameIsAwaited(const HelloMessage& hello) const {
  const auto known = known_nodes_.find(hello.node_id);
  if (known == known_nodes_.end() || parts_.clock->MonotonicMs() >= registration_until_ms_) {
    return false;
  }
  const NodeRow& row = known->second;
  const bool successor =
      !hello.work_lock.empty() && hello.work_lock == row.work_lock && hello.host_id == row.host_id;
  return hello.incarnation != row.incarnation && !successor;
}

void JobController::WriteNode(const std::string& node_id, NodeWrite write) {
  std::deque<NodeWrite>& writes = node_writes_[node_id];
  writes.push_back(std::move(write));
  if (writes.size() == 1) {
    BeginNodeWrite(node_id);
  }
}

void JobController::BeginNodeWrite(const std::string& node_id) {
  const auto end = [this, node_id](const absl::Status& status) {
    node_writes_.at(node_id).front().done(status);
    node_writes_.at(node_id).pop_front();
    if (node_writes_.at(node_id).empty()) {
      node_writes_.erase(node_id);
    } else {
      BeginNodeWrite(node_id);
    }
  };
  const absl::StatusOr<StoreChange> change = node_writes_.at(node_id).front().compose();
  if (!change.ok() || (change->nodes.empty() && change->deleted_nodes.empty())) {
    end(change.status());
    return;
  }
  Persist(std::make_shared<StoreChange>(*change), end);
}

void JobController::SaveRow(const std::string& node_id, const std::string& what) {
  const auto compose = [this, node_id] {
    StoreChange change;
    if (membership_.Find(node_id) != nullptr) {
      change.nodes.push_back(RowOf(node_id));
    }
    return absl::StatusOr<StoreChange>(std::move(change));
  };
  WriteNode(node_id, {compose, [node_id, what](const absl::Status& status) {
                        if (!status.ok()) {
                          log::Warning(absl::StrCat("node ",
                                                    node_id,
                                                    ": ",
                                                    what,
                                                    " could not be noted in the database: ",
                                                    std::string(status.message())));
                        }
                      }});
}

void JobController::SaveHold(const std::string& node_id,
                             NodeHold hold,
                             const std::string& reason,
                             StatusAnswer done) {
  const auto compose = [=, this]() -> absl::StatusOr<StoreChange> {
    const NodeRecord* node = membership_.Find(node_id);
    if (node == nullptr) {
      return absl::NotFoundError(absl::StrCat("no node ", node_id, "; see `ravelctl nodes list`"));
    }
    StoreChange change;
    if (node->hold != hold || node->hold_reason != reason) {
      change.nodes.push_back(RowOf(node_id));
      change.nodes.back().hold = static_cast<int64_t>(hold);
      change.nodes.back().hold_reason = reason;
    }
    return change;
  };
  WriteNode(node_id, {compose, [=, this](const absl::Status& status) {
                        if (status.ok()) {
                          membership_.SetHold(node_id, hold, reason);
                          SyncNode(node_id);
                        }
                        done(status);
                      }});
}

void JobController::HoldNode(const std::string& node_id,
                             NodeHold hold,
                             bool lift,
                             const std::string& reason,
                             Answer<NodeView> answer) {
  const NodeRecord* node = membership_.Find(node_id);
  if (node == nullptr) {
    answer(absl::NotFoundError(absl::StrCat("no node ", node_id, "; see `ravelctl nodes list`")));
    return;
  }
  if (lift && node->hold != hold && node->hold != NodeHold::kNone) {
    const bool drained = node->hold == NodeHold::kDrained;
    answer(absl::FailedPreconditionError(
        absl::StrCat("node ",
                     node_id,
                     drained ? " is drained, not quarantined: use `ravelctl nodes undrain`"
                             : " is quarantined, not drained: use `ravelctl nodes release`")));
    return;
  }
  const NodeHold wanted = lift ? NodeHold::kNone : hold;
  SaveHold(node_id, wanted, lift ? "" : reason, [=, this](const absl::Status& status) {
    if (!status.ok()) {
      answer(status);
      return;
    }
    log::Info(absl::StrCat("node ",
                           node_id,
                           lift ? ": its hold is lifted" : ": held, ",
                           lift ? "" : std::string(NodeHoldName(hold)),
                           reason.empty() ? "" : ": ",
                           reason));
    if (lift) {
      penalties_.Clear(node_id);
      Schedule();
    } else if (hold == NodeHold::kDrained) {
      DrainNode(node_id, reason.empty() ? "drained by an operator" : reason);
    }
    answer(ViewOfNode(*membership_.Find(node_id)));
  });
}

std::string JobController::NodeStateOf(const NodeRecord& node) const {
  if (node.hold == NodeHold::kNone || node.IsGone()) {
    return std::string(NodeStateName(node.state));
  }
  const bool busy = !scheduler_.JobsOn(node.facts.node_id).empty();
  return node.hold == NodeHold::kDrained && busy ? "DRAINING"
                                                 : std::string(NodeHoldName(node.hold));
}

NodeView JobController::ViewOfNode(const NodeRecord& node) const {
  const std::string& id = node.facts.node_id;
  NodeView view{.record = node,
                .state = NodeStateOf(node),
                .message = node.message,
                .penalties = penalties_.Count(id, parts_.clock->MonotonicMs()),
                .devices = static_cast<int64_t>(node.facts.devices.size())};
  if (node.hold == NodeHold::kNone) {
    return view;
  }
  const std::string why = absl::StrCat(node.hold == NodeHold::kDrained ? "drained" : "quarantined",
                                       node.hold_reason.empty() ? "" : ": ",
                                       node.hold_reason);
  view.message = node.message.empty() ? why : absl::StrCat(why, "; ", node.message);
  return view;
}

std::vector<NodeView> JobController::Nodes() const {
  std::vector<NodeView> views;
  for (const auto& [id, node] : membership_.nodes()) {
    views.push_back(ViewOfNode(node));
    views.back().devices_free = scheduler_.FreeOn(id);
    const std::string degraded = zombies_.Describe(id);
    std::string& message = views.back().message;
    absl::StrAppend(&message, message.empty() || degraded.empty() ? "" : "; ", degraded);
  }
  return views;
}

void JobController::LookOnNode(LookWish wish) {
  const int64_t now_ms = parts_.clock->MonotonicMs();
  looks_.Add(std::move(wish), membership_, NodesReturn(now_ms), now_ms);
  SendLooks();
}

void JobController::SendLooks() {
  const int64_t now_ms = parts_.clock->MonotonicMs();
  for (LookOrder& order : looks_.Advance(membership_, NodesReturn(now_ms), now_ms)) {
    Send(order.stream, std::move(order.look));
  }
}

DeviceInventory JobController::Inventory() const {
  // Each submission asks, and there may be thousands of nodes.
  if (inventory_ && !membership_.has_changed()) {
    return *inventory_;
  }
  DeviceInventory inventory;
  Hosts hosts;
  for (const auto& [id, node] : membership_.nodes()) {
    if (!node.IsGone()) {
      AddNode(id, node.facts.devices, inventory);
      hosts.Add(id, node.facts.host_id, node.facts.devices);
    }
  }
  hosts.Tell(inventory);
  inventory_ = inventory;
  return inventory;
}

}  // namespace ravel::coordinator
