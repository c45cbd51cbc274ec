// A libcublasLt that computes on the host what its descriptors say, in column-major order as the
// real one does, and refuses of fp8 operands what that refuses on Hopper: other layouts than A
// transposed and B not, sizes and leading dimensions that are no multiples of 16, E5M2 twice.
// Scales lie as the library's documentation has them (FP8 block scaling: vectors of 128 are M-major
// or N-major, squares K-major with columns at multiples of 4; vectors of 16 and 32 in tiles of
// 128 x 4). Of two E2M1 in a byte the first is in the low half; their leading dimensions count
// elements and are multiples of 32.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include <cublasLt.h>

#include "kernels/scalar/bfloat16.h"
#include "kernels/scalar/float16.h"
#include "kernels/scalar/float4.h"
#include "kernels/scalar/float8.h"

namespace {

using ravel::kernels::scalar::E4M3;
using ravel::kernels::scalar::E5M2;

struct Matmul {
  int32_t transpose_a = CUBLAS_OP_N;
  int32_t transpose_b = CUBLAS_OP_N;
  int32_t multiprocessors = 0;
  int8_t fast = 0;
  int32_t pointer_mode = CUBLASLT_POINTER_MODE_HOST;
  const void* scale_a = nullptr;
  const void* scale_b = nullptr;
  int32_t mode_a = CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
  int32_t mode_b = CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
};
struct Layout {
  cudaDataType type;
  int64_t rows;
  int64_t columns;
  int64_t stride;
};
struct Preference {
  int unused;
};

Matmul& Of(cublasLtMatmulDesc_t handle) {
  return *reinterpret_cast<Matmul*>(handle);
}
const Layout& Of(cublasLtMatrixLayout_t handle) {
  return *reinterpret_cast<const Layout*>(handle);
}

bool IsFp8(cudaDataType type) {
  return type == CUDA_R_8F_E4M3 || type == CUDA_R_8F_E5M2;
}

bool IsFp4(cudaDataType type) {
  return type == CUDA_R_4F_E2M1;
}

int64_t BytesOf(cudaDataType type) {
  return IsFp8(type) ? 1 : type == CUDA_R_16BF || type == CUDA_R_16F ? 2 : 4;
}

bool Whole(const Layout& layout) {
  return layout.rows % 16 == 0 && layout.columns % 16 == 0 && layout.stride % 16 == 0;
}

constexpr int32_t kScalar = CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
constexpr int32_t kVec16 = CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3;
constexpr int32_t kVec32 = CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0;
constexpr int32_t kVec128 = CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F;
constexpr int32_t kSquares = CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;

// Modes of A and B, and what both then are. Fast sums are not for blocks.
bool SupportedModes(const Matmul& matmul, const Layout& a, const Layout& b) {
  const auto are = [&](int32_t of_a, int32_t of_b) {
    return matmul.mode_a == of_a && matmul.mode_b == of_b;
  };
  if (are(kScalar, kScalar)) {
    return true;
  }
  return a.type == CUDA_R_8F_E4M3 && b.type == CUDA_R_8F_E4M3 && matmul.fast == 0 &&
         (are(kVec32, kVec32) || are(kVec128, kVec128) || are(kVec128, kSquares) ||
          are(kSquares, kVec128));
}

bool Supported(const Matmul& matmul, const Layout& a, const Layout& b, const Layout& d) {
  const bool turned_a = matmul.transpose_a == CUBLAS_OP_T;
  const bool turned_b = matmul.transpose_b == CUBLAS_OP_T;
  const int64_t k = turned_a ? a.rows : a.columns;
  if ((turned_b ? b.columns : b.rows) != k || (turned_a ? a.columns : a.rows) != d.rows ||
      (turned_b ? b.rows : b.columns) != d.columns) {
    return false;
  }
  if (IsFp4(a.type) || IsFp4(b.type)) {
    return a.type == b.type && matmul.mode_a == kVec16 && matmul.mode_b == kVec16 &&
           matmul.fast == 0 && turned_a && !turned_b && k % 32 == 0 && a.stride % 32 == 0 &&
           b.stride % 32 == 0 && Whole(d) && (d.type == CUDA_R_16BF || d.type == CUDA_R_32F);
  }
  if (!IsFp8(a.type) && !IsFp8(b.type)) {
    return a.type == b.type && matmul.scale_a == nullptr && matmul.scale_b == nullptr;
  }
  return IsFp8(a.type) && IsFp8(b.type) && (a.type == CUDA_R_8F_E4M3 || b.type == CUDA_R_8F_E4M3) &&
         SupportedModes(matmul, a, b) && turned_a && !turned_b && Whole(a) && Whole(b) &&
         Whole(d) && (d.type == CUDA_R_16BF || d.type == CUDA_R_32F);
}

float ValueAt(const void* data, cudaDataType type, int64_t index) {
  switch (type) {
    case CUDA_R_4F_E2M1: {
      const uint32_t byte = static_cast<const uint8_t*>(data)[index / 2];
      return ravel::kernels::scalar::E2M1Value(index % 2 == 0 ? byte & 0xFu : byte >> 4);
    }
    case CUDA_R_8F_E4M3:
      return E4M3::ValueOfCode(static_cast<const uint8_t*>(data)[index]);
    case CUDA_R_8F_E5M2:
      return E5M2::ValueOfCode(static_cast<const uint8_t*>(data)[index]);
    case CUDA_R_16F:
      return ravel::kernels::scalar::Fp16Value(static_cast<const uint16_t*>(data)[index]);
    case CUDA_R_16BF:
      return ravel::kernels::scalar::Bf16Value(static_cast<const uint16_t*>(data)[index]);
    default:
      return static_cast<const float*>(data)[index];
  }
}

// Element (row, column) of op(matrix).
float ElementOf(
    const void* data, const Layout& layout, int32_t transpose, int64_t row, int64_t column) {
  return ValueAt(
      data,
      layout.type,
      transpose == CUBLAS_OP_T ? row * layout.stride + column : column * layout.stride + row);
}

// The byte of an element's scale in tiles of 128 columns by 4 vectors.
uint8_t TileByte(const void* scales, int64_t vector, int64_t k, int64_t column, int64_t i) {
  const int64_t outer = column % 128;
  const int64_t inner = i / vector % 4;
  const int64_t sf_inner_dim = ((k + vector - 1) / vector + 3) / 4 * 4;
  const int64_t block = (i / vector / 4 * 4 + column / 128 * sf_inner_dim) * 128;
  return static_cast<const uint8_t*>(scales)[block + (outer % 32) * 16 + (outer / 32) * 4 + inner];
}

// The scale of element `i` along k of column `column` of a stored matrix: M or N of them.
float BlockScale(
    int32_t mode, const void* scales, int64_t columns, int64_t k, int64_t column, int64_t i) {
  const auto* floats = static_cast<const float*>(scales);
  switch (mode) {
    case kVec128:
      return floats[columns * (i / 128) + column];
    case kSquares: {
      const int64_t l = (k + 127) / 128;
      const int64_t l4 = l + (4 - l % 4) % 4;
      return floats[column / 128 * l4 + i / 128];
    }
    case kVec16:
      return E4M3::ValueOfCode(TileByte(scales, 16, k, column, i));
    case kVec32:
      return std::ldexp(1.0f, TileByte(scales, 32, k, column, i) - 127);
    default:
      return 1.0f;
  }
}

float WholeScale(int32_t mode, const void* scale) {
  return mode == kScalar && scale != nullptr ? *static_cast<const float*>(scale) : 1.0f;
}

int64_t last_fast = -1;
int64_t last_pointer_mode = -1;

}  // namespace

