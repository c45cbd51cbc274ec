// Programs as graphs on an emulated device: what is launched, and what is issued call by call.

#include "worker/shard/step_graphs.h"

#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/worker/shard/synthetic_ranks.h"

namespace ravel::shard {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class StepGraphsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto library = kernels::CudaLibrary::Open(RAVEL_EMULATED_CUDA_LIBRARY);
    ASSERT_TRUE(library.ok()) << library.status();
    gpu_ = *kernels::CudaGpu::Open(*library, 0);
    plan_ = *plan::BuildShardingPlan({.spec = SyntheticJob(2, 1), .ranks = 2});
    streams_ = *DeviceStreams::Create(*gpu_, plan_, [] { return absl::OkStatus(); });
    graphs_ = std::make_unique<StepGraphs>(*streams_);
    memory_ = *gpu_->AllocatePinned(kBytes);
    between_ = *gpu_->MakeEvent();
    outside_ = *gpu_->MakeEvent();
  }
  // Copies [0] to [1] on the compute stream, then [1] to [2] on the stream of reductions.
  absl::Status Issue() {
    kernels::CudaStream& compute = streams_->compute();
    kernels::CudaStream& reduce = streams_->of(plan::StreamId::kReduce);
    compute.CopyMemory(Part(1), Part(0), kPart);
    compute.Record(between_);
    reduce.Wait(between_);
    reduce.CopyMemory(Part(2), Part(1), kPart);
    return absl::OkStatus();
  }
  absl::Status Run(const std::function<absl::Status()>& issue, int64_t turn = 0) {
    const absl::Status status = graphs_->Run({.turn = turn}, issue);
    streams_->Join();
    return status;
  }
  // What the copies made of this byte.
  char Passed(char byte, const std::function<absl::Status()>& issue) {
    EXPECT_TRUE(streams_->FinishAll().ok());
    std::memset(Part(0), byte, kPart);
    EXPECT_TRUE(Run(issue).ok());
    EXPECT_TRUE(streams_->FinishAll().ok());
    return *Part(2);
  }
  char* Part(int64_t index) { return static_cast<char*>(memory_.data()) + index * kPart; }

  static constexpr int64_t kPart = 64;
  static constexpr int64_t kBytes = 3 * kPart;
  std::unique_ptr<kernels::CudaGpu> gpu_;
  plan::ShardingPlan plan_;
  kernels::CudaMemory memory_;
  kernels::CudaEvent between_, outside_;
  std::unique_ptr<DeviceStreams> streams_;
  std::unique_ptr<StepGraphs> graphs_;
};

TEST_F(StepGraphsTest, TheSecondRunIsCapturedAndLaterOnesAreLaunched) {
  const auto issue = [&] { return Issue(); };
  for (const char byte : {'a', 'b', 'c', 'd'}) {
    EXPECT_EQ(Passed(byte, issue), byte);
  }
  EXPECT_EQ(graphs_->captured(), 1);
  EXPECT_EQ(graphs_->launches(), 2);
  EXPECT_THAT(graphs_->notes(), IsEmpty());
}

TEST_F(StepGraphsTest, EveryTurnHasAGraphOfItsOwn) {
  const auto issue = [&] { return Issue(); };
  for (int run = 0; run < 3; ++run) {
    for (int64_t turn = 0; turn < 3; ++turn) {
      EXPECT_TRUE(Run(issue, turn).ok());
    }
  }
  EXPECT_EQ(graphs_->captured(), 3);
  EXPECT_EQ(graphs_->launches(), 3);
}

TEST_F(StepGraphsTest, AStepThatDiffersIsIssuedAsItIs) {
  const auto issue = [&] { return Issue(); };
  for (const char byte : {'a', 'b', 'c'}) {
    EXPECT_EQ(Passed(byte, issue), byte);
  }
  const auto with_more = [&] {
    RETURN_IF_ERROR(Issue());
    streams_->of(plan::StreamId::kReduce).FillBytes(Part(2), 'x', kPart);
    return absl::OkStatus();
  };
  EXPECT_EQ(Passed('d', with_more), 'x');
  EXPECT_THAT(graphs_->notes(), ElementsAre(HasSubstr("this time: a fill is new")));
  EXPECT_EQ(Passed('e', issue), 'e');  // the graph is still good
  EXPECT_EQ(graphs_->launches(), 2);
}

