// Each op against values that PyTorch computed in float64 (golden/make_golden.py).

#include <algorithm>
#include <bit>
#include <cmath>
#include <fstream>
#include <map>
#include <sstream>
#include <string>

#include <gtest/gtest.h>

#include "kernels/activation.h"
#include "kernels/adamw.h"
#include "kernels/attention.h"
#include "kernels/embedding.h"
#include "kernels/gemm.h"
#include "kernels/loss.h"
#include "kernels/norm.h"
#include "kernels/rope.h"
#include "tests/kernels/op_case.h"

namespace ravel::kernels::testing {
namespace {

using Words = std::vector<uint32_t>;

// case -> tensor -> bit patterns.
std::map<std::string, std::map<std::string, Words>> LoadGolden() {
  std::ifstream file(RAVEL_KERNELS_GOLDEN);
  std::map<std::string, std::map<std::string, Words>> golden;
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream words(line);
    std::string name;
    std::string tensor;
    size_t count = 0;
    words >> name >> tensor >> count >> std::hex;
    Words& values = golden[name][tensor];
    for (uint32_t word = 0; words >> word;) {
      values.push_back(word);
    }
    CHECK_EQ(values.size(), count);
  }
  return golden;
}

class GoldenTest : public ::testing::Test {
 protected:
  static const Words& Get(const std::string& name, const std::string& tensor) {
    static const auto golden = LoadGolden();
    return golden.at(name).at(tensor);
  }
  static std::vector<double> Reals(const std::string& name, const std::string& tensor) {
    std::vector<double> values;
    for (const uint32_t word : Get(name, tensor)) {
      values.push_back(static_cast<double>(std::bit_cast<float>(word)));
    }
    return values;
  }
  static std::vector<double> Integers(const std::string& name, const std::string& tensor) {
    std::vector<double> values;
    for (const uint32_t word : Get(name, tensor)) {
      values.push_back(static_cast<double>(std::bit_cast<int32_t>(word)));
    }
    return values;
  }
  static void ExpectNear(const TensorView& view,
                         const std::string& name,
                         const std::string& tensor,
                         double tolerance = 2e-6) {
    const std::vector<float> values = Read(view);
    const std::vector<double> expected = Reals(name, tensor);
    ASSERT_EQ(values.size(), expected.size());
    double scale = 1;
    for (const double value : expected) {
      scale = std::max(scale, std::fabs(value));
    }
    for (size_t i = 0; i < values.size(); ++i) {
      ASSERT_NEAR(static_cast<double>(values[i]), expected[i], tolerance * scale)
          << name << "." << tensor << " element " << i;
    }
  }

