// The database of identities: what an older release wrote is read.

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gtest/gtest.h>
#include <sqlite3.h>

#include "coordinator/store/sqlite_access_store.h"
#include "coordinator/store/sqlite_backup.h"
#include "tests/testing/process.h"

namespace ravel::coordinator {
namespace {

// Schema version 1, as releases before ended_enrolments wrote it.
constexpr char kVersion1[] = R"sql(
CREATE TABLE identities (kind INTEGER NOT NULL, name TEXT NOT NULL, role INTEGER NOT NULL, namespace TEXT NOT NULL,
  enrolment TEXT NOT NULL, created_ms INTEGER NOT NULL, revoked_ms INTEGER NOT NULL, PRIMARY KEY (kind, name));
CREATE TABLE tokens (hash TEXT PRIMARY KEY, kind INTEGER NOT NULL, name TEXT NOT NULL, role INTEGER NOT NULL,
  namespace TEXT NOT NULL, uses_left INTEGER NOT NULL, created_ms INTEGER NOT NULL, expires_ms INTEGER NOT NULL,
  created_by TEXT NOT NULL);
CREATE TABLE audit (seq INTEGER PRIMARY KEY AUTOINCREMENT, time_ms INTEGER NOT NULL, who TEXT NOT NULL,
  peer TEXT NOT NULL, verb TEXT NOT NULL, object TEXT NOT NULL, request_id TEXT NOT NULL, result TEXT NOT NULL,
  message TEXT NOT NULL);
INSERT INTO identities VALUES (1, 'n1', 0, '', '4100000000000001', 10, 0);
INSERT INTO identities VALUES (1, 'n2', 0, '', '4200000000000002', 10, 77);
PRAGMA user_version=1;
)sql";

TEST(AccessStoreTest, RevokedRowsOfVersion1AreEndedEnrolments) {
  const testing::ScratchFolder scratch;
  sqlite3* database = nullptr;
  ASSERT_EQ(sqlite3_open((scratch.path() + "/access.db").c_str(), &database), SQLITE_OK);
  ASSERT_EQ(sqlite3_exec(database, kVersion1, nullptr, nullptr, nullptr), SQLITE_OK);
  sqlite3_close(database);
  for (int opens = 0; opens < 2; ++opens) {
    const auto store = SqliteAccessStore::Open(scratch.path());
    ASSERT_TRUE(store.ok()) << store.status();
    EXPECT_EQ((*store)->Identities()->size(), 2u);
    const absl::StatusOr<std::vector<EndedEnrolment>> ended = (*store)->EndedEnrolments();
    ASSERT_TRUE(ended.ok()) << ended.status();
    ASSERT_EQ(ended->size(), 1u);
    EXPECT_EQ(ended->at(0).enrolment, "4200000000000002");
    EXPECT_EQ(ended->at(0).kind, IdentityKind::kNode);
    EXPECT_EQ(ended->at(0).name, "n2");
    EXPECT_EQ(ended->at(0).ended_ms, 77);
  }
}

// The coordinator has it open meanwhile; no one but its user may read the copy.
TEST(AccessStoreTest, ABackupHasTheIdentitiesOfItsTime) {
  const testing::ScratchFolder scratch;
  const auto store = SqliteAccessStore::Open(scratch.path());
  ASSERT_TRUE(store.ok()) << store.status();
  ASSERT_EQ(BackUpDatabase(scratch.path(), "access", 1000, 2), absl::OkStatus());
  sqlite3* database = nullptr;
  ASSERT_EQ(sqlite3_open((scratch.path() + "/access.db").c_str(), &database), SQLITE_OK);
  ASSERT_EQ(
      sqlite3_exec(database,
                   "INSERT INTO identities (kind, name, role, namespace, enrolment, "
                   "created_ms, revoked_ms) VALUES (1, 'n1', 0, '', '4100000000000001', 10, 0)",
                   nullptr,
                   nullptr,
                   nullptr),
      SQLITE_OK);
  sqlite3_close(database);
  ASSERT_EQ(BackUpDatabase(scratch.path(), "access", 2000, 2), absl::OkStatus());
  for (const auto& [time, identities] : {std::pair("1000", 0u), std::pair("2000", 1u)}) {
    const testing::ScratchFolder restored;
    const std::string copy =
        absl::StrCat(scratch.path(), "/backup/access-00000000000", time, ".db");
    EXPECT_EQ(std::filesystem::status(copy).permissions(), std::filesystem::perms(0600));
    std::filesystem::copy_file(copy, restored.path() + "/access.db");
    const auto opened = SqliteAccessStore::Open(restored.path());
    ASSERT_TRUE(opened.ok()) << opened.status();
    EXPECT_EQ((*opened)->Identities()->size(), identities) << time;
  }
}

}  // namespace
}  // namespace ravel::coordinator
