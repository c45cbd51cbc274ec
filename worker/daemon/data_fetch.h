#pragma once

// One data set from a store into a folder, so that whatever cuts it off it can go on.

#include <cstdint>
#include <functional>
#include <string>

#include "common/status.h"
#include "common/store/data_set.h"
#include "common/store/object_store.h"

namespace ravel::daemon {

// Called from the thread that fetches; each may be empty.
struct FetchHooks {
  // So many more bytes of the set are here.
  std::function<void(int64_t bytes)> moved = nullptr;
  // Asked at least once for each piece. True: nobody wants the set any more; Cancelled.
  std::function<bool()> abandoned = nullptr;
  // The same question, asked while another thread fetches the set and nothing moves.
  std::function<bool()> given_up = nullptr;
};

// Every file of the set, in `folder`, which exists, durably. A file has its name only once all its
// bytes are here and have the manifest's SHA-256; until then it is NAME.part, from which a later
// call goes on. Bytes that were here before are hashed again. A digest that is wrong twice, the
// second time read anew, is DataLoss, as is a file of another size; faults of this host's disk are
// ResourceExhausted (it is full) or FailedPrecondition; others are the store's. Fault point
// `data_fetch.piece` before each piece is written. Blocks.
absl::Status FetchDataSet(const store::ObjectStore& source,
                          const store::DataManifest& manifest,
                          const std::string& folder,
                          const FetchHooks& hooks);

// The names in a folder, durably.
absl::Status SyncFolder(const std::string& folder);

}  // namespace ravel::daemon
