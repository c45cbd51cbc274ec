#pragma once

namespace ravel::ctl {

// A person's mark on a committed step: keep it, keep it no longer, or it is not BAD after all.
enum class CheckpointMark { kPin, kUnpin, kUnmarkBad };

}  // namespace ravel::ctl