// Ranks that exchange: what another rank says is what this one does.
TEST_F(StepGraphsTest, AProgramIsCapturedOnAllRanksOrOnNone) {
  std::vector<std::string> told;
  std::string others;
  graphs_ = std::make_unique<StepGraphs>(*streams_, [&](const std::string& own) {
    told.push_back(own);
    return absl::StatusOr<std::string>(others);
  });
  const auto issue = [&] { return Issue(); };
  others = "rank 1: a wait of the host for the device";
  for (const char byte : {'a', 'b', 'c', 'd', 'e'}) {
    EXPECT_EQ(Passed(byte, issue), byte);
  }
  EXPECT_EQ(graphs_->captured(), 0);
  EXPECT_THAT(told, ElementsAre("", "", ""));  // then it is not tried again
  ASSERT_THAT(graphs_->notes(), SizeIs(3));
  EXPECT_THAT(graphs_->notes()[2], HasSubstr("from here on: rank 1: a wait of the host"));
}

TEST_F(StepGraphsTest, WhereRanksExchangeAStepThatDiffersIsAnErrorAndNothingOfItIsDone) {
  graphs_ = std::make_unique<StepGraphs>(
      *streams_, [](const std::string& own) { return absl::StatusOr<std::string>(own); });
  const auto issue = [&] { return Issue(); };
  for (const char byte : {'a', 'b', 'c'}) {
    EXPECT_EQ(Passed(byte, issue), byte);
  }
  EXPECT_EQ(graphs_->captured(), 1);
  EXPECT_EQ(graphs_->launches(), 1);
  const auto with_more = [&] {
    RETURN_IF_ERROR(Issue());
    streams_->of(plan::StreamId::kReduce).FillBytes(Part(2), 'x', kPart);
    return absl::OkStatus();
  };
  std::memset(Part(0), 'd', kPart);
  const absl::Status status = Run(with_more);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("is not the one that all ranks captured: a fill is new"));
  EXPECT_TRUE(streams_->FinishAll().ok());
  EXPECT_EQ(*Part(2), 'c');
}

TEST_F(StepGraphsTest, AWaitOfTheHostWithinAProgramIsNamed) {
  const auto with_wait = [&] {
    RETURN_IF_ERROR(Issue());
    return streams_->Finish(streams_->of(plan::StreamId::kReduce));
  };
  for (const char byte : {'a', 'b', 'c', 'd', 'e'}) {
    EXPECT_EQ(Passed(byte, with_wait), byte);
  }
  EXPECT_EQ(graphs_->captured(), 0);
  ASSERT_THAT(graphs_->notes(), SizeIs(3));  // then it is not tried again
  EXPECT_THAT(graphs_->notes()[2], HasSubstr("from here on: a wait of the host for the device"));
}

// Live it is fine; in a capture the event's work is not there.
TEST_F(StepGraphsTest, ACallThatCannotBeCapturedIsNamedAndTheProgramRunsWithoutAGraph) {
  streams_->compute().Record(outside_);
  const auto with_event = [&] {
    streams_->compute().Wait(outside_);
    return Issue();
  };
  for (const char byte : {'a', 'b', 'c', 'd'}) {
    EXPECT_EQ(Passed(byte, with_event), byte);
  }
  EXPECT_EQ(graphs_->captured(), 0);
  EXPECT_EQ(graphs_->launches(), 0);
  ASSERT_THAT(graphs_->notes(), SizeIs(1));
  EXPECT_THAT(graphs_->notes()[0], HasSubstr("from here on: "));
  EXPECT_THAT(graphs_->notes()[0], HasSubstr("a wait for an event"));
}

TEST_F(StepGraphsTest, AnErrorOfTheProgramIsItsOwn) {
  const auto issue = [&] { return Issue(); };
  const auto fails = [&] {
    streams_->compute().CopyMemory(Part(1), Part(0), kPart);
    return absl::AbortedError("a peer is lost");
  };
  EXPECT_EQ(Passed('a', issue), 'a');
  EXPECT_EQ(Passed('b', issue), 'b');
  EXPECT_EQ(Run(fails), absl::AbortedError("a peer is lost"));
  EXPECT_EQ(Passed('c', issue), 'c');
}

}  // namespace
}  // namespace ravel::shard
