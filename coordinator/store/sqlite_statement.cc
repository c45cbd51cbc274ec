#include "coordinator/store/sqlite_statement.h"

#include <absl/strings/str_cat.h>
#include <sqlite3.h>

namespace ravel::coordinator {

absl::Status SqliteStatus(int result, sqlite3* database) {
  const std::string message = absl::StrCat("database: ", sqlite3_errmsg(database));
  switch (result & 0xff) {
    case SQLITE_OK:
    case SQLITE_ROW:
    case SQLITE_DONE:
      return absl::OkStatus();
    case SQLITE_FULL:
    case SQLITE_IOERR:
      return absl::ResourceExhaustedError(message);
    case SQLITE_CORRUPT:
    case SQLITE_NOTADB:
      return absl::DataLossError(message);
    case SQLITE_CONSTRAINT:
      return absl::AlreadyExistsError(message);
    case SQLITE_BUSY:
    case SQLITE_LOCKED:
      return absl::UnavailableError(message);
    default:
      return absl::InternalError(message);
  }
}

Statement::Statement(sqlite3* database, const std::string& sql) : database_(database) {
  result_ =
      sqlite3_prepare_v2(database, sql.data(), static_cast<int>(sql.size()), &statement_, nullptr);
}

Statement::~Statement() {
  sqlite3_finalize(statement_);
}

Statement& Statement::Bind(int64_t value) {
  sqlite3_bind_int64(statement_, ++bound_, value);
  return *this;
}

Statement& Statement::Bind(const std::string& value) {
  sqlite3_bind_text(
      statement_, ++bound_, value.data(), static_cast<int>(value.size()), SQLITE_STATIC);
  return *this;
}

Statement& Statement::BindCopy(const std::string& value) {
  sqlite3_bind_text(
      statement_, ++bound_, value.data(), static_cast<int>(value.size()), SQLITE_TRANSIENT);
  return *this;
}

Statement& Statement::BindBlob(const std::string& value) {
  sqlite3_bind_blob(
      statement_, ++bound_, value.data(), static_cast<int>(value.size()), SQLITE_STATIC);
  return *this;
}

bool Statement::Step() {
  if (result_ == SQLITE_OK || result_ == SQLITE_ROW) {
    result_ = sqlite3_step(statement_);
  }
  read_ = 0;
  return result_ == SQLITE_ROW;
}

int64_t Statement::Int() {
  return sqlite3_column_int64(statement_, read_++);
}

std::string Statement::Text() {
  const int column = read_++;
  const void* data = sqlite3_column_blob(statement_, column);
  const int size = sqlite3_column_bytes(statement_, column);
  return data == nullptr ? ""
                         : std::string(static_cast<const char*>(data), static_cast<size_t>(size));
}

absl::Status Statement::status() const {
  return SqliteStatus(result_, database_);
}

}  // namespace ravel::coordinator
