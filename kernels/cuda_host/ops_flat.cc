// Host half of ops over flat ranges: optimizer updates, sums in a fixed order, digest, initial
// values, casts. Each checks its views, chooses a kernel variant and a grid, and launches. Results
// never depend on the device: a grid that only strides over elements may follow the
// multiprocessors, but one whose blocks write partial sums is a function of the length alone. Sums
// of more than 64 pieces take several passes: subtrees of 64 go to scratch first, which keeps the
// order of the binary tree.

#include <algorithm>
#include <bit>

#include "common/check.h"
#include "kernels/cuda_host/launch_rules.h"
#include "kernels/cuda_host/ops.h"

namespace ravel::kernels::cuda {
namespace {

static_assert(sizeof(DeviceUpdateScalars) == sizeof(UpdateScalars));
static_assert(sizeof(DeviceUpdatePiece) == sizeof(UpdatePiece));
static_assert(kBlockElements == kMaxBlockElements);

DeviceUpdateScalars ScalarsOf(const UpdateScalars& scalars) {
  return std::bit_cast<DeviceUpdateScalars>(scalars);
}

DevicePieces PiecesOf(const PieceTable& table,
                      int64_t elements,
                      int64_t first_index = 0,
                      uint32_t site = 0) {
  return {.table = reinterpret_cast<const DeviceUpdatePiece*>(table.pieces),
          .count = table.pieces != nullptr ? table.count : DivCeil(elements, kBlockElements),
          .elements = elements,
          .first_index = first_index,
          .site = site,
          .unused = 0};
}

// A block per piece, as far as the device has room for them.
uint32_t GridOf(const LaunchStream& stream, const DevicePieces& pieces) {
  return FlatGrid(stream, pieces.count * kFlatThreads);
}

}  // namespace

void AdamWUpdate(Stream& stream, const AdamWArgs& args) {
  LaunchStream& on = LaunchStreamOf(stream);
  const int64_t n = args.p.elements();
  for (const TensorView& view : {args.p, args.g, args.m, args.v}) {
    RequireFlat(view, n, DType::kF32);
  }
  const DevicePieces pieces = PiecesOf(args.table, n);
  if (pieces.count == 0) {
    return;
  }
  // A ragged end does without vectors: padded shards have none.
  on.Run({.kernel = Kernel::kAdamW,
          .variant = VariantFor({args.p, args.g, args.m, args.v}),
          .grid = {GridOf(on, pieces), 1, 1}},
         AdamWParams{
             .p = args.p.As<float>(),
             .g = args.g.As<float>(),
             .m = args.m.As<float>(),
             .v = args.v.As<float>(),
             .pieces = pieces,
             .device_scalars = reinterpret_cast<const DeviceUpdateScalars*>(args.device_scalars),
             .apply = args.apply,
             .scalars = ScalarsOf(args.scalars)});
}

namespace {

void RequireMainWeight(const ElementUpdateArgs& args, int64_t n) {
  CHECK_MSG(args.main_weight.present() != args.remainder.present() || n == 0,
            "a main weight is fp32, or a weight with a remainder");
  if (args.remainder.present()) {
    RequireFlat(args.remainder, n, DType::kI16);
    RequireFlat(args.weight, n, DType::kBF16);
  } else {
    RequireFlat(args.main_weight, n, DType::kF32);
  }
  if (args.weight.present()) {
    const bool fp16 = args.weight.dtype == DType::kF16 && args.main_weight.present();
    RequireFlat(args.weight, n, fp16 ? DType::kF16 : DType::kBF16);
  }
}

// As many states as the rule has, of types that it may have.
void RequireRule(const ElementUpdateArgs& args, int64_t n) {
  scalar::ForEachRule([&](auto rule) {
    using Rule = decltype(rule);
    if (Rule::kRule == args.rule) {
      CHECK_MSG(args.v.present() == (Rule::kStates > 1) || n == 0, "another number of states");
      CHECK_MSG(Rule::kNarrowStates || args.m.dtype == DType::kF32, "states are fp32");
    }
  });
}

void RequireElementUpdate(const ElementUpdateArgs& args, int64_t n) {
  RequireMainWeight(args, n);
  RequireGradient(args.g);
  RequireGradient(args.m);
  RequireFlat(args.m, n, args.m.dtype);
  if (args.v.present()) {
    RequireFlat(args.v, n, args.m.dtype);
  }
  RequireRule(args, n);
  CHECK_MSG(args.first_index >= 0, "an index is not negative");
}

ElementUpdateParams ParamsOf(const ElementUpdateArgs& args, int64_t n) {
  ElementUpdateParams params = {};
  params.pieces = PiecesOf(args.table, n, args.first_index, args.site);
  params.main_weight = args.main_weight.As<float>();
  params.weight = args.weight.As<uint16_t>();
  params.remainder = args.remainder.As<int16_t>();
  params.g = args.g.data;
  params.m = args.m.data;
  params.v = args.v.data;
  params.device_scalars = reinterpret_cast<const DeviceUpdateScalars*>(args.device_scalars);
  params.device_step = args.device_step;
  params.apply = args.apply;
  params.seed = args.seed;
  params.step = args.step;
  params.scalars = ScalarsOf(args.scalars);
  params.fp16_weight = args.weight.dtype == DType::kF16 ? 1 : 0;
  return params;
}

}  // namespace

void ElementUpdate(Stream& stream, const ElementUpdateArgs& args) {
  LaunchStream& on = LaunchStreamOf(stream);
  const int64_t n = args.g.elements();
  RequireElementUpdate(args, n);
  const ElementUpdateParams params = ParamsOf(args, n);
  if (params.pieces.count == 0) {
    return;
  }
  int32_t variant = 0;
  scalar::ForEachRule([&](auto rule) {
    using Rule = decltype(rule);
    if (Rule::kRule == args.rule) {
      variant = scalar::VariantOf<Rule>(args.g.dtype == DType::kBF16, args.m.dtype == DType::kBF16);
    }
  });
  on.Run({.kernel = Kernel::kElementUpdate,
          .variant = variant,
          .grid = {GridOf(on, params.pieces), 1, 1}},
         params);
}

namespace {

// `fp8_type`: of a state of fp8.
StateForm FormOf(const TensorView& state, const TensorView& scales, DType fp8_type, int64_t n) {
  RequireFlat(state, n, state.dtype);
  const bool fp8 = state.dtype == fp8_type;
  CHECK_MSG(fp8 || state.dtype == DType::kF32 || state.dtype == DType::kBF16,
            "fp32, bf16 or fp8 is expected");
  CHECK_MSG(scales.present() == fp8 || n == 0, "fp8 states have scales, others have not");
  CHECK_MSG(!fp8 || scales.dtype == DType::kU8, "scales are bytes");
  return fp8 ? StateForm::kFp8 : state.dtype == DType::kBF16 ? StateForm::kBf16 : StateForm::kF32;
}

}  // namespace

void GroupedUpdate(Stream& stream, const GroupedUpdateArgs& args) {
  LaunchStream& on = LaunchStreamOf(stream);
  const ElementUpdateArgs& update = args.update;
  const int64_t n = update.g.elements();
  RequireMainWeight(update, n);
  RequireGradient(update.g);
  GroupedUpdateParams params = {};
  params.m_form = FormOf(update.m, args.m_scales, DType::kF8E4M3, n);
  params.v_form =
      update.v.present() ? FormOf(update.v, args.v_scales, DType::kU8, n) : StateForm::kF32;
  int32_t variant = -1;
  scalar::ForEachRule([&](auto rule) {
    using Rule = decltype(rule);
    if (Rule::kRule == update.rule && Rule::kNarrowStates) {
      CHECK_MSG(update.v.present() == (Rule::kStates > 1) || n == 0, "another number of states");
      variant = scalar::GroupedVariantOf<Rule>(update.g.dtype == DType::kBF16);
    }
  });
  CHECK_MSG(variant >= 0, "states are fp32");
  CHECK_MSG(update.table.pieces != nullptr, "groups need a table");
  params.update = ParamsOf(update, n);
  if (params.update.pieces.count == 0) {
    return;
  }
  params.m_scales = args.m_scales.As<uint8_t>();
  params.v_scales = args.v_scales.As<uint8_t>();
  on.Run({.kernel = Kernel::kGroupedUpdate,
          .variant = variant,
          .grid = {GridOf(on, params.update.pieces), 1, 1}},
         params);
}

namespace {

// The grid reaches this rank's rows at least; a recipe without blocks has one word.
void RequireTarget(const WeightTarget& target, int64_t rows, int64_t columns) {
  const int64_t edge = plan::BlockEdge(target.recipe);
  CHECK_MSG(target.recipe != plan::Recipe::kNone, "a recipe is expected");
  CHECK_MSG(target.amax.present() && target.amax.dtype == DType::kU32, "an amax is u32");
  if (edge == 0) {
    CHECK_MSG(target.amax.elements() == 1, "one amax is expected");
  } else {
    CHECK_MSG(target.amax.size[1] == DivCeil(columns, edge) &&
                  target.amax.size[0] >= DivCeil(target.first_row + rows, edge),
              "wrong grid of blocks");
  }
  if (target.codes.present()) {
    CHECK_MSG(target.recipe == plan::Recipe::kDelayed || target.recipe == plan::Recipe::kMxFp8 ||
                  target.recipe == plan::Recipe::kFloat8Block,
              "scales of this recipe follow from other ranks");
    RequireMatrix(target.codes, rows, columns, DType::kU8);
    CHECK_MSG(target.codes.contiguous(), "codes are contiguous");
    CHECK_MSG(target.encode.present() == (edge == 0), "a scale, or scales of blocks");
  }
}

}  // namespace

void WeightUpdate(Stream& stream, const WeightUpdateArgs& args) {
  LaunchStream& on = LaunchStreamOf(stream);
  const ElementUpdateArgs& update = args.update.update;
  const WeightTarget& target = args.target;
  const int64_t n = update.g.elements();
  const int64_t rows = DivExact(n, args.columns);
  RequireMainWeight(update, n);
  RequireGradient(update.g);
  RequireRule(update, n);
  for (const TensorView& scales : {args.update.m_scales, args.update.v_scales}) {
    if (scales.present()) {
      RequireFlat(scales, rows * DivCeil(args.columns, kUpdateGroup), DType::kU8);
    }
  }
  CHECK_MSG(!update.weight.present() && update.table.pieces == nullptr, "a weight, or a table");
  RequireTarget(target, rows, args.columns);
  CHECK_MSG(FitsWeightUpdate(args), "accesses of four elements do not fit");
  if (n == 0) {
    return;
  }
  const int64_t edge = plan::BlockEdge(target.recipe);
  WeightUpdateParams params = {};
  params.grouped.update = ParamsOf(update, n);
  params.grouped.m_form = FormOf(update.m, args.update.m_scales, DType::kF8E4M3, n);
  params.grouped.v_form =
      update.v.present() ? FormOf(update.v, args.update.v_scales, DType::kU8, n) : StateForm::kF32;
  params.grouped.m_scales = args.update.m_scales.As<uint8_t>();
  params.grouped.v_scales = args.update.v_scales.As<uint8_t>();
  params.amax = target.amax.As<uint32_t>();
  params.whole_amax = target.whole_amax.As<uint32_t>();
  params.codes = target.codes.As<uint8_t>();
  params.encode = target.codes.present() ? target.encode.As<float>() : nullptr;
  params.first_row = target.first_row;
  params.rows = rows;
  params.columns = args.columns;
  params.row_step = args.row_step;
  params.grid_columns = edge == 0 ? 1 : target.amax.row_stride;
  params.edge = static_cast<int32_t>(edge);
  params.least = std::bit_cast<uint32_t>(target.epsilon);
  params.decays = args.decays ? 1 : 0;
  params.bf16_gradient = update.g.dtype == DType::kBF16 ? 1 : 0;
  const int64_t tile_rows = std::max(edge, int64_t{kAmaxRows});
  const int64_t tiles = (DivCeil(rows, tile_rows) + 1) * DivCeil(args.columns, kUpdateGroup);
  on.Run({.kernel = Kernel::kWeightUpdate,
          .variant = static_cast<int32_t>(update.rule),
          .grid = {FlatGrid(on, tiles * kFlatThreads), 1, 1}},
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

// Flat fp32, or bf16.
struct Pieces {
  std::vector<const void*> at;
  DType dtype = DType::kF32;
};

template <typename Piece>
Pieces PiecesAt(const std::vector<const Piece*>& pieces, DType dtype) {
  return {.at = {pieces.begin(), pieces.end()}, .dtype = dtype};
}

// The argument of a sum of `count` pieces from `first`, without statistics.
ReduceAddParams ReduceParams(
    const Pieces& pieces, size_t first, size_t count, float* out, int64_t elements) {
  CHECK_MSG(std::has_single_bit(count) && count <= kMaxTreePieces, "pieces are a power of two");
  ReduceAddParams params = {};
  params.out = out;
  params.elements = elements;
  bool aligned = OnAccess(out);
  for (size_t i = 0; i < count; ++i) {
    params.pieces[i] = pieces.at[first + i];
    aligned = aligned && OnAccess(params.pieces[i]);
  }
  params.aligned = aligned ? 1 : 0;
  return params;
}

int32_t LogarithmOf(size_t count) {
  return std::countr_zero(count);
}

// The variant of kTreeSum and kReduceAdd for `count` pieces.
int32_t SumVariant(const Pieces& pieces, size_t count) {
  return LogarithmOf(count) + (pieces.dtype == DType::kBF16 ? kBf16Sums : 0);
}

// Blocks that the length alone decides: their partial sums are added in order.
uint32_t StatisticsGrid(int64_t elements) {
  return static_cast<uint32_t>(
      std::clamp<int64_t>(DivCeil(elements, int64_t{4} * kFlatThreads), 1, kReducePartials));
}

void RunTreeSum(LaunchStream& on, const ReduceAddParams& params, int32_t variant) {
  on.Run({.kernel = Kernel::kTreeSum,
          .variant = variant,
          .grid = {FlatGrid(on, DivCeil(params.elements, int64_t{4})), 1, 1}},
         params);
}

// Roots of all subtrees of 64 pieces, of their subtrees and so on, until one pass adds the rest.
int64_t SubtreeRoots(size_t count) {
  int64_t roots = 0;
  for (; count > kMaxTreePieces; count /= kMaxTreePieces) {
    roots += static_cast<int64_t>(count / kMaxTreePieces);
  }
  return roots;
}

// Sums subtrees of 64 into scratch from `roots` on, `stride` elements apart, until one pass adds
// the rest, which is returned.
Pieces SumSubtrees(LaunchStream& on, Pieces pieces, float* roots, int64_t stride, int64_t n) {
  while (pieces.at.size() > kMaxTreePieces) {
    Pieces above;
    for (size_t first = 0; first < pieces.at.size(); first += kMaxTreePieces) {
      RunTreeSum(on,
                 ReduceParams(pieces, first, kMaxTreePieces, roots, n),
                 SumVariant(pieces, kMaxTreePieces));
      above.at.push_back(roots);
      roots += stride;
    }
    pieces = std::move(above);
  }
  return pieces;
}

// Calls last(params, variant) for the last pass of each range of elements whose subtrees' roots fit
// the scratch: one range where there are no subtrees.
template <typename Last>
void SumInPasses(LaunchStream& on, const Pieces& pieces, const TensorView& out, const Last& last) {
  CHECK_MSG(std::has_single_bit(pieces.at.size()), "pieces are a power of two");
  const int64_t n = out.elements();
  const int64_t roots = SubtreeRoots(pieces.at.size());
  constexpr int64_t kScratchFloats = kScratchBytes / int64_t{sizeof(float)};
  const int64_t range =
      roots == 0 ? n : std::min(RoundUp(n, int64_t{4}), kScratchFloats / roots / 4 * 4);
  float* scratch = nullptr;
  if (roots > 0) {
    scratch = static_cast<float*>(on.Scratch(roots * range * int64_t{sizeof(float)}));
  }
  for (int64_t begin = 0; begin < n; begin += range) {
    const int64_t elements = std::min(range, n - begin);
    Pieces shifted = pieces;
    for (const void*& piece : shifted.at) {
      piece = static_cast<const char*>(piece) + begin * DTypeBytes(pieces.dtype);
    }
    const Pieces rest = SumSubtrees(on, std::move(shifted), scratch, range, elements);
    last(ReduceParams(rest, 0, rest.at.size(), out.As<float>() + begin, elements),
         SumVariant(rest, rest.at.size()));
  }
}

}  // namespace

void TreeSum(Stream& stream, const TreeSumArgs& args) {
  LaunchStream& on = LaunchStreamOf(stream);
  RequireFlat(args.out, args.out.elements(), DType::kF32);
  const Pieces pieces = PiecesAt(args.pieces, DType::kF32);
  SumInPasses(on, pieces, args.out, [&](const ReduceAddParams& params, int32_t variant) {
    RunTreeSum(on, params, variant);
  });
}

void ReduceAdd(Stream& stream, const ReduceAddArgs& args) {
  LaunchStream& on = LaunchStreamOf(stream);
  const int64_t n = args.out.elements();
  RequireFlat(args.out, n, DType::kF32);
  CHECK_MSG(args.pieces.empty() || args.rounded_pieces.empty(), "pieces are of one type");
  const Pieces pieces = args.rounded_pieces.empty() ? PiecesAt(args.pieces, DType::kF32)
                                                    : PiecesAt(args.rounded_pieces, DType::kBF16);
  CHECK_MSG(args.squared_norm == nullptr || pieces.at.size() <= kMaxNormPieces,
            "more pieces than one pass adds, and a norm");
  if (n == 0 && args.squared_norm != nullptr) {
    on.FillZero(args.squared_norm, sizeof(double));
    return;
  }
  const uint32_t grid = StatisticsGrid(n);
  double* const partials = args.squared_norm == nullptr
                               ? nullptr
                               : static_cast<double*>(on.Scratch(grid * int64_t{sizeof(double)}));
  SumInPasses(on, pieces, args.out, [&](ReduceAddParams params, int32_t variant) {
    params.accumulate = args.output == Output::kAccumulate ? 1 : 0;
    params.non_finite = args.non_finite;
    params.partials = partials;
    on.Run({.kernel = Kernel::kReduceAdd,
            .variant = variant,
            .grid = {StatisticsGrid(params.elements), 1, 1}},
           params);
  });
  if (args.squared_norm != nullptr) {
    on.Run({.kernel = Kernel::kSumDoubles},
           SumDoublesParams{.values = partials, .out = args.squared_norm, .count = int64_t{grid}});
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
  RequireMatrix(args.x, rows, args.x.size[1], DType::kF32);
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
                             .stride = args.x.row_stride,
                             .rows = rows,
                             .columns = args.x.columns()});
}

void AddDigest(Stream& stream, const AddDigestArgs& args) {
  LaunchStream& on = LaunchStreamOf(stream);
  const int64_t n = args.range.elements();
  RequireFlat(args.range, n, args.range.dtype);
  if (n == 0) {
    return;
  }
  const auto bytes = static_cast<size_t>(DTypeBytes(args.range.dtype));
  on.Run(
      {.kernel = Kernel::kDigest, .variant = LogarithmOf(bytes), .grid = {FlatGrid(on, n), 1, 1}},
      DigestParams{.data = args.range.data,
                   .sum = args.sum,
                   .elements = n,
                   .first_index = args.first_index,
                   .element_bytes = static_cast<int32_t>(bytes)});
}

uint64_t DigestRange(Stream& stream, const TensorView& range, uint64_t first_index) {
  LaunchStream& on = LaunchStreamOf(stream);
  if (range.elements() == 0) {
    return 0;
  }
  auto* sum = static_cast<uint64_t*>(on.Scratch(sizeof(uint64_t)));
  on.FillZero(sum, sizeof(uint64_t));
  cuda::AddDigest(stream, {.range = range, .first_index = first_index, .sum = sum});
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
  CHECK_MSG(args.from.dtype != args.to.dtype &&
                (args.from.dtype == DType::kF32 || args.to.dtype == DType::kF32),
            "a cast is from fp32, or to it");
  RequireFlat(args.from, n, args.from.dtype);
  RequireFlat(args.to, n, args.to.dtype);
  if (n == 0) {
    return;
  }
  // Four elements at a time: 16 bytes of fp32, 8 of a narrow type.
  const bool vectors = OnAccess(args.from.data) && OnAccess(args.to.data) && n % 4 == 0;
  const bool fp16 = args.from.dtype == DType::kF16 || args.to.dtype == DType::kF16;
  const bool narrows = args.from.dtype == DType::kF32;
  const Variant to_narrow = fp16 ? kFp16Scalar : kBf16Scalar;
  const Variant to_wide = fp16 ? kFp16MixedScalar : kMixedScalar;
  const int32_t variant = (narrows ? to_narrow : to_wide) + (vectors ? 1 : 0);
  const bool half_away = args.to.dtype == DType::kBF16 && args.rounding == Bf16Rounding::kHalfAway;
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
