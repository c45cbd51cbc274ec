#pragma once

// Codes and scales of a step's quantized weights, made again from its main weights by the rules
// that trainers use: the step holds their digests only.

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "common/model/optimizer_states.h"
#include "common/recipe.h"
#include "common/shape.h"
#include "common/status.h"
#include "common/store/committed_step.h"
#include "kernels/scalar/block_scales.h"

namespace ravel::ctl {

// What a weight's scales follow from.
struct WeightAmaxes {
  kernels::scalar::Scales tensor;  // of the whole
  int64_t grid_rows = 0;           // of blocks; 0: the recipe has none
  int64_t grid_columns = 0;
  std::vector<uint32_t> blocks;  // their amaxes, row-major
};

// Used from one thread; the step outlives it.
class QuantizedWeights {
 public:
  // FailedPrecondition where the step says nothing of quantized weights.
  static absl::StatusOr<QuantizedWeights> Of(store::CommittedStep* step);

  plan::Recipe recipe() const { return recipe_; }
  const std::vector<ckpt::QuantizedRecord>& weights() const { return *weights_; }
  // nullptr: of that name no weight is quantized.
  const ckpt::QuantizedRecord* Find(const std::string& name) const;

  // Reads the weight once, and once those that share its scale.
  absl::StatusOr<WeightAmaxes> Amaxes(const ckpt::QuantizedRecord& weight);
  // Codes in row-major order, whole rows at a time: E4M3, or two E2M1 in a byte.
  using CodesVisitor = std::function<absl::Status(std::span<const uint8_t> codes)>;
  absl::Status VisitCodes(const ckpt::QuantizedRecord& weight,
                          const WeightAmaxes& amaxes,
                          const CodesVisitor& visit);
  // What the manifest's digest of the weight has to be.
  absl::StatusOr<uint64_t> Digest(const ckpt::QuantizedRecord& weight);

 private:
  explicit QuantizedWeights(store::CommittedStep* step)
      : step_(step), weights_(&step->manifest().quant.tensors) {}
  const ckpt::TensorRecord& TensorOf(const ckpt::QuantizedRecord& weight) const;
  // visit(first_row, rows): values of whole rows, as many as blocks have or more.
  using RowsVisitor = std::function<absl::Status(int64_t first_row, std::span<const float> values)>;
  absl::Status VisitRows(const ckpt::TensorRecord& tensor, const RowsVisitor& visit);
  // The largest amax of the domain's weights.
  // The bits of the least amax that scales follow from.
  uint32_t LeastAmax() const;
  absl::StatusOr<uint32_t> DomainAmax(const std::string& domain);
  absl::StatusOr<float> DelayedEncode(const ckpt::QuantizedRecord& weight);

  store::CommittedStep* step_;
  const std::vector<ckpt::QuantizedRecord>* weights_;
  plan::Recipe recipe_ = plan::Recipe::kNone;
  std::map<std::string, uint32_t> domain_amax_;
};

// The tensors of an export that stand for a quantized weight, beside its codes.
struct ScaleTensor {
  std::string name;
  DType dtype = DType::kF32;
  Shape shape;
};
// <name>_scale_inv, a decoded value's second factor: fp32, one for the tensor (shape []) or for 128
// x 128 elements; E8M0 as U8 for 32 elements of a row; E4M3 for 16.
ScaleTensor ScaleInvOf(const std::string& name, plan::Recipe recipe, const Shape& shape);
// The bytes of that.
std::vector<uint8_t> ScaleInvBytes(plan::Recipe recipe,
                                   const Shape& shape,
                                   const WeightAmaxes& amaxes);

}  // namespace ravel::ctl
