#pragma once

#include <cstdint>

#include "common/tensor_view.h"
#include "kernels/scalar/update_rules.h"
#include "kernels/stream.h"
#include "kernels/update.h"

namespace ravel::kernels {

// The update of any rule of kernels/scalar/update_rules.h in mixed types, over equal flat ranges,
// in place. The main weight is either `main_weight` (fp32), or the pair of `weight` and
// `remainder`, which is the same fp32 exactly; `weight` is its bf16 rounded half away from zero in
// both forms, so both train with the same bits. States are fp32, or, if the rule allows it, bf16:
// then m is rounded to nearest even and v stochastically, by 16 bits of Philox (purpose 2) keyed by
// the seed, step, site and global index and by nothing else. The update itself uses the unrounded m
// and v. A bf16 gradient is widened first.
struct ElementUpdateArgs {
  TensorView main_weight = {};  // fp32 form: flat fp32; absent in the remainder form
  TensorView weight = {};       // bf16; optional in the fp32 form
  TensorView remainder = {};    // i16; remainder form only
  TensorView g;                 // fp32 or bf16
  TensorView m;                 // fp32 or bf16
  TensorView v;                 // the type of m; absent where the rule has one state
  uint64_t seed = 0;
  uint32_t step = 0;
  // Used where there is no table: ordinal of the canonical tensor, global index of the first
  // element.
  uint32_t site = 0;
  int64_t first_index = 0;
  UpdateScalars scalars = {};
  // Memory of the stream's device, read when the op runs: `device_scalars` takes the place of
  // `scalars`, `device_step` that of `step`; where *apply is 0, nothing changes.
  const UpdateScalars* device_scalars = nullptr;
  const int64_t* device_step = nullptr;
  const int32_t* apply = nullptr;
  PieceTable table = {};
  ElementRule rule = ElementRule::kAdamW;
};
void ElementUpdate(Stream& stream, const ElementUpdateArgs& args);

}  // namespace ravel::kernels
