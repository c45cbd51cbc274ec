// Searches for a cuDNN engine that builds an attention plan, and runs built plans. The order is:
// one unified node where cuDNN can mask it (forward only), then the chain of operations; for each,
// heuristic A before the fallback list. The first configuration whose plan finalises is taken,
// since cuDNN sorts by expected speed. Every failed attempt is noted, so that a refusal explains
// itself. A deterministic description skips engines that cuDNN marks as not deterministic.

#include "kernels/cuda/cudnn_attention.h"

#include <utility>

namespace ravel::kernels::cuda {
namespace {

struct Attempt {
  const CudnnFunctions& functions;
  const CudnnTarget& target;
  const RavelCudaAttention& attention;
  std::string& why;
};

void Note(const Attempt& attempt, const std::string& what) {
  attempt.why += (attempt.why.empty() ? "" : "; ") + what;
}

std::string NameOf(bool unified, cudnnBackendHeurMode_t mode) {
  return std::string(unified ? "one node" : "chain") +
         (mode == CUDNN_HEUR_MODE_A ? ", heuristic A" : ", fallback list");
}

// Fills in the plan from the first configuration that serves.
bool TryConfigurations(const Attempt& attempt,
                       cudnnBackendHeurMode_t mode,
                       CudnnAttentionPlan& plan) {
  const std::string name = NameOf(plan.unified, mode);
  Cudnn asking(attempt.functions);
  std::vector<CudnnDescriptor> proposed =
      ProposedConfigurations(asking, attempt.target, plan.graph[0].graph[0], mode);
  if (proposed.empty()) {
    Note(attempt, name + ": " + (asking.ok() ? "no engine" : asking.failure()));
    return false;
  }
  for (CudnnDescriptor& configuration : proposed) {
    Cudnn cudnn(attempt.functions);
    const CudnnEngine engine = EngineOf(cudnn, configuration);
    const std::string engine_name = name + ", engine " + std::to_string(engine.index);
    if (cudnn.ok() && attempt.attention.deterministic != 0 && !engine.deterministic) {
      Note(attempt, engine_name + ": not deterministic");
      continue;
    }
    CudnnDescriptor made = MakePlan(cudnn, attempt.target, configuration);
    const int64_t bytes = WorkspaceBytes(cudnn, made);
    if (cudnn.ok()) {
      plan.engine = engine.index;
      plan.workspace_bytes = plan.scratch_bytes + bytes;
      plan.configurations.push_back(std::move(configuration));
      plan.plan.push_back(std::move(made));
      return true;
    }
    Note(attempt, engine_name + ": " + cudnn.failure());
  }
  return false;
}

std::unique_ptr<CudnnAttentionPlan> TryGraph(const Attempt& attempt, bool unified) {
  auto plan = std::make_unique<CudnnAttentionPlan>();
  plan->functions = &attempt.functions;
  plan->unified = unified;
  Cudnn cudnn(attempt.functions);
  if (unified) {
    const UnifiedAttention values = ForwardUnifiedAttention(attempt.attention);
    plan->graph.push_back(LowerUnified(cudnn, attempt.target, values));
    plan->bindings = BindingsOf(values.operands, 1);
    const int64_t mask_id = static_cast<int64_t>(values.operands.tensors.size()) + 1;
    for (const CudnnBinding& binding : BindingsOf(values.mask, mask_id)) {
      plan->bindings.push_back(binding);
    }
  } else {
    const AttentionGraph values = attempt.attention.backward != 0
                                      ? BackwardAttentionGraph(attempt.attention)
                                      : ForwardAttentionGraph(attempt.attention);
    plan->graph.push_back(LowerGraph(cudnn, attempt.target, values));
    plan->bindings = BindingsOf(values, 1);
    plan->scratch_bytes = values.scratch_bytes;
  }
  if (!cudnn.ok()) {
    Note(attempt, std::string(unified ? "one node: " : "chain: ") + cudnn.failure());
    return nullptr;
  }
  const bool found = TryConfigurations(attempt, CUDNN_HEUR_MODE_A, *plan) ||
                     TryConfigurations(attempt, CUDNN_HEUR_MODE_FALLBACK, *plan);
  return found ? std::move(plan) : nullptr;
}

// Returns the memory of a tensor in this run.
void* AddressOf(const CudnnBinding& binding, const RavelCudaAttentionBuffers& buffers) {
  switch (binding.role) {
    case GraphRole::kQ:
      return const_cast<void*>(buffers.q);
    case GraphRole::kK:
      return const_cast<void*>(buffers.k);
    case GraphRole::kV:
      return const_cast<void*>(buffers.v);
    case GraphRole::kOut:
      return buffers.out;
    case GraphRole::kLogSumExp:
      return buffers.log_sum_exp;
    case GraphRole::kDOut:
      return const_cast<void*>(buffers.dout);
    case GraphRole::kDQ:
      return buffers.dq;
    case GraphRole::kDK:
      return buffers.dk;
    case GraphRole::kDV:
      return buffers.dv;
    case GraphRole::kScratch:
      return static_cast<char*>(buffers.workspace) + binding.offset_bytes;
    case GraphRole::kScalar:  // read on the host, when the work is given
      return const_cast<float*>(&binding.value);
    case GraphRole::kVirtual:
      break;
  }
  return nullptr;
}

}  // namespace

std::vector<CudnnBinding> BindingsOf(const AttentionGraph& graph, int64_t first_id) {
  std::vector<CudnnBinding> bindings;
  for (size_t i = 0; i < graph.tensors.size(); ++i) {
    const GraphTensor& tensor = graph.tensors[i];
    if (tensor.role != GraphRole::kVirtual) {
      bindings.push_back({.id = first_id + static_cast<int64_t>(i),
                          .role = tensor.role,
                          .value = tensor.value,
                          .offset_bytes = tensor.offset_bytes});
    }
  }
  return bindings;
}

std::unique_ptr<CudnnAttentionPlan> PlanAttention(const CudnnFunctions& functions,
                                                  uint64_t version,
                                                  const CudnnTarget& target,
                                                  const RavelCudaAttention& attention,
                                                  std::string& why) {
  why = WhyNoAttentionEngine(attention, version);
  if (!why.empty()) {
    return nullptr;
  }
  const Attempt attempt = {functions, target, attention, why};
  std::unique_ptr<CudnnAttentionPlan> plan;
  if (attention.backward == 0 && version >= kOldestUnifiedMask) {
    plan = TryGraph(attempt, true);
  }
  return plan != nullptr ? std::move(plan) : TryGraph(attempt, false);
}

std::string RunAttention(cudnnHandle_t handle,
                         const CudnnAttentionPlan& plan,
                         const RavelCudaAttentionBuffers& buffers) {
  if (buffers.workspace_bytes < static_cast<uint64_t>(plan.workspace_bytes)) {
    return "attention needs a workspace of " + std::to_string(plan.workspace_bytes) +
           " bytes and has " + std::to_string(buffers.workspace_bytes);
  }
  std::vector<int64_t> ids;
  std::vector<void*> addresses;
  for (const CudnnBinding& binding : plan.bindings) {
    ids.push_back(binding.id);
    addresses.push_back(AddressOf(binding, buffers));
  }
  void* workspace = static_cast<char*>(buffers.workspace) + plan.scratch_bytes;
  const auto elements = static_cast<int64_t>(ids.size());
  Cudnn cudnn(*plan.functions);
  const CudnnDescriptor pack(cudnn, CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
  pack.SetRaw(cudnn, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, elements, ids.data());
  pack.SetRaw(cudnn,
              CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS,
              CUDNN_TYPE_VOID_PTR,
              elements,
              addresses.data());
  pack.Set(cudnn, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, workspace);
  pack.Finalize(cudnn, "the operands of attention");
  if (cudnn.ok()) {
    cudnn.Check(plan.functions->execute(handle, plan.plan[0].get(), pack.get()), "attention");
  }
  return cudnn.failure();
}

}  // namespace ravel::kernels::cuda
