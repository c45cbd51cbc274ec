#pragma once

// Named places where a test or a drill may break the process, off unless the environment says
// otherwise:
//   RAVEL_FAULTS="save.before_rename:kill,step.done@7:exit=3,comm.gather:stall=2s,store.write@2:error=disk
//   full"
// NAME[@N]:ACTION, N = the N-th time the place is reached (default the first; `@*` every time).
// Actions: `kill` (SIGKILL to this process), `exit=CODE`, `stall=DURATION`, `stop` (SIGSTOP),
// `hold=PATH` (the N-th time, waits as long as there is a file PATH.N), `error[=TEXT]` (the place
// fails with that message). Entries of one place act in their order. When the variable is absent a
// fault point costs one load of a constant. Thread-safe.

#include <string_view>

#include "common/status.h"

namespace ravel {

namespace fault {
bool Enabled();
absl::Status Hit(std::string_view name);
// Replaces what the environment said; for tests. Empty: off. Errors name the entry that cannot be
// read.
absl::Status Configure(std::string_view text);
}  // namespace fault

// Passes, or does what was asked of this place. Only `error` returns a failure (Internal, or
// ResourceExhausted when the text is "disk full").
inline absl::Status FaultPoint(std::string_view name) {
  return fault::Enabled() ? fault::Hit(name) : absl::OkStatus();
}

}  // namespace ravel