extern "C" {

// What the last product that ran was told of its sums.
int64_t FakeCublasLtLastFast() {
  return last_fast;
}

// Where it was told that its factors lie.
int64_t FakeCublasLtLastPointerMode() {
  return last_pointer_mode;
}

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  *handle = reinterpret_cast<cublasLtHandle_t>(new int(0));
  return CUBLAS_STATUS_SUCCESS;
}
size_t cublasLtGetVersion() {
  return 130100;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* made,
                                        cublasComputeType_t compute,
                                        cudaDataType_t scale) {
  *made = reinterpret_cast<cublasLtMatmulDesc_t>(new Matmul);
  return compute == CUBLAS_COMPUTE_32F && scale == CUDA_R_32F ? CUBLAS_STATUS_SUCCESS
                                                              : CUBLAS_STATUS_INVALID_VALUE;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t handle) {
  delete &Of(handle);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t handle,
                                              cublasLtMatmulDescAttributes_t attribute,
                                              const void* value,
                                              size_t bytes) {
  Matmul& matmul = Of(handle);
  const auto set = [&](auto& to) {
    if (bytes != sizeof(to)) {
      return CUBLAS_STATUS_INVALID_VALUE;
    }
    std::memcpy(&to, value, bytes);
    return CUBLAS_STATUS_SUCCESS;
  };
  switch (attribute) {
    case CUBLASLT_MATMUL_DESC_TRANSA:
      return set(matmul.transpose_a);
    case CUBLASLT_MATMUL_DESC_TRANSB:
      return set(matmul.transpose_b);
    case CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET:
      return set(matmul.multiprocessors);
    case CUBLASLT_MATMUL_DESC_POINTER_MODE:
      return set(matmul.pointer_mode);
    case CUBLASLT_MATMUL_DESC_FAST_ACCUM:
      return set(matmul.fast);
    case CUBLASLT_MATMUL_DESC_A_SCALE_POINTER:
      return set(matmul.scale_a);
    case CUBLASLT_MATMUL_DESC_B_SCALE_POINTER:
      return set(matmul.scale_b);
    case CUBLASLT_MATMUL_DESC_A_SCALE_MODE:
      return set(matmul.mode_a);
    case CUBLASLT_MATMUL_DESC_B_SCALE_MODE:
      return set(matmul.mode_b);
    default:
      return CUBLAS_STATUS_INVALID_VALUE;
  }
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* made,
                                          cudaDataType type,
                                          uint64_t rows,
                                          uint64_t columns,
                                          int64_t stride) {
  *made = reinterpret_cast<cublasLtMatrixLayout_t>(
      new Layout{type, static_cast<int64_t>(rows), static_cast<int64_t>(columns), stride});
  return stride >= static_cast<int64_t>(rows) ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t handle) {
  delete &Of(handle);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* made) {
  *made = reinterpret_cast<cublasLtMatmulPreference_t>(new Preference{0});
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t handle) {
  delete reinterpret_cast<Preference*>(handle);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t,
                                                    cublasLtMatmulPreferenceAttributes_t,
                                                    const void*,
                                                    size_t) {
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t,
                                              cublasLtMatmulDesc_t matmul,
                                              cublasLtMatrixLayout_t a,
                                              cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t,
                                              cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t,
                                              int limit,
                                              cublasLtMatmulHeuristicResult_t* results,
                                              int* found) {
  *found = 0;
  if (!Supported(Of(matmul), Of(a), Of(b), Of(d))) {
    return CUBLAS_STATUS_NOT_SUPPORTED;
  }
  if (limit > 0) {
    results[0] = {};
    results[0].state = CUBLAS_STATUS_SUCCESS;
    *found = 1;
  }
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t,
                              cublasLtMatmulDesc_t handle,
                              const void* alpha,
                              const void* a,
                              cublasLtMatrixLayout_t a_layout,
                              const void* b,
                              cublasLtMatrixLayout_t b_layout,
                              const void* beta,
                              const void* c,
                              cublasLtMatrixLayout_t,
                              void* d,
                              cublasLtMatrixLayout_t d_layout,
                              const cublasLtMatmulAlgo_t*,
                              void*,
                              size_t,
                              cudaStream_t) {
  const Matmul& matmul = Of(handle);
  const Layout& of_a = Of(a_layout);
  const Layout& of_b = Of(b_layout);
  const Layout& of_d = Of(d_layout);
  if (!Supported(matmul, of_a, of_b, of_d)) {
    return CUBLAS_STATUS_NOT_SUPPORTED;
  }
  last_fast = matmul.fast;
  last_pointer_mode = matmul.pointer_mode;
  const float scale = *static_cast<const float*>(alpha) *
                      WholeScale(matmul.mode_a, matmul.scale_a) *
                      WholeScale(matmul.mode_b, matmul.scale_b);
  const float kept = *static_cast<const float*>(beta);
  const int64_t k = matmul.transpose_a == CUBLAS_OP_T ? of_a.rows : of_a.columns;
  for (int64_t column = 0; column < of_d.columns; ++column) {
    for (int64_t row = 0; row < of_d.rows; ++row) {
      float sum = 0;
      for (int64_t i = 0; i < k; ++i) {
        sum += ElementOf(a, of_a, matmul.transpose_a, row, i) *
               BlockScale(matmul.mode_a, matmul.scale_a, of_d.rows, k, row, i) *
               ElementOf(b, of_b, matmul.transpose_b, i, column) *
               BlockScale(matmul.mode_b, matmul.scale_b, of_d.columns, k, column, i);
      }
      const int64_t at = column * of_d.stride + row;
      const float old = kept == 0.0f ? 0.0f : kept * ValueAt(c, of_d.type, at);
      const float value = scale * sum + old;
      if (of_d.type == CUDA_R_16F) {
        static_cast<uint16_t*>(d)[at] = ravel::kernels::scalar::Fp16Nearest(value);
      } else if (BytesOf(of_d.type) == 2) {
        static_cast<uint16_t*>(d)[at] = ravel::kernels::scalar::Bf16Nearest(value);
      } else {
        static_cast<float*>(d)[at] = value;
      }
    }
  }
  return CUBLAS_STATUS_SUCCESS;
}

}  // extern "C"
