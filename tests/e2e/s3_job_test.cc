// A whole job over s3://, on servers that are not ours and fail on purpose: saves, a daemon that is
// killed, the resume from the store, an export; the history is that of a run over a folder. Jobs
// with keys of their own, on a server that checks them.

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_replace.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/testing/eventually.h"
#include "tests/testing/mini_cluster.h"
#include "tests/testing/required.h"
#include "tests/testing/s3_server.h"

namespace ravel::testing {
namespace {

using std::chrono::seconds;
using ::testing::HasSubstr;

constexpr int64_t kLastStep = 15;

// On moto or Swift.
class S3JobTest : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    absl::StatusOr<std::unique_ptr<S3Server>> server = S3Server::Start(GetParam());
    if (absl::IsNotFound(server.status())) {
      SkipWithout(GetParam(), server.status().message());
      return;
    }
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    server_->UseHere();
    absl::StatusOr<std::unique_ptr<MiniCluster>> started = MiniCluster::Start();
    ASSERT_TRUE(started.ok()) << started.status();
    cluster_ = std::move(*started);
    ASSERT_EQ(cluster_->StartWorkers(2, cluster_->HoldFaults()), absl::OkStatus());
    WriteTokens(cluster_->folder() + "/tokens.bin", 20000, TinyJob().vocabulary);
  }
  TinyJob Job(const std::string& name, const std::string& store) const {
    return {.name = name,
            .tokens_path = cluster_->folder() + "/tokens.bin",
            .store = store,
            .workers = 2,
            .steps = kLastStep,
            .save_every_steps = 5};
  }

  // The last step of a job goes to S3 and back, and what is read there is what is read here.
  void ExpectTheSameFromS3(const std::string& job) {
    const std::string here = cluster_->Checkpoints(job)->at(kLastStep);
    const std::string there = absl::StrCat("s3://bucket/copies/", job, "/step");
    const std::string back = cluster_->folder() + "/back/step";
    std::filesystem::create_directory(cluster_->folder() + "/back");
    for (const auto& [from, to] : {std::pair(here, there), std::pair(there, back)}) {
      const RunResult copied = cluster_->Ctl({"checkpoints", "copy", from, to});
      ASSERT_EQ(copied.exit_code, 0) << copied.err;
    }
    EXPECT_EQ(*cluster_->StateDigest(there), *cluster_->StateDigest(here));
    EXPECT_EQ(*cluster_->StateDigest(back), *cluster_->StateDigest(here));
    EXPECT_THAT(cluster_->Ctl({"checkpoints", "verify", there}).out, HasSubstr(": ok (deep)"));
    std::vector<std::string> texts;
    for (const std::string& from : {here, there}) {
      const RunResult made = cluster_->Ctl(
          {"generate", "--checkpoint", from, "--prompt", "line", "--max-new-tokens", "8"});
      ASSERT_EQ(made.exit_code, 0) << from << ": " << made.err;
      texts.push_back(made.out);
    }
    EXPECT_FALSE(texts[0].empty());
    EXPECT_EQ(texts[0], texts[1]);
  }

  std::unique_ptr<S3Server> server_;
  std::unique_ptr<MiniCluster> cluster_;
};

