#pragma once

// The step that already has the name of a save that is to be committed: whose it is, and whether it
// makes room. Part of coordinator/saves/saves.h, for its implementation only.

#include <cstdint>
#include <optional>
#include <string_view>

#include "common/ckpt/step_layout.h"
#include "common/status.h"
#include "common/store/object_store.h"

namespace ravel::coordinator {

// COMMIT of the published step; none when there is no step, or when it is withdrawn. DataLoss when
// COMMIT is damaged; other errors say nothing about the step.
absl::StatusOr<std::optional<ckpt::CommitRecord>> ReadPublished(const store::ObjectStore& store,
                                                                int64_t step);

// Epochs count from 1 in every job: its uid tells saves of two jobs in one folder apart.
bool IsSave(const ckpt::CommitRecord& commit, std::string_view job, const ckpt::AttemptKey& key);

// AlreadyExists, naming the save that is committed.
absl::Status LostTo(const ckpt::CommitRecord& commit);

// A step of this number that is BAD, damaged or half deleted makes room: its folder and its report
// move to bad/<step>.e<E>.a<A>.*, named for the save that replaces it. A good one of another save
// is AlreadyExists; one whose COMMIT cannot be read now, or is of another format version, stays,
// and that is the error.
absl::Status ClearTheWay(store::ObjectStore& store,
                         std::string_view job,
                         const ckpt::AttemptKey& key);

}  // namespace ravel::coordinator
