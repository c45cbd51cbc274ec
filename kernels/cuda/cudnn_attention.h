#pragma once

// Plans for attention and their runs. Inside libravel_cuda.so and its tests.

#include <memory>
#include <string>
#include <vector>

#include "kernels/cuda/cudnn_graph.h"

namespace ravel::kernels::cuda {

// The memory or value that a run gives for the tensor of an id.
struct CudnnBinding {
  int64_t id;
  GraphRole role;
  float value;           // of a scalar
  int64_t offset_bytes;  // of scratch
};
// Every tensor that is not virtual.
std::vector<CudnnBinding> BindingsOf(const AttentionGraph& graph, int64_t first_id);

// Refers to the functions it was built with. Thread-compatible.
struct CudnnAttentionPlan {
  const CudnnFunctions* functions = nullptr;
  std::vector<CudnnGraph> graph;                // one
  std::vector<CudnnDescriptor> configurations;  // those that were proposed
  std::vector<CudnnDescriptor> plan;            // one
  std::vector<CudnnBinding> bindings;
  int64_t scratch_bytes = 0;    // of the graph's tensors; the engine's workspace lies after them
  int64_t workspace_bytes = 0;  // of both
  bool unified = false;
  int64_t engine = -1;
};

// The first configuration whose plan finalises: one node where it can say the mask, then the chain;
// for each, what heuristic A proposes, then the fallback list. A deterministic description skips
// engines that are not. Null where there is none; `why` then names every attempt.
std::unique_ptr<CudnnAttentionPlan> PlanAttention(const CudnnFunctions& functions,
                                                  uint64_t version,
                                                  const CudnnTarget& target,
                                                  const RavelCudaAttention& attention,
                                                  std::string& why);

// Gives the work to the handle's stream. Empty, or what went wrong.
std::string RunAttention(cudnnHandle_t handle,
                         const CudnnAttentionPlan& plan,
                         const RavelCudaAttentionBuffers& buffers);

}  // namespace ravel::kernels::cuda
