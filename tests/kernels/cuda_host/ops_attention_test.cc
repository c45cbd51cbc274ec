// Which path attention takes: what is asked of cuDNN, what our own kernel is launched for, and how
// a stream follows its choices.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/attention.h"
#include "kernels/cuda_host/cuda_device.h"
#include "tests/kernels/cuda_host/recording_stream.h"
#include "tests/kernels/cuda_host/views.h"

namespace ravel::kernels::cuda::testing {
namespace {

using ::testing::HasSubstr;

constexpr AttentionShape kShape = {
    .sequence_tokens = 64, .query_heads = 4, .kv_heads = 2, .head_size = 16, .scale = 0.25f};

TensorView Columns(const TensorView& matrix, int64_t first, int64_t count) {
  TensorView view = matrix;
  view.data = matrix.As<char>() + first * DTypeBytes(matrix.dtype);
  view.size[1] = count;
  return view;
}

// Operands as modules have them: queries, keys and values are columns of one matrix.
AttentionBackwardArgs Operands(Memory& memory, int64_t tokens, DType dtype, int64_t offset = 0) {
  const int64_t query = kShape.query_heads * kShape.head_size;
  const int64_t key = kShape.kv_heads * kShape.head_size;
  const TensorView qkv = memory.Matrix(tokens, query + 2 * key, dtype, 0, offset);
  const TensorView d_qkv = memory.Matrix(tokens, query + 2 * key, dtype);
  return {.shape = kShape,
          .q = Columns(qkv, 0, query),
          .k = Columns(qkv, query, key),
          .v = Columns(qkv, query + key, key),
          .out = memory.Matrix(tokens, query, dtype),
          .log_sum_exp = memory.Matrix(kShape.StatisticRows(tokens), kShape.sequence_tokens),
          .dout = memory.Matrix(tokens, query, dtype),
          .dq = Columns(d_qkv, 0, query),
          .dk = Columns(d_qkv, query, key),
          .dv = Columns(d_qkv, query + key, key),
          .workspace = {}};
}

AttentionForwardArgs ForwardOf(const AttentionBackwardArgs& args) {
  return {.shape = args.shape,
          .q = args.q,
          .k = args.k,
          .v = args.v,
          .out = args.out,
          .log_sum_exp = args.log_sum_exp,
          .workspace = {}};
}

TEST(CudaAttentionPath, Bf16IsDescribedToCudnnAsItLies) {
  RecordingStream stream;
  stream.has_cudnn = true;
  Memory memory;
  const AttentionBackwardArgs args = Operands(memory, 192, DType::kBF16);
  AttentionForward(stream, ForwardOf(args));
  AttentionBackward(stream, args);
  EXPECT_TRUE(stream.launches.empty());
  ASSERT_EQ(stream.attentions.size(), 2u);
  const RavelCudaAttention& forward = stream.attentions[0].attention;
  EXPECT_EQ(forward.sequences, 3);
  EXPECT_EQ(forward.sequence_tokens, 64);
  EXPECT_EQ(forward.query_heads, 4);
  EXPECT_EQ(forward.kv_heads, 2);
  EXPECT_EQ(forward.q_stride, 128);
  EXPECT_EQ(forward.v_stride, 128);
  EXPECT_EQ(forward.out_stride, 64);
  EXPECT_EQ(forward.scale, 0.25f);
  EXPECT_EQ(forward.backward, 0);
  EXPECT_EQ(forward.dq_stride, 0);
  EXPECT_EQ(stream.attentions[0].buffers.k, args.k.data);
  EXPECT_EQ(stream.attentions[0].buffers.dout, nullptr);
  const RavelCudaAttention& backward = stream.attentions[1].attention;
  EXPECT_EQ(backward.backward, 1);
  EXPECT_EQ(backward.dk_stride, 128);
  EXPECT_EQ(backward.dout_stride, 64);
  EXPECT_EQ(stream.attentions[1].buffers.dv, args.dv.data);
}

TEST(CudaAttentionPath, OurOwnKernelRunsFp32AndWhatLiesOffVectors) {
  Memory memory;
  for (const auto& [dtype, offset] : {std::pair{DType::kF32, int64_t{0}},
                                      std::pair{DType::kBF16, int64_t{1}},
                                      std::pair{DType::kF16, int64_t{1}}}) {
    RecordingStream stream;
    stream.has_cudnn = true;
    const AttentionBackwardArgs args = Operands(memory, 64, dtype, offset);
    AttentionForward(stream, ForwardOf(args));
    AttentionBackward(stream, args);
    EXPECT_TRUE(stream.attentions.empty());
    EXPECT_EQ(stream.launches.size(), 3u);
  }
}

TEST(CudaAttentionPath, OurOwnKernelRunsWhereTheStreamHasNoEngine) {
  RecordingStream stream;
  Memory memory;
  AttentionForward(stream, ForwardOf(Operands(memory, 64, DType::kBF16)));
  ASSERT_EQ(stream.launches.size(), 1u);
  EXPECT_EQ(stream.launches[0].shape.kernel, Kernel::kAttentionForward);
}

TEST(CudaAttentionPath, PreparingAsksForBothPassesAndTheLargerWorkspace) {
  RecordingStream stream;
  Memory memory;
  const AttentionBackwardArgs args = Operands(memory, 128, DType::kBF16);
  EXPECT_EQ(kernels::PrepareAttention(stream, args), 2001);
  AttentionForward(stream, ForwardOf(args));
  stream.has_cudnn = true;
  AttentionForward(stream, ForwardOf(args));
  AttentionBackward(stream, args);
  ASSERT_EQ(stream.prepared.size(), 2u);
  EXPECT_EQ(AttentionKey(stream.prepared[0]), AttentionKey(stream.attentions[1].attention));
  EXPECT_EQ(AttentionKey(stream.prepared[1]), AttentionKey(stream.attentions[0].attention));
  EXPECT_EQ(kernels::PrepareAttention(stream, Operands(memory, 128, DType::kF32)), 0);
}

TEST(CudaAttentionPath, PreparingNeedsNoMemory) {
  RecordingStream stream;
  Memory memory;
  const AttentionBackwardArgs with = Operands(memory, 128, DType::kBF16);
  AttentionBackwardArgs without = with;
  for (TensorView* view : {&without.q,
                           &without.k,
                           &without.v,
                           &without.out,
                           &without.log_sum_exp,
                           &without.dout,
                           &without.dq,
                           &without.dk,
                           &without.dv}) {
    view->data = nullptr;
  }
  EXPECT_EQ(kernels::PrepareAttention(stream, without), kernels::PrepareAttention(stream, with));
  ASSERT_EQ(stream.prepared.size(), 4u);
  EXPECT_EQ(AttentionKey(stream.prepared[0]), AttentionKey(stream.prepared[2]));
  EXPECT_EQ(AttentionKey(stream.prepared[1]), AttentionKey(stream.prepared[3]));
}

// The fake library's engine counts how often each sequence and head was computed, in the first
// statistic of each.
class CudaStreamAttentionTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto library = CudaLibrary::Open(RAVEL_FAKE_CUDA_LIBRARY);
    ASSERT_TRUE(library.ok()) << library.status();
    auto gpu = CudaGpu::Open(*library, 0);
    ASSERT_TRUE(gpu.ok()) << gpu.status();
    gpu_ = std::move(*gpu);
    auto scratch = gpu_->AllocateDevice(kScratchBytes);
    ASSERT_TRUE(scratch.ok());
    scratch_ = std::move(*scratch);
    auto stream = gpu_->MakeStream(CudaGpu::Priority::kNormal, scratch_.data());
    ASSERT_TRUE(stream.ok());
    stream_ = std::move(*stream);
  }
  // The engine writes statistics and nothing else.
  AttentionBackwardArgs BackwardOf(int64_t tokens) {
    AttentionBackwardArgs args = Operands(memory_, tokens, DType::kBF16);
    statistics_.assign(static_cast<size_t>(args.log_sum_exp.elements()), 0.0f);
    args.log_sum_exp.data = statistics_.data();
    return args;
  }
  void ExpectComputedOnce(const AttentionBackwardArgs& args) const {
    for (int64_t row = 0; row < args.log_sum_exp.rows(); ++row) {
      for (int64_t token = 0; token < kShape.sequence_tokens; ++token) {
        EXPECT_EQ(args.log_sum_exp.Row<float>(row)[token], token == 0 ? 1.0f : 0.0f)
            << row << " " << token;
      }
    }
  }
  std::unique_ptr<CudaGpu> gpu_;
  CudaMemory scratch_;
  std::unique_ptr<CudaStream> stream_;
  Memory memory_;
  std::vector<float> statistics_;
};

