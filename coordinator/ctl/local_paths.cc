#include "coordinator/ctl/local_paths.h"

#include "common/store/data_set_look.h"

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
  const PathFacts facts = store::LookAtJobPaths(query);
  if (!facts.silent_field.empty()) {
    bare.violations.push_back({facts.silent_field, 0, 0, "a store that answers", facts.silence});
    return bare;
  }
  return Canonicalize(job, {.facts = &facts, .check_data = scope == PathScope::kAll});
}

}  // namespace ravel::ctl
