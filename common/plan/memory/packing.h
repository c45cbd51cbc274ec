#pragma once

// Places for things of which some may not share an address. Pure; the same on every machine.

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ravel::plan {

// An interval of an abstract order and its size: what packing is about, apart from programs.
struct PackItem {
  int64_t bytes = 0;
  std::vector<size_t> conflicts;  // items that may not share an address with this one
};
// Offsets of the items: the best of largest first, given order, and best fit; where those end above
// `bound`, other orders are tried. Peak: the largest end.
struct Packing {
  std::vector<int64_t> offsets;
  int64_t peak = 0;
};
Packing PackItems(const std::vector<PackItem>& items, int64_t bound = 0);

// Bytes of items that all conflict with each other: no packing is smaller. The most that is found
// with an effort of some tenths of a second.
int64_t HeaviestClique(const std::vector<PackItem>& items);

// Looks on from a packing, for longer: until its peak is not above `enough`, or until its effort is
// spent (well below a second).
Packing PackCloser(const std::vector<PackItem>& items, Packing packing, int64_t enough);

}  // namespace ravel::plan
