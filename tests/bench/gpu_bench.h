#pragma once

// What the GPU cases of this folder share: the device, memory with random values, verification
// against the CPU, and time by events with a cold cache. A failure of the device ends the program
// with its reason.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "common/tensor_view.h"
#include "kernels/cuda_host/cuda_device.h"

namespace ravel::bench {

// One measured operation. `prepare` runs before each repeat, outside the measured interval; it may
// be empty.
struct Operation {
  std::function<void()> prepare;
  std::function<void()> run;
  double bytes = 0;  // that must be read and written
  double flops = 0;
  std::string verified;  // how the result was checked; an operation that was not is never timed
};

// Used from one thread.
class GpuBench {
 public:
  // Unavailable or NotFound, with the reason, where there is no usable device. The library is the
  // one that RAVEL_CUDA_LIBRARY names, else libravel_cuda.so beside the program.
  // Small cases take milliseconds on an emulated device and show that a case works; their speed
  // says nothing.
  enum class Sizes { kFull, kSmall };
  static absl::StatusOr<std::unique_ptr<GpuBench>> Open(Sizes sizes);
  Sizes sizes() const { return sizes_; }
  // A size of a case: `full`, or 1/64 of it.
  int64_t Size(int64_t full) const { return sizes_ == Sizes::kFull ? full : full / 64; }

  kernels::CudaStream& stream() { return *stream_; }
  const kernels::CudaDevice& device() const { return gpu_->properties(); }

  // Device memory, kept until Clear(). Values are normal, of the given deviation; different on
  // every call.
  TensorView RandomMatrix(int64_t rows, int64_t columns, DType dtype, float deviation = 1.0f);
  TensorView RandomVector(int64_t n, DType dtype, float deviation = 1.0f);
  // Ids below `limit`.
  TensorView RandomIds(int64_t n, int64_t limit);
  TensorView Matrix(int64_t rows, int64_t columns, DType dtype);
  TensorView Vector(int64_t n, DType dtype);
  // Frees what the functions above gave, after the stream is done.
  void Clear();
  void Copy(const TensorView& to, const TensorView& from);  // whole and contiguous, of equal bytes

  // Values of `count` elements from element `first` on, as fp32; waits for the stream.
  std::vector<float> Values(const TensorView& view, int64_t first, int64_t count);
  std::vector<float> Values(const TensorView& view) { return Values(view, 0, view.elements()); }
  std::vector<int32_t> Ids(const TensorView& view);
  // The memory of those elements as it is.
  std::vector<char> Bytes(const TensorView& view, int64_t first, int64_t count);

  // Microseconds of each repeat: three to warm up, then at least ten, and half a second in sum.
  // Before each the cache is filled with other lines, none of them still to be written.
  std::vector<double> Time(const Operation& operation);
  // Bytes read and written per second by a copy within device memory, the median of its repeats.
  // Measured on the first call.
  double CopyRate();

 private:
  GpuBench() = default;
  void* Allocate(int64_t bytes);
  void ColdCache();

  std::unique_ptr<kernels::CudaGpu> gpu_;
  kernels::CudaMemory scratch_;
  kernels::CudaMemory flush_;
  kernels::CudaMemory clean_;  // is read and not written
  kernels::CudaMemory clean_sums_;
  kernels::CudaStream::Measuring measuring_;
  std::unique_ptr<kernels::CudaStream> stream_;
  std::vector<kernels::CudaMemory> memory_;
  Sizes sizes_ = Sizes::kFull;
  uint64_t seed_ = 0;
  double copy_rate_ = 0;
};

// The largest difference over the largest magnitude of `expected`; infinite where anything is not
// finite.
double RelativeError(const std::vector<float>& actual, const std::vector<float>& expected);
double Median(std::vector<double> samples);

// Ends the program with exit code 1 and the text.
[[noreturn]] void Fail(const std::string& text);

}  // namespace ravel::bench
