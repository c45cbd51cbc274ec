// The cache of data sets over a store whose reads a test counts, holds and spoils.

#include "worker/daemon/data_cache.h"

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>

#include "common/crypto.h"
#include "common/fault_point.h"
#include "common/store/file_store.h"
#include "common/token_check.h"
#include "tests/testing/eventually.h"
#include "tests/testing/process.h"
#include "tests/testing/required.h"

namespace ravel::daemon {
namespace {

using std::chrono::seconds;
using ::testing::HasSubstr;
namespace fs = std::filesystem;

// Events of the stores of a test.
struct StoreEvents {
  std::atomic<int> file_opens = 0;       // of files other than manifests
  std::function<absl::Status()> before;  // each opening of a file
  std::atomic<bool> manifest_away = false;
  std::atomic<bool> manifest_denied = false;
};

class WatchedStore : public store::FileStore {
 public:
  WatchedStore(std::string root, StoreEvents* events)
      : FileStore(std::move(root)), events_(events) {}
  absl::StatusOr<std::unique_ptr<store::FileReader>> Open(std::string_view path) const override {
    if (path == store::kDataManifest) {
      if (events_->manifest_away) {
        return absl::UnavailableError("connection refused");
      }
      if (events_->manifest_denied) {
        return absl::PermissionDeniedError("this identity is revoked");
      }
    } else {
      ++events_->file_opens;
      if (events_->before) {
        RETURN_IF_ERROR(events_->before());
      }
    }
    return FileStore::Open(path);
  }

 private:
  StoreEvents* const events_;
};

class DataCacheTest : public ::testing::Test {
 protected:
  void SetUp() override { cache_ = *Open(100000); }
  void TearDown() override {
    ASSERT_TRUE(fault::Configure("").ok());
    if (mounted_) {
      cache_.reset();
      umount2(CacheFolder().c_str(), MNT_DETACH);
    }
  }

  std::string CacheFolder() const { return scratch_.path() + "/cache"; }
  // A cache on a disk of its own, seen by this process alone; false: the kernel grants none.
  bool PutOnSmallDisk(int64_t bytes) {
    cache_.reset();
    const std::string size = "size=" + std::to_string(bytes);
    mounted_ = unshare(CLONE_NEWNS) == 0 &&
               mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
               mount("tmpfs", CacheFolder().c_str(), "tmpfs", 0, size.c_str()) == 0;
    cache_ = *Open(int64_t{1} << 40);
    return mounted_;
  }

  // Data sets are folders below `stores`, and their URLs the names of these.
  std::string StorePath(const std::string& url) const { return scratch_.path() + "/stores/" + url; }
  void MakeSet(const std::string& url, int64_t bytes, char letter = 'x') {
    store::DataManifest manifest;
    fs::create_directories(StorePath(url));
    for (const char* name : {"a.bin", "b.bin"}) {
      const std::string content(static_cast<size_t>(bytes / 2), letter);
      manifest.files.push_back({name, std::ssize(content), Hex(Sha256(content))});
      testing::WriteText(StorePath(url) + "/" + name, content);
    }
    testing::WriteText(StorePath(url) + "/" + store::kDataManifest,
                       store::WriteDataManifest(manifest));
  }
  absl::StatusOr<std::shared_ptr<DataCache>> Open(int64_t limit_bytes, int64_t keep_free = 0) {
    return DataCache::Open({.folder = CacheFolder(),
                            .limit_bytes = limit_bytes,
                            .keep_free_bytes = keep_free,
                            .open = [this](const std::string& url)
                                -> absl::StatusOr<std::unique_ptr<store::ObjectStore>> {
                              return std::make_unique<WatchedStore>(StorePath(url), &events_);
                            }});
  }
  void Reopen(int64_t limit_bytes = 100000) {
    cache_.reset();
    cache_ = *Open(limit_bytes);
  }
  absl::StatusOr<std::shared_ptr<DataLease>> Get(const std::string& url,
                                                 const FetchHooks& hooks = {}) {
    return cache_->Get(url, hooks);
  }
  // Fetches it if it is not here, and uses it no more.
  absl::Status Pass(const std::string& url) { return Get(url).status(); }
  static std::string Content(const DataLease& lease, const std::string& name) {
    return testing::ReadText(lease.folder() + "/" + name);
  }
  int FoldersIn(const std::string& name) const {
    const fs::directory_iterator folder(scratch_.path() + "/cache/" + name);
    return static_cast<int>(std::distance(fs::begin(folder), fs::end(folder)));
  }
  // The parts and files of a fetch that was cut off.
  std::vector<fs::path> Partial() const {
    std::vector<fs::path> files;
    for (const auto& entry : fs::recursive_directory_iterator(scratch_.path() + "/cache/partial")) {
      if (entry.is_regular_file()) {
        files.push_back(entry.path());
      }
    }
    std::sort(files.begin(), files.end());
    return files;
  }

