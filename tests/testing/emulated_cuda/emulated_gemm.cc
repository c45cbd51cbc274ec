#include "tests/testing/emulated_cuda/emulated_gemm.h"

#include <algorithm>
#include <cstring>

#include "kernels/cpu/reference_ops.h"

namespace ravel::kernels::cuda::emulated {
namespace {

constexpr uint64_t kWorkspaceBytes = 1 << 16;
constexpr uint64_t kMagic = 0x656D756C61746564;  // "emulated"
constexpr uint64_t kRefused = ~uint64_t{0};  // of an algorithm that is proposed and does not run

DType TypeOf(int32_t dtype) {
  return static_cast<DType>(dtype);
}

bool IsFloat(int32_t dtype) {
  return TypeOf(dtype) == DType::kF32 || TypeOf(dtype) == DType::kBF16;
}

Shape ShapeOf(int64_t rows, int64_t columns, int64_t stride, bool transposed) {
  return transposed ? Shape{columns, rows, stride} : Shape{rows, columns, stride};
}

// What the description claims of an operand's address and stride.
bool Aligned(const void* data, const Shape& shape, DType dtype, int32_t align) {
  return align > 0 && reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(align) == 0 &&
         (shape.rows <= 1 || shape.stride * DTypeBytes(dtype) % align == 0);
}

}  // namespace

bool GemmIsOffered(const RavelCudaGemm& gemm) {
  const auto fits = [](const Shape& shape) { return shape.stride >= shape.columns; };
  return gemm.m > 0 && gemm.n > 0 && gemm.k > 0 && IsFloat(gemm.input_type) &&
         IsFloat(gemm.output_type) &&
         (TypeOf(gemm.output_type) == DType::kF32 || TypeOf(gemm.input_type) == DType::kBF16) &&
         fits(ShapeOf(gemm.m, gemm.k, gemm.a_stride, gemm.transpose_a != 0)) &&
         fits(ShapeOf(gemm.k, gemm.n, gemm.b_stride, gemm.transpose_b != 0)) &&
         gemm.c_stride >= gemm.n;
}

int32_t GemmAlgorithms(uint64_t workspace_bytes, RavelCudaAlgorithm* algorithms, int32_t limit) {
  int32_t count = 0;
  for (const uint64_t workspace : {kWorkspaceBytes, uint64_t{0}}) {
    if (count < limit && workspace <= workspace_bytes) {
      algorithms[count] = {};
      algorithms[count].words[0] = kMagic;
      algorithms[count].words[1] = workspace;
      algorithms[count].workspace_bytes = workspace;
      ++count;
    }
  }
  if (count > 1 && count < limit) {
    algorithms[count] = {};
    algorithms[count].words[0] = kMagic;
    algorithms[count].words[1] = kRefused;
    ++count;
  }
  return count;
}

PlannedLaunch PlanCublasGemm(const RavelCudaGemm& gemm,
                             const RavelCudaAlgorithm& algorithm,
                             const RavelCudaGemmBuffers& buffers) {
  const KernelLaunch launch = {.name = "gemm", .variant = 0};
  Operands operands(launch);
  operands.Require(GemmIsOffered(gemm), "sizes, strides or types that no algorithm takes");
  operands.Require(algorithm.words[1] != kRefused, "an algorithm that does not run here");
  operands.Require(algorithm.words[0] == kMagic && algorithm.words[1] == algorithm.workspace_bytes,
                   "an algorithm of another library");
  operands.Require(algorithm.workspace_bytes <= buffers.workspace_bytes, "too little workspace");
  const DType input = TypeOf(gemm.input_type);
  const DType output = TypeOf(gemm.output_type);
  const bool flip_a = gemm.transpose_a != 0;
  const bool flip_b = gemm.transpose_b != 0;
  const bool accumulate = gemm.accumulate != 0;
  const Shape a_shape = ShapeOf(gemm.m, gemm.k, gemm.a_stride, flip_a);
  const Shape b_shape = ShapeOf(gemm.k, gemm.n, gemm.b_stride, flip_b);
  const Shape c_shape = {gemm.m, gemm.n, gemm.c_stride};
  operands.Require(Aligned(buffers.a, a_shape, input, gemm.a_align), "a is not aligned as said");
  operands.Require(Aligned(buffers.b, b_shape, input, gemm.b_align), "b is not aligned as said");
  operands.Require(Aligned(buffers.c, c_shape, output, gemm.c_align), "c is not aligned as said");
  const Operand a = operands.Add(Access::Kind::kRead, "a", buffers.a, a_shape, input);
  const Operand b = operands.Add(Access::Kind::kRead, "b", buffers.b, b_shape, input);
  const Operand c = operands.Add(
      accumulate ? Access::Kind::kUpdate : Access::Kind::kWrite, "c", buffers.c, c_shape, output);
  const uint64_t workspace_bytes = algorithm.workspace_bytes;
  void* workspace = workspace_bytes > 0 ? buffers.workspace : nullptr;
  operands.Require(workspace != nullptr || workspace_bytes == 0, "no workspace");
  operands.Touch(
      Access::Kind::kWrite, "workspace", workspace, static_cast<int64_t>(workspace_bytes));
  return operands.Plan([=] {
    Staging on;
    if (workspace != nullptr) {
      std::memset(workspace, 0xFF, workspace_bytes);
    }
    cpu::Gemm({.a = on.View(a),
               .transpose_a = flip_a ? Transpose::kYes : Transpose::kNo,
               .b = on.View(b),
               .transpose_b = flip_b ? Transpose::kYes : Transpose::kNo,
               .c = on.View(c),
               .output = accumulate ? Output::kAccumulate : Output::kOverwrite});
    on.Finish();
  });
}

}  // namespace ravel::kernels::cuda::emulated
