// Two passes over a weight: amaxes of its blocks, then its codes. Nothing is larger than the rows
// of one block, or a grid of amaxes. MXFP8 and NVFP4 share scales between 32 and 16 rows; other
// readers know blocks of one row, so a row of scales is repeated for them.

#include "coordinator/ctl/quantized_weights.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include <absl/strings/str_cat.h>

#include "common/check.h"
#include "common/model/recipes.h"
#include "common/signed_size.h"
#include "kernels/scalar/code_digest.h"
#include "kernels/scalar/float4.h"

namespace ravel::ctl {
namespace {

namespace scalar = kernels::scalar;
using plan::Recipe;

constexpr int64_t kReadElements = 4 << 20;

uint32_t Magnitude(float value) {
  return std::bit_cast<uint32_t>(value) & 0x7FFFFFFFu;
}

void EncodeRow(Recipe recipe,
               std::span<const float> row,
               std::span<const float> scales,  // one for each block, or one
               int64_t block,
               std::span<uint8_t> codes) {
  if (recipe == Recipe::kNvFp4) {
    for (size_t i = 0; i < codes.size(); ++i) {
      const float scale = scales[2 * i / Size(block)];
      codes[i] = static_cast<uint8_t>(scalar::E2M1Nearest(row[2 * i] * scale) |
                                      scalar::E2M1Nearest(row[2 * i + 1] * scale) << 4);
    }
    return;
  }
  for (size_t i = 0; i < codes.size(); ++i) {
    codes[i] = scalar::E4M3::Nearest(row[i] * scales[i / Size(block)]);
  }
}

template <typename Value>
void AppendBytes(Value value, std::vector<uint8_t>& bytes) {
  const size_t at = bytes.size();
  bytes.resize(at + sizeof(value));
  std::memcpy(bytes.data() + at, &value, sizeof(value));
}

}  // namespace

absl::StatusOr<QuantizedWeights> QuantizedWeights::Of(store::CommittedStep* step) {
  QuantizedWeights weights(step);
  const ckpt::QuantRecord& quant = step->manifest().quant;
  if (quant.tensors.empty()) {
    return absl::FailedPreconditionError(
        "the step has no quantized weights: expected one of a job with precision.recipe");
  }
  for (const Recipe recipe :
       {Recipe::kDelayed, Recipe::kCurrent, Recipe::kFloat8Block, Recipe::kMxFp8, Recipe::kNvFp4}) {
    if (quant.recipe == plan::RecipeName(recipe)) {
      weights.recipe_ = recipe;
    }
  }
  if (weights.recipe_ == Recipe::kNone || quant.rounding != ckpt::kRoundsMainWeights) {
    return absl::UnimplementedError(absl::StrCat("the step's codes are of recipe \"",
                                                 quant.recipe,
                                                 "\", rounded from ",
                                                 quant.rounding,
                                                 "; this release knows neither"));
  }
  return weights;
}

const ckpt::QuantizedRecord* QuantizedWeights::Find(const std::string& name) const {
  const auto found = std::find_if(
      weights_->begin(), weights_->end(), [&](const auto& weight) { return weight.name == name; });
  return found == weights_->end() ? nullptr : &*found;
}

const ckpt::TensorRecord& QuantizedWeights::TensorOf(const ckpt::QuantizedRecord& weight) const {
  const ckpt::TensorRecord* tensor = step_->manifest().FindTensor(weight.name);
  CHECK(tensor != nullptr);  // the manifest is valid
  return *tensor;
}

absl::Status QuantizedWeights::VisitRows(const ckpt::TensorRecord& tensor,
                                         const RowsVisitor& visit) {
  if (tensor.stored_dtype != DType::kF32) {
    return absl::UnimplementedError(absl::StrCat(tensor.name,
                                                 ": stored as ",
                                                 std::string(DTypeName(tensor.stored_dtype)),
                                                 ", expected F32"));
  }
  const int64_t columns = tensor.shape[1];
  const int64_t edge = std::max<int64_t>(1, plan::BlockEdge(recipe_));
  const int64_t band = RoundUp(std::max<int64_t>(1, kReadElements / columns), edge);
  std::vector<float> values;
  for (int64_t row = 0; row < tensor.shape[0]; row += band) {
    const int64_t end = std::min(row + band, tensor.shape[0]);
    values.resize(Size((end - row) * columns));
    RETURN_IF_ERROR(step_->ReadElements(
        tensor, row * columns, end * columns, std::as_writable_bytes(std::span(values))));
    RETURN_IF_ERROR(visit(row, values));
  }
  return absl::OkStatus();
}

uint32_t QuantizedWeights::LeastAmax() const {
  return std::bit_cast<uint32_t>(static_cast<float>(step_->manifest().quant.amax_epsilon));
}

absl::StatusOr<uint32_t> QuantizedWeights::DomainAmax(const std::string& domain) {
  const auto known = domain_amax_.find(domain);
  if (known != domain_amax_.end()) {
    return known->second;
  }
  uint32_t amax = LeastAmax();
  for (const ckpt::QuantizedRecord& weight : *weights_) {
    if (weight.domain == domain) {
      RETURN_IF_ERROR(VisitRows(TensorOf(weight), [&](int64_t, std::span<const float> values) {
        for (const float value : values) {
          amax = std::max(amax, Magnitude(value));
        }
        return absl::OkStatus();
      }));
    }
  }
  domain_amax_.emplace(domain, amax);
  return amax;
}

absl::StatusOr<float> QuantizedWeights::DelayedEncode(const ckpt::QuantizedRecord& weight) {
  const std::string key = plan::StateKey(weight.name, plan::StateRole::kCastScale);
  const ckpt::TensorRecord* tensor = step_->manifest().FindTensor(key);
  if (tensor == nullptr || tensor->stored_dtype != DType::kF32 || ElementCount(tensor->shape) < 1) {
    return absl::DataLossError(absl::StrCat(key, ": missing, or no scales"));
  }
  float encode = 0;  // the first is the weight's
  RETURN_IF_ERROR(
      step_->ReadElements(*tensor, 0, 1, std::as_writable_bytes(std::span(&encode, 1))));
  return encode;
}

absl::StatusOr<WeightAmaxes> QuantizedWeights::Amaxes(const ckpt::QuantizedRecord& weight) {
  const ckpt::TensorRecord& tensor = TensorOf(weight);
  const int64_t edge = plan::BlockEdge(recipe_);
  WeightAmaxes amaxes;
  uint32_t domain = 0;
  float delayed = 0;
  if (recipe_ == Recipe::kCurrent || recipe_ == Recipe::kNvFp4) {
    ASSIGN_OR_RETURN(domain, DomainAmax(weight.domain));
  } else if (recipe_ == Recipe::kDelayed) {
    ASSIGN_OR_RETURN(delayed, DelayedEncode(weight));
  }
  amaxes.tensor = scalar::WeightTensorScales(recipe_, domain, delayed);
  if (edge == 0) {
    return amaxes;
  }
  const int64_t columns = tensor.shape[1];
  amaxes.grid_rows = DivCeil(tensor.shape[0], edge);
  amaxes.grid_columns = DivCeil(columns, edge);
  amaxes.blocks.resize(Size(amaxes.grid_rows * amaxes.grid_columns), LeastAmax());
  RETURN_IF_ERROR(VisitRows(tensor, [&](int64_t first_row, std::span<const float> values) {
    for (int64_t i = 0; i < std::ssize(values); ++i) {
      const int64_t row = (first_row + i / columns) / edge;
      uint32_t& block = amaxes.blocks[Size(row * amaxes.grid_columns + i % columns / edge)];
      block = std::max(block, Magnitude(values[Size(i)]));
    }
    return absl::OkStatus();
  }));
  return amaxes;
}

absl::Status QuantizedWeights::VisitCodes(const ckpt::QuantizedRecord& weight,
                                          const WeightAmaxes& amaxes,
                                          const CodesVisitor& visit) {
  const ckpt::TensorRecord& tensor = TensorOf(weight);
  const int64_t columns = tensor.shape[1];
  const int64_t edge = plan::BlockEdge(recipe_);
  const size_t row_bytes = Size(plan::CodeBytes(recipe_, columns));
  std::vector<float> scales(Size(std::max<int64_t>(1, amaxes.grid_columns)), amaxes.tensor.encode);
  std::vector<uint8_t> codes;
  return VisitRows(tensor, [&](int64_t first_row, std::span<const float> values) {
    const int64_t rows = std::ssize(values) / columns;
    codes.resize(Size(rows) * row_bytes);
    for (int64_t row = 0; row < rows; ++row) {
      if (edge > 0 && (row == 0 || (first_row + row) % edge == 0)) {
        const int64_t first = (first_row + row) / edge * amaxes.grid_columns;
        for (size_t i = 0; i < scales.size(); ++i) {
          scales[i] = scalar::WeightBlockScales(
                          recipe_, amaxes.blocks[Size(first) + i], amaxes.tensor.encode)
                          .encode;
        }
      }
      EncodeRow(recipe_,
                values.subspan(Size(row * columns), Size(columns)),
                scales,
                edge > 0 ? edge : columns,
                std::span(codes).subspan(Size(row) * row_bytes, row_bytes));
    }
    return visit(codes);
  });
}

absl::StatusOr<uint64_t> QuantizedWeights::Digest(const ckpt::QuantizedRecord& weight) {
  ASSIGN_OR_RETURN(const WeightAmaxes amaxes, Amaxes(weight));
  uint64_t sum = scalar::TensorScaleDigest(amaxes.tensor);
  for (size_t i = 0; i < amaxes.blocks.size(); ++i) {
    sum += scalar::BlockScaleDigest(
        static_cast<int64_t>(i),
        scalar::WeightBlockScales(recipe_, amaxes.blocks[i], amaxes.tensor.encode));
  }
  const int64_t row_bytes = plan::CodeBytes(recipe_, TensorOf(weight).shape[1]);
  int64_t at = 0;
  RETURN_IF_ERROR(VisitCodes(weight, amaxes, [&](std::span<const uint8_t> codes) {
    sum += scalar::CodesDigest(codes, row_bytes, at);
    at += std::ssize(codes);
    return absl::OkStatus();
  }));
  return sum;
}

ScaleTensor ScaleInvOf(const std::string& name, Recipe recipe, const Shape& shape) {
  ScaleTensor scale = {.name = name + "_scale_inv", .dtype = DType::kF32, .shape = {}};
  const int64_t edge = plan::BlockEdge(recipe);
  if (recipe == Recipe::kFloat8Block) {
    scale.shape = {DivCeil(shape[0], edge), DivCeil(shape[1], edge)};
  } else if (edge > 0) {
    scale.dtype = recipe == Recipe::kMxFp8 ? DType::kU8 : DType::kF8E4M3;
    scale.shape = {shape[0], DivCeil(shape[1], edge)};
  }
  return scale;
}

std::vector<uint8_t> ScaleInvBytes(Recipe recipe, const Shape& shape, const WeightAmaxes& amaxes) {
  std::vector<uint8_t> bytes;
  if (amaxes.blocks.empty()) {
    AppendBytes(amaxes.tensor.decode, bytes);
  } else if (recipe == Recipe::kFloat8Block) {
    for (const uint32_t amax : amaxes.blocks) {
      AppendBytes(scalar::WeightBlockScales(recipe, amax, amaxes.tensor.encode).decode, bytes);
    }
  } else {
    for (int64_t row = 0; row < shape[0]; ++row) {
      const size_t first = Size(row / plan::BlockEdge(recipe) * amaxes.grid_columns);
      for (size_t i = 0; i < Size(amaxes.grid_columns); ++i) {
        const uint32_t amax = amaxes.blocks[first + i];
        bytes.push_back(recipe == Recipe::kMxFp8 ? scalar::MxFp8BlockCode(amax)
                                                 : static_cast<uint8_t>(scalar::NvFp4BlockCode(
                                                       amax, amaxes.tensor.encode)));
      }
    }
  }
  return bytes;
}

}  // namespace ravel::ctl
