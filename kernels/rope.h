#pragma once

#include "common/tensor_view.h"
#include "kernels/stream.h"

namespace ravel::kernels {

// Angles per position: cosine and sine [positions, head_size / 2] fp32, computed in double and
// rounded once. inverse_frequency [head_size / 2] carries any scaling of the model (Llama 3 style
// included).
struct RopeTableArgs {
  TensorView inverse_frequency;
  TensorView cosine;
  TensorView sine;
};
void BuildRopeTable(Stream& stream, const RopeTableArgs& args);

enum class RopeDirection { kForward, kBackward };

// In place, half-split form [Su et al. 2021; Hugging Face layout]: element j of a head pairs with j
// + head_size/2. x [tokens, heads * head_size], possibly a range of columns; token t has position t
// % sequence_tokens.
struct RopeArgs {
  TensorView x;
  int64_t head_size = 0;
  int64_t sequence_tokens = 0;
  TensorView cosine;
  TensorView sine;
  RopeDirection direction = RopeDirection::kForward;
};
void Rope(Stream& stream, const RopeArgs& args);

}  // namespace ravel::kernels
