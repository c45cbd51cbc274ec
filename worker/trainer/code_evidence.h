#pragma once

// The digests of quantized weights that a checkpoint keeps instead of their codes, and what a load
// does with them: codes that are cast again must be those that were trained with.

#include <cstdint>
#include <vector>

#include "common/ckpt/manifest.h"
#include "common/status.h"
#include "worker/comm/communicator.h"
#include "worker/trainer/rank_engine.h"

namespace ravel::trainer {

// This rank's part of the digest of each quantized weight, in the order of plan::QuantLayout, from
// the codes and scales that it has now. Empty where nothing is quantized. Reads one byte of a
// parameter, or half of one.
absl::StatusOr<std::vector<uint64_t>> CodeDigests(const plan::ShardingPlan& plan,
                                                  int64_t rank,
                                                  RankEngine& engine);

// Collective, after weights were loaded and cast: compares with what was saved. Weights that were
// saved without, or under another recipe, are left out. DataLoss names the weights that differ.
absl::Status CheckCodes(const ckpt::QuantRecord& saved,
                        const plan::ShardingPlan& plan,
                        comm::Communicator& communicator,
                        RankEngine& engine);

}  // namespace ravel::trainer
