#pragma once

// Which tensors are trained.

#include <string>
#include <string_view>
#include <vector>

#include "common/model/model_inventory.h"
#include "common/status.h"

namespace ravel::plan {

// Returns true if a name matches a glob pattern: `*` is any text, `?` any one character.
bool MatchesGlob(std::string_view pattern, std::string_view name);

// Marks the tensors that match any pattern as not trainable, and takes bundles apart of which only
// some tensors are. Errors name the pattern as training.freeze[i]: each must match a tensor, and
// some tensor must stay trained.
absl::Status ApplyFreeze(const std::vector<std::string>& patterns, ModelInventory& inventory);

}  // namespace ravel::plan
