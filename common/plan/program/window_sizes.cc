#include "common/plan/program/window_sizes.h"

#include <algorithm>
#include <cstddef>
#include <set>

#include "common/plan/program/program_buffers.h"
#include "common/plan/program/program_uses.h"

namespace ravel::plan {
namespace {

// The most bytes of weights, or of staged gradients, that any two consecutive uses need.
class WindowNeeds {
 public:
  explicit WindowNeeds(const ProgramRequest& request)
      : request_(request), model_(UsesOf(request.inventory, request.groups, true)) {}

  int64_t GatheredWindow() const {
    return Most<GroupId>([&](size_t use, std::set<GroupId>& found) {
      for (const GroupId group : model_.uses[use].needs) {
        if (!IsResident(request_, group)) {
          found.insert(group);
        }
      }
    });
  }
  int64_t StagingWindow() const {
    return Most<GradientId>([&](size_t use, std::set<GradientId>& found) {
      for (const GradientId id : model_.gradients.ids()) {
        const GradientCall& call = model_.gradients[id];
        if (call.first_use <= use && use <= call.last_use) {
          found.insert(id);
        }
      }
    });
  }

 private:
  int64_t BytesOf(GroupId group) const {
    const GroupLayout& layout = request_.groups[group];
    return WeightBytes(layout, request_.options, layout.layout.total_elements());
  }
  int64_t BytesOf(GradientId id) const {
    const GradientCall& call = model_.gradients[id];
    return request_.groups[call.group].layout.total_elements() *
           DTypeBytes(StagedType(request_.lanes, request_.options, call));
  }

  template <typename IdType, typename Collect>
  int64_t Most(const Collect& collect) const {
    int64_t most = 0;
    for (size_t use = 0; use < model_.uses.size(); ++use) {
      std::set<IdType> found;
      collect(use, found);
      if (use + 1 < model_.uses.size()) {
        collect(use + 1, found);
      }
      int64_t sum = 0;
      for (const IdType id : found) {
        sum += BytesOf(id);
      }
      most = std::max(most, sum);
    }
    return most;
  }

  const ProgramRequest& request_;
  const ModelUses model_;
};

}  // namespace

ProgramOptions ResolveWindows(const ProgramRequest& request) {
  ProgramOptions options = request.options;
  const WindowNeeds needs(request);
  if (options.gather_window_bytes == 0) {
    options.gather_window_bytes = needs.GatheredWindow();
  }
  if (options.staging_window_bytes == 0) {
    options.staging_window_bytes = needs.StagingWindow();
  }
  return options;
}

}  // namespace ravel::plan
