#include "tests/bench/gpu_bench.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>

#include <absl/strings/str_cat.h>

#include "common/status.h"
#include "kernels/cast.h"
#include "kernels/philox.h"
#include "kernels/row_sum.h"

namespace ravel::bench {
namespace {

constexpr int64_t kFlushBytes = int64_t{256} << 20;  // several times the second-level cache
constexpr int64_t kCopyBytes = int64_t{1} << 30;
constexpr size_t kWarmUps = 3;
constexpr size_t kFewestRepeats = 10;
constexpr size_t kMostRepeats = 2000;
constexpr double kShortestMicroseconds = 0.5e6;

template <typename T>
T OrFail(absl::StatusOr<T> value) {
  if (!value.ok()) {
    Fail(std::string(value.status().message()));
  }
  return *std::move(value);
}

void OrFail(const absl::Status& status) {
  if (!status.ok()) {
    Fail(std::string(status.message()));
  }
}

TensorView ViewOf(void* data, DType dtype, int64_t rows, int64_t columns) {
  return {.data = data, .dtype = dtype, .rank = 2, .size = {rows, columns}, .row_stride = columns};
}

TensorView Flat(const TensorView& matrix) {
  return {.data = matrix.data,
          .dtype = matrix.dtype,
          .rank = 1,
          .size = {matrix.elements()},
          .row_stride = 1};
}

}  // namespace

void Fail(const std::string& text) {
  std::fprintf(stderr, "%s\n", text.c_str());
  std::exit(1);
}

double Median(std::vector<double> samples) {
  std::sort(samples.begin(), samples.end());
  const size_t half = samples.size() / 2;
  return samples.size() % 2 == 1 ? samples[half] : (samples[half - 1] + samples[half]) / 2;
}

double RelativeError(const std::vector<float>& actual, const std::vector<float>& expected) {
  if (actual.size() != expected.size()) {
    return std::numeric_limits<double>::infinity();
  }
  double largest = 0;
  double difference = 0;
  for (size_t i = 0; i < actual.size(); ++i) {
    if (!std::isfinite(actual[i]) || !std::isfinite(expected[i])) {
      return std::numeric_limits<double>::infinity();
    }
    largest = std::max(largest, std::fabs(double{expected[i]}));
    difference = std::max(difference, std::fabs(double{actual[i]} - double{expected[i]}));
  }
  return largest == 0 ? difference : difference / largest;
}

absl::StatusOr<std::unique_ptr<GpuBench>> GpuBench::Open(Sizes sizes) {
  ASSIGN_OR_RETURN(const kernels::CudaLibrary library,
                   kernels::CudaLibrary::Open(kernels::DefaultCudaLibraryPath()));
  std::unique_ptr<GpuBench> bench(new GpuBench);
  bench->sizes_ = sizes;
  ASSIGN_OR_RETURN(bench->gpu_, kernels::CudaGpu::Open(library, 0));
  ASSIGN_OR_RETURN(bench->scratch_, bench->gpu_->AllocateDevice(kernels::cuda::kScratchBytes));
  ASSIGN_OR_RETURN(bench->flush_, bench->gpu_->AllocateDevice(bench->Size(kFlushBytes)));
  ASSIGN_OR_RETURN(bench->clean_, bench->gpu_->AllocateDevice(bench->Size(kFlushBytes)));
  ASSIGN_OR_RETURN(bench->clean_sums_,
                   bench->gpu_->AllocateDevice(bench->Size(kFlushBytes) / 1024));
  ASSIGN_OR_RETURN(
      bench->stream_,
      bench->gpu_->MakeStream(kernels::CudaGpu::Priority::kNormal, bench->scratch_.data()));
  if (!bench->gpu_->no_cublas().empty()) {
    return absl::FailedPreconditionError(bench->gpu_->no_cublas());
  }
  bench->measuring_.flush = {std::span(static_cast<std::byte*>(bench->flush_.data()),
                                       static_cast<size_t>(bench->flush_.bytes()))};
  bench->stream_->MeasureGemms(&bench->measuring_);
  bench->stream_->FillZero(bench->clean_.data(), bench->clean_.bytes());
  bench->seed_ = std::random_device()();
  return bench;
}

void* GpuBench::Allocate(int64_t bytes) {
  memory_.push_back(OrFail(gpu_->AllocateDevice(bytes)));
  return memory_.back().data();
}

TensorView GpuBench::Matrix(int64_t rows, int64_t columns, DType dtype) {
  return ViewOf(Allocate(rows * columns * DTypeBytes(dtype)), dtype, rows, columns);
}

TensorView GpuBench::Vector(int64_t n, DType dtype) {
  return Flat(Matrix(1, n, dtype));
}

TensorView GpuBench::RandomMatrix(int64_t rows, int64_t columns, DType dtype, float deviation) {
  const TensorView matrix = Matrix(rows, columns, dtype);
  ++seed_;
  if (dtype == DType::kF32) {
    kernels::InitNormal(stream(),
                        {.out = Flat(matrix), .seed = seed_, .standard_deviation = deviation});
    return matrix;
  }
  // In pieces, so that a large matrix needs little memory beside it.
  constexpr int64_t kPiece = int64_t{16} << 20;
  kernels::CudaMemory piece = OrFail(gpu_->AllocateDevice(kPiece * int64_t{sizeof(float)}));
  for (int64_t first = 0; first < matrix.elements(); first += kPiece) {
    const int64_t count = std::min(kPiece, matrix.elements() - first);
    const TensorView values = VectorView(static_cast<float*>(piece.data()), count);
    kernels::InitNormal(
        stream(),
        {.out = values, .seed = seed_, .first_index = first, .standard_deviation = deviation});
    TensorView to = Flat(matrix);
    to.data = matrix.As<uint16_t>() + first;
    to.size[0] = count;
    kernels::Cast(stream(), {.from = values, .to = to});
  }
  OrFail(stream().Synchronize());
  return matrix;
}

TensorView GpuBench::RandomVector(int64_t n, DType dtype, float deviation) {
  return Flat(RandomMatrix(1, n, dtype, deviation));
}

TensorView GpuBench::RandomIds(int64_t n, int64_t limit) {
  const TensorView ids = Vector(n, DType::kI32);
  std::mt19937_64 random(++seed_);
  std::uniform_int_distribution<int32_t> uniform(0, static_cast<int32_t>(limit - 1));
  const kernels::CudaMemory host = OrFail(gpu_->AllocatePinned(n * int64_t{sizeof(int32_t)}));
  std::generate_n(static_cast<int32_t*>(host.data()), n, [&] { return uniform(random); });
  stream().CopyMemory(ids.data, host.data(), host.bytes());
  OrFail(stream().Synchronize());
  return ids;
}

void GpuBench::Clear() {
  OrFail(stream().Synchronize());
  memory_.clear();
}

void GpuBench::Copy(const TensorView& to, const TensorView& from) {
  stream().CopyMemory(to.data, from.data, from.elements() * DTypeBytes(from.dtype));
}

std::vector<char> GpuBench::Bytes(const TensorView& view, int64_t first, int64_t count) {
  const int64_t size = DTypeBytes(view.dtype);
  const kernels::CudaMemory host = OrFail(gpu_->AllocatePinned(count * size));
  stream().CopyMemory(host.data(), view.As<char>() + first * size, count * size);
  OrFail(stream().Synchronize());
  const char* const begin = static_cast<const char*>(host.data());
  return {begin, begin + count * size};
}

std::vector<float> GpuBench::Values(const TensorView& view, int64_t first, int64_t count) {
  const std::vector<char> bytes = Bytes(view, first, count);
  std::vector<float> values(static_cast<size_t>(count));
  if (view.dtype == DType::kF32) {
    std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
  }
  CHECK_MSG(view.dtype == DType::kBF16, "values are fp32 or bf16");
  for (size_t i = 0; i < values.size(); ++i) {
    uint16_t bits = 0;
    std::memcpy(&bits, bytes.data() + i * sizeof(bits), sizeof(bits));
    values[i] = Bf16ToFloat(bits);
  }
  return values;
}

std::vector<int32_t> GpuBench::Ids(const TensorView& view) {
  const std::vector<char> bytes = Bytes(view, 0, view.elements());
  std::vector<int32_t> ids(static_cast<size_t>(view.elements()));
  std::memcpy(ids.data(), bytes.data(), bytes.size());
  return ids;
}

// Overwrites the cache, then reads as much again: lines that were still to be written would be
// written in the time that is measured.
void GpuBench::ColdCache() {
  stream().FillZero(flush_.data(), flush_.bytes());
  const int64_t columns = 1024;
  const int64_t rows = clean_.bytes() / int64_t{sizeof(float)} / columns;
  kernels::RowSumSquares(stream(),
                         {.x = ViewOf(clean_.data(), DType::kF32, rows, columns),
                          .sums = VectorView(static_cast<float*>(clean_sums_.data()), rows)});
}

std::vector<double> GpuBench::Time(const Operation& operation) {
  CHECK_MSG(!operation.verified.empty(), "what was not verified is not timed");
  kernels::CudaEvent begin = OrFail(gpu_->MakeEvent(kernels::CudaGpu::Timing::kOn));
  kernels::CudaEvent end = OrFail(gpu_->MakeEvent(kernels::CudaGpu::Timing::kOn));
  std::vector<double> samples;
  double sum = 0;
  const size_t most = sizes_ == Sizes::kFull ? kMostRepeats : kFewestRepeats;
  for (size_t repeat = 0;
       samples.size() < most && (samples.size() < kFewestRepeats || sum < kShortestMicroseconds);
       ++repeat) {
    if (operation.prepare) {
      operation.prepare();
    }
    ColdCache();
    stream().Record(begin);
    operation.run();
    stream().Record(end);
    OrFail(end.Synchronize());
    if (repeat >= kWarmUps) {
      samples.push_back(1e3 * double{OrFail(end.MillisecondsSince(begin))});
      sum += samples.back();
    }
  }
  return samples;
}

double GpuBench::CopyRate() {
  if (copy_rate_ == 0) {
    const int64_t bytes = Size(kCopyBytes);
    const int64_t piece = Size(kFlushBytes);
    const kernels::CudaMemory from = OrFail(gpu_->AllocateDevice(bytes));
    const kernels::CudaMemory to = OrFail(gpu_->AllocateDevice(bytes));
    for (int64_t first = 0; first < bytes; first += piece) {
      float* const values = reinterpret_cast<float*>(static_cast<char*>(from.data()) + first);
      kernels::InitNormal(stream(),
                          {.out = VectorView(values, piece / int64_t{sizeof(float)}),
                           .seed = seed_,
                           .first_index = first});
    }
    const std::vector<double> samples =
        Time({.prepare = {},
              .run = [&] { stream().CopyMemory(to.data(), from.data(), bytes); },
              .verified = "a copy by the runtime"});
    copy_rate_ = 2.0 * static_cast<double>(bytes) / (Median(samples) * 1e-6);
  }
  return copy_rate_;
}

}  // namespace ravel::bench
