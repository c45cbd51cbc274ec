#pragma once

namespace ravel::kernels::testing {

// fp32 GFLOP/s of independent multiply-adds on this core, the best of a few runs: the roof that
// benchmarks divide by. Of AVX2, and of the widest vectors that the processor has; 0 where it lacks
// AVX2.
double MeasureAvx2FmaRoof();
double MeasureFmaRoof();

}  // namespace ravel::kernels::testing
