#include "coordinator/store/store_writer.h"

#include <filesystem>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gtest/gtest.h>

#include "common/fault_point.h"
#include "common/mutex.h"
#include "coordinator/store/memory_job_store.h"
#include "coordinator/store/sqlite_job_store.h"

namespace ravel::coordinator {
namespace {

// Notes what it is told, fails where it should, and holds the writer up where a test says so.
class WatchedStore : public MemoryJobStore {
 public:
  WatchedStore() : MemoryJobStore(&disk) { EXPECT_TRUE(Open().ok()); }
  absl::Status Apply(const StoreChange& change) override {
    const std::string id = change.operations.front().id;
    {
      MutexLock lock(mutex);
      told.push_back(id);
      entered = true;
      changed.NotifyAll();
      while (closed) {
        changed.Wait(mutex);
      }
    }
    RETURN_IF_ERROR(fails(id));
    return MemoryJobStore::Apply(change);
  }
  absl::Status BeginGroup() override {
    MutexLock lock(mutex);
    told.push_back("begin");
    return absl::OkStatus();
  }
  absl::Status CommitGroup() override {
    MutexLock lock(mutex);
    told.push_back("commit");
    return commit;
  }
  void WaitUntilEntered() {
    MutexLock lock(mutex);
    while (!entered) {
      changed.Wait(mutex);
    }
  }
  void OpenDoor() {
    MutexLock lock(mutex);
    closed = false;
    changed.NotifyAll();
  }

