#pragma once

namespace ravel::kernels::testing {

// fp32 GFLOP/s of independent multiply-adds on this core, the best of a few runs: the roof that
// benchmarks divide by. Of AVX2, and of the widest vectors that the processor has; 0 where it lacks
// AVX2.
double MeasureAvx2FmaRoof();
double MeasureFmaRoof();

// fp32 GFLOP/s of AVX2 multiply-adds on this core over `seconds`: what it sustained, and the best
// run of some 16 ms. What others do on a shared machine shows in their quotient. Zeros without
// AVX2.
struct SustainedRoof {
  double mean = 0;
  double best = 0;
};
SustainedRoof MeasureSustainedAvx2FmaRoof(double seconds);

}  // namespace ravel::kernels::testing
