#include "common/model/freeze.h"

#include <algorithm>
#include <cstddef>

#include <absl/strings/str_cat.h>

#include "common/field_error.h"
#include "common/model/bundles.h"

namespace ravel::plan {

bool MatchesGlob(std::string_view pattern, std::string_view name) {
  size_t p = 0;
  size_t n = 0;
  size_t star = std::string_view::npos;  // the last `*`, and where its text ends
  size_t star_end = 0;
  while (n < name.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      star_end = n;
    } else if (p < pattern.size() && (pattern[p] == '?' || pattern[p] == name[n])) {
      ++p;
      ++n;
    } else if (star != std::string_view::npos) {
      p = star + 1;
      n = ++star_end;
    } else {
      return false;
    }
  }
  return pattern.find_first_not_of('*', p) == std::string_view::npos;
}

absl::Status ApplyFreeze(const std::vector<std::string>& patterns, ModelInventory& inventory) {
  for (size_t i = 0; i < patterns.size(); ++i) {
    bool matched = false;
    for (TensorSpec& tensor : inventory.tensors) {
      if (MatchesGlob(patterns[i], tensor.name)) {
        tensor.trainable = false;
        matched = true;
      }
    }
    if (!matched) {
      return FieldRefusal(
          absl::StrCat("training.freeze[", i, "]"),
          absl::StrCat("a pattern that matches a tensor, such as ", inventory.tensors.front().name),
          absl::StrCat("'", patterns[i], "'"));
    }
  }
  if (std::none_of(inventory.tensors.begin(),
                   inventory.tensors.end(),
                   [](const TensorSpec& tensor) { return tensor.trainable; })) {
    return FieldRefusal(
        "training.freeze", "to leave a tensor that is trained", "patterns that match all");
  }
  DissolveBundles(inventory);
  return absl::OkStatus();
}

}  // namespace ravel::plan
