#include "tests/testing/device_code/device_code.h"

#include <array>
#include <utility>

#include "common/mutex.h"
#include "kernels/cuda/kernel_table.h"
#include "tests/testing/device_code/block_runner.h"

namespace ravel::kernels::cuda::simt {
namespace {

// A kernel may use so much dynamic shared memory unasked.
constexpr uint32_t kSharedUnasked = 48 * 1024;

// An argument of so many bytes. Every calling convention passes a structure of more than 16 bytes
// by its size and alignment alone, so that a kernel takes this in place of its own.
template <uint64_t kBytes>
struct alignas(8) Argument {
  std::array<uint8_t, kBytes> bytes;
};
constexpr uint64_t kLeastWords = 3;
constexpr uint64_t kMostWords = 128;

template <uint64_t kBytes>
void CallKernel(const void* function, const void* params) {
  reinterpret_cast<void (*)(Argument<kBytes>)>(const_cast<void*>(function))(
      *static_cast<const Argument<kBytes>*>(params));
}

using Caller = void (*)(const void* function, const void* params);

template <uint64_t... kWords>
constexpr auto MakeCallers(std::integer_sequence<uint64_t, kWords...>) {
  return std::array<Caller, sizeof...(kWords)>{CallKernel<(kLeastWords + kWords) * 8>...};
}
constexpr auto kCallers =
    MakeCallers(std::make_integer_sequence<uint64_t, kMostWords - kLeastWords + 1>());

}  // namespace

bool HasKernel(int32_t kernel, uint64_t param_bytes) {
  const KernelEntry* entry = FindKernel(kernel);
  return entry != nullptr && entry->param_bytes == param_bytes;
}

std::string LaunchProblem(const RavelCudaLaunch& launch) {
  if (launch.shared_bytes > kSharedUnasked &&
      static_cast<int64_t>(launch.shared_bytes) > FindKernel(launch.kernel)->dynamic_shared_bytes) {
    return "more dynamic shared memory than the kernel asks for";
  }
  const uint64_t words = launch.param_bytes / 8;
  return launch.param_bytes % 8 == 0 && words >= kLeastWords && words <= kMostWords
             ? ""
             : "an argument of a size that is not foreseen";
}

void RunLaunch(const RavelCudaLaunch& launch) {
  // Shared memory and the indices of threads are variables of the process.
  static Mutex& one_at_a_time = *new Mutex;
  static uint32_t launches = 0;
  const KernelCall call = {.caller = kCallers[launch.param_bytes / 8 - kLeastWords],
                           .function = FindKernel(launch.kernel)->function,
                           .params = launch.params};
  const MutexLock lock(one_at_a_time);
  RunBlocks(launch, static_cast<TurnOrder>(launches++ % 3), call);
}

}  // namespace ravel::kernels::cuda::simt
