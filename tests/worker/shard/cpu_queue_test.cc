// A CPU stream is a queue: order within, events between.

#include "kernels/cpu_queue.h"

#include <atomic>

#include <gtest/gtest.h>

namespace ravel::kernels {
namespace {

TEST(CpuQueue, RunsInOrder) {
  CpuQueue queue;
  std::vector<int> order;
  for (int i = 0; i < 100; ++i) {
    queue.Submit({.run = [&order, i](int64_t) { order.push_back(i); }});
  }
  queue.Drain();
  ASSERT_EQ(order.size(), 100u);
  for (int i = 0; i < 100; ++i) {
    EXPECT_EQ(order[static_cast<size_t>(i)], i);
  }
}

TEST(CpuQueue, AnEventHoldsOneQueueUntilAnotherHasSetIt) {
  CpuQueue first;
  CpuQueue second;
  const auto gate = std::make_shared<CpuEvent>();
  const auto done = std::make_shared<CpuEvent>();
  int value = 0;
  second.Submit({.run = [&](int64_t) { EXPECT_EQ(value, 7); }, .waits = {done}});
  first.Submit({.run = [&](int64_t) { value = 7; }, .waits = {gate}, .done = done});
  EXPECT_FALSE(done->done());
  gate->Set();
  second.Drain();
  EXPECT_TRUE(done->done());
}

TEST(CpuQueue, QueuesOverlap) {
  CpuQueue first;
  CpuQueue second;
  const auto started = std::make_shared<CpuEvent>();
  // Each waits for the other inside its work: in one queue this would never end.
  const auto answered = std::make_shared<CpuEvent>();
  first.Submit({.run = [&](int64_t) {
    started->Set();
    answered->Wait();
  }});
  second.Submit({.run = [&](int64_t) {
    started->Wait();
    answered->Set();
  }});
  first.Drain();
  second.Drain();
}

TEST(CpuQueue, TheDestructorFinishesWhatWasSubmitted) {
  std::atomic<int> runs = 0;
  {
    CpuQueue queue;
    for (int i = 0; i < 10; ++i) {
      queue.Submit({.run = [&](int64_t) { ++runs; }});
    }
  }
  EXPECT_EQ(runs, 10);
}

}  // namespace
}  // namespace ravel::kernels
