#pragma once

// Opens the paths that a job names, on the machine where this runs: a node that was asked, or the
// one with ravelctl. The coordinator never calls it.

#include <functional>

#include "common/path_facts.h"
#include "common/path_roots.h"

namespace ravel {

// Observers of a look; both may be empty. Called from the thread that looks.
struct LookHooks {
  // Before a path is opened: it may never answer.
  std::function<void(const NamedPath& path)> at = nullptr;
  // Asked before each path and each block of it, so that every call is a sign of life. True: nobody
  // waits for the answer any more; the look ends soon, with facts that mean nothing.
  std::function<bool()> abandoned = nullptr;
  // Beneath which every path must lie; null: anywhere. One that does not is not looked at, and the
  // facts say the same whether something is there or not.
  const PathRoots* roots = nullptr;
};

// Blocks for as long as the file systems do, in memory of a few blocks; maps nothing and writes
// nothing. A FIFO is refused at once. Fault point `path_look`, once for each path.
PathFacts LookAtPaths(const PathQuery& query, const LookHooks& hooks = {});

}  // namespace ravel
