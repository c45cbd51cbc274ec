// The buffers of all programs, and which programs there are.

#include <string>
#include <utility>

#include <absl/strings/str_cat.h>

#include "common/plan/program_builder.h"

namespace ravel::plan {
namespace {

constexpr int64_t kElementBytes = 4;  // everything is fp32 in this recipe

class BufferList {
 public:
  explicit BufferList(const ProgramRequest& request) : request_(request) {}

  std::vector<ProgramBuffer> Build() {
    for (size_t unit = 0; unit < request_.inventory.units.size(); ++unit) {
      AddWeights(static_cast<int>(unit));
      AddActivations(static_cast<int>(unit));
    }
    const std::vector<UnitUse> uses = UsesOf(request_.inventory, Phase::kOnly);
    for (const std::vector<GradientCall>& calls : GradientCallsOf(request_.inventory, uses)) {
      for (const GradientCall& call : calls) {
        AddGradients(call);
      }
    }
    Add({.name = "shared",
         .kind = BufferKind::kShared,
         .bytes = ActivationOffsets(request_.inventory.shared).back(),
         .persistent = true});
    return std::move(buffers_);
  }

 private:
  int Add(ProgramBuffer buffer) {
    buffers_.push_back(std::move(buffer));
    return static_cast<int>(buffers_.size()) - 1;
  }

  std::string Named(const char* role, int unit) const {
    return absl::StrCat(role, "/", request_.inventory.units[static_cast<size_t>(unit)].name);
  }

  int64_t ShardBytes(int unit) const {
    return request_.groups[static_cast<size_t>(unit)].layout.shard_elements * kElementBytes;
  }
  int64_t GatheredBytes(int unit) const {
    return request_.groups[static_cast<size_t>(unit)].layout.total_elements() * kElementBytes;
  }

  void AddWeights(int unit) {
    const bool in_place = request_.options.gather_in_place;
    const int gathered = Add({.name = Named("gathered", unit),
                              .kind = BufferKind::kGathered,
                              .memory = in_place ? MemoryKind::kCommon : MemoryKind::kPrivate,
                              .unit = unit,
                              .bytes = GatheredBytes(unit),
                              .persistent = in_place});
    Add({.name = Named("main_weight", unit),
         .kind = BufferKind::kMainWeight,
         .memory = in_place ? MemoryKind::kCommon : MemoryKind::kPrivate,
         .unit = unit,
         .bytes = ShardBytes(unit),
         .persistent = true,
         .inside = in_place ? gathered : -1});
    Add({.name = Named("exp_avg", unit),
         .kind = BufferKind::kExpAvg,
         .unit = unit,
         .bytes = ShardBytes(unit),
         .persistent = true});
    Add({.name = Named("exp_avg_sq", unit),
         .kind = BufferKind::kExpAvgSq,
         .unit = unit,
         .bytes = ShardBytes(unit),
         .persistent = true});
  }

  void AddActivations(int unit) {
    const UnitSpec& spec = request_.inventory.units[static_cast<size_t>(unit)];
    if (!spec.saved.empty()) {
      Add({.name = Named("saved", unit),
           .kind = BufferKind::kSaved,
           .unit = unit,
           .bytes = ActivationOffsets(spec.saved).back()});
    }
    if (!spec.workspace.empty()) {
      Add({.name = Named("workspace", unit),
           .kind = BufferKind::kWorkspace,
           .unit = unit,
           .bytes = ActivationOffsets(spec.workspace).back()});
    }
  }

  void AddGradients(const GradientCall& call) {
    const bool in_place = request_.options.read_peers_in_place;
    const std::string suffix = call.call == 0 ? "" : absl::StrCat(".call", call.call);
    const int slots = CounterBuffers(request_.lanes);
    for (int slot = 0; slot < slots; ++slot) {
      Add({.name = absl::StrCat(Named("main_grad", call.unit), suffix, ".", slot),
           .kind = BufferKind::kMainGrad,
           .unit = call.unit,
           .call = call.call,
           .slot = slot,
           .bytes = ShardBytes(call.unit),
           .persistent = true});
    }
    Add({.name = absl::StrCat(Named("staging", call.unit), suffix),
         .kind = BufferKind::kStaging,
         .memory = in_place ? MemoryKind::kSymmetric : MemoryKind::kPrivate,
         .unit = call.unit,
         .call = call.call,
         .bytes = GatheredBytes(call.unit)});
    if (!in_place) {
      Add({.name = absl::StrCat(Named("receive", call.unit), suffix),
           .kind = BufferKind::kReceive,
           .unit = call.unit,
           .call = call.call,
           .bytes = GatheredBytes(call.unit)});
    }
  }

  const ProgramRequest& request_;
  std::vector<ProgramBuffer> buffers_;
};

}  // namespace

std::vector<ProgramBuffer> BuildBuffers(const ProgramRequest& request) {
  return BufferList(request).Build();
}

}  // namespace ravel::plan
