#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

namespace ravel::ctl {

// The merge table of a byte-pair encoding: which neighbours become one token, the lowest rank
// first, of equal ranks the leftmost. Thread-compatible.
class BpeMerger {
 public:
  // Adds the next rule; a repeated pair keeps its first rank.
  void Add(int32_t left, int32_t right, int32_t merged);
  // Merges until no rule applies. O(n^2) for short pieces, O(n log n) for long ones; the same
  // result.
  void Merge(std::vector<int32_t>& ids) const;
  int64_t rules() const { return next_rank_; }

 private:
  struct Rule {
    int32_t rank;
    int32_t merged;
  };
  const Rule* Find(int32_t left, int32_t right) const;
  void MergeShort(std::vector<int32_t>& ids) const;
  void MergeLong(std::vector<int32_t>& ids) const;

  std::unordered_map<uint64_t, Rule> rules_;
  int32_t next_rank_ = 0;
};

}  // namespace ravel::ctl
