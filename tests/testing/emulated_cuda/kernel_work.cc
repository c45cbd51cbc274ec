#include "tests/testing/emulated_cuda/kernel_work.h"

#include <limits>

#include "kernels/scalar/bfloat16.h"
#include "kernels/scalar/float16.h"

namespace ravel::kernels::cuda::emulated {
namespace {

constexpr uintptr_t kVectorBytes = 16;

bool OnVector(int64_t bytes) {
  return bytes % static_cast<int64_t>(kVectorBytes) == 0;
}

}  // namespace

DType InputType(int32_t variant) {
  return variant == kF32Scalar || variant == kF32Vector ? DType::kF32
         : variant >= kFp16Scalar                       ? DType::kF16
                                                        : DType::kBF16;
}

DType OutputType(int32_t variant) {
  return IsMixed(variant) ? DType::kF32 : InputType(variant);
}

bool HasVectors(int32_t variant) {
  return variant == kF32Vector || variant == kBf16Vector || variant == kMixedVector ||
         variant == kFp16Vector || variant == kFp16MixedVector;
}

bool IsMixed(int32_t variant) {
  return variant == kMixedScalar || variant == kMixedVector || variant == kFp16MixedScalar ||
         variant == kFp16MixedVector;
}

DType AttentionType(int32_t variant) {
  return variant < kAttentionHeads       ? DType::kF32
         : variant < 2 * kAttentionHeads ? DType::kBF16
                                         : DType::kF16;
}

TensorView Staging::View(const Operand& operand) {
  if (operand.data == nullptr) {
    return {};
  }
  if (operand.dtype == DType::kF32) {
    TensorView view = MatrixView(static_cast<float*>(operand.data), operand.rows, operand.columns);
    view.row_stride = operand.stride;
    return view;
  }
  std::vector<float>& copy = copies_.emplace_back(
      static_cast<size_t>(operand.rows * operand.columns), std::numeric_limits<float>::quiet_NaN());
  const TensorView view = MatrixView(copy.data(), operand.rows, operand.columns);
  for (int64_t row = 0; operand.kind != Access::Kind::kWrite && row < operand.rows; ++row) {
    const uint16_t* from = static_cast<const uint16_t*>(operand.data) + row * operand.stride;
    for (int64_t j = 0; j < operand.columns; ++j) {
      view.Row<float>(row)[j] =
          operand.dtype == DType::kF16 ? scalar::Fp16Value(from[j]) : scalar::Bf16Value(from[j]);
    }
  }
  if (operand.kind != Access::Kind::kRead) {
    results_.emplace_back(operand, copy.data());
  }
  return view;
}

void Staging::Finish() {
  for (const auto& [operand, copy] : results_) {
    for (int64_t row = 0; row < operand.rows; ++row) {
      uint16_t* to = static_cast<uint16_t*>(operand.data) + row * operand.stride;
      for (int64_t j = 0; j < operand.columns; ++j) {
        const float x = copy[row * operand.columns + j];
        to[j] = operand.dtype == DType::kF16 ? scalar::Fp16Nearest(x) : scalar::Bf16Nearest(x);
      }
    }
  }
}

Operand Operands::Read(const char* name, const void* data, const Shape& shape) {
  return AddVectors(Access::Kind::kRead, name, data, shape, InputType(launch_.variant));
}

Operand Operands::Write(const char* name, void* data, const Shape& shape) {
  return AddVectors(Access::Kind::kWrite, name, data, shape, OutputType(launch_.variant));
}

Operand Operands::Update(const char* name, void* data, const Shape& shape) {
  return AddVectors(Access::Kind::kUpdate, name, data, shape, OutputType(launch_.variant));
}

Operand Operands::AddVectors(
    Access::Kind kind, const char* name, const void* data, const Shape& shape, DType dtype) {
  const int64_t bytes = DTypeBytes(dtype);
  const bool fits = reinterpret_cast<uintptr_t>(data) % kVectorBytes == 0 &&
                    (shape.rows <= 1 || OnVector(shape.stride * bytes)) &&
                    OnVector(shape.columns * bytes);
  Require(data == nullptr || fits || !HasVectors(launch_.variant),
          std::string(name) + " does not fit accesses of 16 bytes");
  return Add(kind, name, data, shape, dtype);
}

Operand Operands::Add(
    Access::Kind kind, const char* name, const void* data, const Shape& shape, DType dtype) {
  if (data == nullptr) {
    return {};
  }
  const int64_t bytes = DTypeBytes(dtype);
  Require(reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(bytes) == 0,
          std::string(name) + kBetweenElements);
  accesses_.push_back({.name = name,
                       .kind = kind,
                       .data = data,
                       .rows = shape.rows,
                       .row_bytes = shape.columns * bytes,
                       .stride_bytes = shape.stride * bytes});
  return {.kind = kind,
          .data = const_cast<void*>(data),
          .dtype = dtype,
          .rows = shape.rows,
          .columns = shape.columns,
          .stride = shape.stride};
}

void Operands::Touch(Access::Kind kind, const char* name, const void* data, int64_t bytes) {
  if (data != nullptr) {
    accesses_.push_back({.name = name,
                         .kind = kind,
                         .data = data,
                         .rows = 1,
                         .row_bytes = bytes,
                         .stride_bytes = bytes});
  }
}

void Operands::Require(bool holds, const std::string& problem) {
  if (!holds && problem_.empty()) {
    problem_ = launch_.name + ": " + problem;
  }
}

void Operands::RequireBlock(uint32_t threads) {
  Require(
      launch_.block == threads,
      "a block of " + std::to_string(launch_.block) + " threads, not " + std::to_string(threads));
}

void Operands::RequireGrid(size_t dimension, int64_t blocks) {
  Require(launch_.grid[dimension] == blocks,
          "a grid of " + std::to_string(launch_.grid[dimension]) + " blocks, not " +
              std::to_string(blocks));
}

PlannedLaunch Operands::Plan(std::function<void()> run) const {
  return {.problem = problem_,
          .work = {.name = launch_.name, .accesses = accesses_, .run = std::move(run)}};
}

}  // namespace ravel::kernels::cuda::emulated
