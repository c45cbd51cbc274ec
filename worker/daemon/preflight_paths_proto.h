#pragma once

// Extracts the paths that a rank's job names on its node from the messages that bring it.

#include "proto/trainer.pb.h"
#include "worker/daemon/preflight.h"

namespace ravel::daemon {

// A job that cannot be read is left to its trainer, which says what is wrong with it.
PreflightPaths PathsOf(const v1::StartTrainer& start);

}  // namespace ravel::daemon
