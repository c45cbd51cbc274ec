// Each kind of message between daemons and coordinator is lost once with its stream, or comes
// twice, or late: the job goes on by itself, uncharged, with the same bits.

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_replace.h>
#include <gtest/gtest.h>

#include "tests/testing/eventually.h"
#include "tests/testing/fleet_proxy_service.h"
#include "tests/testing/mini_cluster.h"

namespace ravel::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using SteadyClock = std::chrono::steady_clock;

constexpr int64_t kSteps = 30;
// kPatientDetection; a reconnection takes 0.1 to 0.4 s more.
constexpr milliseconds kDetection{5000};
constexpr milliseconds kGrace{1500};

class LostMessagesTest : public ::testing::Test {
 protected:
  void SetUp() override {
    absl::StatusOr<std::unique_ptr<MiniCluster>> started =
        MiniCluster::Start({}, kPatientDetection);
    ASSERT_TRUE(started.ok()) << started.status();
    cluster_ = std::move(*started);
    absl::StatusOr<std::unique_ptr<FleetProxy>> proxy = FleetProxy::Start(cluster_->address());
    ASSERT_TRUE(proxy.ok()) << proxy.status();
    proxy_ = std::move(*proxy);
    WriteTokens(cluster_->folder() + "/tokens.bin", 20000, TinyJob().vocabulary);
    for (const char* name : {"w0", "w1"}) {
      ASSERT_EQ(cluster_->StartWorker(name, {}, proxy_->address()), absl::OkStatus());
    }
    ASSERT_EQ(cluster_->WaitForReadyNodes(2), absl::OkStatus());
    Train("undisturbed", expected_, undisturbed_);
  }

  void TearDown() override {
    cluster_.reset();  // daemons before the proxy
    proxy_.reset();
  }

  void Train(const std::string& name, std::vector<StepRow>& history, milliseconds& took) {
    const TinyJob job = {.name = name,
                         .tokens_path = cluster_->folder() + "/tokens.bin",
                         .store = cluster_->folder() + "/store",
                         .workers = 2,
                         .steps = kSteps,
                         .save_every_steps = 10};
    const SteadyClock::time_point start = SteadyClock::now();
    ASSERT_EQ(cluster_->Submit(job), absl::OkStatus());
    ASSERT_EQ(cluster_->WaitForSuccess(name, seconds(60)), absl::OkStatus());
    took = std::chrono::duration_cast<milliseconds>(SteadyClock::now() - start);
    const absl::StatusOr<std::vector<StepRow>> rows = cluster_->Metrics(name);
    ASSERT_TRUE(rows.ok()) << rows.status();
    history = *rows;
  }

  void Spoiled(const std::string& kind, Spoil spoil, milliseconds delay = {}) {
    const std::string name = absl::StrCat(
        "s", ++jobs_, "-", absl::StrReplaceAll(kind, {{"/", "-"}, {".", "-"}, {"_", "-"}}));
    SCOPED_TRACE(absl::StrCat(name,
                              spoil == Spoil::kLose        ? " lost"
                              : spoil == Spoil::kDuplicate ? " twice"
                                                           : " late"));
    ASSERT_EQ(cluster_->WaitForReadyNodes(2), absl::OkStatus());
    proxy_->SpoilNext(kind, spoil, delay);
    std::vector<StepRow> history;
    milliseconds took{};
    Train(name, history, took);
    // A beat may be due, and an end told, after the job's.
    EXPECT_TRUE(Eventually(seconds(60), [&] { return proxy_->spoilt() == 1; }))
        << "no such message was sent";
    EXPECT_EQ(FirstDifference(history, expected_), "");
    EXPECT_LE(took.count(), (undisturbed_ + 2 * kDetection + kGrace).count());
    const absl::StatusOr<JobView> view = cluster_->Get(name);
    ASSERT_TRUE(view.ok()) << view.status();
    EXPECT_EQ(view->restarts, 0) << cluster_->Report(name);
  }

  std::unique_ptr<MiniCluster> cluster_;
  std::unique_ptr<FleetProxy> proxy_;
  std::vector<StepRow> expected_;
  milliseconds undisturbed_{};
  int jobs_ = 0;
};

TEST_F(LostMessagesTest, WhatTheCoordinatorSaysMayBeLost) {
  for (const char* kind : {"down/launch",
                           "down/trainer.comm_records",
                           "down/trainer.run",
                           "down/trainer.commit",
                           "down/beat_ack"}) {
    Spoiled(kind, Spoil::kLose);
  }
}

TEST_F(LostMessagesTest, WhatADaemonSaysMayBeLost) {
  for (const char* kind : {"up/result",
                           "up/trainer.comm_record",
                           "up/trainer.ready",
                           "up/trainer.step",
                           "up/trainer.seal",
                           "up/trainer.done",
                           "up/exited",
                           "up/beat"}) {
    Spoiled(kind, Spoil::kLose);
  }
}

TEST_F(LostMessagesTest, MessagesMayComeTwiceOrLate) {
  for (const char* kind : {"down/launch",
                           "down/trainer.comm_records",
                           "down/trainer.run",
                           "down/trainer.commit",
                           "up/trainer.ready",
                           "up/trainer.step",
                           "up/trainer.seal",
                           "up/exited"}) {
    Spoiled(kind, Spoil::kDuplicate);
  }
  Spoiled("down/launch", Spoil::kDelay, kDetection / 2);
  Spoiled("up/trainer.ready", Spoil::kDelay, kDetection / 2);
}

// A save that was asked for, and stays asked for.
TEST_F(LostMessagesTest, ARequestToSaveMayBeLost) {
  const TinyJob job = {.name = "saves",
                       .tokens_path = cluster_->folder() + "/tokens.bin",
                       .store = cluster_->folder() + "/store",
                       .workers = 2,
                       .steps = 1'000'000,
                       .save_every_steps = 1'000'000};
  ASSERT_EQ(cluster_->Submit(job), absl::OkStatus());
  ASSERT_EQ(cluster_->WaitForStep(job.name, 5, seconds(60)), absl::OkStatus());
  proxy_->SpoilNext("down/trainer.save", Spoil::kLose);
  const RunResult result = cluster_->Ctl({"checkpoint", job.name}, seconds(60));
  EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
  // The proxy takes messages on threads of its own.
  EXPECT_TRUE(Eventually(seconds(60), [&] { return proxy_->spoilt() == 1; }));
  const bool committed = Eventually(seconds(60), [&] {
    const absl::StatusOr<JobView> view = cluster_->Get(job.name);
    return view.ok() && view->committed_step > 0;
  });
  EXPECT_TRUE(committed) << cluster_->Report(job.name);
}

}  // namespace
}  // namespace ravel::testing
