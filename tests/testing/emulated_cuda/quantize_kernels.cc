// Operands of the kernels of quantization.

#include <string_view>

#include "common/check.h"
#include "common/gemm_scales.h"
#include "common/recipe.h"
#include "tests/testing/emulated_cuda/emulated_kernels.h"

namespace ravel::kernels::cuda::emulated {
namespace {

constexpr auto kRead = Access::Kind::kRead;
constexpr auto kWrite = Access::Kind::kWrite;
constexpr auto kUpdate = Access::Kind::kUpdate;
constexpr auto kAtomic = Access::Kind::kAtomic;

int64_t EdgeOf(int32_t scheme) {
  switch (scheme) {
    case kBlocksOf128:
      return plan::BlockEdge(plan::Recipe::kFloat8Block);
    case kBlocksOf32:
      return plan::BlockEdge(plan::Recipe::kMxFp8);
    case kBlocksOfFp4:
    case kBlocksOfFp4Stochastic:
      return plan::BlockEdge(plan::Recipe::kNvFp4);
    default:
      return 0;
  }
}
int64_t CodesPerByteOf(int32_t scheme) {
  return scheme == kBlocksOfFp4 ? 2 : 1;
}

// Rows of a grid of blocks over rows [first, first + rows) of a matrix.
void Grid(Access::Kind kind,
          Operands& on,
          const uint32_t* amax,
          int64_t edge,
          int64_t first,
          int64_t rows,
          int64_t grid_columns) {
  if (edge == 0) {
    on.Array(kind, "amax", amax, 1);
  } else if (rows > 0) {
    const int64_t begin = first / edge;
    on.Array(kind,
             "amax",
             amax + begin * grid_columns,
             (DivCeil(first + rows, edge) - begin) * grid_columns);
  }
}

void BlockAmax(const BlockAmaxParams& p, Operands& on) {
  on.RequireBlock(kFlatThreads);
  on.Read("from", p.from, {1, p.rows * p.columns, p.rows * p.columns});
  Grid(kAtomic, on, p.amax, p.edge, p.first_row, p.rows, p.grid_columns);
}

void WeightScales(
    const WeightScaleParams& p, int32_t scheme, int64_t first, int64_t rows, Operands& on) {
  on.Array(kRead, "encode", p.encode, 1);
  on.Array(kRead, "domain_amax", p.domain_amax, 1);
  on.Require(p.domain_amax != nullptr || scheme != kBlocksOfFp4, "no amax of the domain");
  if (p.amax != nullptr) {
    Grid(kRead, on, p.amax, EdgeOf(scheme), first, rows, p.grid_columns);
  } else {
    on.Require(p.encode != nullptr, "neither an amax nor a scale");
  }
}

// The alignment that accesses of eight elements ask for.
void RequireEights(const void* data, int64_t bytes, Operands& on) {
  on.Require(on.launch().variant % 2 == 0 ||
                 reinterpret_cast<uintptr_t>(data) % static_cast<uint64_t>(bytes) == 0,
             "accesses of eight elements do not fit");
}

void QuantizeWeight(const QuantizeWeightParams& p, Operands& on) {
  const int32_t scheme = on.launch().variant / 2;
  on.RequireBlock(kFlatThreads);
  RequireEights(p.from, 32, on);
  RequireEights(p.codes, 8, on);
  on.Array(kRead, "from", p.from, p.rows * p.columns);
  on.Array(kWrite, "codes", p.codes, p.rows * p.columns / CodesPerByteOf(scheme));
  WeightScales(p.scales, scheme, p.first_row, p.rows, on);
}

void DecodeWeight(const DecodeWeightParams& p, Operands& on) {
  const int32_t scheme = on.launch().variant / 2;
  on.RequireBlock(kFlatThreads);
  RequireEights(p.to, 16, on);
  RequireEights(p.codes, 8, on);
  on.Array(kRead, "codes", p.codes, p.rows * p.columns / CodesPerByteOf(scheme));
  on.Add(kWrite, "to", p.to, {p.rows, p.columns, p.columns}, DType::kBF16);
  on.Array(kWrite, "scale", p.scale, 1);
  WeightScales(p.scales, scheme, 0, p.rows, on);
}

void RequireVectors(const void* data, int64_t stride, Operands& on) {
  on.Require(reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride * 2 % 16 == 0,
             "accesses of 16 bytes do not fit");
}

void ActivationAmax(const ActivationAmaxParams& p, Operands& on) {
  on.RequireBlock(kFlatThreads);
  if (on.launch().variant == kAmaxVector && p.rows > 1) {
    RequireVectors(p.from, p.from_stride, on);
  }
  on.Add(kRead, "from", p.from, {p.rows, p.columns, p.from_stride}, DType::kBF16);
  on.Add(kWrite, "to", p.to, {p.rows, p.columns, p.to_stride}, DType::kBF16);
  on.Array(kAtomic, "amax", p.amax, 1);
}

void QuantizeActivation(const QuantizeActivationParams& p, Operands& on) {
  on.RequireBlock(kFlatThreads);
  if (on.launch().variant % 2 == 1 && p.rows > 1) {
    RequireVectors(p.from, p.from_stride, on);
    RequireVectors(p.to, p.to_stride, on);
  }
  on.Add(kRead, "from", p.from, {p.rows, p.columns, p.from_stride}, DType::kBF16);
  on.Add(kWrite, "to", p.to, {p.rows, p.columns, p.to_stride}, DType::kBF16);
  on.Array(kRead, "amax", p.amax, 1);
  on.Array(kWrite, "scale", p.scale, 1);
  on.Array(kRead, "encode", p.encode, 1);
  on.Array(kUpdate, "staged", p.staged, 1);
  on.Array(kAtomic, "non_finite", p.non_finite, 1);
  on.Array(kRead, "device_step", p.device_step, 1);
}

void DelayedScales(const DelayedScalesParams& p, Operands& on) {
  on.RequireBlock(kFlatThreads);
  on.RequireGrid(0, p.slots);
  const int64_t domains = p.slots / 3;
  on.Array(kUpdate, "histories", p.histories, p.slots * p.length);
  on.Array(kUpdate, "scales", p.scales, 2 * p.slots);
  on.Array(kRead, "weight_amax", p.weight_amax, domains);
  on.Array(kUpdate, "activation_amax", p.activation_amax, 2 * domains);
  on.Array(kRead, "apply", p.apply, 1);
}

void TensorCodes(const TensorCodesParams& p, Operands& on) {
  on.RequireBlock(kFlatThreads);
  on.Require(reinterpret_cast<uintptr_t>(p.from) % 8 == 0 && p.from_stride % 4 == 0,
             "accesses of 8 bytes do not fit");
  on.Add(kRead, "from", p.from, {p.to.rows, p.to.columns, p.from_stride}, DType::kBF16);
  on.Array(kWrite, "codes", p.codes, p.to.rows * p.to.columns);
  on.Array(kWrite, "transposed", p.to.codes, p.to.rows * p.to.columns);
  on.Array(kRead, "amax", p.amax, 1);
  on.Array(kWrite, "scale", p.scale, 1);
  on.Array(kRead, "encode", p.encode, 1);
  on.Array(kUpdate, "staged", p.staged, 1);
  on.Array(kAtomic, "non_finite", p.non_finite, 1);
}

void TransposeCodes(const TransposeCodesParams& p, Operands& on) {
  on.RequireBlock(kFlatThreads);
  on.Array(kRead, "from", p.from, p.to.rows * p.to.columns);
  on.Array(kWrite, "to", p.to.codes, p.to.rows * p.to.columns);
}

void BlockCodes(const BlockCodesParams& p, Operands& on) {
  const ScaleForm form =
      on.launch().variant == kBlocksOf32 ? ScaleForm::kBlocks32 : ScaleForm::kBlocks128;
  const bool turned = on.launch().name == std::string_view("BlockCodesAlongRows");
  on.RequireBlock(kFlatThreads);
  on.Require(reinterpret_cast<uintptr_t>(p.from) % 8 == 0 && p.from_stride % 4 == 0 &&
                 reinterpret_cast<uintptr_t>(p.codes) % 8 == 0,
             "accesses of 8 bytes do not fit");
  on.Require(reinterpret_cast<uintptr_t>(p.scales) % 16 == 0, "scales are not aligned");
  on.Add(kRead, "from", p.from, {p.rows, p.columns, p.from_stride}, DType::kBF16);
  on.Array(kWrite, "codes", p.codes, p.rows * p.columns);
  on.Array(kUpdate,
           "scales",
           static_cast<uint8_t*>(p.scales),
           ScaleBytes(form, turned ? p.columns : p.rows, turned ? p.rows : p.columns));
  on.Array(kAtomic, "non_finite", p.non_finite, 1);
}

void PlaceScales(const PlaceScalesParams& p, Operands& on) {
  const bool squares = on.launch().variant == kBlocksOf128;
  const ScaleForm form = squares ? ScaleForm::kSquares128 : ScaleForm::kBlocks32;
  on.RequireBlock(kFlatThreads);
  on.Require(reinterpret_cast<uintptr_t>(p.to) % 16 == 0, "scales are not aligned");
  on.Array(kRead, "amax", p.amax, p.rows / EdgeOf(on.launch().variant) * p.grid_columns);
  on.Array(
      kUpdate,
      "to",
      static_cast<uint8_t*>(p.to),
      ScaleBytes(
          form, p.turned != 0 ? p.columns : p.all_rows, p.turned != 0 ? p.all_rows : p.columns));
}

void LargestWords(const LargestWordsParams& p, Operands& on) {
  on.RequireBlock(kFlatThreads);
  on.Require(p.count > 0 && p.count <= kMaxWordPieces, "another number of pieces");
  for (int piece = 0; piece < p.count; ++piece) {
    on.Array(kRead, "piece", p.pieces[piece], p.words);
  }
  on.Array(p.accumulate != 0 ? kUpdate : kWrite, "out", p.out, p.words);
}

}  // namespace

std::vector<KernelOperands> QuantizeKernelOperands() {
  return {
      Declare<BlockAmaxParams, BlockAmax>(Kernel::kBlockAmax, "BlockAmax"),
      Declare<QuantizeWeightParams, QuantizeWeight>(Kernel::kQuantizeWeight, "QuantizeWeight"),
      Declare<DecodeWeightParams, DecodeWeight>(Kernel::kDecodeWeight, "DecodeWeight"),
      Declare<ActivationAmaxParams, ActivationAmax>(Kernel::kActivationAmax, "ActivationAmax"),
      Declare<QuantizeActivationParams, QuantizeActivation>(Kernel::kQuantizeAlongColumns,
                                                            "QuantizeAlongColumns"),
      Declare<QuantizeActivationParams, QuantizeActivation>(Kernel::kQuantizeAlongRows,
                                                            "QuantizeAlongRows"),
      Declare<DelayedScalesParams, DelayedScales>(Kernel::kDelayedScales, "DelayedScales"),
      Declare<TensorCodesParams, TensorCodes>(Kernel::kTensorCodes, "TensorCodes"),
      Declare<TransposeCodesParams, TransposeCodes>(Kernel::kTransposeCodes, "TransposeCodes"),
      Declare<BlockCodesParams, BlockCodes>(Kernel::kBlockCodesAlongColumns,
                                            "BlockCodesAlongColumns"),
      Declare<BlockCodesParams, BlockCodes>(Kernel::kBlockCodesAlongRows, "BlockCodesAlongRows"),
      Declare<PlaceScalesParams, PlaceScales>(Kernel::kPlaceScales, "PlaceScales"),
      Declare<LargestWordsParams, LargestWords>(Kernel::kLargestWords, "LargestWords")};
}

}  // namespace ravel::kernels::cuda::emulated
