// A job that names a path outside of its namespace's roots is refused by the field, before a node
// is asked and before anything is stored.

#include "coordinator/api/job_roots_proto.h"

#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <gtest/gtest.h>

#include "tests/coordinator/api/testing_jobs_service.h"
#include "tests/testing/process.h"

namespace ravel::coordinator {
namespace {

plan::JobSpec SpecBeneathRoots() {
  plan::JobSpec spec;
  spec.namespace_name = "team-a";
  spec.model_from = "/a/model";
  spec.data.train = {{.path = "/a/tokens"}};
  spec.data.validation = {{.path = "/a/validation"}};
  spec.data.tokenizer = "/a/tokenizer.json";
  spec.optimizer.offload.path = "/w/offload";
  spec.checkpoint.store = "file:///w/store";
  spec.checkpoint.resume_from = "/w/other/step-1";
  spec.trace_directory = "/w/trace";
  return spec;
}

NamespaceRoots RootsOfTeams() {
  return *NamespaceRoots::Parse(
      "namespaces: {team-a: {read: [/a], write: [/w]}, team-b: {read: [/b], write: [/v]}}");
}

TEST(JobRootsTest, EachFieldThatNamesAPathIsHeldAgainstTheRoots) {
  const NamespaceRoots roots = RootsOfTeams();
  EXPECT_TRUE(RootViolations(roots, SpecBeneathRoots()).empty());
  struct Case {
    const char* field;
    std::function<void(plan::JobSpec&)> change;
  };
  const std::vector<Case> cases = {
      {"spec.model.from", [](auto& spec) { spec.model_from = "/b/model"; }},
      {"spec.data.train[0].path", [](auto& spec) { spec.data.train[0].path = "/etc/passwd"; }},
      {"spec.data.validation[0].path", [](auto& spec) { spec.data.validation[0].path = "/b"; }},
      {"spec.data.tokenizer", [](auto& spec) { spec.data.tokenizer = "/root/.ssh/id"; }},
      {"spec.training.optimizer.offload.path",
       [](auto& spec) { spec.optimizer.offload.path = "/a"; }},
      {"spec.checkpoint.store", [](auto& spec) { spec.checkpoint.store = "file:///v/store"; }},
      {"spec.checkpoint.store", [](auto& spec) { spec.checkpoint.store = "ravel://s:1/team-a"; }},
      {"spec.checkpoint.resumeFrom", [](auto& spec) { spec.checkpoint.resume_from = "/v/step"; }},
      {"spec.checkpoint.resumeFrom",
       [](auto& spec) { spec.checkpoint.resume_from = "s3://b/step"; }},
      {"spec.observability.trace.directory", [](auto& spec) { spec.trace_directory = "/v"; }}};
  for (const Case& one : cases) {
    plan::JobSpec spec = SpecBeneathRoots();
    one.change(spec);
    const std::vector<JobViolation> violations = RootViolations(roots, spec);
    ASSERT_EQ(violations.size(), 1u) << one.field;
    EXPECT_EQ(violations[0].path, one.field);
  }
  plan::JobSpec other = SpecBeneathRoots();
  other.namespace_name = "team-b";
  EXPECT_EQ(RootViolations(roots, other).size(), 8u) << "all of them are team-a's";
}

// A prefix that is the root itself names files beside it; a URL names the whole set that it is in.
TEST(JobRootsTest, TheRootItselfIsNoNameOfData) {
  const NamespaceRoots roots = *NamespaceRoots::Parse(
      "namespaces: {team-a: {read: [/a, 'ravel://s:1/sets/web'], write: [/w]}}");
  const auto refused = [&roots](const std::string& train) {
    plan::JobSpec spec = SpecBeneathRoots();
    spec.data.train[0].path = train;
    const std::vector<JobViolation> violations = RootViolations(roots, spec);
    EXPECT_LE(violations.size(), 1u);
    return !violations.empty();
  };
  EXPECT_TRUE(refused("/a"));
  EXPECT_FALSE(refused("/a/tokens"));
  EXPECT_TRUE(refused("ravel://s:1/sets/web"));
  EXPECT_FALSE(refused("ravel://s:1/sets/web/web"));
  EXPECT_TRUE(refused("ravel://s:1/sets/other/web"));
  plan::JobSpec spec = SpecBeneathRoots();
  spec.data.tokenizer = "ravel://s:1/sets/web";
  EXPECT_EQ(RootViolations(roots, spec).size(), 1u);
  spec.data.tokenizer = "ravel://s:1/sets/web/web.tokenizer.json";
  EXPECT_TRUE(RootViolations(roots, spec).empty());
}

TEST(JobRootsTest, StartsWithinTheJobsOwnStoreNameNoPath) {
  for (const char* start : {"auto", "none", "20"}) {
    plan::JobSpec spec = SpecBeneathRoots();
    spec.checkpoint.resume_from = start;
    EXPECT_TRUE(RootViolations(RootsOfTeams(), spec).empty()) << start;
  }
}

TEST(JobRootsTest, AStoreBehindALinkToAnotherTeamIsRefused) {
  testing::ScratchFolder scratch;
  std::filesystem::create_directories(scratch.path() + "/team-a");
  std::filesystem::create_directories(scratch.path() + "/team-b");
  std::filesystem::create_symlink("../team-b", scratch.path() + "/team-a/link");
  const NamespaceRoots roots = *NamespaceRoots::Parse(
      absl::StrCat("namespaces: {team-a: {write: [", scratch.path(), "/team-a]}}"));
  plan::JobSpec spec;
  spec.namespace_name = "team-a";
  spec.checkpoint.store = absl::StrCat("file://", scratch.path(), "/team-a/new/store");
  EXPECT_EQ(CheckStoreBeneath(roots, spec), absl::OkStatus());
  spec.checkpoint.store = absl::StrCat("file://", scratch.path(), "/team-a/link/store");
  EXPECT_TRUE(RootViolations(roots, spec).empty()) << "by its text it is team-a's";
  const absl::Status refused = CheckStoreBeneath(roots, spec);
  EXPECT_TRUE(absl::IsInvalidArgument(refused)) << refused;
  EXPECT_TRUE(absl::StartsWith(refused.message(), "spec.checkpoint.store: ")) << refused;
}

// Constructed before the service that has it.
struct WithRootsFile {
  WithRootsFile() { Write("/nowhere"); }
  // Jobs of all namespaces may read beneath `folder` and write anywhere.
  void Write(const std::string& folder) {
    testing::WriteText(scratch.path() + "/roots.yaml",
                       absl::StrCat("namespaces: {'*': {read: [", folder, "], write: [/tmp]}}"));
    if (file == nullptr) {
      file = *NamespaceRootsFile::Open(scratch.path() + "/roots.yaml");
    }
    file->Refresh();
  }
  testing::ScratchFolder scratch;
  std::unique_ptr<NamespaceRootsFile> file;
};

class JobRootsServiceTest : public WithRootsFile, public JobsServiceTest {
 protected:
  JobRootsServiceTest() : JobsServiceTest(nullptr, file.get()) {}
  bool IsStored(const std::string& name) {
    bool stored = false;
    OnStrand([&] { stored = controller_->Get({"default", name}).ok(); });
    return stored;
  }
};

TEST_F(JobRootsServiceTest, AJobOutsideIsRefusedBeforeANodeIsAskedAndNothingIsStored) {
  AddNode(1, TokensOf(26'000));
  v1::TrainingJob job = Job("outside");
  job.mutable_spec()->mutable_data()->mutable_train(0)->set_path("/nowhere/a/../../etc/passwd");
  v1::ErrorDetail detail;
  const grpc::Status refused = Submit(job, &detail);
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << refused.error_message();
  ASSERT_EQ(detail.violations_size(), 1);
  EXPECT_EQ(detail.violations(0).path(), "spec.data.train[0].path");
  EXPECT_EQ(detail.violations(0).got(), "/etc/passwd");
  EXPECT_EQ(DryRun(job).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(Asked(1), 0);
  EXPECT_FALSE(IsStored("outside"));
  EXPECT_TRUE(Submit(Job("inside")).ok());
  EXPECT_EQ(Asked(1), 1);
}

TEST_F(JobRootsServiceTest, ARetryIsHeldAgainstTheRootsOfItsDay) {
  AddNode(1, TokensOf(26'000));
  ASSERT_TRUE(Submit(Job("again")).ok());
  {
    v1::CancelJobRequest request;
    request.set_request_id("cancel");
    request.set_name("again");
    v1::Job response;
    grpc::ClientContext context;
    ASSERT_TRUE(stub_->CancelJob(&context, request, &response).ok());
  }
  const auto retry = [this](const std::string& request_id) {
    v1::RetryJobRequest request;
    request.set_request_id(request_id);
    request.set_name("again");
    v1::Job response;
    grpc::ClientContext context;
    return stub_->RetryJob(&context, request, &response);
  };
  Write("/elsewhere");
  const grpc::Status refused = retry("retry-1");
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_TRUE(absl::StrContains(refused.error_message(), "spec.data.train[0].path"))
      << refused.error_message();
  Write("/nowhere");
  EXPECT_TRUE(retry("retry-2").ok());
}

}  // namespace
}  // namespace ravel::coordinator
