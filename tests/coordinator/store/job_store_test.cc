#include "coordinator/store/job_store.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <memory>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sqlite3.h>

#include "coordinator/store/log_store.h"
#include "coordinator/store/memory_job_store.h"
#include "coordinator/store/metrics_log.h"
#include "coordinator/store/sqlite_job_store.h"
#include "coordinator/store/state_disk.h"

namespace ravel::coordinator {
namespace {

class Folder {
 public:
  Folder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "job-store-XXXXXX").string();
    path_ = mkdtemp(pattern.data());
  }
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

JobRecord FullRecord() {
  JobRecord job;
  job.uid = "uid-1";
  job.namespace_name = "ns";
  job.name = "name";
  job.canonical = std::string("bytes\0with zero", 15);
  job.planned = std::string("\1\0\2", 3);
  job.state = JobState::kRecovering;
  job.reason = "ProcessCrash";
  job.message = "signal 9";
  job.generation = 2;
  job.epoch = 7;
  job.launched_epoch = 6;
  job.attempt = 5;
  job.world_size = 3;
  job.committed_step = 40;
  job.committed_path = "/step-40";
  job.highest_commit = 60;
  job.restarts = 4;
  job.budget = {.used = 2,
                .no_progress = 1,
                .user_failures = 1,
                .waits = 3,
                .furthest_step = 57,
                .failure_times_ms = {1'700'000'000'000, 1'700'000'100'000},
                .last_reason = "ProcessCrash",
                .last_node = "node-a",
                .last_step = 41};
  job.not_before_ms = 11;
  job.created_ms = 12;
  job.started_ms = 13;
  job.finished_ms = 14;
  job.resized_ms = 15;
  job.failure_class = "user";
  job.resource_version = 99;
  job.rollback_step = 20;
  job.budget.store_waits = 3;
  job.held_ms = 16;
  job.held_since_ms = 17;
  job.delete_wish = DeleteWish::kWithCheckpoints;
  job.peak_bytes = {1000, 600, 0};
  return job;
}

StoreChange WholeChange() {
  StoreChange change;
  change.jobs.push_back(FullRecord());
  change.events.push_back(
      {5, 100, "uid-1", 7, 5, 40, "EpochChanged", "ProcessCrash", "node-a", 2, "signal 9"});
  change.request = RequestRecord{"request", "hash", "uid-1", 100};
  change.operations.push_back(
      {"op", "uid-1", OperationState::kWriting, "", 41, "save", 3, 100, 700});
  change.epochs.push_back(
      {"uid-1", 6, 5, 3, "digest", "a:0 b:0 c:0", 40, "/step-40", 100, "local"});
  change.epochs.push_back({"uid-1", 7, 6, 2, "digest-7", "a:0 b:0", 50, "/step-50", 200, "tcp"});
  change.saves.push_back(
      {"uid-1", 40, 6, 1, SaveState::kIntended, 3, 1000, 9, "/step-40", "", "id", 100, "shard 3"});
  change.nodes.push_back({"node-a", "incarnation", 100, 2, "3 attempts failed", "host", "lock"});
  change.goodput.push_back({.job_uid = "uid-1",
                            .times = "productive:12 replay:3",
                            .curve = "-1:0 40:12",
                            .pending_us = 5,
                            .devices = 3,
                            .wall_ms = 100,
                            .last_step = 40,
                            .last_time_ms = 99});
  return change;
}

// Both stores hold the same contract; `open` gives the same disk again.
class JobStoreTest : public ::testing::TestWithParam<bool> {
 protected:
  std::unique_ptr<JobStore> Open() {
    if (!GetParam()) {
      return std::make_unique<MemoryJobStore>(&disk_);
    }
    absl::StatusOr<std::unique_ptr<SqliteJobStore>> store = SqliteJobStore::Create(folder_.path());
    EXPECT_TRUE(store.ok()) << store.status();
    return *std::move(store);
  }
  MemoryJobStore::Disk disk_;
  Folder folder_;
};

TEST_P(JobStoreTest, EverythingComesBackAsItWas) {
  std::unique_ptr<JobStore> store = Open();
  const absl::StatusOr<LoadedState> fresh = store->Open();
  ASSERT_TRUE(fresh.ok());
  EXPECT_TRUE(fresh->jobs.empty());
  ASSERT_TRUE(store->Apply(WholeChange()).ok());
  store.reset();
  store = Open();
  const absl::StatusOr<LoadedState> loaded = store->Open();
  ASSERT_TRUE(loaded.ok());
  EXPECT_EQ(loaded->term, fresh->term + 1);
  EXPECT_EQ(loaded->cluster_id, fresh->cluster_id);
  EXPECT_EQ(loaded->last_event_seq, 5);
  EXPECT_EQ(loaded->last_resource_version, 99);
  ASSERT_EQ(loaded->jobs.size(), 1U);
  const JobRecord& job = loaded->jobs[0];
  const JobRecord full = FullRecord();
  EXPECT_EQ(job.canonical, full.canonical);
  EXPECT_EQ(job.planned, full.planned);
  EXPECT_EQ(job.state, full.state);
  EXPECT_EQ(job.budget, full.budget);
  EXPECT_EQ(job.committed_step, full.committed_step);
  EXPECT_EQ(job.highest_commit, full.highest_commit);
  EXPECT_EQ(job.launched_epoch, full.launched_epoch);
  EXPECT_EQ(job.resized_ms, full.resized_ms);
  EXPECT_EQ(job.failure_class, full.failure_class);
  ASSERT_EQ(loaded->operations.size(), 1U);
  EXPECT_EQ(loaded->operations[0].sequence, 3);
  EXPECT_EQ(loaded->operations[0].deadline_ms, 700);
  EXPECT_EQ(loaded->operations[0].state, OperationState::kWriting);
  ASSERT_EQ(loaded->goodput.size(), 1U);
  const GoodputRow& ledger = loaded->goodput[0];
  EXPECT_EQ(ledger.job_uid + ledger.times + ledger.curve, "uid-1productive:12 replay:3-1:0 40:12");
  EXPECT_THAT((std::vector{ledger.pending_us,
                           ledger.devices,
                           ledger.wall_ms,
                           ledger.last_step,
                           ledger.last_time_ms}),
              ::testing::ElementsAre(5, 3, 100, 40, 99));
  ASSERT_EQ(loaded->saves.size(), 1U);
  EXPECT_EQ(loaded->saves[0].state, SaveState::kIntended);
  EXPECT_EQ(loaded->saves[0].world_size, 3);
  EXPECT_EQ(loaded->saves[0].mesh, "shard 3");
  ASSERT_EQ(loaded->epochs.size(), 1U) << "the newest of the job";
  EXPECT_EQ(loaded->epochs[0].epoch, 7);
  EXPECT_EQ(loaded->epochs[0].members, "a:0 b:0");
  EXPECT_EQ(loaded->epochs[0].transport, "tcp");
  ASSERT_EQ(loaded->nodes.size(), 1U);
  EXPECT_EQ(loaded->nodes[0].hold, 2);
  EXPECT_EQ(loaded->nodes[0].hold_reason, "3 attempts failed");
  EXPECT_EQ(loaded->nodes[0].host_id, "host");
  EXPECT_EQ(loaded->nodes[0].work_lock, "lock");
  const auto events = store->Events("uid-1", 0, 10);
  ASSERT_TRUE(events.ok());
  ASSERT_EQ(events->size(), 1U);
  EXPECT_EQ(events->at(0).rank, 2);
  EXPECT_EQ(events->at(0).message, "signal 9");
  EXPECT_TRUE(store->Events("uid-1", 5, 10)->empty());
  const auto request = store->FindRequest("request");
  ASSERT_TRUE(request.ok() && request->has_value());
  EXPECT_EQ((*request)->answer, "uid-1");
  EXPECT_FALSE(store->FindRequest("other")->has_value());
}

TEST_P(JobStoreTest, NumbersOfADeletedJobAreNotGivenOutAgain) {
  std::unique_ptr<JobStore> store = Open();
  ASSERT_TRUE(store->Open().ok());
  ASSERT_TRUE(store->Apply(WholeChange()).ok());
  StoreChange deleted;
  deleted.deleted_jobs = {"uid-1"};
  deleted.last_event_seq = 5;
  deleted.last_resource_version = 100;
  ASSERT_TRUE(store->Apply(deleted).ok());
  store.reset();
  store = Open();
  const absl::StatusOr<LoadedState> loaded = store->Open();
  ASSERT_TRUE(loaded.ok());
  EXPECT_TRUE(loaded->jobs.empty());
  EXPECT_EQ(loaded->last_event_seq, 5);
  EXPECT_EQ(loaded->last_resource_version, 100);
}

TEST_P(JobStoreTest, AJobIsReplacedAndItsHistoryStays) {
  std::unique_ptr<JobStore> store = Open();
  ASSERT_TRUE(store->Open().ok());
  ASSERT_TRUE(store->Apply(WholeChange()).ok());
  StoreChange change;
  change.jobs.push_back(FullRecord());
  change.jobs[0].state = JobState::kSucceeded;
  SaveRecord save = WholeChange().saves[0];
  save.state = SaveState::kCommitted;
  change.saves.push_back(save);
  ASSERT_TRUE(store->Apply(change).ok());
  store.reset();
  const auto loaded = (store = Open())->Open();
  EXPECT_EQ(loaded->jobs.at(0).state, JobState::kSucceeded);
  EXPECT_EQ(loaded->saves.at(0).state, SaveState::kCommitted);
  EXPECT_EQ(store->Events("uid-1", 0, 10)->size(), 1U);
}

INSTANTIATE_TEST_SUITE_P(Stores,
                         JobStoreTest,
                         ::testing::Values(false, true),
                         [](const auto& param) { return param.param ? "Sqlite" : "Memory"; });

TEST(SqliteJobStoreTest, AFailedChangeLeavesNothing) {
  Folder folder;
  auto store = SqliteJobStore::Create(folder.path());
  ASSERT_TRUE(store.ok());
  ASSERT_TRUE((*store)->Open().ok());
  StoreChange change = WholeChange();
  change.events[0].job_uid = "nobody";  // no such job
  EXPECT_FALSE((*store)->Apply(change).ok());
  EXPECT_FALSE((*store)->FindRequest("request")->has_value());
  EXPECT_TRUE((*store)->Apply(WholeChange()).ok());
}

TEST(SqliteJobStoreTest, NamesAreUniqueInTheirNamespace) {
  Folder folder;
  auto store = SqliteJobStore::Create(folder.path());
  ASSERT_TRUE((*store)->Open().ok());
  ASSERT_TRUE((*store)->Apply(WholeChange()).ok());
  StoreChange change;
  change.jobs.push_back(FullRecord());
  change.jobs[0].uid = "uid-2";
  EXPECT_EQ((*store)->Apply(change).code(), absl::StatusCode::kAlreadyExists);
}

TEST(SqliteJobStoreTest, TwoCoordinatorsCannotShareADirectory) {
  Folder folder;
  auto first = SqliteJobStore::Create(folder.path());
  ASSERT_TRUE(first.ok());
  const auto second = SqliteJobStore::Create(folder.path());
  EXPECT_EQ(second.status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_NE(std::string(second.status().message()).find(folder.path()), std::string::npos);
  first->reset();
  EXPECT_TRUE(SqliteJobStore::Create(folder.path()).ok());
}

TEST(SqliteJobStoreTest, ADamagedDatabaseIsNamed) {
  Folder folder;
  std::ofstream(folder.path() + "/ravel.db")
      << "this is no database, but it is long enough to look like a header";
  const auto store = SqliteJobStore::Create(folder.path());
  ASSERT_FALSE(store.ok());
  EXPECT_NE(std::string(store.status().message()).find("ravel.db"), std::string::npos);
}

// The first schema, as its release wrote it.
void WriteFirstSchema(const std::string& path) {
  sqlite3* database = nullptr;
  ASSERT_EQ(sqlite3_open(path.c_str(), &database), SQLITE_OK);
  const char* sql = R"sql(
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
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
INSERT INTO meta VALUES ('cluster_id', 'old'), ('term', '4');
INSERT INTO jobs VALUES ('u', 'ns', 'n', x'0001', x'02', 3, 'r', 'm', 1, 2, 2, 1, 4, 9, '/p', 9, 0, 0, 0, '7 8', '', -1,
  0, 1, 2, 0, 0, '', 5);
INSERT INTO epochs VALUES ('u', 2, 1, 4, 'd', 'a:0', 0, '', 3);
PRAGMA user_version=1;
)sql";
  char* error = nullptr;
  EXPECT_EQ(sqlite3_exec(database, sql, nullptr, nullptr, &error), SQLITE_OK) << error;
  sqlite3_close(database);
}

TEST(SqliteJobStoreTest, ADatabaseOfTheFirstReleaseIsReadAndGetsTheColumnsThatItLacks) {
  Folder folder;
  WriteFirstSchema(folder.path() + "/ravel.db");
  auto store = SqliteJobStore::Create(folder.path());
  ASSERT_TRUE(store.ok()) << store.status();
  const auto loaded = (*store)->Open();
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(loaded->cluster_id, "old");
  ASSERT_EQ(loaded->jobs.size(), 1U);
  EXPECT_EQ(loaded->jobs[0].canonical, std::string("\0\1", 2));
  EXPECT_EQ(loaded->jobs[0].planned, "\2");
  EXPECT_EQ(loaded->jobs[0].budget.failure_times_ms, (std::vector<int64_t>{7, 8}));
  EXPECT_EQ(loaded->jobs[0].resource_version, 5);
  ASSERT_EQ(loaded->epochs.size(), 1U);
  EXPECT_EQ(loaded->epochs[0].transport, "");
}

TEST(SqliteJobStoreTest, AColumnOfANewerReleaseIsRefused) {
  Folder folder;
  ASSERT_TRUE(SqliteJobStore::Create(folder.path()).ok());
  sqlite3* database = nullptr;
  ASSERT_EQ(sqlite3_open((folder.path() + "/ravel.db").c_str(), &database), SQLITE_OK);
  sqlite3_exec(database, "ALTER TABLE saves ADD COLUMN colour TEXT", nullptr, nullptr, nullptr);
  sqlite3_close(database);
  const auto store = SqliteJobStore::Create(folder.path());
  ASSERT_FALSE(store.ok());
  EXPECT_EQ(store.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(std::string(store.status().message()).find("saves.colour"), std::string::npos);
}

// Half-read saves would leave an intended commit unsettled.
TEST(SqliteJobStoreTest, ATableThatCannotBeReadIsAnError) {
  for (const char* table : {"operations", "epochs", "saves", "nodes", "job_specs"}) {
    Folder folder;
    auto store = SqliteJobStore::Create(folder.path());
    ASSERT_TRUE(store.ok());
    sqlite3* database = nullptr;
    ASSERT_EQ(sqlite3_open((folder.path() + "/ravel.db").c_str(), &database), SQLITE_OK);
    sqlite3_exec(database, (std::string("DROP TABLE ") + table).c_str(), nullptr, nullptr, nullptr);
    sqlite3_close(database);
    const auto loaded = (*store)->Open();
    ASSERT_FALSE(loaded.ok()) << table;
    EXPECT_NE(std::string(loaded.status().message()).find(table), std::string::npos);
  }
}

TEST(SqliteJobStoreTest, AGroupIsOneTransactionAndABadChangeFailsAlone) {
  Folder folder;
  auto store = SqliteJobStore::Create(folder.path());
  ASSERT_TRUE((*store)->Open().ok());
  ASSERT_TRUE((*store)->BeginGroup().ok());
  ASSERT_TRUE((*store)->Apply(WholeChange()).ok());
  StoreChange second;
  second.jobs.push_back(FullRecord());
  second.jobs[0].uid = "uid-2";
  EXPECT_TRUE(absl::IsAlreadyExists((*store)->Apply(second))) << "the same name";
  second.jobs[0].name = "another";
  ASSERT_TRUE((*store)->Apply(second).ok());
  EXPECT_FALSE((*store)->FindRequest("request")->has_value()) << "not before it is committed";
  ASSERT_TRUE((*store)->CommitGroup().ok());
  EXPECT_TRUE((*store)->FindRequest("request")->has_value());
  store->reset();
  store = SqliteJobStore::Create(folder.path());
  EXPECT_EQ((*store)->Open()->jobs.size(), 2U);
}

TEST(SqliteJobStoreTest, BackupsAreWholeAndTheNewestStay) {
  Folder folder;
  auto store = SqliteJobStore::Create(folder.path());
  ASSERT_TRUE((*store)->Open().ok());
  ASSERT_TRUE((*store)->Apply(WholeChange()).ok());
  for (const int64_t now_ms : {1000, 2000, 3000}) {
    ASSERT_TRUE((*store)->Backup(now_ms, 2).ok());
  }
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder.path() + "/backup")) {
    names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  EXPECT_EQ(names,
            (std::vector<std::string>{"ravel-000000000002000.db", "ravel-000000000003000.db"}));
  Folder restored;
  std::filesystem::copy_file(folder.path() + "/backup/" + names[1], restored.path() + "/ravel.db");
  auto copy = SqliteJobStore::Create(restored.path());
  ASSERT_TRUE(copy.ok()) << copy.status();
  EXPECT_EQ((*copy)->Open()->jobs.size(), 1U);
}

// SQLite's layer for lock files has no shared memory, which write-ahead logging needs.
TEST(SqliteJobStoreTest, ADatabaseWithoutAWriteAheadLogIsRefused) {
  Folder folder;
  sqlite3_vfs* const usual = sqlite3_vfs_find(nullptr);
  ASSERT_EQ(sqlite3_vfs_register(sqlite3_vfs_find("unix-dotfile"), 1), SQLITE_OK);
  const auto store = SqliteJobStore::Create(folder.path());
  ASSERT_EQ(sqlite3_vfs_register(usual, 1), SQLITE_OK);
  EXPECT_EQ(store.status().code(), absl::StatusCode::kFailedPrecondition) << store.status();
  EXPECT_NE(std::string(store.status().message()).find("write-ahead"), std::string::npos);
}

TEST(SqliteJobStoreTest, NetworkFileSystemsAreKnownByTheirNumbers) {
  EXPECT_EQ(NetworkFileSystemName(0x6969), "NFS");
  EXPECT_EQ(NetworkFileSystemName(0xff534d42), "SMB");
  EXPECT_EQ(NetworkFileSystemName(0xef53), "") << "ext4";
  EXPECT_EQ(NetworkFileSystemName(0x01021994), "") << "tmpfs";
}

TEST(StateDiskTest, ABallastIsKeptAndGivenUpOnlyWhenTheDiskIsReallyFull) {
  Folder folder;
  StateDisk disk(folder.path(), {.ballast_bytes = 100'000});
  disk.Watch();
  EXPECT_EQ(std::filesystem::file_size(folder.path() + "/ballast"), 100'000U);
  disk.Release();
  EXPECT_FALSE(disk.low()) << "there is room";
  EXPECT_TRUE(disk.CheckRoom().ok());
  EXPECT_TRUE(std::filesystem::exists(folder.path() + "/ballast"));
}

TEST(MetricsLogTest, FloatsComeBackToTheBitAndTornLinesAreLeftOut) {
  Folder folder;
  StepRecord record;
  record.step = 1;
  record.loss = 0.1F;
  record.epoch = 2;
  record.grad_norm = 1.0 / 3.0;
  record.has_validation_loss = true;
  record.validation_loss = std::numeric_limits<float>::infinity();
  {
    MetricsLog log(folder.path());
    ASSERT_TRUE(log.Append("job", record).ok());
    record.step = 2;
    record.loss = std::numeric_limits<float>::quiet_NaN();
    ASSERT_TRUE(log.Append("job", record).ok());
  }
  std::ofstream(folder.path() + "/job.jsonl", std::ios::app) << "{\"step\":3,\"lo";
  MetricsLog log(folder.path());
  record.step = 3;
  record.loss = 3;
  ASSERT_TRUE(log.Append("job", record).ok());
  const auto records = log.Read("job");
  ASSERT_TRUE(records.ok());
  ASSERT_EQ(records->size(), 3U);
  EXPECT_EQ(records->at(0).loss, 0.1F);
  EXPECT_EQ(records->at(0).grad_norm, 1.0 / 3.0);
  EXPECT_TRUE(std::isinf(records->at(0).validation_loss));
  EXPECT_TRUE(std::isnan(records->at(1).loss));
  EXPECT_EQ(records->at(2).loss, 3);
  EXPECT_TRUE(log.Read("nobody")->empty());
}

TEST(MetricsLogTest, ARestartReplacesTheStepsThatItRepeats) {
  std::vector<StepRecord> all(7);
  const int64_t steps[] = {1, 2, 3, 4, 3, 4, 5};
  for (size_t i = 0; i < all.size(); ++i) {
    all[i].step = steps[i];
    all[i].epoch = i < 4 ? 1 : 2;
  }
  const std::vector<StepRecord> kept = SurvivingHistory(all);
  ASSERT_EQ(kept.size(), 5U);
  EXPECT_EQ(kept[1].epoch, 1);
  EXPECT_EQ(kept[2].epoch, 2);
  EXPECT_EQ(kept[4].step, 5);
}

TEST(LogStoreTest, LinesAreKeptByAttemptAndRankOnceEachWithGapsShown) {
  Folder folder;
  LogStore logs(folder.path());
  const auto lines = [](int64_t first, int64_t count, int64_t rank) {
    std::vector<LogLine> made;
    for (int64_t i = 0; i < count; ++i) {
      made.push_back(
          {first + i, 100 + first + i, 1, rank, "node", "a\ttab " + std::to_string(first + i)});
    }
    return made;
  };
  EXPECT_EQ(logs.Append("job", lines(0, 3, 0))->size(), 3U);
  EXPECT_EQ(logs.Append("job", lines(1, 4, 0))->size(), 2U) << "sent again after a broken stream";
  EXPECT_EQ(logs.Append("job", lines(8, 1, 0))->size(), 2U) << "the gap is a line";
  EXPECT_EQ(logs.Append("job", lines(0, 1, 1))->size(), 1U);
  const std::vector<LogLine> rank0 = logs.Read("job", 0, 0);
  ASSERT_EQ(rank0.size(), 7U);
  EXPECT_EQ(rank0[0].text, "a\ttab 0");
  EXPECT_EQ(rank0[0].node, "node");
  EXPECT_NE(rank0[5].text.find("3 lines were lost"), std::string::npos);
  EXPECT_EQ(logs.Read("job", 1, -1).size(), 8U);
  EXPECT_TRUE(logs.Read("job", 2, -1).empty());
  EXPECT_TRUE(logs.Read("nobody", 0, -1).empty());
}

TEST(LogStoreTest, ALineWithANumberThatNoDaemonReachesIsNone) {
  LogLine line;
  EXPECT_TRUE(ParseLogLine("7\t1700000000000\tw0\ttext", line));
  EXPECT_FALSE(ParseLogLine("9223372036854775807\t1700000000000\tw0\ttext", line));
  EXPECT_FALSE(ParseLogLine("-1\t1700000000000\tw0\ttext", line));
}

TEST(SqliteJobStoreTest, ATermCanBeRaisedAndNeverFalls) {
  Folder folder;
  const auto term = [&folder](int64_t least) {
    auto store = SqliteJobStore::Create(folder.path());
    EXPECT_TRUE(store.ok()) << store.status();
    (*store)->RaiseTerm(least);
    return (*store)->Open()->term;
  };
  EXPECT_EQ(term(0), 1);
  EXPECT_EQ(term(9), 9);
  EXPECT_EQ(term(9), 10);
  EXPECT_EQ(term(3), 11);
}

}  // namespace
}  // namespace ravel::coordinator
