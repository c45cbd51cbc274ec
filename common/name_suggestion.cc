#include "common/name_suggestion.h"

#include <algorithm>
#include <cctype>

namespace ravel {
namespace {

std::string Folded(const std::string& name) {
  std::string out;
  for (const char c : name) {
    if (c != '_' && c != '-') {
      out += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    }
  }
  return out;
}

// Optimal string alignment distance.
std::size_t Distance(const std::string& a, const std::string& b) {
  std::vector<std::vector<std::size_t>> cost(a.size() + 1, std::vector<std::size_t>(b.size() + 1));
  for (std::size_t i = 0; i <= a.size(); ++i) {
    for (std::size_t j = 0; j <= b.size(); ++j) {
      if (i == 0 || j == 0) {
        cost[i][j] = i + j;
        continue;
      }
      const std::size_t replaced = cost[i - 1][j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      cost[i][j] = std::min({cost[i - 1][j] + 1, cost[i][j - 1] + 1, replaced});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        cost[i][j] = std::min(cost[i][j], cost[i - 2][j - 2] + 1);
      }
    }
  }
  return cost[a.size()][b.size()];
}

}  // namespace

std::string SuggestName(const std::string& name, const std::vector<std::string>& candidates) {
  constexpr std::size_t kLongest = 64;
  if (name.size() > kLongest) {
    return "";
  }
  const std::string folded = Folded(name);
  std::size_t best = std::clamp<std::size_t>(folded.size() / 3, 1, 3) + 1;
  std::string found;
  for (const std::string& candidate : candidates) {
    const std::size_t distance = Distance(folded, Folded(candidate));
    if (distance < best && distance < folded.size()) {
      best = distance;
      found = candidate;
    }
  }
  return found;
}

}  // namespace ravel
