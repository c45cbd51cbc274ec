#pragma once

// Sums in parts (common/model/tensor_cut.h): products whose contraction is cut, added as a tree
// over the parts in fp32 and rounded once; gradients of weights that parts or blocks of tokens
// share, summed apart as leaves.

#include <optional>
#include <vector>

#include <absl/functional/function_ref.h>

#include "kernels/stream.h"
#include "worker/model/unit_parts.h"

namespace ravel::model {

// Scratch for the nodes of such trees: the unit's workspace "parts".
class PartSums {
 public:
  explicit PartSums(const UnitTensors& tensors);

  bool cuts() const { return cut_.cuts(); }
  const plan::TensorCut& cut() const { return cut_; }

  // Place of [rows, columns] sums: row `first` of UnitMemory::addend on where ranks have parts
  // each.
  struct Place {
    int64_t first = 0;
    int64_t rows = 0;
    int64_t columns = 0;
  };
  // product(part, to) writes the product of this rank's part 0, 1, ... to fp32 [rows, columns].
  // Returns what SumParts adds up where one rank has all parts: the two halves of the tree, in the
  // scratch until the next Products. Else leaves the root of this rank's subtree in its rows of the
  // addend, and returns nothing.
  std::vector<TensorView> Products(
      kernels::Stream& stream,
      const UnitMemory& memory,
      const Place& place,
      absl::FunctionRef<void(int64_t part, const TensorView& to)> product) const;

 private:
  plan::TensorCut cut_;
  size_t scratch_ = 0;  // workspace
};

// The gradient of one weight as leaves: sums over a block of tokens, or over the heads of a part.
// Without declared leaves there is one, the gradient itself.
class GradientLeaves {
 public:
  GradientLeaves() = default;
  GradientLeaves(const UnitTensors& tensors, size_t weight);

  int64_t count() const { return count_; }
  // The sum of leaf i, [elements]; absent where the weight is frozen.
  TensorView Leaf(const UnitMemory& memory, const WeightGradients& gradients, int64_t i) const;
  // All leaves side by side, [count, elements].
  TensorView All(const UnitMemory& memory) const;
  // The gradient becomes the tree over its leaves; one of [shares] rows is the tree over
  // count / shares adjacent leaves. Overwrites, whatever the leaves hold: they are the sums over a
  // lane so far. Nothing where there is one leaf, or the weight is frozen.
  void Fold(kernels::Stream& stream,
            const UnitMemory& memory,
            const WeightGradients& gradients,
            int64_t shares = 1) const;

 private:
  size_t weight_ = 0;
  std::optional<size_t> leaves_;  // UnitMemory::leaves
  int64_t count_ = 1;
};

}  // namespace ravel::model
