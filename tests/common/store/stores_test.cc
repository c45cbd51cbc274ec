// The contract of ObjectStore, held against every implementation.

#include <cstdlib>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/store/file_store.h"
#include "common/store/memory_store.h"

namespace ravel::store {
namespace {

using ::testing::HasSubstr;

std::span<const std::byte> Bytes(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    std::string pattern = (std::filesystem::temp_directory_path() / "ravel-store-XXXXXX").string();
    path_ = ::mkdtemp(pattern.data());
  }
  ~TemporaryDirectory() {
    std::error_code error;
    std::filesystem::remove_all(path_, error);
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

class StoreTest : public ::testing::TestWithParam<const char*> {
 protected:
  StoreTest() {
    if (std::string(GetParam()) == "file") {
      store_ = std::make_unique<FileStore>(directory_.path());
    } else {
      store_ = std::make_unique<MemoryStore>();
    }
  }
  void Put(const std::string& path, const std::string& contents) {
    const absl::Status status = PutNew(*store_, path, contents, "x");
    ASSERT_TRUE(status.ok()) << status;
  }

  TemporaryDirectory directory_;
  std::unique_ptr<ObjectStore> store_;
};

INSTANTIATE_TEST_SUITE_P(Stores, StoreTest, ::testing::Values("file", "memory"));

TEST_P(StoreTest, AFileIsWhatWasAppended) {
  auto writer = store_->Create("a", 6);
  ASSERT_TRUE(writer.ok()) << writer.status();
  ASSERT_TRUE((*writer)->Append(Bytes("abc")).ok());
  ASSERT_TRUE((*writer)->Append(Bytes("def")).ok());
  ASSERT_TRUE((*writer)->Finish().ok());
  EXPECT_EQ(*ReadFile(*store_, "a", 6), "abcdef");
  EXPECT_TRUE(absl::IsDataLoss(ReadFile(*store_, "a", 5).status()));
}

TEST_P(StoreTest, AReservationDoesNotChangeTheSize) {
  auto writer = store_->Create("a", 100000);
  ASSERT_TRUE(writer.ok()) << writer.status();
  ASSERT_TRUE((*writer)->Append(Bytes("abc")).ok());
  ASSERT_TRUE((*writer)->Finish().ok());
  EXPECT_EQ(*ReadFile(*store_, "a", 100), "abc");
}

TEST_P(StoreTest, CreateRefusesAnExistingFile) {
  Put("a", "old");
  EXPECT_TRUE(absl::IsAlreadyExists(store_->Create("a", 1).status()));
  EXPECT_EQ(*ReadFile(*store_, "a", 100), "old");
}

TEST_P(StoreTest, PutNewIsCreateIfAbsent) {
  Put("a", "old");
  EXPECT_TRUE(absl::IsAlreadyExists(PutNew(*store_, "a", "new", "y")));
  EXPECT_EQ(*ReadFile(*store_, "a", 100), "old");
  EXPECT_EQ(store_->List("")->size(), 1u) << "the part is gone";
}

TEST_P(StoreTest, ReadingBeyondTheEndIsTruncation) {
  Put("a", "abc");
  const auto reader = store_->Open("a");
  ASSERT_TRUE(reader.ok());
  EXPECT_EQ((*reader)->size(), 3);
  std::byte buffer[4];
  const absl::Status status = (*reader)->ReadAt(1, buffer);
  EXPECT_TRUE(absl::IsDataLoss(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("truncated"));
  EXPECT_TRUE((*reader)->ReadAt(0, std::span(buffer).first(3)).ok());
}

TEST_P(StoreTest, WhatIsNotThereIsNotFound) {
  EXPECT_TRUE(absl::IsNotFound(store_->Open("a").status()));
  EXPECT_TRUE(absl::IsNotFound(store_->List("a").status()));
  EXPECT_TRUE(absl::IsNotFound(store_->Remove("a")));
  EXPECT_TRUE(absl::IsNotFound(store_->RenameNoReplace("a", "b")));
  EXPECT_TRUE(absl::IsNotFound(store_->Create("no/a", 1).status()));
  EXPECT_FALSE(*Exists(*store_, "no/a"));
}

TEST_P(StoreTest, ListingIsSortedAndTellsFoldersFromFiles) {
  ASSERT_TRUE(store_->MakeDirectory("d").ok());
  ASSERT_TRUE(store_->MakeDirectory("d").ok());
  Put("d/z", "123");
  Put("d/a", "1");
  ASSERT_TRUE(MakeDirectories(*store_, "d/m/n").ok());
  const std::vector<ListedEntry> expected = {{"a", false, 1}, {"m", true, 0}, {"z", false, 3}};
  EXPECT_EQ(*store_->List("d"), expected);
}

TEST_P(StoreTest, RenameNeverReplaces) {
  ASSERT_TRUE(MakeDirectories(*store_, "from/x").ok());
  ASSERT_TRUE(MakeDirectories(*store_, "to").ok());
  EXPECT_TRUE(absl::IsAlreadyExists(store_->RenameNoReplace("from", "to")))
      << "an empty directory too";
  Put("a", "a");
  Put("b", "b");
  EXPECT_TRUE(absl::IsAlreadyExists(store_->RenameNoReplace("a", "b")));
  EXPECT_EQ(*ReadFile(*store_, "b", 10), "b");
  EXPECT_EQ(*ReadFile(*store_, "a", 10), "a");
  EXPECT_TRUE(store_->RenameNoReplace("from", "elsewhere").ok());
  EXPECT_TRUE(*Exists(*store_, "elsewhere/x"));
}

TEST_P(StoreTest, ReplaceReplacesFiles) {
  Put("a", "a");
  Put("b", "b");
  ASSERT_TRUE(store_->Replace("a", "b").ok());
  EXPECT_EQ(*ReadFile(*store_, "b", 10), "a");
  EXPECT_FALSE(*Exists(*store_, "a"));
}

TEST_P(StoreTest, RemoveTakesFilesAndEmptyFolders) {
  ASSERT_TRUE(MakeDirectories(*store_, "d/e").ok());
  EXPECT_FALSE(store_->Remove("d").ok());
  Put("d/e/f", "x");
  ASSERT_TRUE(RemoveTree(*store_, "d").ok());
  ASSERT_TRUE(RemoveTree(*store_, "d").ok());
  EXPECT_TRUE(store_->List("")->empty());
}

TEST(FileStoreTest, UrlsMustBeAbsolutePaths) {
  EXPECT_EQ((*FileStore::FromUrl("file:///a/b/"))->root(), "/a/b");
  EXPECT_EQ((*FileStore::FromUrl("/a"))->root(), "/a");
  for (const char* url : {"", "a/b", "s3://bucket", "file://host/a"}) {
    const auto store = FileStore::FromUrl(url);
    EXPECT_TRUE(absl::IsInvalidArgument(store.status())) << url;
  }
}

TEST(FileStoreTest, MakeRootMakesParents) {
  const TemporaryDirectory directory;
  FileStore store(directory.path() + "/a/b/c");
  ASSERT_TRUE(store.MakeRoot().ok());
  ASSERT_TRUE(store.MakeRoot().ok());
  EXPECT_TRUE(store.List("")->empty());
  ASSERT_TRUE(PutNew(store, "file", "x", "x").ok());
  FileStore inside(directory.path() + "/a/b/c/file");
  EXPECT_FALSE(inside.MakeRoot().ok());
}

TEST(FileStoreTest, ADirectoryIsNoFile) {
  const TemporaryDirectory directory;
  FileStore store(directory.path());
  ASSERT_TRUE(store.MakeDirectory("d").ok());
  EXPECT_THAT(std::string(store.Open("d").status().message()), HasSubstr("not a regular file"));
}

TEST(FileStoreTest, ErrorsNameTheOperationAndThePath) {
  FileStore store("/nowhere/at/all");
  EXPECT_THAT(std::string(store.Create("a", 1).status().message()),
              HasSubstr("create /nowhere/at/all/a"));
  EXPECT_THAT(std::string(store.Open("a").status().message()), HasSubstr("open /nowhere/at/all/a"));
}

TEST(MemoryStoreTest, OnlyDurableThingsSurviveThePower) {
  MemoryStore store;
  ASSERT_TRUE(PutNew(store, "kept", "k", "x").ok());
  auto unsynced = store.Create("unsynced", 1);
  ASSERT_TRUE((*unsynced)->Append(Bytes("u")).ok());
  ASSERT_TRUE((*unsynced)->Finish().ok());
  ASSERT_TRUE(store.Replace("kept", "renamed").ok());
  store.LosePower(MemoryStore::PowerLoss::kDurableOnly);
  EXPECT_EQ(*ReadFile(store, "kept", 10), "k");
  EXPECT_FALSE(*Exists(store, "unsynced"));
  EXPECT_FALSE(*Exists(store, "renamed"));
}

TEST(MemoryStoreTest, NamesMaySurviveWithoutTheirBytes) {
  MemoryStore store;
  auto writer = store.Create("a", 1);
  ASSERT_TRUE((*writer)->Append(Bytes("u")).ok());
  store.LosePower(MemoryStore::PowerLoss::kEntriesKept);
  EXPECT_EQ(*ReadFile(store, "a", 10), "");
}

TEST(MemoryStoreTest, OperationsFailFromTheChosenOneOn) {
  MemoryStore store;
  store.FailFrom(1, absl::UnavailableError("gone"));
  EXPECT_TRUE(store.MakeDirectory("a").ok());
  EXPECT_TRUE(absl::IsUnavailable(store.MakeDirectory("b")));
  EXPECT_TRUE(absl::IsUnavailable(store.MakeDirectory("c")));
  EXPECT_EQ(store.List("")->size(), 1u);
}

TEST(MemoryStoreTest, CapacityRunsOut) {
  MemoryStore store;
  store.SetCapacity(4);
  EXPECT_TRUE(absl::IsResourceExhausted(store.Create("big", 5).status()));
  auto writer = store.Create("small", 1);
  ASSERT_TRUE((*writer)->Append(Bytes("1234")).ok());
  EXPECT_TRUE(absl::IsResourceExhausted((*writer)->Append(Bytes("5"))));
}

}  // namespace
}  // namespace ravel::store
