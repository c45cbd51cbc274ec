#include "coordinator/store/sqlite_access_store.h"

#include <cerrno>

#include <absl/strings/str_cat.h>
#include <sqlite3.h>
#include <sys/stat.h>

#include "coordinator/store/sqlite_statement.h"

namespace ravel::coordinator {
namespace {

constexpr int64_t kSchemaVersion = 2;
constexpr int kBusyMs = 2000;

// On disk: a change is a new migration, never an edit.
constexpr char kSchema[] = R"sql(
CREATE TABLE identities (kind INTEGER NOT NULL, name TEXT NOT NULL, role INTEGER NOT NULL, namespace TEXT NOT NULL,
  enrolment TEXT NOT NULL, created_ms INTEGER NOT NULL, revoked_ms INTEGER NOT NULL, PRIMARY KEY (kind, name));
CREATE TABLE tokens (hash TEXT PRIMARY KEY, kind INTEGER NOT NULL, name TEXT NOT NULL, role INTEGER NOT NULL,
  namespace TEXT NOT NULL, uses_left INTEGER NOT NULL, created_ms INTEGER NOT NULL, expires_ms INTEGER NOT NULL,
  created_by TEXT NOT NULL);
CREATE TABLE audit (seq INTEGER PRIMARY KEY AUTOINCREMENT, time_ms INTEGER NOT NULL, who TEXT NOT NULL,
  peer TEXT NOT NULL, verb TEXT NOT NULL, object TEXT NOT NULL, request_id TEXT NOT NULL, result TEXT NOT NULL,
  message TEXT NOT NULL);
)sql";

// Version 2. Enrolments that were replaced before it are not known any more.
constexpr char kEndedEnrolments[] = R"sql(
CREATE TABLE ended_enrolments (enrolment TEXT PRIMARY KEY, kind INTEGER NOT NULL, name TEXT NOT NULL,
  ended_ms INTEGER NOT NULL);
INSERT INTO ended_enrolments SELECT enrolment, kind, name, revoked_ms FROM identities WHERE revoked_ms != 0;
)sql";

absl::Status Done(Statement& row) {
  row.Step();
  return row.status();
}

absl::Status WriteIdentity(sqlite3* database, const IdentityRow& identity) {
  Statement row(database, "INSERT OR REPLACE INTO identities VALUES (?, ?, ?, ?, ?, ?, ?)");
  row.Bind(static_cast<int64_t>(identity.kind))
      .Bind(identity.name)
      .Bind(static_cast<int64_t>(identity.role))
      .Bind(identity.namespace_name)
      .Bind(identity.enrolment)
      .Bind(identity.created_ms)
      .Bind(identity.revoked_ms);
  return Done(row);
}

absl::Status WriteToken(sqlite3* database, const TokenRow& token) {
  Statement row(database, "INSERT OR REPLACE INTO tokens VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)");
  row.Bind(token.hash)
      .Bind(static_cast<int64_t>(token.kind))
      .Bind(token.name)
      .Bind(static_cast<int64_t>(token.role))
      .Bind(token.namespace_name)
      .Bind(token.uses_left)
      .Bind(token.created_ms)
      .Bind(token.expires_ms)
      .Bind(token.created_by);
  return Done(row);
}

absl::Status WriteEnded(sqlite3* database, const EndedEnrolment& ended) {
  Statement row(database, "INSERT OR REPLACE INTO ended_enrolments VALUES (?, ?, ?, ?)");
  row.Bind(ended.enrolment)
      .Bind(static_cast<int64_t>(ended.kind))
      .Bind(ended.name)
      .Bind(ended.ended_ms);
  return Done(row);
}

absl::Status WriteAudit(sqlite3* database, const AuditRow& audit) {
  Statement row(database,
                "INSERT INTO audit (time_ms, who, peer, verb, object, request_id, result, message) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?)");
  row.Bind(audit.time_ms)
      .Bind(audit.who)
      .Bind(audit.peer)
      .Bind(audit.verb)
      .Bind(audit.object)
      .Bind(audit.request_id)
      .Bind(audit.result)
      .Bind(audit.message);
  return Done(row);
}

}  // namespace

absl::StatusOr<std::unique_ptr<SqliteAccessStore>> SqliteAccessStore::Open(
    const std::string& directory) {
  const std::string path = directory + "/access.db";
  sqlite3* database = nullptr;
  const int result =
      sqlite3_open_v2(path.c_str(), &database, SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE, nullptr);
  std::unique_ptr<SqliteAccessStore> store(new SqliteAccessStore(database));
  MutexLock lock(store->mutex_);
  if (result != SQLITE_OK) {
    return Annotate(SqliteStatus(result, database), path);
  }
  if (chmod(path.c_str(), 0600) != 0) {  // the log's files get the same mode
    return ErrnoStatus(errno, path);
  }
  RETURN_IF_ERROR(Annotate(store->SetUp(), path));
  return store;
}

SqliteAccessStore::~SqliteAccessStore() {
  MutexLock lock(mutex_);
  sqlite3_close(database_);
}

absl::Status SqliteAccessStore::Execute(const char* sql) {
  return SqliteStatus(sqlite3_exec(database_, sql, nullptr, nullptr, nullptr), database_);
}

