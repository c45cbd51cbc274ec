// The durable store. WAL with synchronous=FULL: a transaction that returned OK survives a power
// cut. Two fences keep a second writer out: a lock file against processes of this machine, and the
// term, which each transaction compares with the database, against everything else. Network file
// systems are refused, because their locks and WAL do not hold. A full disk is met by giving up
// space that may be given up, then trying once more. Schema changes are appended migrations;
// columns follow from sqlite_rows.h.

#include "coordinator/store/sqlite_job_store.h"

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <map>
#include <system_error>
#include <utility>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>
#include <fcntl.h>
#include <sqlite3.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "common/crypto.h"
#include "coordinator/store/sqlite_backup.h"
#include "coordinator/store/sqlite_retention.h"
#include "coordinator/store/sqlite_rows.h"
#include "coordinator/store/sqlite_statement.h"

namespace ravel::coordinator {
namespace {

constexpr int kBusyMs = 2000;

// On disk: a change is a new migration at the end, never an edit. New columns need none: see
// sqlite_rows.h.
constexpr const char* kMigrations[SqliteJobStore::kSchemaVersion] = {
    R"sql(
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
)sql",
    // A transition rewrites its job's
    // row; the spec is large.
    R"sql(
CREATE TABLE job_specs (job TEXT PRIMARY KEY REFERENCES jobs (uid) ON DELETE CASCADE, canonical BLOB NOT NULL,
  planned BLOB NOT NULL);
INSERT INTO job_specs SELECT uid, canonical, planned FROM jobs;
ALTER TABLE jobs DROP COLUMN canonical;
ALTER TABLE jobs DROP COLUMN planned;
)sql",
    // No reference to jobs: it is written beside a job's changes, and a late one does no harm.
    R"sql(
CREATE TABLE goodput (job TEXT PRIMARY KEY, times TEXT, curve TEXT, pending_us INTEGER, devices INTEGER,
  wall_ms INTEGER, last_step INTEGER, last_time_ms INTEGER);
)sql"};

template <typename Record>
absl::Status WriteAll(sqlite3* database,
                      const Table<Record>& table,
                      const std::vector<Record>& records) {
  for (const Record& record : records) {
    RETURN_IF_ERROR(WriteRow(database, table, record));
  }
  return absl::OkStatus();
}

// There flock and WAL both promise what they do not keep.
absl::Status RefuseNetworkFileSystem(const std::string& directory) {
  struct statfs facts = {};
  if (statfs(directory.c_str(), &facts) != 0) {
    return ErrnoStatus(errno, directory);
  }
  const std::string name(NetworkFileSystemName(static_cast<uint64_t>(facts.f_type)));
  if (name.empty()) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(
      absl::StrCat(directory,
                   ": lies on a network file system (",
                   name,
                   "), where neither locks nor the database's log are safe; use a local disk"));
}