TEST_P(S3JobTest, AJobSavesResumesAndIsExported) {
  ASSERT_EQ(cluster_->Submit(Job("plain", cluster_->folder() + "/plain")), absl::OkStatus());
  ASSERT_EQ(cluster_->WaitForSuccess("plain", seconds(60)), absl::OkStatus());

  cluster_->HoldTrainersAt(8);
  ASSERT_EQ(cluster_->Submit(Job("far", "s3://bucket/team")), absl::OkStatus());
  ASSERT_EQ(cluster_->WaitForStep("far", 7, seconds(60)), absl::OkStatus());
  ASSERT_TRUE(Eventually(seconds(60), [&] { return cluster_->Get("far")->committed_step >= 5; }))
      << cluster_->Report("far");
  cluster_->KillWorker("w1");
  cluster_->LetTrainersGo();
  ASSERT_EQ(cluster_->StartWorker("w1"), absl::OkStatus());
  ASSERT_EQ(cluster_->WaitForSuccess("far", seconds(90)), absl::OkStatus());

  const auto view = cluster_->Get("far");
  EXPECT_GE(view->epoch, 2) << "it never resumed";
  const auto plain = cluster_->Metrics("plain");
  const auto far = cluster_->Metrics("far");
  ASSERT_TRUE(plain.ok() && far.ok());
  EXPECT_EQ(FirstDifference(*plain, *far), "");
  const auto steps = cluster_->Checkpoints("far");
  ASSERT_TRUE(steps.ok() && steps->contains(kLastStep)) << cluster_->Report("far");
  for (const auto& [step, url] : *steps) {
    EXPECT_TRUE(absl::StartsWith(url, "s3://bucket/team/far/step-")) << url;
    EXPECT_THAT(cluster_->Ctl({"checkpoints", "verify", url}).out, HasSubstr(": ok (deep)"));
  }
  EXPECT_EQ(*cluster_->StateDigest(steps->at(kLastStep)),
            *cluster_->StateDigest(cluster_->Checkpoints("plain")->at(kLastStep)));
  const std::string exported = cluster_->folder() + "/exported";
  const RunResult run =
      cluster_->Ctl({"checkpoints", "export", steps->at(kLastStep), "--output-dir", exported});
  EXPECT_EQ(run.exit_code, 0) << run.err;
  EXPECT_TRUE(std::filesystem::exists(exported + "/model.safetensors"));
}

// Nodes fetch data and model from the store, whose server fails now and then.
TEST_P(S3JobTest, DataAndModelComeFromTheStore) {
  const std::string web = cluster_->folder() + "/web";
  std::string text;
  for (int line = 0; line < 600; ++line) {
    absl::StrAppend(&text, "line ", line * line, " of a text to learn\n");
  }
  WriteText(cluster_->folder() + "/text", text);
  const RunResult prepared =
      cluster_->Ctl({"data", "prepare", "--input", cluster_->folder() + "/text", "--output", web});
  ASSERT_EQ(prepared.exit_code, 0) << prepared.err;
  const auto train =
      [&](const std::string& name, const std::string& data, const std::string& model) {
        TinyJob job = Job(name, cluster_->folder() + "/" + name);
        job.tokens_path = data;
        job.vocabulary = 257;
        job.model_from = model;
        const std::string file = cluster_->folder() + "/" + name + ".yaml";
        WriteText(file, absl::StrReplaceAll(ToYaml(job), {{"    format: flat_u16\n", ""}}));
        const RunResult submitted = cluster_->Ctl({"submit", "-f", file});
        EXPECT_EQ(submitted.exit_code, 0) << submitted.err;
        EXPECT_EQ(cluster_->WaitForSuccess(name, seconds(90)), absl::OkStatus());
        return cluster_->Metrics(name).value_or(std::vector<StepRow>());
      };
  const std::vector<StepRow> near = train("near", web, "");
  ASSERT_EQ(near.size(), static_cast<size_t>(kLastStep));
  ExpectTheSameFromS3("near");
  const RunResult pushed = cluster_->Ctl({"data", "push", web, "s3://bucket/sets/web"});
  ASSERT_EQ(pushed.exit_code, 0) << pushed.err;
  for (const char* end : {".bin", ".idx", ".tokenizer.json"}) {
    std::filesystem::remove(web + end);
  }
  EXPECT_EQ(FirstDifference(train("far", "s3://bucket/sets/web/web", ""), near), "");

  const std::string model = cluster_->folder() + "/model";
  const RunResult exported = cluster_->Ctl({"checkpoints",
                                            "export",
                                            cluster_->Checkpoints("near")->at(kLastStep),
                                            "--output-dir",
                                            model});
  ASSERT_EQ(exported.exit_code, 0) << exported.err;
  const std::vector<StepRow> next = train("next", "s3://bucket/sets/web/web", model);
  const RunResult model_pushed =
      cluster_->Ctl({"data", "push", "--model", model, "s3://bucket/models/tiny"});
  ASSERT_EQ(model_pushed.exit_code, 0) << model_pushed.err;
  std::filesystem::remove_all(model);
  EXPECT_EQ(
      FirstDifference(train("last", "s3://bucket/sets/web/web", "s3://bucket/models/tiny"), next),
      "");
}

