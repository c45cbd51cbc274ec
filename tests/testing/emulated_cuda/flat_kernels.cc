// Operands of kernels over flat ranges: optimizers, sums in a fixed order, digest, initial values,
// casts, transposition, zeros, and what decides a step.

#include <algorithm>

#include "common/check.h"
#include "kernels/scalar/update_rules.h"
#include "tests/testing/emulated_cuda/emulated_kernels.h"

namespace ravel::kernels::cuda::emulated {
namespace {

constexpr auto kRead = Access::Kind::kRead;
constexpr auto kWrite = Access::Kind::kWrite;
constexpr auto kUpdate = Access::Kind::kUpdate;
constexpr auto kAtomic = Access::Kind::kAtomic;

// The table of an update: none stands for all elements, which a launch cuts by itself.
void Table(const DevicePieces& pieces, Operands& on) {
  on.Array(kRead, "pieces", pieces.table, pieces.count);
  on.Require(pieces.table != nullptr || pieces.count == DivCeil(pieces.elements, kBlockElements),
             "as many pieces as the elements fill");
}

void AdamW(const AdamWParams& p, Operands& on) {
  on.RequireBlock(kFlatThreads);
  const int64_t n = p.pieces.elements;
  const Shape flat = {1, n, n};
  on.Update("p", p.p, flat);
  on.Read("g", p.g, flat);
  on.Update("m", p.m, flat);
  on.Update("v", p.v, flat);
  on.Array(kRead, "device_scalars", p.device_scalars, 1);
  on.Array(kRead, "apply", p.apply, 1);
  Table(p.pieces, on);
}

// The meaning of a variant of ElementUpdate.
struct UpdateForm {
  int states = 0;
  DType gradient = DType::kF32;
  DType state_type = DType::kF32;
};

UpdateForm FormOf(int32_t variant) {
  UpdateForm form;
  scalar::ForEachRule([&](auto rule) {
    using Rule = decltype(rule);
    for (const bool gradient : {false, true}) {
      for (const bool states : {false, true}) {
        if ((!states || Rule::kNarrowStates) &&
            scalar::VariantOf<Rule>(gradient, states) == variant) {
          form = {.states = Rule::kStates,
                  .gradient = gradient ? DType::kBF16 : DType::kF32,
                  .state_type = states ? DType::kBF16 : DType::kF32};
        }
      }
    }
  });
  return form;
}

void ElementUpdate(const ElementUpdateParams& p, Operands& on) {
  const UpdateForm form = FormOf(on.launch().variant);
  const int64_t n = p.pieces.elements;
  const int64_t state_bytes = n * DTypeBytes(form.state_type);
  on.RequireBlock(kFlatThreads);
  Table(p.pieces, on);
  on.Require((p.main_weight != nullptr) != (p.remainder != nullptr),
             "a main weight is fp32, or a weight with a remainder");
  on.Require((p.v != nullptr) == (form.states > 1), "as many states as the rule has");
  on.Array(kUpdate, "main_weight", p.main_weight, n);
  on.Array(kUpdate, "weight", p.weight, n);
  on.Require(p.fp16_weight == 0 || p.main_weight != nullptr, "an fp16 weight has no remainder");
  on.Array(kUpdate, "remainder", p.remainder, n);
  on.Touch(kRead, "g", p.g, n * DTypeBytes(form.gradient));
  on.Touch(kUpdate, "m", p.m, state_bytes);
  on.Touch(kUpdate, "v", p.v, state_bytes);
  on.Array(kRead, "device_scalars", p.device_scalars, 1);
  on.Array(kRead, "device_step", p.device_step, 1);
  on.Array(kRead, "apply", p.apply, 1);
}

// A state of any form, and its scales, which lie as far as the pieces say.
void GroupedState(const char* name, void* state, StateForm form, int64_t n, Operands& on) {
  const DType type = form == StateForm::kF32    ? DType::kF32
                     : form == StateForm::kBf16 ? DType::kBF16
                                                : DType::kF8E4M3;
  on.Touch(kUpdate, name, state, n * DTypeBytes(type));
}

int64_t ScalesOf(const DevicePieces& pieces) {
  int64_t scales = 0;
  for (int64_t i = 0; i < pieces.count; ++i) {
    const DeviceUpdatePiece& piece = pieces.table[i];
    const int64_t row = piece.row > 0 ? piece.row : piece.elements;
    const int64_t rows = DivCeil(piece.elements, row);
    scales = std::max(scales, piece.first_scale + rows * DivCeil(row, int64_t{128}));
  }
  return scales;
}

void GroupedUpdate(const GroupedUpdateParams& p, Operands& on) {
  const ElementUpdateParams& update = p.update;
  const int64_t n = update.pieces.elements;
  on.RequireBlock(kFlatThreads);
  Table(update.pieces, on);
  on.Require(update.pieces.table != nullptr, "groups have a table");
  on.Require((update.main_weight != nullptr) != (update.remainder != nullptr),
             "a main weight is fp32, or a weight with a remainder");
  on.Array(kUpdate, "main_weight", update.main_weight, n);
  on.Array(kUpdate, "weight", update.weight, n);
  on.Require(update.fp16_weight == 0 || update.main_weight != nullptr,
             "an fp16 weight has no remainder");
  on.Array(kUpdate, "remainder", update.remainder, n);
  const bool bf16 = on.launch().variant % 2 != 0;
  on.Touch(kRead, "g", update.g, n * DTypeBytes(bf16 ? DType::kBF16 : DType::kF32));
  GroupedState("m", update.m, p.m_form, n, on);
  if (update.v != nullptr) {
    GroupedState("v", update.v, p.v_form, n, on);
  }
  on.Array(kUpdate, "m_scales", p.m_scales, ScalesOf(update.pieces));
  on.Array(kUpdate, "v_scales", p.v_scales, ScalesOf(update.pieces));
  on.Array(kRead, "device_scalars", update.device_scalars, 1);
  on.Array(kRead, "device_step", update.device_step, 1);
  on.Array(kRead, "apply", update.apply, 1);
}

// Amaxes and codes lie as those of BlockAmax and QuantizeWeight; the first row of blocks may be
// another rank's, too.
void WeightUpdate(const WeightUpdateParams& p, Operands& on) {
  const GroupedUpdateParams& grouped = p.grouped;
  const ElementUpdateParams& update = grouped.update;
  const int64_t n = p.rows * p.columns;
  on.RequireBlock(kFlatThreads);
  on.Require(update.pieces.elements == n && update.pieces.table == nullptr, "rows of a matrix");
  on.Require(update.main_weight != nullptr && update.weight == nullptr, "an fp32 main weight");
  const auto fours = [&](const char* name, Access::Kind kind, const void* data, int64_t bytes) {
    on.Require(reinterpret_cast<uintptr_t>(data) % static_cast<uint64_t>(4 * bytes) == 0,
               std::string(name) + " does not begin at four elements");
    on.Touch(kind, name, data, n * bytes);
  };
  const auto bytes_of = [](StateForm form) {
    return form == StateForm::kF32 ? 4 : form == StateForm::kBf16 ? 2 : 1;
  };
  on.Require(p.columns % 4 == 0, "columns are no multiple of 4");
  fours("main_weight", kUpdate, update.main_weight, 4);
  fours("g", kRead, update.g, p.bf16_gradient != 0 ? 2 : 4);
  fours("m", kUpdate, update.m, bytes_of(grouped.m_form));
  if (update.v != nullptr) {
    fours("v", kUpdate, update.v, bytes_of(grouped.v_form));
  }
  fours("codes", kWrite, p.codes, 1);
  const int64_t groups = p.rows * DivCeil(p.columns, int64_t{128});
  on.Array(kUpdate, "m_scales", grouped.m_scales, groups);
  on.Array(kUpdate, "v_scales", grouped.v_scales, groups);
  const int64_t first = p.edge > 0 ? p.first_row / p.edge : 0;
  const int64_t last = p.edge > 0 ? DivCeil(p.first_row + p.rows, int64_t{p.edge}) : 1;
  on.Array(kAtomic, "amax", p.amax + first * p.grid_columns, (last - first) * p.grid_columns);
  on.Array(kAtomic, "whole_amax", p.whole_amax, 1);
  on.Array(kRead, "encode", p.encode, 1);
  on.Array(kRead, "device_scalars", update.device_scalars, 1);
  on.Array(kRead, "device_step", update.device_step, 1);
  on.Array(kRead, "apply", update.apply, 1);
}

void TreeAdd(const TreeAddParams& p, Operands& on) {
  on.RequireBlock(kFlatThreads);
  const Shape flat = {1, p.elements, p.elements};
  on.Read("a", p.a, flat);
  on.Read("b", p.b, flat);
  on.Write("out", p.out, flat);
}

// The argument of both sums: 2^variant pieces of fp32, or from kBf16Sums on of bf16.
void Pieces(const ReduceAddParams& p, Operands& on) {
  const int32_t variant = on.launch().variant;
  const DType type = variant < kBf16Sums ? DType::kF32 : DType::kBF16;
  on.RequireBlock(kFlatThreads);
  bool aligned = reinterpret_cast<uintptr_t>(p.out) % 16 == 0;
  for (size_t i = 0; i < size_t{1} << variant % kBf16Sums; ++i) {
    on.Require(p.pieces[i] != nullptr, "a piece is missing");
    on.Touch(kRead, "a piece", p.pieces[i], p.elements * DTypeBytes(type));
    aligned = aligned && reinterpret_cast<uintptr_t>(p.pieces[i]) % 16 == 0;
  }
  on.Require(aligned || p.aligned == 0, "pieces are said to lie on 16 bytes");
  on.Array(p.accumulate != 0 ? kUpdate : kWrite, "out", p.out, p.elements);
}

void TreeSum(const ReduceAddParams& p, Operands& on) {
  Pieces(p, on);
  on.Require(p.accumulate == 0, "a tree sum overwrites");
}

void ReduceAdd(const ReduceAddParams& p, Operands& on) {
  Pieces(p, on);
  const int64_t blocks = on.launch().grid[0];
  on.Require(blocks <= kReducePartials, "more blocks than partial sums");
  on.Array(kWrite, "partials", p.partials, blocks);
  on.Array(kAtomic, "non_finite", p.non_finite, 1);
}

void SumDoubles(const SumDoublesParams& p, Operands& on) {
  on.RequireBlock(kFlatThreads);
  on.RequireGrid(0, 1);
  on.Array(kRead, "values", p.values, p.count);
  on.Array(kWrite, "out", p.out, 1);
}

void RowSumSquares(const RowSumSquaresParams& p, Operands& on) {
  on.RequireBlock(kFlatThreads);
  on.Read("x", p.x, {p.rows, p.columns, p.stride});
  on.Array(kWrite, "sums", p.sums, p.rows);
  on.Array(kAtomic, "non_finite", p.non_finite, 1);
}

void Digest(const DigestParams& p, Operands& on) {
  on.RequireBlock(kFlatThreads);
  on.Require(p.element_bytes == 1 << on.launch().variant, "elements of another size");
  on.Touch(kRead, "data", p.data, p.elements * p.element_bytes);
  on.Array(kAtomic, "sum", p.sum, 1);
}

void InitNormal(const InitNormalParams& p, Operands& on) {
  on.RequireBlock(kFlatThreads);
  on.Array(kWrite, "out", p.out, p.elements);
}

// Mixed variants widen, the others narrow; vectors are of four elements.
void Cast(const CastParams& p, Operands& on) {
  const int32_t variant = on.launch().variant;
  const int64_t wide = p.elements * DTypeBytes(DType::kF32);
  const int64_t narrow = p.elements * DTypeBytes(DType::kBF16);
  on.RequireBlock(kFlatThreads);
  on.Require(!HasVectors(variant) || p.elements % 4 == 0, "no whole vectors");
  on.Require(p.half_away == 0 || OutputType(variant) == DType::kBF16, "only bf16 rounds half away");
  on.Touch(kRead, "from", p.from, IsMixed(variant) ? narrow : wide);
  on.Touch(kWrite, "to", p.to, IsMixed(variant) ? wide : narrow);
}

// Words of two or four bytes, whatever they mean.
DType WordType(int32_t variant) {
  return variant == kBf16Scalar ? DType::kU16 : DType::kU32;
}

void TransposeWords(const TransposeParams& p, Operands& on) {
  const DType word = WordType(on.launch().variant);
  on.RequireBlock(kTransposeTile * kTransposeRows);
  on.RequireGrid(0, DivCeil(p.columns, int64_t{kTransposeTile}));
  on.Add(kRead, "from", p.from, {p.rows, p.columns, p.from_stride}, word);
  on.Add(kWrite, "to", p.to, {p.columns, p.rows, p.to_stride}, word);
}

void Fill(const FillParams& p, Operands& on) {
  on.RequireBlock(kFlatThreads);
  on.Add(kWrite, "to", p.to, {p.rows, p.columns, p.stride}, WordType(on.launch().variant));
}

void SumLoss(const SumLossParams& p, Operands& on) {
  on.RequireBlock(kFlatThreads);
  on.RequireGrid(0, 1);
  on.Array(kRead, "losses", p.losses, p.elements);
  on.Array(kRead, "targets", p.targets, p.elements);
  on.Array(kUpdate, "sum", p.sum, 1);
  on.Array(kUpdate, "tokens", p.tokens, 1);
}

void SumRowNodes(const SumRowNodesParams& p, Operands& on) {
  on.RequireBlock(kFlatThreads);
  on.RequireGrid(0, p.count);
  on.Array(kRead, "row_sums", p.row_sums, p.rows);
  on.Array(kRead, "nodes", p.nodes, p.count);
  on.Array(kWrite, "out", p.out, p.count);
}

void CountFlags(const CountFlagsParams& p, Operands& on) {
  on.RequireBlock(kFlatThreads);
  on.Array(kUpdate, "flags", p.flags, p.count);
  on.Array(kUpdate, "counts", p.counts, p.count);
}

void DecideUpdate(const DecideUpdateParams& p, Operands& on) {
  on.RequireBlock(kFlatThreads);
  on.RequireGrid(0, 1);
  on.Array(kRead, "messages", p.messages, p.ranks * p.words);
  on.Array(kRead, "steps", p.steps, p.step_count);
  on.Array(kRead, "level_ends", p.level_ends, p.levels);
  on.Array(kWrite, "sums", p.sums, p.step_count);
  on.Array(kUpdate, "outcome", p.outcome, 1);
}

}  // namespace

std::vector<KernelOperands> FlatKernels() {
  return {Declare<AdamWParams, AdamW>(Kernel::kAdamW, "AdamW"),
          Declare<ElementUpdateParams, ElementUpdate>(Kernel::kElementUpdate, "ElementUpdate"),
          Declare<GroupedUpdateParams, GroupedUpdate>(Kernel::kGroupedUpdate, "GroupedUpdate"),
          Declare<WeightUpdateParams, WeightUpdate>(Kernel::kWeightUpdate, "WeightUpdate"),
          Declare<TreeAddParams, TreeAdd>(Kernel::kTreeAdd, "TreeAdd"),
          Declare<ReduceAddParams, TreeSum>(Kernel::kTreeSum, "TreeSum"),
          Declare<ReduceAddParams, ReduceAdd>(Kernel::kReduceAdd, "ReduceAdd"),
          Declare<SumDoublesParams, SumDoubles>(Kernel::kSumDoubles, "SumDoubles"),
          Declare<RowSumSquaresParams, RowSumSquares>(Kernel::kRowSumSquares, "RowSumSquares"),
          Declare<DigestParams, Digest>(Kernel::kDigest, "Digest"),
          Declare<InitNormalParams, InitNormal>(Kernel::kInitNormal, "InitNormal"),
          Declare<CastParams, Cast>(Kernel::kCast, "Cast"),
          Declare<TransposeParams, TransposeWords>(Kernel::kTranspose, "Transpose"),
          Declare<FillParams, Fill>(Kernel::kFill, "Fill"),
          Declare<SumLossParams, SumLoss>(Kernel::kSumLoss, "SumLoss"),
          Declare<SumRowNodesParams, SumRowNodes>(Kernel::kSumRowNodes, "SumRowNodes"),
          Declare<CountFlagsParams, CountFlags>(Kernel::kCountFlags, "CountFlags"),
          Declare<DecideUpdateParams, DecideUpdate>(Kernel::kDecideUpdate, "DecideUpdate")};
}

}  // namespace ravel::kernels::cuda::emulated
