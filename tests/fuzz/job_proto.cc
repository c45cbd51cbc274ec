// Job files, jobs and plans: text of users, rows of the state database, messages to trainers.

#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gtest/gtest.h>

#include "common/plan/plan_proto.h"
#include "coordinator/api/job_file_proto.h"
#include "proto/plan.pb.h"
#include "tests/testing/fuzz.h"
#include "tests/testing/fuzz_proto.h"
#include "tests/testing/process.h"
#include "tests/testing/tiny_job.h"

namespace ravel::testing {
namespace {

std::vector<std::string> JobFiles() {
  std::vector<std::string> files = {ToYaml({.tokens_path = "/data/tokens", .store = "/store"}),
                                    ToYaml({.tokens_path = "/data/tokens",
                                            .store = "ravel://host:1/team",
                                            .workers = 4,
                                            .sizes = {2, 4},
                                            .parallelism = "strategy: hsdp, replicas: 2",
                                            .resume_from = "/store/step-0000000020",
                                            .optimizer = "stateDtype: bf16",
                                            .detection = "2s"})};
  for (const char* name : {"quickstart", "llama3-8b", "qwen3-0.6b"}) {
    files.push_back(ReadText(absl::StrCat(RAVEL_EXAMPLES, "/", name, ".yaml")));
  }
  for (size_t i = 0; i < 2; ++i) {
    files.push_back(CanonicalJson(Canonicalize(ParseJobFile(files[i]).job, {}).job));
  }
  return files;
}

plan::JobSpec TinySpec() {
  const TinyJob job = {.tokens_path = "/data/tokens", .store = "/store", .layers = 1};
  return *plan::ResolveBatch(Canonicalize(ParseJobFile(ToYaml(job)).job, {}).spec);
}

// A job that is accepted can be written down and read back, by users and by trainers.
FuzzAnswer CheckJob(const v1::TrainingJob& job) {
  const CanonicalJob canonical = Canonicalize(job, {});
  if (!canonical.ok()) {
    for (const JobViolation& violation : canonical.violations) {
      (void)FormatViolation(violation, "job.yaml");
    }
    return Refused();
  }
  const std::string text = CanonicalJson(canonical.job);
  const ParsedJobFile again = ParseJobFile(text);
  const CanonicalJob same = Canonicalize(again.job, {});
  if (!again.violations.empty() || !same.ok() || CanonicalJson(same.job) != text) {
    std::string fault =
        absl::StrCat("does not come back: ", text, "\n", CanonicalJson(same.job), "\n");
    for (const auto& violations : {again.violations, same.violations}) {
      for (const JobViolation& violation : violations) {
        absl::StrAppend(&fault, FormatViolation(violation, "again"), "\n");
      }
    }
    return AcceptedIf(false, fault);
  }
  const std::string bytes = plan::SerializeJob(canonical.spec);
  const absl::StatusOr<plan::JobSpec> spec = plan::ParseJob(bytes);
  return AcceptedIf(spec.ok() && plan::SerializeJob(*spec) == bytes,
                    absl::StrCat("its spec does not come back: ", spec.status().ToString()));
}

TEST(FuzzJob, JobFiles) {
  Fuzz({.name = "job_file", .form = FuzzForm::kText, .seeds = JobFiles()},
       [](std::string_view input) {
         ParsedJobFile file = ParseJobFile(input);
         LocateViolations(file.positions, file.violations);
         if (!file.violations.empty()) {
           (void)Canonicalize(file.job, {});
           return Refused();
         }
         return CheckJob(file.job);
       });
}

TEST(FuzzJob, SubmittedJobs) {
  std::vector<std::string> seeds;
  for (const std::string& text : JobFiles()) {
    seeds.push_back(ParseJobFile(text).job.SerializeAsString());
  }
  const v1::TrainingJob prototype;
  Fuzz({.name = "submitted_job",
        .seeds = seeds,
        .mutate = MessageMutation(prototype, seeds, {"auto", "0", "hsdp", "bf16", "1h", "*"})},
       [](std::string_view input) {
         v1::TrainingJob job;
         return job.ParseFromArray(input.data(), static_cast<int>(input.size())) ? CheckJob(job)
                                                                                 : Refused();
       });
}

TEST(FuzzJob, PlannedJobs) {
  const std::vector<std::string> seeds = {plan::SerializeJob(TinySpec())};
  const v1::PlannedJob prototype;
  Fuzz({.name = "planned_job",
        .seeds = seeds,
        .mutate = MessageMutation(prototype, seeds, {"bf16", "*", "/data/tokens"})},
       [](std::string_view input) {
         const absl::StatusOr<plan::JobSpec> spec = plan::ParseJob(input);
         if (!spec.ok()) {
           return Refused();
         }
         const std::string bytes = plan::SerializeJob(*spec);
         const absl::StatusOr<plan::JobSpec> again = plan::ParseJob(bytes);
         return AcceptedIf(again.ok() && plan::SerializeJob(*again) == bytes);
       });
}

TEST(FuzzJob, Plans) {
  std::vector<std::string> seeds;
  for (const int64_t ranks : {1, 2}) {
    const auto plan = plan::BuildShardingPlan({.spec = TinySpec(), .ranks = ranks});
    ASSERT_TRUE(plan.ok()) << plan.status();
    seeds.push_back(plan::SerializePlan(*plan));
  }
  const v1::ShardingPlan prototype;
  Fuzz({.name = "sharding_plan",
        .seeds = seeds,
        .mutate = MessageMutation(prototype, seeds, {}),
        .heap_bytes = int64_t{256} << 20,
        .cpu_time = std::chrono::milliseconds(3000)},
       [](std::string_view input) {
         const absl::StatusOr<plan::ShardingPlan> plan = plan::ParsePlan(input);
         if (!plan.ok()) {
           return Refused();
         }
         const std::string bytes = plan::SerializePlan(*plan);
         const absl::StatusOr<plan::ShardingPlan> again = plan::ParsePlan(bytes);
         return AcceptedIf(again.ok() && plan::SerializePlan(*again) == bytes);
       });
}

}  // namespace
}  // namespace ravel::testing
