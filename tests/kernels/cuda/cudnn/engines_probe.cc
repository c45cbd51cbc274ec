// Plans attention through the installed cuDNN for a described device of compute capability 9.0 or
// 10.0 ("90", "100"); one line for each case. A process of its own, because the driver is chosen by
// LD_LIBRARY_PATH.

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>

#include <dlfcn.h>

#include "common/dtype.h"
#include "kernels/cuda/cudnn_attention.h"

namespace ravel::kernels::cuda::testing {
namespace {

struct Case {
  const char* model;
  int64_t sequences;
  int64_t tokens;
  int64_t query_heads;
  int64_t kv_heads;
  int64_t head_size;
  bool deterministic;  // that backward, too; each plan is compiled, which takes its time
  bool on_blackwell;
  DType type = DType::kBF16;
};
constexpr Case kCases[] = {{"8B", 1, 8192, 32, 8, 128, true, true},
                           {"fp16", 1, 8192, 32, 8, 128, true, false, DType::kF16},
                           {"3B", 2, 4096, 24, 8, 128, false, false},
                           {"1.5B", 4, 2048, 12, 2, 128, false, false},
                           {"124M", 64, 1024, 12, 12, 64, false, true},
                           {"odd", 3, 200, 4, 2, 72, true, false}};

// Queries, keys and values side by side in one row, as modules have them.
RavelCudaAttention DescriptionOf(const Case& c, bool backward, bool deterministic) {
  RavelCudaAttention a = {};
  const int64_t row = (c.query_heads + 2 * c.kv_heads) * c.head_size;
  a.sequences = c.sequences;
  a.sequence_tokens = c.tokens;
  a.query_heads = c.query_heads;
  a.kv_heads = c.kv_heads;
  a.head_size = c.head_size;
  a.q_stride = a.k_stride = a.v_stride = row;
  a.out_stride = c.query_heads * c.head_size;
  if (backward) {
    a.dout_stride = a.out_stride;
    a.dq_stride = a.dk_stride = a.dv_stride = row;
  }
  a.scale = 0.125f;
  a.type = static_cast<int32_t>(c.type);
  a.backward = backward ? 1 : 0;
  a.deterministic = deterministic ? 1 : 0;
  return a;
}

// A device as cuDNN writes one down; the numbers are those of an H100 and of a B200.
std::string DeviceText(bool blackwell) {
  const std::string multiprocessors = blackwell ? "148" : "132";
  return std::string("{\"deviceVer\":") + (blackwell ? "1000" : "900") + ",\"deviceName\":\"" +
         (blackwell ? "NVIDIA B200" : "NVIDIA H100 80GB HBM3") +
         "\",\"multiProcessorCount\":" + multiprocessors +
         ",\"driverVer\":13000,\"cudaDeviceId\":0,\"maxGridSize\":[2147483647,65535,65535],"
         "\"maxBlockSize\":[1024,1024,64],\"regsPerBlock\":65536,\"warpSize\":32,"
         "\"maxSharedMemoryPerBlock\":49152,\"maxSharedMemoryPerBlockOptin\":232448,"
         "\"reservedSharedMemoryPerBlock\":1024,\"maxRegistersPerSM\":65536,"
         "\"maxCtasPerSM\":32,\"maxThreadsPerBlock\":1024,\"maxThreadsPerSM\":2048,"
         "\"pciDeviceId\":0,\"isTccDriver\":0,\"supportCoopLaunch\":1,"
         "\"totalGlobalMem\":85000000000,\"smClockRateKHz\":1980000,"
         "\"memClockRateKHz\":2619000,\"l2CacheSize\":52428800}";
}

bool OnFakeDriver() {
  void* driver = dlopen("libcuda.so.1", RTLD_NOW);
  return driver != nullptr && dlsym(driver, "ravel_fake_driver") != nullptr;
}

void Report(const Case& c,
            const char* pass,
            const CudnnLibrary& library,
            const CudnnTarget& target,
            const RavelCudaAttention& attention) {
  std::string why;
  const std::unique_ptr<CudnnAttentionPlan> plan =
      PlanAttention(library.functions, library.version, target, attention, why);
  if (plan == nullptr) {
    std::printf("%s %s engine -1 unified 0 workspace 0 %s\n", c.model, pass, why.c_str());
    return;
  }
  std::printf("%s %s engine %lld unified %d workspace %lld\n",
              c.model,
              pass,
              static_cast<long long>(plan->engine),
              plan->unified ? 1 : 0,
              static_cast<long long>(plan->workspace_bytes));
}

int Run(bool blackwell) {
  if (!OnFakeDriver()) {
    std::printf("not the fake driver\n");
    return 1;
  }
  const CudnnLibrary& library = TheCudnn();
  if (!library.missing.empty()) {
    std::printf("missing %s\n", library.missing.c_str());
    return 0;
  }
  std::printf("version %llu\n", static_cast<unsigned long long>(library.version));
  Cudnn cudnn(library.functions);
  const CudnnDescriptor device(cudnn, CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR);
  const std::string text = DeviceText(blackwell);
  device.SetRaw(cudnn,
                CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION,
                CUDNN_TYPE_CHAR,
                static_cast<int64_t>(text.size() + 1),
                text.c_str());
  device.Finalize(cudnn, "a described device");
  if (!cudnn.ok()) {
    std::printf("%s\n", cudnn.failure().c_str());
    return 1;
  }
  const CudnnTarget target = {.handle = nullptr, .device = device.get()};
  for (const Case& c : kCases) {
    if (blackwell && !c.on_blackwell) {
      continue;
    }
    Report(c, "forward", library, target, DescriptionOf(c, false, true));
    Report(c, "backward", library, target, DescriptionOf(c, true, false));
    if (c.deterministic) {
      Report(c, "deterministic", library, target, DescriptionOf(c, true, true));
    }
  }
  std::printf("done\n");
  return 0;
}

}  // namespace
}  // namespace ravel::kernels::cuda::testing

int main(int, char** arguments) {
  return ravel::kernels::cuda::testing::Run(std::string(arguments[1]) == "100");
}
