#pragma once

#include <cstdint>

#include "common/json.h"
#include "common/model/job_spec.h"
#include "common/status.h"

namespace ravel::ctl {

// {step, lanes: [{lane, samples: [{index, tokens}]}]}: what every lane reads in global batch `step`
// (from 0), sequenceLength
// + 1 ids a sample. Jobs with several train sources also name each sample's source. The spec must
// be admitted.
absl::StatusOr<json::Value> BatchDocument(const plan::JobSpec& spec, int64_t step);

}  // namespace ravel::ctl
