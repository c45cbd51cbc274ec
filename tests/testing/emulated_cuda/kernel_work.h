#pragma once

// A launch of a kernel or of a library's product or attention: its operands are declared and
// checked, and it becomes work of a stream. What stands for a library computes with the CPU's ops:
// narrow operands are widened before, and results rounded to nearest even after it, once.

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "common/tensor_view.h"
#include "kernels/cuda/cuda_abi.h"
#include "kernels/cuda/kernel_params.h"
#include "tests/testing/emulated_cuda/work_order.h"

namespace ravel::kernels::cuda::emulated {

struct KernelLaunch {
  std::string name;  // for messages
  int32_t variant = 0;
  std::array<uint32_t, 3> grid = {};
  uint32_t block = 0;
  uint32_t shared_bytes = 0;
};

// As `Variant` has it: "mixed" reads bf16 or fp16 and writes fp32.
DType InputType(int32_t variant);
DType OutputType(int32_t variant);
bool HasVectors(int32_t variant);
bool IsMixed(int32_t variant);
// Our own attention kernels: for fp32, then for bf16 and fp16, so many limits of a head.
inline constexpr int32_t kAttentionHeads = 4;
DType AttentionType(int32_t variant);

// A matrix in an argument; absent where the address is null.
struct Operand {
  Access::Kind kind = Access::Kind::kRead;
  void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t stride = 0;
};

// fp32 views of operands while the work runs: the memory itself, or a copy of bf16 or fp16.
class Staging {
 public:
  // Once per operand.
  TensorView View(const Operand& operand);
  // Copies of results go back to their operands.
  void Finish();

 private:
  std::deque<std::vector<float>> copies_;
  std::vector<std::pair<Operand, const float*>> results_;
};

// A launch's work, or why it is refused.
struct PlannedLaunch {
  std::string problem;
  EmulatedWork work;
};

struct Shape {
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t stride = 0;
};

class Operands {
 public:
  explicit Operands(const KernelLaunch& launch) : launch_(launch) {}

  // Matrices that the kernel reads or writes by vectors where its variant has them.
  Operand Read(const char* name, const void* data, const Shape& shape);
  Operand Write(const char* name, void* data, const Shape& shape);
  Operand Update(const char* name, void* data, const Shape& shape);
  // Matrices read or written one element at a time.
  Operand Add(
      Access::Kind kind, const char* name, const void* data, const Shape& shape, DType dtype);
  // Elements side by side, read or written one at a time; null is absent.
  template <typename T>
  void Array(Access::Kind kind, const char* name, const T* data, int64_t count) {
    Require(reinterpret_cast<uintptr_t>(data) % alignof(T) == 0,
            std::string(name) + kBetweenElements);
    Touch(kind, name, data, count * int64_t{sizeof(T)});
  }
  // Memory that the work reaches by itself; null is absent.
  void Touch(Access::Kind kind, const char* name, const void* data, int64_t bytes);

  // The first requirement that fails is the problem of the launch.
  void Require(bool holds, const std::string& problem);
  void RequireBlock(uint32_t threads);
  // Kernels without a loop over this dimension.
  void RequireGrid(size_t dimension, int64_t blocks);

  const KernelLaunch& launch() const { return launch_; }
  PlannedLaunch Plan(std::function<void()> run) const;

 private:
  static constexpr char kBetweenElements[] = " lies between elements";

  Operand AddVectors(
      Access::Kind kind, const char* name, const void* data, const Shape& shape, DType dtype);

  const KernelLaunch& launch_;
  std::string problem_;
  std::vector<Access> accesses_;
};

}  // namespace ravel::kernels::cuda::emulated
