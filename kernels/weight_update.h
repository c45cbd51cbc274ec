#pragma once

// The update of a quantized matrix together with what follows from the new weights: amaxes, and
// codes whose scales are known then. One read and one write of every byte, where an update,
// BlockAmax and QuantizeWeight one after another read the weights three times.

#include <cstdint>

#include "common/recipe.h"
#include "common/tensor_view.h"
#include "kernels/grouped_update.h"
#include "kernels/stream.h"

namespace ravel::kernels {

// The places of what follows from new weights. Amaxes are raised, as BlockAmax does it; they are
// taken in a step that is not applied, too, of the weights as they are.
struct WeightTarget {
  plan::Recipe recipe = plan::Recipe::kNone;
  int64_t first_row = 0;  // of the matrix whose grid `amax` is
  TensorView amax;        // grid of the recipe's blocks, as BlockAmaxArgs::amax
  float epsilon = 0;
  TensorView whole_amax = {};  // u32 [1]: of recipes with two levels, without epsilon
  // u8 [rows, columns]: of kFloat8Block and kMxFp8 the codes of blocks all of whose rows are here,
  // others stay; of kDelayed all codes, by *encode. Absent: none.
  TensorView codes = {};
  TensorView encode = {};  // of kDelayed, fp32 [1]: 0 or a step that is not applied: codes stay
};

// `update` is that of rows * columns elements of one matrix: fp32 main weights without another
// weight, no table, `first_index` that of its first element; scales of its states begin at its
// first group. Rows are `row_step` apart in global indices. columns are a multiple of 4, every
// range begins at four of its elements, and groups of a row begin where its columns do.
struct WeightUpdateArgs {
  GroupedUpdateArgs update;
  int64_t columns = 0;
  int64_t row_step = 0;
  bool decays = true;
  WeightTarget target;
};
void WeightUpdate(Stream& stream, const WeightUpdateArgs& args);

// True if `args` has what a device asks of columns and addresses.
bool FitsWeightUpdate(const WeightUpdateArgs& args);

}  // namespace ravel::kernels