absl::StatusOr<int> Lock(const std::string& directory) {
  const std::string path = absl::StrCat(directory, "/coordinator.lock");
  const int file = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
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

std::string_view NetworkFileSystemName(uint64_t type) {
  switch (type & 0xffffffff) {
    case 0x6969:
      return "NFS";
    case 0x517b:
    case 0xff534d42:
    case 0xfe534d42:
      return "SMB";
    case 0x01021997:
      return "9p";
    case 0x00c36400:
      return "Ceph";
    case 0x0bd00bd0:
      return "Lustre";
    case 0x47504653:
      return "GPFS";
    case 0x5346414f:
      return "AFS";
    case 0x01161970:
      return "GFS2";
    default:
      return "";
  }
}

absl::StatusOr<std::unique_ptr<SqliteJobStore>> SqliteJobStore::Create(
    const std::string& directory) {
  RETURN_IF_ERROR(RefuseNetworkFileSystem(directory));
  ASSIGN_OR_RETURN(const int lock_file, Lock(directory));
  sqlite3* database = nullptr;
  const std::string path = absl::StrCat(directory, "/ravel.db");
  const int result =
      sqlite3_open_v2(path.c_str(), &database, SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE, nullptr);
  std::unique_ptr<SqliteJobStore> store(new SqliteJobStore(database, lock_file));
  store->directory_ = directory;
  if (result != SQLITE_OK) {
    return Annotate(SqliteStatus(result, database), path);
  }
  // The journal files get the same mode. An older release made the database readable by all.
  if (chmod(path.c_str(), 0600) != 0) {
    return ErrnoStatus(errno, path);
  }
  RETURN_IF_ERROR(store->SetUp(path));
  return store;
}

absl::Status SqliteJobStore::SetUp(const std::string& path) {
  sqlite3_busy_timeout(database_, kBusyMs);
  {
    Statement mode(database_, "PRAGMA journal_mode=WAL");
    const bool answered = mode.Step();
    RETURN_IF_ERROR(Annotate(mode.status(), path));
    const std::string got = answered ? mode.Text() : "";
    if (got != "wal") {
      return absl::FailedPreconditionError(absl::StrCat(
          path, ": the file system cannot do write-ahead logging (SQLite answers '", got, "')"));
    }
  }
  RETURN_IF_ERROR(Execute("PRAGMA synchronous=FULL"));
  RETURN_IF_ERROR(Execute("PRAGMA foreign_keys=ON"));
  {
    Statement check(database_, "PRAGMA quick_check(1)");
    if (!check.Step() || check.Text() != "ok") {
      return absl::DataLossError(
          absl::StrCat(path, ": the database is damaged; restore it from a backup"));
    }
  }
  RETURN_IF_ERROR(Annotate(Migrate(), path));
  MutexLock lock(reading_);
  const int result = sqlite3_open_v2(path.c_str(), &reader_, SQLITE_OPEN_READONLY, nullptr);
  sqlite3_busy_timeout(reader_, kBusyMs);
  return Annotate(SqliteStatus(result, reader_), path);
}

SqliteJobStore::~SqliteJobStore() {
  {
    MutexLock lock(reading_);
    sqlite3_close(reader_);
  }
  sqlite3_close(database_);
  close(lock_file_);
}

absl::Status SqliteJobStore::Execute(const char* sql) {
  return SqliteStatus(sqlite3_exec(database_, sql, nullptr, nullptr, nullptr), database_);
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
      row.BindCopy(RandomHex(16)).Step();
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
  return MatchColumns(database_);
}

absl::StatusOr<LoadedState> SqliteJobStore::Open() {
  const std::string raise = absl::StrCat("UPDATE meta SET value = MAX(CAST(value AS INTEGER) + 1, ",
                                         least_term_,
                                         ") WHERE key = 'term'");
  RETURN_IF_ERROR(Execute(raise.c_str()));
  LoadedState state;
  {
    Statement row(database_,
                  "SELECT (SELECT value FROM meta WHERE key='term'), (SELECT value FROM meta WHERE "
                  "key='cluster_id'), "
                  "MAX((SELECT COALESCE(MAX(seq), 0) FROM events), "
                  "COALESCE((SELECT CAST(value AS INTEGER) FROM meta WHERE key='event_seq'), 0)), "
                  "MAX((SELECT COALESCE(MAX(resource_version), 0) FROM jobs), COALESCE((SELECT "
                  "CAST(value AS INTEGER) FROM meta WHERE key='resource_version'), 0))");
    if (!row.Step()) {
      return row.status();
    }
    term_ = state.term = row.Int();
    state.cluster_id = row.Text();
    state.last_event_seq = row.Int();
    state.last_resource_version = row.Int();
  }
  RETURN_IF_ERROR(LoadJobs(state.jobs));
  RETURN_IF_ERROR(ReadRows(database_, OperationTable(), "", state.operations));
  RETURN_IF_ERROR(
      ReadRows(database_,
               EpochTable(),
               "WHERE (job, epoch) IN (SELECT job, MAX(epoch) FROM epochs GROUP BY job)",
               state.epochs));
  RETURN_IF_ERROR(
      ReadRows(database_, SaveTable(), "ORDER BY job, step, epoch, attempt", state.saves));
  RETURN_IF_ERROR(ReadRows(database_, NodeTable(), "", state.nodes));
  RETURN_IF_ERROR(ReadRows(database_, GoodputTable(), "", state.goodput));
  return state;
}

absl::Status SqliteJobStore::LoadJobs(std::vector<JobRecord>& jobs) {
  RETURN_IF_ERROR(ReadRows(database_, JobTable(), "ORDER BY created_ms, uid", jobs));
  std::vector<JobRecord> specs;
  RETURN_IF_ERROR(ReadRows(database_, JobSpecTable(), "", specs));
  std::map<std::string, JobRecord*> by_uid;
  for (JobRecord& spec : specs) {
    by_uid[spec.uid] = &spec;
  }
  for (JobRecord& job : jobs) {
    const auto spec = by_uid.find(job.uid);
    if (spec == by_uid.end()) {
      return absl::DataLossError(absl::StrCat("job ", job.name, " has no spec in the database"));
    }
    job.canonical = std::move(spec->second->canonical);
    job.planned = std::move(spec->second->planned);
  }
  return absl::OkStatus();
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
  RETURN_IF_ERROR(WriteAll(database_, JobTable(), change.jobs));
  RETURN_IF_ERROR(WriteAll(database_, JobSpecTable(), change.jobs));
  RETURN_IF_ERROR(WriteAll(database_, EventTable(), change.events));
  if (change.request) {
    RETURN_IF_ERROR(WriteRow(database_, RequestTable(), *change.request));
  }
  RETURN_IF_ERROR(WriteAll(database_, OperationTable(), change.operations));
  RETURN_IF_ERROR(WriteAll(database_, EpochTable(), change.epochs));
  RETURN_IF_ERROR(WriteAll(database_, SaveTable(), change.saves));
  RETURN_IF_ERROR(WriteAll(database_, NodeTable(), change.nodes));
  RETURN_IF_ERROR(WriteAll(database_, GoodputTable(), change.goodput));
  for (const std::string& id : change.deleted_nodes) {
    RETURN_IF_ERROR(DeleteNodeRow(database_, id));
  }
  for (const std::string& uid : change.deleted_jobs) {
    RETURN_IF_ERROR(DeleteJobRows(database_, uid, change.deleted_ms));
  }
  if (!change.deleted_jobs.empty()) {
    Statement row(database_,
                  "INSERT OR REPLACE INTO meta VALUES ('event_seq', ?), ('resource_version', ?)");
    row.Bind(change.last_event_seq).Bind(change.last_resource_version).Step();
    return row.status();
  }
  return absl::OkStatus();
}

absl::StatusOr<int64_t> SqliteJobStore::SweepJob(const std::string& job_uid,
                                                 const RowRetention& policy) {
  absl::StatusOr<int64_t> removed = 0;
  RETURN_IF_ERROR(Transact([&] {
    removed = SweepJobRows(database_, job_uid, policy);
    return removed.status();
  }));
  return removed;
}

absl::StatusOr<int64_t> SqliteJobStore::SweepRequests(const RowRetention& policy) {
  absl::StatusOr<int64_t> removed = 0;
  RETURN_IF_ERROR(Transact([&] {
    removed = SweepRequestRows(database_, policy);
    return removed.status();
  }));
  return removed;
}

absl::Status SqliteJobStore::Transact(const std::function<absl::Status()>& write) {
  RETURN_IF_ERROR(group_);
  RETURN_IF_ERROR(Execute(grouping_ ? "SAVEPOINT change" : "BEGIN IMMEDIATE"));
  absl::Status status = CheckTerm();
  status = status.ok() ? write() : status;
  if (status.ok()) {
    status = Execute(grouping_ ? "RELEASE change" : "COMMIT");
  }
  if (!status.ok()) {
    Execute(grouping_ ? "ROLLBACK TO change" : "ROLLBACK").IgnoreError();
    if (grouping_ && sqlite3_get_autocommit(database_) != 0) {
      group_ = status;  // the database gave the whole transaction up
    } else if (grouping_) {
      Execute("RELEASE change").IgnoreError();
    }
  }
  return status;
}

absl::Status SqliteJobStore::Apply(const StoreChange& change) {
  const auto write = [&] { return Write(change); };
  const absl::Status status = Transact(write);
  if (!absl::IsResourceExhausted(status) || make_room_ == nullptr || grouping_) {
    return status;
  }
  MakeRoom();
  return Transact(write);
}

void SqliteJobStore::MakeRoom() {
  make_room_();
  // The log's own pages are room too.
  sqlite3_wal_checkpoint_v2(database_, nullptr, SQLITE_CHECKPOINT_TRUNCATE, nullptr, nullptr);
}

absl::Status SqliteJobStore::BeginGroup() {
  RETURN_IF_ERROR(Execute("BEGIN IMMEDIATE"));
  grouping_ = true;
  return absl::OkStatus();
}

absl::Status SqliteJobStore::CommitGroup() {
  grouping_ = false;
  absl::Status status = std::exchange(group_, absl::OkStatus());
  if (status.ok()) {
    status = Execute("COMMIT");
  }
  if (!status.ok()) {
    Execute("ROLLBACK").IgnoreError();
    if (absl::IsResourceExhausted(status) && make_room_ != nullptr) {
      MakeRoom();  // for those that come next
    }
  }
  return status;
}

absl::Status SqliteJobStore::Backup(int64_t now_ms, size_t keep) const {
  return BackUpDatabase(directory_, "ravel", now_ms, keep);
}

absl::StatusOr<std::optional<RequestRecord>> SqliteJobStore::FindRequest(const std::string& id) {
  std::vector<RequestRecord> found;
  MutexLock lock(reading_);
  RETURN_IF_ERROR(ReadRows(
      reader_, RequestTable(), "WHERE id = ?", found, [&id](Statement& row) { row.Bind(id); }));
  return found.empty() ? std::nullopt : std::optional<RequestRecord>(std::move(found.front()));
}

absl::StatusOr<std::vector<JobEventRecord>> SqliteJobStore::Events(const std::string& job_uid,
                                                                   int64_t after,
                                                                   int64_t limit) {
  std::vector<JobEventRecord> events;
  MutexLock lock(reading_);
  RETURN_IF_ERROR(ReadRows(reader_,
                           EventTable(),
                           "WHERE job = ? AND seq > ? ORDER BY seq LIMIT ?",
                           events,
                           [&](Statement& row) { row.Bind(job_uid).Bind(after).Bind(limit); }));
  return events;
}

}  // namespace ravel::coordinator
