// A retry with another parallelism.tensor is judged by the planner before it is accepted, as a
// submission is.

#include <atomic>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include "common/crypto.h"
#include "common/field_error.h"
#include "coordinator/jobs/planner_driver.h"
#include "tests/coordinator/api/testing_jobs_service.h"

namespace ravel::coordinator {
namespace {

// Plans, and refuses what a test tells it to.
class JudgingPlanner : public PlannerDriver {
 public:
  absl::StatusOr<RankMemory> Check(const plan::JobSpec& spec,
                                   int64_t ranks,
                                   bool shared_memory) override {
    ++checks;
    if (before_check) {
      std::exchange(before_check, nullptr)();
    }
    if (spec.tensor == refused_tensor) {
      return FieldRefusal("model.config.hiddenSize", "a multiple of 7", "64");
    }
    return PlannerDriver::Check(spec, ranks, shared_memory);
  }

  std::atomic<int> checks = 0;
  std::atomic<int64_t> refused_tensor = 0;
  std::function<void()> before_check;  // called once; set while nothing is planned
};

// Constructed before the service that has it.
struct WithJudgingPlanner {
  JudgingPlanner judge_;
};

class JobsRetryServiceTest : public WithJudgingPlanner, public JobsServiceTest {
 protected:
  JobsRetryServiceTest() : JobsServiceTest(&judge_) {}

