// Norms and biases: shapes and types checked once, then the CPU implementation. Activations and
// weights are all fp32 or all bf16, statistics fp32, gradients of weights fp32 or, of bf16, bf16.
// On a CUDA stream kernels/cuda_host checks for itself.

#include <vector>

#include "common/check.h"
#include "common/signed_size.h"
#include "kernels/bias.h"
#include "kernels/cpu/mixed_ops.h"
#include "kernels/cpu/simd_ops.h"
#include "kernels/cuda_host/ops.h"
#include "kernels/norm.h"
#include "kernels/operand_checks.h"

namespace ravel::kernels {
namespace {

// The gradient of a weight, which an op adds up in fp32: where it lies, or, of bf16, in scratch
// that is rounded to it, to nearest, when this goes.
class GradientSums {
 public:
  // `activations`: the type of the op's operands. An absent gradient stays absent.
  GradientSums(const TensorView& gradient, int64_t elements, DType activations, Output output)
      : gradient_(gradient), sums_(gradient) {
    if (!gradient.present()) {
      return;
    }
    const bool rounds = gradient.dtype == DType::kBF16 && activations == DType::kBF16;
    CheckFlat(gradient, elements, rounds ? DType::kBF16 : DType::kF32);
    if (rounds) {
      scratch_.resize(Size(elements));
      sums_ = VectorView(scratch_.data(), elements);
      if (output == Output::kAccumulate) {
        cpu::Cast({.from = gradient_, .to = sums_});
      }
    }
  }
  ~GradientSums() {
    if (!scratch_.empty()) {
      cpu::Cast({.from = sums_, .to = gradient_});
    }
  }
  GradientSums(const GradientSums&) = delete;
  GradientSums& operator=(const GradientSums&) = delete;

  const TensorView& view() const { return sums_; }

