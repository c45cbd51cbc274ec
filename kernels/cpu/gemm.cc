#include <algorithm>

#include <cblas.h>

#include "kernels/cpu/reference_ops.h"

namespace ravel::kernels::cpu {
namespace {

blasint Leading(const TensorView& matrix) {
  const int64_t step =
      std::max<int64_t>({matrix.columns(), 1, matrix.rows() > 1 ? matrix.row_stride : 1});
  return static_cast<blasint>(step);
}

}  // namespace

void Gemm(const GemmArgs& args) {
  const int64_t m = args.c.rows();
  const int64_t n = args.c.columns();
  const int64_t k = args.transpose_a == Transpose::kNo ? args.a.columns() : args.a.rows();
  if (m == 0 || n == 0) {
    return;
  }
  if (k == 0) {
    for (int64_t row = 0; row < m && args.output == Output::kOverwrite; ++row) {
      std::fill_n(args.c.Row<float>(row), n, 0.0f);
    }
    return;
  }
  cblas_sgemm(CblasRowMajor,
              args.transpose_a == Transpose::kNo ? CblasNoTrans : CblasTrans,
              args.transpose_b == Transpose::kNo ? CblasNoTrans : CblasTrans,
              static_cast<blasint>(m),
              static_cast<blasint>(n),
              static_cast<blasint>(k),
              1.0f,
              args.a.As<float>(),
              Leading(args.a),
              args.b.As<float>(),
              Leading(args.b),
              args.output == Output::kOverwrite ? 0.0f : 1.0f,
              args.c.As<float>(),
              Leading(args.c));
}

void SetBlasThreads(int threads) {
  openblas_set_num_threads(threads);
}

}  // namespace ravel::kernels::cpu
