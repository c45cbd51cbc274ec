#pragma once

// A cuDNN of tables: descriptors that remember their attributes, engines that a test writes down,
// runs that are recorded. It refuses what the real one would: attributes of no descriptor, plans of
// engines that do not finalise.

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "kernels/cuda/cudnn_library.h"

namespace ravel::kernels::cuda::testing {

struct FakeEngine {
  int64_t index;
  bool deterministic = true;
  bool finalises = true;
  int64_t workspace_bytes = 0;
};

struct FakeDescriptor {
  cudnnBackendDescriptorType_t type;
  bool finalised = false;
  std::map<int, std::vector<char>> attributes;
  const FakeEngine* engine = nullptr;  // of engines, configurations, plans
};

struct FakeRun {
  cudnnHandle_t handle;
  int64_t engine;
  std::map<int64_t, void*> addresses;  // by id
  std::map<int64_t, float> scalars;    // of the tensors given by value
  void* workspace;
};

// One at a time: the functions find it by itself. Counts what is alive.
class FakeCudnn {
 public:
  FakeCudnn();
  ~FakeCudnn();
  FakeCudnn(const FakeCudnn&) = delete;
  FakeCudnn& operator=(const FakeCudnn&) = delete;

  const CudnnFunctions& functions() const { return functions_; }

  // By the heuristic's mode, for chains and for graphs of one attention node.
  std::map<cudnnBackendHeurMode_t, std::vector<FakeEngine>> chain;
  std::map<cudnnBackendHeurMode_t, std::vector<FakeEngine>> one_node;
  bool knows_one_node = true;  // else its descriptors cannot be made
  int alive = 0;
  std::vector<FakeRun> runs;
  std::vector<FakeDescriptor> tensors;  // finalised, in order

 private:
  CudnnFunctions functions_;
};

}  // namespace ravel::kernels::cuda::testing
