// The ops of mixed precision and of a step's statistics: on the CPU shapes and types are checked
// here, on a CUDA stream in cuda_host/.

#include <bit>

#include "common/check.h"
#include "kernels/cpu/grouped_update.h"
#include "kernels/cpu/mixed_ops.h"
#include "kernels/cpu/step_statistics.h"
#include "kernels/cuda_host/ops.h"

namespace ravel::kernels {
namespace {

bool OnCuda(const Stream& stream) {
  return stream.backend() == Backend::kCuda;
}

void CheckFlat(const TensorView& view, int64_t elements, DType dtype) {
  CHECK_MSG(view.dtype == dtype, "wrong element type");
  CHECK_MSG(view.elements() == elements && view.contiguous(), "wrong size, or not contiguous");
  CHECK_MSG(view.present() || elements == 0, "no data");
}

void CheckFloat(const TensorView& view) {
  CHECK_MSG(view.dtype == DType::kF32 || view.dtype == DType::kBF16, "fp32 or bf16 is expected");
}

// bf16; of an fp32 main weight also fp16.
DType WeightTypeOf(const ElementUpdateArgs& args) {
  const bool fp16 = args.weight.dtype == DType::kF16 && args.main_weight.present();
  return fp16 ? DType::kF16 : DType::kBF16;
}

void CheckCast(const TensorView& view, const TensorView& other) {
  if (view.dtype == DType::kF16) {
    CHECK_MSG(other.dtype == DType::kF32, "fp32 is expected");
  } else {
    CheckFloat(view);
  }
}

}  // namespace

void ElementUpdate(Stream& stream, const ElementUpdateArgs& args) {
  if (OnCuda(stream)) {
    cuda::ElementUpdate(stream, args);
    return;
  }
  const int64_t n = args.g.elements();
  CHECK_MSG(args.main_weight.present() != args.remainder.present() || n == 0,
            "a main weight is fp32, or a weight with a remainder");
  if (args.remainder.present()) {
    CheckFlat(args.remainder, n, DType::kI16);
    CheckFlat(args.weight, n, DType::kBF16);
  } else {
    CheckFlat(args.main_weight, n, DType::kF32);
  }
  if (args.weight.present()) {
    CheckFlat(args.weight, n, WeightTypeOf(args));
  }
  CheckFloat(args.g);
  CheckFloat(args.m);
  CheckFlat(args.m, n, args.m.dtype);
  if (args.v.present()) {
    CheckFlat(args.v, n, args.m.dtype);
  }
  CHECK_MSG(args.first_index >= 0, "an index is not negative");
  CheckPieces(args.table, n);
  cpu::ElementUpdate(args);
}

namespace {

// A state of a grouped update, with scales where it is fp8: of that type.
void CheckState(const TensorView& state, const TensorView& scales, DType fp8_type, int64_t n) {
  const bool fp8 = state.dtype == fp8_type;
  CHECK_MSG(fp8 || state.dtype == DType::kF32 || state.dtype == DType::kBF16,
            "fp32, bf16 or fp8 is expected");
  CheckFlat(state, n, state.dtype);
  CHECK_MSG(scales.present() == fp8 || n == 0, "fp8 states have scales, others have not");
  CHECK_MSG(!fp8 || scales.dtype == DType::kU8, "scales are bytes");
}

}  // namespace

void GroupedUpdate(Stream& stream, const GroupedUpdateArgs& args) {
  if (OnCuda(stream)) {
    cuda::GroupedUpdate(stream, args);
    return;
  }
  const ElementUpdateArgs& update = args.update;
  const int64_t n = update.g.elements();
  CHECK_MSG(update.main_weight.present() != update.remainder.present() || n == 0,
            "a main weight is fp32, or a weight with a remainder");
  if (update.weight.present()) {
    CheckFlat(update.weight, n, WeightTypeOf(update));
  }
  CheckFloat(update.g);
  CheckState(update.m, args.m_scales, DType::kF8E4M3, n);
  if (update.v.present()) {
    CheckState(update.v, args.v_scales, DType::kU8, n);
  }
  CheckPieces(update.table, n);
  cpu::GroupedUpdate(args);
}

void ReduceAdd(Stream& stream, const ReduceAddArgs& args) {
  if (OnCuda(stream)) {
    cuda::ReduceAdd(stream, args);
    return;
  }
  CheckFlat(args.out, args.out.elements(), DType::kF32);
  const size_t pieces = args.pieces.size() + args.rounded_pieces.size();
  CHECK_MSG(args.pieces.empty() || args.rounded_pieces.empty(), "pieces are of one type");
  CHECK_MSG(std::has_single_bit(pieces), "pieces are a power of two");
  CHECK_MSG(args.squared_norm == nullptr || pieces <= kMaxNormPieces,
            "more pieces than one pass adds, and a norm");
  cpu::ReduceAdd(stream, args);
}

void Cast(Stream& stream, const CastArgs& args) {
  if (OnCuda(stream)) {
    cuda::Cast(stream, args);
    return;
  }
  CheckCast(args.from, args.to);
  CheckCast(args.to, args.from);
  CHECK_MSG(args.from.dtype != args.to.dtype, "a cast changes the type");
  CheckFlat(args.from, args.from.elements(), args.from.dtype);
  CheckFlat(args.to, args.from.elements(), args.to.dtype);
  cpu::Cast(args);
}

void TransposeMatrix(Stream& stream, const TransposeArgs& args) {
  if (OnCuda(stream)) {
    cuda::TransposeMatrix(stream, args);
    return;
  }
  CHECK_MSG(args.from.rank == 2 && args.to.rank == 2, "a matrix is expected");
  CHECK_MSG(args.to.dtype == args.from.dtype, "one element type");
  CHECK_MSG(args.to.size[0] == args.from.size[1] && args.to.size[1] == args.from.size[0],
            "wrong shape");
  cpu::TransposeMatrix(args);
}

void SumLoss(Stream& stream, const SumLossArgs& args) {
  if (OnCuda(stream)) {
    cuda::SumLoss(stream, args);
    return;
  }
  CheckFlat(args.losses, args.losses.elements(), DType::kF32);
  CheckFlat(args.targets, args.losses.elements(), DType::kI32);
  cpu::SumLoss(args);
}

void SumRowNodes(Stream& stream, const SumRowNodesArgs& args) {
  if (OnCuda(stream)) {
    cuda::SumRowNodes(stream, args);
    return;
  }
  cpu::SumRowNodes(args);
}

void CountFlags(Stream& stream, const CountFlagsArgs& args) {
  if (OnCuda(stream)) {
    cuda::CountFlags(stream, args);
    return;
  }
  CHECK(args.flags.dtype == DType::kU32 && args.flags.contiguous());
  cpu::CountFlags(args);
}

void DecideUpdate(Stream& stream, const DecideUpdateArgs& args) {
  if (OnCuda(stream)) {
    cuda::DecideUpdate(stream, args);
    return;
  }
  cpu::DecideUpdate(args);
}

}  // namespace ravel::kernels
