#pragma once

// LookAtPaths for jobs that also name data sets in stores: their facts come from manifests.

#include <functional>
#include <memory>
#include <string>

#include "common/path_look.h"
#include "common/store/object_store.h"

namespace ravel::store {

using OpenFunction =
    std::function<absl::StatusOr<std::unique_ptr<ObjectStore>>(const std::string& url)>;

// Looks at paths as LookAtPaths does, and at URLs through their store: one manifest for each data
// set, and config.json of a model, which must have the manifest's SHA-256. What a store says of the
// data set is an error of that path; a store that cannot be asked is silence of its field.
PathFacts LookAtJobPathsBy(const OpenFunction& open,
                           const PathQuery& query,
                           const LookHooks& hooks);
// The same by OpenStore.
PathFacts LookAtJobPaths(const PathQuery& query, const LookHooks& hooks = {});

// True for what is wrong with a data set, wherever it is read; false where another host or a later
// time may do better.
bool IsDataFault(const absl::Status& status);

}  // namespace ravel::store
