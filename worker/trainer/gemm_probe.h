#pragma once

// What a path of gemms of codes gives on this device, before anything is trained: one small gemm of
// each kind, compared with a reference on the host.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "common/dtype.h"
#include "common/gemm_scales.h"
#include "common/model/gemm_paths.h"
#include "common/status.h"
#include "kernels/cuda_host/cuda_device.h"
#include "worker/shard/host_access.h"

namespace ravel::trainer {

// c [rows, columns] (=|+=) a b^T, of a [rows, inner] and b [columns, inner], each with its scales.
// Codes of u8 are E2M1, two to a byte.
struct ProbeCase {
  const char* name;  // "weight gradient"
  DType a;
  DType b;
  DType c;
  bool accumulates;
  bool fast;
  ScaleForm form_a = ScaleForm::kTensor;
  ScaleForm form_b = ScaleForm::kTensor;
  int64_t rows = 16;
  int64_t columns = 32;
  int64_t inner = 64;
};
// Those of a path; none where it has no gemms of codes.
std::vector<ProbeCase> ProbeCases(plan::GemmPath path, plan::FastAccumulation fast);

struct ProbeOperands {
  std::vector<uint8_t> a;
  std::vector<uint8_t> b;
  std::vector<float> c;        // before
  std::vector<float> scale_a;  // [rows, blocks], by row and block of codes, whatever the form
  std::vector<float> scale_b;
  float whole_a = 1;  // of packed codes: a scale beside those of blocks
  float whole_b = 1;
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
inline constexpr int64_t kBlockProbeBytes = 163840;
constexpr int64_t ProbeBytes(plan::GemmPath path) {
  return plan::ReadsBlockScales(path) ? kBlockProbeBytes : kProbeBytes;
}
absl::Status ProbeGemms(plan::GemmPath path,
                        plan::FastAccumulation fast,
                        kernels::CudaStream& stream,
                        shard::HostAccess& memory,
                        std::span<std::byte> room);

}  // namespace ravel::trainer
