#pragma once

#include <string>
#include <vector>

namespace ravel {

// The candidate that `name` was most likely meant to be: equal but for case, '_' and '-', or within
// a third of its length (at least one, at most three) in inserted, deleted, replaced and swapped
// characters. "" when none is near.
std::string SuggestName(const std::string& name, const std::vector<std::string>& candidates);

}  // namespace ravel
