#pragma once

// Types that the updates of all optimizers share: the scalars of a step, and the pieces of flat
// ranges that one call updates.

#include <cstdint>
#include <vector>

namespace ravel::kernels {

// Scalars of one update, all fp32; how they are made (beta powers in fp64 and so on):
// kernels/scalar/decide_step.h. An optimizer reads those that it knows.
struct UpdateScalars {
  float beta1 = 0.9f;  // of an average of gradients, or of their momentum
  float beta2 = 0.95f;
  float one_minus_beta1 = 0.1f;
  float one_minus_beta2 = 0.05f;
  float inverse_correction1 = 1.0f;  // 1 / (1 - beta1^t)
  float inverse_correction2 = 1.0f;
  float epsilon = 1e-8f;
  float learning_rate = 0.0f;
  float weight_decay = 0.0f;
  float gradient_scale = 1.0f;  // clip coefficient / denominator
};

struct UpdateHyper {
  double beta1 = 0.9;
  double beta2 = 0.95;
  double epsilon = 1e-8;
  double weight_decay = 0.0;
  double learning_rate = 0.0;
};
// t: updates applied so far + 1. The powers are taken in fp64 by binary exponentiation.
UpdateScalars MakeUpdateScalars(const UpdateHyper& hyper, int64_t t, float gradient_scale);

// A run of consecutive elements of one tensor.
struct UpdatePiece {
  int64_t offset = 0;  // of its first element in the flat ranges of the call
  int64_t elements = 0;
  int64_t first_index = 0;  // global index of its first element in the tensor
  uint32_t site = 0;        // ordinal of the canonical tensor
  uint32_t decays = 1;      // 0: without weight decay
  // Of updates in groups that share a scale (kernels/grouped_update.h): elements of a row, with
  // which the piece begins, and the index of its first group among the scales. Row 0: all of the
  // piece.
  int64_t row = 0;
  int64_t first_scale = 0;
  int64_t unused[2] = {};  // devices find pieces by a shift
};
inline constexpr int64_t kUpdateGroup = 128;

// A table of pieces in memory of the stream's backend. One call updates all of them: on a device it
// is one launch, whose blocks take piece after piece. Pieces do not overlap. None: the call updates
// all of its ranges as one piece, with decay.
struct PieceTable {
  const UpdatePiece* pieces = nullptr;
  int64_t count = 0;
};

// The same elements in pieces that a block of a device takes at a time: none is longer than
// kMaxBlockElements, and all but the first of a piece begin at a multiple of it. Pieces with rows
// are cut between rows instead, and inside a longer one between groups.
inline constexpr int64_t kMaxBlockElements = 4096;
std::vector<UpdatePiece> CutForBlocks(const std::vector<UpdatePiece>& pieces);
// CHECKs that the pieces of a table in host memory lie inside ranges of so many elements.
void CheckPieces(const PieceTable& table, int64_t elements);

}  // namespace ravel::kernels
