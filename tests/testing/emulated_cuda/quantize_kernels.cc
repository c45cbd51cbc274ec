// Operands of the kernels of quantization.

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
    case kBlocksOf128AsMxFp8:
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
  on.Array(kRead, "unless", p.unless, 1);
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
  on.Array(kUpdate, "scales", p.scales, kWordsOfSlot * p.slots);
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
  const int64_t per_byte = on.launch().variant == kTwoToAByte ? 2 : 1;
  on.RequireBlock(kFlatThreads);
  on.Require(p.to.stride == p.to.rows / per_byte, "transposed codes are not contiguous");
  on.Array(kRead, "from", p.from, p.to.rows * p.to.columns / per_byte);
  on.Array(kWrite, "to", p.to.codes, p.to.rows * p.to.columns / per_byte);
}

template <bool kTurned>
void BlockCodes(const BlockCodesParams& p, Operands& on) {
  const ScaleForm form =
      on.launch().variant == kBlocksOf128 ? ScaleForm::kBlocks128 : ScaleForm::kBlocks32;
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
           ScaleBytes(form, kTurned ? p.columns : p.rows, kTurned ? p.rows : p.columns));
  on.Array(kAtomic, "non_finite", p.non_finite, 1);
}

template <bool kTurned>
void Fp4Codes(const Fp4CodesParams& p, Operands& on) {
  const int64_t rows = p.cast.rows;
  const int64_t columns = p.cast.columns;
  on.RequireBlock(kFlatThreads);
  on.Require(reinterpret_cast<uintptr_t>(p.cast.from) % 8 == 0 && p.cast.from_stride % 4 == 0 &&
                 reinterpret_cast<uintptr_t>(p.codes) % 8 == 0,
             "accesses of 8 bytes do not fit");
  on.Require(reinterpret_cast<uintptr_t>(p.scales) % 16 == 0, "scales are not aligned");
  on.Require(rows % 32 == 0 && columns % 32 == 0, "rows of codes are not whole 16 bytes");
  on.Require(p.cast.amax != nullptr, "no amax of the tensor");
  on.Add(kRead, "from", p.cast.from, {rows, columns, p.cast.from_stride}, DType::kBF16);
  on.Array(kWrite, "codes", p.codes, rows * columns / 2);
  on.Array(kUpdate,
           "scales",
           p.scales,
           ScaleBytes(ScaleForm::kBlocks16, kTurned ? columns : rows, kTurned ? rows : columns));
  on.Array(kRead, "amax", p.cast.amax, 1);
  on.Array(kWrite, "scale", p.cast.scale, 1);
  on.Array(kAtomic, "non_finite", p.cast.non_finite, 1);
  on.Array(kRead, "device_step", p.cast.device_step, 1);
}

ScaleForm WeightFormOf(int32_t scheme) {
  switch (scheme) {
    case kBlocksOf128:
      return ScaleForm::kSquares128;
    case kBlocksOfFp4:
      return ScaleForm::kBlocks16;
    default:
      return ScaleForm::kBlocks32;
  }
}

void PlaceScales(const PlaceScalesParams& p, Operands& on) {
  const ScaleForm form = WeightFormOf(on.launch().variant);
  on.RequireBlock(kFlatThreads);
  on.Require(p.domain_amax != nullptr || form != ScaleForm::kBlocks16, "no amax of the domain");
  on.Array(kRead, "domain_amax", p.domain_amax, 1);
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
  return {Declare<BlockAmaxParams, BlockAmax>(Kernel::kBlockAmax, "BlockAmax"),
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
          Declare<BlockCodesParams, BlockCodes<false>>(Kernel::kBlockCodesAlongColumns,
                                                       "BlockCodesAlongColumns"),
          Declare<BlockCodesParams, BlockCodes<true>>(Kernel::kBlockCodesAlongRows,
                                                      "BlockCodesAlongRows"),
          Declare<Fp4CodesParams, Fp4Codes<false>>(Kernel::kFp4CodesAlongColumns,
                                                   "Fp4CodesAlongColumns"),
          Declare<Fp4CodesParams, Fp4Codes<true>>(Kernel::kFp4CodesAlongRows, "Fp4CodesAlongRows"),
          Declare<PlaceScalesParams, PlaceScales>(Kernel::kPlaceScales, "PlaceScales"),
          Declare<LargestWordsParams, LargestWords>(Kernel::kLargestWords, "LargestWords")};
}

}  // namespace ravel::kernels::cuda::emulated
