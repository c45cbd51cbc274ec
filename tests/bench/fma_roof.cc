// The most multiply-adds that THREADS cores do with 256-bit registers: the roof that CPU benchmarks
// are measured against.
//   fma_roof [THREADS]     prints one number, fp32 GFLOP/s: the best of five runs
// Twelve independent chains cover the latency of two FMA units; nothing is loaded or stored in the
// loop.

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

namespace {

using Vector = float __attribute__((vector_size(32)));

constexpr int kChains = 12;
constexpr int64_t kRounds = 60'000'000;
constexpr int kRuns = 5;

__attribute__((target("avx2,fma"))) float MultiplyAdd(int64_t rounds, float seed) {
  const Vector a = {0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f};
  const Vector b = {1.0f, 1.1f, 1.2f, 1.3f, 1.4f, 1.5f, 1.6f, 1.7f};
  Vector chain[kChains];  // all different, and unknown to the compiler
  for (int i = 0; i < kChains; ++i) {
    chain[i] = b * (seed + static_cast<float>(i));
  }
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 12
    for (Vector& value : chain) {
      value = __builtin_ia32_vfmaddps256(value, a, b);
    }
  }
  float sum = 0;
  for (const Vector& value : chain) {
    sum += value[0] + value[7];
  }
  return sum;
}

}  // namespace

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : 1;
  if (threads < 1 || threads > 1024) {
    std::fprintf(stderr, "fma_roof: THREADS must be 1 to 1024\n");
    return 2;
  }
  const float seed = static_cast<float>(threads);
  double best = 0;
  std::vector<float> results(static_cast<size_t>(threads));
  for (int run = 0; run < kRuns; ++run) {
    const auto start = std::chrono::steady_clock::now();
    std::vector<std::thread> workers;
    for (float& result : results) {
      workers.emplace_back([&result, seed] { result = MultiplyAdd(kRounds, seed); });
    }
    for (std::thread& worker : workers) {
      worker.join();
    }
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    const double flops = 2.0 * 8 * kChains * static_cast<double>(kRounds) * threads;
    best = flops / seconds / 1e9 > best ? flops / seconds / 1e9 : best;
  }
  std::printf("%.1f\n", best);
  return results[0] > 0 ? 0 : 1;
}
