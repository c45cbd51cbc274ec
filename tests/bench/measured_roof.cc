// The most multiply-adds that THREADS cores do together with 256-bit registers: what CPU benchmarks
// are measured against.
//   measured_roof [THREADS]     prints one number, fp32 GFLOP/s

#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <thread>
#include <vector>

#include "tests/kernels/cpu/fma_roof.h"

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : 1;
  if (threads < 1 || threads > 1024) {
    std::fprintf(stderr, "measured_roof: THREADS must be 1 to 1024\n");
    return 2;
  }
  std::vector<double> rates(static_cast<size_t>(threads));
  std::vector<std::thread> workers;
  for (double& rate : rates) {
    workers.emplace_back([&rate] { rate = ravel::kernels::testing::MeasureAvx2FmaRoof(); });
  }
  for (std::thread& worker : workers) {
    worker.join();
  }
  std::printf("%.1f\n", std::accumulate(rates.begin(), rates.end(), 0.0));
  return 0;
}
