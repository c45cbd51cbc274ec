#pragma once

// A prepared statement, and what SQLite's answers mean.

#include <cstdint>
#include <string>

#include "common/status.h"

struct sqlite3;
struct sqlite3_stmt;

namespace ravel::coordinator {

// ResourceExhausted: the disk is full or fails. DataLoss: the file is damaged. AlreadyExists: a
// constraint. Unavailable: another process holds the database.
absl::Status SqliteStatus(int result, sqlite3* database);

// Values are bound and read in the order of columns.
class Statement {
 public:
  Statement(sqlite3* database, const std::string& sql);
  ~Statement();
  Statement(const Statement&) = delete;
  Statement& operator=(const Statement&) = delete;

  Statement& Bind(int64_t value);
  // The text is not copied: it outlives the statement.
  Statement& Bind(const std::string& value);
  Statement& BindCopy(const std::string& value);
  Statement& BindBlob(const std::string& value);
  // True: there is a row to read.
  bool Step();
  int64_t Int();
  std::string Text();
  absl::Status status() const;

 private:
  sqlite3* database_;
  sqlite3_stmt* statement_ = nullptr;
  int result_;
  int bound_ = 0;
  int read_ = 0;
};

}  // namespace ravel::coordinator
