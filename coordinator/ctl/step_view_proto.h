#pragma once

// A step of a job's metrics, from the coordinator's message.

#include "common/step_record.h"
#include "proto/job_views.pb.h"

namespace ravel::ctl {

StepRecord ToView(const v1::StepRecord& message);

}  // namespace ravel::ctl
