#pragma once

// Which algorithm computes which gemm of a job on devices: decided once, before the first step,
// and the same on all ranks. The ranks' programs are rehearsed for the gemms that they need; a
// choice comes from the checkpoint that the job resumes from, else from the disk, else from timing
// what cuBLASLt proposes, in the memory of the plan, whose content does not matter yet.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "common/plan/sharding_plan.h"
#include "common/status.h"
#include "worker/comm/communicator.h"
#include "worker/shard/device_streams.h"
#include "worker/shard/unit_executor.h"

namespace ravel::trainer {

// The name of the table in a checkpoint.
inline constexpr char kGemmsBlob[] = "algorithms";

struct GemmOptions {
  // Without measuring, what is neither saved nor on the disk is cuBLASLt's first proposal, and the
  // disk is left alone.
  bool measure = true;
  // The table of the checkpoint that the job resumes from (GemmChoices::table); empty: none.
  std::string saved = {};
  // Folder of choices that any job has measured, a file per kind of device and version of cuBLASLt;
  // empty: none.
  std::string cache_folder = {};
};

struct GemmChoices {
  int64_t gemms = 0;  // that this rank's programs need
  // Sources of the choices that this rank made for all; rank 0 makes all that it needs itself.
  int64_t saved = 0;
  int64_t cached = 0;
  int64_t measured = 0;
  int64_t proposed = 0;
  // Gemms of several parts that are computed part by part: at once, cuBLASLt gives them other bits.
  int64_t in_parts = 0;
  double seconds = 0;
  // Why choices of the checkpoint that is resumed are not in force, so that bits may differ from
  // those before: on the rank that would have taken them. Empty where they are, or had none.
  std::string chosen_again = {};
  // For a checkpoint: what is in force on this rank, and what an earlier size of the job needed.
  // Empty where no gemm runs through cuBLASLt.
  std::string table = {};
};

// The longest part of `memory` that has nothing of `used`, which may overlap.
std::span<std::byte> LongestGap(std::span<std::byte> memory,
                                std::vector<std::span<std::byte>> used);

// Collective; of ranks with their arenas, before anything is in them: they are zero before and
// after. The choices are then in the table of the streams' device. Ranks on unlike devices are
// FailedPrecondition where the job is exact; else each kind of device has choices of its own. A bad
// table of either source is a warning that names it, and is left out.
struct GemmChoicesArgs {
  const GemmOptions& options;
  const plan::ShardingPlan& plan;
  bool exact = true;
  comm::Communicator& communicator;
  shard::DeviceStreams& streams;
  shard::UnitExecutor& executor;
};
absl::StatusOr<GemmChoices> ChooseGemms(const GemmChoicesArgs& args);

}  // namespace ravel::trainer
