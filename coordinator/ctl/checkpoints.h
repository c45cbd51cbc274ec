#pragma once

// `ravelctl checkpoints list|show|verify` on a bare store path, without a coordinator. Parsed
// options in, text on a stream, a status out; ExitCodeOf maps it. Nothing is changed.

#include <cstdint>
#include <iosfwd>
#include <string>

#include "common/status.h"
#include "common/store/step_verifier.h"

namespace ravel::ctl {

enum class CheckpointOutput { kTable, kJson };

// A step: its directory (".../step-0000000020", absolute, relative or file://). A folder of steps
// means its newest good one.
struct CheckpointListOptions {
  std::string folder;  // absolute or relative path, or file://
  CheckpointOutput output = CheckpointOutput::kTable;
  int64_t now_ns = 0;  // for ages
};
absl::Status ListCheckpoints(const CheckpointListOptions& options, std::ostream& out);

struct CheckpointShowOptions {
  std::string step;
  std::string
      tensors;  // a glob ("*" and "?"); empty: no tensor lines in a table, all tensors in JSON
  CheckpointOutput output = CheckpointOutput::kTable;
};
absl::Status ShowCheckpoint(const CheckpointShowOptions& options, std::ostream& out);

struct CheckpointVerifyOptions {
  std::string step;
  store::VerifyDepth depth = store::VerifyDepth::kDeep;
  CheckpointOutput output = CheckpointOutput::kTable;
};
// DataLoss when the step is not whole; every problem has been printed, naming file, tensor and
// block.
absl::Status VerifyCheckpoint(const CheckpointVerifyOptions& options, std::ostream& out);

}  // namespace ravel::ctl
