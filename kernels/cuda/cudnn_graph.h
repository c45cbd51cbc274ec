#pragma once

// From values (attention_graph.h) to descriptors of cuDNN, and from those to a plan. Inside
// libravel_cuda.so and its tests.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/cuda/attention_graph.h"
#include "kernels/cuda/cudnn_library.h"

namespace ravel::kernels::cuda {

// Owns one descriptor. The first failure of its set-up stays in the Cudnn it was made with.
class CudnnDescriptor;

// The functions, with the first failure of a sequence of calls: later calls do nothing. A sequence
// is one attempt; its text says what was done and what cuDNN said. Thread-compatible.
class Cudnn {
 public:
  explicit Cudnn(const CudnnFunctions& functions) : f_(functions) {}

  bool ok() const { return failure_.empty(); }
  const std::string& failure() const { return failure_; }
  void Check(cudnnStatus_t status, const char* what);
  const CudnnFunctions& functions() const { return f_; }

 private:
  const CudnnFunctions& f_;
  std::string failure_;
};

class CudnnDescriptor {
 public:
  CudnnDescriptor(Cudnn& cudnn, cudnnBackendDescriptorType_t type);
  ~CudnnDescriptor();
  CudnnDescriptor(CudnnDescriptor&& other) noexcept;
  CudnnDescriptor& operator=(CudnnDescriptor&&) = delete;

  cudnnBackendDescriptor_t get() const { return descriptor_; }

  void SetRaw(Cudnn& cudnn,
              cudnnBackendAttributeName_t name,
              cudnnBackendAttributeType_t type,
              int64_t count,
              const void* values) const;
  template <typename Value>
  void Set(Cudnn& cudnn,
           cudnnBackendAttributeName_t name,
           cudnnBackendAttributeType_t type,
           Value value) const {
    SetRaw(cudnn, name, type, 1, &value);
  }
  void SetDescriptor(Cudnn& cudnn,
                     cudnnBackendAttributeName_t name,
                     const CudnnDescriptor& other) const {
    Set(cudnn, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, other.get());
  }
  void Finalize(Cudnn& cudnn, const char* what) const;

 private:
  const CudnnFunctions* functions_;
  cudnnBackendDescriptor_t descriptor_ = nullptr;
};

// The device that a plan is for: a handle of an existing device, or a description of a device that
// need not exist (CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR), for plans that are only built.
struct CudnnTarget {
  cudnnHandle_t handle = nullptr;
  cudnnBackendDescriptor_t device = nullptr;
};

// An operation graph, and what it refers to.
struct CudnnGraph {
  std::vector<CudnnDescriptor> parts;
  std::vector<CudnnDescriptor> tensors;
  std::vector<CudnnDescriptor> operations;
  std::vector<CudnnDescriptor> graph;  // one, or none after a failure
};

// The chain of operations.
CudnnGraph LowerGraph(Cudnn& cudnn, const CudnnTarget& target, const AttentionGraph& graph);
// One node; needs kOldestUnifiedMask.
CudnnGraph LowerUnified(Cudnn& cudnn, const CudnnTarget& target, const UnifiedAttention& attention);

// Configurations that the heuristic proposes, best first.
std::vector<CudnnDescriptor> ProposedConfigurations(Cudnn& cudnn,
                                                    const CudnnTarget& target,
                                                    const CudnnDescriptor& graph,
                                                    cudnnBackendHeurMode_t mode);

struct CudnnEngine {
  int64_t index = -1;
  bool deterministic = true;
};
CudnnEngine EngineOf(Cudnn& cudnn, const CudnnDescriptor& configuration);

// Finalises; may compile for seconds.
CudnnDescriptor MakePlan(Cudnn& cudnn,
                         const CudnnTarget& target,
                         const CudnnDescriptor& configuration);
int64_t WorkspaceBytes(Cudnn& cudnn, const CudnnDescriptor& plan);

}  // namespace ravel::kernels::cuda
