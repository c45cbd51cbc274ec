#pragma once

// A model as the engine sees it: one module per unit, with its forward and its backward. Modules
// know no ranks, no buffers of the plan and no order of units: they read and write the views that
// they are given.

#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "common/model/model_inventory.h"
#include "common/model/segments.h"
#include "common/tensor_view.h"
#include "kernels/gemm.h"
#include "kernels/stream.h"
#include "worker/quant/quant_state.h"

namespace ravel::model {

// The memory of one call of a unit; each list is in the order of the inventory's.
struct UnitMemory {
  std::vector<TensorView> weights;  // UnitSpec::tensors, then UnitSpec::borrowed; full tensors
                                    // (of a quantized one its codes)
  std::vector<quant::GemmScales>
      scales;  // of the same; recipe kNone: not quantized. Empty: none is
  const kernels::ActivationDraws* draws = nullptr;  // of this micro-batch, without a site
  // Gradients are those of the loss times this; absent: 1. Of fp16 alone.
  const float* loss_scale = nullptr;
  const float* device_loss_scale = nullptr;  // of a device's memory, read in its place
  std::vector<TensorView> saved;             // UnitSpec::saved
  std::vector<TensorView> remade;            // UnitSpec::remade
  std::vector<TensorView> workspace;         // UnitSpec::workspace
  std::vector<TensorView> shared;            // ModelInventory::shared
  std::vector<TensorView> leaves;            // UnitSpec::leaves, in a backward
  // Where ranks of a tensor axis compute a unit together (SegmentMove), else absent:
  TensorView addend;               // [tokens, hidden] fp32: what this rank adds to a sum; of a
                                   // chunk of tokens, where those are moved apart
  TensorView input_gradient;       // [own tokens, hidden]: a sum, of what products have read
  std::vector<TensorView> pieces;  // of a sum: [own tokens, hidden] of each rank's addend, in order
  TensorView rows;        // of a sum: [own tokens, hidden], of the target's type; kGather: this
                          // rank's rows of the target; kScatterRows: the target itself
  int64_t first_row = 0;  // of `rows` in the target
  int chunk = 0;          // SegmentSpec::chunk
};

// The destination of a weight's gradient. The first write of a step's staging memory overwrites
// whatever is there, NaN included; a later one adds. The two are different types, so that neither
// can be taken for the other. A view without data is that of a frozen weight: nothing is written.
struct FreshGradient {
  static constexpr kernels::Output kOutput = kernels::Output::kOverwrite;
  TensorView view;
};
struct AccumulatingGradient {
  static constexpr kernels::Output kOutput = kernels::Output::kAccumulate;
  TensorView view;
};

// A pass of a unit is a list of segments (common/model/segments.h), which run in the list's order
// with the same memory; between two of them the caller may bring activations to other ranks and
// back. Used only from the thread of its rank.
class Module {
 public:
  // Segments of each pass, of those that the module is ever asked for.
  using Segments = std::map<plan::UnitPass, std::vector<plan::SegmentKind>>;
  explicit Module(Segments segments) : segments_(std::move(segments)) {}
  virtual ~Module() = default;
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;

  // Before the first step, with the memory of a Backward: chooses how its passes will be computed,
  // where that takes long (kernels::PrepareAttention). Computes nothing.
  virtual void Prepare(kernels::Stream& stream, const UnitMemory& memory) const {
    (void)stream;
    (void)memory;
  }

  // In the order in which they run; empty where the pass does nothing. Of the chunks of a loss each
  // has its own.
  const std::vector<plan::SegmentKind>& segments(plan::UnitPass pass) const;

  // One segment of a pass that is not kBackward. All passes together:
  //
  // kForward reads `hidden` (the first unit: `ids`) and replaces it; fills `saved`. `remade` is not
  // there: what it names lies in the workspace meanwhile. Of the head: the norm only, its losses
  // are made by the backward.
  //
  // kEvaluate: forward without a backward to come; the head also writes the `loss` of every token.
  //
  // kRecompute makes `remade` from `saved` again, with the kernels and shapes of the forward and so
  // its bits; needs weights, `saved`, `remade`, `workspace` and the RoPE tables; `hidden` may be
  // overwritten, `dhidden` not. Called only for units that recompute something.
  virtual void RunSegment(kernels::Stream& stream,
                          const UnitMemory& memory,
                          plan::UnitPass pass,
                          plan::SegmentKind kind) const = 0;

  // One segment of kBackward, which reads `dhidden` (the head: `targets`) and replaces it, and
  // writes a gradient for every weight. Gradients are of the sum of the token losses; those that
  // the segment does not write are left alone. `saved` may be overwritten.
  virtual void RunSegment(kernels::Stream& stream,
                          const UnitMemory& memory,
                          plan::SegmentKind kind,
                          const std::vector<FreshGradient>& gradients) const = 0;
  virtual void RunSegment(kernels::Stream& stream,
                          const UnitMemory& memory,
                          plan::SegmentKind kind,
                          const std::vector<AccumulatingGradient>& gradients) const = 0;

  // All segments of a pass.
  void Run(kernels::Stream& stream, const UnitMemory& memory, plan::UnitPass pass) const;
  void Forward(kernels::Stream& stream, const UnitMemory& memory) const {
    Run(stream, memory, plan::UnitPass::kForward);
  }
  void ForwardOnly(kernels::Stream& stream, const UnitMemory& memory) const {
    Run(stream, memory, plan::UnitPass::kEvaluate);
  }
  void Remake(kernels::Stream& stream, const UnitMemory& memory) const {
    Run(stream, memory, plan::UnitPass::kRecompute);
  }
  // `Gradient`: FreshGradient or AccumulatingGradient.
  template <typename Gradient>
  void Backward(kernels::Stream& stream,
                const UnitMemory& memory,
                const std::vector<Gradient>& gradients) const {
    for (const plan::SegmentKind kind : segments(plan::UnitPass::kBackward)) {
      RunSegment(stream, memory, kind, gradients);
    }
  }

 private:
  const Segments segments_;
};

// The modules of a model, one per unit, in forward order.
using Modules = plan::IdVector<plan::UnitId, std::unique_ptr<Module>>;
// `coordinate`: of this rank on the tensor axis, whatever the inventory's cut says.
Modules MakeModules(const plan::ModelInventory& inventory,
                    const plan::MicroBatchShape& micro_batch,
                    int64_t coordinate = 0);

// Fills the shared RoPE tables, if the model has any; once, before the first Forward.
void FillRopeTables(kernels::Stream& stream,
                    const plan::ModelInventory& inventory,
                    const std::vector<TensorView>& shared);

// Index of an activation in a list of specs; an unknown name is a bug.
size_t ActivationIndex(const std::vector<plan::ActivationSpec>& specs, std::string_view name);

}  // namespace ravel::model