 private:
  const TensorView gradient_;
  TensorView sums_;
  std::vector<float> scratch_;
};

// Columns are whole heads of the size of `w`.
void CheckHeads(const TensorView& x, const TensorView& w) {
  CheckFlat(w, w.elements(), x.dtype);
  CHECK_MSG(w.elements() > 0 && x.size[1] % w.elements() == 0, "columns are whole heads");
}

}  // namespace

void RmsNormForward(Stream& stream, const RmsNormForwardArgs& args) {
  if (OnCuda(stream)) {
    cuda::RmsNormForward(stream, args);
    return;
  }
  CheckRank2(args.x);
  const int64_t tokens = args.x.size[0];
  const int64_t hidden = args.x.size[1];
  CheckFloat(args.x);
  CheckMatrix(args.x, tokens, hidden, args.x.dtype);
  CheckMatrix(args.y, tokens, hidden, args.x.dtype);
  CheckFlat(args.w, hidden, args.x.dtype);
  CheckFlat(args.rstd, tokens);
  if (args.residual.present()) {
    CheckMatrix(args.residual, tokens, hidden, args.x.dtype);
    CHECK_MSG(args.sum.present(), "a residual needs a place for the sum");
  }
  if (args.sum.present()) {
    CheckMatrix(args.sum, tokens, hidden, args.x.dtype);
  }
  cpu::ActiveOps().rms_norm_forward(args);
}

void RmsNormBackward(Stream& stream, const RmsNormBackwardArgs& args) {
  if (OnCuda(stream)) {
    cuda::RmsNormBackward(stream, args);
    return;
  }
  CheckRank2(args.dy);
  const int64_t tokens = args.dy.size[0];
  const int64_t hidden = args.dy.size[1];
  CheckFloat(args.dy);
  CheckMatrix(args.dy, tokens, hidden, args.dy.dtype);
  CheckMatrix(args.sum, tokens, hidden, args.dy.dtype);
  CheckMatrix(args.dx, tokens, hidden, args.dy.dtype);
  CheckFlat(args.w, hidden, args.dy.dtype);
  CheckFlat(args.rstd, tokens);
  if (args.dresidual.present()) {
    CheckMatrix(args.dresidual, tokens, hidden, args.dy.dtype);
  }
  const GradientSums dw(args.dw, hidden, args.dy.dtype, args.dw_output);
  RmsNormBackwardArgs summed = args;
  summed.dw = dw.view();
  cpu::ActiveOps().rms_norm_backward(summed);
}

void HeadNormForward(Stream& stream, const HeadNormForwardArgs& args) {
  if (OnCuda(stream)) {
    cuda::HeadNormForward(stream, args);
    return;
  }
  CheckRank2(args.x);
  CheckFloat(args.x);
  CheckMatrix(args.x, args.x.size[0], args.x.size[1], args.x.dtype);
  CheckMatrix(args.y, args.x.size[0], args.x.size[1], args.x.dtype);
  CheckHeads(args.x, args.w);
  cpu::ActiveOps().head_norm_forward(args);
}

void HeadNormBackward(Stream& stream, const HeadNormBackwardArgs& args) {
  if (OnCuda(stream)) {
    cuda::HeadNormBackward(stream, args);
    return;
  }
  CheckRank2(args.x);
  CheckFloat(args.x);
  for (const TensorView& view : {args.x, args.dy, args.dx}) {
    CheckMatrix(view, args.x.size[0], args.x.size[1], args.x.dtype);
  }
  CheckHeads(args.x, args.w);
  const GradientSums dw(args.dw, args.w.elements(), args.x.dtype, args.dw_output);
  HeadNormBackwardArgs summed = args;
  summed.dw = dw.view();
  cpu::ActiveOps().head_norm_backward(summed);
}

void LayerNormForward(Stream& stream, const LayerNormForwardArgs& args) {
  if (OnCuda(stream)) {
    cuda::LayerNormForward(stream, args);
    return;
  }
  CheckRank2(args.x);
  const int64_t tokens = args.x.size[0];
  const int64_t hidden = args.x.size[1];
  CheckFloat(args.x);
  CheckMatrix(args.x, tokens, hidden, args.x.dtype);
  CheckMatrix(args.y, tokens, hidden, args.x.dtype);
  CheckFlat(args.w, hidden, args.x.dtype);
  CheckFlat(args.b, hidden, args.x.dtype);
  CheckFlat(args.mean, tokens);
  CheckFlat(args.rstd, tokens);
  if (args.copy.present()) {
    CheckMatrix(args.copy, tokens, hidden, args.x.dtype);
  }
  cpu::ActiveOps().layer_norm_forward(args);
}

void LayerNormBackward(Stream& stream, const LayerNormBackwardArgs& args) {
  if (OnCuda(stream)) {
    cuda::LayerNormBackward(stream, args);
    return;
  }
  CheckRank2(args.dy);
  CheckFloat(args.dy);
  const int64_t tokens = args.dy.size[0];
  const int64_t hidden = args.dy.size[1];
  for (const TensorView& view : {args.dy, args.x, args.dx}) {
    CheckMatrix(view, tokens, hidden, args.dy.dtype);
  }
  CheckFlat(args.w, hidden, args.dy.dtype);
  CheckFlat(args.mean, tokens);
  CheckFlat(args.rstd, tokens);
  if (args.dresidual.present()) {
    CheckMatrix(args.dresidual, tokens, hidden, args.dy.dtype);
  }
  const GradientSums dw(args.dw, hidden, args.dy.dtype, args.output);
  const GradientSums db(args.db, hidden, args.dy.dtype, args.output);
  LayerNormBackwardArgs summed = args;
  summed.dw = dw.view();
  summed.db = db.view();
  cpu::ActiveOps().layer_norm_backward(summed);
}

void AddBias(Stream& stream, const AddBiasArgs& args) {
  if (OnCuda(stream)) {
    cuda::AddBias(stream, args);
    return;
  }
  CheckRank2(args.y);
  CheckFloat(args.y);
  CheckMatrix(args.y, args.y.size[0], args.y.size[1], args.y.dtype);
  CheckFlat(args.bias, args.y.size[1], args.y.dtype);
  cpu::ActiveOps().add_bias(args);
}

void BiasGradient(Stream& stream, const BiasGradientArgs& args) {
  if (OnCuda(stream)) {
    cuda::BiasGradient(stream, args);
    return;
  }
  CheckRank2(args.dy);
  CheckFloat(args.dy);
  CheckMatrix(args.dy, args.dy.size[0], args.dy.size[1], args.dy.dtype);
  CHECK_MSG(args.db.present() || args.dy.size[1] == 0, "no data");
  const GradientSums db(args.db, args.dy.size[1], args.dy.dtype, args.output);
  BiasGradientArgs summed = args;
  summed.db = db.view();
  cpu::ActiveOps().bias_gradient(summed);
}

}  // namespace ravel::kernels
