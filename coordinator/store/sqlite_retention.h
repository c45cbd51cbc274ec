#pragma once

// Deletes rows of the database. Each call is part of a transaction of its caller.

#include <cstdint>
#include <string>

#include "coordinator/store/job_store.h"

struct sqlite3;

namespace ravel::coordinator {

// A job with all that refers to it; its requests are kept as of `now_ms`.
absl::Status DeleteJobRows(sqlite3* database, const std::string& uid, int64_t now_ms);
absl::Status DeleteNodeRow(sqlite3* database, const std::string& id);

// JobStore::SweepJob and SweepRequests; the number of rows that are gone.
absl::StatusOr<int64_t> SweepJobRows(sqlite3* database,
                                     const std::string& uid,
                                     const RowRetention& policy);
absl::StatusOr<int64_t> SweepRequestRows(sqlite3* database, const RowRetention& policy);

}  // namespace ravel::coordinator
