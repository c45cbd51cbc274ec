#pragma once

// Decides which job gets which devices, and when: a pure core. Free devices are counted when one is
// taken or freed, and jobs wait in groups of equal shape, so the cost of a decision follows the
// number of changes, not of waiting jobs.

#include <compare>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "common/model/job_spec.h"
#include "coordinator/jobs/admission.h"
#include "coordinator/jobs/gpu_recipes.h"

namespace ravel::coordinator {

// The devices that a job asks for. If the first of several jobs with equal shapes does not fit,
// none does.
struct Shape {
  bool cpu = true;
  int64_t wanted = 0;
  plan::Transport transport = plan::Transport::kAuto;
  std::vector<int64_t> sizes;                 // that are allowed
  int64_t together = 1;                       // devices of one host that are taken or left as one
  plan::Recipe recipe = plan::Recipe::kNone;  // that the devices must not lack
  std::vector<std::string> avoid;             // nodes, ascending
  auto operator<=>(const Shape&) const = default;
};
Shape ShapeOf(const plan::JobSpec& spec, const std::set<std::string>& avoid = {});

struct DeviceRef {
  std::string node_id;
  int64_t device = 0;
  auto operator<=>(const DeviceRef&) const = default;
};

// A node as the scheduler sees it.
struct NodePlaces {
  std::string host_id;
  std::string address;
  std::vector<bool> cpu;              // by device: of kind cpu, else gpu
  bool usable = false;                // new ranks may go there
  std::vector<RecipeSet> lacks = {};  // by device; empty: all run every recipe
  bool operator==(const NodePlaces&) const = default;
};

// Devices of a node by kind: gpu, cpu.
struct NodeUse {
  int64_t held[2] = {0, 0};
  int64_t free[2] = {0, 0};
};

struct WaitingJob {
  std::string uid;
  int64_t order = 0;     // of submission: lower goes first
  int64_t start_ms = 0;  // monotonic: not before
  bool queued = true;    // false: it holds its place in the world and must be told when it has none
  Shape shape;
};

struct Placement {
  std::string uid;
  std::vector<RankPlace> places;
  std::string transport;
};

struct Decision {
  std::vector<Placement> placements;       // their devices are held by these jobs from now on
  std::vector<std::string> below_minimum;  // jobs that were not queued, and have to be
};

// Used only from the controller's strand.
class Scheduler {
 public:
  void SetNode(const std::string& node_id, NodePlaces places);
  // Sets the devices that the job holds, in place of those it held before. The node need not be
  // here.
  void Hold(const std::string& uid, std::vector<DeviceRef> devices);
  // Out of the pool, whoever holds it: what runs there cannot be ended.
  void SetBlocked(const DeviceRef& device, bool blocked);

  // The job waits like that, instead of as before.
  void Want(const WaitingJob& job);
  void Unwant(const std::string& uid);

  // Returns true if Decide would have anything to look at.
  bool IsDue(int64_t now_ms) const;
  // At most `most` placements; then it stays due.
  Decision Decide(int64_t now_ms, size_t most);

  int64_t Free(const Shape& shape) const;
  int64_t FreeOn(const std::string& node_id) const;
  NodeUse UseOf(const std::string& node_id) const;
  // Jobs that hold devices of the node.
  std::vector<std::string> JobsOn(const std::string& node_id) const;
  size_t queued() const { return queued_; }
  // Why it is not placed, in words; empty for who does not wait or would fit.
  std::string Explain(const std::string& uid) const;

 private:
  struct Node {
    NodePlaces places;
    std::map<int64_t, int> taken;     // by device: holders
    std::map<std::string, int> jobs;  // by holder: devices
    std::set<int64_t> blocked;
    int64_t free[2] = {0, 0};  // gpu, cpu
  };
  struct Group {
    std::set<std::pair<int64_t, std::string>> ready;  // in order of submission
    std::set<std::string> standing;                   // of these, who is not queued
    uint64_t tried = 0;                               // state of the pool in which it did not fit
    std::string obstacle;                             // of that try
  };
  using Groups = std::map<Shape, Group>;

  void Recount(const std::string& node_id, Node& node);
  void MakeReady(const WaitingJob& job);
  // Free devices for the shape by host, without those of nodes that it avoids.
  std::map<std::string, int64_t> FreeByHost(const Shape& shape) const;
  NodeOffer OfferOf(const std::string& node_id, const Shape& shape) const;
  std::vector<NodeOffer> Offers(const Shape& shape, int64_t size) const;
  std::vector<NodeOffer> OffersTogether(const Shape& shape, int64_t size) const;
  bool IsFree(const Node& node, int64_t device) const;
  // The node's free devices of the shape's kind that do not lack its recipe.
  std::vector<int64_t> FreeDevices(const Node& node, const Shape& shape) const;
  int64_t CountFree(const Node& node, const Shape& shape) const;
  // A placement without a job, or why there is none.
  absl::StatusOr<Placement> Fit(const Shape& shape) const;
  std::string TooFew(const Shape& shape, int64_t free) const;

  std::map<std::string, Node> nodes_;
  std::set<std::pair<int64_t, std::string>> by_free_[2];  // most free devices first
  int64_t free_[2] = {0, 0};
  uint64_t freed_[2] = {1, 1};  // rises when a device of the kind becomes free
  std::unordered_map<std::string, std::vector<DeviceRef>> held_;  // ascending
  std::unordered_map<std::string, WaitingJob> waiting_;
  std::set<std::pair<int64_t, std::string>> sleeping_;  // by when they may start
  Groups groups_;
  size_t queued_ = 0;
  bool changed_ = false;
};

}  // namespace ravel::coordinator