  // Four devices in groups of two, with sums in four parts.
  v1::TrainingJob SharedJob() const {
    v1::TrainingJob job = Job("shared");
    v1::JobSpec& spec = *job.mutable_spec();
    spec.mutable_devices()->set_count(4);
    spec.mutable_parallelism()->set_tensor(2);
    spec.mutable_parallelism()->set_strategy("no_shard");
    spec.mutable_determinism()->set_tensor_parts(4);
    spec.mutable_determinism()->set_virtual_ranks(8);
    return job;
  }
  // Memory that a rank of the job needs with so many ranks to a layer.
  int64_t PeakBytes(int64_t tensor) {
    plan::JobSpec spec = Canonicalize(SharedJob(), {}).spec;
    spec.tensor = tensor;
    return judge_.PlannerDriver::Check(spec, 4, true)->peak_bytes;
  }
  // A job that was accepted on a node of so much memory with a device too few, and then cancelled.
  void CancelledJob(int64_t memory_bytes = int64_t{64} << 30) {
    AddNode(1, TokensOf(26'000), kLookProtocol, memory_bytes);
    const grpc::Status submitted = Submit(SharedJob());
    ASSERT_TRUE(submitted.ok()) << submitted.error_message();
    v1::CancelJobRequest request;
    request.set_request_id("cancel");
    request.set_name("shared");
    v1::Job response;
    grpc::ClientContext context;
    const grpc::Status cancelled = stub_->CancelJob(&context, request, &response);
    ASSERT_TRUE(cancelled.ok()) << cancelled.error_message();
    ASSERT_EQ(Record().state, JobState::kCancelled);
    judge_.checks = 0;
  }
  grpc::Status Retry(const std::string& request_id,
                     int64_t tensor,
                     v1::ErrorDetail* detail = nullptr,
                     bool allow_numerics_change = false) {
    v1::RetryJobRequest request;
    request.set_request_id(request_id);
    request.set_name("shared");
    request.set_tensor(tensor);
    request.set_allow_numerics_change(allow_numerics_change);
    v1::Job response;
    grpc::ClientContext context;
    const grpc::Status status = stub_->RetryJob(&context, request, &response);
    const auto found = context.GetServerTrailingMetadata().find(kErrorDetailKey);
    if (detail != nullptr && found != context.GetServerTrailingMetadata().end()) {
      detail->ParseFromString(std::string(found->second.data(), found->second.size()));
    }
    return status;
  }
  JobRecord Record() {
    JobRecord record;
    OnStrand([&] { record = controller_->Get({"default", "shared"})->record; });
    return record;
  }
  // All that is durable of the job: each change raises its version, each event is counted.
  std::string Trace() {
    const JobRecord job = Record();
    v1::ListEventsRequest request;
    request.set_name("shared");
    v1::ListEventsResponse events;
    grpc::ClientContext context;
    EXPECT_TRUE(stub_->ListEvents(&context, request, &events).ok());
    return absl::StrCat(std::string(StateName(job.state)),
                        "/",
                        job.reason,
                        " version ",
                        job.resource_version,
                        " epoch ",
                        job.epoch,
                        " tensor ",
                        job.spec.tensor,
                        " planned ",
                        Hex(Sha256(job.planned + job.canonical)),
                        " events ",
                        events.events_size());
  }
};

TEST_F(JobsRetryServiceTest, ATensorThatThePlannerRefusesChangesNothing) {
  CancelledJob();
  const std::string before = Trace();
  judge_.refused_tensor = 4;
  v1::ErrorDetail detail;
  const grpc::Status refused = Retry("four", 4, &detail);
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(refused.error_message(),
            "spec.parallelism.tensor: with 4: at size 4: model.config.hiddenSize: expected a "
            "multiple of 7, got 64");
  ASSERT_EQ(detail.violations_size(), 1);
  EXPECT_EQ(detail.violations(0).path(), "spec.model.config.hiddenSize");
  EXPECT_EQ(Trace(), before);
  // The id of a refusal is free: the same request is judged again.
  judge_.refused_tensor = 0;
  const grpc::Status accepted = Retry("four", 4);
  EXPECT_TRUE(accepted.ok()) << accepted.error_message();
  EXPECT_EQ(Record().state, JobState::kQueued);
  EXPECT_EQ(Record().spec.tensor, 4);
}

TEST_F(JobsRetryServiceTest, ATensorThatNoDeviceCanHoldChangesNothing) {
  ASSERT_GT(PeakBytes(1), PeakBytes(2));
  CancelledJob((PeakBytes(1) + PeakBytes(2)) / 2 * 100 / 94);
  EXPECT_EQ(Record().peak_bytes, std::vector<int64_t>{PeakBytes(2)});
  const std::string before = Trace();
  v1::ErrorDetail detail;
  const grpc::Status refused = Retry("one", 1, &detail);
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_TRUE(absl::StartsWith(refused.error_message(),
                               "spec.parallelism.tensor: with 1: spec.devices.count: on node-1: "
                               "does not fit: needs "))
      << refused.error_message();
  ASSERT_EQ(detail.violations_size(), 1);
  EXPECT_EQ(detail.violations(0).path(), "spec.parallelism.tensor");
  EXPECT_EQ(Trace(), before);
  const grpc::Status accepted = Retry("four", 4);
  EXPECT_TRUE(accepted.ok()) << accepted.error_message();
  EXPECT_EQ(Record().peak_bytes, std::vector<int64_t>{PeakBytes(4)}) << "of the job as it is now";
}

TEST_F(JobsRetryServiceTest, ARepeatedRequestGetsItsAnswerUnplanned) {
  CancelledJob();
  ASSERT_TRUE(Retry("one", 1).ok());
  EXPECT_EQ(judge_.checks, 1);
  const std::string before = Trace();
  judge_.refused_tensor = 1;
  const grpc::Status again = Retry("one", 1);
  EXPECT_TRUE(again.ok()) << again.error_message();
  EXPECT_EQ(Retry("one", 2).error_code(), grpc::StatusCode::ALREADY_EXISTS);
  EXPECT_EQ(judge_.checks, 1);
  EXPECT_EQ(Trace(), before);
}

TEST_F(JobsRetryServiceTest, OnlyAJobThatIsOverIsPlanned) {
  CancelledJob();
  ASSERT_TRUE(Retry("same", 0).ok());
  const grpc::Status queued = Retry("queued", 1);
  EXPECT_EQ(queued.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_TRUE(absl::StrContains(queued.error_message(), "only a job that has failed"))
      << queued.error_message();
  EXPECT_EQ(judge_.checks, 0);
}

TEST_F(JobsRetryServiceTest, ARetryWithTheSameTensorPlansNothing) {
  CancelledJob();
  const std::vector<int64_t> peak_bytes = Record().peak_bytes;
  const grpc::Status allowing = Retry("allowing", 0, nullptr, true);
  EXPECT_TRUE(allowing.ok()) << allowing.error_message();
  EXPECT_TRUE(Record().spec.checkpoint.allow_numerics_change);
  EXPECT_EQ(Record().peak_bytes, peak_bytes);
  EXPECT_EQ(judge_.checks, 0);
}

TEST_F(JobsRetryServiceTest, AJobThatChangesWhileItIsPlannedIsJudgedAgain) {
  CancelledJob();
  std::string changed;
  judge_.before_check = [&] {
    EXPECT_TRUE(Retry("allowing", 0, nullptr, true).ok());
    changed = Trace();
  };
  const grpc::Status overtaken = Retry("one", 1);
  EXPECT_EQ(overtaken.error_code(), grpc::StatusCode::UNAVAILABLE) << "clients ask again";
  EXPECT_EQ(Trace(), changed);
  EXPECT_TRUE(Record().spec.checkpoint.allow_numerics_change);
}

}  // namespace
}  // namespace ravel::coordinator
