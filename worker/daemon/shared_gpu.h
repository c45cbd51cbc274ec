#pragma once

// Several trainers on one GPU: for functional tests on machines with few. Not supported by NCCL's
// vendor, and slow: no speed measured so means anything.

#include <string>
#include <string_view>
#include <vector>

#include "worker/daemon/device_probe.h"

namespace ravel::daemon {

// "NAME=value" of each variable that a trainer needs before it is executed. NCCL refuses two ranks
// on one GPU of one host; it reads the host's name once, so each trainer says to be a host of its
// own, `host`, which differs between all of them, and they talk over loopback. Ranks that disagree
// are named, since every collective is checked.
std::vector<std::string> SharedGpuEnvironment(std::string_view host);

// Each GPU `times` times, one after another, with its part of the memory.
void ShareGpus(int times, NodeFacts& facts);

}  // namespace ravel::daemon
