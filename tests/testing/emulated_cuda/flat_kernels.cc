// Optimizers, sums in a fixed order, digest, initial values, casts, transposition, zeros.

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>

#include "common/check.h"
#include "kernels/cpu/mixed_ops.h"
#include "kernels/cpu/reference_ops.h"
#include "kernels/cpu/simd_ops.h"
#include "kernels/cpu/step_statistics.h"
#include "kernels/scalar/update_rules.h"
#include "tests/testing/emulated_cuda/emulated_kernels.h"

namespace ravel::kernels {

// As kernels/dispatch.cc, for cpu::ReduceAdd: only CPU streams exist here.
void TreeSum(Stream&, const TreeSumArgs& args) {
  cpu::ActiveOps().tree_sum(args);
}

}  // namespace ravel::kernels

namespace ravel::kernels::cuda::emulated {
namespace {

constexpr auto kRead = Access::Kind::kRead;
constexpr auto kWrite = Access::Kind::kWrite;
constexpr auto kUpdate = Access::Kind::kUpdate;
constexpr auto kAtomic = Access::Kind::kAtomic;

UpdateScalars ScalarsOf(const DeviceUpdateScalars& scalars) {
  return std::bit_cast<UpdateScalars>(scalars);
}

TensorView FlatView(const void* data, int64_t elements, DType dtype) {
  return {.data = const_cast<void*>(data),
          .dtype = dtype,
          .rank = 1,
          .size = {elements},
          .row_stride = 1};
}

// The table of an update: none stands for all elements, which a launch cuts by itself.
PieceTable TableOf(Operands& operands, const DevicePieces& pieces) {
  operands.Touch(kRead, "pieces", pieces.table, pieces.count * int64_t{sizeof(UpdatePiece)});
  operands.Require(pieces.table != nullptr ||
                       pieces.count == (pieces.elements + kBlockElements - 1) / kBlockElements,
                   "as many pieces as the elements fill");
  return {.pieces = reinterpret_cast<const UpdatePiece*>(pieces.table),
          .count = pieces.table != nullptr ? pieces.count : 0};
}

PlannedLaunch PlanAdamW(const KernelLaunch& launch, const AdamWParams& p) {
  Operands operands(launch);
  operands.RequireBlock(kFlatThreads);
  const int64_t n = p.pieces.elements;
  const Shape flat = {1, n, n};
  const Operand weights = operands.Update("p", p.p, flat);
  const Operand g = operands.Read("g", p.g, flat);
  const Operand m = operands.Update("m", p.m, flat);
  const Operand v = operands.Update("v", p.v, flat);
  operands.Touch(kRead, "device_scalars", p.device_scalars, sizeof(DeviceUpdateScalars));
  operands.Touch(kRead, "apply", p.apply, sizeof(int32_t));
  const PieceTable table = TableOf(operands, p.pieces);
  return operands.Plan([=](Staging& on) {
    cpu::AdamWUpdate({.p = on.View(weights),
                      .g = on.View(g),
                      .m = on.View(m),
                      .v = on.View(v),
                      .scalars = ScalarsOf(p.scalars),
                      .device_scalars = reinterpret_cast<const UpdateScalars*>(p.device_scalars),
                      .apply = p.apply,
                      .table = table});
  });
}

// The meaning of a variant of ElementUpdate.
struct UpdateForm {
  ElementRule rule = ElementRule::kAdamW;
  int states = 0;
  DType gradient = DType::kF32;
  DType state_type = DType::kF32;
};

// visit(variant, form) for every variant.
template <typename Visit>
void ForEachForm(const Visit& visit) {
  scalar::ForEachRule([&](auto rule) {
    using Rule = decltype(rule);
    for (const bool gradient : {false, true}) {
      for (const bool states : {false, true}) {
        if (!states || Rule::kNarrowStates) {
          visit(scalar::VariantOf<Rule>(gradient, states),
                UpdateForm{.rule = Rule::kRule,
                           .states = Rule::kStates,
                           .gradient = gradient ? DType::kBF16 : DType::kF32,
                           .state_type = states ? DType::kBF16 : DType::kF32});
        }
      }
    }
  });
}

UpdateForm FormOf(int32_t variant) {
  UpdateForm found;
  ForEachForm([&](int32_t of, const UpdateForm& form) {
    if (of == variant) {
      found = form;
    }
  });
  return found;
}

std::vector<int32_t> UpdateVariants() {
  std::vector<int32_t> variants;
  ForEachForm([&](int32_t variant, const UpdateForm&) { variants.push_back(variant); });
  return variants;
}

PlannedLaunch PlanElementUpdate(const KernelLaunch& launch, const ElementUpdateParams& p) {
  const UpdateForm form = FormOf(launch.variant);
  const DType gradient = form.gradient;
  const DType states = form.state_type;
  const int64_t n = p.pieces.elements;
  Operands operands(launch);
  operands.RequireBlock(kFlatThreads);
  const PieceTable table = TableOf(operands, p.pieces);
  operands.Require((p.main_weight != nullptr) != (p.remainder != nullptr),
                   "a main weight is fp32, or a weight with a remainder");
  operands.Touch(kUpdate, "main_weight", p.main_weight, n * 4);
  operands.Touch(kUpdate, "weight", p.weight, n * 2);
  operands.Touch(kUpdate, "remainder", p.remainder, n * 2);
  operands.Touch(kRead, "g", p.g, n * DTypeBytes(gradient));
  operands.Touch(kUpdate, "m", p.m, n * DTypeBytes(states));
  operands.Require((p.v != nullptr) == (form.states > 1), "as many states as the rule has");
  operands.Touch(kUpdate, "v", p.v, p.v != nullptr ? n * DTypeBytes(states) : 0);
  operands.Touch(kRead, "device_scalars", p.device_scalars, sizeof(DeviceUpdateScalars));
  operands.Touch(kRead, "device_step", p.device_step, sizeof(int64_t));
  operands.Touch(kRead, "apply", p.apply, sizeof(int32_t));
  return operands.Plan([=](Staging&) {
    ElementUpdateArgs args = {.g = FlatView(p.g, n, gradient),
                              .m = FlatView(p.m, n, states),
                              .v = p.v != nullptr ? FlatView(p.v, n, states) : TensorView(),
                              .seed = p.seed,
                              .step = p.step,
                              .site = p.pieces.site,
                              .first_index = p.pieces.first_index,
                              .scalars = ScalarsOf(p.scalars)};
    if (p.main_weight != nullptr) {
      args.main_weight = FlatView(p.main_weight, n, DType::kF32);
    } else {
      args.remainder = FlatView(p.remainder, n, DType::kI16);
    }
    if (p.weight != nullptr) {
      args.weight = FlatView(p.weight, n, DType::kBF16);
    }
    args.device_scalars = reinterpret_cast<const UpdateScalars*>(p.device_scalars);
    args.device_step = p.device_step;
    args.apply = p.apply;
    args.table = table;
    args.rule = form.rule;
    cpu::ElementUpdate(args);
  });
}

PlannedLaunch PlanTreeAdd(const KernelLaunch& launch, const TreeAddParams& p) {
  Operands operands(launch);
  operands.RequireBlock(kFlatThreads);
  const Shape flat = {1, p.elements, p.elements};
  const Operand a = operands.Read("a", p.a, flat);
  const Operand b = operands.Read("b", p.b, flat);
  const Operand out = operands.Write("out", p.out, flat);
  return operands.Plan([=](Staging& on) {
    cpu::ActiveOps().tree_add({.a = on.View(a), .b = on.View(b), .out = on.View(out)});
  });
}

// The squares of `out` by the block whose threads add them.
void SquaresByBlock(const ReduceAddParams& p, int64_t blocks) {
  std::fill_n(p.partials, blocks, 0.0);
  const int64_t threads = blocks * kFlatThreads;
  const int64_t whole = p.aligned != 0 ? p.elements / 4 * 4 : 0;
  for (int64_t i = 0; i < p.elements; ++i) {
    const int64_t thread = i < whole ? i / 4 % threads : (i - whole) % threads;
    const double value = static_cast<double>(p.out[i]);
    p.partials[thread / kFlatThreads] += value * value;
  }
}

bool SumsBf16(const KernelLaunch& launch) {
  return launch.variant >= kBf16Sums;
}
size_t PieceCount(const KernelLaunch& launch) {
  return size_t{1} << launch.variant % kBf16Sums;
}

// The argument of both sums.
Operands ReduceOperands(const KernelLaunch& launch, const ReduceAddParams& p) {
  Operands operands(launch);
  operands.RequireBlock(kFlatThreads);
  const int64_t bytes = p.elements * int64_t{sizeof(float)};
  bool aligned = reinterpret_cast<uintptr_t>(p.out) % 16 == 0;
  for (size_t i = 0; i < PieceCount(launch); ++i) {
    operands.Require(p.pieces[i] != nullptr, "a piece is missing");
    operands.Touch(kRead, "a piece", p.pieces[i], SumsBf16(launch) ? bytes / 2 : bytes);
    aligned = aligned && reinterpret_cast<uintptr_t>(p.pieces[i]) % 16 == 0;
  }
  operands.Require(aligned || p.aligned == 0, "pieces are said to lie on 16 bytes");
  operands.Touch(p.accumulate != 0 ? kUpdate : kWrite, "out", p.out, bytes);
  return operands;
}

// Empty unless pieces are of that type.
template <typename Piece>
std::vector<const Piece*> PiecesOf(const KernelLaunch& launch, const ReduceAddParams& p) {
  std::vector<const Piece*> pieces;
  for (size_t i = 0; i < PieceCount(launch) && SumsBf16(launch) == (sizeof(Piece) == 2); ++i) {
    pieces.push_back(static_cast<const Piece*>(p.pieces[i]));
  }
  return pieces;
}

void Sum(const ReduceAddArgs& args) {
  CpuStream stream;
  cpu::ReduceAdd(stream, args);
}

PlannedLaunch PlanTreeSum(const KernelLaunch& launch, const ReduceAddParams& p) {
  Operands operands = ReduceOperands(launch, p);
  operands.Require(p.accumulate == 0, "a tree sum overwrites");
  return operands.Plan(
      [=, pieces = PiecesOf<float>(launch, p), rounded = PiecesOf<uint16_t>(launch, p)](Staging&) {
        Sum({.pieces = pieces, .rounded_pieces = rounded, .out = VectorView(p.out, p.elements)});
      });
}

PlannedLaunch PlanReduceAdd(const KernelLaunch& launch, const ReduceAddParams& p) {
  Operands operands = ReduceOperands(launch, p);
  const int64_t blocks = launch.grid[0];
  operands.Require(blocks <= kReducePartials, "more blocks than partial sums");
  operands.Touch(kWrite, "partials", p.partials, blocks * int64_t{sizeof(double)});
  operands.Touch(kAtomic, "non_finite", p.non_finite, sizeof(int64_t));
  return operands.Plan(
      [=, pieces = PiecesOf<float>(launch, p), rounded = PiecesOf<uint16_t>(launch, p)](Staging&) {
        Sum({.pieces = pieces,
             .rounded_pieces = rounded,
             .out = VectorView(p.out, p.elements),
             .output = p.accumulate != 0 ? Output::kAccumulate : Output::kOverwrite});
        if (p.partials != nullptr) {
          SquaresByBlock(p, blocks);
        }
        if (p.non_finite != nullptr) {
          const int64_t count = std::count_if(
              p.out, p.out + p.elements, [](float value) { return !std::isfinite(value); });
          std::atomic_ref<int64_t>(*p.non_finite) += count;
        }
      });
}

PlannedLaunch PlanSumDoubles(const KernelLaunch& launch, const SumDoublesParams& p) {
  Operands operands(launch);
  operands.RequireBlock(kFlatThreads);
  operands.RequireGrid(0, 1);
  operands.Touch(kRead, "values", p.values, p.count * int64_t{sizeof(double)});
  operands.Touch(kWrite, "out", p.out, sizeof(double));
  return operands.Plan([=](Staging&) {
    double sum = 0.0;
    for (int64_t i = 0; i < p.count; ++i) {
      sum += p.values[i];
    }
    *p.out = sum;
  });
}

PlannedLaunch PlanRowSumSquares(const KernelLaunch& launch, const RowSumSquaresParams& p) {
  Operands operands(launch);
  operands.RequireBlock(kFlatThreads);
  const Operand x = operands.Read("x", p.x, {p.rows, p.columns, p.columns});
  const Operand sums = operands.WriteFloats("sums", p.sums, p.rows);
  operands.Touch(kAtomic, "non_finite", p.non_finite, sizeof(int64_t));
  return operands.Plan([=](Staging& on) {
    int64_t non_finite = 0;
    cpu::ActiveOps().row_sum_squares(
        {.x = on.View(x), .sums = on.View(sums), .non_finite = &non_finite});
    if (p.non_finite != nullptr) {
      std::atomic_ref<int64_t>(*p.non_finite) += non_finite;
    }
  });
}

PlannedLaunch PlanDigest(const KernelLaunch& launch, const DigestParams& p) {
  Operands operands(launch);
  operands.RequireBlock(kFlatThreads);
  operands.Require(p.element_bytes == 1 << launch.variant, "elements of another size");
  operands.Touch(kRead, "data", p.data, p.elements * p.element_bytes);
  operands.Touch(kAtomic, "sum", p.sum, sizeof(uint64_t));
  constexpr std::array<DType, 4> kTypes = {DType::kU8, DType::kU16, DType::kU32, DType::kU64};
  const DType dtype = kTypes[static_cast<size_t>(launch.variant) % kTypes.size()];
  return operands.Plan([=](Staging&) {
    std::atomic_ref<uint64_t>(*p.sum) +=
        cpu::DigestRange(FlatView(p.data, p.elements, dtype), p.first_index);
  });
}

PlannedLaunch PlanInitNormal(const KernelLaunch& launch, const InitNormalParams& p) {
  Operands operands(launch);
  operands.RequireBlock(kFlatThreads);
  const Operand out = operands.WriteFloats("out", p.out, p.elements);
  return operands.Plan([=](Staging& on) {
    cpu::InitNormal({.out = on.View(out),
                     .seed = p.seed,
                     .site = p.site,
                     .first_index = static_cast<int64_t>(p.first_index),
                     .standard_deviation = p.standard_deviation});
  });
}

// Variants of bf16 narrow, mixed ones widen; vectors are of four elements.
PlannedLaunch PlanCast(const KernelLaunch& launch, const CastParams& p) {
  const bool narrow = launch.variant == kBf16Scalar || launch.variant == kBf16Vector;
  const DType from = narrow ? DType::kF32 : DType::kBF16;
  const DType to = narrow ? DType::kBF16 : DType::kF32;
  Operands operands(launch);
  operands.RequireBlock(kFlatThreads);
  operands.Require(!HasVectors(launch.variant) || p.elements % 4 == 0, "no whole vectors");
  operands.Touch(kRead, "from", p.from, p.elements * DTypeBytes(from));
  operands.Touch(kWrite, "to", p.to, p.elements * DTypeBytes(to));
  return operands.Plan([=](Staging&) {
    cpu::Cast({.from = FlatView(p.from, p.elements, from),
               .to = FlatView(p.to, p.elements, to),
               .rounding = p.half_away != 0 ? Bf16Rounding::kHalfAway : Bf16Rounding::kNearest});
  });
}

// Words of two or four bytes, whatever they mean.
DType WordType(int32_t variant) {
  return variant == kBf16Scalar ? DType::kU16 : DType::kU32;
}

TensorView WordsView(const void* data, int64_t rows, int64_t columns, int64_t stride, DType dtype) {
  return {.data = const_cast<void*>(data),
          .dtype = dtype,
          .rank = 2,
          .size = {rows, columns},
          .row_stride = stride};
}

PlannedLaunch PlanTranspose(const KernelLaunch& launch, const TransposeParams& p) {
  const DType word = WordType(launch.variant);
  Operands operands(launch);
  operands.RequireBlock(kTransposeTile * kTransposeRows);
  operands.RequireGrid(0, DivCeil(p.columns, int64_t{kTransposeTile}));
  operands.Add(kRead, "from", p.from, {p.rows, p.columns, p.from_stride}, word);
  operands.Add(kWrite, "to", p.to, {p.columns, p.rows, p.to_stride}, word);
  return operands.Plan([=](Staging&) {
    cpu::TransposeMatrix({.from = WordsView(p.from, p.rows, p.columns, p.from_stride, word),
                          .to = WordsView(p.to, p.columns, p.rows, p.to_stride, word)});
  });
}

PlannedLaunch PlanFill(const KernelLaunch& launch, const FillParams& p) {
  const DType word = WordType(launch.variant);
  Operands operands(launch);
  operands.RequireBlock(kFlatThreads);
  operands.Add(kWrite, "to", p.to, {p.rows, p.columns, p.stride}, word);
  const int64_t bytes = DTypeBytes(word);
  return operands.Plan([=](Staging&) {
    for (int64_t row = 0; row < p.rows; ++row) {
      std::memset(static_cast<char*>(p.to) + row * p.stride * bytes,
                  0,
                  static_cast<size_t>(p.columns * bytes));
    }
  });
}

}  // namespace

std::vector<EmulatedKernel> FlatKernels() {
  const std::vector<int32_t> floats = {kF32Scalar, kF32Vector};
  const std::vector<int32_t> words = {kF32Scalar, kBf16Scalar};
  std::vector<int32_t> sums;
  for (const int32_t first : {0, kBf16Sums}) {
    for (int32_t logarithm = 0; logarithm <= 6; ++logarithm) {
      sums.push_back(first + logarithm);
    }
  }
  std::vector<EmulatedKernel> all;
  AddKernel<AdamWParams, PlanAdamW>(Kernel::kAdamW, "AdamW", floats, all);
  AddKernel<ElementUpdateParams, PlanElementUpdate>(
      Kernel::kElementUpdate, "ElementUpdate", UpdateVariants(), all);
  AddKernel<TreeAddParams, PlanTreeAdd>(Kernel::kTreeAdd, "TreeAdd", floats, all);
  AddKernel<ReduceAddParams, PlanTreeSum>(Kernel::kTreeSum, "TreeSum", sums, all);
  AddKernel<ReduceAddParams, PlanReduceAdd>(Kernel::kReduceAdd, "ReduceAdd", sums, all);
  AddKernel<SumDoublesParams, PlanSumDoubles>(Kernel::kSumDoubles, "SumDoubles", {0}, all);
  AddKernel<RowSumSquaresParams, PlanRowSumSquares>(
      Kernel::kRowSumSquares, "RowSumSquares", floats, all);
  AddKernel<DigestParams, PlanDigest>(Kernel::kDigest, "Digest", {0, 1, 2, 3}, all);
  AddKernel<InitNormalParams, PlanInitNormal>(Kernel::kInitNormal, "InitNormal", {0}, all);
  AddKernel<CastParams, PlanCast>(
      Kernel::kCast, "Cast", {kBf16Scalar, kBf16Vector, kMixedScalar, kMixedVector}, all);
  AddKernel<TransposeParams, PlanTranspose>(Kernel::kTranspose, "Transpose", words, all);
  AddKernel<FillParams, PlanFill>(Kernel::kFill, "Fill", words, all);
  return all;
}

}  // namespace ravel::kernels::cuda::emulated
