#include <algorithm>

#include "kernels/cpu/reference_ops.h"
#include "kernels/cpu/simd_ops.h"

namespace ravel::kernels::cpu {
namespace {

// Tokens [begin, begin + count) and the logits that the workspace holds for them.
struct Chunk {
  int64_t begin;
  int64_t count;
  TensorView x;
  TensorView logits;
};

Chunk ChunkAt(const TensorView& x, const TensorView& workspace, int64_t begin) {
  const int64_t count = std::min(workspace.rows(), x.rows() - begin);
  return {begin, count, RowsOf(x, begin, count), RowsOf(workspace, 0, count)};
}

void MakeLogits(const Chunk& chunk, const TensorView& w) {
  Gemm({.a = chunk.x, .b = w, .transpose_b = Transpose::kYes, .c = chunk.logits});
}

CrossEntropyRowsArgs RowsOfChunk(const Chunk& chunk,
                                 const TensorView& targets,
                                 const TensorView& loss) {
  return {.logits = chunk.logits,
          .targets = targets.As<int32_t>() + chunk.begin,
          .loss = loss.As<float>() + chunk.begin};
}

}  // namespace

void LinearCrossEntropyForward(const LinearCrossEntropyForwardArgs& args) {
  for (int64_t begin = 0; begin < args.x.rows(); begin += args.workspace.rows()) {
    const Chunk chunk = ChunkAt(args.x, args.workspace, begin);
    MakeLogits(chunk, args.w);
    ActiveOps().cross_entropy_loss(RowsOfChunk(chunk, args.targets, args.loss));
  }
}

void LinearCrossEntropyTrain(const LinearCrossEntropyTrainArgs& args) {
  Output output = args.dw_output;
  for (int64_t begin = 0; begin < args.x.rows(); begin += args.workspace.rows()) {
    const Chunk chunk = ChunkAt(args.x, args.workspace, begin);
    MakeLogits(chunk, args.w);
    CrossEntropyRowsArgs rows = RowsOfChunk(chunk, args.targets, args.loss);
    rows.loss_scale = args.loss_scale;
    ActiveOps().cross_entropy_gradient(rows);
    // Before dx, which may be the memory of x.
    if (args.dw.present()) {
      Gemm({.a = chunk.logits,
            .transpose_a = Transpose::kYes,
            .b = chunk.x,
            .c = args.dw,
            .output = output});
    }
    Gemm({.a = chunk.logits, .b = args.w, .c = RowsOf(args.dx, begin, chunk.count)});
    output = Output::kAccumulate;
  }
  if (output == Output::kOverwrite && args.dw.present()) {  // no tokens at all
    for (int64_t row = 0; row < args.dw.rows(); ++row) {
      std::fill_n(args.dw.Row<float>(row), args.dw.columns(), 0.0f);
    }
  }
}

}  // namespace ravel::kernels::cpu
