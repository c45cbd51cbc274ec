// Attention of bf16 on the device through each path: cuDNN, and our own kernel, which runs where
// operands do not begin on 16 bytes. Both against the formula in fp64; either path's backward after
// the other's forward; parts; equal bits. A failure prints the seed of the inputs.

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/attention.h"
#include "kernels/scalar/bfloat16.h"
#include "tests/gpu/gpu.h"

namespace ravel::kernels::testing {
namespace {

using ::testing::HasSubstr;

constexpr double kAttentionTolerance = 1e-2;
constexpr double kStatisticsTolerance = 1e-3;

enum class Path { kCudnn, kOwn };

// bf16 [rows, columns] in device memory. On our own path it begins two bytes off a vector.
class DeviceMatrix {
 public:
  DeviceMatrix(int64_t rows, int64_t columns, Path path)
      : rows_(rows),
        columns_(columns),
        offset_(path == Path::kOwn ? 1 : 0),
        memory_((rows * columns + 1) * 2) {
    Poison();
  }
  // NaN.
  void Poison() const { memory_.Fill('\xFF'); }
  TensorView Columns(int64_t first, int64_t count) const {
    return {.data = static_cast<uint16_t*>(memory_.device()) + offset_ + first,
            .dtype = DType::kBF16,
            .rank = 2,
            .size = {rows_, count},
            .row_stride = columns_};
  }
  TensorView view() const { return Columns(0, columns_); }
  void Set(const std::vector<float>& values) {
    std::vector<uint16_t> bits(values.size());
    std::transform(values.begin(), values.end(), bits.begin(), scalar::Bf16Nearest);
    SetBits(bits);
  }
  void SetBits(const std::vector<uint16_t>& bits) const {
    memory_.Receive(0);
    std::copy(bits.begin(), bits.end(), host());
    memory_.Send();
  }
  std::vector<double> Values() const {
    std::vector<double> values;
    for (const uint16_t bits : Bits()) {
      values.push_back(static_cast<double>(scalar::Bf16Value(bits)));
    }
    return values;
  }
  std::vector<uint16_t> Bits() const {
    memory_.Receive();
    return {host(), host() + rows_ * columns_};
  }

 private:
  uint16_t* host() const { return static_cast<uint16_t*>(memory_.host()) + offset_; }
  int64_t rows_;
  int64_t columns_;
  int64_t offset_;
  Mirror memory_;
};

struct AttentionCase {
  int64_t sequences;
  AttentionShape shape;

