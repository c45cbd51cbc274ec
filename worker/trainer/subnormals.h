#pragma once

// Exact bits need subnormal numbers: a processor that reads them as zero, or writes zero in their
// place, computes other losses, moments and scales.

#include "common/status.h"

namespace ravel::trainer {

// Refuses a processor that flushes subnormal numbers, in this thread or in one that it starts; the
// modes of a thread (FTZ and DAZ of MXCSR) are those of the thread that starts it. The error names
// the mode. Costs one thread.
absl::Status CheckSubnormals();

}  // namespace ravel::trainer