INSTANTIATE_TEST_SUITE_P(Servers,
                         S3JobTest,
                         ::testing::Values("moto", "swift"),
                         [](const auto& kind) { return std::string(kind.param); });

constexpr char kSecret[] = "hush-hush";
constexpr char kWrongSecret[] = "not-so-hush";

// Swift checks keys. The workers' own are wrong.
class S3KeysTest : public ::testing::Test {
 protected:
  void SetUp() override {
    absl::StatusOr<std::unique_ptr<S3Server>> server = S3Server::Start("swift");
    if (absl::IsNotFound(server.status())) {
      SkipWithout("swift", server.status().message());
      return;
    }
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    server_->UseHere();
    absl::StatusOr<std::unique_ptr<MiniCluster>> started = MiniCluster::Start();
    ASSERT_TRUE(started.ok()) << started.status();
    cluster_ = std::move(*started);
    WriteTokens(scratch_.path() + "/tokens.bin", 20000, TinyJob().vocabulary);
    std::filesystem::permissions(secrets_.path(), std::filesystem::perms::owner_all);
    Put("default/team/access", "test:tester");
    Put("default/team/secret", kSecret);
    Put("default/team/wrong", kWrongSecret);
    WriteText(wrong_file_,
              absl::StrCat("[default]\naws_access_key_id = test:tester\naws_secret_access_key = ",
                           kWrongSecret,
                           "\n"));
    cluster_->SetWorkerFlags({"--read-root", scratch_.path(), "--secrets-root", secrets_.path()});
    std::map<std::string, std::string> environment = cluster_->HoldFaults();
    environment["RAVEL_S3_CREDENTIALS"] = wrong_file_;
    ASSERT_EQ(cluster_->StartWorkers(1, environment), absl::OkStatus());
  }
  void Put(const std::string& name, const std::string& text) const {
    const std::string path = secrets_.path() + "/" + name;
    std::filesystem::create_directories(std::filesystem::path(path).parent_path());
    WriteText(path, text);
    std::filesystem::permissions(
        path, std::filesystem::perms::owner_read | std::filesystem::perms::owner_write);
  }
  // `secret`: of the job's own keys; empty: it has none.
  TinyJob Job(const std::string& name, const std::string& secret) const {
    TinyJob job = {.name = name,
                   .tokens_path = scratch_.path() + "/tokens.bin",
                   .store = "s3://bucket/team",
                   .workers = 1,
                   .steps = 6,
                   .save_every_steps = 3};
    if (!secret.empty()) {
      job.more_spec = absl::StrCat(
          "  environment: [{name: RAVEL_S3_ACCESS_KEY_ID, secret: team/access}, "
          "{name: RAVEL_S3_SECRET_ACCESS_KEY, secret: team/",
          secret,
          "}]\n");
    }
    return job;
  }
  // All that is told and kept of a job.
  std::string Told(const std::string& job) const {
    std::string all;
    for (const char* verb : {"describe", "events", "logs"}) {
      const RunResult said = cluster_->Ctl({verb, job});
      absl::StrAppend(&all, said.out, said.err);
    }
    return all;
  }

  const ScratchFolder scratch_;
  const ScratchFolder secrets_;
  const std::string wrong_file_ = scratch_.path() + "/credentials";
  std::unique_ptr<S3Server> server_;
  std::unique_ptr<MiniCluster> cluster_;
};

TEST_F(S3KeysTest, AJobSavesByKeysOfItsOwn) {
  ASSERT_EQ(cluster_->Submit(Job("own", "secret")), absl::OkStatus());
  ASSERT_EQ(cluster_->WaitForSuccess("own", seconds(60)), absl::OkStatus())
      << cluster_->Report("own");
  const auto steps = cluster_->Checkpoints("own");
  ASSERT_TRUE(steps.ok() && steps->contains(6)) << cluster_->Report("own");
  EXPECT_THAT(cluster_->Ctl({"checkpoints", "verify", steps->at(6)}).out, HasSubstr(": ok (deep)"));
  EXPECT_FALSE(absl::StrContains(Told("own"), kSecret));
}

