#include "coordinator/ctl/step_view_proto.h"

namespace ravel::ctl {

StepRecord ToView(const v1::StepRecord& message) {
  StepRecord record;
  record.step = message.step();
  record.loss = message.loss();
  record.grad_norm = message.grad_norm();
  record.lr = message.lr();
  record.tokens = message.tokens();
  record.tokens_per_second = message.tokens_per_second();
  record.step_seconds = message.step_seconds();
  record.world_size = message.world_size();
  record.epoch = message.epoch();
  record.attempt = message.attempt();
  record.skipped = message.skipped();
  record.loss_scale = message.loss_scale();
  record.has_validation_loss = message.has_validation_loss();
  record.validation_loss = message.validation_loss();
  record.time_ms = message.time_ms();
  record.planned_bytes = message.planned_bytes();
  record.measured_bytes = message.measured_bytes();
  return record;
}

}  // namespace ravel::ctl
