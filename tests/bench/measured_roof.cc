// The multiply-adds that THREADS cores do together with 256-bit registers: what CPU benchmarks are
// measured against. Thread i runs on the i-th core that this process may use.
//   measured_roof [THREADS [SECONDS]]     prints fp32 GFLOP/s over the time (1 s), and the sum of
//                                         the cores' best 16 ms in it

#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include <sched.h>

#include "tests/kernels/cpu/fma_roof.h"

namespace {

// The calling thread on the index-th core of those it may use, from the start again after the last.
void StayOnCore(int index) {
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) {
    return;
  }
  index %= CPU_COUNT(&allowed);
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &allowed) && index-- == 0) {
      cpu_set_t one;
      CPU_ZERO(&one);
      CPU_SET(core, &one);
      (void)sched_setaffinity(0, sizeof one, &one);
      return;
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : 1;
  const double seconds = argc > 2 ? std::atof(argv[2]) : 1;
  if (threads < 1 || threads > 1024 || !(seconds > 0 && seconds <= 60)) {
    std::fprintf(stderr, "measured_roof: THREADS must be 1 to 1024, SECONDS up to 60\n");
    return 2;
  }
  std::vector<ravel::kernels::testing::SustainedRoof> roofs(static_cast<size_t>(threads));
  std::vector<std::thread> workers;
  for (int i = 0; i < threads; ++i) {
    workers.emplace_back([&roof = roofs[static_cast<size_t>(i)], i, seconds] {
      StayOnCore(i);
      roof = ravel::kernels::testing::MeasureSustainedAvx2FmaRoof(seconds);
    });
  }
  ravel::kernels::testing::SustainedRoof all;
  for (int i = 0; i < threads; ++i) {
    workers[static_cast<size_t>(i)].join();
    all.mean += roofs[static_cast<size_t>(i)].mean;
    all.best += roofs[static_cast<size_t>(i)].best;
  }
  std::printf("%.1f %.1f\n", all.mean, all.best);
  return 0;
}