  testing::ScratchFolder scratch_;
  bool mounted_ = false;
  StoreEvents events_;
  std::shared_ptr<DataCache> cache_;
};

TEST_F(DataCacheTest, ASetIsFetchedOnceAndServedFromThenOn) {
  MakeSet("web", 1000);
  int64_t moved = 0;
  const auto first = Get("web", {.moved = [&moved](int64_t bytes) { moved += bytes; }});
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(moved, 1000);
  EXPECT_EQ(Content(**first, "b.bin"), std::string(500, 'x'));
  const auto second = Get("web");
  EXPECT_EQ((*second)->folder(), (*first)->folder());
  EXPECT_EQ(events_.file_opens, 2);
  EXPECT_EQ(cache_->bytes(), 1000);
  EXPECT_EQ(FoldersIn("partial"), 0);
}

TEST_F(DataCacheTest, AnotherProcessFindsWhatThisOneHasFetched) {
  MakeSet("web", 1000);
  ASSERT_TRUE(Pass("web").ok());
  EXPECT_THAT(std::string(Open(1).status().message()), HasSubstr("another ravel-worker"));
  Reopen();
  EXPECT_EQ(cache_->bytes(), 1000);
  ASSERT_TRUE(Pass("web").ok());
  EXPECT_EQ(events_.file_opens, 2);
}

TEST_F(DataCacheTest, AnotherContentOfTheUrlIsAnotherEntry) {
  MakeSet("web", 1000, 'x');
  const auto before = Get("web");
  MakeSet("web", 1000, 'y');
  const auto after = Get("web");
  EXPECT_EQ(Content(**before, "a.bin")[0], 'x');
  EXPECT_EQ(Content(**after, "a.bin")[0], 'y');
}

TEST_F(DataCacheTest, TheLeastRecentlyUsedGoesAndNothingThatIsInUse) {
  Reopen(2500);
  MakeSet("one", 1000, '1');
  MakeSet("two", 1000, '2');
  MakeSet("three", 1000, '3');
  MakeSet("four", 1000, '4');
  ASSERT_TRUE(Pass("one").ok());
  ASSERT_TRUE(Pass("two").ok());
  const auto one = Get("one");  // newer than two, and in use
  ASSERT_TRUE(Pass("three").ok());
  EXPECT_EQ(cache_->bytes(), 2000);
  EXPECT_EQ(events_.file_opens, 6);
  ASSERT_TRUE(Pass("one").ok());
  EXPECT_EQ(events_.file_opens, 6) << "one is still here";
  const auto four = Get("four");
  ASSERT_TRUE(four.ok());
  EXPECT_EQ(Content(**one, "a.bin")[0], '1');
  const absl::Status full = Pass("two");
  EXPECT_TRUE(absl::IsResourceExhausted(full)) << full;
  EXPECT_THAT(std::string(full.message()), HasSubstr("--data-cache-bytes"));
  EXPECT_EQ(FoldersIn("sets"), 2);
  EXPECT_EQ(FoldersIn("trash"), 0);
}

TEST_F(DataCacheTest, ASetThatIsLargerThanTheWholeCacheSaysSoAndRemovesNothing) {
  Reopen(2500);
  MakeSet("one", 1000, '1');
  MakeSet("two", 1000, '2');
  MakeSet("large", 2600, '3');
  ASSERT_TRUE(Pass("one").ok());
  ASSERT_TRUE(Pass("two").ok());
  const absl::Status large = Pass("large");
  EXPECT_TRUE(absl::IsOutOfRange(large)) << large;
  for (const char* part : {"has 2.5 KiB", "--data-cache-bytes", "ravel-worker"}) {
    EXPECT_THAT(std::string(large.message()), HasSubstr(part));
  }
  EXPECT_EQ(FoldersIn("sets"), 2);
  EXPECT_EQ(cache_->bytes(), 2000);
  EXPECT_EQ(FoldersIn("partial"), 0);
}

TEST_F(DataCacheTest, TheOrderOfUsesOutlivesTheProcess) {
  MakeSet("one", 1000, '1');
  MakeSet("two", 1000, '2');
  // The set that makes room for itself in each round.
  std::map<std::string, std::string> third = {{"one", "three"}, {"two", "four"}};
  for (const char* const newer : {"one", "two"}) {
    MakeSet(third[newer], 1000, third[newer][0]);
    std::map<std::string, std::string> folders;
    for (const char* name : {"one", "two"}) {
      folders[name] = (*Get(name))->folder();
      fs::last_write_time(folders[name], fs::file_time_type::clock::now() - std::chrono::hours(1));
    }
    ASSERT_TRUE(Pass(newer).ok());
    Reopen(2500);
    ASSERT_TRUE(Pass(third[newer]).ok());
    for (const auto& [name, folder] : folders) {
      EXPECT_EQ(fs::exists(folder), name == newer) << name;
    }
    Reopen();
  }
}

TEST_F(DataCacheTest, ASetBeyondTheLimitIsRefusedAndEvictsNothingInUse) {
  MakeSet("small", 1000);
  const auto small = Get("small");
  MakeSet("large", 200000);
  EXPECT_TRUE(absl::IsOutOfRange(Pass("large")));
  EXPECT_EQ(events_.file_opens, 2) << "not a byte of it was read";
  EXPECT_EQ(Content(**small, "a.bin").size(), 500u);
}

TEST_F(DataCacheTest, ADiskThatGetsFullLeavesNothingBehind) {
  MakeSet("web", 1000);
  ASSERT_TRUE(fault::Configure("data_fetch.piece@2:error=disk full").ok());
  EXPECT_TRUE(absl::IsResourceExhausted(Pass("web")));
  EXPECT_EQ(FoldersIn("partial"), 0);
  EXPECT_EQ(cache_->bytes(), 0);
  ASSERT_TRUE(fault::Configure("").ok());
  EXPECT_TRUE(Pass("web").ok());
}

TEST_F(DataCacheTest, ADiskWithoutRoomIsNotWrittenTo) {
  MakeSet("one", 1000);
  ASSERT_TRUE(Pass("one").ok());
  const int opens = events_.file_opens;
  cache_.reset();
  // A twentieth of the disk stays free, of which this set would take a half.
  const auto space = fs::space(scratch_.path());
  MakeSet("two", 1000);
  store::DataManifest huge;
  const auto kept = static_cast<int64_t>(space.capacity / 20);
  huge.files = {{"a.bin",
                 std::max<int64_t>(static_cast<int64_t>(space.available) - kept / 2, 1000),
                 std::string(64, '0')}};
  testing::WriteText(StorePath("two") + "/" + store::kDataManifest, store::WriteDataManifest(huge));
  cache_ = *Open(int64_t{1} << 60, int64_t{1} << 60);
  EXPECT_TRUE(absl::IsResourceExhausted(Pass("two")));
  EXPECT_EQ(events_.file_opens, opens);
}

TEST_F(DataCacheTest, RoomThatAnotherFetchAwaitsIsNotGivenTwice) {
  if (!PutOnSmallDisk(1 << 20)) {
    testing::SkipWithout("mounts", "this process may not mount a file system");
    return;
  }
  MakeSet("one", 600'000);
  MakeSet("two", 600'000);
  std::atomic<bool> go = false;
  events_.before = [&go] {
    EXPECT_TRUE(testing::Eventually(seconds(20), [&go] { return go.load(); }));
    return absl::OkStatus();
  };
  std::thread first([this] { EXPECT_TRUE(Pass("one").ok()); });
  EXPECT_TRUE(testing::Eventually(seconds(20), [this] { return events_.file_opens == 1; }));
  const absl::Status refused = Pass("two");
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_EQ(events_.file_opens, 1) << "not a byte of it was read";
  go = true;
  first.join();
  EXPECT_TRUE(Pass("two").ok()) << "the first one is not in use any more, and goes";
}

// Disk that is set aside for the rest of a file is room for that rest.
TEST_F(DataCacheTest, AFetchThatIsCutOffHasTheRoomThatItHadTaken) {
  if (!PutOnSmallDisk(1 << 20)) {
    testing::SkipWithout("mounts", "this process may not mount a file system");
    return;
  }
  MakeSet("web", 1'400'000);
  store::DataManifest one;  // of its two files
  const std::string content = testing::ReadText(StorePath("web") + "/a.bin");
  one.files = {{"a.bin", std::ssize(content), Hex(Sha256(content))}};
  testing::WriteText(StorePath("web") + "/" + store::kDataManifest, store::WriteDataManifest(one));
  ASSERT_TRUE(fault::Configure("data_fetch.piece@1:error=cut off").ok());
  EXPECT_FALSE(Pass("web").ok());
  EXPECT_LT(fs::space(CacheFolder()).available, 500'000u);
  ASSERT_TRUE(fault::Configure("").ok());
  const absl::Status passed = Pass("web");
  EXPECT_TRUE(passed.ok()) << passed;
}

TEST_F(DataCacheTest, AFetchThatIsCutOffGoesOnWhereItWas) {
  MakeSet("web", 1000);
  ASSERT_TRUE(fault::Configure("data_fetch.piece@2:error=cut").ok());
  EXPECT_FALSE(Pass("web").ok());
  ASSERT_TRUE(fault::Configure("").ok());
  EXPECT_EQ(cache_->bytes(), 500) << "a.bin is here";
  Reopen();
  EXPECT_EQ(cache_->bytes(), 500);
  const int opens = events_.file_opens;
  const auto lease = Get("web");
  ASSERT_TRUE(lease.ok()) << lease.status();
  EXPECT_EQ(events_.file_opens, opens + 1) << "b.bin alone was missing";
  EXPECT_EQ(Content(**lease, "a.bin"), std::string(500, 'x'));
}

TEST_F(DataCacheTest, TornFilesOfAKilledProcessAreNeverUsed) {
  MakeSet("web", 1000);
  ASSERT_TRUE(fault::Configure("data_fetch.piece@2:error=cut").ok());
  EXPECT_FALSE(Pass("web").ok());
  ASSERT_TRUE(fault::Configure("").ok());
  const std::vector<fs::path> files = Partial();
  ASSERT_EQ(files.size(), 2u);  // a.bin and b.bin.part
  // Power loss: a file with its name that is torn, and a part with bytes that nobody wrote.
  testing::WriteText(files[0], std::string(499, 'x') + "?");
  testing::WriteText(files[1], std::string(200, '?'));
  Reopen();
  const auto lease = Get("web");
  ASSERT_TRUE(lease.ok()) << lease.status();
  EXPECT_EQ(Content(**lease, "a.bin"), std::string(500, 'x'));
  EXPECT_EQ(Content(**lease, "b.bin"), std::string(500, 'x'));
}

TEST_F(DataCacheTest, PartsThatAreRightAreNotReadAgain) {
  MakeSet("web", 1000);
  ASSERT_TRUE(fault::Configure("data_fetch.piece@2:error=cut").ok());
  EXPECT_FALSE(Pass("web").ok());
  ASSERT_TRUE(fault::Configure("").ok());
  const std::vector<fs::path> files = Partial();
  testing::WriteText(files[1], std::string(400, 'x'));
  // The store has other bytes there now: only the last 100 are read.
  testing::WriteText(StorePath("web") + "/b.bin", std::string(400, '?') + std::string(100, 'x'));
  const auto lease = Get("web");
  ASSERT_TRUE(lease.ok()) << lease.status();
  EXPECT_EQ(Content(**lease, "b.bin"), std::string(500, 'x'));
}

TEST_F(DataCacheTest, AWrongDigestIsReadTwiceAndNamed) {
  MakeSet("web", 1000);
  testing::WriteText(StorePath("web") + "/b.bin", std::string(499, 'x') + "?");
  const absl::Status wrong = Pass("web");
  EXPECT_TRUE(absl::IsDataLoss(wrong)) << wrong;
  EXPECT_THAT(std::string(wrong.message()), HasSubstr("b.bin"));
  EXPECT_EQ(events_.file_opens, 3);
  EXPECT_EQ(FoldersIn("sets"), 0);
  testing::WriteText(StorePath("web") + "/b.bin", "short");
  EXPECT_TRUE(absl::IsDataLoss(Pass("web")));
  // A store that was damaged on the way alone is right the second time.
  MakeSet("web", 1000);
  EXPECT_TRUE(Pass("web").ok());
}

TEST_F(DataCacheTest, FilesThatAreGoneOrCutAreFetchedAgain) {
  MakeSet("web", 1000);
  const std::string folder = (*Get("web"))->folder();
  fs::resize_file(folder + "/a.bin", 10);
  auto lease = Get("web");
  ASSERT_TRUE(lease.ok()) << lease.status();
  EXPECT_EQ(Content(**lease, "a.bin").size(), 500u);
  // While a job has it open nothing is changed under it.
  fs::remove(folder + "/b.bin");
  EXPECT_TRUE(absl::IsFailedPrecondition(Pass("web")));
  lease->reset();
  EXPECT_TRUE(Pass("web").ok());
}

TEST_F(DataCacheTest, TwoAtOnceShareOneFetch) {
  MakeSet("web", 1000);
  std::atomic<bool> go = false;
  events_.before = [&go] {
    EXPECT_TRUE(testing::Eventually(seconds(20), [&go] { return go.load(); }));
    return absl::OkStatus();
  };
  std::atomic<int> asking = 0;
  std::vector<std::shared_ptr<DataLease>> leases(3);
  std::vector<std::thread> threads;
  for (auto& lease : leases) {
    threads.emplace_back([&] {
      const FetchHooks hooks = {.moved = nullptr, .abandoned = [&asking] {
                                  ++asking;
                                  return false;
                                }};
      lease = *Get("web", hooks);
    });
  }
  EXPECT_TRUE(testing::Eventually(seconds(20), [&] { return asking >= 4; }));
  go = true;
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(events_.file_opens, 2);
  EXPECT_EQ(leases[0]->folder(), leases[2]->folder());
  EXPECT_EQ(FoldersIn("sets"), 1);
}

TEST_F(DataCacheTest, WhoWaitsTellsTheBytesOfTheFetch) {
  MakeSet("web", 1000);
  std::atomic<int64_t> told = 0;
  // The second file comes once the one who waits has told the first.
  events_.before = [&] {
    if (events_.file_opens == 2) {
      EXPECT_TRUE(testing::Eventually(seconds(20), [&told] { return told == 500; }));
    }
    return absl::OkStatus();
  };
  std::thread fetching([&] { EXPECT_TRUE(Pass("web").ok()); });
  ASSERT_TRUE(testing::Eventually(seconds(20), [&] { return events_.file_opens > 0; }));
  EXPECT_TRUE(Get("web", {.moved = [&told](int64_t bytes) { told += bytes; }}).ok());
  fetching.join();
  EXPECT_EQ(events_.file_opens, 2);
}

TEST_F(DataCacheTest, WhoWaitsTakesOverFromAFetchThatIsGivenUp) {
  MakeSet("web", 1000);
  std::atomic<bool> given_up = false;
  std::atomic<bool> waits = false;
  events_.before = [&] {
    EXPECT_TRUE(testing::Eventually(seconds(20), [&] { return waits.load(); }));
    given_up = true;
    return absl::OkStatus();
  };
  absl::Status first;
  std::thread fetching([&] {
    first = Get("web", {.moved = nullptr, .abandoned = [&] { return given_up.load(); }}).status();
  });
  ASSERT_TRUE(testing::Eventually(seconds(20), [&] { return events_.file_opens > 0; }));
  const auto second = Get("web", {.moved = nullptr, .abandoned = [&] {
                                    waits = true;
                                    return false;
                                  }});
  fetching.join();
  EXPECT_TRUE(absl::IsCancelled(first)) << first;
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_EQ(Content(**second, "b.bin"), std::string(500, 'x'));
}

TEST_F(DataCacheTest, OnlyASetWithTheSamplesOfTheJobServes) {
  const std::string web = StorePath("web");
  std::map<char, std::string> digests = {{'c', std::string(64, '0')}};
  const auto make = [&](char letter) {
    store::DataManifest manifest;
    fs::create_directories(web);
    const auto writer = MegatronWriter::Create(web + "/t", 300);
    ASSERT_TRUE(writer.ok() && (*writer)->AddDocument(std::vector<int32_t>(50, letter)).ok() &&
                (*writer)->Finish().ok());
    for (const char* name : {"t.bin", "t.idx"}) {
      const std::string content = testing::ReadText(web + "/" + name);
      manifest.files.push_back({name, std::ssize(content), Hex(Sha256(content))});
    }
    digests[letter] =
        CheckTokenFile(web + "/t", TokenFormat::kMegatron, {.sample = true})->sample_digest;
    manifest.tokens = {{"t", 50, letter, digests[letter]}};
    testing::WriteText(web + "/" + store::kDataManifest, store::WriteDataManifest(manifest));
  };
  const auto samples = [&](char letter) { return DataSamples{{"t", digests[letter]}}; };
  const auto served = [&](char letter) {
    const auto lease = cache_->Get("web", {}, samples(letter));
    return lease.ok() ? Content(**lease, "t.bin").substr(0, 1)
                      : std::string(lease.status().message());
  };
  make('b');
  make('a');
  EXPECT_THAT(served('b'), HasSubstr("not the one that the job was submitted with"));
  EXPECT_EQ(events_.file_opens, 0) << "nothing was fetched";
  EXPECT_EQ(served('a'), "a");
  make('b');
  EXPECT_EQ(served('a'), "a") << "the copy that is here";
  EXPECT_EQ(served('b'), "b");
  // A copy whose ids have changed on the disk is fetched again.
  const std::string copy = (*cache_->Get("web", {}, samples('b')))->folder() + "/t.bin";
  testing::WriteText(copy, std::string(100, 'z'));
  EXPECT_EQ(served('b'), "b");
  events_.manifest_away = true;
  EXPECT_EQ(served('a'), "a");
  EXPECT_EQ(served('b'), "b");
  testing::WriteText(copy, std::string(100, 'z'));
  EXPECT_THAT(served('b'), HasSubstr("connection refused")) << "damaged, it serves nobody";
  EXPECT_THAT(served('c'), HasSubstr("connection refused"));
  // One that has no such token files at all is another set, too.
  events_.manifest_away = false;
  MakeSet("web", 1000);
  EXPECT_EQ(served('a'), "a");
}

TEST_F(DataCacheTest, OfSeveralCopiesTheNewestServesEachTime) {
  MakeSet("web", 1000, 'x');
  ASSERT_TRUE(Pass("web").ok());
  MakeSet("web", 1000, 'y');
  ASSERT_TRUE(Pass("web").ok());
  events_.manifest_away = true;
  for (int job = 0; job < 3; ++job) {
    const auto kept = Get("web");
    ASSERT_TRUE(kept.ok()) << kept.status();
    EXPECT_EQ(Content(**kept, "a.bin")[0], 'y') << job;
  }
}

TEST_F(DataCacheTest, WithoutItsStoreACopyServesAndWithoutACopyNothing) {
  MakeSet("web", 1000);
  ASSERT_TRUE(Pass("web").ok());
  events_.manifest_away = true;
  const auto kept = Get("web");
  ASSERT_TRUE(kept.ok()) << kept.status();
  EXPECT_EQ(Content(**kept, "a.bin"), std::string(500, 'x'));
  EXPECT_TRUE(absl::IsUnavailable(Pass("other")));
  fs::resize_file((*kept)->folder() + "/a.bin", 3);
  EXPECT_TRUE(absl::IsUnavailable(Pass("web"))) << "a copy that is not whole serves nobody";
}

TEST_F(DataCacheTest, ANodeThatMayNotReadAnyMoreDoesNotGoOnWithItsCopy) {
  MakeSet("web", 1000);
  ASSERT_TRUE(Pass("web").ok());
  events_.manifest_denied = true;
  EXPECT_TRUE(absl::IsPermissionDenied(Pass("web")));
}

// The thread that fetches may hang in a disk: who waits for it shows no sign of life meanwhile.
TEST_F(DataCacheTest, WhoWaitsForAFetchThatStandsStillAsksForItselfAlone) {
  MakeSet("web", 1000);
  std::atomic<bool> go = false;
  events_.before = [&go] {
    EXPECT_TRUE(testing::Eventually(seconds(20), [&go] { return go.load(); }));
    return absl::OkStatus();
  };
  std::thread fetching([&] { EXPECT_TRUE(Pass("web").ok()); });
  ASSERT_TRUE(testing::Eventually(seconds(20), [&] { return events_.file_opens > 0; }));
  int signs = 0;
  int asked = 0;
  const auto waiting = Get("web",
                           {.abandoned =
                                [&signs] {
                                  ++signs;
                                  return false;
                                },
                            .given_up = [&asked] { return ++asked == 3; }});
  EXPECT_TRUE(absl::IsCancelled(waiting.status())) << waiting.status();
  EXPECT_EQ(signs, 1);
  go = true;
  fetching.join();
}

TEST_F(DataCacheTest, AFolderThatWasHereKeepsWhatIsNotOfTheCache) {
  MakeSet("web", 1000);
  ASSERT_TRUE(Pass("web").ok());
  const std::string trash = scratch_.path() + "/cache/trash/";
  const std::string key =
      fs::directory_iterator(scratch_.path() + "/cache/sets")->path().filename().string();
  fs::create_directories(trash + "photos");
  fs::create_directories(trash + key + ".12ab34cd/part");
  Reopen();
  EXPECT_TRUE(fs::exists(trash + "photos"));
  EXPECT_FALSE(fs::exists(trash + key + ".12ab34cd"));
}

TEST_F(DataCacheTest, WhatIsNoDataSetIsNotFound) {
  fs::create_directories(StorePath("empty"));
  EXPECT_TRUE(absl::IsNotFound(Pass("empty")));
  testing::WriteText(StorePath("empty") + "/" + store::kDataManifest, "{}");
  EXPECT_TRUE(absl::IsInvalidArgument(Pass("empty")));
}

}  // namespace
}  // namespace ravel::daemon
