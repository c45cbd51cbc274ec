#include "coordinator/access/live_calls.h"

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

namespace ravel::coordinator {
namespace {

TEST(LiveCallsTest, OnlyTheCallsOfThatIdentityAreCancelledAndOnce) {
  LiveCalls live;
  std::vector<int> cancelled(3);
  const auto first = live.Add("user/a", INT64_MAX, [&] { ++cancelled[0]; });
  const auto second = live.Add("user/b", INT64_MAX, [&] { ++cancelled[1]; });
  const auto third = live.Add("user/a", INT64_MAX, [&] { ++cancelled[2]; });
  live.Remove(third);
  live.CancelOf("user/a");
  live.CancelOf("user/a");
  EXPECT_EQ(cancelled, (std::vector<int>{1, 0, 0}));
  live.Remove(first);
  live.Remove(second);
}

TEST(LiveCallsTest, ACallMayEndInsideItsOwnCancel) {
  LiveCalls live;
  LiveCalls::CallId id = 0;
  bool cancelled = false;
  id = live.Add("user/a", INT64_MAX, [&] {
    live.Remove(id);
    cancelled = true;
  });
  live.CancelOf("user/a");
  EXPECT_TRUE(cancelled);
}

TEST(LiveCallsTest, WhatACancelTouchesOutlivesTheCall) {
  for (int round = 0; round < 200; ++round) {
    LiveCalls live;
    auto call = std::make_shared<std::atomic<int>>(0);
    const std::weak_ptr<std::atomic<int>> watched = call;
    const auto id = live.Add("user/a", INT64_MAX, [call] { ++*call; });
    call.reset();
    std::thread revoker([&live] { live.CancelOf("user/a"); });
    live.Remove(id);
    revoker.join();
    EXPECT_TRUE(watched.expired());
  }
}

TEST(LiveCallsTest, CallsEndWithTheirCertificates) {
  LiveCalls live;
  std::vector<int> cancelled(2);
  const auto first = live.Add("node/a", 1000, [&] { ++cancelled[0]; });
  const auto second = live.Add("node/b", 3000, [&] { ++cancelled[1]; });
  live.CancelExpired(1000);
  EXPECT_EQ(cancelled, (std::vector<int>{0, 0}));
  live.CancelExpired(2000);
  live.CancelExpired(2500);
  EXPECT_EQ(cancelled, (std::vector<int>{1, 0}));
  live.Remove(first);
  live.Remove(second);
}

}  // namespace
}  // namespace ravel::coordinator
