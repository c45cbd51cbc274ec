#pragma once

// Orders names by the time of their next look: a heap of deadlines, one for each name.

#include <algorithm>
#include <cstdint>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace ravel::coordinator {

// Used only from the controller's strand.
class Agenda {
 public:
  // Not later than that; an earlier date stays.
  void Add(const std::string& name, int64_t due_ms) {
    const auto [found, is_new] = due_.insert({name, due_ms});
    if (!is_new && found->second <= due_ms) {
      return;
    }
    if (!is_new) {
      order_.erase({found->second, name});
      found->second = due_ms;
    }
    order_.insert({due_ms, name});
  }
  // Takes out those whose time has come, most overdue first, at most that many.
  std::vector<std::string> Take(int64_t now_ms, size_t most) {
    std::vector<std::string> names;
    while (!order_.empty() && order_.begin()->first <= now_ms && names.size() < most) {
      names.push_back(order_.begin()->second);
      due_.erase(names.back());
      order_.erase(order_.begin());
    }
    return names;
  }
  size_t size() const { return due_.size(); }

 private:
  std::set<std::pair<int64_t, std::string>> order_;
  std::unordered_map<std::string, int64_t> due_;
};

}  // namespace ravel::coordinator
