#include "tests/kernels/cpu/fma_roof.h"

#include <algorithm>
#include <chrono>
#include <cstdint>

#include <immintrin.h>

namespace ravel::kernels::testing {
namespace {

constexpr int64_t kChains = 12;
constexpr int64_t kIterations = 4'000'000;

// Twelve chains hide the latency of two multiply-adds a cycle. They differ, so that none is
// computed once for all, and the result depends on each.
__attribute__((target("avx2,fma"))) float RunAvx2() {
  __m256 x0 = _mm256_set1_ps(0.0f);
  __m256 x1 = _mm256_set1_ps(1.0f);
  __m256 x2 = _mm256_set1_ps(2.0f);
  __m256 x3 = _mm256_set1_ps(3.0f);
  __m256 x4 = _mm256_set1_ps(4.0f);
  __m256 x5 = _mm256_set1_ps(5.0f);
  __m256 x6 = _mm256_set1_ps(6.0f);
  __m256 x7 = _mm256_set1_ps(7.0f);
  __m256 x8 = _mm256_set1_ps(8.0f);
  __m256 x9 = _mm256_set1_ps(9.0f);
  __m256 x10 = _mm256_set1_ps(10.0f);
  __m256 x11 = _mm256_set1_ps(11.0f);
  const __m256 a = _mm256_set1_ps(0.999f);
  const __m256 b = _mm256_set1_ps(1e-3f);
  for (int64_t n = 0; n < kIterations; ++n) {
    x0 = _mm256_fmadd_ps(x0, a, b);
    x1 = _mm256_fmadd_ps(x1, a, b);
    x2 = _mm256_fmadd_ps(x2, a, b);
    x3 = _mm256_fmadd_ps(x3, a, b);
    x4 = _mm256_fmadd_ps(x4, a, b);
    x5 = _mm256_fmadd_ps(x5, a, b);
    x6 = _mm256_fmadd_ps(x6, a, b);
    x7 = _mm256_fmadd_ps(x7, a, b);
    x8 = _mm256_fmadd_ps(x8, a, b);
    x9 = _mm256_fmadd_ps(x9, a, b);
    x10 = _mm256_fmadd_ps(x10, a, b);
    x11 = _mm256_fmadd_ps(x11, a, b);
  }
  const __m256 low = x0 + x1 + x2 + x3 + x4 + x5;
  return _mm256_cvtss_f32(low + x6 + x7 + x8 + x9 + x10 + x11);
}

__attribute__((target("avx512f"))) float RunAvx512() {
  __m512 x0 = _mm512_set1_ps(0.0f);
  __m512 x1 = _mm512_set1_ps(1.0f);
  __m512 x2 = _mm512_set1_ps(2.0f);
  __m512 x3 = _mm512_set1_ps(3.0f);
  __m512 x4 = _mm512_set1_ps(4.0f);
  __m512 x5 = _mm512_set1_ps(5.0f);
  __m512 x6 = _mm512_set1_ps(6.0f);
  __m512 x7 = _mm512_set1_ps(7.0f);
  __m512 x8 = _mm512_set1_ps(8.0f);
  __m512 x9 = _mm512_set1_ps(9.0f);
  __m512 x10 = _mm512_set1_ps(10.0f);
  __m512 x11 = _mm512_set1_ps(11.0f);
  const __m512 a = _mm512_set1_ps(0.999f);
  const __m512 b = _mm512_set1_ps(1e-3f);
  for (int64_t n = 0; n < kIterations; ++n) {
    x0 = _mm512_fmadd_ps(x0, a, b);
    x1 = _mm512_fmadd_ps(x1, a, b);
    x2 = _mm512_fmadd_ps(x2, a, b);
    x3 = _mm512_fmadd_ps(x3, a, b);
    x4 = _mm512_fmadd_ps(x4, a, b);
    x5 = _mm512_fmadd_ps(x5, a, b);
    x6 = _mm512_fmadd_ps(x6, a, b);
    x7 = _mm512_fmadd_ps(x7, a, b);
    x8 = _mm512_fmadd_ps(x8, a, b);
    x9 = _mm512_fmadd_ps(x9, a, b);
    x10 = _mm512_fmadd_ps(x10, a, b);
    x11 = _mm512_fmadd_ps(x11, a, b);
  }
  const __m512 low = x0 + x1 + x2 + x3 + x4 + x5;
  return _mm512_cvtss_f32(low + x6 + x7 + x8 + x9 + x10 + x11);
}

// Seconds that a run takes.
double SecondsOf(float (*chains)()) {
  const auto begin = std::chrono::steady_clock::now();
  volatile float sink = chains();
  static_cast<void>(sink);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

double FlopsOfRun(double lanes) {
  return 2.0 * lanes * static_cast<double>(kChains * kIterations);
}

double BestRate(float (*chains)(), double lanes) {
  double best = 0;
  for (int run = 0; run < 5; ++run) {
    best = std::max(best, FlopsOfRun(lanes) / SecondsOf(chains) / 1e9);
  }
  return best;
}

bool HasAvx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

}  // namespace

double MeasureAvx2FmaRoof() {
  return HasAvx2() ? BestRate(RunAvx2, 8) : 0;
}

double MeasureFmaRoof() {
  const double narrow = MeasureAvx2FmaRoof();
  return __builtin_cpu_supports("avx512f") ? std::max(narrow, BestRate(RunAvx512, 16)) : narrow;
}

SustainedRoof MeasureSustainedAvx2FmaRoof(double seconds) {
  double taken = 0;
  double least = 0;
  int64_t runs = 0;
  while (HasAvx2() && (runs == 0 || taken < seconds)) {
    const double run = SecondsOf(RunAvx2);
    taken += run;
    least = runs == 0 ? run : std::min(least, run);
    ++runs;
  }
  if (runs == 0) {
    return {};
  }
  const double gflop = FlopsOfRun(8) / 1e9;
  return {.mean = gflop * static_cast<double>(runs) / taken, .best = gflop / least};
}

}  // namespace ravel::kernels::testing
