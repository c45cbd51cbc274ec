#include "tests/gpu/gpu.h"

#include <cstdlib>
#include <cstring>

#include <gtest/gtest.h>

#include "common/check.h"
#include "common/status.h"

namespace ravel::kernels::testing {
namespace {

absl::Status Open(Gpu& gpu) {
  const char* named = std::getenv("RAVEL_CUDA_LIBRARY");
  ASSIGN_OR_RETURN(const CudaLibrary library,
                   CudaLibrary::Open(named != nullptr ? named : RAVEL_BUILT_CUDA_LIBRARY));
  ASSIGN_OR_RETURN(gpu.device, CudaGpu::Open(library, 0));
  ASSIGN_OR_RETURN(gpu.scratch, gpu.device->AllocateDevice(cuda::kScratchBytes));
  ASSIGN_OR_RETURN(gpu.stream,
                   gpu.device->MakeStream(CudaGpu::Priority::kNormal, gpu.scratch.data()));
  return absl::OkStatus();
}

}  // namespace

Gpu& TheGpu() {
  static Gpu& gpu = []() -> Gpu& {
    Gpu& opened = *new Gpu;  // the driver may be gone before static objects are destroyed
    const absl::Status status = Open(opened);
    if (!status.ok()) {
      opened.missing = status.ToString();
    }
    return opened;
  }();
  return gpu;
}

Mirror::Mirror(int64_t bytes)
    : host_(*TheGpu().device->AllocatePinned(bytes)),
      device_(*TheGpu().device->AllocateDevice(bytes)) {}

void Mirror::Fill(char byte) const {
  Receive(0);  // what was sent before has been read
  std::memset(host(), byte, static_cast<size_t>(bytes()));
  Send();
}

void Mirror::Send(int64_t begin, int64_t bytes) const {
  TheGpu().stream->CopyMemory(
      static_cast<char*>(device()) + begin, static_cast<char*>(host()) + begin, bytes);
}

void Mirror::Receive(int64_t bytes) const {
  if (bytes > 0) {
    TheGpu().stream->CopyMemory(host(), device(), bytes);
  }
  const absl::Status done = TheGpu().stream->Synchronize();
  CHECK_MSG(done.ok(), std::string(done.message()).c_str());
}

uint64_t InputSeed() {
  // Zero without --gtest_shuffle, whose seeds are below 100,000: inputs of one seed use the next
  // few too.
  const int round = ::testing::UnitTest::GetInstance()->random_seed();
  return 1 + static_cast<uint64_t>(round) * 1000;
}

}  // namespace ravel::kernels::testing
