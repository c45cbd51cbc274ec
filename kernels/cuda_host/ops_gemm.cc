// Host half of gemm, and of the loss built from it. A gemm goes to cuBLASLt (CudaStream::RunGemm);
// our own kernel runs where cuBLASLt is missing or has no algorithm, and where sums are scaled. The
// loss works in chunks of tokens, as many as the workspace has rows: logits = x w^T, then each
// row's loss, then (for training) logits become their gradients in place, dw += dlogits^T x and dx
// = dlogits w. Memory is therefore [chunk, vocabulary] instead of [tokens, vocabulary]. dw comes
// before dx, which may share memory with x.

#include <algorithm>
#include <bit>

#include "common/check.h"
#include "kernels/cuda_host/launch_rules.h"
#include "kernels/cuda_host/ops.h"

namespace ravel::kernels::cuda {
namespace {

constexpr int64_t kMaxGridY = 65535;

// The largest power of two, at most 256, that divides the address and the bytes of a row.
int32_t AlignmentOf(const TensorView& view) {
  const uint64_t bytes = static_cast<uint64_t>(view.row_stride * DTypeBytes(view.dtype));
  const uint64_t address = reinterpret_cast<uintptr_t>(view.data);
  const uint64_t both = (view.size[0] > 1 ? bytes : 0) | address | 256;
  return int32_t{1} << std::countr_zero(both);
}

// cuBLASLt wants a leading dimension no shorter than a row, of a matrix of one row, too.
int64_t StrideOf(const TensorView& view) {
  return std::max(view.row_stride, view.size[1]);
}

bool IsCodes(const TensorView& view) {
  return view.dtype == DType::kF8E4M3 || view.dtype == DType::kF8E5M2 || view.dtype == DType::kU8;
}

bool IsPacked(const GemmArgs& args) {
  return args.form_a == ScaleForm::kBlocks16;
}

// What cuBLASLt asks of codes; an algorithm that it has not is a bug of the plan, and the end.
void RequireCodes(const GemmArgs& args) {
  constexpr int64_t kStep = 16;
  CHECK_MSG(IsCodes(args.b) && (args.a.dtype != args.b.dtype || args.a.dtype != DType::kF8E5M2),
            "codes of both operands are expected, not both E5M2");
  CHECK_MSG(args.transpose_a == Transpose::kNo && args.transpose_b == Transpose::kYes,
            "codes lie along the inner index");
  CHECK_MSG(args.scale_a.present() && args.scale_b.present(), "codes have scales");
  const auto is = [&](ScaleForm a, ScaleForm b) { return args.form_a == a && args.form_b == b; };
  const auto e4m3 = [&] { return args.a.dtype == args.b.dtype; };
  const bool packed = IsPacked(args);
  CHECK_MSG((args.a.dtype == DType::kU8) == packed && (args.b.dtype == DType::kU8) == packed,
            "scales of 16 codes belong to packed ones, of both operands");
  CHECK_MSG(is(ScaleForm::kTensor, ScaleForm::kTensor) ||
                is(ScaleForm::kBlocks16, ScaleForm::kBlocks16) ||
                (e4m3() && (is(ScaleForm::kBlocks32, ScaleForm::kBlocks32) ||
                            is(ScaleForm::kBlocks128, ScaleForm::kBlocks128) ||
                            is(ScaleForm::kBlocks128, ScaleForm::kSquares128) ||
                            is(ScaleForm::kSquares128, ScaleForm::kBlocks128))),
            "scales of other forms than gemms of codes read");
  for (const TensorView* view : {&args.a, &args.b, &args.c}) {
    CHECK_MSG(view->size[0] % kStep == 0 && view->size[1] % kStep == 0 &&
                  view->row_stride % kStep == 0 &&
                  reinterpret_cast<uintptr_t>(view->data) % kStep == 0,
              "sizes, strides and addresses of codes are multiples of 16");
  }
}

void RequireScale(const TensorView& scale, ScaleForm form, int64_t outer, int64_t inner) {
  if (form != ScaleForm::kTensor) {
    RequireFlat(scale, ScaleBytes(form, outer, inner), DType::kU8);
    CHECK_EQ(reinterpret_cast<uintptr_t>(scale.data) % 16, 0u);
  } else if (scale.present()) {
    RequireFlat(scale, 1, DType::kF32);
  }
}

RavelCudaGemm DescriptionOf(const GemmArgs& args, int64_t m, int64_t n, int64_t k) {
  RavelCudaGemm gemm = {};
  gemm.m = m;
  gemm.n = n;
  gemm.k = k;
  gemm.a_stride = StrideOf(args.a) * CodesOfByte(args.form_a);
  gemm.b_stride = StrideOf(args.b) * CodesOfByte(args.form_b);
  gemm.c_stride = StrideOf(args.c);
  gemm.transpose_a = args.transpose_a == Transpose::kYes ? 1 : 0;
  gemm.transpose_b = args.transpose_b == Transpose::kYes ? 1 : 0;
  gemm.input_type = static_cast<int32_t>(args.a.dtype);
  gemm.output_type = static_cast<int32_t>(args.c.dtype);
  gemm.accumulate = args.output == Output::kAccumulate ? 1 : 0;
  if (IsCodes(args.a)) {
    gemm.b_type = static_cast<int32_t>(args.b.dtype);
    gemm.fast_accumulation = args.fast_accumulation ? 1 : 0;
    gemm.a_form = static_cast<int32_t>(args.form_a);
    gemm.b_form = static_cast<int32_t>(args.form_b);
  }
  gemm.a_align = AlignmentOf(args.a);
  gemm.b_align = AlignmentOf(args.b);
  gemm.c_align = AlignmentOf(args.c);
  return gemm;
}

void RunFallback(LaunchStream& on, const GemmArgs& args, int64_t m, int64_t n, int64_t k) {
  const bool mixed = IsNarrow(args.a.dtype) && args.c.dtype == DType::kF32;
  const bool flip_a = args.transpose_a == Transpose::kYes;
  const bool flip_b = args.transpose_b == Transpose::kYes;
  const int64_t down = DivCeil(m, int64_t{kGemmTile});
  CHECK_MSG(down <= kMaxGridY, "more rows than the fallback gemm takes");
  on.Run({.kernel = Kernel::kGemm,
          .variant = !mixed                        ? ScalarVariantOf(args.a.dtype)
                     : args.a.dtype == DType::kF16 ? kFp16MixedScalar
                                                   : kMixedScalar,
          .grid = {static_cast<uint32_t>(DivCeil(n, int64_t{kGemmTile})),
                   static_cast<uint32_t>(down),
                   1}},
         GemmParams{.a = args.a.data,
                    .b = args.b.data,
                    .c = args.c.data,
                    .scale_a = args.scale_a.As<float>(),
                    .scale_b = args.scale_b.As<float>(),
                    .a_row = flip_a ? 1 : args.a.row_stride,
                    .a_column = flip_a ? args.a.row_stride : 1,
                    .b_row = flip_b ? 1 : args.b.row_stride,
                    .b_column = flip_b ? args.b.row_stride : 1,
                    .c_stride = args.c.row_stride,
                    .m = m,
                    .n = n,
                    .k = k,
                    .accumulate = args.output == Output::kAccumulate ? 1 : 0});
}

// Makes the factors that a gemm of packed codes takes from memory of the device.
void MakeFactors(LaunchStream& on, const GemmArgs& args) {
  RequireFlat(args.whole_a, 1, DType::kF32);
  RequireFlat(args.whole_b, 1, DType::kF32);
  RequireFlat(args.factors, 2, DType::kF32);
  on.Run({.kernel = Kernel::kGemmFactors, .block = kWarpThreads},
         GemmFactorsParams{.a = args.whole_a.As<float>(),
                           .b = args.whole_b.As<float>(),
                           .to = args.factors.As<float>(),
                           .beta = args.output == Output::kAccumulate ? 1.0f : 0.0f});
}

}  // namespace

void Gemm(Stream& stream, const GemmArgs& args) {
  LaunchStream& on = LaunchStreamOf(stream);
  const bool flip_a = args.transpose_a == Transpose::kYes;
  const bool flip_b = args.transpose_b == Transpose::kYes;
  const int64_t m = args.c.size[0];
  const int64_t n = args.c.size[1];
  const int64_t per_byte = CodesOfByte(args.form_a);
  const int64_t k = flip_a ? args.a.size[0] : args.a.size[1] * per_byte;
  RequireFloat(args.c);
  const bool codes = IsCodes(args.a);
  if (codes) {
    RequireCodes(args);
    RequireGradient(args.c);
  } else {
    RequireFloat(args.a);
    CHECK_MSG(args.c.dtype == DType::kF32 || args.c.dtype == args.a.dtype,
              "a product is fp32, or of the type of its factors");
  }
  RequireMatrix(args.a, flip_a ? k : m, flip_a ? m : k / per_byte, args.a.dtype);
  RequireMatrix(
      args.b, flip_b ? n : k, flip_b ? k / per_byte : n, codes ? args.b.dtype : args.a.dtype);
  RequireMatrix(args.c, m, n, args.c.dtype);
  RequireScale(args.scale_a, args.form_a, m, k);
  RequireScale(args.scale_b, args.form_b, n, k);
  if (m == 0 || n == 0) {
    return;
  }
  if (k == 0) {
    if (args.output == Output::kOverwrite) {
      ZeroMatrix(on, args.c);
    }
    return;
  }
  const auto run = [&] {
    return on.RunGemm(DescriptionOf(args, m, n, k),
                      {.a = args.a.data,
                       .b = args.b.data,
                       .c = args.c.data,
                       .workspace = nullptr,
                       .workspace_bytes = 0,
                       .scale_a = args.scale_a.data,
                       .scale_b = args.scale_b.data,
                       .factors = args.factors.As<float>()},
                      args.part);
  };
  if (IsPacked(args)) {
    MakeFactors(on, args);
  }
  if (codes) {
    CHECK_MSG(run(), "cuBLASLt has no algorithm for a gemm of codes");
  } else if (HasScale(args) || !run()) {
    RunFallback(on, args, m, n, k);
  }
}

namespace {

TensorView RowsFrom(const TensorView& matrix, int64_t begin, int64_t count) {
  TensorView view = matrix;
  view.data = matrix.As<char>() + begin * matrix.row_stride * DTypeBytes(matrix.dtype);
  view.size[0] = count;
  return view;
}

void RequireHead(const TensorView& x,
                 const TensorView& w,
                 const TensorView& targets,
                 const TensorView& loss,
                 const TensorView& workspace) {
  const int64_t tokens = x.size[0];
  RequireFloat(x);
  RequireMatrix(x, tokens, x.size[1], x.dtype);
  RequireMatrix(w, w.size[0], x.size[1], x.dtype);
  RequireFlat(targets, tokens, DType::kI32);
  RequireFlat(loss, tokens, DType::kF32);
  CHECK_MSG(workspace.size[0] > 0 || tokens == 0, "the workspace has no rows");
  RequireMatrix(workspace, workspace.size[0], w.size[0], x.dtype);
}

// Tokens [begin, begin + count): their logits, then their losses; with kCrossEntropyGradient the
// logits become their gradients.
struct Chunk {
  int64_t begin;
  TensorView x;
  TensorView logits;
};

Chunk ChunkAt(const TensorView& x, const TensorView& workspace, int64_t begin) {
  const int64_t count = std::min(workspace.size[0], x.size[0] - begin);
  return {begin, RowsFrom(x, begin, count), RowsFrom(workspace, 0, count)};
}

void RunChunk(LaunchStream& on,
              Kernel kernel,
              const Chunk& chunk,
              const TensorView& w,
              const TensorView& targets,
              const TensorView& loss,
              const LinearCrossEntropyTrainArgs& scale = {}) {
  cuda::Gemm(on, {.a = chunk.x, .b = w, .transpose_b = Transpose::kYes, .c = chunk.logits});
  const Variant variant = VariantFor({chunk.logits});
  const int64_t vocabulary = chunk.logits.size[1];
  constexpr int64_t kMaxThreads = 1024;
  on.Run({.kernel = kernel,
          .variant = variant,
          .grid = {BlockPerRow(on, chunk.logits.size[0]), 1, 1},
          .block = RowThreads(vocabulary / WidthOf(variant), 4, kMaxThreads)},
         CrossEntropyParams{.logits = chunk.logits.data,
                            .targets = targets.As<int32_t>() + chunk.begin,
                            .loss = loss.As<float>() + chunk.begin,
                            .logits_stride = chunk.logits.row_stride,
                            .tokens = chunk.logits.size[0],
                            .vocabulary = vocabulary,
                            .device_loss_scale = scale.device_loss_scale,
                            .loss_scale = scale.loss_scale});
}

}  // namespace

void LinearCrossEntropyForward(Stream& stream, const LinearCrossEntropyForwardArgs& args) {
  LaunchStream& on = LaunchStreamOf(stream);
  RequireHead(args.x, args.w, args.targets, args.loss, args.workspace);
  for (int64_t begin = 0; begin < args.x.size[0]; begin += args.workspace.size[0]) {
    const Chunk chunk = ChunkAt(args.x, args.workspace, begin);
    RunChunk(on, Kernel::kCrossEntropyLoss, chunk, args.w, args.targets, args.loss);
  }
}

void LinearCrossEntropyTrain(Stream& stream, const LinearCrossEntropyTrainArgs& args) {
  LaunchStream& on = LaunchStreamOf(stream);
  RequireHead(args.x, args.w, args.targets, args.loss, args.workspace);
  RequireMatrix(args.dx, args.x.size[0], args.x.size[1], args.x.dtype);
  CHECK_MSG(
      (args.loss_scale == 1.0f && args.device_loss_scale == nullptr) || args.x.dtype == DType::kF16,
      "a loss scale is for fp16");
  Output output = args.dw_output;
  for (int64_t begin = 0; begin < args.x.size[0]; begin += args.workspace.size[0]) {
    const Chunk chunk = ChunkAt(args.x, args.workspace, begin);
    RunChunk(on, Kernel::kCrossEntropyGradient, chunk, args.w, args.targets, args.loss, args);
    if (args.dw.present()) {  // before dx, which may be the memory of x
      cuda::Gemm(on,
                 {.a = chunk.logits,
                  .transpose_a = Transpose::kYes,
                  .b = chunk.x,
                  .c = args.dw,
                  .output = output});
    }
    cuda::Gemm(on,
               {.a = chunk.logits, .b = args.w, .c = RowsFrom(args.dx, begin, chunk.x.size[0])});
    output = Output::kAccumulate;
  }
  if (output == Output::kOverwrite && args.dw.present()) {  // no tokens at all
    ZeroMatrix(on, args.dw);
  }
}

}  // namespace ravel::kernels::cuda
