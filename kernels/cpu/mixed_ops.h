#pragma once

// Ops of mixed precision in plain loops: what the device kernels are compared with. Shapes are
// already checked (kernels/dispatch_mixed.cc).

#include "kernels/cast.h"
#include "kernels/element_update.h"
#include "kernels/reduce_add.h"

namespace ravel::kernels::cpu {

void ElementUpdate(const ElementUpdateArgs& args);
void ReduceAdd(Stream& stream, const ReduceAddArgs& args);
void Cast(const CastArgs& args);
void TransposeMatrix(const TransposeArgs& args);

}  // namespace ravel::kernels::cpu
