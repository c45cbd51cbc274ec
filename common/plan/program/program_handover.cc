#include "common/plan/program/program_handover.h"

#include <algorithm>
#include <cstddef>
#include <utility>

namespace ravel::plan {

bool Updates(Phase phase) {
  return phase == Phase::kOnly || phase == Phase::kLast;
}

bool RenewsWeights(Phase phase) {
  return phase == Phase::kOnly || phase == Phase::kFirst || phase == Phase::kEval;
}

bool HandsOver(const ProgramKind& kind) {
  return kind.phase == Phase::kFirst || kind.phase == Phase::kMiddle;
}

bool TakesOver(const ProgramKind& kind) {
  return kind.phase == Phase::kLast || kind.phase == Phase::kMiddle;
}

std::vector<GroupId> CommonAtEnd(const ProgramBuffers& buffers,
                                 const std::vector<StepProgram>& programs,
                                 const std::vector<ProgramKind>& kinds) {
  std::vector<GroupId> common;
  bool first = true;
  for (size_t i = 0; i < programs.size(); ++i) {
    if (!HandsOver(kinds[i])) {
      continue;
    }
    std::vector<GroupId> left;
    for (const BufferId buffer : programs[i].live_at_end) {
      const GroupId group = buffers[buffer].group;
      if (first || std::binary_search(common.begin(), common.end(), group)) {
        left.push_back(group);
      }
    }
    std::sort(left.begin(), left.end());
    common = std::move(left);
    first = false;
  }
  return common;
}

}  // namespace ravel::plan
