#include "coordinator/sqlite_job_store.h"

#include <cerrno>
#include <utility>

#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <absl/strings/str_split.h>
#include <fcntl.h>
#include <sqlite3.h>
#include <sys/file.h>
#include <unistd.h>

#include "common/crypto.h"

namespace ravel::coordinator {
namespace {

// On disk: a change is a new migration at the end, never an edit.
constexpr const char* kMigrations[SqliteJobStore::kSchemaVersion] = {R"sql(
CREATE TABLE jobs (uid TEXT PRIMARY KEY, namespace TEXT NOT NULL, name TEXT NOT NULL, canonical BLOB NOT NULL,
  planned BLOB NOT NULL, state INTEGER NOT NULL, reason TEXT, message TEXT, generation INTEGER, epoch INTEGER,
  launched_epoch INTEGER, attempt INTEGER, world_size INTEGER, committed_step INTEGER, committed_path TEXT,
  highest_commit INTEGER, restarts INTEGER, budget_used INTEGER, budget_no_progress INTEGER, budget_times TEXT,
  budget_reason TEXT, budget_step INTEGER, not_before_ms INTEGER, created_ms INTEGER, started_ms INTEGER,
  finished_ms INTEGER, resized_ms INTEGER, failure_class TEXT, resource_version INTEGER);
CREATE UNIQUE INDEX jobs_by_name ON jobs (namespace, name);
CREATE TABLE events (seq INTEGER PRIMARY KEY, time_ms INTEGER, job TEXT NOT NULL REFERENCES jobs (uid), epoch INTEGER,
  attempt INTEGER, step INTEGER, type TEXT, reason TEXT, node TEXT, rank INTEGER, message TEXT);
CREATE INDEX events_by_job ON events (job, seq);
CREATE TABLE requests (id TEXT PRIMARY KEY, hash TEXT NOT NULL, answer TEXT NOT NULL, time_ms INTEGER);
CREATE TABLE operations (id TEXT PRIMARY KEY, job TEXT NOT NULL REFERENCES jobs (uid), state INTEGER, reason TEXT,
  step INTEGER, save_id TEXT, sequence INTEGER, created_ms INTEGER);
CREATE TABLE epochs (job TEXT NOT NULL REFERENCES jobs (uid), epoch INTEGER, attempt INTEGER, world_size INTEGER,
  plan_digest TEXT, members TEXT, first_step INTEGER, restore_path TEXT, time_ms INTEGER, PRIMARY KEY (job, epoch));
CREATE TABLE saves (job TEXT NOT NULL REFERENCES jobs (uid), step INTEGER, epoch INTEGER, attempt INTEGER,
  state INTEGER, world_size INTEGER, bytes INTEGER, files INTEGER, path TEXT, reason TEXT, save_id TEXT,
  created_ms INTEGER, PRIMARY KEY (job, step, epoch, attempt));
CREATE TABLE nodes (id TEXT PRIMARY KEY, incarnation TEXT, seen_ms INTEGER);
)sql"};

// A prepared statement; values are bound and read in order.
class Statement {
 public:
  Statement(sqlite3* database, const char* sql) : database_(database) {
    result_ = sqlite3_prepare_v2(database, sql, -1, &statement_, nullptr);
  }
  ~Statement() { sqlite3_finalize(statement_); }
  Statement(const Statement&) = delete;
  Statement& operator=(const Statement&) = delete;

  Statement& Bind(int64_t value) {
    sqlite3_bind_int64(statement_, ++bound_, value);
    return *this;
  }
  Statement& Bind(const std::string& value) {
    sqlite3_bind_text(
        statement_, ++bound_, value.data(), static_cast<int>(value.size()), SQLITE_TRANSIENT);
    return *this;
  }
  Statement& BindBlob(const std::string& value) {
    sqlite3_bind_blob(
        statement_, ++bound_, value.data(), static_cast<int>(value.size()), SQLITE_TRANSIENT);
    return *this;
  }
  // True: there is a row to read.
  bool Step() {
    if (result_ == SQLITE_OK || result_ == SQLITE_ROW) {
      result_ = sqlite3_step(statement_);
    }
    read_ = 0;
    return result_ == SQLITE_ROW;
  }
  int64_t Int() { return sqlite3_column_int64(statement_, read_++); }
  std::string Text() {
    const int column = read_++;
    const void* data = sqlite3_column_blob(statement_, column);
    const int size = sqlite3_column_bytes(statement_, column);
    return data == nullptr ? ""
                           : std::string(static_cast<const char*>(data), static_cast<size_t>(size));
  }
  absl::Status status() const;

