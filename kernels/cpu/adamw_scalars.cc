#include "common/check.h"
#include "kernels/adamw.h"
#include "kernels/scalar/decide_step.h"

namespace ravel::kernels {

AdamWScalars MakeAdamWScalars(const AdamWHyper& hyper, int64_t t, float gradient_scale) {
  CHECK_MSG(t >= 1, "t counts from 1: updates applied so far + 1");
  return scalar::ScalarsOfUpdate<AdamWScalars>(hyper, t, gradient_scale);
}

}  // namespace ravel::kernels
