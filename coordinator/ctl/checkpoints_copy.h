#pragma once

// `ravelctl checkpoints copy FROM TO`: a committed step into another folder, of any kind of store.

#include <functional>
#include <iosfwd>
#include <string>

#include "common/status.h"
#include "coordinator/ctl/output.h"

namespace ravel::ctl {

struct CheckpointCopyOptions {
  std::string from;  // a step's directory or URL, or a folder of steps: its newest good one
  std::string to;    // a folder of steps, absolute, relative or URL; made when it is missing
  Format print = Format::kTable;
  // Asked at each block; true ends the copy with Cancelled, and what is whole stays for the next.
  std::function<bool()> cancelled = {};
};

// Copies into an unfinished save, every file checked against the manifest, COMMIT last, and then
// publishes it under the step's name. What an earlier, interrupted copy has finished is not copied
// again. AlreadyExists when the folder has another step of that number; a copy that is there
// already is fine. DataLoss names what does not match the manifest.
absl::Status CopyCheckpoint(const CheckpointCopyOptions& options, std::ostream& out);

}  // namespace ravel::ctl
