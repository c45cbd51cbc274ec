#include "tests/kernels/cuda/cudnn/fake_cudnn.h"

#include <cstring>

#include "common/check.h"

namespace ravel::kernels::cuda::testing {
namespace {

FakeCudnn* current = nullptr;

FakeDescriptor* Of(cudnnBackendDescriptor_t descriptor) {
  return static_cast<FakeDescriptor*>(descriptor);
}

int64_t BytesOf(cudnnBackendAttributeType_t type) {
  switch (type) {
    case CUDNN_TYPE_BOOLEAN:
    case CUDNN_TYPE_CHAR:
      return 1;
    case CUDNN_TYPE_INT64:
    case CUDNN_TYPE_VOID_PTR:
    case CUDNN_TYPE_BACKEND_DESCRIPTOR:
    case CUDNN_TYPE_HANDLE:
      return 8;
    default:
      return 4;
  }
}

template <typename Value>
std::vector<Value> ValuesOf(const FakeDescriptor& from, cudnnBackendAttributeName_t name) {
  const auto found = from.attributes.find(name);
  if (found == from.attributes.end()) {
    return {};
  }
  std::vector<Value> values(found->second.size() / sizeof(Value));
  std::memcpy(values.data(), found->second.data(), found->second.size());
  return values;
}

const FakeDescriptor& DescriptorIn(const FakeDescriptor& from, cudnnBackendAttributeName_t name) {
  const auto descriptors = ValuesOf<cudnnBackendDescriptor_t>(from, name);
  CHECK_EQ(descriptors.size(), 1u);
  return *Of(descriptors[0]);
}

size_t Version() {
  return CUDNN_VERSION;
}
const char* ErrorText(cudnnStatus_t) {
  return "refused";
}
void LastError(char* message, size_t) {
  *message = '\0';
}
cudnnStatus_t Create(cudnnHandle_t* handle) {
  *handle = reinterpret_cast<cudnnHandle_t>(current);
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t Destroy(cudnnHandle_t) {
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t SetStream(cudnnHandle_t, cudaStream_t) {
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t Make(cudnnBackendDescriptorType_t type, cudnnBackendDescriptor_t* made) {
  if (type == CUDNN_BACKEND_OPERATION_SDPA_FWD_DESCRIPTOR && !current->knows_one_node) {
    return CUDNN_STATUS_NOT_SUPPORTED;
  }
  *made = new FakeDescriptor{.type = type, .attributes = {}};
  ++current->alive;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t Discard(cudnnBackendDescriptor_t descriptor) {
  delete Of(descriptor);
  --current->alive;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t Set(cudnnBackendDescriptor_t descriptor,
                  cudnnBackendAttributeName_t name,
                  cudnnBackendAttributeType_t type,
                  int64_t count,
                  const void* values) {
  if (descriptor == nullptr || Of(descriptor)->finalised) {
    return CUDNN_STATUS_BAD_PARAM;
  }
  const char* bytes = static_cast<const char*>(values);
  Of(descriptor)->attributes[name].assign(bytes, bytes + count * BytesOf(type));
  return CUDNN_STATUS_SUCCESS;
}

bool OneNode(const FakeDescriptor& graph) {
  const auto operations = ValuesOf<cudnnBackendDescriptor_t>(graph, CUDNN_ATTR_OPERATIONGRAPH_OPS);
  return operations.size() == 1 &&
         Of(operations[0])->type == CUDNN_BACKEND_OPERATION_SDPA_FWD_DESCRIPTOR;
}

const std::vector<FakeEngine>& EnginesFor(const FakeDescriptor& heuristic) {
  const FakeDescriptor& graph = DescriptorIn(heuristic, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH);
  const auto mode = ValuesOf<cudnnBackendHeurMode_t>(heuristic, CUDNN_ATTR_ENGINEHEUR_MODE).at(0);
  return (OneNode(graph) ? current->one_node : current->chain)[mode];
}

cudnnStatus_t GetEngines(const FakeDescriptor& heuristic,
                         int64_t wanted,
                         int64_t* count,
                         void* places) {
  const std::vector<FakeEngine>& engines = EnginesFor(heuristic);
  *count = static_cast<int64_t>(engines.size());
  for (int64_t i = 0; i < wanted && i < *count; ++i) {
    Of(static_cast<cudnnBackendDescriptor_t*>(places)[i])->engine =
        &engines[static_cast<size_t>(i)];
  }
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t Get(cudnnBackendDescriptor_t descriptor,
                  cudnnBackendAttributeName_t name,
                  cudnnBackendAttributeType_t,
                  int64_t wanted,
                  int64_t* count,
                  void* values) {
  const FakeDescriptor& from = *Of(descriptor);
  switch (name) {
    case CUDNN_ATTR_ENGINEHEUR_RESULTS:
      return GetEngines(from, wanted, count, values);
    case CUDNN_ATTR_ENGINECFG_ENGINE:
      Of(*static_cast<cudnnBackendDescriptor_t*>(values))->engine = from.engine;
      return CUDNN_STATUS_SUCCESS;
    case CUDNN_ATTR_ENGINE_GLOBAL_INDEX:
      *static_cast<int64_t*>(values) = from.engine->index;
      return CUDNN_STATUS_SUCCESS;
    case CUDNN_ATTR_ENGINE_NUMERICAL_NOTE: {
      auto* notes = static_cast<cudnnBackendNumericalNote_t*>(values);
      notes[0] = CUDNN_NUMERICAL_NOTE_TENSOR_CORE;
      notes[1] = CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC;
      *count = from.engine->deterministic ? 1 : 2;
      return CUDNN_STATUS_SUCCESS;
    }
    case CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE:
      *static_cast<int64_t*>(values) =
          DescriptorIn(from, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG).engine->workspace_bytes;
      return CUDNN_STATUS_SUCCESS;
    default:
      return CUDNN_STATUS_BAD_PARAM;
  }
}

cudnnStatus_t Finalize(cudnnBackendDescriptor_t descriptor) {
  FakeDescriptor& made = *Of(descriptor);
  made.finalised = true;
  if (made.type == CUDNN_BACKEND_TENSOR_DESCRIPTOR) {
    current->tensors.push_back(made);
  }
  if (made.type == CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR) {
    made.engine = DescriptorIn(made, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG).engine;
    return made.engine->finalises ? CUDNN_STATUS_SUCCESS : CUDNN_STATUS_NOT_SUPPORTED;
  }
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t Execute(cudnnHandle_t handle,
                      cudnnBackendDescriptor_t plan,
                      cudnnBackendDescriptor_t pack) {
  FakeRun run = {.handle = handle,
                 .engine = Of(plan)->engine->index,
                 .addresses = {},
                 .scalars = {},
                 .workspace = nullptr};
  const auto ids = ValuesOf<int64_t>(*Of(pack), CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS);
  const auto addresses = ValuesOf<void*>(*Of(pack), CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS);
  CHECK_EQ(ids.size(), addresses.size());
  for (size_t i = 0; i < ids.size(); ++i) {
    run.addresses[ids[i]] = addresses[i];
  }
  for (const FakeDescriptor& tensor : current->tensors) {
    const int64_t id = ValuesOf<int64_t>(tensor, CUDNN_ATTR_TENSOR_UNIQUE_ID).at(0);
    if (tensor.attributes.contains(CUDNN_ATTR_TENSOR_IS_BY_VALUE) && run.addresses.contains(id)) {
      std::memcpy(&run.scalars[id], run.addresses[id], sizeof(float));
    }
  }
  run.workspace = ValuesOf<void*>(*Of(pack), CUDNN_ATTR_VARIANT_PACK_WORKSPACE).at(0);
  current->runs.push_back(run);
  return CUDNN_STATUS_SUCCESS;
}

}  // namespace

FakeCudnn::FakeCudnn() {
  CHECK(current == nullptr);
  current = this;
  functions_ = {.version = Version,
                .error_text = ErrorText,
                .last_error = LastError,
                .create = Create,
                .destroy = Destroy,
                .set_stream = SetStream,
                .make = Make,
                .discard = Discard,
                .set = Set,
                .get = Get,
                .finalize = Finalize,
                .execute = Execute};
}

FakeCudnn::~FakeCudnn() {
  current = nullptr;
}

}  // namespace ravel::kernels::cuda::testing
