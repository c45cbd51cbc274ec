#pragma once

// The record of one training step, as files of the coordinator keep it and `ravelctl metrics`
// prints it.

#include <string>
#include <string_view>

#include "common/json.h"
#include "common/status.h"
#include "common/trainer_report.h"

namespace ravel {

// One step of one epoch: the report of rank 0 and the facts that the coordinator adds.
struct StepRecord : StepReport {
  double tokens_per_second = 0;
  int64_t world_size = 0;
  int64_t epoch = 0;
  int64_t attempt = 0;
};

// Full precision; `loss_bits` holds the fp32 bits as 8 hex digits, so that even NaN comes back as
// it was. `skipped` is there when it is true, `loss_scale` in fp16, `validation_loss` after an
// evaluation.
json::Value StepRecordJson(const StepRecord& record);
// Returns DataLoss for a line that is no record.
absl::StatusOr<StepRecord> ParseStepRecord(std::string_view line);

}  // namespace ravel
