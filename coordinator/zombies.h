#pragma once

// Trainers that SIGKILL did not end in time (a hung mount, a wedged driver): over for their job,
// and their device is out of the pool until their exit is reported after all.

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>

#include "coordinator/scheduler.h"
#include "coordinator/stale_trainers.h"

namespace ravel::coordinator {

// Used only from the controller's strand.
class Zombies {
 public:
  void Add(const std::string& node_id,
           const TrainerKey& key,
           int64_t device,
           const std::string& job_name,
           int64_t ordered = 0) {
    by_node_[node_id][key] = {device, job_name, ordered};
  }
  bool Has(const std::string& node_id, const TrainerKey& key) const {
    const auto node = by_node_.find(node_id);
    return node != by_node_.end() && node->second.contains(key);
  }
  // It is gone. The devices that no zombie has any more.
  std::vector<DeviceRef> Remove(const std::string& node_id, const TrainerKey& key) {
    return RemoveIf(node_id, [&key](const auto& zombie) { return zombie.first == key; });
  }
  // All of the node but those that it still reports.
  std::vector<DeviceRef> Keep(const std::string& node_id, const std::set<TrainerKey>& alive) {
    return RemoveIf(node_id,
                    [&alive](const auto& zombie) { return !alive.contains(zombie.first); });
  }
  // The same, of those that the node was told to stop by order `heard` or before: it may not have
  // heard yet of the others.
  std::vector<DeviceRef> KeepHeard(const std::string& node_id,
                                   const std::set<TrainerKey>& alive,
                                   int64_t heard) {
    return RemoveIf(node_id, [&](const auto& zombie) {
      return zombie.second.ordered <= heard && !alive.contains(zombie.first);
    });
  }
  // For people: what is out and why. Empty: nothing.
  std::string Describe(const std::string& node_id) const {
    std::string text;
    const auto node = by_node_.find(node_id);
    if (node != by_node_.end()) {
      for (const auto& [key, zombie] : node->second) {
        absl::StrAppend(&text,
                        text.empty() ? "degraded: " : "; ",
                        "device ",
                        zombie.device,
                        " is out, rank ",
                        std::get<2>(key),
                        " of job ",
                        zombie.job_name,
                        " (epoch ",
                        std::get<1>(key),
                        ") cannot be killed");
      }
    }
    return text;
  }

 private:
  struct Zombie {
    int64_t device = 0;
    std::string job_name;
    int64_t ordered = 0;  // id of the newest order to stop it
  };
  template <typename Gone>
  std::vector<DeviceRef> RemoveIf(const std::string& node_id, Gone gone) {
    std::vector<DeviceRef> devices;
    const auto node = by_node_.find(node_id);
    if (node == by_node_.end()) {
      return devices;
    }
    for (const auto& [key, zombie] : node->second) {
      if (gone(std::pair(key, zombie))) {
        devices.push_back({node_id, zombie.device});
      }
    }
    std::erase_if(node->second, gone);
    std::erase_if(devices, [&node](const DeviceRef& device) {
      for (const auto& [key, zombie] : node->second) {
        if (zombie.device == device.device) {
          return true;
        }
      }
      return false;
    });
    if (node->second.empty()) {
      by_node_.erase(node);
    }
    return devices;
  }

  std::map<std::string, std::map<TrainerKey, Zombie>> by_node_;
};

}  // namespace ravel::coordinator
