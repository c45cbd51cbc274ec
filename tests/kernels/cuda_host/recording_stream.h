#pragma once

// A CUDA stream without a device: it keeps what the host half of the ops asks for. Launches are
// checked as a device would check them: blocks of whole warps, grids and shared memory within
// limits, and in a build with CUDA a kernel that libravel_cuda.so has.

#include <array>
#include <cstring>
#include <vector>

#include "common/check.h"
#include "kernels/cuda_host/launch_stream.h"

namespace ravel::kernels::cuda::testing {

class RecordingStream final : public LaunchStream {
 public:
  struct Record {
    LaunchShape shape;
    std::vector<char> params;
  };
  struct GemmRequest {
    RavelCudaGemm gemm;
    const void* a;
    const void* b;
    void* c;
  };
  struct Attention {
    RavelCudaAttention attention;
    RavelCudaAttentionBuffers buffers;
  };
  struct Copy {
    void* to;
    const void* from;
    int64_t bytes;
  };

  int multiprocessors() const override { return 132; }
  void RunKernel(const LaunchShape& shape, const void* params, uint64_t param_bytes) override;
  void CopyMemory(void* to, const void* from, int64_t bytes) override {
    copies.push_back({to, from, bytes});
  }
  void FillZero(void* to, int64_t bytes) override { fills.push_back({to, nullptr, bytes}); }
  bool RunGemm(const RavelCudaGemm& gemm,
               const RavelCudaGemmBuffers& operands,
               const GemmPart&) override {
    if (has_cublas) {
      gemms.push_back({gemm, operands.a, operands.b, operands.c});
    }
    return has_cublas;
  }
  bool RunAttention(const RavelCudaAttention& attention,
                    const RavelCudaAttentionBuffers& buffers) override {
    if (has_cudnn) {
      attentions.push_back({attention, buffers});
    }
    return has_cudnn;
  }
  int64_t PrepareAttention(const RavelCudaAttention& attention, uint64_t) override {
    prepared.push_back(attention);
    return 1000 * attention.sequences + attention.backward;
  }
  void* Scratch(int64_t bytes) override {
    CHECK_LE(bytes, kScratchBytes);
    scratch_bytes.push_back(bytes);
    return scratch.data();
  }
  uint64_t ReadWord(const void*) override { return 77; }

  template <typename Params>
  Params ParamsOf(size_t launch) const {
    Params params;
    CHECK_EQ(launches.at(launch).params.size(), sizeof(Params));
    std::memcpy(static_cast<void*>(&params), launches[launch].params.data(), sizeof(Params));
    return params;
  }

  bool has_cublas = true;
  bool has_cudnn = false;
  std::vector<Record> launches;
  std::vector<GemmRequest> gemms;
  std::vector<Attention> attentions;
  std::vector<RavelCudaAttention> prepared;
  std::vector<Copy> copies;
  std::vector<Copy> fills;
  std::vector<int64_t> scratch_bytes;
  alignas(256) std::array<char, 256> scratch = {};
};

}  // namespace ravel::kernels::cuda::testing