  Disk disk;
  Mutex mutex;
  CondVar changed;
  bool closed = false;
  bool entered = false;
  std::vector<std::string> told;
  absl::Status commit;
  std::function<absl::Status(const std::string&)> fails = [](const std::string&) {
    return absl::OkStatus();
  };
};

std::shared_ptr<const StoreChange> Change(const std::string& id) {
  auto change = std::make_shared<StoreChange>();
  change->operations.push_back(OperationRecord());
  change->operations.back().id = id;
  return change;
}

// Results of writes, in the order in which they were told.
struct Results {
  std::function<void(absl::Status)> For(const std::string& id) {
    return [this, id](const absl::Status& status) {
      order.push_back(id);
      all.push_back(status);
    };
  }
  std::vector<std::string> order;
  std::vector<absl::Status> all;
};

std::vector<StoreWrite> Writes(const std::vector<std::string>& ids, Results& results) {
  std::vector<StoreWrite> writes;
  for (const std::string& id : ids) {
    writes.push_back({.change = Change(id), .done = results.For(id)});
  }
  return writes;
}

// On the writer's thread: a test looks at what was posted when the writer has ended.
void CallAtOnce(const std::function<void()>& work) {
  work();
}

TEST(StoreWriter, WhatCameWhileTheDiskWasBusyIsOneGroup) {
  WatchedStore store;
  store.closed = true;
  Results results;
  {
    ThreadStoreWriter writer({.store = &store, .post = CallAtOnce, .most_in_group = 3});
    writer.Add({.change = Change("a"), .done = results.For("a")});
    store.WaitUntilEntered();  // alone, and without a wait for others
    for (const char* id : {"b", "c", "d", "e"}) {
      writer.Add({.change = Change(id), .done = results.For(id)});
    }
    store.OpenDoor();
    writer.Drain();
    EXPECT_EQ(writer.groups(), 3);
    EXPECT_EQ(writer.writes(), 5);
  }
  EXPECT_EQ(store.told, (std::vector<std::string>{"a", "begin", "b", "c", "d", "commit", "e"}));
  EXPECT_EQ(results.order, (std::vector<std::string>{"a", "b", "c", "d", "e"}));
  for (const absl::Status& status : results.all) {
    EXPECT_TRUE(status.ok()) << status;
  }
}

TEST(StoreWriter, AChangeThatFailsDoesNotTakeTheOthersAlong) {
  WatchedStore store;
  store.fails = [](const std::string& id) {
    return id == "b" ? absl::InternalError("not this one") : absl::OkStatus();
  };
  Results results;
  const std::vector<absl::Status> ended = WriteGroup(store, Writes({"a", "b", "c"}, results));
  EXPECT_TRUE(ended[0].ok() && ended[2].ok());
  EXPECT_EQ(ended[1].code(), absl::StatusCode::kInternal);
  EXPECT_EQ(store.disk.operations.size(), 2U);
}

TEST(StoreWriter, WhenTheCommitFailsAllOfItFails) {
  WatchedStore store;
  store.commit = absl::UnavailableError("I/O error");
  store.fails = [](const std::string& id) {
    return id == "b" ? absl::AbortedError("another coordinator") : absl::OkStatus();
  };
  Results results;
  const std::vector<absl::Status> ended = WriteGroup(store, Writes({"a", "b", "c"}, results));
  EXPECT_EQ(ended[0].code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(ended[1].code(), absl::StatusCode::kAborted) << "its own reason";
  EXPECT_EQ(ended[2].code(), absl::StatusCode::kUnavailable);
}

TEST(StoreWriter, AFullDiskIsTriedOnceMoreWhenThereIsRoom) {
  WatchedStore store;
  store.commit = absl::ResourceExhaustedError("the disk is full");
  Results results;
  EXPECT_EQ(WriteGroup(store, Writes({"a", "b"}, results)),
            (std::vector<absl::Status>{absl::OkStatus(), absl::OkStatus()}));
  EXPECT_EQ(store.told, (std::vector<std::string>{"begin", "a", "b", "commit", "a", "b"}));

  store.told.clear();
  store.fails = [&store](const std::string&) {
    return store.told.size() > 4 ? store.commit : absl::OkStatus();
  };
  for (const absl::Status& status : WriteGroup(store, Writes({"a", "b", "c"}, results))) {
    EXPECT_EQ(status, store.commit);
  }
  EXPECT_EQ(store.told, (std::vector<std::string>{"begin", "a", "b", "c", "commit", "a"}))
      << "what is full stays full";
}

TEST(StoreWriter, WhatIsQueuedIsWrittenBeforeItEnds) {
  WatchedStore store;
  store.closed = true;
  Results results;
  ThreadStoreWriter writer({.store = &store, .post = CallAtOnce});
  writer.Add({.change = Change("a"), .done = results.For("a")});
  store.WaitUntilEntered();
  writer.Add({.change = Change("b"), .done = results.For("b")});
  store.OpenDoor();
  writer.Drain();
  EXPECT_EQ(store.disk.operations.size(), 2U);
  writer.Add({.change = Change("c"), .done = results.For("c")});
  ASSERT_EQ(results.order, (std::vector<std::string>{"a", "b", "c"}));
  EXPECT_TRUE(results.all[1].ok());
  EXPECT_EQ(results.all[2].code(), absl::StatusCode::kUnavailable) << "too late";
}

TEST(StoreWriter, AFullQueueRefusesAndLosesNothing) {
  WatchedStore store;
  store.closed = true;
  Results results;
  ThreadStoreWriter writer({.store = &store, .post = CallAtOnce, .max_queued = 1});
  writer.Add({.change = Change("a"), .done = results.For("a")});
  store.WaitUntilEntered();
  writer.Add({.change = Change("b"), .done = results.For("b")});
  writer.Add({.change = Change("c"), .done = results.For("c")});
  EXPECT_EQ(results.order, (std::vector<std::string>{"c"}));
  EXPECT_EQ(results.all.front().code(), absl::StatusCode::kResourceExhausted);
  store.OpenDoor();
  writer.Drain();
  EXPECT_EQ(store.disk.operations.size(), 2U);
}

TEST(StoreWriter, FaultPointsAreReachedOncePerChange) {
  WatchedStore store;
  ASSERT_TRUE(fault::Configure("coordinator.before_persist@2:error=not this one").ok());
  Results results;
  const std::vector<absl::Status> ended = WriteGroup(store, Writes({"a", "b", "c"}, results));
  ASSERT_TRUE(fault::Configure("").ok());
  EXPECT_TRUE(ended[0].ok() && ended[2].ok());
  EXPECT_FALSE(ended[1].ok());
  EXPECT_FALSE(store.disk.operations.contains("b"));
}

TEST(StoreWriter, OtherWorkIsPartOfTheGroup) {
  WatchedStore store;
  Results results;
  std::vector<StoreWrite> group = Writes({"a"}, results);
  group.push_back({.work = [](JobStore& inner) { return inner.SweepRequests({}).status(); },
                   .done = results.For("sweep")});
  EXPECT_EQ(WriteGroup(store, group),
            (std::vector<absl::Status>{absl::OkStatus(), absl::OkStatus()}));
}

TEST(StoreWriter, ADatabaseTakesGroupsWhileOthersRead) {
  std::string folder = ::testing::TempDir() + "store-writer-XXXXXX";
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  {
    const auto store = SqliteJobStore::Create(folder);
    ASSERT_TRUE(store.ok()) << store.status();
    ASSERT_TRUE((*store)->Open().ok());
    Results results;
    ThreadStoreWriter writer({.store = store->get(), .post = CallAtOnce});
    constexpr int kChanges = 500;
    constexpr int kHeldAt = 100;  // there the writer waits for all that follow, on any disk
    std::promise<void> all_added;
    for (int i = 0; i < kChanges; ++i) {
      auto change = std::make_shared<StoreChange>();
      change->request = RequestRecord{absl::StrCat("request-", i), "hash", "job", 1};
      std::function<void(absl::Status)> done = results.For(change->request->id);
      if (i == kHeldAt) {
        done = [&all_added, done](const absl::Status& status) {
          all_added.get_future().wait();
          done(status);
        };
      }
      writer.Add({.change = change, .done = std::move(done)});
      EXPECT_TRUE((*store)->FindRequest("request-0").ok());
    }
    all_added.set_value();
    writer.Drain();
    EXPECT_LT(writer.groups(), kChanges) << "some shared a commit";
    ASSERT_EQ(results.all.size(), static_cast<size_t>(kChanges));
    for (int i = 0; i < kChanges; ++i) {
      const std::string id = absl::StrCat("request-", i);
      EXPECT_EQ(results.order[static_cast<size_t>(i)], id);
      const auto found = (*store)->FindRequest(id);
      EXPECT_TRUE(found.ok() && found->has_value()) << id;
    }
  }
  std::error_code ignored;
  std::filesystem::remove_all(folder, ignored);
}

}  // namespace
}  // namespace ravel::coordinator
