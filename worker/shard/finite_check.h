#pragma once

// Finds the first value that is not finite while a step is replayed.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/plan/layout/owned_boxes.h"
#include "common/plan/sharding_plan.h"
#include "worker/shard/bound_program.h"
#include "worker/shard/flat_buffer.h"
#include "worker/shard/host_access.h"
#include "worker/shard/parameter_group.h"
#include "worker/shard/unit_executor.h"

namespace ravel::shard {

// What a rank found. `order` counts the instructions of the step: of several ranks' findings the
// smallest was first.
struct NonFinite {
  int64_t order = 0;
  std::string text;
};

// Looks at what each instruction wrote. Used with inline streams or on a device, for one step.
class FiniteCheck final : public InstructionObserver {
 public:
  // All outlive it.
  struct Args {
    const plan::ShardingPlan& plan;
    const ArenaBuffers& buffers;
    ParameterGroups& groups;
    int rank = 0;
    HostAccess& memory;  // of the arena
  };
  explicit FiniteCheck(const Args& args) : args_(args) {}

  absl::Status Completed(const BoundInstruction& bound, const ReplayTurn& turn) override;
  const std::optional<NonFinite>& found() const { return found_; }

 private:
  // A tensor with what to call it, and which elements of it the values are.
  struct Place {
    std::string name;
    Shape shape;
    const plan::OwnedPiece* piece = nullptr;  // none: all of it
  };
  // Values are fp32 or bf16.
  void CheckValues(const void* from, DType dtype, int64_t count, const Place& place);
  // The values as fp32, where the host can read them; nullptr after a failure.
  const float* Fetch(const void* values, DType dtype, int64_t count);
  void CheckActivations(const std::vector<plan::ActivationSpec>& specs,
                        const std::vector<TensorView>& views,
                        const char* role);
  void CheckUnit(const BoundInstruction& bound);
  // Returns the parts of a tensor in this rank's gathered buffer; offsets count from its start
  // there.
  std::vector<plan::OwnedPiece> PartsOf(plan::TensorId tensor) const;
  // Parts of tensors at `base`.
  void CheckPieces(const char* role,
                   const std::vector<plan::OwnedPiece>& pieces,
                   void* base,
                   DType dtype = DType::kF32);
  void CheckGroup(const plan::Instruction& instruction, const ReplayTurn& turn);
  bool RanHere(const plan::Instruction& instruction, const ReplayTurn& turn) const;

  const Args args_;
  int64_t order_ = 0;
  std::string where_;  // "Backward of layers.1 call 0 (last, turn 1, ...)"
  std::optional<NonFinite> found_;
  std::vector<float> fetched_;
  std::vector<uint16_t> narrow_;
  absl::Status failure_;  // why something could not be looked at
};

}  // namespace ravel::shard
