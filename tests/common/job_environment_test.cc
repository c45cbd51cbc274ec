#include "common/job_environment.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace ravel {
namespace {

using ::testing::ElementsAre;

TEST(JobEnvironmentTest, NamesThatReachBeyondATrainerAreNeverAllowed) {
  for (const char* name : {"LD_PRELOAD",
                           "LD_LIBRARY_PATH",
                           "PATH",
                           "HOME",
                           "RAVEL_JOB_READ_ROOTS",
                           "RAVEL_FAULTS",
                           "RAVEL_S3_CREDENTIALS",
                           "RAVEL_S3_ENDPOINT",
                           "NCCL_NET_PLUGIN",
                           "NCCL_DEBUG_FILE",
                           "NCCL_COMM_ID",
                           "NCCL_RAS_ADDR",
                           "NCCL_SOCKET_IFNAME",
                           "CUDA_VISIBLE_DEVICES",
                           "CUDA_INJECTION64_PATH",
                           "CUDA_CACHE_PATH",
                           "CUDA_COREDUMP_FILE",
                           "OMP_TOOL_LIBRARIES",
                           "OMP_NUM_THREADS",
                           "UCX_MODULE_DIR",
                           "GLIBC_TUNABLES",
                           "1A",
                           "A=B",
                           "A\n",
                           ""}) {
    EXPECT_NE(ExpectedName(name), "") << name;
  }
  EXPECT_NE(ExpectedName(std::string(129, 'A')), "");
  for (const char* name : {"NCCL_DEBUG",
                           "NCCL_IB_HCA",
                           "NCCL_P2P_DIRECT_DISABLE",
                           "CUDA_LAUNCH_BLOCKING",
                           "CUDA_MODULE_LOADING",
                           "OMP_WAIT_POLICY",
                           "MY_SETTING",
                           "RAVEL_S3_SECRET_ACCESS_KEY"}) {
    EXPECT_EQ(ExpectedName(name), "") << name;
  }
}

TEST(JobEnvironmentTest, ASecretIsTwoPlainNames) {
  for (const char* bad :
       {"", "a", "a/", "/a", "a/b/c", "../a", "a/..", "a/.hidden", "./a", "a/b c", "a//b"}) {
    EXPECT_NE(ExpectedSecret(bad), "") << bad;
  }
  EXPECT_EQ(ExpectedSecret("team-s3/secret_key.v2"), "");
  EXPECT_FALSE(MayHoldSecret("NCCL_DEBUG"));
  EXPECT_TRUE(MayHoldSecret("RAVEL_S3_SECRET_ACCESS_KEY"));
  EXPECT_TRUE(SoundsSecret("my_token"));
  EXPECT_FALSE(SoundsSecret("NCCL_DEBUG"));
}

TEST(JobEnvironmentTest, PatternsAreNamesOrBeginnings) {
  const absl::StatusOr<std::vector<std::string>> patterns = ParseNamePatterns("NCCL_*,MY_A");
  ASSERT_TRUE(patterns.ok()) << patterns.status();
  EXPECT_THAT(*patterns, ElementsAre("NCCL_*", "MY_A"));
  EXPECT_TRUE(MatchesAny("NCCL_DEBUG", *patterns));
  EXPECT_TRUE(MatchesAny("MY_A", *patterns));
  EXPECT_FALSE(MatchesAny("MY_AB", *patterns));
  EXPECT_FALSE(MatchesAny("XNCCL_A", *patterns));
  EXPECT_TRUE(ParseNamePatterns(kDefaultJobEnvironment).ok());
  for (const char* bad : {"*", "A*B", "A B", "-"}) {
    EXPECT_FALSE(ParseNamePatterns(bad).ok()) << bad;
  }
}

}  // namespace
}  // namespace ravel
