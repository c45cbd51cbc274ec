#pragma once

// Committed steps that a job's record lacks: a coordinator that was restored from an older backup
// finds them in the store.

#include <cstdint>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "common/store/object_store.h"
#include "coordinator/saves/checkpoint_keeper.h"
#include "coordinator/saves/saves.h"

namespace ravel::coordinator {

// A step as its COMMIT and the mesh of its manifest tell it.
CommittedSave DescribeSave(const store::ObjectStore& files,
                           const CommittedStepInfo& info,
                           std::span<const ckpt::MeshAxisRecord> mesh);

// The steps of `listing` that this job committed and whose save ids are not in `known`, oldest
// first. Reads one manifest per step; a step whose manifest cannot be read is left out, with a
// warning, until the next look.
std::vector<FoundSave> FindSaves(const store::ObjectStore& files,
                                 const std::string& job_uid,
                                 const StepListing& listing,
                                 const std::set<std::string>& known);

}  // namespace ravel::coordinator
