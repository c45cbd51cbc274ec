#pragma once

// Loss scaling of fp16 compute. The smallest gradients of activations would vanish in fp16, so the
// loss's gradient is multiplied by a scale before backward, and the sums are divided by it again
// where they are divided by the tokens. Scales are powers of two: neither rounds.

#include <cstdint>

#include "common/status.h"

namespace ravel::plan {

// Losses are sums over tokens, so that gradients of logits reach 1 and those of layers more. At
// 1024 small models skip no step; from there it grows.
inline constexpr double kInitialLossScale = 1024;
// fp16 ends at 65504, so 65536 overflows in nearly every step.
inline constexpr double kMaximumLossScale = 32768;
inline constexpr double kMostLossScale = 16777216;
inline constexpr int64_t kMostGrowthInterval = 1'000'000'000;

// A static scale has initial = minimum = maximum.
struct LossScaleSpec {
  double initial = kInitialLossScale;
  double growth_factor = 2;
  double backoff_factor = 0.5;
  int64_t growth_interval = 2000;  // good steps in a row before it grows
  double minimum = 1;
  double maximum = kMaximumLossScale;
  bool operator==(const LossScaleSpec&) const = default;
};

// True for 2^k, also with k < 0.
bool IsPowerOfTwo(double value);

// InvalidArgument with the field below precision.lossScale that is out of its bounds.
absl::Status CheckLossScale(const LossScaleSpec& spec);

}  // namespace ravel::plan
