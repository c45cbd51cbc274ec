#include "tests/common/plan/layout/tensor_owners.h"

#include <algorithm>
#include <cstddef>
#include <numeric>

#include "common/check.h"
#include "common/signed_size.h"

namespace ravel::plan {

TensorOwners AssignTensorOwners(const std::vector<LayoutItem>& items,
                                int64_t owner_count,
                                int64_t alignment_elements) {
  CHECK(owner_count > 0 && alignment_elements > 0);
  std::vector<size_t> order(items.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return items[a].elements != items[b].elements ? items[a].elements > items[b].elements
                                                  : items[a].name < items[b].name;
  });
  TensorOwners owners = {.owner = std::vector<int64_t>(items.size(), 0),
                         .offset = std::vector<int64_t>(items.size(), 0),
                         .part_elements = std::vector<int64_t>(Size(owner_count), 0)};
  std::vector<int64_t>& load = owners.part_elements;
  for (const size_t item : order) {
    const auto least = std::min_element(load.begin(), load.end());
    owners.owner[item] = least - load.begin();
    *least += RoundUp(items[item].elements, alignment_elements);
  }
  std::vector<int64_t> cursor(load.size(), 0);
  for (size_t item = 0; item < items.size(); ++item) {
    int64_t& next = At(cursor, owners.owner[item]);
    owners.offset[item] = next;
    next += RoundUp(items[item].elements, alignment_elements);
  }
  return owners;
}

}  // namespace ravel::plan
