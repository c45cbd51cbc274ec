#pragma once

// Which devices a job should rather not be placed on, and which nodes do nobody good: pure, time
// comes in as an argument (monotonic). In memory only: a restarted coordinator trusts everybody
// again, but for quarantines.

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace ravel::coordinator {

// From this weight on a job is rather smaller than there; below it only prefers other places.
inline constexpr int64_t kShunned = 2;

// One failure of a job, and where.
struct NodeFailure {
  std::string node;
  int64_t device = -1;  // -1: the whole node
  std::string reason;
  std::string job_uid;
  int64_t attempt = 0;
  bool starting = false;  // before all ranks were ready
};

// Returns the weight of a failure against its place; 0 if it says nothing about the place.
int64_t BlameWeight(const NodeFailure& failure);
// It speaks against the machine, whatever the job: devices that fail, trainers that cannot start.
bool BlamesMachine(const NodeFailure& failure);

// Places where one job has failed: the k-th failure at a place keeps the job from there for 10 s x
// 2^(k-1), at most 10 minutes, and is forgotten 10 minutes later.
class AvoidSet {
 public:
  // Returns how long the place is avoided from now on; 0 when the failure says nothing of it.
  int64_t Add(const NodeFailure& failure, int64_t now_ms);
  int64_t Weight(const std::string& node, int64_t device, int64_t now_ms) const;
  // Those with a place that weighs at least so much.
  std::set<std::string> Nodes(int64_t weight, int64_t now_ms) const;

 private:
  struct Mark {
    int64_t failures = 0;
    int64_t weight = 0;
    int64_t until_ms = 0;
  };
  std::map<std::pair<std::string, int64_t>, Mark> marks_;
};

// Failures that all jobs have met on each node in the last 10 minutes.
class NodePenalties {
 public:
  // True: that many distinct attempts blame the machine that it should be quarantined.
  bool Add(const NodeFailure& failure, int64_t now_ms);
  // Distinct attempts that failed there.
  int64_t Count(const std::string& node, int64_t now_ms) const;
  // Those with a count above 0.
  std::set<std::string> Nodes(int64_t now_ms) const;
  void Clear(const std::string& node) { failures_.erase(node); }

 private:
  struct Failure {
    std::string job_uid;
    int64_t attempt = 0;
    int64_t time_ms = 0;
    bool machine = false;
  };
  std::map<std::string, std::vector<Failure>> failures_;
};

// Returns true if one more of `nodes`, of which `held` are quarantined already, may be quarantined
// automatically. A job that breaks every device must not take the cluster away from all others.
bool MayQuarantine(int64_t nodes, int64_t held);

}  // namespace ravel::coordinator
