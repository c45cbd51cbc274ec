#pragma once

// y = x * w^T for one weight or for several that read the same input and lie side by side in y:
// q|k|v, gate|up.

#include <vector>

#include "common/plan/model_inventory.h"
#include "common/tensor_view.h"
#include "kernels/gemm.h"
#include "kernels/stream.h"
#include "worker/model/module.h"

namespace ravel::model {

// Weights [rows_k, columns] at `indices` of a unit's weight list; y has the sum of their rows as
// columns. Where the inventory bundles them, their memory is contiguous and one GEMM does the work
// of all.
class Projection {
 public:
  Projection() = default;
  // `unit_tensors`: UnitSpec::tensors then UnitSpec::borrowed; `names`: suffixes of the canonical
  // names.
  Projection(const plan::ModelInventory& inventory,
             const std::vector<int>& unit_tensors,
             const std::vector<std::string_view>& names);

  // y (=|+=) x * w^T.
  struct ForwardArgs {
    const UnitMemory& memory;
    TensorView x;
    TensorView y;
    kernels::Output output = kernels::Output::kOverwrite;
  };
  void Forward(kernels::Stream& stream, const ForwardArgs& args) const;

  // dx = dy * w.
  struct InputGradientArgs {
    const UnitMemory& memory;
    TensorView dy;
    TensorView dx;
  };
  void InputGradient(kernels::Stream& stream, const InputGradientArgs& args) const;

  // dw (=|+=) dy^T * x.
  template <typename Gradient>
  void WeightGradient(kernels::Stream& stream,
                      const TensorView& x,
                      const TensorView& dy,
                      const std::vector<Gradient>& gradients) const;

 private:
  // The views at `indices` as matrices; one covering all when they are a bundle.
  template <typename View>
  std::vector<TensorView> Matrices(const std::vector<View>& views) const;

  std::vector<size_t> indices_;
  bool bundled_ = false;
};

}  // namespace ravel::model
