// Packs items with conflicts into as few bytes as possible (dynamic storage allocation, which is
// NP-hard). Greedy packings by size and in the given order, lowest or tightest fit, come first; if
// none reaches the bound, orders are varied one item at a time, and a longer search also accepts
// slightly worse ones early on, to leave local minima. Random numbers come from a fixed sequence
// and effort is counted in conflicts looked at, not in time, so every machine finds the same
// packing.

#include "common/plan/memory/packing.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <numeric>
#include <utility>

namespace ravel::plan {
namespace {

struct Placed {
  int64_t begin = 0;
  int64_t end = 0;
};

enum class Fit { kLowest, kTightest };

// Returns an item's offset among the placed ones that it conflicts with.
int64_t FindOffset(std::vector<Placed> taken, int64_t bytes, Fit fit) {
  std::sort(taken.begin(), taken.end(), [](const Placed& a, const Placed& b) {
    return a.begin < b.begin;
  });
  int64_t cursor = 0;
  int64_t best = -1;
  int64_t best_gap = std::numeric_limits<int64_t>::max();
  for (const Placed& other : taken) {
    const int64_t gap = other.begin - cursor;
    if (gap >= bytes && gap < best_gap) {
      if (fit == Fit::kLowest) {
        return cursor;
      }
      best = cursor;
      best_gap = gap;
    }
    cursor = std::max(cursor, other.end);
  }
  return best >= 0 ? best : cursor;
}

Packing PackInOrder(const std::vector<PackItem>& items, const std::vector<size_t>& order, Fit fit) {
  Packing packing = {.offsets = std::vector<int64_t>(items.size(), -1), .peak = 0};
  for (const size_t item : order) {
    std::vector<Placed> taken;
    for (const size_t id : items[item].conflicts) {
      if (packing.offsets[id] >= 0) {
        taken.push_back(
            {.begin = packing.offsets[id], .end = packing.offsets[id] + items[id].bytes});
      }
    }
    packing.offsets[item] = FindOffset(std::move(taken), items[item].bytes, fit);
    packing.peak = std::max(packing.peak, packing.offsets[item] + items[item].bytes);
  }
  return packing;
}

// Packs again and again, with one item moved to another place in the order: every other time one
// that ends at the peak to an earlier place.
class OrderSearch {
 public:
  explicit OrderSearch(const std::vector<PackItem>& items)
      : items_(items), conflicts_(items.size()) {
    for (const PackItem& item : items) {
      conflicts_ += item.conflicts.size();
    }
    sequence_ = conflicts_;
  }

  struct Limits {
    int64_t enough = 0;  // ends with a peak that is not above it, ...
    size_t effort = 0;   // ... when as many conflicts have been looked at, ...
    int64_t most_rounds = std::numeric_limits<int64_t>::max();
    // A packing may be worse than the one before by one part of the best peak in so many at first,
    // by nothing at last.
    int64_t worst_share = std::numeric_limits<int64_t>::max();
  };

  // Begins with an order.
  void Improve(std::vector<size_t> order, const Limits& limits, Packing& best) {
    const int64_t rounds = std::min(
        limits.most_rounds, static_cast<int64_t>(limits.effort / std::max<size_t>(1, conflicts_)));
    Packing current = PackInOrder(items_, order, Fit::kLowest);
    for (int64_t round = 0; round < rounds && best.peak > limits.enough; ++round) {
      const std::vector<size_t> before = order;
      if (round % 2 == 0) {
        MoveOneOfThePeak(current, order);
      } else {
        Move(order, Next(order.size()), Next(order.size()));
      }
      Packing packing = PackInOrder(items_, order, Fit::kLowest);
      const int64_t most_worse = best.peak / limits.worst_share * (rounds - round) / rounds;
      if (packing.peak > current.peak + most_worse) {
        order = before;
        continue;
      }
      if (packing.peak < best.peak) {
        best = packing;
      }
      current = std::move(packing);
    }
  }

 private:
  // A fixed sequence: everybody plans the same.
  size_t Next(size_t below) {
    sequence_ = sequence_ * 6364136223846793005u + 1442695040888963407u;
    return (sequence_ >> 33) % below;
  }
  static void Move(std::vector<size_t>& order, size_t from, size_t to) {
    const size_t moved = order[from];
    order.erase(order.begin() + static_cast<std::ptrdiff_t>(from));
    order.insert(order.begin() + static_cast<std::ptrdiff_t>(to), moved);
  }
  void MoveOneOfThePeak(const Packing& packing, std::vector<size_t>& order) {
    std::vector<size_t> places;
    for (size_t place = 0; place < order.size(); ++place) {
      if (packing.offsets[order[place]] + items_[order[place]].bytes == packing.peak) {
        places.push_back(place);
      }
    }
    const size_t from = places[Next(places.size())];
    Move(order, from, from == 0 ? 0 : Next(from));
  }

