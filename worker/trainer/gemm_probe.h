#pragma once

// What a path of gemms of codes gives on this device, before anything is trained: one small gemm of
// each kind, compared with a reference on the host.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "common/dtype.h"
#include "common/model/gemm_paths.h"
#include "common/status.h"
#include "kernels/cuda_host/cuda_device.h"
#include "worker/shard/host_access.h"

namespace ravel::trainer {

// c [kProbeRows, kProbeColumns] (=|+=) scale_a * scale_b * a b^T, of a [.., kProbeInner] and b.
inline constexpr int64_t kProbeRows = 16;
inline constexpr int64_t kProbeColumns = 32;
inline constexpr int64_t kProbeInner = 64;
struct ProbeCase {
  const char* name;  // "weight gradient"
  DType a;
  DType b;
  DType c;
  bool accumulates;
  bool fast;
};
// Those of a path; none where it has no gemms of codes.
std::vector<ProbeCase> ProbeCases(plan::GemmPath path, plan::FastAccumulation fast);

struct ProbeOperands {
  std::vector<uint8_t> a;
  std::vector<uint8_t> b;
  std::vector<float> c;  // before
  float scale_a = 0;
  float scale_b = 0;
};
ProbeOperands OperandsOf(const ProbeCase& probe);

// An error names the gemm, the first element that is further from the reference than its sums may
// be, and both values.
absl::Status CheckProbe(const ProbeCase& probe,
                        const ProbeOperands& operands,
                        std::span<const float> result);

// Runs them in `room`, memory of the device that nobody uses yet and that is zero afterwards. OK at
// once where the path has no gemms of codes.
inline constexpr int64_t kProbeBytes = 8192;
absl::Status ProbeGemms(plan::GemmPath path,
                        plan::FastAccumulation fast,
                        kernels::CudaStream& stream,
                        shard::HostAccess& memory,
                        std::span<std::byte> room);

}  // namespace ravel::trainer