  Operands operands_{{.offset = 1, .row_gap = 3}};
};

TEST_F(GoldenTest, RmsNormWithResidual) {
  RmsNormForwardArgs forward;
  forward.x = operands_.Matrix(6, 37, Reals("norm", "x"));
  forward.residual = operands_.Matrix(6, 37, Reals("norm", "residual"));
  forward.w = operands_.Vector(37, Reals("norm", "w"));
  forward.epsilon = 1e-5f;
  forward.sum = operands_.Matrix(6, 37);
  forward.y = operands_.Matrix(6, 37);
  forward.rstd = operands_.Vector(6);
  RmsNormForward(operands_.stream, forward);
  ExpectNear(forward.y, "norm", "y");
  ExpectNear(forward.sum, "norm", "sum");
  RmsNormBackwardArgs backward;
  backward.dy = operands_.Matrix(6, 37, Reals("norm", "dy"));
  backward.sum = forward.sum;
  backward.w = forward.w;
  backward.rstd = forward.rstd;
  backward.dresidual = operands_.Matrix(6, 37, Reals("norm", "dsum"));
  backward.dx = backward.dy;  // in place
  backward.dw = operands_.Vector(37);
  RmsNormBackward(operands_.stream, backward);
  ExpectNear(backward.dx, "norm", "dx");
  ExpectNear(backward.dw, "norm", "dw");
}

TEST_F(GoldenTest, SwiGlu) {
  const TensorView gate = operands_.Matrix(5, 29, Reals("swiglu", "gate"));
  const TensorView up = operands_.Matrix(5, 29, Reals("swiglu", "up"));
  const TensorView y = operands_.Matrix(5, 29);
  SwiGluForward(operands_.stream, {gate, up, y});
  ExpectNear(y, "swiglu", "y");
  SwiGluBackwardArgs backward;
  backward.gate = gate;
  backward.up = up;
  backward.dy = operands_.Matrix(5, 29, Reals("swiglu", "dy"));
  backward.dgate = operands_.Matrix(5, 29);
  backward.dup = operands_.Matrix(5, 29);
  backward.y = operands_.Matrix(5, 29);
  SwiGluBackward(operands_.stream, backward);
  ExpectNear(backward.dgate, "swiglu", "dgate");
  ExpectNear(backward.dup, "swiglu", "dup");
  ExpectNear(backward.y, "swiglu", "y");
}

TEST_F(GoldenTest, RopeOfTwoSequences) {
  const TensorView cosine = operands_.Matrix(7, 5);
  const TensorView sine = operands_.Matrix(7, 5);
  BuildRopeTable(operands_.stream,
                 {operands_.Vector(5, Reals("rope", "inverse_frequency")), cosine, sine});
  const TensorView x = operands_.Matrix(14, 30, Reals("rope", "x"));
  Rope(operands_.stream, {x, 10, 7, cosine, sine, RopeDirection::kForward});
  ExpectNear(x, "rope", "y");
  const TensorView dy = operands_.Matrix(14, 30, Reals("rope", "dy"));
  Rope(operands_.stream, {dy, 10, 7, cosine, sine, RopeDirection::kBackward});
  ExpectNear(dy, "rope", "dx");
}

TEST_F(GoldenTest, GroupedCausalAttention) {
  const AttentionShape shape = {.sequence_tokens = 50,
                                .query_heads = 4,
                                .kv_heads = 2,
                                .head_size = 8,
                                .scale = 1.0f / std::sqrt(8.0f)};
  const TensorView workspace = operands_.Vector(AttentionWorkspaceElements(shape));
  const AttentionForwardArgs forward = {.shape = shape,
                                        .q = operands_.Matrix(50, 32, Reals("attention", "q")),
                                        .k = operands_.Matrix(50, 16, Reals("attention", "k")),
                                        .v = operands_.Matrix(50, 16, Reals("attention", "v")),
                                        .out = operands_.Matrix(50, 32),
                                        .log_sum_exp = operands_.Matrix(4, 50),
                                        .workspace = workspace};
  AttentionForward(operands_.stream, forward);
  ExpectNear(forward.out, "attention", "out");
  const AttentionBackwardArgs backward = {
      .shape = shape,
      .q = forward.q,
      .k = forward.k,
      .v = forward.v,
      .out = forward.out,
      .log_sum_exp = forward.log_sum_exp,
      .dout = operands_.Matrix(50, 32, Reals("attention", "dout")),
      .dq = operands_.Matrix(50, 32),
      .dk = operands_.Matrix(50, 16),
      .dv = operands_.Matrix(50, 16),
      .workspace = workspace};
  AttentionBackward(operands_.stream, backward);
  ExpectNear(backward.dq, "attention", "dq");
  ExpectNear(backward.dk, "attention", "dk");
  ExpectNear(backward.dv, "attention", "dv");
}

TEST_F(GoldenTest, Embedding) {
  const TensorView ids = operands_.Ids(Integers("embedding", "ids"));
  const TensorView out = operands_.Matrix(14, 11);
  EmbeddingForward(operands_.stream,
                   {ids, operands_.Matrix(9, 11, Reals("embedding", "table")), out});
  ExpectNear(out, "embedding", "out", 0);
  const TensorView dtable = operands_.Matrix(9, 11);
  EmbeddingBackward(
      operands_.stream,
      {ids, operands_.Matrix(14, 11, Reals("embedding", "dout")), dtable, Output::kOverwrite});
  ExpectNear(dtable, "embedding", "dtable");
}

TEST_F(GoldenTest, LinearCrossEntropyWithAnIgnoredTarget) {
  LinearCrossEntropyTrainArgs args;
  args.x = operands_.Matrix(13, 10, Reals("head", "x"));
  args.w = operands_.Matrix(23, 10, Reals("head", "w"));
  args.targets = operands_.Ids(Integers("head", "targets"));
  args.loss = operands_.Vector(13);
  args.dx = operands_.Matrix(13, 10);
  args.dw = operands_.Matrix(23, 10);
  args.workspace = operands_.Workspace(13, 23);
  LinearCrossEntropyTrain(operands_.stream, args);
  ExpectNear(args.loss, "head", "loss");
  ExpectNear(args.dx, "head", "dx");
  ExpectNear(args.dw, "head", "dw");
}

TEST_F(GoldenTest, LayerNorm) {
  LayerNormForwardArgs forward;
  forward.x = operands_.Matrix(6, 37, Reals("layer_norm", "x"));
  forward.w = operands_.Vector(37, Reals("layer_norm", "w"));
  forward.b = operands_.Vector(37, Reals("layer_norm", "b"));
  forward.epsilon = 1e-5f;
  forward.y = operands_.Matrix(6, 37);
  forward.mean = operands_.Vector(6);
  forward.rstd = operands_.Vector(6);
  LayerNormForward(operands_.stream, forward);
  ExpectNear(forward.y, "layer_norm", "y");
  LayerNormBackwardArgs backward;
  backward.dy = operands_.Matrix(6, 37, Reals("layer_norm", "dy"));
  backward.x = forward.x;
  backward.w = forward.w;
  backward.mean = forward.mean;
  backward.rstd = forward.rstd;
  backward.dx = backward.dy;  // in place
  backward.dw = operands_.Vector(37);
  backward.db = operands_.Vector(37);
  LayerNormBackward(operands_.stream, backward);
  ExpectNear(backward.dx, "layer_norm", "dx");
  ExpectNear(backward.dw, "layer_norm", "dw");
  ExpectNear(backward.db, "layer_norm", "db");
}

TEST_F(GoldenTest, NormOfEveryHead) {
  const TensorView x = operands_.Matrix(5, 30, Reals("head_norm", "x"));
  const TensorView w = operands_.Vector(10, Reals("head_norm", "w"));
  const TensorView y = operands_.Matrix(5, 30);
  HeadNormForward(operands_.stream, {.x = x, .w = w, .epsilon = 1e-6f, .y = y});
  ExpectNear(y, "head_norm", "y");
  const TensorView dy = operands_.Matrix(5, 30, Reals("head_norm", "dy"));
  const TensorView dw = operands_.Vector(10);
  HeadNormBackward(operands_.stream,
                   {.dy = dy, .x = x, .w = w, .epsilon = 1e-6f, .dx = dy, .dw = dw});
  ExpectNear(dy, "head_norm", "dx");
  ExpectNear(dw, "head_norm", "dw");
}

TEST_F(GoldenTest, Gelu) {
  const TensorView x = operands_.Matrix(5, 29, Reals("gelu", "x"));
  const TensorView y = operands_.Matrix(5, 29);
  GeluForward(operands_.stream, {.x = x, .y = y});
  ExpectNear(y, "gelu", "y", 1e-7);
  const TensorView dx = operands_.Matrix(5, 29);
  const TensorView again = operands_.Matrix(5, 29);
  GeluBackward(operands_.stream,
               {.x = x, .dy = operands_.Matrix(5, 29, Reals("gelu", "dy")), .dx = dx, .y = again});
  ExpectNear(dx, "gelu", "dx", 5e-7);
  ExpectNear(again, "gelu", "y", 1e-7);
}

TEST_F(GoldenTest, LearnedPositionsOfTwoSequences) {
  const TensorView x = operands_.Matrix(14, 11, Reals("positions", "x"));
  AddPositions(operands_.stream,
               {.x = x,
                .table = operands_.Matrix(9, 11, Reals("positions", "table")),
                .sequence_tokens = 7});
  ExpectNear(x, "positions", "y");
  const TensorView dtable = operands_.Matrix(9, 11);
  PositionGradient(operands_.stream,
                   {.dx = operands_.Matrix(14, 11, Reals("positions", "dy")),
                    .dtable = dtable,
                    .sequence_tokens = 7});
  ExpectNear(dtable, "positions", "dtable");
}

TEST_F(GoldenTest, FiveStepsOfAdamW) {
  const TensorView p = operands_.Vector(19, Reals("adamw", "p0"));
  const TensorView m = operands_.Vector(19, std::vector<double>(19));
  const TensorView v = operands_.Vector(19, std::vector<double>(19));
  const UpdateHyper hyper = {.weight_decay = 0.1, .learning_rate = 0.01};
  for (int64_t t = 1; t <= 5; ++t) {
    const TensorView g = operands_.Vector(19, Reals("adamw", "g" + std::to_string(t)));
    AdamWUpdate(operands_.stream, {p, g, m, v, MakeUpdateScalars(hyper, t, 1.0f)});
  }
  ExpectNear(p, "adamw", "p", 1e-6);
  ExpectNear(m, "adamw", "m", 1e-6);
  ExpectNear(v, "adamw", "v", 1e-6);
}

}  // namespace
}  // namespace ravel::kernels::testing
