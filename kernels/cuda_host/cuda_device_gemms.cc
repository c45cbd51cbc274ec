// Chooses the cuBLASLt algorithm of each gemm. A gemm is identified by a text key of everything
// that may change the choice; a key seen before is answered from the table. Otherwise the library's
// candidates are timed: one warm-up and five runs each from a flushed cache, of which the median
// counts; a candidate clearly slower after its first run is dropped. Without measuring, the
// library's first proposal is taken. No algorithm at all means our own kernel.

#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <vector>

#include <absl/strings/str_cat.h>

#include "common/check.h"
#include "common/logging.h"
#include "common/status.h"
#include "kernels/cuda_host/cuda_device.h"

namespace ravel::kernels {

using cuda::GemmChoice;
using cuda::RavelCudaAlgorithm;
using cuda::RavelCudaGemm;
using cuda::RavelCudaGemmBuffers;

namespace {

// Timed runs of an algorithm, after one that warms up; their median counts.
constexpr size_t kRuns = 5;
// An algorithm whose first timed run takes so many times the best median gets no further ones.
constexpr double kClearlySlower = 1.25;
// The smallest time that the file's format can show; a measured choice must not read as 0.
constexpr double kLeastMicroseconds = 0.001;

}  // namespace

void CudaStream::Rehearse(GemmRequests* requests) {
  CHECK_MSG(!capturing_ && log_ == nullptr, "a rehearsal comes before captures");
  rehearsed_ = requests;
}

RavelCudaGemmBuffers CudaStream::BuffersOf(const GemmRequest& request) const {
  CHECK_MSG(scratch_ != nullptr, "a gemm on a stream for copies");
  return {.a = request.a,
          .b = request.b,
          .c = request.c,
          .workspace = scratch_,
          .workspace_bytes = uint64_t{cuda::kScratchBytes},
          .scale_a = request.scale_a,
          .scale_b = request.scale_b};
}

bool CudaStream::RunGemm(const RavelCudaGemm& gemm, const RavelCudaGemmBuffers& operands) {
  if (!gpu_.no_cublas().empty()) {
    return false;
  }
  GemmRequest request = {.gemm = gemm,
                         .a = operands.a,
                         .b = operands.b,
                         .c = operands.c,
                         .scale_a = operands.scale_a,
                         .scale_b = operands.scale_b};
  request.gemm.multiprocessors = gemm_multiprocessors_;
  const std::string key = cuda::GemmKey(request.gemm);
  if (rehearsed_ != nullptr) {
    rehearsed_->emplace(key, request);
    return true;
  }
  std::optional<GemmChoice> choice = gpu_.algorithms().Find(key);
  const bool proposed = choice.has_value() && !choice->none && choice->microseconds == 0.0;
  if (!choice.has_value() || (measuring_ != nullptr && proposed)) {
    choice = ChooseGemm(request, measuring_);
    gpu_.algorithms().Set(key, *choice);
  }
  if (choice->none) {
    return false;
  }
  SubmitGemm(request, choice->algorithm, key);
  return true;
}

GemmChoice CudaStream::ChooseGemm(const GemmRequest& request, const Measuring* measuring) {
  std::array<RavelCudaAlgorithm, kMaxCandidates> candidates;
  int32_t count = 0;
  Require(functions().gemm_candidates(
              gpu_.index(),
              &request.gemm,
              BuffersOf(request).workspace_bytes,
              candidates.data(),
              measuring != nullptr ? std::min(measuring->most_candidates, kMaxCandidates) : 1,
              &count),
          cuda::GemmKey(request.gemm));
  GemmChoice best = {.algorithm = {}, .microseconds = 0.0, .none = true};
  if (measuring == nullptr && count > 0) {
    best = {.algorithm = candidates[0]};
  }
  double least = std::numeric_limits<double>::infinity();
  int left_out = 0;
  for (int32_t i = 0; measuring != nullptr && i < count; ++i) {
    const RavelCudaAlgorithm& algorithm = candidates[static_cast<size_t>(i)];
    const absl::StatusOr<double> microseconds =
        MeasureMicroseconds(request, algorithm, *measuring, least);
    if (!microseconds.ok() && ++left_out == 1) {
      log::Info(
          absl::StrCat("of ", count, " algorithms not all run: ", microseconds.status().message()));
    }
    if (microseconds.ok() && *microseconds < least) {
      least = *microseconds;
      best = {.algorithm = algorithm, .microseconds = std::max(least, kLeastMicroseconds)};
    }
  }
  if (best.none) {
    log::Warning(absl::StrCat("gemm ",
                              cuda::GemmKey(request.gemm),
                              ": our own kernel, because cuBLASLt has no algorithm"));
  }
  return best;
}

absl::Status CudaStream::TryGemm(const GemmRequest& request, const GemmChoice& choice) {
  const RavelCudaGemmBuffers buffers = BuffersOf(request);
  const std::string key = cuda::GemmKey(request.gemm);
  if (choice.none) {
    return absl::OkStatus();
  }
  if (choice.algorithm.workspace_bytes > buffers.workspace_bytes) {
    return absl::FailedPreconditionError(
        absl::StrCat(key, ": an algorithm that needs more workspace than streams have"));
  }
  RETURN_IF_ERROR(gpu_.library().ToStatus(
      functions().gemm_run(handle_, &request.gemm, &choice.algorithm, &buffers), key));
  return Synchronize();
}

absl::StatusOr<double> CudaStream::MeasureMicroseconds(const GemmRequest& request,
                                                       const RavelCudaAlgorithm& algorithm,
                                                       const Measuring& measuring,
                                                       double best) {
  absl::StatusOr<CudaEvent> begin = gpu_.MakeEvent(CudaGpu::Timing::kOn);
  absl::StatusOr<CudaEvent> end = gpu_.MakeEvent(CudaGpu::Timing::kOn);
  CHECK_MSG(begin.ok() && end.ok(), "events for measuring");
  const RavelCudaGemmBuffers buffers = BuffersOf(request);
  std::vector<double> samples;
  for (size_t run = 0; run <= kRuns; ++run) {
    for (const std::span<std::byte> part : measuring.flush) {
      FillZero(part.data(), static_cast<int64_t>(part.size()));
    }
    Record(*begin);
    const absl::Status issued =
        gpu_.library().ToStatus(functions().gemm_run(handle_, &request.gemm, &algorithm, &buffers),
                                cuda::GemmKey(request.gemm));
    Record(*end);
    if (const absl::Status done = end->Synchronize(); !done.ok()) {
      gpu_.Fail(done);  // of the device, not of the choice
    }
    RETURN_IF_ERROR(issued);
    const absl::StatusOr<float> milliseconds = end->MillisecondsSince(*begin);
    CHECK_MSG(milliseconds.ok(), "time between events");
    if (run > 0) {
      samples.push_back(1e3 * static_cast<double>(*milliseconds));
    }
    if (run == 1 && samples.front() > kClearlySlower * best) {
      return samples.front();
    }
  }
  std::sort(samples.begin(), samples.end());
  return samples[kRuns / 2];
}

}  // namespace ravel::kernels
