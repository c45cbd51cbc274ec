// JobController: what the scheduler is told, and what it says. SyncSchedule gives the scheduler the
// devices a job holds and whether it waits, after each look at the job; Schedule takes at most
// kMostPlacements placements per turn, so that a burst of submissions does not delay messages. A
// job that waits for nothing but a device is not looked at again until something changes; one that
// holds devices is looked at every quarter of a second at least.

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>

#include "coordinator/jobs/job_controller.h"

namespace ravel::coordinator {
namespace {

constexpr int64_t kAvoidLookMs = 2000;

// More placements wait for the next turn, so that messages are heard in between.
constexpr size_t kMostPlacements = 8;
// However much depends on having been told: a job that holds devices is looked at that often.
constexpr int64_t kMostBetweenLooksMs = 250;

// Why no node offers a GPU, in the nodes' own words, equal ones once; empty where one does.
std::string WhyNoGpu(const std::map<std::string, NodeRecord>& nodes) {
  std::map<std::string, std::vector<std::string>> names_by_reason;
  for (const auto& [id, node] : nodes) {
    if (node.facts.incarnation.empty()) {
      continue;  // not here since the coordinator started: its devices are not known
    }
    for (const DeviceFacts& device : node.facts.devices) {
      if (device.kind == "gpu") {
        return "";
      }
    }
    names_by_reason[node.message.empty() ? "offers no GPU" : node.message].push_back(id);
  }
  if (names_by_reason.empty()) {
    return ": no node is connected";
  }
  std::string text = ": no node has a GPU";
  constexpr size_t kMostReasons = 3;
  size_t said = 0;
  for (const auto& [reason, names] : names_by_reason) {
    if (++said > kMostReasons) {
      absl::StrAppend(&text, "; and other reasons");
      break;
    }
    const size_t others = names.size() - 1;
    absl::StrAppend(&text, said == 1 ? " (" : "; ", names.front());
    if (others > 0) {
      absl::StrAppend(&text, " and ", others, " more");
    }
    absl::StrAppend(&text, ": ", reason);
  }
  return text + ")";
}

}  // namespace

void JobController::Wake(Entry& entry, int64_t due_ms) {
  agenda_.Add(entry.record.uid, due_ms);
}

int64_t JobController::NextLookMs(const Entry& entry, int64_t now_ms) const {
  if (entry.refused) {
    return now_ms + options_.tick_ms;  // the store is tried again
  }
  if (!HoldsDevices(entry.record.state)) {
    return entry.retention.due_ms();  // else nothing to do until something is heard
  }
  const int64_t between_ms =
      std::clamp(DetectionOf(entry) / 5, options_.tick_ms, kMostBetweenLooksMs);
  return now_ms + between_ms;
}

void JobController::SyncSchedule(Entry& entry) {
  NoteDeviceTime(entry);
  const JobRecord& record = entry.record;
  const std::vector<TrainerSlot>& slots = entry.run.slots;
  const std::tuple<int64_t, size_t, int64_t> held = {
      entry.run.epoch,
      slots.size(),
      std::count_if(
          slots.begin(), slots.end(), [](const TrainerSlot& slot) { return slot.exited; })};
  if (held != entry.held) {
    entry.held = held;
    std::vector<DeviceRef> devices;
    for (const TrainerSlot& slot : slots) {
      if (!slot.exited) {
        devices.push_back({slot.place.node_id, slot.place.device});
      }
    }
    scheduler_.Hold(record.uid, std::move(devices));
    WatchNodes(entry, NodesOf(entry));
  }
  const bool queued = record.state == JobState::kQueued;
  const bool waits =
      queued || (record.state == JobState::kRecovering && record.launched_epoch != record.epoch) ||
      record.state == JobState::kResizing;
  if (!waits || entry.run.phase != RunPhase::kIdle || !IsIdle(entry) || entry.settling > 0 ||
      entry.preparing > 0 || stale_.Of(record.uid)) {
    scheduler_.Unwant(record.uid);
    return;
  }
  // With the jitter of at most a tenth.
  const int64_t most_ms = record.spec.restart.max_backoff_ms * 11 / 10;
  entry.start.Follow(
      record.not_before_ms, parts_.clock->WallMs(), parts_.clock->MonotonicMs(), most_ms);
  const std::set<std::string> avoided = AvoidedNodes(entry);
  if (!avoided.empty()) {
    // Chosen for what is free now: looked at again, or a job would wait for nodes that are gone.
    Wake(entry, parts_.clock->MonotonicMs() + kAvoidLookMs);
  }
  scheduler_.Want(
      {record.uid, entry.order, entry.start.due_ms(), queued, ShapeOf(record.spec, avoided)});
}

int64_t JobController::DetectionOf(const Entry& entry) const {
  const int64_t asked_ms = entry.record.spec.detection_ms;
  return asked_ms == plan::JobSpec().detection_ms ? options_.detection_ms : asked_ms;
}

void JobController::WatchNodes(Entry& entry, std::set<std::string> nodes) {
  const auto tell = [this](const std::string& node_id) {
    const NodeRecord* node = membership_.Find(node_id);
    if (node != nullptr && node->stream) {
      Send(*node->stream, Welcome{cluster_id_, membership_.TimesOf(node_id).beat_ms(), {}});
    }
  };
  for (const std::string& node_id : entry.nodes) {
    if (!nodes.contains(node_id) && membership_.Unwatch(node_id, entry.record.uid)) {
      tell(node_id);
    }
  }
  const int64_t now_ms = parts_.clock->MonotonicMs();
  for (const std::string& node_id : nodes) {
    if (!entry.nodes.contains(node_id) &&
        membership_.Watch(node_id, entry.record.uid, DetectionOf(entry), now_ms)) {
      tell(node_id);
    }
  }
  entry.nodes = std::move(nodes);
}

void JobController::SyncNode(const std::string& node_id) {
  const NodeRecord* node = membership_.Find(node_id);
  if (node == nullptr) {
    return;
  }
  why_no_gpu_.reset();
  inventory_.reset();
  NodePlaces places{node->facts.host_id, node->facts.data_address, {}, false};
  for (const DeviceFacts& device : node->facts.devices) {
    places.cpu.push_back(device.kind == "cpu");
    places.lacks.push_back(places.cpu.back() ? RecipeSet{0} : RecipesLackedBy(device.model));
  }
  places.usable = node->TakesWork() && !stale_.On(node_id);
  scheduler_.SetNode(node_id, std::move(places));
}

void JobController::Schedule() {
  for (const std::string& node_id : membership_.TakeChanged()) {
    SyncNode(node_id);
  }
  for (const std::string& node_id : stale_.TakeChangedNodes()) {
    SyncNode(node_id);
  }
  for (const std::string& uid : stale_.TakeChangedJobs()) {
    if (Entry* entry = FindEntry(uid)) {
      SyncSchedule(*entry);
    }
  }
  const int64_t now_ms = parts_.clock->MonotonicMs();
  if ((!expected_nodes_.empty() || membership_.HasUntried()) && now_ms < registration_until_ms_) {
    return;  // nodes are on their way back
  }
  LoseAbsentNodes();
  if (!scheduler_.IsDue(now_ms)) {
    return;
  }
  Decision decision = scheduler_.Decide(now_ms, kMostPlacements);
  for (const std::string& uid : decision.below_minimum) {
    if (Entry* entry = FindEntry(uid)) {
      Do(*entry, MakeEvent(JobEventKind::kBelowMinimum));
    }
  }
  for (Placement& placement : decision.placements) {
    Place(std::move(placement));
  }
}

void JobController::Place(Placement placement) {
  Entry* entry = FindEntry(placement.uid);
  if (entry == nullptr) {
    scheduler_.Hold(placement.uid, {});
    return;
  }
  JobEvent event = MakeEvent(JobEventKind::kPlaced);
  event.world_size = static_cast<int64_t>(placement.places.size());
  event.epoch_floor = entry->epoch_floor;
  entry->run = JobRun();
  for (RankPlace& place : placement.places) {
    TrainerSlot slot;
    slot.place = std::move(place);
    entry->run.slots.push_back(std::move(slot));
  }
  entry->run.transport = std::move(placement.transport);
  entry->run.phase = RunPhase::kPreparing;
  entry->held = {-1, 0, 0};
  Do(*entry, std::move(event));
}

std::string JobController::WhyQueued(const std::string& uid) const {
  const auto found = entries_.find(uid);
  return found == entries_.end() ? "" : WhyQueued(found->second);
}

std::string JobController::WhyQueued(const Entry& entry) const {
  if (entry.record.state != JobState::kQueued) {
    return "";
  }
  std::string why = scheduler_.Explain(entry.record.uid);
  if (!why.empty() && !entry.record.spec.cpu_devices) {
    if (!why_no_gpu_) {
      why_no_gpu_ = WhyNoGpu(membership_.nodes());
    }
    why += *why_no_gpu_;
  }
  return why;
}

}  // namespace ravel::coordinator
