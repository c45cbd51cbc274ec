#include <cstdlib>
#include <cstring>
#include <memory>

#include <sys/mman.h>

#include "common/check.h"
#include "common/signed_size.h"
#include "kernels/cpu/reference_ops.h"
#include "kernels/cpu/simd_ops.h"

namespace ravel::kernels::cpu {
namespace {

// Packed blocks on huge pages where those are allowed, so that a gemm's inner loops do not miss
// the address cache. Grows to the largest gemm so far: a few MiB.
class Workspace {
 public:
  float* AtLeast(int64_t elements) {
    if (elements > elements_) {
      constexpr int64_t kHugePageBytes = int64_t{2} << 20;
      const auto bytes = static_cast<size_t>(
          RoundUp(elements * static_cast<int64_t>(sizeof(float)), kHugePageBytes));
      data_.reset(static_cast<float*>(std::aligned_alloc(kHugePageBytes, bytes)));
      CHECK(data_ != nullptr);
      (void)madvise(data_.get(), bytes, MADV_HUGEPAGE);  // only a wish
      elements_ = static_cast<int64_t>(bytes / sizeof(float));
    }
    return data_.get();
  }

 private:
  struct Free {
    void operator()(float* data) const { std::free(data); }
  };
  std::unique_ptr<float, Free> data_;
  int64_t elements_ = 0;
};

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
      std::memset(RowsOf(args.c, row, 1).data, 0, Size(n * DTypeBytes(args.c.dtype)));
    }
    return;
  }
  thread_local Workspace workspace;
  ActiveOps().gemm(args, workspace.AtLeast(ActiveOps().gemm_workspace_elements(args)));
}

}  // namespace ravel::kernels::cpu