  int64_t tokens() const { return sequences * shape.sequence_tokens; }
  int64_t query_columns() const { return shape.query_heads * shape.head_size; }
  int64_t key_columns() const { return shape.kv_heads * shape.head_size; }
  int64_t row() const { return query_columns() + 2 * key_columns(); }
};

AttentionCase CaseOf(int64_t sequences, int64_t tokens, int64_t heads, int64_t keys, int64_t size) {
  return {sequences,
          {.sequence_tokens = tokens,
           .query_heads = heads,
           .kv_heads = keys,
           .head_size = size,
           .scale = 1.0f / std::sqrt(static_cast<float>(size))}};
}

std::vector<float> Normals(int64_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(count));
  std::generate(values.begin(), values.end(), [&] { return normal(random); });
  return values;
}

struct Statistics {
  explicit Statistics(const AttentionCase& c)
      : elements(c.shape.query_heads * c.tokens()), memory(elements * 4) {
    memory.Fill('\xFF');
  }
  float* data() const { return static_cast<float*>(memory.device()); }
  std::vector<double> Values() const {
    memory.Receive();
    const auto* const values = static_cast<const float*>(memory.host());
    return {values, values + elements};
  }
  int64_t elements;
  Mirror memory;
};

// All operands of one run.
struct AttentionRun {
  AttentionRun(const AttentionCase& c, Path path, uint64_t seed)
      : attention(c),
        qkv(c.tokens(), c.row(), path),
        out(c.tokens(), c.query_columns(), path),
        dout(c.tokens(), c.query_columns(), path),
        d_qkv(c.tokens(), c.row(), path),
        statistics(c) {
    qkv.Set(Normals(c.tokens() * c.row(), seed));
    dout.Set(Normals(c.tokens() * c.query_columns(), seed + 1));
  }
  AttentionBackwardArgs Args() const {
    const AttentionCase& c = attention;
    return {.shape = c.shape,
            .q = qkv.Columns(0, c.query_columns()),
            .k = qkv.Columns(c.query_columns(), c.key_columns()),
            .v = qkv.Columns(c.query_columns() + c.key_columns(), c.key_columns()),
            .out = out.view(),
            .log_sum_exp = MatrixView(
                statistics.data(), c.shape.StatisticRows(c.tokens()), c.shape.sequence_tokens),
            .dout = dout.view(),
            .dq = d_qkv.Columns(0, c.query_columns()),
            .dk = d_qkv.Columns(c.query_columns(), c.key_columns()),
            .dv = d_qkv.Columns(c.query_columns() + c.key_columns(), c.key_columns()),
            .workspace = {}};
  }
  void Forward(CudaStream& stream) const {
    const AttentionBackwardArgs args = Args();
    AttentionForward(stream,
                     {.shape = args.shape,
                      .q = args.q,
                      .k = args.k,
                      .v = args.v,
                      .out = args.out,
                      .log_sum_exp = args.log_sum_exp,
                      .workspace = {}});
    Finish(stream);
  }
  void Backward(CudaStream& stream) const {
    AttentionBackward(stream, Args());
    Finish(stream);
  }
  static void Finish(CudaStream& stream) {
    const absl::Status done = stream.Synchronize();
    ASSERT_TRUE(done.ok()) << done;
  }