  const std::vector<PackItem>& items_;
  size_t conflicts_;
  uint64_t sequence_ = 0;
};

// Branches on who is in the set, heavier items first; a branch that could not become heavier than
// the best so far, even with all that is left to it, ends.
class CliqueSearch {
 public:
  explicit CliqueSearch(const std::vector<PackItem>& items)
      : items_(items), conflicting_(items.size(), std::vector<bool>(items.size(), false)) {
    for (size_t i = 0; i < items.size(); ++i) {
      for (const size_t other : items[i].conflicts) {
        conflicting_[i][other] = true;
      }
    }
  }

  int64_t Run(size_t effort) {
    effort_ = effort;
    std::vector<size_t> all(items_.size());
    std::iota(all.begin(), all.end(), size_t{0});
    std::stable_sort(all.begin(), all.end(), [&](size_t a, size_t b) {
      return items_[a].bytes > items_[b].bytes;
    });
    Extend(all, 0);
    return best_;
  }

 private:
  // `candidates` conflict with all that is in the set.
  void Extend(const std::vector<size_t>& candidates, int64_t bytes) {
    best_ = std::max(best_, bytes);
    int64_t left = 0;
    for (const size_t item : candidates) {
      left += items_[item].bytes;
    }
    for (size_t i = 0; i < candidates.size() && bytes + left > best_; ++i) {
      if (effort_ < candidates.size()) {
        return;
      }
      effort_ -= candidates.size();
      std::vector<size_t> rest;
      for (size_t j = i + 1; j < candidates.size(); ++j) {
        if (conflicting_[candidates[i]][candidates[j]]) {
          rest.push_back(candidates[j]);
        }
      }
      Extend(rest, bytes + items_[candidates[i]].bytes);
      left -= items_[candidates[i]].bytes;
    }
  }

  const std::vector<PackItem>& items_;
  std::vector<std::vector<bool>> conflicting_;
  size_t effort_ = 0;  // pairs that may still be looked at
  int64_t best_ = 0;
};

}  // namespace

int64_t HeaviestClique(const std::vector<PackItem>& items) {
  constexpr size_t kEffort = size_t{1} << 26;
  return CliqueSearch(items).Run(kEffort);
}

Packing PackItems(const std::vector<PackItem>& items, int64_t bound) {
  std::vector<size_t> given(items.size());
  std::iota(given.begin(), given.end(), size_t{0});
  std::vector<size_t> by_size = given;
  std::stable_sort(by_size.begin(), by_size.end(), [&](size_t a, size_t b) {
    return items[a].bytes > items[b].bytes;
  });
  Packing best = PackInOrder(items, by_size, Fit::kLowest);
  for (const Packing& other : {PackInOrder(items, by_size, Fit::kTightest),
                               PackInOrder(items, given, Fit::kLowest),
                               PackInOrder(items, given, Fit::kTightest)}) {
    if (other.peak < best.peak) {
      best = other;
    }
  }
  // Those that stand in the way of most bytes first.
  std::vector<int64_t> pressed(items.size());
  for (size_t i = 0; i < items.size(); ++i) {
    pressed[i] = items[i].bytes;
    for (const size_t other : items[i].conflicts) {
      pressed[i] += items[other].bytes;
    }
  }
  std::vector<size_t> by_pressure = by_size;
  std::stable_sort(by_pressure.begin(), by_pressure.end(), [&](size_t a, size_t b) {
    return pressed[a] > pressed[b];
  });
  OrderSearch search(items);
  const OrderSearch::Limits limits = {
      .enough = bound, .effort = size_t{1} << 20, .most_rounds = 400};
  for (const std::vector<size_t>* order : {&by_size, &by_pressure, &given}) {
    search.Improve(*order, limits, best);
  }
  return best;
}

Packing PackCloser(const std::vector<PackItem>& items, Packing packing, int64_t enough) {
  // Those with the lowest places first: this order gives the packing, or a closer one.
  std::vector<size_t> by_place(items.size());
  std::iota(by_place.begin(), by_place.end(), size_t{0});
  std::vector<size_t> by_size = by_place;
  std::stable_sort(by_place.begin(), by_place.end(), [&](size_t a, size_t b) {
    return packing.offsets[a] < packing.offsets[b];
  });
  std::stable_sort(by_size.begin(), by_size.end(), [&](size_t a, size_t b) {
    return items[a].bytes > items[b].bytes;
  });
  OrderSearch search(items);
  for (const int64_t worst_share : {40, 20, 10}) {
    const OrderSearch::Limits limits = {
        .enough = enough, .effort = size_t{1} << 23, .worst_share = worst_share};
    for (const std::vector<size_t>* order : {&by_place, &by_size}) {
      search.Improve(*order, limits, packing);
    }
  }
  return packing;
}

}  // namespace ravel::plan