TEST_F(CudaStreamAttentionTest, OnePlanComputesAllThatFits) {
  const AttentionBackwardArgs args = BackwardOf(192);
  AttentionForward(*stream_, ForwardOf(args));
  ExpectComputedOnce(args);
  EXPECT_THAT(stream_->AttentionReport(),
              HasSubstr("fwd-3x64x4of2x16-s128,128,128,64-c3e800000: cuDNN, chain, engine 8, "
                        "workspace 0\n"));
}

TEST_F(CudaStreamAttentionTest, PartsTogetherComputeAllOnce) {
  const AttentionBackwardArgs args = BackwardOf(192);
  std::vector<char> workspace(3000 * 4);
  // The fake engine wants 4 bytes per element of q: 12288 for a sequence.
  stream_->UseAttention(
      {.workspace = workspace.data(), .workspace_bytes = static_cast<int64_t>(workspace.size())});
  EXPECT_EQ(kernels::PrepareAttention(*stream_, args), 3 * 64 * 4 * 16 * 4);
  AttentionBackward(*stream_, args);
  ExpectComputedOnce(args);
  EXPECT_THAT(
      stream_->AttentionReport(),
      HasSubstr("bwd-det-3x64x4of2x16-s128,128,128,64,64,128,128,128-c3e800000: cuDNN, "
                "chain, engine 8, workspace 8192, in parts of 1 sequences and 1 key heads"));
}

