// Chooses the cuBLASLt algorithm of each gemm. A gemm is identified by a text key of everything
// that may change the choice; a key seen before is answered from the table. A gemm of several parts
// has the key of one of them, so that the choice does not depend on how many a rank has. Otherwise
// the library's candidates are timed: one warm-up and five runs each from a flushed cache, of which
// the median counts; a candidate clearly slower after its first run is dropped. Without measuring,
// the library's first proposal is taken. No algorithm at all means our own kernel.

#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <optional>
#include <vector>

#include <absl/strings/str_cat.h>

#include "common/check.h"
#include "common/dtype.h"
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

using Request = CudaStream::GemmRequest;

// The largest power of two, at most 256, that divides the address and a row's bytes.
int32_t AlignmentOf(const void* data, int64_t row_bytes) {
  const uint64_t both = reinterpret_cast<uintptr_t>(data) | static_cast<uint64_t>(row_bytes) | 256;
  return int32_t{1} << std::countr_zero(both);
}

// Bytes of so many elements of an operand; codes of u8 lie two to a byte.
int64_t OperandBytes(int32_t type, int64_t elements) {
  const auto dtype = static_cast<DType>(type);
  return dtype == DType::kU8 ? elements / 2 : elements * DTypeBytes(dtype);
}

// c [row, row + part.rows) x [column, column + part.columns), or what there is of it.
Request PartAt(const Request& whole, int64_t row, int64_t column) {
  Request part = whole;
  RavelCudaGemm& gemm = part.gemm;
  const int32_t b_type = gemm.b_type != 0 ? gemm.b_type : gemm.input_type;
  const int64_t c_bytes = DTypeBytes(static_cast<DType>(gemm.output_type));
  gemm.m = std::min(whole.part.rows, gemm.m - row);
  gemm.n = std::min(whole.part.columns, gemm.n - column);
  part.a = static_cast<const char*>(whole.a) +
           OperandBytes(gemm.input_type, gemm.transpose_a != 0 ? row : row * gemm.a_stride);
  part.b = static_cast<const char*>(whole.b) +
           OperandBytes(b_type, gemm.transpose_b != 0 ? column * gemm.b_stride : column);
  part.c = static_cast<char*>(whole.c) + (row * gemm.c_stride + column) * c_bytes;
  gemm.a_align = AlignmentOf(part.a, OperandBytes(gemm.input_type, gemm.a_stride));
  gemm.b_align = AlignmentOf(part.b, OperandBytes(b_type, gemm.b_stride));
  gemm.c_align = AlignmentOf(part.c, gemm.c_stride * c_bytes);
  return part;
}

std::vector<Request> PartsOf(const Request& whole) {
  std::vector<Request> parts;
  for (int64_t row = 0; row < whole.gemm.m; row += whole.part.rows) {
    for (int64_t column = 0; column < whole.gemm.n; column += whole.part.columns) {
      parts.push_back(PartAt(whole, row, column));
    }
  }
  return parts;
}

}  // namespace

std::string CudaStream::ChoiceKey(const GemmRequest& request) {
  return cuda::GemmKey(cuda::GemmOfPart(request.gemm, request.part));
}

bool CudaStream::CanBeCut(const GemmRequest& request) {
  return static_cast<ScaleForm>(request.gemm.a_form) == ScaleForm::kTensor &&
         static_cast<ScaleForm>(request.gemm.b_form) == ScaleForm::kTensor;
}

std::string CudaStream::WholeKey(const GemmRequest& request) {
  const std::string key = cuda::GemmKey(request.gemm);
  return request.part.present()
             ? absl::StrCat(key, "-p", request.part.rows, ",", request.part.columns)
             : key;
}

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
          .scale_b = request.scale_b,
          .factors = request.factors};
}

bool CudaStream::RunGemm(const RavelCudaGemm& gemm,
                         const RavelCudaGemmBuffers& operands,
                         const GemmPart& part) {
  if (!gpu_.no_cublas().empty()) {
    return false;
  }
  GemmRequest request = {.gemm = gemm,
                         .a = operands.a,
                         .b = operands.b,
                         .c = operands.c,
                         .scale_a = operands.scale_a,
                         .scale_b = operands.scale_b,
                         .factors = operands.factors,
                         .part = part};
  request.gemm.multiprocessors = gemm_multiprocessors_;
  if (rehearsed_ != nullptr) {
    rehearsed_->emplace(WholeKey(request), request);
    return true;
  }
  const std::string key = ChoiceKey(request);
  std::optional<GemmChoice> choice = gpu_.algorithms().Find(key);
  const bool proposed = choice.has_value() && !choice->none && choice->microseconds == 0.0;
  if (!choice.has_value() || (measuring_ != nullptr && proposed)) {
    choice = ChooseGemm(request, measuring_);
    gpu_.algorithms().Set(key, *choice);
  }
  if (choice->none) {
    return false;
  }
  if (request.whole() && gpu_.algorithms().ComputesInParts(WholeKey(request))) {
    for (const GemmRequest& one : PartsOf(request)) {
      SubmitGemm(one, choice->algorithm, key);
    }
    return true;
  }
  SubmitGemm(request, choice->algorithm, key);
  return true;
}

GemmChoice CudaStream::ChooseGemm(const GemmRequest& request, const Measuring* measuring) {
  std::array<RavelCudaAlgorithm, kMaxCandidates> candidates;
  int32_t count = 0;
  const RavelCudaGemm chosen_for = cuda::GemmOfPart(request.gemm, request.part);
  const GemmRequest measured = request.whole() ? PartAt(request, 0, 0) : request;
  Require(functions().gemm_candidates(
              gpu_.index(),
              &chosen_for,
              BuffersOf(request).workspace_bytes,
              candidates.data(),
              measuring != nullptr ? std::min(measuring->most_candidates, kMaxCandidates) : 1,
              &count),
          ChoiceKey(request));
  GemmChoice best = {.algorithm = {}, .microseconds = 0.0, .none = true};
  if (measuring == nullptr && count > 0) {
    best = {.algorithm = candidates[0]};
  }
  double least = std::numeric_limits<double>::infinity();
  int left_out = 0;
  for (int32_t i = 0; measuring != nullptr && i < count; ++i) {
    const RavelCudaAlgorithm& algorithm = candidates[static_cast<size_t>(i)];
    const absl::StatusOr<double> microseconds =
        MeasureMicroseconds(measured, algorithm, *measuring, least);
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
    log::Warning(absl::StrCat(
        "gemm ", ChoiceKey(request), ": our own kernel, because cuBLASLt has no algorithm"));
  }
  return best;
}

absl::Status CudaStream::TryGemm(const GemmRequest& request,
                                 const GemmChoice& choice,
                                 GemmForm form) {
  const std::string key = WholeKey(request);
  if (choice.none) {
    return absl::OkStatus();
  }
  if (choice.algorithm.workspace_bytes > BuffersOf(request).workspace_bytes) {
    return absl::FailedPreconditionError(
        absl::StrCat(key, ": an algorithm that needs more workspace than streams have"));
  }
  CHECK(form == GemmForm::kAtOnce || CanBeCut(request));
  for (const GemmRequest& one :
       form == GemmForm::kInParts ? PartsOf(request) : std::vector<GemmRequest>{request}) {
    const RavelCudaGemmBuffers buffers = BuffersOf(one);
    RETURN_IF_ERROR(gpu_.library().ToStatus(
        functions().gemm_run(handle_, &one.gemm, &choice.algorithm, &buffers), key));
  }
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
