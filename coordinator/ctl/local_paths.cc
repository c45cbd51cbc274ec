#include "coordinator/ctl/local_paths.h"

#include "common/path_look.h"

namespace ravel::ctl {

CanonicalJob CanonicalizeHere(const v1::TrainingJob& job, PathScope scope) {
  CanonicalJob bare = Canonicalize(job, {});
  if (scope == PathScope::kNone) {
    return bare;
  }
  PathQuery query = PathsOf(bare);
  if (scope == PathScope::kModel) {
    query.token_files.clear();
    query.tokenizer = {};
  }
  const PathFacts facts = LookAtPaths(query);
  return Canonicalize(job, {.facts = &facts, .check_data = scope == PathScope::kAll});
}

}  // namespace ravel::ctl
