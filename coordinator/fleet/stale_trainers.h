#pragma once

// Trainers of epochs that are over but still run on a node: their devices are taken, and their job
// waits for them, until they are reported gone.

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>

namespace ravel::coordinator {

using TrainerKey = std::tuple<std::string, int64_t, int64_t>;  // job, epoch, rank

// Used only from the controller's strand.
class StaleTrainers {
 public:
  // False: known already.
  bool Insert(const std::string& node_id, const TrainerKey& key) {
    if (!by_node_[node_id].insert(key).second) {
      return false;
    }
    ++by_job_[std::get<0>(key)];
    changed_jobs_.insert(std::get<0>(key));
    changed_nodes_.insert(node_id);
    return true;
  }
  void Erase(const std::string& node_id, const TrainerKey& key) {
    const auto node = by_node_.find(node_id);
    if (node != by_node_.end() && node->second.erase(key) > 0) {
      Forget(node_id, key);
      if (node->second.empty()) {
        by_node_.erase(node);
      }
    }
  }
  // All of the node but those that it names.
  void Keep(const std::string& node_id, const std::set<TrainerKey>& named) {
    const auto node = by_node_.find(node_id);
    if (node == by_node_.end()) {
      return;
    }
    for (const TrainerKey& key : std::set(node->second)) {
      if (!named.contains(key)) {
        Erase(node_id, key);
      }
    }
  }
  void ForgetNode(const std::string& node_id) {
    const auto node = by_node_.find(node_id);
    if (node != by_node_.end()) {
      for (const TrainerKey& key : node->second) {
        Forget(node_id, key);
      }
      by_node_.erase(node);
    }
  }
  bool On(const std::string& node_id) const { return by_node_.contains(node_id); }
  bool Of(const std::string& job_uid) const { return by_job_.contains(job_uid); }

  // Returns the nodes that have changed since the last call.
  std::set<std::string> TakeChangedNodes() { return std::exchange(changed_nodes_, {}); }
  std::set<std::string> TakeChangedJobs() { return std::exchange(changed_jobs_, {}); }

 private:
  void Forget(const std::string& node_id, const TrainerKey& key) {
    const std::string& uid = std::get<0>(key);
    if (--by_job_[uid] == 0) {
      by_job_.erase(uid);
      changed_jobs_.insert(uid);
    }
    changed_nodes_.insert(node_id);
  }

  std::map<std::string, std::set<TrainerKey>> by_node_;
  std::unordered_map<std::string, int64_t> by_job_;
  std::set<std::string> changed_nodes_;
  std::set<std::string> changed_jobs_;
};

}  // namespace ravel::coordinator
