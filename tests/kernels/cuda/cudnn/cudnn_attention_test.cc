// Which engine is chosen and what a run is given, with a cuDNN of tables; and how the library is
// found.

#include "kernels/cuda/cudnn_attention.h"

#include <cmath>
#include <cstdlib>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/dtype.h"
#include "tests/kernels/cuda/cudnn/fake_cudnn.h"

namespace ravel::kernels::cuda::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr uint64_t k9_19 = 91900;
constexpr uint64_t k9_21 = 92100;

RavelCudaAttention SmallAttention(bool backward, bool deterministic = false) {
  RavelCudaAttention a = {};
  a.sequences = 2;
  a.sequence_tokens = 128;
  a.query_heads = 4;
  a.kv_heads = 2;
  a.head_size = 64;
  a.q_stride = a.k_stride = a.v_stride = 512;
  a.out_stride = 256;
  a.scale = 0.125f;
  a.type = static_cast<int32_t>(DType::kBF16);
  a.backward = backward ? 1 : 0;
  a.deterministic = deterministic ? 1 : 0;
  if (backward) {
    a.dout_stride = 256;
    a.dq_stride = a.dk_stride = a.dv_stride = 512;
  }
  return a;
}

class CudnnAttentionTest : public ::testing::Test {
 protected:
  std::unique_ptr<CudnnAttentionPlan> Plan(uint64_t version, const RavelCudaAttention& attention) {
    why_.clear();
    return PlanAttention(cudnn_.functions(), version, target_, attention, why_);
  }
  FakeCudnn cudnn_;
  CudnnTarget target_ = {.handle = reinterpret_cast<cudnnHandle_t>(&cudnn_), .device = nullptr};
  std::string why_;
};

TEST_F(CudnnAttentionTest, FirstConfigurationThatFinalisesServes) {
  cudnn_.chain[CUDNN_HEUR_MODE_A] = {
      {.index = 3, .finalises = false}, {.index = 6, .workspace_bytes = 1000}, {.index = 7}};
  const auto plan = Plan(k9_19, SmallAttention(false));
  ASSERT_NE(plan, nullptr) << why_;
  EXPECT_EQ(plan->engine, 6);
  EXPECT_EQ(plan->workspace_bytes, 1000);
  EXPECT_FALSE(plan->unified);
}

TEST_F(CudnnAttentionTest, FallbackListComesAfterTheHeuristic) {
  cudnn_.chain[CUDNN_HEUR_MODE_A] = {{.index = 3, .finalises = false}};
  cudnn_.chain[CUDNN_HEUR_MODE_FALLBACK] = {{.index = 9}};
  const auto plan = Plan(k9_19, SmallAttention(true));
  ASSERT_NE(plan, nullptr);
  EXPECT_EQ(plan->engine, 9);
}

TEST_F(CudnnAttentionTest, NoPlanNamesEveryAttempt) {
  cudnn_.chain[CUDNN_HEUR_MODE_A] = {{.index = 3, .finalises = false}};
  EXPECT_EQ(Plan(k9_19, SmallAttention(false)), nullptr);
  EXPECT_THAT(why_, HasSubstr("chain, heuristic A, engine 3: the plan: refused"));
  EXPECT_THAT(why_, HasSubstr("chain, fallback list: no engine"));
}

TEST_F(CudnnAttentionTest, EnginesWithTheNoteAreSkippedWhereBitsMatter) {
  cudnn_.chain[CUDNN_HEUR_MODE_A] = {{.index = 3, .deterministic = false}, {.index = 6}};
  EXPECT_EQ(Plan(k9_19, SmallAttention(true, false))->engine, 3);
  EXPECT_EQ(Plan(k9_19, SmallAttention(true, true))->engine, 6);
  cudnn_.chain[CUDNN_HEUR_MODE_A].pop_back();
  EXPECT_EQ(Plan(k9_19, SmallAttention(true, true)), nullptr);
  EXPECT_THAT(why_, HasSubstr("engine 3: not deterministic"));
}

TEST_F(CudnnAttentionTest, OneNodeIsTriedFirstWhereItHasMasks) {
  cudnn_.one_node[CUDNN_HEUR_MODE_A] = {{.index = 20}};
  cudnn_.chain[CUDNN_HEUR_MODE_A] = {{.index = 6}};
  EXPECT_EQ(Plan(k9_19, SmallAttention(false))->engine, 6);
  const auto plan = Plan(k9_21, SmallAttention(false));
  EXPECT_EQ(plan->engine, 20);
  EXPECT_TRUE(plan->unified);
  EXPECT_EQ(Plan(k9_21, SmallAttention(true))->engine, 6);  // backward is a chain always
}

