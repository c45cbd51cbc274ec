#include "worker/trainer/run_settings.h"

namespace ravel::trainer {

RunSettings SettingsOf(const plan::JobSpec& spec) {
  const plan::OptimizerSpec& optimizer = spec.optimizer;
  return {.data = {.train = spec.data.train,
                   .validation = spec.data.validation,
                   .format = spec.data.format},
          .init_std = spec.init_std,
          .seed = spec.seed,
          .evaluation_batches = spec.evaluation_batches,
          .exact = spec.determinism == plan::DeterminismMode::kExact,
          .localise = spec.localise,
          .offload = optimizer.offload,
          .update = {.lr = optimizer.lr,
                     .beta1 = optimizer.beta1,
                     .beta2 = optimizer.beta2,
                     .eps = optimizer.eps,
                     .weight_decay = optimizer.weight_decay,
                     .clip_norm = optimizer.clip_norm,
                     .loss_scale = spec.loss_scale,
                     .schedule = spec.schedule,
                     .steps = spec.steps,
                     .norms_every = spec.norms_every}};
}

}  // namespace ravel::trainer