TEST_F(CudaStreamAttentionTest, TheWorkspaceOfTheOperandsServesWhereItIsTheLarger) {
  AttentionBackwardArgs args = BackwardOf(192);
  std::vector<char> small(3000 * 4);
  std::vector<float> large(2 * 64 * 4 * 16);  // two of three sequences: parts of one
  stream_->UseAttention(
      {.workspace = small.data(), .workspace_bytes = static_cast<int64_t>(small.size())});
  args.workspace = VectorView(large.data(), static_cast<int64_t>(large.size()));
  kernels::PrepareAttention(*stream_, args);
  AttentionBackward(*stream_, args);
  ExpectComputedOnce(args);
  EXPECT_THAT(stream_->AttentionReport(),
              HasSubstr("workspace 16384, in parts of 1 sequences and 2 key heads"));
}

TEST_F(CudaStreamAttentionTest, LessWorkspaceThanWasPreparedWithIsABug) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  AttentionBackwardArgs args = BackwardOf(192);
  std::vector<char> small(3000 * 4);
  std::vector<float> large(3 * 64 * 4 * 16);
  stream_->UseAttention(
      {.workspace = small.data(), .workspace_bytes = static_cast<int64_t>(small.size())});
  args.workspace = VectorView(large.data(), static_cast<int64_t>(large.size()));
  kernels::PrepareAttention(*stream_, args);
  args.workspace = {};
  EXPECT_DEATH(AttentionBackward(*stream_, args), "prepared with more workspace");
}

TEST_F(CudaStreamAttentionTest, FastBackwardIsAnotherChoice) {
  const AttentionBackwardArgs args = BackwardOf(64);
  AttentionBackward(*stream_, args);
  stream_->UseAttention({.deterministic = false});
  EXPECT_EQ(stream_->AttentionReport(), "");
  AttentionBackward(*stream_, args);
  EXPECT_THAT(stream_->AttentionReport(), HasSubstr("bwd-1x64x"));
}

TEST_F(CudaStreamAttentionTest, NoEngineMeansOurOwnKernelByName) {
  AttentionShape shape = kShape;
  shape.head_size = 20;  // the fake engine takes multiples of 8
  const TensorView q = memory_.Matrix(64, 80, DType::kBF16);
  const TensorView k = memory_.Matrix(64, 40, DType::kBF16);
  AttentionForward(*stream_,
                   {.shape = shape,
                    .q = q,
                    .k = k,
                    .v = k,
                    .out = memory_.Matrix(64, 80, DType::kBF16),
                    .log_sum_exp = memory_.Matrix(4, 64),
                    .workspace = {}});
  EXPECT_THAT(stream_->AttentionReport(), HasSubstr(": our own kernel, because CUDA: attention: "));
}

TEST_F(CudaStreamAttentionTest, NothingIsChosenWithinACapture) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const AttentionBackwardArgs args = BackwardOf(64);
  EXPECT_DEATH(
      {
        stream_->BeginCapture();
        AttentionForward(*stream_, ForwardOf(args));
      },
      "attention is prepared before a capture");
  kernels::PrepareAttention(*stream_, args);
  stream_->BeginCapture();
  AttentionForward(*stream_, ForwardOf(args));
  EXPECT_TRUE(stream_->EndCapture().ok());
}

}  // namespace
}  // namespace ravel::kernels::cuda::testing
