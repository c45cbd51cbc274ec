#pragma once

// `ravelctl checkpoints verify` on a bare store path, without a coordinator.

#include <cstdint>
#include <iosfwd>
#include <string>

#include "common/status.h"
#include "common/store/step_verifier.h"
#include "coordinator/ctl/output.h"

namespace ravel::ctl {

struct CheckpointVerifyOptions {
  std::string step;          // a step's directory, or a folder of steps: its newest good one
  int64_t step_number = -1;  // of a folder: this committed step instead, also a BAD one
  bool all = false;          // of a folder: every step that is not marked BAD, newest first
  store::VerifyDepth depth = store::VerifyDepth::kDeep;
  Format format = Format::kTable;
};
// DataLoss when a step is not whole; every problem has been printed, naming file, tensor and block.
// With `all` a step that cannot be loaded is not whole, the others are verified all the same, and a
// step that cannot be read counts only where none is damaged.
absl::Status VerifyCheckpoint(const CheckpointVerifyOptions& options, std::ostream& out);

}  // namespace ravel::ctl
