#pragma once

#include "kernels/grouped_update.h"

namespace ravel::kernels::cpu {

// Shapes and types are checked.
void GroupedUpdate(const GroupedUpdateArgs& args);
// One piece, whatever its table: `scalars` and `step` take the place of what `args` has.
void UpdateBlocks(const GroupedUpdateArgs& args,
                  const UpdatePiece& piece,
                  const UpdateScalars& scalars,
                  uint32_t step);

}  // namespace ravel::kernels::cpu
