#include <algorithm>
#include <vector>

#include "kernels/cpu/reference_ops.h"
#include "kernels/cpu/simd_ops.h"

namespace ravel::kernels::cpu {

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
  // One per thread, as large as the largest product so far: a few MiB.
  thread_local std::vector<float> workspace;
  const auto elements = static_cast<size_t>(ActiveOps().gemm_workspace_elements(args));
  if (workspace.size() < elements) {
    workspace = std::vector<float>(elements);
  }
  ActiveOps().gemm(args, workspace.data());
}

}  // namespace ravel::kernels::cpu
