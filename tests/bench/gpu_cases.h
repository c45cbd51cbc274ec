#pragma once

// The GPU cases of one process: G5, kernels bound by memory, and G6, matrix products of an 8B
// model.

#include <string>
#include <vector>

#include "tests/bench/gpu_bench.h"

namespace ravel::bench {

struct GpuCase {
  std::string id;
  std::string name;
  // Fills memory, runs once and compares with the CPU; ends the program where the result is wrong.
  std::function<Operation(GpuBench&)> make;
};

std::vector<GpuCase> MemoryBoundCases();
std::vector<GpuCase> GemmCases();

}  // namespace ravel::bench
