#include "coordinator/ctl/bpe_merger.h"

#include <limits>
#include <queue>
#include <tuple>

namespace ravel::ctl {
namespace {

constexpr std::size_t kShort = 48;

uint64_t KeyOf(int32_t left, int32_t right) {
  return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
}

}  // namespace

void BpeMerger::Add(int32_t left, int32_t right, int32_t merged) {
  rules_.emplace(KeyOf(left, right), Rule{next_rank_, merged});
  ++next_rank_;
}

const BpeMerger::Rule* BpeMerger::Find(int32_t left, int32_t right) const {
  const auto found = rules_.find(KeyOf(left, right));
  return found == rules_.end() ? nullptr : &found->second;
}

void BpeMerger::Merge(std::vector<int32_t>& ids) const {
  if (ids.size() <= kShort) {
    MergeShort(ids);
  } else {
    MergeLong(ids);
  }
}

void BpeMerger::MergeShort(std::vector<int32_t>& ids) const {
  const Rule* rules[kShort];  // rules[i]: of ids[i] and ids[i + 1]
  for (std::size_t i = 0; i + 1 < ids.size(); ++i) {
    rules[i] = Find(ids[i], ids[i + 1]);
  }
  while (ids.size() > 1) {
    std::size_t best = ids.size();
    int32_t best_rank = std::numeric_limits<int32_t>::max();
    for (std::size_t i = 0; i + 1 < ids.size(); ++i) {
      if (rules[i] != nullptr && rules[i]->rank < best_rank) {
        best_rank = rules[i]->rank;
        best = i;
      }
    }
    if (best == ids.size()) {
      return;
    }
    ids[best] = rules[best]->merged;
    ids.erase(ids.begin() + static_cast<std::ptrdiff_t>(best) + 1);
    for (std::size_t i = best + 1; i + 1 < ids.size(); ++i) {
      rules[i] = rules[i + 1];
    }
    if (best > 0) {
      rules[best - 1] = Find(ids[best - 1], ids[best]);
    }
    if (best + 1 < ids.size()) {
      rules[best] = Find(ids[best], ids[best + 1]);
    }
  }
}

void BpeMerger::MergeLong(std::vector<int32_t>& ids) const {
  struct Symbol {
    int32_t id;
    int64_t previous;
    int64_t next;
  };
  struct Candidate {
    int32_t rank;
    int64_t position;
    int32_t left;
    int32_t right;
    int32_t merged;
    bool operator>(const Candidate& other) const {
      return std::tie(rank, position) > std::tie(other.rank, other.position);
    }
  };
  const int64_t count = static_cast<int64_t>(ids.size());
  std::vector<Symbol> symbols(ids.size());
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> queue;
  const auto at = [&](int64_t i) -> Symbol& { return symbols[static_cast<std::size_t>(i)]; };
  const auto offer = [&](int64_t position) {
    const int64_t next = at(position).next;
    const Rule* const rule = next < 0 ? nullptr : Find(at(position).id, at(next).id);
    if (rule != nullptr) {
      queue.push({rule->rank, position, at(position).id, at(next).id, rule->merged});
    }
  };
  for (int64_t i = 0; i < count; ++i) {
    at(i) = {ids[static_cast<std::size_t>(i)], i - 1, i + 1 < count ? i + 1 : -1};
  }
  for (int64_t i = 0; i < count; ++i) {
    offer(i);
  }
  while (!queue.empty()) {
    const Candidate candidate = queue.top();
    queue.pop();
    Symbol& left = at(candidate.position);
    if (left.id != candidate.left || left.next < 0 || at(left.next).id != candidate.right) {
      continue;  // one of the two has been merged since
    }
    Symbol& right = at(left.next);
    left.id = candidate.merged;
    right.id = -1;
    left.next = right.next;
    if (left.next >= 0) {
      at(left.next).previous = candidate.position;
    }
    offer(candidate.position);
    if (left.previous >= 0) {
      offer(left.previous);
    }
  }
  ids.clear();
  for (int64_t i = 0; i >= 0; i = at(i).next) {
    ids.push_back(at(i).id);
  }
}

}  // namespace ravel::ctl