TEST_F(CudnnAttentionTest, OneNodeThatCannotBeMadeLeavesTheChain) {
  cudnn_.knows_one_node = false;
  cudnn_.chain[CUDNN_HEUR_MODE_A] = {{.index = 6}};
  const auto plan = Plan(k9_21, SmallAttention(false));
  ASSERT_NE(plan, nullptr);
  EXPECT_FALSE(plan->unified);
  EXPECT_THAT(why_, HasSubstr("one node: a descriptor: refused"));
}

TEST_F(CudnnAttentionTest, RefusedDescriptionsAskNoEngine) {
  RavelCudaAttention attention = SmallAttention(false);
  attention.head_size = 60;
  EXPECT_EQ(Plan(k9_19, attention), nullptr);
  EXPECT_TRUE(cudnn_.tensors.empty());
}

TEST_F(CudnnAttentionTest, NothingIsLeftBehind) {
  cudnn_.one_node[CUDNN_HEUR_MODE_A] = {{.index = 20, .finalises = false}};
  cudnn_.chain[CUDNN_HEUR_MODE_A] = {{.index = 6}, {.index = 7}};
  EXPECT_NE(Plan(k9_21, SmallAttention(false)), nullptr);
  EXPECT_NE(Plan(k9_19, SmallAttention(true)), nullptr);
  EXPECT_EQ(cudnn_.alive, 0);
}

TEST_F(CudnnAttentionTest, IdsDiffer) {
  cudnn_.one_node[CUDNN_HEUR_MODE_A] = {{.index = 20}};
  cudnn_.chain[CUDNN_HEUR_MODE_A] = {{.index = 6}};
  for (const RavelCudaAttention& attention : {SmallAttention(false), SmallAttention(true)}) {
    cudnn_.tensors.clear();
    ASSERT_NE(Plan(k9_21, attention), nullptr);
    std::set<std::vector<char>> ids;
    for (const FakeDescriptor& tensor : cudnn_.tensors) {
      EXPECT_TRUE(ids.insert(tensor.attributes.at(CUDNN_ATTR_TENSOR_UNIQUE_ID)).second);
    }
  }
}

// Operands at addresses that no two share.
class CudnnRunTest : public CudnnAttentionTest {
 protected:
  void SetUp() override {
    char* next = memory_.data();
    for (void** place : {const_cast<void**>(&buffers_.q),
                         const_cast<void**>(&buffers_.k),
                         const_cast<void**>(&buffers_.v),
                         &buffers_.out,
                         reinterpret_cast<void**>(&buffers_.log_sum_exp),
                         const_cast<void**>(&buffers_.dout),
                         &buffers_.dq,
                         &buffers_.dk,
                         &buffers_.dv,
                         &buffers_.workspace}) {
      *place = next++;
    }
    buffers_.workspace_bytes = uint64_t{1} << 30;
  }
  std::set<void*> AddressesOf(const FakeRun& run) const {
    std::set<void*> addresses;
    for (const auto& [id, address] : run.addresses) {
      if (!run.scalars.contains(id)) {
        addresses.insert(address);
      }
    }
    return addresses;
  }
  std::vector<float> ScalarsOf(const FakeRun& run) const {
    std::vector<float> scalars;
    for (const auto& [id, value] : run.scalars) {
      scalars.push_back(value);
    }
    return scalars;
  }
  std::vector<char> memory_ = std::vector<char>(64);
  RavelCudaAttentionBuffers buffers_ = {};
};

TEST_F(CudnnRunTest, ForwardIsGivenItsOperandsAndNumbers) {
  cudnn_.chain[CUDNN_HEUR_MODE_A] = {{.index = 6, .workspace_bytes = 4096}};
  const auto plan = Plan(k9_19, SmallAttention(false));
  EXPECT_EQ(RunAttention(target_.handle, *plan, buffers_), "");
  ASSERT_EQ(cudnn_.runs.size(), 1u);
  const FakeRun& run = cudnn_.runs[0];
  EXPECT_EQ(run.engine, 6);
  EXPECT_EQ(AddressesOf(run),
            (std::set<void*>{const_cast<void*>(buffers_.q),
                             const_cast<void*>(buffers_.k),
                             const_cast<void*>(buffers_.v),
                             buffers_.out,
                             buffers_.log_sum_exp}));
  EXPECT_THAT(ScalarsOf(run), ElementsAre(0.125f, -std::numeric_limits<float>::infinity()));
  EXPECT_EQ(run.workspace, buffers_.workspace);
}