TEST_F(S3KeysTest, AJobWhoseOwnKeysAreWrongEndsWithTheSettingToCorrect) {
  ASSERT_EQ(cluster_->Submit(Job("wrong", "wrong")), absl::OkStatus());
  const absl::StatusOr<JobView> end = cluster_->WaitForEnd("wrong", seconds(60));
  ASSERT_TRUE(end.ok()) << end.status() << cluster_->Report("wrong");
  EXPECT_EQ(end->state, "FAILED");
  EXPECT_EQ(end->reason, "StoreRefused");
  EXPECT_THAT(end->message, HasSubstr("s3://bucket/"));
  EXPECT_THAT(end->message,
              HasSubstr("HTTP 403 SignatureDoesNotMatch: the secret key is not that of the access "
                        "key: correct RAVEL_S3_SECRET_ACCESS_KEY of the job's environment"));
  const std::string told = Told("wrong");
  EXPECT_THAT(told, HasSubstr("correct RAVEL_S3_SECRET_ACCESS_KEY"));
  EXPECT_FALSE(absl::StrContains(told, kWrongSecret));
}

// The node's fault is waited for, and told.
TEST_F(S3KeysTest, AJobWaitsWhereTheNodesKeysAreWrong) {
  ASSERT_EQ(cluster_->Submit(Job("none", "")), absl::OkStatus());
  const std::string advice =
      absl::StrCat("correct aws_secret_access_key in ", wrong_file_, " (RAVEL_S3_CREDENTIALS)");
  EXPECT_TRUE(Eventually(seconds(60), [&] { return absl::StrContains(Told("none"), advice); }))
      << cluster_->Report("none");
  EXPECT_THAT(cluster_->Ctl({"describe", "none"}).out, HasSubstr(advice));
  EXPECT_EQ(cluster_->Ctl({"cancel", "none", "--wait"}).exit_code, 0);
}

TEST_F(S3KeysTest, RavelctlAndASubmissionNameTheSetting) {
  TinyJob nowhere = Job("nowhere", "");
  nowhere.store = "s3://no-such-bucket/team";
  const std::string file = cluster_->folder() + "/nowhere.yaml";
  WriteText(file, ToYaml(nowhere));
  const RunResult submitted = cluster_->Ctl({"submit", "-f", file});
  EXPECT_NE(submitted.exit_code, 0);
  EXPECT_THAT(submitted.err, HasSubstr("there is no such bucket at http://127.0.0.1:"));
  EXPECT_THAT(submitted.err, HasSubstr("RAVEL_S3_ENDPOINT"));
  const RunResult missing = cluster_->Ctl({"checkpoints", "list", "s3://no-such-bucket/team"});
  EXPECT_NE(missing.exit_code, 0);
  EXPECT_THAT(missing.err, HasSubstr("there is no such bucket"));
  setenv("RAVEL_S3_REGION", "eu-west-1", 1);
  const RunResult region = cluster_->Ctl({"checkpoints", "list", "s3://bucket/team"});
  unsetenv("RAVEL_S3_REGION");
  EXPECT_NE(region.exit_code, 0);
  EXPECT_THAT(region.err, HasSubstr("set RAVEL_S3_REGION to us-east-1"));
  setenv("RAVEL_S3_CREDENTIALS", wrong_file_.c_str(), 1);
  const RunResult keys = cluster_->Ctl({"checkpoints", "list", "s3://bucket/team"});
  server_->UseHere();
  EXPECT_NE(keys.exit_code, 0);
  EXPECT_THAT(keys.err, HasSubstr(absl::StrCat("correct aws_secret_access_key in ", wrong_file_)));
  std::printf(
      "%s%s%s%s", submitted.err.c_str(), missing.err.c_str(), region.err.c_str(), keys.err.c_str());
}

}  // namespace
}  // namespace ravel::testing
