#include "common/check.h"
#include "kernels/adamw.h"
#include "kernels/scalar/adamw.h"

namespace ravel::kernels {

AdamWScalars MakeAdamWScalars(const AdamWHyper& hyper, int64_t t, float gradient_scale) {
  CHECK_MSG(t >= 1, "t counts from 1: updates applied so far + 1");
  AdamWScalars s;
  s.beta1 = static_cast<float>(hyper.beta1);
  s.beta2 = static_cast<float>(hyper.beta2);
  s.one_minus_beta1 = 1.0f - s.beta1;
  s.one_minus_beta2 = 1.0f - s.beta2;
  const auto inverse_correction = [t](float beta) {
    return static_cast<float>(1.0 / (1.0 - scalar::PowerByMultiplication(beta, t)));
  };
  s.inverse_correction1 = inverse_correction(s.beta1);
  s.inverse_correction2 = inverse_correction(s.beta2);
  s.epsilon = static_cast<float>(hyper.epsilon);
  s.learning_rate = static_cast<float>(hyper.learning_rate);
  s.weight_decay = static_cast<float>(hyper.weight_decay);
  s.gradient_scale = gradient_scale;
  return s;
}

}  // namespace ravel::kernels
