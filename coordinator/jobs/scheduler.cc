// Places jobs on free devices. Jobs of equal shape form a group: if the oldest does not fit, none
// of them does, so one attempt per group suffices, and a group is tried again only when devices of
// its kind were freed (`tried` against `freed_`). Nodes are ordered by free devices, so a placement
// walks only the nodes that it uses. Cost of a decision: the number of groups plus the devices
// placed, not the number of jobs or nodes; a shape with a recipe or groups of a host looks at each
// node with free devices.

#include "coordinator/jobs/scheduler.h"

#include <algorithm>
#include <iterator>
#include <tuple>

#include <absl/strings/str_cat.h>

#include "common/model/recipes.h"
#include "common/signed_size.h"

namespace ravel::coordinator {

Shape ShapeOf(const plan::JobSpec& spec, const std::set<std::string>& avoid) {
  return {.cpu = spec.cpu_devices,
          .wanted = spec.device_count,
          .transport = spec.transport,
          .sizes = spec.elastic.sizes,
          .together = spec.tensor_across_nodes ? 1 : spec.tensor,
          .recipe = RecipeOfGpus(spec),
          .avoid = {avoid.begin(), avoid.end()}};
}

bool Scheduler::IsFree(const Node& node, int64_t device) const {
  return !node.taken.contains(device) && !node.blocked.contains(device);
}

std::vector<int64_t> Scheduler::FreeDevices(const Node& node, const Shape& shape) const {
  std::vector<int64_t> free;
  for (int64_t device = 0; device < std::ssize(node.places.cpu); ++device) {
    const bool lacks =
        device < std::ssize(node.places.lacks) && Has(At(node.places.lacks, device), shape.recipe);
    if (node.places.cpu[Size(device)] == shape.cpu && !lacks && IsFree(node, device)) {
      free.push_back(device);
    }
  }
  return free;
}

int64_t Scheduler::CountFree(const Node& node, const Shape& shape) const {
  return shape.recipe == plan::Recipe::kNone || node.places.lacks.empty()
             ? node.free[shape.cpu ? 1 : 0]
             : std::ssize(FreeDevices(node, shape));
}

void Scheduler::Recount(const std::string& node_id, Node& node) {
  int64_t free[2] = {0, 0};
  if (node.places.usable) {
    for (size_t device = 0; device < node.places.cpu.size(); ++device) {
      if (IsFree(node, static_cast<int64_t>(device))) {
        ++free[node.places.cpu[device] ? 1 : 0];
      }
    }
  }
  for (const int kind : {0, 1}) {
    if (free[kind] == node.free[kind]) {
      continue;
    }
    by_free_[kind].erase({-node.free[kind], node_id});
    if (free[kind] > 0) {
      by_free_[kind].insert({-free[kind], node_id});
    }
    if (free[kind] > node.free[kind]) {
      ++freed_[kind];
      changed_ = true;
    }
    free_[kind] += free[kind] - node.free[kind];
    node.free[kind] = free[kind];
  }
}

void Scheduler::SetNode(const std::string& node_id, NodePlaces places) {
  Node& node = nodes_[node_id];
  if (node.places == places) {
    return;
  }
  // Other models of as many devices may serve a shape that did not fit before.
  if (node.places.lacks != places.lacks) {
    ++freed_[0];
    changed_ = true;
  }
  node.places = std::move(places);
  Recount(node_id, node);
}

void Scheduler::Hold(const std::string& uid, std::vector<DeviceRef> devices) {
  std::sort(devices.begin(), devices.end());
  const auto found = held_.find(uid);
  static const std::vector<DeviceRef> kNone;
  const std::vector<DeviceRef>& before = found == held_.end() ? kNone : found->second;
  if (before == devices) {
    return;
  }
  std::set<std::string> touched;
  for (const DeviceRef& device : before) {
    Node& node = nodes_[device.node_id];
    if (--node.taken[device.device] == 0) {
      node.taken.erase(device.device);
    }
    if (--node.jobs[uid] == 0) {
      node.jobs.erase(uid);
    }
    touched.insert(device.node_id);
  }
  for (const DeviceRef& device : devices) {
    Node& node = nodes_[device.node_id];
    ++node.taken[device.device];
    ++node.jobs[uid];
    touched.insert(device.node_id);
  }
  if (devices.empty()) {
    held_.erase(uid);
  } else {
    held_[uid] = std::move(devices);
  }
  for (const std::string& node_id : touched) {
    Recount(node_id, nodes_[node_id]);
  }
}

void Scheduler::SetBlocked(const DeviceRef& device, bool blocked) {
  Node& node = nodes_[device.node_id];
  if (blocked) {
    node.blocked.insert(device.device);
  } else {
    node.blocked.erase(device.device);
  }
  Recount(device.node_id, node);
}

void Scheduler::MakeReady(const WaitingJob& job) {
  Group& group = groups_[job.shape];
  group.ready.insert({job.order, job.uid});
  // A group that did not fit still does not, but a job that is not queued has to hear it.
  if (!job.queued) {
    group.standing.insert(job.uid);
    group.tried = 0;
  }
  changed_ = changed_ || group.tried != freed_[job.shape.cpu ? 1 : 0];
}

void Scheduler::Want(const WaitingJob& job) {
  const auto found = waiting_.find(job.uid);
  if (found != waiting_.end()) {
    const WaitingJob& old = found->second;
    if (old.order == job.order && old.start_ms == job.start_ms && old.queued == job.queued &&
        old.shape == job.shape) {
      return;
    }
    Unwant(job.uid);
  }
  waiting_[job.uid] = job;
  queued_ += job.queued ? 1 : 0;
  sleeping_.insert({job.start_ms, job.uid});  // Decide wakes it
}

void Scheduler::Unwant(const std::string& uid) {
  const auto found = waiting_.find(uid);
  if (found == waiting_.end()) {
    return;
  }
  const WaitingJob& job = found->second;
  sleeping_.erase({job.start_ms, uid});
  const auto group = groups_.find(job.shape);
  if (group != groups_.end()) {
    group->second.ready.erase({job.order, uid});
    group->second.standing.erase(uid);
    if (group->second.ready.empty()) {
      groups_.erase(group);
    }
  }
  queued_ -= job.queued ? 1 : 0;
  waiting_.erase(found);
}

bool Scheduler::IsDue(int64_t now_ms) const {
  return changed_ || (!sleeping_.empty() && sleeping_.begin()->first <= now_ms);
}

std::map<std::string, int64_t> Scheduler::FreeByHost(const Shape& shape) const {
  std::map<std::string, int64_t> hosts;
  for (const auto& [free, node_id] : by_free_[shape.cpu ? 1 : 0]) {
    if (!std::binary_search(shape.avoid.begin(), shape.avoid.end(), node_id)) {
      const Node& node = nodes_.at(node_id);
      hosts[HostOf(node.places.host_id, node_id)] += CountFree(node, shape);
    }
  }
  return hosts;
}

int64_t Scheduler::Free(const Shape& shape) const {
  const int kind = shape.cpu ? 1 : 0;
  if (shape.together > 1 || shape.recipe != plan::Recipe::kNone) {
    int64_t whole = 0;
    for (const auto& [host, free] : FreeByHost(shape)) {
      whole += free / shape.together * shape.together;
    }
    return whole;
  }
  int64_t free = free_[kind];
  for (const std::string& node_id : shape.avoid) {
    const auto node = nodes_.find(node_id);
    free -= node == nodes_.end() ? 0 : node->second.free[kind];
  }
  return free;
}

NodeOffer Scheduler::OfferOf(const std::string& node_id, const Shape& shape) const {
  const Node& node = nodes_.at(node_id);
  return {node_id, node.places.host_id, node.places.address, FreeDevices(node, shape)};
}

// The best nodes that have `size` devices together.
std::vector<NodeOffer> Scheduler::Offers(const Shape& shape, int64_t size) const {
  if (shape.together > 1) {
    return OffersTogether(shape, size);
  }
  std::vector<NodeOffer> offers;
  int64_t offered = 0;
  for (const auto& [free, node_id] : by_free_[shape.cpu ? 1 : 0]) {
    if (offered >= size) {
      break;
    }
    if (std::binary_search(shape.avoid.begin(), shape.avoid.end(), node_id)) {
      continue;
    }
    NodeOffer offer = OfferOf(node_id, shape);
    if (!offer.devices.empty()) {
      offered += std::ssize(offer.devices);
      offers.push_back(std::move(offer));
    }
  }
  return offers;
}

// Exactly `size` devices, of each host whole groups: those of the fullest hosts.
std::vector<NodeOffer> Scheduler::OffersTogether(const Shape& shape, int64_t size) const {
  std::set<std::pair<int64_t, std::string>> hosts;
  for (const auto& [host, free] : FreeByHost(shape)) {
    hosts.insert({-free, host});
  }
  std::map<std::string, int64_t> taken;  // by host: devices still to be taken
  for (const auto& [free, host] : hosts) {
    const int64_t whole = -free / shape.together * shape.together;
    taken[host] = std::min(size, whole);
    size -= taken[host];
  }
  std::vector<NodeOffer> offers;
  for (const auto& [free, node_id] : by_free_[shape.cpu ? 1 : 0]) {
    if (std::binary_search(shape.avoid.begin(), shape.avoid.end(), node_id)) {
      continue;
    }
    NodeOffer offer = OfferOf(node_id, shape);
    int64_t& rest = taken[HostOf(offer.host_id, node_id)];
    offer.devices.resize(Size(std::min(rest, std::ssize(offer.devices))));
    rest -= std::ssize(offer.devices);
    if (!offer.devices.empty()) {
      offers.push_back(std::move(offer));
    }
  }
  return offers;
}

std::string Scheduler::TooFew(const Shape& shape, int64_t free) const {
  return absl::StrCat(
      "needs ",
      shape.sizes.empty() ? 1 : shape.sizes.front(),
      " free ",
      shape.cpu ? "cpu" : "gpu",
      " devices",
      shape.recipe == plan::Recipe::kNone
          ? ""
          : absl::StrCat(" that multiply codes of ", plan::RecipeName(shape.recipe)),
      ", ",
      free,
      " are free",
      shape.together == 1 ? "" : absl::StrCat(" in whole groups of ", shape.together, " on a host"),
      shape.avoid.empty()
          ? ""
          : absl::StrCat(" outside of the ", shape.avoid.size(), " nodes it avoids"));
}

absl::StatusOr<Placement> Scheduler::Fit(const Shape& shape) const {
  const int64_t free = Free(shape);
  const int64_t size = ChooseSize(shape.sizes, shape.wanted, free);
  if (size == 0) {
    return absl::ResourceExhaustedError(TooFew(shape, free));
  }
  Placement placement;
  placement.places = PlaceRanks(size, Offers(shape, size));
  ASSIGN_OR_RETURN(placement.transport, TransportOf(shape.cpu, shape.transport, placement.places));
  return placement;
}

Decision Scheduler::Decide(int64_t now_ms, size_t most) {
  Decision decision;
  while (!sleeping_.empty() && sleeping_.begin()->first <= now_ms) {
    const std::string uid = sleeping_.begin()->second;
    sleeping_.erase(sleeping_.begin());
    MakeReady(waiting_.at(uid));
  }
  if (!changed_) {
    return decision;
  }
  // The heads of all groups that may fit, in order of submission.
  std::map<std::pair<int64_t, std::string>, Groups::iterator> heads;
  for (auto group = groups_.begin(); group != groups_.end(); ++group) {
    if (group->second.tried != freed_[group->first.cpu ? 1 : 0]) {
      heads.insert({*group->second.ready.begin(), group});
    }
  }
  while (!heads.empty() && decision.placements.size() < most) {
    const auto [head, iterator] = *heads.begin();
    heads.erase(heads.begin());
    Group& group = iterator->second;
    absl::StatusOr<Placement> fit = Fit(iterator->first);
    if (!fit.ok()) {
      group.tried = freed_[iterator->first.cpu ? 1 : 0];
      group.obstacle = std::string(fit.status().message());
      decision.below_minimum.insert(
          decision.below_minimum.end(), group.standing.begin(), group.standing.end());
      continue;
    }
    const auto next = std::next(group.ready.begin());
    if (next != group.ready.end()) {
      heads.insert({*next, iterator});
    }
    fit->uid = head.second;
    std::vector<DeviceRef> devices;
    for (const RankPlace& place : fit->places) {
      devices.push_back({place.node_id, place.device});
    }
    Unwant(fit->uid);
    Hold(fit->uid, std::move(devices));
    decision.placements.push_back(*std::move(fit));
  }
  changed_ = !heads.empty();
  return decision;
}

int64_t Scheduler::FreeOn(const std::string& node_id) const {
  const auto node = nodes_.find(node_id);
  return node == nodes_.end() ? 0 : node->second.free[0] + node->second.free[1];
}

NodeUse Scheduler::UseOf(const std::string& node_id) const {
  NodeUse use;
  const auto found = nodes_.find(node_id);
  if (found == nodes_.end()) {
    return use;
  }
  const Node& node = found->second;
  for (const auto& [device, holders] : node.taken) {
    const auto at = static_cast<size_t>(device);
    if (holders > 0 && at < node.places.cpu.size()) {
      ++use.held[node.places.cpu[at] ? 1 : 0];
    }
  }
  use.free[0] = node.free[0];
  use.free[1] = node.free[1];
  return use;
}

std::vector<std::string> Scheduler::JobsOn(const std::string& node_id) const {
  std::vector<std::string> jobs;
  const auto node = nodes_.find(node_id);
  if (node != nodes_.end()) {
    for (const auto& [uid, devices] : node->second.jobs) {
      jobs.push_back(uid);
    }
  }
  return jobs;
}

std::string Scheduler::Explain(const std::string& uid) const {
  const auto found = waiting_.find(uid);
  if (found == waiting_.end()) {
    return "";
  }
  const Shape& shape = found->second.shape;
  const int64_t free = Free(shape);
  if (ChooseSize(shape.sizes, shape.wanted, free) == 0) {
    return TooFew(shape, free);
  }
  const auto group = groups_.find(shape);
  const bool tried = group != groups_.end() && group->second.tried == freed_[shape.cpu ? 1 : 0];
  return tried ? group->second.obstacle : "";
}

}  // namespace ravel::coordinator
