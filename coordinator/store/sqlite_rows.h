#pragma once

// Which column holds which field of which record: said here once. INSERT, UPDATE, SELECT and the
// columns that an older database lacks all follow from these tables. A new field is one line in
// sqlite_rows.cc.

#include <functional>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>

#include "coordinator/store/job_store.h"
#include "coordinator/store/sqlite_statement.h"

namespace ravel::coordinator {

template <typename Record>
struct Column {
  std::string name;
  // As in ALTER TABLE ADD COLUMN: with a default, for rows that were written before.
  std::string type;
  std::function<void(Statement&, const Record&)> bind;
  std::function<void(Statement&, Record&)> read;
};

template <typename Record>
struct Table {
  std::string name;
  std::vector<std::string> key;  // empty: rows are inserted once and never replaced
  std::vector<Column<Record>> columns;
};

// On disk: names are never reused.
const Table<JobRecord>& JobTable();
const Table<JobRecord>& JobSpecTable();  // what transitions do not change
const Table<JobEventRecord>& EventTable();
const Table<RequestRecord>& RequestTable();
const Table<OperationRecord>& OperationTable();
const Table<EpochRecord>& EpochTable();
const Table<SaveRecord>& SaveTable();
const Table<NodeRow>& NodeTable();
const Table<GoodputRow>& GoodputTable();

// Adds the columns that the database lacks. A column that this program does not know is
// FailedPrecondition: a newer program wrote it.
absl::Status MatchColumns(sqlite3* database);

std::string InsertSql(const std::string& table,
                      const std::vector<std::string>& key,
                      const std::vector<std::string>& columns);

template <typename Record>
std::vector<std::string> ColumnNames(const Table<Record>& table) {
  std::vector<std::string> names;
  for (const Column<Record>& column : table.columns) {
    names.push_back(column.name);
  }
  return names;
}

template <typename Record>
absl::Status WriteRow(sqlite3* database, const Table<Record>& table, const Record& record) {
  Statement row(database, InsertSql(table.name, table.key, ColumnNames(table)));
  for (const Column<Record>& column : table.columns) {
    column.bind(row, record);
  }
  row.Step();
  return row.status();
}

// `tail` is what follows FROM: WHERE, ORDER BY, LIMIT. `bind` fills its parameters.
template <typename Record>
absl::Status ReadRows(
    sqlite3* database,
    const Table<Record>& table,
    const std::string& tail,
    std::vector<Record>& records,
    const std::function<void(Statement&)>& bind = [](Statement&) {}) {
  std::string names;
  for (const std::string& name : ColumnNames(table)) {
    absl::StrAppend(&names, names.empty() ? "" : ", ", name);
  }
  Statement row(database, absl::StrCat("SELECT ", names, " FROM ", table.name, " ", tail));
  bind(row);
  while (row.Step()) {
    Record& record = records.emplace_back();
    for (const Column<Record>& column : table.columns) {
      column.read(row, record);
    }
  }
  return Annotate(row.status(), table.name);
}

}  // namespace ravel::coordinator
