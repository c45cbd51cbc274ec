#include "worker/model/rope_frequencies.h"

#include <cmath>
#include <cstddef>
#include <numbers>

#include "common/signed_size.h"

namespace ravel::model {
namespace {

// Long wavelengths are stretched by the factor, short ones kept, those between interpolated.
double ScaleForLongContext(const plan::ModelConfig& config, double frequency) {
  const auto original = static_cast<double>(config.rope_original_max_position_embeddings);
  const double wavelength = 2.0 * std::numbers::pi / frequency;
  if (wavelength < original / config.rope_high_freq_factor) {
    return frequency;
  }
  if (wavelength > original / config.rope_low_freq_factor) {
    return frequency / config.rope_scaling_factor;
  }
  const double smooth = (original / wavelength - config.rope_low_freq_factor) /
                        (config.rope_high_freq_factor - config.rope_low_freq_factor);
  return (1.0 - smooth) * frequency / config.rope_scaling_factor + smooth * frequency;
}

}  // namespace

std::vector<float> InverseFrequencies(const plan::ModelConfig& config) {
  const int64_t half = config.head_dim / 2;
  std::vector<float> frequencies(Size(half));
  for (int64_t j = 0; j < half; ++j) {
    const double exponent = -2.0 * static_cast<double>(j) / static_cast<double>(config.head_dim);
    double frequency = std::pow(config.rope_theta, exponent);
    if (config.rope_scaling_factor != 0) {
      frequency = ScaleForLongContext(config, frequency);
    }
    At(frequencies, j) = static_cast<float>(frequency);
  }
  return frequencies;
}

}  // namespace ravel::model
