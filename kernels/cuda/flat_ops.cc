// Ops over flat ranges: optimizer, sums in a fixed order, digest, initial values, casts.

#include <algorithm>
#include <bit>

#include "common/check.h"
#include "kernels/cuda/launch_rules.h"
#include "kernels/cuda/ops.h"

namespace ravel::kernels::cuda {
namespace {

static_assert(sizeof(DeviceAdamWScalars) == sizeof(AdamWScalars));

DeviceAdamWScalars ScalarsOf(const AdamWScalars& scalars) {
  return std::bit_cast<DeviceAdamWScalars>(scalars);
}

}  // namespace

void AdamWUpdate(Stream& stream, const AdamWArgs& args) {
  LaunchStream& on = LaunchStreamOf(stream);
  const int64_t n = args.p.elements();
  for (const TensorView& view : {args.p, args.g, args.m, args.v}) {
    RequireFlat(view, n, DType::kF32);
  }
  if (n == 0) {
    return;
  }
  // A ragged end does without vectors: padded shards have none.
  const Variant variant = VariantFor({args.p, args.g, args.m, args.v});
  on.Run({.kernel = Kernel::kAdamW,
          .variant = variant,
          .grid = {FlatGrid(on, n / WidthOf(variant)), 1, 1}},
         AdamWParams{
             .p = args.p.As<float>(),
             .g = args.g.As<float>(),
             .m = args.m.As<float>(),
             .v = args.v.As<float>(),
             .device_scalars = reinterpret_cast<const DeviceAdamWScalars*>(args.device_scalars),
             .apply = args.apply,
             .elements = n,
             .scalars = ScalarsOf(args.scalars)});
}

namespace {

void RequireMixedAdamW(const MixedAdamWArgs& args, int64_t n) {
  CHECK_MSG(args.main_weight.present() != args.remainder.present() || n == 0,
            "a main weight is fp32, or a weight with a remainder");
  if (args.remainder.present()) {
    RequireFlat(args.remainder, n, DType::kI16);
    RequireFlat(args.weight, n, DType::kBF16);
  } else {
    RequireFlat(args.main_weight, n, DType::kF32);
  }
  if (args.weight.present()) {
    RequireFlat(args.weight, n, DType::kBF16);
  }
  RequireFloat(args.g);
  RequireFloat(args.m);
  RequireFlat(args.m, n, args.m.dtype);
  RequireFlat(args.v, n, args.m.dtype);
  CHECK_MSG(args.first_index >= 0, "an index is not negative");
}

}  // namespace

void MixedAdamWUpdate(Stream& stream, const MixedAdamWArgs& args) {
  LaunchStream& on = LaunchStreamOf(stream);
  const int64_t n = args.g.elements();
  RequireMixedAdamW(args, n);
  if (n == 0) {
    return;
  }
  const int32_t gradient = args.g.dtype == DType::kBF16 ? 2 : 0;
  const int32_t states = args.m.dtype == DType::kBF16 ? 1 : 0;
  MixedAdamWParams params = {};
  params.main_weight = args.main_weight.As<float>();
  params.weight = args.weight.As<uint16_t>();
  params.remainder = args.remainder.As<int16_t>();
  params.g = args.g.data;
  params.m = args.m.data;
  params.v = args.v.data;
  params.device_scalars = reinterpret_cast<const DeviceAdamWScalars*>(args.device_scalars);
  params.device_step = args.device_step;
  params.apply = args.apply;
  params.elements = n;
  params.seed = args.seed;
  params.first_index = static_cast<uint64_t>(args.first_index);
  params.step = args.step;
  params.site = args.site;
  params.scalars = ScalarsOf(args.scalars);
  on.Run({.kernel = Kernel::kMixedAdamW,
          .variant = gradient + states,
          .grid = {FlatGrid(on, DivCeil(n, int64_t{4}) + 1), 1, 1}},
         params);
}

void TreeAdd(Stream& stream, const TreeAddArgs& args) {
  LaunchStream& on = LaunchStreamOf(stream);
  const int64_t n = args.out.elements();
  for (const TensorView& view : {args.a, args.b, args.out}) {
    RequireFlat(view, n, DType::kF32);
  }
  if (n == 0) {
    return;
  }
  const Variant variant = VariantFor({args.a, args.b, args.out});
  on.Run({.kernel = Kernel::kTreeAdd,
          .variant = variant,
          .grid = {FlatGrid(on, n / WidthOf(variant)), 1, 1}},
         TreeAddParams{.a = args.a.As<float>(),
                       .b = args.b.As<float>(),
                       .out = args.out.As<float>(),
                       .elements = n});
}

namespace {

constexpr int64_t kAccessBytes = 16;

bool OnAccess(const void* address) {
  return reinterpret_cast<uintptr_t>(address) % kAccessBytes == 0;
}

// The argument of a sum of `count` pieces from `first`, without statistics.
ReduceAddParams ReduceParams(const std::vector<const float*>& pieces,
                             size_t first,
                             size_t count,
                             float* out,
                             int64_t elements) {
  CHECK_MSG(std::has_single_bit(count) && count <= kMaxTreePieces, "pieces are a power of two");
  ReduceAddParams params = {};
  params.out = out;
  params.elements = elements;
  bool aligned = OnAccess(out);
  for (size_t i = 0; i < count; ++i) {
    params.pieces[i] = pieces[first + i];
    aligned = aligned && OnAccess(pieces[first + i]);
  }
  params.aligned = aligned ? 1 : 0;
  return params;
}

int32_t LogarithmOf(size_t count) {
  return std::countr_zero(count);
}

// Blocks that the length alone decides: their partial sums are added in order.
uint32_t StatisticsGrid(int64_t elements) {
  return static_cast<uint32_t>(
      std::clamp<int64_t>(DivCeil(elements, int64_t{4} * kFlatThreads), 1, kReducePartials));
}

}  // namespace

void TreeSum(Stream& stream, const TreeSumArgs& args) {
  LaunchStream& on = LaunchStreamOf(stream);
  const int64_t n = args.out.elements();
  RequireFlat(args.out, n, DType::kF32);
  CHECK_MSG(std::has_single_bit(args.pieces.size()), "pieces are a power of two");
  if (n == 0) {
    return;
  }
  const auto run = [&](const ReduceAddParams& params, size_t count) {
    on.Run({.kernel = Kernel::kTreeSum,
            .variant = LogarithmOf(count),
            .grid = {FlatGrid(on, DivCeil(n, int64_t{4})), 1, 1}},
           params);
  };
  const size_t count = args.pieces.size();
  if (count <= kMaxTreePieces) {
    run(ReduceParams(args.pieces, 0, count, args.out.As<float>(), n), count);
    return;
  }
  // Subtrees of 64 into scratch, then their roots.
  const size_t subtrees = count / kMaxTreePieces;
  const int64_t stride = RoundUp(n, int64_t{4});
  float* roots = static_cast<float*>(
      on.Scratch(static_cast<int64_t>(subtrees) * stride * static_cast<int64_t>(sizeof(float))));
  std::vector<const float*> root_pieces;
  for (size_t i = 0; i < subtrees; ++i) {
    float* root = roots + static_cast<int64_t>(i) * stride;
    root_pieces.push_back(root);
    run(ReduceParams(args.pieces, i * kMaxTreePieces, kMaxTreePieces, root, n), kMaxTreePieces);
  }
  run(ReduceParams(root_pieces, 0, subtrees, args.out.As<float>(), n), subtrees);
}

void ReduceAdd(Stream& stream, const ReduceAddArgs& args) {
  LaunchStream& on = LaunchStreamOf(stream);
  const int64_t n = args.out.elements();
  RequireFlat(args.out, n, DType::kF32);
  CHECK_MSG(args.pieces.size() <= kMaxReducePieces, "more pieces than one pass adds");
  if (n == 0) {
    if (args.squared_norm != nullptr) {
      on.FillZero(args.squared_norm, sizeof(double));
    }
    return;
  }
  ReduceAddParams params =
      ReduceParams(args.pieces, 0, args.pieces.size(), args.out.As<float>(), n);
  params.accumulate = args.output == Output::kAccumulate ? 1 : 0;
  params.non_finite = args.non_finite;
  const uint32_t grid = StatisticsGrid(n);
  if (args.squared_norm != nullptr) {
    params.partials = static_cast<double*>(on.Scratch(grid * int64_t{sizeof(double)}));
  }
  on.Run({.kernel = Kernel::kReduceAdd,
          .variant = LogarithmOf(args.pieces.size()),
          .grid = {grid, 1, 1}},
         params);
  if (args.squared_norm != nullptr) {
    on.Run({.kernel = Kernel::kSumDoubles},
           SumDoublesParams{
               .values = params.partials, .out = args.squared_norm, .count = int64_t{grid}});
  }
}

void CopyBytes(Stream& stream, const CopyArgs& args) {
  CHECK_GE(args.bytes, 0);
  if (args.bytes > 0) {
    CHECK(args.to != nullptr && args.from != nullptr);
    LaunchStreamOf(stream).CopyMemory(args.to, args.from, args.bytes);
  }
}

void RowSumSquares(Stream& stream, const RowSumSquaresArgs& args) {
  LaunchStream& on = LaunchStreamOf(stream);
  const int64_t rows = args.x.size[0];
  RequireFlat(args.x, args.x.elements(), DType::kF32);
  RequireFlat(args.sums, rows, DType::kF32);
  if (rows == 0) {
    return;
  }
  const Variant variant = FitsVectors({args.x}) ? kF32Vector : kF32Scalar;
  on.Run({.kernel = Kernel::kRowSumSquares,
          .variant = variant,
          .grid = {FlatGrid(on, rows * kWarpThreads), 1, 1}},
         RowSumSquaresParams{.x = args.x.As<float>(),
                             .sums = args.sums.As<float>(),
                             .non_finite = args.non_finite,
                             .rows = rows,
                             .columns = args.x.columns()});
}

uint64_t DigestRange(Stream& stream, const TensorView& range, uint64_t first_index) {
  LaunchStream& on = LaunchStreamOf(stream);
  const int64_t n = range.elements();
  RequireFlat(range, n, range.dtype);
  if (n == 0) {
    return 0;
  }
  uint64_t* sum = static_cast<uint64_t*>(on.Scratch(sizeof(uint64_t)));
  on.FillZero(sum, sizeof(uint64_t));
  const size_t bytes = static_cast<size_t>(DTypeBytes(range.dtype));
  on.Run(
      {.kernel = Kernel::kDigest, .variant = LogarithmOf(bytes), .grid = {FlatGrid(on, n), 1, 1}},
      DigestParams{.data = range.data,
                   .sum = sum,
                   .elements = n,
                   .first_index = first_index,
                   .element_bytes = static_cast<int32_t>(bytes)});
  return on.ReadWord(sum);
}

void InitNormal(Stream& stream, const InitNormalArgs& args) {
  LaunchStream& on = LaunchStreamOf(stream);
  const int64_t n = args.out.elements();
  RequireFlat(args.out, n, DType::kF32);
  CHECK_MSG(args.first_index >= 0, "an index is not negative");
  if (n == 0) {
    return;
  }
  on.Run({.kernel = Kernel::kInitNormal, .grid = {FlatGrid(on, DivCeil(n, int64_t{4}) + 1), 1, 1}},
         InitNormalParams{.out = args.out.As<float>(),
                          .elements = n,
                          .seed = args.seed,
                          .first_index = static_cast<uint64_t>(args.first_index),
                          .site = args.site,
                          .standard_deviation = args.standard_deviation});
}

void Cast(Stream& stream, const CastArgs& args) {
  LaunchStream& on = LaunchStreamOf(stream);
  const int64_t n = args.from.elements();
  RequireFloat(args.from);
  RequireFloat(args.to);
  CHECK_MSG(args.from.dtype != args.to.dtype, "a cast changes the type");
  RequireFlat(args.from, n, args.from.dtype);
  RequireFlat(args.to, n, args.to.dtype);
  if (n == 0) {
    return;
  }
  // Four elements at a time: 16 bytes of fp32, 8 of bf16.
  const bool vectors = OnAccess(args.from.data) && OnAccess(args.to.data) && n % 4 == 0;
  const bool narrow = args.to.dtype == DType::kBF16;
  const Variant variant =
      narrow ? (vectors ? kBf16Vector : kBf16Scalar) : (vectors ? kMixedVector : kMixedScalar);
  const bool half_away = narrow && args.rounding == Bf16Rounding::kHalfAway;
  on.Run({.kernel = Kernel::kCast,
          .variant = variant,
          .grid = {FlatGrid(on, vectors ? n / 4 : n), 1, 1}},
         CastParams{.from = args.from.data,
                    .to = args.to.data,
                    .elements = n,
                    .half_away = half_away ? 1 : 0});
}

void TransposeMatrix(Stream& stream, const TransposeArgs& args) {
  LaunchStream& on = LaunchStreamOf(stream);
  const int64_t rows = args.from.size[0];
  const int64_t columns = args.from.size[1];
  RequireMatrix(args.from, rows, columns, args.from.dtype);
  RequireMatrix(args.to, columns, rows, args.from.dtype);
  const int64_t bytes = DTypeBytes(args.from.dtype);
  CHECK_MSG(bytes == 2 || bytes == 4, "elements of two or four bytes");
  if (rows == 0 || columns == 0) {
    return;
  }
  const int64_t down = std::min<int64_t>(DivCeil(rows, int64_t{kTransposeTile}), 65535);
  on.Run({.kernel = Kernel::kTranspose,
          .variant = bytes == 4 ? kF32Scalar : kBf16Scalar,
          .grid = {static_cast<uint32_t>(DivCeil(columns, int64_t{kTransposeTile})),
                   static_cast<uint32_t>(down),
                   1},
          .block = kTransposeTile * kTransposeRows},
         TransposeParams{.from = args.from.data,
                         .to = args.to.data,
                         .from_stride = args.from.row_stride,
                         .to_stride = args.to.row_stride,
                         .rows = rows,
                         .columns = columns});
}

}  // namespace ravel::kernels::cuda
