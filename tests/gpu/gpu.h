#pragma once

// The device that GPU tests share, or why there is none.

#include <cstdint>
#include <memory>
#include <string>

#include "kernels/cuda_host/cuda_device.h"

namespace ravel::kernels::testing {

struct Gpu {
  std::unique_ptr<CudaGpu> device;
  CudaMemory scratch;
  std::unique_ptr<CudaStream> stream;
  std::string missing;  // empty where there is a device
};

// Opened on first use: the library that RAVEL_CUDA_LIBRARY names, else that of this build; device
// 0.
Gpu& TheGpu();

// Device memory with a copy on the host. Operands of libraries lie here: their bulk copies are
// documented for device memory alone. Copies are ordered on the stream of TheGpu().
class Mirror {
 public:
  explicit Mirror(int64_t bytes);
  void* device() const { return device_.data(); }
  void* host() const { return host_.data(); }
  int64_t bytes() const { return device_.bytes(); }
  // Sets all bytes on both sides.
  void Fill(char byte) const;
  // Host to device, after what was issued before. The host's bytes stay until Receive or Finish.
  void Send(int64_t begin, int64_t bytes) const;
  void Send() const { Send(0, bytes()); }
  // Device to host; waits for it.
  void Receive(int64_t bytes) const;
  void Receive() const { Receive(bytes()); }

 private:
  CudaMemory host_;  // pinned
  CudaMemory device_;
};

// Of a test's inputs: the same ones in every run; others with
// --gtest_shuffle --gtest_random_seed=N, and others again in each round of --gtest_repeat.
uint64_t InputSeed();

}  // namespace ravel::kernels::testing
