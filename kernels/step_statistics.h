#pragma once

// Statistics that decide a step, computed where the gradients are: sums over lanes and rows in the
// order that hosts have, the decision, and the scalars of the update. The same bits on both
// backends, so that a host may follow a device one step later.

#include <cstddef>
#include <cstdint>

#include "common/tensor_view.h"
#include "kernels/stream.h"
#include "kernels/update.h"

namespace ravel::kernels {

// *sum += the losses of tokens with a target that is not negative, one after another, in fp64;
// *tokens += their count. losses [tokens] fp32, targets [tokens] i32.
struct SumLossArgs {
  TensorView losses;
  TensorView targets;
  double* sum = nullptr;
  int64_t* tokens = nullptr;
};
void SumLoss(Stream& stream, const SumLossArgs& args);

// Rows [first_row, first_row + 2^level) of a list of row sums (kernels/row_sum.h).
struct RowNode {
  int64_t first_row = 0;
  int64_t level = 0;
};
// out[i] = the sum of node i's rows, a tree of adjacent pairs in fp64. Row sums are not negative
// (or NaN); arrays are memory of the stream's backend. A node per block.
struct SumRowNodesArgs {
  const float* row_sums = nullptr;
  int64_t rows = 0;  // of row_sums
  const RowNode* nodes = nullptr;
  int64_t count = 0;
  double* out = nullptr;  // [count]
};
void SumRowNodes(Stream& stream, const SumRowNodesArgs& args);

// counts[i] += 1 where flags[i] is not 0; flags [n] u32 are 0 afterwards.
struct CountFlagsArgs {
  TensorView flags;
  int64_t* counts = nullptr;  // [n]
};
void CountFlags(Stream& stream, const CountFlagsArgs& args);

// A rank's message: words of 8 bytes. This, then int64_t counts of elements that are not finite,
// then fp64.
struct StatisticsHeader {
  int64_t target_tokens = 0;
  int64_t save_sequence = 0;
  int64_t stop = 0;
  int64_t saving = 0;        // 1: this rank still writes its last save
  double learning_rate = 0;  // equal on all ranks
  uint64_t scales = 0;       // digest of the scales of quantized weights: equal, too
};
inline constexpr int64_t kStatisticsHeaderWords = sizeof(StatisticsHeader) / sizeof(int64_t);

// sums[i] = a + b, where an operand of 0 or more is a word of the messages, one below is
// sums[-1 - operand] of an earlier level.
struct SumStep {
  int32_t a = 0;
  int32_t b = 0;
};
// Which step added nothing: the total of none.
inline constexpr int32_t kNoOperand = INT32_MIN;

// Read by the updates that follow, and by the host when it gets there.
struct StepOutcome {
  int64_t updates = 0;  // applied so far: goes up by one unless the step is skipped
  // From 1, skipped or not: the key of what the update draws. The decision leaves it as it is.
  int64_t step = 0;
  double squared_norm = 0;
  int64_t non_finite = 0;
  int64_t target_tokens = 0;
  int32_t apply = 0;  // 0: nothing is updated
  UpdateScalars scalars = {};
  // The factor of the next step's gradients, a power of two, and the applied steps since
  // it changed. The decision changes them by its rule.
  float loss_scale = 1;
  int64_t good_steps = 0;
};

// The rule of scalar::NextLossScale. An interval of 0: nothing is scaled.
struct LossScaleRule {
  double growth_factor = 2;
  double backoff_factor = 0.5;
  double minimum = 1;
  double maximum = 1;
  int64_t growth_interval = 0;
};

struct DecideUpdateArgs {
  const void* messages = nullptr;  // of all ranks, one after another
  int64_t ranks = 0;
  int64_t words = 0;    // of a message
  int64_t tensors = 0;  // counts after the header
  // The squared norm as a list of sums: those of one level do not depend on one another.
  const SumStep* steps = nullptr;
  const int64_t* level_ends = nullptr;  // [levels] ascending; the last is the number of steps
  int64_t levels = 0;
  int64_t step_count = 0;
  double* sums = nullptr;  // [step_count]
  int32_t total = kNoOperand;
  double clip_norm = 0;
  LossScaleRule loss_scale = {};
  UpdateHyper hyper = {};  // learning rate: the messages'
  StepOutcome* outcome = nullptr;
};
// The decision of kernels/scalar/decide_step.h over the sums of all messages.
void DecideUpdate(Stream& stream, const DecideUpdateArgs& args);

}  // namespace ravel::kernels
