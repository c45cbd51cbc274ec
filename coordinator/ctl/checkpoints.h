#pragma once

// `ravelctl checkpoints list|show` on a bare store path, without a coordinator. Parsed
// options in, text on a stream, a status out; ExitCodeOf maps it. Only MarkInFolder changes things.

#include <cstdint>
#include <iosfwd>
#include <memory>
#include <string>

#include "common/status.h"
#include "common/store/object_store.h"
#include "coordinator/ctl/checkpoint_mark.h"
#include "coordinator/ctl/output.h"

namespace ravel::ctl {

struct CheckpointListOptions {
  std::string folder;  // a job's checkpoint folder: absolute or relative path, or URL
  Format format = Format::kTable;
  bool wide = false;  // a table with all its columns
  bool no_headers = false;
  int64_t now_ms = 0;  // for ages
};
// Committed steps, newest first; leftovers (damaged folders, unfinished saves, histories that were
// moved aside) are named too.
absl::Status ListCheckpoints(const CheckpointListOptions& options, std::ostream& out);

// Changes a mark in a job's checkpoint folder.
absl::Status MarkInFolder(const std::string& folder,
                          int64_t step,
                          CheckpointMark mark,
                          const std::string& reason);

// `step` everywhere: a step's directory (".../step-0000000020", absolute, relative or URL), or
// a folder of steps, which means its newest good one.
struct CheckpointShowOptions {
  std::string step;
  std::string tensors = {};  // a glob ("*", "?") of tensors to list; empty: none
  Format format = Format::kTable;
};
absl::Status ShowCheckpoint(const CheckpointShowOptions& options, std::ostream& out);

// A folder of steps, from a path or URL. NotFound unless a path is a directory.
absl::StatusOr<std::unique_ptr<store::ObjectStore>> OpenCheckpointFolder(const std::string& text);

// A step's directory, opened as a store of its parent.
struct StepLocation {
  std::unique_ptr<store::ObjectStore> store;
  std::string directory;  // relative to the store
};
// NotFound when there is nothing; it says what was looked for.
absl::StatusOr<StepLocation> LocateStep(const std::string& step);

// Returns true if all of `text` matches a pattern of characters, "*" (any text) and "?" (any
// character).
bool MatchesGlob(const std::string& pattern, const std::string& text);

}  // namespace ravel::ctl