TEST_F(CudnnRunTest, BackwardHasItsSumsBeforeTheEnginesWorkspace) {
  cudnn_.chain[CUDNN_HEUR_MODE_A] = {{.index = 6, .workspace_bytes = 4096}};
  const auto plan = Plan(k9_19, SmallAttention(true));
  constexpr int64_t kRows = 2 * 4 * 128 * 4;
  EXPECT_EQ(plan->scratch_bytes, kRows + kRows * 64);
  EXPECT_EQ(plan->workspace_bytes, plan->scratch_bytes + 4096);
  EXPECT_EQ(RunAttention(target_.handle, *plan, buffers_), "");
  const FakeRun& run = cudnn_.runs.at(0);
  char* workspace = static_cast<char*>(buffers_.workspace);
  EXPECT_EQ(run.workspace, workspace + plan->scratch_bytes);
  EXPECT_EQ(AddressesOf(run).size(), 11u);  // nine operands, two sums
  EXPECT_TRUE(AddressesOf(run).contains(workspace));
  EXPECT_TRUE(AddressesOf(run).contains(workspace + kRows));
}

TEST_F(CudnnRunTest, OneNodeIsGivenTheSame) {
  cudnn_.one_node[CUDNN_HEUR_MODE_A] = {{.index = 20}};
  const auto plan = Plan(k9_21, SmallAttention(false));
  EXPECT_EQ(RunAttention(target_.handle, *plan, buffers_), "");
  EXPECT_EQ(AddressesOf(cudnn_.runs.at(0)).size(), 5u);
  EXPECT_THAT(ScalarsOf(cudnn_.runs.at(0)),
              ElementsAre(0.125f, -std::numeric_limits<float>::infinity()));
}

TEST_F(CudnnRunTest, TooSmallAWorkspaceRunsNothing) {
  cudnn_.chain[CUDNN_HEUR_MODE_A] = {{.index = 6, .workspace_bytes = 4096}};
  const auto plan = Plan(k9_19, SmallAttention(false));
  buffers_.workspace_bytes = 4095;
  EXPECT_THAT(RunAttention(target_.handle, *plan, buffers_),
              HasSubstr("needs a workspace of 4096 bytes and has 4095"));
  EXPECT_TRUE(cudnn_.runs.empty());
}

TEST(CudnnLibraryTest, MissingLibraryNamesWhereItWasSought) {
  const CudnnLibrary library = OpenCudnn({"/nowhere/libcudnn.so.9", "/neither/libcudnn.so.9"});
  EXPECT_THAT(library.missing, HasSubstr("cuDNN not found; tried /nowhere/libcudnn.so.9 ("));
  EXPECT_THAT(library.missing, HasSubstr("/neither/libcudnn.so.9 ("));
}

TEST(CudnnLibraryTest, AnotherLibraryIsRefusedByTheFirstNameItLacks) {
  const CudnnLibrary library = OpenCudnn({"libm.so.6"});
  EXPECT_EQ(library.missing, "libcudnn.so.9 has no cudnnGetVersion");
}

TEST(CudnnLibraryTest, TheEnvironmentNamesTheOnlyPlace) {
  ASSERT_EQ(setenv("RAVEL_CUDNN_LIBRARY", "/chosen/libcudnn.so.9", 1), 0);
  EXPECT_THAT(CudnnPaths(), ElementsAre("/chosen/libcudnn.so.9"));
  ASSERT_EQ(unsetenv("RAVEL_CUDNN_LIBRARY"), 0);
  EXPECT_THAT(CudnnPaths(), ElementsAre("libcudnn.so.9", "/usr/local/cuda/lib64/libcudnn.so.9"));
}

TEST(CudnnLibraryTest, VersionsReadAsPeopleWriteThem) {
  EXPECT_EQ(CudnnVersionText(91900), "cuDNN 9.19.0");
  EXPECT_EQ(CudnnVersionText(91002), "cuDNN 9.10.2");
  EXPECT_EQ(CudnnVersionText(100103), "cuDNN 10.1.3");
}

}  // namespace
}  // namespace ravel::kernels::cuda::testing