  AttentionCase attention;
  DeviceMatrix qkv;
  DeviceMatrix out;
  DeviceMatrix dout;
  DeviceMatrix d_qkv;
  Statistics statistics;
};

// The formula in fp64, from the same bf16 operands.
struct Expected {
  std::vector<double> out;
  std::vector<double> log_sum_exp;
  std::vector<double> d_qkv;
};

// One query of one head: its weights, results, and what it adds to the gradients.
void AddQuery(const AttentionRun& run,
              const std::vector<double>& qkv,
              const std::vector<double>& dout,
              int64_t head,
              int64_t token,
              Expected& to) {
  const AttentionCase& c = run.attention;
  const int64_t size = c.shape.head_size;
  const int64_t key_head = head / (c.shape.query_heads / c.shape.kv_heads);
  const int64_t first = token / c.shape.sequence_tokens * c.shape.sequence_tokens;
  const auto scale = static_cast<double>(c.shape.scale);
  const auto q = static_cast<size_t>(token * c.row() + head * size);
  const auto key_at = [&](int64_t key) {
    return static_cast<size_t>(key * c.row() + c.query_columns() + key_head * size);
  };
  const auto values = static_cast<size_t>(c.key_columns());
  const auto result = static_cast<size_t>(token * c.query_columns() + head * size);
  const auto width = static_cast<size_t>(size);
  std::vector<double> weights;
  double sum = 0.0;
  for (int64_t key = first; key <= token; ++key) {
    double dot = 0.0;
    for (size_t j = 0; j < width; ++j) {
      dot += qkv[q + j] * qkv[key_at(key) + j];
    }
    weights.push_back(std::exp(dot * scale));
    sum += weights.back();
  }
  const int64_t row = first * c.shape.query_heads + head * c.shape.sequence_tokens;
  to.log_sum_exp[static_cast<size_t>(row + token - first)] = std::log(sum);
  double delta = 0.0;
  std::vector<double> gradients;
  for (int64_t key = first; key <= token; ++key) {
    double& weight = weights[static_cast<size_t>(key - first)];
    weight /= sum;
    double gradient = 0.0;
    for (size_t j = 0; j < width; ++j) {
      to.out[result + j] += weight * qkv[key_at(key) + values + j];
      gradient += dout[result + j] * qkv[key_at(key) + values + j];
      to.d_qkv[key_at(key) + values + j] += weight * dout[result + j];
    }
    gradients.push_back(gradient);
    delta += weight * gradient;
  }
  for (int64_t key = first; key <= token; ++key) {
    const auto i = static_cast<size_t>(key - first);
    const double score = weights[i] * (gradients[i] - delta) * scale;
    for (size_t j = 0; j < width; ++j) {
      to.d_qkv[q + j] += score * qkv[key_at(key) + j];
      to.d_qkv[key_at(key) + j] += score * qkv[q + j];
    }
  }
}

Expected Formula(const AttentionRun& run) {
  const AttentionCase& c = run.attention;
  Expected expected = {
      .out = std::vector<double>(static_cast<size_t>(c.tokens() * c.query_columns())),
      .log_sum_exp = std::vector<double>(static_cast<size_t>(c.shape.query_heads * c.tokens())),
      .d_qkv = std::vector<double>(static_cast<size_t>(c.tokens() * c.row()))};
  const std::vector<double> qkv = run.qkv.Values();
  const std::vector<double> dout = run.dout.Values();
  for (int64_t head = 0; head < c.shape.query_heads; ++head) {
    for (int64_t token = 0; token < c.tokens(); ++token) {
      AddQuery(run, qkv, dout, head, token, expected);
    }
  }
  return expected;
}

void ExpectNear(const std::vector<double>& values,
                const std::vector<double>& expected,
                double tolerance,
                const char* name) {
  double largest = 1.0;
  for (const double value : expected) {
    largest = std::max(largest, std::fabs(value));
  }
  ASSERT_EQ(values.size(), expected.size());
  for (size_t i = 0; i < values.size(); ++i) {
    ASSERT_NEAR(values[i], expected[i], tolerance * largest) << name << " element " << i;
  }
}

void ExpectForward(const AttentionRun& run, const Expected& expected) {
  ExpectNear(run.out.Values(), expected.out, kAttentionTolerance, "out");
  ExpectNear(run.statistics.Values(), expected.log_sum_exp, kStatisticsTolerance, "log_sum_exp");
}

class GpuAttentionTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!TheGpu().missing.empty()) {
      GTEST_SKIP() << TheGpu().missing;
    }
    if (!TheGpu().device->no_cudnn().empty()) {
      GTEST_SKIP() << TheGpu().device->no_cudnn();
    }
    stream().UseAttention({});
  }
  void TearDown() override {
    if (TheGpu().missing.empty()) {
      stream().UseAttention({});
    }
  }
  static CudaStream& stream() { return *TheGpu().stream; }
  static std::vector<AttentionCase> Cases() {
    return {CaseOf(1, 128, 4, 2, 64),
            CaseOf(2, 128, 4, 4, 128),
            CaseOf(3, 200, 6, 2, 64),
            CaseOf(1, 131, 2, 1, 72),
            CaseOf(2, 64, 8, 1, 128)};
  }
  const uint64_t seed_ = InputSeed();
};

TEST_F(GpuAttentionTest, BothPathsComputeTheFormula) {
  for (const AttentionCase& c : Cases()) {
    const Expected expected = Formula(AttentionRun(c, Path::kCudnn, seed_));
    for (const Path path : {Path::kCudnn, Path::kOwn}) {
      for (const bool deterministic : {true, false}) {
        SCOPED_TRACE(std::string(path == Path::kOwn ? "our own kernel" : "cuDNN") + " seed " +
                     std::to_string(seed_));
        stream().UseAttention({.deterministic = deterministic});
        const AttentionRun run(c, path, seed_);
        run.Forward(stream());
        ExpectForward(run, expected);
        run.Backward(stream());
        ExpectNear(run.d_qkv.Values(), expected.d_qkv, kAttentionTolerance, "gradient");
        // Aligned operands went to cuDNN in earnest; the others were not even described to it.
        EXPECT_EQ(stream().AttentionReport().find("our own kernel"), std::string::npos)
            << stream().AttentionReport();
        EXPECT_EQ(stream().AttentionReport().empty(), path == Path::kOwn);
      }
    }
  }
}

