#include "coordinator/jobs/step_speed.h"

#include <algorithm>

#include "common/model/model_inventory.h"
#include "common/plan/device_kind.h"

namespace ravel::coordinator {

void StepSeconds::Add(double seconds) {
  const double taken = seconds > 0 ? seconds : 0;
  const auto* const bound = std::lower_bound(kBounds.begin(), kBounds.end(), taken);
  ++counts[static_cast<size_t>(bound - kBounds.begin())];
  sum += taken;
}

SpeedScale SpeedScaleOf(const plan::JobSpec& spec,
                        int64_t epoch,
                        const std::vector<std::string>& models) {
  SpeedScale scale = {.epoch = epoch};
  // The formula counts weight gradients, which frozen tensors do not have.
  if (spec.model && spec.freeze.empty()) {
    scale.flops_per_token =
        plan::TrainingFlopsPerToken(*spec.model, spec.data.sequence_length, spec.layer_drop);
  }
  if (!spec.cpu_devices && !models.empty() &&
      std::all_of(models.begin(), models.end(), [&models](const std::string& model) {
        return model == models.front();
      })) {
    scale.peak_flops = plan::DenseBf16Peak(models.front());
  }
  return scale;
}

}  // namespace ravel::coordinator
