#include "coordinator/store/sqlite_retention.h"

#include <absl/strings/str_cat.h>
#include <sqlite3.h>

#include "coordinator/store/sqlite_statement.h"

namespace ravel::coordinator {
namespace {

constexpr int64_t kDayMs = int64_t{24} * 3600 * 1000;

// Runs a bound statement that returns nothing; the rows that it changed.
absl::StatusOr<int64_t> Changed(sqlite3* database, Statement& statement) {
  statement.Step();
  RETURN_IF_ERROR(statement.status());
  return static_cast<int64_t>(sqlite3_changes(database));
}

// The newest event that has to go now; 0: none. Events of one job are in the order of time.
absl::StatusOr<int64_t> LastOldEvent(sqlite3* database,
                                     const std::string& uid,
                                     const RowRetention& policy) {
  const int64_t oldest_ms = policy.now_ms - policy.event_days * kDayMs;
  Statement surplus(database,
                    "SELECT seq FROM events WHERE job = ? ORDER BY seq DESC LIMIT 1 OFFSET ?");
  surplus.Bind(uid).Bind(policy.events_per_job);
  const int64_t too_many = surplus.Step() ? surplus.Int() : 0;
  RETURN_IF_ERROR(surplus.status());
  Statement row(database,
                "SELECT COALESCE(MAX(seq), 0) FROM (SELECT seq, time_ms FROM events WHERE job = ? "
                "ORDER BY seq LIMIT ?) WHERE time_ms < ? OR seq <= ?");
  row.Bind(uid).Bind(policy.most_rows).Bind(oldest_ms).Bind(too_many);
  const int64_t last = row.Step() ? row.Int() : 0;
  RETURN_IF_ERROR(row.status());
  return last;
}

absl::StatusOr<int64_t> SweepEvents(sqlite3* database,
                                    const std::string& uid,
                                    const RowRetention& policy) {
  ASSIGN_OR_RETURN(const int64_t last, LastOldEvent(database, uid, policy));
  if (last == 0) {
    return 0;
  }
  // A marker counts as many as its message says; CAST reads the number that a text begins with.
  Statement count(
      database,
      "SELECT COUNT(*), SUM(CASE type WHEN 'EventsRemoved' THEN CAST(message AS "
      "INTEGER) ELSE 1 END), MIN(CASE type WHEN 'EventsRemoved' THEN 1 ELSE 0 END) FROM "
      "events WHERE job = ? AND seq <= ?");
  count.Bind(uid).Bind(last);
  if (!count.Step()) {
    return count.status();
  }
  const int64_t rows = count.Int();
  const int64_t told = count.Int();
  const bool only_marker = count.Int() == 1;
  if (only_marker) {
    return 0;
  }
  Statement mark(database,
                 "UPDATE events SET type = 'EventsRemoved', reason = 'Retention', node = '', "
                 "rank = -1, message = ? WHERE seq = ?");
  mark.BindCopy(absl::StrCat(told, kEventsRemovedText)).Bind(last);
  RETURN_IF_ERROR(Changed(database, mark).status());
  Statement remove(database, "DELETE FROM events WHERE job = ? AND seq < ?");
  remove.Bind(uid).Bind(last);
  RETURN_IF_ERROR(Changed(database, remove).status());
  return rows - 1;
}

}  // namespace

absl::Status DeleteJobRows(sqlite3* database, const std::string& uid, int64_t now_ms) {
  Statement requests(database,
                     "UPDATE requests SET time_ms = ? WHERE answer = ? OR answer IN (SELECT id "
                     "FROM operations WHERE job = ?)");
  requests.Bind(now_ms).Bind(uid).Bind(uid);
  RETURN_IF_ERROR(Changed(database, requests).status());
  for (const char* table : {"events", "operations", "epochs", "saves", "job_specs", "goodput"}) {
    Statement rows(database, absl::StrCat("DELETE FROM ", table, " WHERE job = ?"));
    rows.Bind(uid);
    RETURN_IF_ERROR(Annotate(Changed(database, rows).status(), table));
  }
  Statement job(database, "DELETE FROM jobs WHERE uid = ?");
  job.Bind(uid);
  return Changed(database, job).status();
}

absl::Status DeleteNodeRow(sqlite3* database, const std::string& id) {
  Statement node(database, "DELETE FROM nodes WHERE id = ?");
  node.Bind(id);
  return Changed(database, node).status();
}

absl::StatusOr<int64_t> SweepJobRows(sqlite3* database,
                                     const std::string& uid,
                                     const RowRetention& policy) {
  ASSIGN_OR_RETURN(int64_t removed, SweepEvents(database, uid, policy));
  Statement operations(database,
                       "DELETE FROM operations WHERE job = ? AND state >= ? AND created_ms < ?");
  operations.Bind(uid)
      .Bind(static_cast<int64_t>(OperationState::kCommitted))
      .Bind(policy.now_ms - policy.operation_days * kDayMs);
  ASSIGN_OR_RETURN(const int64_t ended, Changed(database, operations));
  Statement saves(database,
                  "DELETE FROM saves WHERE job = ? AND state IN (?, ?) AND created_ms < ?");
  saves.Bind(uid)
      .Bind(static_cast<int64_t>(SaveState::kFailed))
      .Bind(static_cast<int64_t>(SaveState::kDeleted))
      .Bind(policy.now_ms - policy.save_days * kDayMs);
  ASSIGN_OR_RETURN(const int64_t gone, Changed(database, saves));
  Statement epochs(database,
                   "DELETE FROM epochs WHERE job = ? AND epoch <= (SELECT MAX(epoch) FROM epochs "
                   "WHERE job = ?) - ?");
  epochs.Bind(uid).Bind(uid).Bind(policy.epochs_per_job);
  ASSIGN_OR_RETURN(const int64_t old, Changed(database, epochs));
  return removed + ended + gone + old;
}

absl::StatusOr<int64_t> SweepRequestRows(sqlite3* database, const RowRetention& policy) {
  Statement nodes(database,
                  "DELETE FROM nodes WHERE incarnation = '' AND hold = 0 AND seen_ms < ?");
  nodes.Bind(policy.now_ms - policy.node_days * kDayMs);
  RETURN_IF_ERROR(Changed(database, nodes).status());
  const int64_t oldest_ms = policy.now_ms - policy.request_days * kDayMs;
  // Those of jobs, or operations of jobs, that are there and not over for so long stay.
  Statement rows(
      database,
      "DELETE FROM requests WHERE rowid IN (SELECT requests.rowid FROM requests LEFT JOIN "
      "operations ON operations.id = requests.answer LEFT JOIN jobs ON jobs.uid = "
      "COALESCE(operations.job, requests.answer) WHERE requests.time_ms < ? AND (jobs.uid IS NULL "
      "OR (jobs.finished_ms > 0 AND jobs.finished_ms < ?)) LIMIT ?)");
  rows.Bind(oldest_ms).Bind(oldest_ms).Bind(policy.most_rows);
  return Changed(database, rows);
}

}  // namespace ravel::coordinator
