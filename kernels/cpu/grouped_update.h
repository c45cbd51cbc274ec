#pragma once

#include "kernels/grouped_update.h"

namespace ravel::kernels::cpu {

// Plain loops over groups, with which device kernels are compared; shapes and types are checked.
void GroupedUpdate(const GroupedUpdateArgs& args);

}  // namespace ravel::kernels::cpu