 private:
  sqlite3* database_;
  sqlite3_stmt* statement_ = nullptr;
  int result_ = SQLITE_OK;
  int bound_ = 0;
  int read_ = 0;
};

absl::Status ToStatus(int result, sqlite3* database) {
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
    default:
      return absl::InternalError(message);
  }
}

absl::Status Statement::status() const {
  return ToStatus(result_, database_);
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

JobRecord ReadJob(Statement& row) {
  JobRecord job;
  job.uid = row.Text();
  job.namespace_name = row.Text();
  job.name = row.Text();
  job.canonical = row.Text();
  job.planned = row.Text();
  job.state = static_cast<JobState>(row.Int());
  job.reason = row.Text();
  job.message = row.Text();
  job.generation = row.Int();
  job.epoch = row.Int();
  job.launched_epoch = row.Int();
  job.attempt = row.Int();
  job.world_size = row.Int();
  job.committed_step = row.Int();
  job.committed_path = row.Text();
  job.highest_commit = row.Int();
  job.restarts = row.Int();
  job.budget.used = row.Int();
  job.budget.no_progress = row.Int();
  job.budget.failure_times_ms = SplitInts(row.Text());
  job.budget.last_reason = row.Text();
  job.budget.last_step = row.Int();
  job.not_before_ms = row.Int();
  job.created_ms = row.Int();
  job.started_ms = row.Int();
  job.finished_ms = row.Int();
  job.resized_ms = row.Int();
  job.failure_class = row.Text();
  job.resource_version = row.Int();
  return job;
}

absl::Status WriteJob(sqlite3* database, const JobRecord& job) {
  // An upsert and not REPLACE: replacing would delete the row that events refer to.
  Statement row(
      database,
      "INSERT INTO jobs VALUES "
      "(?1,?2,?3,?4,?5,?6,?7,?8,?9,?10,?11,?12,?13,?14,?15,?16,?17,?18,?19,?20,?21,?22,"
      "?23,?24,?25,?26,?27,?28,?29) ON CONFLICT (uid) DO UPDATE SET canonical=?4, planned=?5, "
      "state=?6, "
      "reason=?7, message=?8, generation=?9, epoch=?10, launched_epoch=?11, attempt=?12, "
      "world_size=?13, "
      "committed_step=?14, committed_path=?15, highest_commit=?16, restarts=?17, budget_used=?18, "
      "budget_no_progress=?19, budget_times=?20, budget_reason=?21, budget_step=?22, "
      "not_before_ms=?23, "
      "created_ms=?24, started_ms=?25, finished_ms=?26, resized_ms=?27, failure_class=?28, "
      "resource_version=?29");
  row.Bind(job.uid)
      .Bind(job.namespace_name)
      .Bind(job.name)
      .BindBlob(job.canonical)
      .BindBlob(job.planned);
  row.Bind(static_cast<int64_t>(job.state))
      .Bind(job.reason)
      .Bind(job.message)
      .Bind(job.generation)
      .Bind(job.epoch);
  row.Bind(job.launched_epoch)
      .Bind(job.attempt)
      .Bind(job.world_size)
      .Bind(job.committed_step)
      .Bind(job.committed_path);
  row.Bind(job.highest_commit)
      .Bind(job.restarts)
      .Bind(job.budget.used)
      .Bind(job.budget.no_progress);
  row.Bind(absl::StrJoin(job.budget.failure_times_ms, " "))
      .Bind(job.budget.last_reason)
      .Bind(job.budget.last_step);
  row.Bind(job.not_before_ms)
      .Bind(job.created_ms)
      .Bind(job.started_ms)
      .Bind(job.finished_ms)
      .Bind(job.resized_ms);
  row.Bind(job.failure_class).Bind(job.resource_version);
  row.Step();
  return row.status();
}

absl::Status WriteEvent(sqlite3* database, const JobEventRecord& event) {
  Statement row(database, "INSERT INTO events VALUES (?,?,?,?,?,?,?,?,?,?,?)");
  row.Bind(event.seq)
      .Bind(event.time_ms)
      .Bind(event.job_uid)
      .Bind(event.epoch)
      .Bind(event.attempt)
      .Bind(event.step);
  row.Bind(event.type).Bind(event.reason).Bind(event.node).Bind(event.rank).Bind(event.message);
  row.Step();
  return row.status();
}

absl::Status WriteOperation(sqlite3* database, const OperationRecord& operation) {
  Statement row(database, "INSERT OR REPLACE INTO operations VALUES (?,?,?,?,?,?,?,?)");
  row.Bind(operation.id)
      .Bind(operation.job_uid)
      .Bind(static_cast<int64_t>(operation.state))
      .Bind(operation.reason);
  row.Bind(operation.step)
      .Bind(operation.save_id)
      .Bind(operation.sequence)
      .Bind(operation.created_ms);
  row.Step();
  return row.status();
}

absl::Status WriteEpoch(sqlite3* database, const EpochRecord& epoch) {
  Statement row(database, "INSERT OR REPLACE INTO epochs VALUES (?,?,?,?,?,?,?,?,?)");
  row.Bind(epoch.job_uid)
      .Bind(epoch.epoch)
      .Bind(epoch.attempt)
      .Bind(epoch.world_size)
      .Bind(epoch.plan_digest);
  row.Bind(epoch.members).Bind(epoch.first_step).Bind(epoch.restore_path).Bind(epoch.time_ms);
  row.Step();
  return row.status();
}

absl::Status WriteSave(sqlite3* database, const SaveRecord& save) {
  Statement row(database, "INSERT OR REPLACE INTO saves VALUES (?,?,?,?,?,?,?,?,?,?,?,?)");
  row.Bind(save.job_uid)
      .Bind(save.step)
      .Bind(save.epoch)
      .Bind(save.attempt)
      .Bind(static_cast<int64_t>(save.state));
  row.Bind(save.world_size)
      .Bind(save.bytes)
      .Bind(save.files)
      .Bind(save.path)
      .Bind(save.reason)
      .Bind(save.save_id);
  row.Bind(save.created_ms);
  row.Step();
  return row.status();
}

void LoadOperations(sqlite3* database, std::vector<OperationRecord>& operations) {
  Statement row(database, "SELECT * FROM operations");
  while (row.Step()) {
    OperationRecord operation;
    operation.id = row.Text();
    operation.job_uid = row.Text();
    operation.state = static_cast<OperationState>(row.Int());
    operation.reason = row.Text();
    operation.step = row.Int();
    operation.save_id = row.Text();
    operation.sequence = row.Int();
    operation.created_ms = row.Int();
    operations.push_back(std::move(operation));
  }
}

void LoadSaves(sqlite3* database, std::vector<SaveRecord>& saves) {
  Statement row(database, "SELECT * FROM saves ORDER BY job, step, epoch, attempt");
  while (row.Step()) {
    SaveRecord save;
    save.job_uid = row.Text();
    save.step = row.Int();
    save.epoch = row.Int();
    save.attempt = row.Int();
    save.state = static_cast<SaveState>(row.Int());
    save.world_size = row.Int();
    save.bytes = row.Int();
    save.files = row.Int();
    save.path = row.Text();
    save.reason = row.Text();
    save.save_id = row.Text();
    save.created_ms = row.Int();
    saves.push_back(std::move(save));
  }
}

absl::StatusOr<int> Lock(const std::string& directory) {
  const std::string path = absl::StrCat(directory, "/coordinator.lock");
  const int file = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (file < 0) {
    return ErrnoStatus(errno, path);
  }
  if (flock(file, LOCK_EX | LOCK_NB) != 0) {
    close(file);
    return absl::AlreadyExistsError(
        absl::StrCat(path, ": another coordinator works in this directory"));
  }
  return file;
}

}  // namespace

absl::StatusOr<std::unique_ptr<SqliteJobStore>> SqliteJobStore::Create(
    const std::string& directory) {
  ASSIGN_OR_RETURN(const int lock_file, Lock(directory));
  sqlite3* database = nullptr;
  const std::string path = absl::StrCat(directory, "/ravel.db");
  const int result =
      sqlite3_open_v2(path.c_str(), &database, SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE, nullptr);
  std::unique_ptr<SqliteJobStore> store(new SqliteJobStore(database, lock_file));
  if (result != SQLITE_OK) {
    return Annotate(ToStatus(result, database), path);
  }
  sqlite3_busy_timeout(database, 2000);
  RETURN_IF_ERROR(Annotate(store->Execute("PRAGMA journal_mode=WAL"), path));
  RETURN_IF_ERROR(store->Execute("PRAGMA synchronous=FULL"));
  RETURN_IF_ERROR(store->Execute("PRAGMA foreign_keys=ON"));
  Statement check(database, "PRAGMA quick_check(1)");
  if (!check.Step() || check.Text() != "ok") {
    return absl::DataLossError(
        absl::StrCat(path, ": the database is damaged; restore it from a backup"));
  }
  RETURN_IF_ERROR(Annotate(store->Migrate(), path));
  return store;
}

SqliteJobStore::~SqliteJobStore() {
  sqlite3_close(database_);
  close(lock_file_);
}

absl::Status SqliteJobStore::Execute(const char* sql) {
  return ToStatus(sqlite3_exec(database_, sql, nullptr, nullptr, nullptr), database_);
}

absl::Status SqliteJobStore::Migrate() {
  int64_t version = 0;
  {
    Statement row(database_, "PRAGMA user_version");
    version = row.Step() ? row.Int() : 0;
  }
  if (version > kSchemaVersion) {
    return absl::FailedPreconditionError(absl::StrCat("schema version ",
                                                      version,
                                                      " is newer than this program's ",
                                                      kSchemaVersion,
                                                      "; use the release that wrote it"));
  }
  for (; version < kSchemaVersion; ++version) {
    RETURN_IF_ERROR(Execute("BEGIN IMMEDIATE"));
    absl::Status status = Execute(kMigrations[version]);
    if (status.ok() && version == 0) {
      status = Execute("CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL)");
    }
    if (status.ok() && version == 0) {
      Statement row(database_, "INSERT INTO meta VALUES ('cluster_id', ?), ('term', '0')");
      row.Bind(RandomHex(16)).Step();
      status = row.status();
    }
    if (status.ok()) {
      status = Execute(absl::StrCat("PRAGMA user_version=", version + 1).c_str());
    }
    if (!status.ok()) {
      Execute("ROLLBACK").IgnoreError();
      return status;
    }
    RETURN_IF_ERROR(Execute("COMMIT"));
  }
  return absl::OkStatus();
}

absl::StatusOr<LoadedState> SqliteJobStore::Open() {
  RETURN_IF_ERROR(Execute("UPDATE meta SET value = CAST(value AS INTEGER) + 1 WHERE key = 'term'"));
  LoadedState state;
  {
    Statement row(database_,
                  "SELECT (SELECT value FROM meta WHERE key='term'), (SELECT value FROM meta WHERE "
                  "key='cluster_id'), (SELECT COALESCE(MAX(seq), 0) FROM events), (SELECT "
                  "COALESCE(MAX(resource_version), 0) FROM jobs)");
    if (!row.Step()) {
      return row.status();
    }
    term_ = state.term = row.Int();
    state.cluster_id = row.Text();
    state.last_event_seq = row.Int();
    state.last_resource_version = row.Int();
  }
  Statement jobs(database_, "SELECT * FROM jobs ORDER BY created_ms, uid");
  while (jobs.Step()) {
    state.jobs.push_back(ReadJob(jobs));
  }
  RETURN_IF_ERROR(jobs.status());
  LoadOperations(database_, state.operations);
  LoadSaves(database_, state.saves);
  Statement nodes(database_, "SELECT id, incarnation, seen_ms FROM nodes");
  while (nodes.Step()) {
    NodeRow node;
    node.id = nodes.Text();
    node.incarnation = nodes.Text();
    node.seen_ms = nodes.Int();
    state.nodes.push_back(std::move(node));
  }
  return state;
}

absl::Status SqliteJobStore::CheckTerm() {
  Statement row(database_, "SELECT value FROM meta WHERE key='term'");
  if (!row.Step()) {
    return row.status();
  }
  if (row.Int() != term_) {
    return absl::AbortedError("another coordinator has opened this database");
  }
  return absl::OkStatus();
}

absl::Status SqliteJobStore::Write(const StoreChange& change) {
  RETURN_IF_ERROR(CheckTerm());
  for (const JobRecord& job : change.jobs) {
    RETURN_IF_ERROR(WriteJob(database_, job));
  }
  for (const JobEventRecord& event : change.events) {
    RETURN_IF_ERROR(WriteEvent(database_, event));
  }
  if (change.request) {
    Statement row(database_, "INSERT INTO requests VALUES (?,?,?,?)");
    row.Bind(change.request->id)
        .Bind(change.request->hash)
        .Bind(change.request->answer)
        .Bind(change.request->time_ms);
    row.Step();
    RETURN_IF_ERROR(row.status());
  }
  for (const OperationRecord& operation : change.operations) {
    RETURN_IF_ERROR(WriteOperation(database_, operation));
  }
  for (const EpochRecord& epoch : change.epochs) {
    RETURN_IF_ERROR(WriteEpoch(database_, epoch));
  }
  for (const SaveRecord& save : change.saves) {
    RETURN_IF_ERROR(WriteSave(database_, save));
  }
  for (const NodeRow& node : change.nodes) {
    Statement row(database_, "INSERT OR REPLACE INTO nodes VALUES (?,?,?)");
    row.Bind(node.id).Bind(node.incarnation).Bind(node.seen_ms).Step();
    RETURN_IF_ERROR(row.status());
  }
  return absl::OkStatus();
}

absl::Status SqliteJobStore::Apply(const StoreChange& change) {
  RETURN_IF_ERROR(Execute("BEGIN IMMEDIATE"));
  absl::Status status = Write(change);
  if (status.ok()) {
    status = Execute("COMMIT");
  }
  if (!status.ok()) {
    Execute("ROLLBACK").IgnoreError();
  }
  return status;
}

absl::StatusOr<std::optional<RequestRecord>> SqliteJobStore::FindRequest(const std::string& id) {
  Statement row(database_, "SELECT id, hash, answer, time_ms FROM requests WHERE id = ?");
  if (!row.Bind(id).Step()) {
    RETURN_IF_ERROR(row.status());
    return std::optional<RequestRecord>();
  }
  RequestRecord request;
  request.id = row.Text();
  request.hash = row.Text();
  request.answer = row.Text();
  request.time_ms = row.Int();
  return std::optional<RequestRecord>(std::move(request));
}

absl::StatusOr<std::vector<JobEventRecord>> SqliteJobStore::Events(const std::string& job_uid,
                                                                   int64_t after,
                                                                   int64_t limit) {
  Statement row(database_, "SELECT * FROM events WHERE job = ? AND seq > ? ORDER BY seq LIMIT ?");
  row.Bind(job_uid).Bind(after).Bind(limit);
  std::vector<JobEventRecord> events;
  while (row.Step()) {
    JobEventRecord event;
    event.seq = row.Int();
    event.time_ms = row.Int();
    event.job_uid = row.Text();
    event.epoch = row.Int();
    event.attempt = row.Int();
    event.step = row.Int();
    event.type = row.Text();
    event.reason = row.Text();
    event.node = row.Text();
    event.rank = row.Int();
    event.message = row.Text();
    events.push_back(std::move(event));
  }
  RETURN_IF_ERROR(row.status());
  return events;
}

}  // namespace ravel::coordinator
