#include "coordinator/jobs/work_pools.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "common/clock.h"
#include "coordinator/jobs/bounded_look.h"
#include "coordinator/jobs/fair_turns.h"
#include "coordinator/jobs/strand_lag.h"
#include "tests/testing/eventually.h"

namespace ravel::coordinator {
namespace {

using std::chrono::seconds;
using testing::Eventually;

// A gate at which a test holds work until it opens it.
class Gate {
 public:
  void Pass() {
    std::unique_lock<std::mutex> lock(mutex_);
    ++arrived_;
    changed_.notify_all();
    changed_.wait(lock, [this] { return open_; });
  }
  void Open() {
    const std::lock_guard<std::mutex> lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  bool Arrived(int count) {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, seconds(20), [&] { return arrived_ >= count; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int arrived_ = 0;
  bool open_ = false;
};

TEST(WorkPoolTest, CommitsGoBeforeRestorePointsAndUpkeep) {
  Gate gate;
  std::mutex mutex;
  std::string order;
  WorkPool pool({.name = "test", .threads = 1, .max_threads = 1});
  ASSERT_TRUE(pool.Post({0, "", "first", [&] { gate.Pass(); }}).ok());
  ASSERT_TRUE(gate.Arrived(1));
  for (const auto& [rank, name] :
       std::vector<std::pair<int, char>>{{2, 'u'}, {1, 'r'}, {0, 'c'}, {2, 'v'}, {0, 'd'}}) {
    ASSERT_TRUE(pool.Post({rank,
                           "",
                           "later",
                           [&, name = name] {
                             const std::lock_guard<std::mutex> lock(mutex);
                             order += name;
                           }})
                    .ok());
  }
  gate.Open();
  ASSERT_TRUE(Eventually(seconds(20), [&] {
    const std::lock_guard<std::mutex> lock(mutex);
    return order.size() == 5;
  }));
  EXPECT_EQ(order, "cdruv");
}

TEST(WorkPoolTest, AClientHasOneAtATimeAndAShareAndOthersGoOn) {
  Gate gate;
  std::atomic<int> others = 0;
  WorkPool pool({.name = "test",
                 .threads = 2,
                 .max_threads = 2,
                 .max_queued = 6,
                 .max_per_client = 3,
                 .one_at_a_time = true});
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(pool.Post({0, "greedy", "heavy", [&] { gate.Pass(); }}).ok());
  }
  ASSERT_TRUE(gate.Arrived(1));
  const absl::Status refused = pool.Post({0, "greedy", "heavy", [] {}});
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(refused.message().find("try again"), std::string::npos);
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(pool.Post({0, "modest", "light", [&] { ++others; }}).ok());
  }
  EXPECT_TRUE(Eventually(seconds(20), [&] { return others == 2; })) << "one thread is not greedy's";
  gate.Open();
}

TEST(WorkPoolTest, AThreadThatIsStuckIsReplacedAndLeftBehind) {
  auto gate = std::make_shared<Gate>();  // outlives the pool, with the thread
  std::atomic<bool> done = false;
  {
    WorkPool pool({.name = "test", .threads = 1, .max_threads = 2, .stuck_ms = 0});
    ASSERT_TRUE(pool.Post({0, "", "a call that hangs", [gate] { gate->Pass(); }}).ok());
    ASSERT_TRUE(gate->Arrived(1));
    ASSERT_TRUE(Eventually(seconds(20), [&] { return !pool.Overdue(0).empty(); }));
    EXPECT_TRUE(pool.Overdue(0).empty()) << "told once";
    ASSERT_TRUE(pool.Post({0, "", "another", [&] { done = true; }}).ok());
    EXPECT_TRUE(Eventually(seconds(20), [&] { return done.load(); }));
    const int64_t start_ms = SystemClock::Get().MonotonicMs();
    EXPECT_FALSE(pool.StopWithin(100));
    EXPECT_LT(SystemClock::Get().MonotonicMs() - start_ms, 5000);
    EXPECT_FALSE(pool.Post({0, "", "too late", [] {}}).ok());
    gate->Open();
  }
}

TEST(WorkPoolsTest, AStoreThatHangsHoldsNoOtherUp) {
  auto gate = std::make_shared<Gate>();
  std::atomic<bool> committed = false;
  WorkPools pools({});
  for (int i = 0; i < 4; ++i) {
    pools.Store("/hangs", StoreWork::kRestore).Post([gate] { gate->Pass(); });
  }
  ASSERT_TRUE(gate->Arrived(2));
  pools.Store("/well", StoreWork::kCommit).Post([&] { committed = true; });
  EXPECT_TRUE(Eventually(seconds(20), [&] { return committed.load(); }));
  std::atomic<bool> planned = false;
  ASSERT_TRUE(pools.plan().Post({0, "client", "a plan", [&] { planned = true; }}).ok());
  EXPECT_TRUE(Eventually(seconds(20), [&] { return planned.load(); }));
  gate->Open();
}

TEST(WorkPoolTest, WorkThatAlreadyWaitsGetsTheThreadThatReplacesAStuckOne) {
  auto gate = std::make_shared<Gate>();
  std::atomic<bool> done = false;
  WorkPool pool({.name = "test", .threads = 1, .max_threads = 2, .stuck_ms = 200});
  ASSERT_TRUE(pool.Post({0, "", "a call that hangs", [gate] { gate->Pass(); }}).ok());
  ASSERT_TRUE(gate->Arrived(1));
  ASSERT_TRUE(pool.Post({0, "", "waits behind it", [&] { done = true; }}).ok());
  EXPECT_TRUE(Eventually(seconds(20), [&] {
    pool.Tend();
    return done.load();
  }));
  gate->Open();
}

TEST(WorkPoolsTest, RestorePointsThatHangHoldNoCommitOfTheSameStoreUp) {
  auto gate = std::make_shared<Gate>();
  std::atomic<bool> committed = false;
  WorkPools pools({});
  for (const StoreWork kind : {StoreWork::kRestore, StoreWork::kUpkeep}) {
    pools.Store("/shared", kind).Post([gate] { gate->Pass(); });
  }
  ASSERT_TRUE(gate->Arrived(2));
  pools.Store("/shared", StoreWork::kCommit).Post([&] { committed = true; });
  EXPECT_TRUE(Eventually(seconds(20), [&] { return committed.load(); }));
  gate->Open();
}

TEST(BoundedLookTest, APathThatDoesNotAnswerIsNamedAndTheLimitIsForEach) {
  auto gate = std::make_shared<Gate>();
  WorkPool pool({.name = "look", .threads = 1, .max_threads = 4, .stuck_ms = 0});
  const absl::Status late = BoundedLook(
      pool, "spec", {.each_ms = 2000, .all_ms = 60'000}, [gate](LookProgress& progress) {
        progress.At("spec.model.from");
        progress.At("spec.data.train[1].path");
        gate->Pass();
      });
  EXPECT_TRUE(absl::IsDeadlineExceeded(late));
  EXPECT_EQ(late.message(), "spec.data.train[1].path: no answer within 2 s");
  EXPECT_TRUE(
      BoundedLook(pool, "spec", {.each_ms = 10'000, .all_ms = 60'000}, [](LookProgress&) {}).ok())
      << "the thread that hangs is replaced";
  const absl::Status long_one =
      BoundedLook(pool, "spec", {.each_ms = 60'000, .all_ms = 200}, [gate](LookProgress& progress) {
        progress.At("spec.data.tokenizer");
        gate->Pass();
      });
  EXPECT_TRUE(absl::IsDeadlineExceeded(long_one));
  gate->Open();
}

TEST(FairTurnsTest, AShortPlanGoesBetweenTheSlicesOfALongOne) {
  FairTurns turns(1);
  std::atomic<bool> started = false;
  std::atomic<bool> short_done = false;
  std::atomic<bool> long_done = false;
  std::thread long_plan([&] {
    Turn turn(turns);
    started = true;
    const int64_t start_ms = SystemClock::Get().MonotonicMs();
    while (!short_done && SystemClock::Get().MonotonicMs() - start_ms < 20'000) {
      turn.MayPass();  // between sizes
    }
    EXPECT_LT(turn.used_ms(), 20'000);
    long_done = true;
  });
  EXPECT_TRUE(Eventually(seconds(20), [&] { return started.load(); }));
  {
    const Turn turn(turns);
    EXPECT_FALSE(long_done) << "it had not ended, and made room";
    short_done = true;
  }
  long_plan.join();
  EXPECT_TRUE(long_done);
}

TEST(LagMeterTest, PercentilesAndTheLongestTurnAreKeptAndAnAlarmIsRaised) {
  LagMeter lag;
  int64_t now_us = 1'000'000;
  for (int i = 0; i < 980; ++i) {
    lag.Record("Beat", 1000, 50, now_us += 100);
  }
  EXPECT_EQ(lag.alarms(), 0);
  for (int i = 0; i < 20; ++i) {
    lag.Record("Beat", 80'000, 50, now_us += 100);
  }
  lag.Record("ListJobs", 0, 300'000, now_us += 100);
  const LagSummary recent = lag.LastMinute();
  EXPECT_EQ(recent.turns, 1001);
  EXPECT_GE(recent.p50_ms, 1.0);
  EXPECT_LT(recent.p50_ms, 1.5);
  EXPECT_GE(recent.p99_ms, 80.0 / 1.42);
  EXPECT_EQ(recent.max_ms, 80);
  EXPECT_EQ(recent.longest_turn_ms, 300);
  EXPECT_EQ(recent.longest_turn, "ListJobs");
  EXPECT_EQ(lag.alarms(), 1) << "at most one in ten seconds";
  lag.Record("Beat", 0, 400'000, now_us += 20'000'000);
  EXPECT_EQ(lag.alarms(), 2);
  // Three minutes later nothing of that is recent.
  lag.Record("Beat", 1000, 50, now_us + 200'000'000);
  EXPECT_EQ(lag.LastMinute().turns, 1);
  EXPECT_EQ(lag.Total().turns, 1003);
}

}  // namespace
}  // namespace ravel::coordinator
