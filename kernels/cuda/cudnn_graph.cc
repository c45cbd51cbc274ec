// Lowers graphs of attention_graph.h to cuDNN backend descriptors, one function per kind of
// operation, and asks the heuristics for engine configurations. Errors are sticky: the first
// failing call of a Cudnn is kept and later calls do nothing, so set-up code has no check after
// every attribute. Attribute numbers of newer headers are written out here, because the build must
// accept an older header and use a newer library.

#include "kernels/cuda/cudnn_graph.h"

#include <array>
#include <utility>

namespace ravel::kernels::cuda {
namespace {

constexpr int64_t kAlignment = 16;

// Values from the headers of cuDNN 9.21 and later; this build's header may be older.
constexpr auto kSdpaSubgraph = static_cast<cudnnBackendAttributeName_t>(2811);
constexpr auto kSdpaSubgraphInputId = static_cast<cudnnBackendAttributeName_t>(2812);
constexpr auto kSdpaSubgraphOutputId = static_cast<cudnnBackendAttributeName_t>(2813);
constexpr auto kSdpaSoftmax = static_cast<cudnnBackendAttributeName_t>(2814);
constexpr auto kSoftmaxInput = static_cast<cudnnBackendAttributeName_t>(3100);
constexpr auto kSoftmaxOutput = static_cast<cudnnBackendAttributeName_t>(3101);
constexpr auto kSoftmaxStatistics = static_cast<cudnnBackendAttributeName_t>(3102);
constexpr auto kSoftmaxDescriptor = static_cast<cudnnBackendDescriptorType_t>(45);

cudnnDataType_t TypeOf(GraphType type) {
  switch (type) {
    case GraphType::kBf16:
      return CUDNN_DATA_BFLOAT16;
    case GraphType::kFp16:
      return CUDNN_DATA_HALF;
    case GraphType::kF32:
      return CUDNN_DATA_FLOAT;
    case GraphType::kInt32:
      return CUDNN_DATA_INT32;
    case GraphType::kBoolean:
      return CUDNN_DATA_BOOLEAN;
  }
  return CUDNN_DATA_FLOAT;
}

cudnnPointwiseMode_t ModeOf(GraphOperator op) {
  switch (op) {
    case GraphOperator::kAdd:
      return CUDNN_POINTWISE_ADD;
    case GraphOperator::kSubtract:
      return CUDNN_POINTWISE_SUB;
    case GraphOperator::kMultiply:
      return CUDNN_POINTWISE_MUL;
    case GraphOperator::kDivide:
      return CUDNN_POINTWISE_DIV;
    case GraphOperator::kExp:
      return CUDNN_POINTWISE_EXP;
    case GraphOperator::kLog:
      return CUDNN_POINTWISE_LOG;
    case GraphOperator::kIndex:
      return CUDNN_POINTWISE_GEN_INDEX;
    case GraphOperator::kGreaterEqual:
      return CUDNN_POINTWISE_CMP_GE;
    case GraphOperator::kSelect:
      return CUDNN_POINTWISE_BINARY_SELECT;
    default:
      return CUDNN_POINTWISE_IDENTITY;
  }
}

CudnnDescriptor LowerTensor(Cudnn& cudnn, const GraphTensor& tensor, int64_t id) {
  CudnnDescriptor made(cudnn, CUDNN_BACKEND_TENSOR_DESCRIPTOR);
  made.Set(cudnn, CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, TypeOf(tensor.type));
  made.SetRaw(cudnn, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, 4, tensor.size.data());
  made.SetRaw(cudnn, CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, 4, tensor.stride.data());
  made.Set(cudnn, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, id);
  made.Set(cudnn, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, kAlignment);
  if (tensor.role == GraphRole::kVirtual) {
    made.Set(cudnn, CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, true);
  }
  if (tensor.role == GraphRole::kScalar) {
    made.Set(cudnn, CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, true);
  }
  made.Finalize(cudnn, "a tensor");
  return made;
}

// The context in which an operation is lowered.
struct Lowering {
  Cudnn& cudnn;
  CudnnGraph& graph;
  const CudnnDescriptor& Input(const GraphOperation& operation, size_t i) const {
    return graph.tensors[operation.inputs[i]];
  }
  const CudnnDescriptor& Output(const GraphOperation& operation) const {
    return graph.tensors[operation.output];
  }
};

CudnnDescriptor LowerMatmul(const Lowering& to, const GraphOperation& operation) {
  CudnnDescriptor matmul(to.cudnn, CUDNN_BACKEND_MATMUL_DESCRIPTOR);
  matmul.Set(
      to.cudnn, CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, TypeOf(operation.compute));
  matmul.Finalize(to.cudnn, "a matmul");
  CudnnDescriptor made(to.cudnn, CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR);
  made.SetDescriptor(to.cudnn, CUDNN_ATTR_OPERATION_MATMUL_ADESC, to.Input(operation, 0));
  made.SetDescriptor(to.cudnn, CUDNN_ATTR_OPERATION_MATMUL_BDESC, to.Input(operation, 1));
  made.SetDescriptor(to.cudnn, CUDNN_ATTR_OPERATION_MATMUL_CDESC, to.Output(operation));
  made.SetDescriptor(to.cudnn, CUDNN_ATTR_OPERATION_MATMUL_DESC, matmul);
  made.Finalize(to.cudnn, "a matmul's operation");
  to.graph.parts.push_back(std::move(matmul));
  return made;
}

CudnnDescriptor LowerReshape(const Lowering& to, const GraphOperation& operation) {
  CudnnDescriptor made(to.cudnn, CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR);
  made.SetDescriptor(to.cudnn, CUDNN_ATTR_OPERATION_RESHAPE_XDESC, to.Input(operation, 0));
  made.SetDescriptor(to.cudnn, CUDNN_ATTR_OPERATION_RESHAPE_YDESC, to.Output(operation));
  made.Finalize(to.cudnn, "a reshape");
  return made;
}

CudnnDescriptor LowerReduction(const Lowering& to, const GraphOperation& operation) {
  CudnnDescriptor reduction(to.cudnn, CUDNN_BACKEND_REDUCTION_DESCRIPTOR);
  reduction.Set(
      to.cudnn, CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, TypeOf(operation.compute));
  reduction.Set(
      to.cudnn,
      CUDNN_ATTR_REDUCTION_OPERATOR,
      CUDNN_TYPE_REDUCTION_OPERATOR_TYPE,
      operation.op == GraphOperator::kMax ? CUDNN_REDUCE_TENSOR_MAX : CUDNN_REDUCE_TENSOR_ADD);
  reduction.Finalize(to.cudnn, "a reduction");
  CudnnDescriptor made(to.cudnn, CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR);
  made.SetDescriptor(to.cudnn, CUDNN_ATTR_OPERATION_REDUCTION_XDESC, to.Input(operation, 0));
  made.SetDescriptor(to.cudnn, CUDNN_ATTR_OPERATION_REDUCTION_YDESC, to.Output(operation));
  made.SetDescriptor(to.cudnn, CUDNN_ATTR_OPERATION_REDUCTION_DESC, reduction);
  made.Finalize(to.cudnn, "a reduction's operation");
  to.graph.parts.push_back(std::move(reduction));
  return made;
}

CudnnDescriptor LowerPointwise(const Lowering& to, const GraphOperation& operation) {
  CudnnDescriptor mode(to.cudnn, CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
  mode.Set(to.cudnn, CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, ModeOf(operation.op));
  mode.Set(
      to.cudnn, CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, TypeOf(operation.compute));
  if (operation.op == GraphOperator::kIndex) {
    mode.Set(to.cudnn, CUDNN_ATTR_POINTWISE_AXIS, CUDNN_TYPE_INT64, operation.axis);
  }
  mode.Finalize(to.cudnn, "a pointwise mode");
  CudnnDescriptor made(to.cudnn, CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
  made.SetDescriptor(to.cudnn, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, mode);
  constexpr std::array kInputs = {CUDNN_ATTR_OPERATION_POINTWISE_XDESC,
                                  CUDNN_ATTR_OPERATION_POINTWISE_BDESC,
                                  CUDNN_ATTR_OPERATION_POINTWISE_TDESC};
  for (size_t i = 0; i < operation.inputs.size(); ++i) {
    made.SetDescriptor(to.cudnn, kInputs[i], to.Input(operation, i));
  }
  made.SetDescriptor(to.cudnn, CUDNN_ATTR_OPERATION_POINTWISE_YDESC, to.Output(operation));
  made.Finalize(to.cudnn, "a pointwise operation");
  to.graph.parts.push_back(std::move(mode));
  return made;
}

CudnnDescriptor LowerOperation(const Lowering& to, const GraphOperation& operation) {
  switch (operation.op) {
    case GraphOperator::kMatmul:
      return LowerMatmul(to, operation);
    case GraphOperator::kReshape:
      return LowerReshape(to, operation);
    case GraphOperator::kSum:
    case GraphOperator::kMax:
      return LowerReduction(to, operation);
    default:
      return LowerPointwise(to, operation);
  }
}

void FinishGraph(Cudnn& cudnn, const CudnnTarget& target, CudnnGraph& graph) {
  std::vector<cudnnBackendDescriptor_t> operations;
  for (const CudnnDescriptor& operation : graph.operations) {
    operations.push_back(operation.get());
  }
  CudnnDescriptor made(cudnn, CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
  if (target.handle != nullptr) {
    made.Set(cudnn, CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, target.handle);
  }
  made.SetRaw(cudnn,
              CUDNN_ATTR_OPERATIONGRAPH_OPS,
              CUDNN_TYPE_BACKEND_DESCRIPTOR,
              static_cast<int64_t>(operations.size()),
              operations.data());
  made.Finalize(cudnn, "the graph");
  graph.graph.push_back(std::move(made));
}

CudnnGraph Lower(Cudnn& cudnn,
                 const CudnnTarget& target,
                 const AttentionGraph& values,
                 int64_t first_id) {
  CudnnGraph graph;
  for (size_t i = 0; i < values.tensors.size(); ++i) {
    const int64_t id = first_id + static_cast<int64_t>(i);
    graph.tensors.push_back(LowerTensor(cudnn, values.tensors[i], id));
  }
  for (const GraphOperation& operation : values.operations) {
    graph.operations.push_back(LowerOperation({cudnn, graph}, operation));
  }
  FinishGraph(cudnn, target, graph);
  return graph;
}

void Append(std::vector<CudnnDescriptor>& from, std::vector<CudnnDescriptor>& to) {
  for (CudnnDescriptor& descriptor : from) {
    to.push_back(std::move(descriptor));
  }
}

}  // namespace

void Cudnn::Check(cudnnStatus_t status, const char* what) {
  if (status == CUDNN_STATUS_SUCCESS || !ok()) {
    return;
  }
  std::array<char, 512> text = {};
  f_.last_error(text.data(), text.size());
  failure_ = std::string(what) + ": " + f_.error_text(status);
  if (text[0] != '\0') {
    failure_ += std::string(" (") + text.data() + ")";
  }
}

CudnnDescriptor::CudnnDescriptor(Cudnn& cudnn, cudnnBackendDescriptorType_t type)
    : functions_(&cudnn.functions()) {
  if (cudnn.ok()) {
    cudnn.Check(functions_->make(type, &descriptor_), "a descriptor");
  }
}

CudnnDescriptor::~CudnnDescriptor() {
  if (descriptor_ != nullptr) {
    functions_->discard(descriptor_);
  }
}

CudnnDescriptor::CudnnDescriptor(CudnnDescriptor&& other) noexcept
    : functions_(other.functions_), descriptor_(std::exchange(other.descriptor_, nullptr)) {}

void CudnnDescriptor::SetRaw(Cudnn& cudnn,
                             cudnnBackendAttributeName_t name,
                             cudnnBackendAttributeType_t type,
                             int64_t count,
                             const void* values) const {
  if (cudnn.ok()) {
    const std::string what = "attribute " + std::to_string(name);
    cudnn.Check(functions_->set(descriptor_, name, type, count, values), what.c_str());
  }
}

void CudnnDescriptor::Finalize(Cudnn& cudnn, const char* what) const {
  if (cudnn.ok()) {
    cudnn.Check(functions_->finalize(descriptor_), what);
  }
}

CudnnGraph LowerGraph(Cudnn& cudnn, const CudnnTarget& target, const AttentionGraph& graph) {
  return Lower(cudnn, target, graph, 1);
}

CudnnGraph LowerUnified(Cudnn& cudnn,
                        const CudnnTarget& target,
                        const UnifiedAttention& attention) {
  const std::vector<GraphTensor>& operands = attention.operands.tensors;
  const int64_t mask_id = static_cast<int64_t>(operands.size()) + 1;
  CudnnGraph inner = Lower(cudnn, {}, attention.mask, mask_id);
  CudnnGraph graph;
  CudnnDescriptor node(cudnn, CUDNN_BACKEND_OPERATION_SDPA_FWD_DESCRIPTOR);
  CudnnDescriptor softmax(cudnn, kSoftmaxDescriptor);
  constexpr std::array kNames = {CUDNN_ATTR_OPERATION_SDPA_FWD_QDESC,
                                 CUDNN_ATTR_OPERATION_SDPA_FWD_KDESC,
                                 CUDNN_ATTR_OPERATION_SDPA_FWD_VDESC,
                                 CUDNN_ATTR_OPERATION_SDPA_FWD_ODESC,
                                 kSoftmaxStatistics,
                                 CUDNN_ATTR_OPERATION_SDPA_FWD_SCALEDESC,
                                 kSoftmaxInput,
                                 kSoftmaxOutput};
  for (size_t i = 0; i < operands.size(); ++i) {
    graph.tensors.push_back(LowerTensor(cudnn, operands[i], static_cast<int64_t>(i) + 1));
    const bool of_softmax = kNames[i] >= kSoftmaxInput;
    (of_softmax ? softmax : node).SetDescriptor(cudnn, kNames[i], graph.tensors.back());
  }
  softmax.Finalize(cudnn, "the softmax of one-node attention");
  node.SetDescriptor(cudnn, kSdpaSoftmax, softmax);
  node.SetDescriptor(cudnn, kSdpaSubgraph, inner.graph.back());
  node.Set(cudnn, kSdpaSubgraphInputId, CUDNN_TYPE_INT64, mask_id);
  node.Set(cudnn,
           kSdpaSubgraphOutputId,
           CUDNN_TYPE_INT64,
           mask_id + static_cast<int64_t>(attention.mask.tensors.size()) - 1);
  node.Finalize(cudnn, "one-node attention");
  graph.operations.push_back(std::move(node));
  FinishGraph(cudnn, target, graph);
  graph.parts.push_back(std::move(softmax));
  for (auto* list : {&inner.parts, &inner.tensors, &inner.operations, &inner.graph}) {
    Append(*list, graph.parts);
  }
  return graph;
}

std::vector<CudnnDescriptor> ProposedConfigurations(Cudnn& cudnn,
                                                    const CudnnTarget& target,
                                                    const CudnnDescriptor& graph,
                                                    cudnnBackendHeurMode_t mode) {
  std::vector<CudnnDescriptor> configurations;
  const CudnnDescriptor heuristic(cudnn, CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
  heuristic.SetDescriptor(cudnn, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph);
  heuristic.Set(cudnn, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, mode);
  if (target.device != nullptr) {
    heuristic.Set(
        cudnn, CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, CUDNN_TYPE_BACKEND_DESCRIPTOR, target.device);
  }
  heuristic.Finalize(cudnn, "the heuristic");
  if (!cudnn.ok()) {
    return configurations;
  }
  int64_t count = 0;
  const CudnnFunctions& f = cudnn.functions();
  cudnn.Check(f.get(heuristic.get(),
                    CUDNN_ATTR_ENGINEHEUR_RESULTS,
                    CUDNN_TYPE_BACKEND_DESCRIPTOR,
                    0,
                    &count,
                    nullptr),
              "the number of configurations");
  std::vector<cudnnBackendDescriptor_t> places;
  for (int64_t i = 0; cudnn.ok() && i < count; ++i) {
    configurations.emplace_back(cudnn, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
    places.push_back(configurations.back().get());
  }
  int64_t found = 0;
  if (cudnn.ok() && count > 0) {
    cudnn.Check(f.get(heuristic.get(),
                      CUDNN_ATTR_ENGINEHEUR_RESULTS,
                      CUDNN_TYPE_BACKEND_DESCRIPTOR,
                      count,
                      &found,
                      places.data()),
                "the configurations");
  }
  while (static_cast<int64_t>(configurations.size()) > found) {
    configurations.pop_back();
  }
  return configurations;
}

CudnnEngine EngineOf(Cudnn& cudnn, const CudnnDescriptor& configuration) {
  CudnnEngine engine;
  const CudnnDescriptor described(cudnn, CUDNN_BACKEND_ENGINE_DESCRIPTOR);
  if (!cudnn.ok()) {
    return engine;
  }
  const CudnnFunctions& f = cudnn.functions();
  cudnnBackendDescriptor_t place = described.get();
  int64_t count = 0;
  cudnn.Check(f.get(configuration.get(),
                    CUDNN_ATTR_ENGINECFG_ENGINE,
                    CUDNN_TYPE_BACKEND_DESCRIPTOR,
                    1,
                    &count,
                    &place),
              "the engine");
  cudnn.Check(f.get(described.get(),
                    CUDNN_ATTR_ENGINE_GLOBAL_INDEX,
                    CUDNN_TYPE_INT64,
                    1,
                    &count,
                    &engine.index),
              "the engine's index");
  std::array<cudnnBackendNumericalNote_t, CUDNN_NUMERICAL_NOTE_TYPE_COUNT> notes = {};
  int64_t noted = 0;
  cudnn.Check(f.get(described.get(),
                    CUDNN_ATTR_ENGINE_NUMERICAL_NOTE,
                    CUDNN_TYPE_NUMERICAL_NOTE,
                    static_cast<int64_t>(notes.size()),
                    &noted,
                    notes.data()),
              "the engine's notes");
  for (int64_t i = 0; i < noted && i < static_cast<int64_t>(notes.size()); ++i) {
    if (notes[static_cast<size_t>(i)] == CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC) {
      engine.deterministic = false;
    }
  }
  return engine;
}

CudnnDescriptor MakePlan(Cudnn& cudnn,
                         const CudnnTarget& target,
                         const CudnnDescriptor& configuration) {
  CudnnDescriptor plan(cudnn, CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
  plan.SetDescriptor(cudnn, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, configuration);
  if (target.device != nullptr) {
    plan.Set(
        cudnn, CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP, CUDNN_TYPE_BACKEND_DESCRIPTOR, target.device);
  }
  plan.Finalize(cudnn, "the plan");
  return plan;
}

int64_t WorkspaceBytes(Cudnn& cudnn, const CudnnDescriptor& plan) {
  int64_t bytes = 0;
  int64_t count = 0;
  if (cudnn.ok()) {
    cudnn.Check(cudnn.functions().get(plan.get(),
                                      CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE,
                                      CUDNN_TYPE_INT64,
                                      1,
                                      &count,
                                      &bytes),
                "the plan's workspace");
  }
  return bytes;
}

}  // namespace ravel::kernels::cuda
