#pragma once

// Parts of modules besides arithmetic: they find a unit's weights by name and an activation's
// memory in each pass, and hold gradients after fresh and accumulating ones have been told apart.

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "common/model/architecture/architecture.h"
#include "common/model/model_inventory.h"
#include "common/tensor_view.h"
#include "kernels/gemm.h"
#include "worker/model/module.h"

namespace ravel::model {

// The tensors of a unit in the order of UnitMemory::weights, by name.
class UnitTensors {
 public:
  UnitTensors(const plan::ModelInventory& inventory, plan::UnitId unit);

  const plan::UnitSpec& spec() const { return spec_; }
  const plan::Architecture& architecture() const { return architecture_; }
  const plan::ModelInventory& inventory() const { return inventory_; }
  // Index of "[LAYERS.layer.]NAME.SUFFIX"; an unknown name is a bug.
  size_t Index(std::string_view name, std::string_view suffix) const;
  const plan::TensorSpec& tensor(size_t index) const;

 private:
  const plan::ModelInventory& inventory_;
  const plan::UnitSpec& spec_;
  const plan::Architecture& architecture_;
  std::vector<plan::TensorId> tensors_;
  std::string prefix_;
};

// An activation that the inventory declares among a unit's saved or recomputed ones.
class Activation {
 public:
  Activation() = default;
  // `area`: the workspace that holds it during a forward whose backward recomputes it.
  Activation(const plan::UnitSpec& unit, std::string_view name, std::string_view area = "");

  bool declared() const { return elements_ > 0; }
  bool remade() const { return remade_; }
  TensorView In(const UnitMemory& memory) const;
  // Absent where it is neither kept nor recomputed in this pass.
  TensorView IfKept(const UnitMemory& memory) const;

 private:
  bool remade_ = false;
  size_t index_ = 0;
  std::optional<size_t> area_;
  int64_t elements_ = 0;
  int64_t columns_ = 0;  // 0: a vector
};

// `to` = `from`, of one shape and type, both contiguous.
void CopyView(kernels::Stream& stream, const TensorView& from, const TensorView& to);
// The first rows x columns elements of a workspace as a matrix.
TensorView Carve(const TensorView& workspace, int64_t rows, int64_t columns);

// Absent views are those of frozen weights.
struct WeightGradients {
  std::vector<TensorView> views;  // in the order of UnitMemory::weights
  kernels::Output output = kernels::Output::kOverwrite;
};

// A module whose segments are those that the inventory gives its unit, and whose two backwards
// differ only in where gradients go.
class UnitModule : public Module {
 public:
  UnitModule(const plan::ModelInventory& inventory, plan::UnitId unit);

  void RunSegment(kernels::Stream& stream,
                  const UnitMemory& memory,
                  plan::UnitPass pass,
                  plan::SegmentKind kind) const final;
  void RunSegment(kernels::Stream& stream,
                  const UnitMemory& memory,
                  plan::SegmentKind kind,
                  const std::vector<FreshGradient>& gradients) const final;
  void RunSegment(kernels::Stream& stream,
                  const UnitMemory& memory,
                  plan::SegmentKind kind,
                  const std::vector<AccumulatingGradient>& gradients) const final;

 protected:
  // kEvaluate is kForward, but for the segments that it alone has.
  virtual void ForwardSegment(kernels::Stream& stream,
                              const UnitMemory& memory,
                              plan::SegmentKind kind) const = 0;
  virtual void RemakeSegment(kernels::Stream& stream,
                             const UnitMemory& memory,
                             plan::SegmentKind kind) const;
  virtual void BackwardSegment(kernels::Stream& stream,
                               const UnitMemory& memory,
                               plan::SegmentKind kind,
                               const WeightGradients& gradients) const = 0;
};

}  // namespace ravel::model