// One of a run's own forward, the other from another path: the statistic is the same quantity.
TEST_F(GpuAttentionTest, EitherBackwardFollowsTheOthersForward) {
  for (const AttentionCase& c : Cases()) {
    const Expected expected = Formula(AttentionRun(c, Path::kCudnn, seed_));
    for (const Path path : {Path::kCudnn, Path::kOwn}) {
      SCOPED_TRACE("seed " + std::to_string(seed_));
      const AttentionRun forward(c, path, seed_);
      forward.Forward(stream());
      const AttentionRun backward(c, path == Path::kOwn ? Path::kCudnn : Path::kOwn, seed_);
      backward.out.SetBits(forward.out.Bits());
      stream().CopyMemory(backward.statistics.data(),
                          forward.statistics.data(),
                          forward.statistics.elements * int64_t{sizeof(float)});
      backward.Backward(stream());
      ExpectNear(backward.d_qkv.Values(), expected.d_qkv, kAttentionTolerance, "gradient");
    }
  }
}

TEST_F(GpuAttentionTest, DeterministicGradientsRepeatTheirBits) {
  const AttentionCase c = CaseOf(1, 1024, 8, 2, 64);
  const AttentionRun run(c, Path::kCudnn, seed_);
  run.Forward(stream());
  run.Backward(stream());
  const std::vector<uint16_t> first = run.d_qkv.Bits();
  const std::vector<uint16_t> out = run.out.Bits();
  for (int i = 0; i < 5; ++i) {
    run.d_qkv.Poison();
    run.Forward(stream());
    run.Backward(stream());
    EXPECT_EQ(run.out.Bits(), out) << "seed " << seed_;
    EXPECT_EQ(run.d_qkv.Bits(), first) << "seed " << seed_;
  }
}

TEST_F(GpuAttentionTest, PartsComputeWhatTheWholeDoes) {
  const AttentionCase c = CaseOf(4, 128, 8, 4, 64);
  const AttentionRun whole(c, Path::kCudnn, seed_);
  whole.Forward(stream());
  whole.Backward(stream());
  const int64_t bytes = PrepareAttention(stream(), whole.Args());
  ASSERT_GT(bytes, 0);
  auto workspace = TheGpu().device->AllocateDevice(bytes / 2);
  ASSERT_TRUE(workspace.ok());
  stream().UseAttention({.workspace = workspace->data(), .workspace_bytes = workspace->bytes()});
  const AttentionRun parts(c, Path::kCudnn, seed_);
  parts.Forward(stream());
  parts.Backward(stream());
  EXPECT_THAT(stream().AttentionReport(), HasSubstr("in parts of"));
  ExpectNear(parts.out.Values(), whole.out.Values(), kAttentionTolerance, "out");
  ExpectNear(parts.d_qkv.Values(), whole.d_qkv.Values(), kAttentionTolerance, "gradient");
}

TEST_F(GpuAttentionTest, CapturedAttentionReplays) {
  const AttentionCase c = CaseOf(2, 128, 4, 2, 64);
  const AttentionRun run(c, Path::kCudnn, seed_);
  run.Forward(stream());
  run.Backward(stream());
  stream().BeginCapture();
  AttentionForward(stream(),
                   {.shape = c.shape,
                    .q = run.Args().q,
                    .k = run.Args().k,
                    .v = run.Args().v,
                    .out = run.Args().out,
                    .log_sum_exp = run.Args().log_sum_exp,
                    .workspace = {}});
  AttentionBackward(stream(), run.Args());
  const absl::StatusOr<CudaGraph> graph = stream().EndCapture();
  ASSERT_TRUE(graph.ok()) << graph.status();
  const Expected expected = Formula(run);
  for (int i = 0; i < 2; ++i) {
    run.d_qkv.Poison();
    stream().Launch(*graph);
    AttentionRun::Finish(stream());
    ExpectForward(run, expected);
    ExpectNear(run.d_qkv.Values(), expected.d_qkv, kAttentionTolerance, "gradient");
  }
}

}  // namespace
}  // namespace ravel::kernels::testing