absl::Status SqliteAccessStore::SetUp() {
  sqlite3_busy_timeout(database_, kBusyMs);
  RETURN_IF_ERROR(Execute("PRAGMA journal_mode=WAL"));
  RETURN_IF_ERROR(Execute("PRAGMA synchronous=FULL"));
  {
    Statement check(database_, "PRAGMA quick_check(1)");
    if (!check.Step() || check.Text() != "ok") {
      return absl::DataLossError("the database of identities is damaged");
    }
  }
  int64_t version = 0;
  {
    Statement row(database_, "PRAGMA user_version");
    version = row.Step() ? row.Int() : 0;
  }
  if (version > kSchemaVersion) {
    return absl::FailedPreconditionError(
        absl::StrCat("schema version ", version, " is newer than this program's ", kSchemaVersion));
  }
  if (version == 0) {
    RETURN_IF_ERROR(Execute(
        absl::StrCat("BEGIN IMMEDIATE;", kSchema, "PRAGMA user_version=1; COMMIT").c_str()));
  }
  if (version < 2) {
    RETURN_IF_ERROR(
        Execute(absl::StrCat("BEGIN IMMEDIATE;", kEndedEnrolments, "PRAGMA user_version=2; COMMIT")
                    .c_str()));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<IdentityRow>> SqliteAccessStore::Identities() {
  MutexLock lock(mutex_);
  std::vector<IdentityRow> identities;
  Statement row(database_, "SELECT * FROM identities ORDER BY kind, name");
  while (row.Step()) {
    IdentityRow& identity = identities.emplace_back();
    identity.kind = static_cast<IdentityKind>(row.Int());
    identity.name = row.Text();
    identity.role = static_cast<Role>(row.Int());
    identity.namespace_name = row.Text();
    identity.enrolment = row.Text();
    identity.created_ms = row.Int();
    identity.revoked_ms = row.Int();
  }
  RETURN_IF_ERROR(row.status());
  return identities;
}

absl::StatusOr<std::vector<TokenRow>> SqliteAccessStore::Tokens() {
  MutexLock lock(mutex_);
  std::vector<TokenRow> tokens;
  Statement row(database_, "SELECT * FROM tokens");
  while (row.Step()) {
    TokenRow& token = tokens.emplace_back();
    token.hash = row.Text();
    token.kind = static_cast<IdentityKind>(row.Int());
    token.name = row.Text();
    token.role = static_cast<Role>(row.Int());
    token.namespace_name = row.Text();
    token.uses_left = row.Int();
    token.created_ms = row.Int();
    token.expires_ms = row.Int();
    token.created_by = row.Text();
  }
  RETURN_IF_ERROR(row.status());
  return tokens;
}

absl::StatusOr<std::vector<EndedEnrolment>> SqliteAccessStore::EndedEnrolments() {
  MutexLock lock(mutex_);
  std::vector<EndedEnrolment> enrolments;
  Statement row(database_, "SELECT * FROM ended_enrolments");
  while (row.Step()) {
    EndedEnrolment& ended = enrolments.emplace_back();
    ended.enrolment = row.Text();
    ended.kind = static_cast<IdentityKind>(row.Int());
    ended.name = row.Text();
    ended.ended_ms = row.Int();
  }
  RETURN_IF_ERROR(row.status());
  return enrolments;
}

absl::Status SqliteAccessStore::Write(const AccessChange& change) {
  for (const IdentityRow& identity : change.identities) {
    RETURN_IF_ERROR(WriteIdentity(database_, identity));
  }
  for (const TokenRow& token : change.tokens) {
    RETURN_IF_ERROR(WriteToken(database_, token));
  }
  for (const std::string& hash : change.removed_tokens) {
    Statement row(database_, "DELETE FROM tokens WHERE hash = ?");
    row.Bind(hash);
    RETURN_IF_ERROR(Done(row));
  }
  for (const AuditRow& audit : change.audit) {
    RETURN_IF_ERROR(WriteAudit(database_, audit));
  }
  for (const EndedEnrolment& ended : change.ended) {
    RETURN_IF_ERROR(WriteEnded(database_, ended));
  }
  if (change.forget_ended_before_ms > 0) {
    Statement row(database_, "DELETE FROM ended_enrolments WHERE ended_ms < ?");
    row.Bind(change.forget_ended_before_ms);
    RETURN_IF_ERROR(Done(row));
  }
  return absl::OkStatus();
}

absl::Status SqliteAccessStore::Apply(const AccessChange& change) {
  MutexLock lock(mutex_);
  RETURN_IF_ERROR(Execute("BEGIN IMMEDIATE"));
  absl::Status status = Write(change);
  status = status.ok() ? Execute("COMMIT") : status;
  if (!status.ok()) {
    Execute("ROLLBACK").IgnoreError();
  }
  return status;
}

absl::StatusOr<std::vector<AuditRow>> SqliteAccessStore::Audit(int64_t after, int64_t limit) {
  MutexLock lock(mutex_);
  std::vector<AuditRow> rows;
  Statement row(database_, "SELECT * FROM audit WHERE seq > ? ORDER BY seq LIMIT ?");
  row.Bind(after).Bind(limit);
  while (row.Step()) {
    AuditRow& audit = rows.emplace_back();
    audit.seq = row.Int();
    audit.time_ms = row.Int();
    audit.who = row.Text();
    audit.peer = row.Text();
    audit.verb = row.Text();
    audit.object = row.Text();
    audit.request_id = row.Text();
    audit.result = row.Text();
    audit.message = row.Text();
  }
  RETURN_IF_ERROR(row.status());
  return rows;
}

absl::Status SqliteAccessStore::Trim(int64_t keep) {
  MutexLock lock(mutex_);
  Statement row(database_, "DELETE FROM audit WHERE seq <= (SELECT MAX(seq) FROM audit) - ?");
  row.Bind(keep);
  return Done(row);
}

}  // namespace ravel::coordinator
