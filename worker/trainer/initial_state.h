#pragma once

#include <cstdint>
#include <string>

#include "common/status.h"
#include "worker/comm/communicator.h"
#include "worker/trainer/position.h"
#include "worker/trainer/rank_engine.h"
#include "worker/trainer/supervision.h"

namespace ravel::trainer {

// Collective. Fills weights, moments and the update counter of an engine: from the committed step
// that the assignment names, whose digests all ranks check together; else from the Hugging Face
// directory of model.from; else random weights. What was read so far is noted in `position`. Errors
// are marked with their exit code.
absl::Status PrepareState(const Assignment& assignment,
                          comm::Communicator& communicator,
                          RankEngine& engine,
                          Position& position);

// The choices of gemms in the checkpoint that the assignment resumes from (GemmChoices::
// table); empty where it has none.
absl::StatusOr<std::string> SavedGemms(const Assignment& assignment);

}  // namespace ravel::trainer
