// The tables of columns, and the SQL that follows from them. A column is a name, a type and two
// functions that bind and read one field. An older database gets missing columns by ALTER TABLE, so
// each type has a default; a column that is unknown here was written by a newer release, and the
// database is refused rather than half understood. Rows are upserted instead of replaced, since
// replacing deletes the row that others refer to.

#include "coordinator/store/sqlite_rows.h"

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <absl/strings/str_split.h>

namespace ravel::coordinator {
namespace {

constexpr const char* kInteger = "INTEGER NOT NULL DEFAULT 0";
constexpr const char* kStep = "INTEGER NOT NULL DEFAULT -1";  // of a step that may be none
constexpr const char* kText = "TEXT NOT NULL DEFAULT ''";
constexpr const char* kBytes = "BLOB NOT NULL DEFAULT x''";

template <typename Record, typename Value>
Column<Record> Field(const char* name, const char* type, Value Record::*member) {
  return {name,
          type,
          [member](Statement& row, const Record& record) {
            if constexpr (std::is_same_v<Value, std::string>) {
              row.Bind(record.*member);
            } else {
              row.Bind(static_cast<int64_t>(record.*member));
            }
          },
          [member](Statement& row, Record& record) {
            if constexpr (std::is_same_v<Value, std::string>) {
              record.*member = row.Text();
            } else {
              record.*member = static_cast<Value>(row.Int());
            }
          }};
}

template <typename Record>
Column<Record> Bytes(const char* name, std::string Record::*member) {
  return {name,
          kBytes,
          [member](Statement& row, const Record& record) { row.BindBlob(record.*member); },
          [member](Statement& row, Record& record) { record.*member = row.Text(); }};
}

template <typename Value>
Column<JobRecord> BudgetField(const char* name, const char* type, Value BudgetState::*member) {
  Column<BudgetState> inner = Field(name, type, member);
  return {name,
          type,
          [inner](Statement& row, const JobRecord& job) { inner.bind(row, job.budget); },
          [inner](Statement& row, JobRecord& job) { inner.read(row, job.budget); }};
}

std::vector<int64_t> SplitInts(const std::string& text) {
  std::vector<int64_t> values;
  for (const absl::string_view part : absl::StrSplit(text, ' ', absl::SkipEmpty())) {
    int64_t value = 0;
    if (absl::SimpleAtoi(part, &value)) {
      values.push_back(value);
    }
  }
  return values;
}

absl::Status MatchTable(sqlite3* database,
                        const std::string& table,
                        const std::vector<std::pair<std::string, std::string>>& columns) {
  std::vector<std::string> present;
  {
    Statement row(database, "SELECT name FROM pragma_table_info(?)");
    row.Bind(table);
    while (row.Step()) {
      present.push_back(row.Text());
    }
    RETURN_IF_ERROR(row.status());
  }
  for (const std::string& name : present) {
    const bool known = std::any_of(columns.begin(), columns.end(), [&name](const auto& column) {
      return column.first == name;
    });
    if (!known) {
      return absl::FailedPreconditionError(absl::StrCat("column ",
                                                        table,
                                                        ".",
                                                        name,
                                                        " is newer than this program; use the "
                                                        "release that wrote it"));
    }
  }
  for (const auto& [name, type] : columns) {
    if (std::find(present.begin(), present.end(), name) == present.end()) {
      Statement row(database, absl::StrCat("ALTER TABLE ", table, " ADD COLUMN ", name, " ", type));
      row.Step();
      RETURN_IF_ERROR(row.status());
    }
  }
  return absl::OkStatus();
}

template <typename Record>
absl::Status MatchTable(sqlite3* database, const Table<Record>& table) {
  std::vector<std::pair<std::string, std::string>> columns;
  for (const Column<Record>& column : table.columns) {
    columns.emplace_back(column.name, column.type);
  }
  return MatchTable(database, table.name, columns);
}

}  // namespace

const Table<JobRecord>& JobTable() {
  static const Table<JobRecord> table{
      "jobs",
      {"uid"},
      {Field("uid", kText, &JobRecord::uid),
       Field("namespace", kText, &JobRecord::namespace_name),
       Field("name", kText, &JobRecord::name),
       Field("state", kInteger, &JobRecord::state),
       Field("reason", kText, &JobRecord::reason),
       Field("message", kText, &JobRecord::message),
       Field("generation", kInteger, &JobRecord::generation),
       Field("epoch", kInteger, &JobRecord::epoch),
       Field("launched_epoch", kInteger, &JobRecord::launched_epoch),
       Field("attempt", kInteger, &JobRecord::attempt),
       Field("world_size", kInteger, &JobRecord::world_size),
       Field("committed_step", kStep, &JobRecord::committed_step),
       Field("committed_path", kText, &JobRecord::committed_path),
       Field("highest_commit", kStep, &JobRecord::highest_commit),
       Field("restarts", kInteger, &JobRecord::restarts),
       BudgetField("budget_used", kInteger, &BudgetState::used),
       BudgetField("budget_no_progress", kInteger, &BudgetState::no_progress),
       {"budget_times",
        kText,
        [](Statement& row, const JobRecord& job) {
          row.BindCopy(absl::StrJoin(job.budget.failure_times_ms, " "));
        },
        [](Statement& row, JobRecord& job) {
          job.budget.failure_times_ms = SplitInts(row.Text());
        }},
       BudgetField("budget_user", kInteger, &BudgetState::user_failures),
       BudgetField("budget_waits", kInteger, &BudgetState::waits),
       BudgetField("budget_furthest", kStep, &BudgetState::furthest_step),
       BudgetField("budget_node", kText, &BudgetState::last_node),
       BudgetField("budget_reason", kText, &BudgetState::last_reason),
       BudgetField("budget_step", kStep, &BudgetState::last_step),
       BudgetField("store_waits", kInteger, &BudgetState::store_waits),
       Field("rollback_step", kStep, &JobRecord::rollback_step),
       Field("not_before_ms", kInteger, &JobRecord::not_before_ms),
       Field("created_ms", kInteger, &JobRecord::created_ms),
       Field("started_ms", kInteger, &JobRecord::started_ms),
       Field("finished_ms", kInteger, &JobRecord::finished_ms),
       Field("resized_ms", kInteger, &JobRecord::resized_ms),
       Field("failure_class", kText, &JobRecord::failure_class),
       Field("resource_version", kInteger, &JobRecord::resource_version),
       Field("held_ms", kInteger, &JobRecord::held_ms),
       Field("held_since_ms", kInteger, &JobRecord::held_since_ms),
       Field("delete_wish", kInteger, &JobRecord::delete_wish),
       {"peak_bytes",
        kText,
        [](Statement& row, const JobRecord& job) {
          row.BindCopy(absl::StrJoin(job.peak_bytes, " "));
        },
        [](Statement& row, JobRecord& job) { job.peak_bytes = SplitInts(row.Text()); }}}};
  return table;
}

const Table<JobRecord>& JobSpecTable() {
  static const Table<JobRecord> table{"job_specs",
                                      {"job"},
                                      {Field("job", kText, &JobRecord::uid),
                                       Bytes("canonical", &JobRecord::canonical),
                                       Bytes("planned", &JobRecord::planned)}};
  return table;
}

const Table<JobEventRecord>& EventTable() {
  static const Table<JobEventRecord> table{"events",
                                           {},
                                           {Field("seq", kInteger, &JobEventRecord::seq),
                                            Field("time_ms", kInteger, &JobEventRecord::time_ms),
                                            Field("job", kText, &JobEventRecord::job_uid),
                                            Field("epoch", kInteger, &JobEventRecord::epoch),
                                            Field("attempt", kInteger, &JobEventRecord::attempt),
                                            Field("step", kStep, &JobEventRecord::step),
                                            Field("type", kText, &JobEventRecord::type),
                                            Field("reason", kText, &JobEventRecord::reason),
                                            Field("node", kText, &JobEventRecord::node),
                                            Field("rank", kStep, &JobEventRecord::rank),
                                            Field("message", kText, &JobEventRecord::message)}};
  return table;
}

const Table<RequestRecord>& RequestTable() {
  static const Table<RequestRecord> table{"requests",
                                          {},
                                          {Field("id", kText, &RequestRecord::id),
                                           Field("hash", kText, &RequestRecord::hash),
                                           Field("answer", kText, &RequestRecord::answer),
                                           Field("time_ms", kInteger, &RequestRecord::time_ms)}};
  return table;
}

const Table<OperationRecord>& OperationTable() {
  static const Table<OperationRecord> table{
      "operations",
      {"id"},
      {Field("id", kText, &OperationRecord::id),
       Field("job", kText, &OperationRecord::job_uid),
       Field("state", kInteger, &OperationRecord::state),
       Field("reason", kText, &OperationRecord::reason),
       Field("step", kStep, &OperationRecord::step),
       Field("save_id", kText, &OperationRecord::save_id),
       Field("sequence", kInteger, &OperationRecord::sequence),
       Field("created_ms", kInteger, &OperationRecord::created_ms),
       Field("deadline_ms", kInteger, &OperationRecord::deadline_ms)}};
  return table;
}

const Table<EpochRecord>& EpochTable() {
  static const Table<EpochRecord> table{"epochs",
                                        {"job", "epoch"},
                                        {Field("job", kText, &EpochRecord::job_uid),
                                         Field("epoch", kInteger, &EpochRecord::epoch),
                                         Field("attempt", kInteger, &EpochRecord::attempt),
                                         Field("world_size", kInteger, &EpochRecord::world_size),
                                         Field("plan_digest", kText, &EpochRecord::plan_digest),
                                         Field("members", kText, &EpochRecord::members),
                                         Field("first_step", kInteger, &EpochRecord::first_step),
                                         Field("restore_path", kText, &EpochRecord::restore_path),
                                         Field("time_ms", kInteger, &EpochRecord::time_ms),
                                         Field("transport", kText, &EpochRecord::transport)}};
  return table;
}

const Table<SaveRecord>& SaveTable() {
  static const Table<SaveRecord> table{"saves",
                                       {"job", "step", "epoch", "attempt"},
                                       {Field("job", kText, &SaveRecord::job_uid),
                                        Field("step", kInteger, &SaveRecord::step),
                                        Field("epoch", kInteger, &SaveRecord::epoch),
                                        Field("attempt", kInteger, &SaveRecord::attempt),
                                        Field("state", kInteger, &SaveRecord::state),
                                        Field("world_size", kInteger, &SaveRecord::world_size),
                                        Field("bytes", kInteger, &SaveRecord::bytes),
                                        Field("files", kInteger, &SaveRecord::files),
                                        Field("path", kText, &SaveRecord::path),
                                        Field("reason", kText, &SaveRecord::reason),
                                        Field("save_id", kText, &SaveRecord::save_id),
                                        Field("created_ms", kInteger, &SaveRecord::created_ms),
                                        Field("mesh", kText, &SaveRecord::mesh)}};
  return table;
}

const Table<NodeRow>& NodeTable() {
  static const Table<NodeRow> table{"nodes",
                                    {"id"},
                                    {Field("id", kText, &NodeRow::id),
                                     Field("incarnation", kText, &NodeRow::incarnation),
                                     Field("seen_ms", kInteger, &NodeRow::seen_ms),
                                     Field("hold", kInteger, &NodeRow::hold),
                                     Field("hold_reason", kText, &NodeRow::hold_reason),
                                     Field("host_id", kText, &NodeRow::host_id),
                                     Field("work_lock", kText, &NodeRow::work_lock),
                                     Field("has_left", kInteger, &NodeRow::has_left),
                                     Field("gone_reason", kText, &NodeRow::gone_reason)}};
  return table;
}

const Table<GoodputRow>& GoodputTable() {
  static const Table<GoodputRow> table{
      "goodput",
      {"job"},
      {Field("job", kText, &GoodputRow::job_uid),
       Field("times", kText, &GoodputRow::times),
       Field("curve", kText, &GoodputRow::curve),
       Field("pending_us", kInteger, &GoodputRow::pending_us),
       Field("devices", kInteger, &GoodputRow::devices),
       Field("wall_ms", kInteger, &GoodputRow::wall_ms),
       Field("last_step", kStep, &GoodputRow::last_step),
       Field("last_time_ms", kInteger, &GoodputRow::last_time_ms)}};
  return table;
}

absl::Status MatchColumns(sqlite3* database) {
  RETURN_IF_ERROR(MatchTable(database, JobTable()));
  RETURN_IF_ERROR(MatchTable(database, JobSpecTable()));
  RETURN_IF_ERROR(MatchTable(database, EventTable()));
  RETURN_IF_ERROR(MatchTable(database, RequestTable()));
  RETURN_IF_ERROR(MatchTable(database, OperationTable()));
  RETURN_IF_ERROR(MatchTable(database, EpochTable()));
  RETURN_IF_ERROR(MatchTable(database, SaveTable()));
  RETURN_IF_ERROR(MatchTable(database, GoodputTable()));
  return MatchTable(database, NodeTable());
}

std::string InsertSql(const std::string& table,
                      const std::vector<std::string>& key,
                      const std::vector<std::string>& columns) {
  const std::string places = absl::StrJoin(std::vector<std::string>(columns.size(), "?"), ",");
  std::string sql = absl::StrCat(
      "INSERT INTO ", table, " (", absl::StrJoin(columns, ","), ") VALUES (", places, ")");
  if (key.empty()) {
    return sql;
  }
  // An upsert and not REPLACE: replacing would delete the row that others refer to.
  std::string sets;
  std::string changed;  // a row that is the same is not written again
  for (const std::string& column : columns) {
    if (std::find(key.begin(), key.end(), column) == key.end()) {
      absl::StrAppend(&sets, sets.empty() ? "" : ", ", column, "=excluded.", column);
      absl::StrAppend(
          &changed, changed.empty() ? "" : " OR ", table, ".", column, " IS NOT excluded.", column);
    }
  }
  absl::StrAppend(&sql,
                  " ON CONFLICT (",
                  absl::StrJoin(key, ","),
                  ") DO UPDATE SET ",
                  sets,
                  " WHERE ",
                  changed);
  return sql;
}

}  // namespace ravel::coordinator
