// Rights of identities in a store, and fences.

#include "worker/store/store_rules.h"

#include <filesystem>
#include <fstream>
#include <memory>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

namespace ravel::store_server {
namespace {

using ::testing::HasSubstr;

constexpr char kJob[] = "team/job";
constexpr char kSave[] = "team/job/step-0000000020.e7.a1.3f2a9c01.tmp";
constexpr char kAside[] = "team/job/step-0000000020.e7.a1000001.3f2a9c01.tmp";
constexpr uint32_t kTag = 0x3f2a9c01;

class StoreRulesTest : public ::testing::Test {
 protected:
  StoreRulesTest()
      : folder_(std::filesystem::temp_directory_path() /
                ("ravel-fences-" + std::to_string(::getpid()))),
        book_(*FenceBook::Open(folder_)) {}
  ~StoreRulesTest() override { std::filesystem::remove_all(folder_); }
  bool May(CallerKind kind, Act act, const std::string& path) const {
    return CheckAct({kind, "caller"}, act, path, *book_).ok();
  }
  static std::string In(const std::string& folder, const std::string& name) {
    return folder + "/" + name;
  }

  const std::string folder_;
  std::unique_ptr<FenceBook> book_;
};

TEST_F(StoreRulesTest, CertificatesNameCallersOfTheirClusterOnly) {
  EXPECT_EQ(CallerOf("c1", "spiffe://c1.ravel/coordinator")->kind, CallerKind::kCoordinator);
  EXPECT_EQ(CallerOf("c1", "spiffe://c1.ravel/node/n1")->kind, CallerKind::kNode);
  EXPECT_EQ(CallerOf("c1", "spiffe://c1.ravel/user/ann")->text, "user/ann");
  for (const char* uri : {"",
                          "spiffe://c2.ravel/node/n1",
                          "spiffe://c1.ravel/node/",
                          "spiffe://c1.ravel/node/n1/more",
                          "spiffe://c1.ravel/trainer/n1",
                          "spiffe://c1.ravel/trainer/n1/",
                          "spiffe://c1.ravel/trainer//4f",
                          "spiffe://c1.ravel/trainer/n1/4f/9",
                          "spiffe://c1.ravel/store",
                          "spiffe://c1.ravel/coordinator/x",
                          "https://c1.ravel/node/n1"}) {
    EXPECT_TRUE(absl::IsUnauthenticated(CallerOf("c1", uri).status())) << uri;
  }
  EXPECT_EQ(*ClusterOf("spiffe://c1.ravel/store"), "c1");
  EXPECT_FALSE(ClusterOf("spiffe://.ravel/store").ok());
}

TEST_F(StoreRulesTest, NodesWriteUnfinishedSavesAlone) {
  const auto may = [&](Act act, const std::string& path) {
    return May(CallerKind::kNode, act, path);
  };
  EXPECT_TRUE(may(Act::kMakeFolder, kSave));
  EXPECT_TRUE(may(Act::kMakeFolder, In(kSave, "model")));
  EXPECT_TRUE(may(Act::kWrite, In(kSave, "model/shard")));
  EXPECT_TRUE(may(Act::kWrite, In(kSave, "seals/00001")));
  EXPECT_TRUE(may(Act::kWithdraw, In(kSave, "seals/00001")));
  EXPECT_TRUE(may(Act::kWithdraw, kAside));
  for (const std::string& path : {std::string(kSave),
                                  In(kSave, "COMMIT"),
                                  In(kSave, "manifest.pb"),
                                  In(kSave, "model/deep/shard"),
                                  In(kSave, "other/file"),
                                  In(kJob, "OWNER"),
                                  In(kJob, "step-0000000020/COMMIT"),
                                  In(kJob, "step-0000000020/model/shard"),
                                  In(kJob, "pins/step-0000000020")}) {
    EXPECT_FALSE(may(Act::kWrite, path)) << path;
  }
  EXPECT_FALSE(may(Act::kWithdraw, kSave));
  EXPECT_FALSE(may(Act::kWithdraw, kJob));
  EXPECT_FALSE(may(Act::kWithdraw, ""));
  EXPECT_FALSE(may(Act::kMakeFolder, "team/other"));
  EXPECT_FALSE(may(Act::kMakeFolders, In(kSave, "model")));
}

TEST_F(StoreRulesTest, NodesPublishNothingButSetAttemptsAside) {
  const Caller node{CallerKind::kNode, "node/n1"};
  EXPECT_TRUE(CheckPublish(node, kSave, kAside).ok());
  EXPECT_FALSE(CheckPublish(node, kSave, In(kJob, "step-0000000020")).ok());
  EXPECT_FALSE(CheckPublish(node, In(kJob, "step-0000000020"), kAside).ok());
  EXPECT_FALSE(CheckPublish(node, kAside, kSave).ok());
  EXPECT_FALSE(
      CheckPublish(node, kSave, "team/other/step-0000000020.e7.a1000001.3f2a9c01.tmp").ok());
  EXPECT_FALSE(CheckPublish({CallerKind::kUser, "user/ann"}, kSave, kAside).ok());
  EXPECT_TRUE(
      CheckPublish({CallerKind::kCoordinator, "c"}, kSave, In(kJob, "step-0000000020")).ok());
  EXPECT_FALSE(CheckPublish({CallerKind::kCoordinator, "c"}, "", "x").ok());
  EXPECT_FALSE(CheckFence(node).ok());
  EXPECT_TRUE(CheckFence({CallerKind::kCoordinator, "c"}).ok());
}

TEST_F(StoreRulesTest, ATokenIsGoodForTheSavesOfItsJobAndNode) {
  const JobToken token{.folder = JobFolderHash(kJob), .job_tag = kTag, .epoch = 7, .node = "n1"};
  Caller node{.kind = CallerKind::kNode, .text = "node/n1", .node = "n1", .needs_token = true};
  const auto refusal = [&](const std::string& path) {
    const absl::Status status = CheckAct(node, Act::kWrite, path, *book_);
    EXPECT_TRUE(status.ok() || absl::IsPermissionDenied(status)) << status;
    return std::string(status.message());
  };
  const std::string file = In(kSave, "model/shard");
  EXPECT_THAT(refusal(file), HasSubstr("no token of a job"));
  EXPECT_FALSE(CheckPublish(node, kSave, kAside).ok());
  EXPECT_FALSE(CheckAct(node, Act::kMakeFolder, kSave, *book_).ok());
  EXPECT_FALSE(CheckAct(node, Act::kWithdraw, file, *book_).ok());
  node.token = token;
  EXPECT_EQ(refusal(file), "");
  EXPECT_TRUE(CheckPublish(node, kSave, kAside).ok());
  EXPECT_TRUE(CheckAct(node, Act::kMakeFolder, kSave, *book_).ok());
  EXPECT_TRUE(CheckAct(node, Act::kWithdraw, file, *book_).ok());
  EXPECT_EQ(refusal("team/job/step-0000000010.e6.a1.3f2a9c01.tmp/model/shard"), "");
  EXPECT_THAT(refusal("team/job/step-0000000020.e8.a1.3f2a9c01.tmp/model/shard"),
              HasSubstr("of epoch 7"));
  for (const char* other : {"team/other/step-0000000020.e7.a1.3f2a9c01.tmp/model/shard",
                            "team/job/step-0000000020.e7.a1.3f2a9c02.tmp/model/shard",
                            "team/job/step-0000000020.e7.a1.tmp/model/shard"}) {
    EXPECT_THAT(refusal(other), HasSubstr("of another job")) << other;
  }
  EXPECT_THAT(refusal(In(kSave, "COMMIT")), HasSubstr("may not change")) << "a token adds nothing";
  node.node = "n2";
  EXPECT_THAT(refusal(file), HasSubstr("of node/n1"));
  node = {.kind = CallerKind::kCoordinator, .text = "coordinator", .needs_token = true};
  EXPECT_EQ(refusal(file), "") << "nodes alone show tokens";
}

TEST_F(StoreRulesTest, ATrainersCertificateIsGoodForSavesOfItsJobAlone) {
  const absl::StatusOr<Caller> found =
      CallerOf("c1", "spiffe://c1.ravel/trainer/n1/3f2a9c01-0000-4000-8000-000000000000");
  ASSERT_TRUE(found.ok()) << found.status();
  Caller trainer = *found;
  EXPECT_EQ(trainer.kind, CallerKind::kNode) << "at most what its node may";
  EXPECT_EQ(trainer.node, "n1");
  EXPECT_EQ(trainer.job_tag, kTag);
  const auto refusal = [&](const std::string& path) {
    const absl::Status status = CheckAct(trainer, Act::kWrite, path, *book_);
    EXPECT_TRUE(status.ok() || absl::IsPermissionDenied(status)) << status;
    return std::string(status.message());
  };
  const std::string file = In(kSave, "model/shard");
  const std::string other = "team/other/step-0000000020.e7.a1.3f2a9c02.tmp/model/shard";
  EXPECT_EQ(refusal(file), "");
  EXPECT_THAT(refusal(other), HasSubstr("its certificate is of another job"));
  EXPECT_THAT(refusal("team/job/step-0000000020.e7.a1.tmp/model/shard"),
              HasSubstr("its certificate is of another job"));
  EXPECT_THAT(refusal(In(kSave, "COMMIT")), HasSubstr("may not change"));
  EXPECT_THAT(refusal(In(kJob, "OWNER")), HasSubstr("may not change"));
  EXPECT_TRUE(CheckPublish(trainer, kSave, kAside).ok());
  EXPECT_FALSE(CheckPublish(trainer, kSave, In(kJob, "step-0000000020")).ok());
  EXPECT_FALSE(CheckFence(trainer).ok());
  // With tokens it needs one that is of the same job and of its own node.
  trainer.needs_token = true;
  EXPECT_THAT(refusal(file), HasSubstr("no token of a job"));
  trainer.token =
      JobToken{.folder = JobFolderHash(kJob), .job_tag = kTag, .epoch = 7, .node = "n2"};
  EXPECT_THAT(refusal(file), HasSubstr("of node/n2"));
  trainer.token->node = "n1";
  EXPECT_EQ(refusal(file), "");
  trainer.token->folder = JobFolderHash("team/other");
  trainer.token->job_tag = 0x3f2a9c02;
  EXPECT_THAT(refusal(other), HasSubstr("its certificate is of another job"));
}

TEST_F(StoreRulesTest, UsersPinAndOperatorsMayAll) {
  EXPECT_TRUE(May(CallerKind::kUser, Act::kMakeFolder, In(kJob, "pins")));
  EXPECT_TRUE(May(CallerKind::kUser, Act::kWrite, In(kJob, "pins/step-0000000020")));
  EXPECT_FALSE(May(CallerKind::kUser, Act::kWrite, In(kJob, "OWNER")));
  EXPECT_FALSE(May(CallerKind::kUser, Act::kWithdraw, In(kJob, "step-0000000020")));
  EXPECT_FALSE(May(CallerKind::kUser, Act::kWrite, In(kSave, "pins/x")));
  EXPECT_TRUE(May(CallerKind::kOperator, Act::kWithdraw, In(kJob, "step-0000000020")));
  EXPECT_TRUE(May(CallerKind::kCoordinator, Act::kWrite, In(kSave, "COMMIT")));
}

TEST_F(StoreRulesTest, SavesOfEarlierEpochsAreFencedOff) {
  const std::string file = In(kSave, "model/shard");
  ASSERT_TRUE(book_->Raise(kJob, kTag, 7).ok());
  EXPECT_TRUE(May(CallerKind::kNode, Act::kWrite, file));
  ASSERT_TRUE(book_->Raise(kJob, kTag, 8).ok());
  ASSERT_TRUE(book_->Raise(kJob, kTag, 3).ok());
  const absl::Status late = CheckAct({CallerKind::kNode, "n"}, Act::kWrite, file, *book_);
  EXPECT_TRUE(absl::IsFailedPrecondition(late)) << late;
  EXPECT_FALSE(May(CallerKind::kAnyone, Act::kWrite, file)) << "in plaintext, too";
  EXPECT_FALSE(May(CallerKind::kAnyone, Act::kMakeFolder, kSave));
  EXPECT_TRUE(May(CallerKind::kAnyone, Act::kWrite, In(kSave, "COMMIT")))
      << "only the coordinator writes it";
  EXPECT_TRUE(May(CallerKind::kNode, Act::kWithdraw, file)) << "it may still clear away";
  EXPECT_TRUE(May(
      CallerKind::kNode, Act::kWrite, "team/job/step-0000000020.e1.a1.00000001.tmp/model/shard"))
      << "another job's epochs count for themselves";
}

TEST_F(StoreRulesTest, FencesOutliveTheServerAndDamageIsTold) {
  ASSERT_TRUE(book_->Raise(kJob, kTag, 8).ok());
  EXPECT_EQ((*FenceBook::Open(folder_))->MinEpoch(kJob, kTag), 8);
  EXPECT_EQ((*FenceBook::Open(folder_))->MinEpoch("team/other", kTag), 0);
  std::ofstream(folder_ + "/x.json") << "{\"folder\": 1}";
  EXPECT_TRUE(absl::IsDataLoss(FenceBook::Open(folder_).status()));
}

}  // namespace
}  // namespace ravel::store_server
