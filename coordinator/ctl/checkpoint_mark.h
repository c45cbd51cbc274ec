#pragma once

namespace ravel::ctl {

// What a person can say of a committed step: keep it, keep it no longer, it is not BAD after all.
enum class CheckpointMark { kPin, kUnpin, kUnmarkBad };

}  // namespace ravel::ctl
