#include <algorithm>
#include <cmath>

#include <absl/strings/str_cat.h>

#include "kernels/activation.h"
#include "kernels/embedding.h"
#include "kernels/gemm.h"
#include "kernels/loss.h"
#include "kernels/norm.h"
#include "kernels/rope.h"
#include "tests/kernels/op_case.h"
#include "tests/kernels/op_cases_attention.h"
#include "tests/kernels/op_cases_layers.h"
#include "tests/kernels/op_cases_parts.h"

namespace ravel::kernels::testing {
namespace {

using Kind = InputSpec::Kind;

double At(const std::vector<double>& matrix, int64_t columns, int64_t row, int64_t column) {
  return matrix[static_cast<size_t>(row * columns + column)];
}

double& At(std::vector<double>& matrix, int64_t columns, int64_t row, int64_t column) {
  return matrix[static_cast<size_t>(row * columns + column)];
}

std::vector<double> Zeros(int64_t n) {
  return std::vector<double>(static_cast<size_t>(n));
}

// -- matrix product

struct GemmShape {
  int64_t m;
  int64_t n;
  int64_t k;
  Transpose transpose_a;
  Transpose transpose_b;
  Output output;
};

Values GemmOracle(const GemmShape& s, const Values& inputs) {
  std::vector<double> c = s.output == Output::kAccumulate ? inputs[2] : Zeros(s.m * s.n);
  for (int64_t i = 0; i < s.m; ++i) {
    for (int64_t j = 0; j < s.n; ++j) {
      for (int64_t p = 0; p < s.k; ++p) {
        const double a =
            s.transpose_a == Transpose::kYes ? At(inputs[0], s.m, p, i) : At(inputs[0], s.k, i, p);
        const double b =
            s.transpose_b == Transpose::kYes ? At(inputs[1], s.k, j, p) : At(inputs[1], s.n, p, j);
        At(c, s.n, i, j) += a * b;
      }
    }
  }
  return {c};
}

Results GemmForward(const GemmShape& s, Operands& operands, const Values& inputs) {
  const bool flip_a = s.transpose_a == Transpose::kYes;
  const bool flip_b = s.transpose_b == Transpose::kYes;
  const TensorView a = operands.Matrix(flip_a ? s.k : s.m, flip_a ? s.m : s.k, inputs[0]);
  const TensorView b = operands.Matrix(flip_b ? s.n : s.k, flip_b ? s.k : s.n, inputs[1]);
  const TensorView c = s.output == Output::kAccumulate ? operands.Gradient(s.m, s.n, inputs[2])
                                                       : operands.Gradient(s.m, s.n);
  Gemm(operands.stream,
       {.a = a,
        .transpose_a = s.transpose_a,
        .b = b,
        .transpose_b = s.transpose_b,
        .c = c,
        .output = s.output});
  return {Read(c)};
}

void AddGemmCases(std::vector<OpCase>& cases) {
  const int64_t sizes[][3] = {{1, 1, 1},
                              {5, 7, 3},
                              {33, 17, 40},
                              {64, 96, 128},
                              {130, 65, 257},
                              {401, 100, 33},   // more rows than are packed at a time for one
                              {1551, 530, 10},  // block of columns, and for several
                              {13, 1570, 40},   // more than a block of columns,
                              {9, 35, 1100},    // than a section of the inner index,
                              {200, 530, 600},  // than one of each
                              {4, 5, 0},
                              {0, 5, 4},
                              {5, 0, 4}};
  for (const auto& size : sizes) {
    for (int variant = 0; variant < 8; ++variant) {
      const GemmShape s = {size[0],
                           size[1],
                           size[2],
                           (variant & 1) != 0 ? Transpose::kYes : Transpose::kNo,
                           (variant & 2) != 0 ? Transpose::kYes : Transpose::kNo,
                           (variant & 4) != 0 ? Output::kAccumulate : Output::kOverwrite};
      OpCase& c = cases.emplace_back();
      c.name = absl::StrCat("Gemm_", s.m, "x", s.n, "x", s.k, "_v", variant);
      c.inputs = {{"a", s.m * s.k}, {"b", s.k * s.n}, {"c", s.m * s.n}};
      c.oracle = [s](const Values& in) { return GemmOracle(s, in); };
      c.forward = [s](Operands& o, const Values& in) { return GemmForward(s, o, in); };
    }
  }
}

// -- RMSNorm

struct NormShape {
  int64_t tokens;
  int64_t hidden;
  bool residual;
};
constexpr double kEpsilon = 1e-5;

// Outputs: y, and the sum when there is a residual.
Values NormOracle(const NormShape& s, const Values& inputs) {
  std::vector<double> sum = inputs[0];
  for (size_t i = 0; s.residual && i < sum.size(); ++i) {
    sum[i] += inputs[2][i];
  }
  std::vector<double> y = Zeros(s.tokens * s.hidden);
  for (int64_t t = 0; t < s.tokens; ++t) {
    double squares = 0;
    for (int64_t j = 0; j < s.hidden; ++j) {
      squares += At(sum, s.hidden, t, j) * At(sum, s.hidden, t, j);
    }
    const double rstd = 1 / std::sqrt(squares / static_cast<double>(s.hidden) + kEpsilon);
    for (int64_t j = 0; j < s.hidden; ++j) {
      At(y, s.hidden, t, j) = At(sum, s.hidden, t, j) * rstd * inputs[1][static_cast<size_t>(j)];
    }
  }
  return s.residual ? Values{y, sum} : Values{y};
}

RmsNormForwardArgs NormArgs(const NormShape& s, Operands& operands, const Values& inputs) {
  RmsNormForwardArgs args;
  args.x = operands.Matrix(s.tokens, s.hidden, inputs[0]);
  args.w = operands.Vector(s.hidden, inputs[1]);
  args.epsilon = static_cast<float>(kEpsilon);
  if (s.residual) {
    args.residual = operands.Matrix(s.tokens, s.hidden, inputs[2]);
  }
  args.sum = operands.Matrix(s.tokens, s.hidden);
  args.y = operands.Matrix(s.tokens, s.hidden);
  args.rstd = operands.Floats(s.tokens);
  RmsNormForward(operands.stream, args);
  return args;
}

Results NormBackward(const NormShape& s,
                     Operands& operands,
                     const Values& inputs,
                     const Values& cotangents) {
  const RmsNormForwardArgs forward = NormArgs(s, operands, inputs);
  RmsNormBackwardArgs args;
  args.dy = operands.Matrix(s.tokens, s.hidden, cotangents[0]);
  args.sum = forward.sum;
  args.w = forward.w;
  args.rstd = forward.rstd;
  if (s.residual) {
    args.dresidual = operands.Matrix(s.tokens, s.hidden, cotangents[1]);
  }
  args.dx = operands.Matrix(s.tokens, s.hidden);
  args.dw = operands.Gradient(s.hidden);
  RmsNormBackward(operands.stream, args);
  Results results = {Read(args.dx), Read(args.dw)};
  if (s.residual) {
    results.push_back(results[0]);
  }
  return results;
}

void AddNormCases(std::vector<OpCase>& cases) {
  for (const NormShape& s : {NormShape{3, 1, false},
                             NormShape{4, 7, true},
                             NormShape{5, 64, false},
                             NormShape{2, 257, true},
                             NormShape{0, 16, true}}) {
    OpCase& c = cases.emplace_back();
    c.name = absl::StrCat("RmsNorm_", s.tokens, "x", s.hidden, s.residual ? "_residual" : "");
    c.inputs = {{"x", s.tokens * s.hidden}, {"w", s.hidden}};
    if (s.residual) {
      c.inputs.push_back({"residual", s.tokens * s.hidden});
    }
    c.oracle = [s](const Values& in) { return NormOracle(s, in); };
    c.forward = [s](Operands& o, const Values& in) {
      const RmsNormForwardArgs args = NormArgs(s, o, in);
      return s.residual ? Results{Read(args.y), Read(args.sum)} : Results{Read(args.y)};
    };
    c.backward = [s](Operands& o, const Values& in, const Values& d) {
      return NormBackward(s, o, in, d);
    };
  }
}

// -- SwiGLU

void AddSwiGluCases(std::vector<OpCase>& cases) {
  for (const auto& [rows, columns] :
       std::vector<std::pair<int64_t, int64_t>>{{1, 1}, {3, 13}, {5, 64}, {0, 8}, {2, 0}}) {
    OpCase& c = cases.emplace_back();
    c.name = absl::StrCat("SwiGlu_", rows, "x", columns);
    c.inputs = {{"gate", rows * columns}, {"up", rows * columns}};
    c.oracle = [](const Values& in) {
      std::vector<double> y = in[1];
      for (size_t i = 0; i < y.size(); ++i) {
        y[i] *= in[0][i] / (1 + std::exp(-in[0][i]));
      }
      return Values{y};
    };
    c.forward = [rows = rows, columns = columns](Operands& o, const Values& in) {
      const SwiGluForwardArgs args = {
          o.Matrix(rows, columns, in[0]), o.Matrix(rows, columns, in[1]), o.Matrix(rows, columns)};
      SwiGluForward(o.stream, args);
      return Results{Read(args.y)};
    };
    c.backward = [rows = rows, columns = columns](Operands& o, const Values& in, const Values& d) {
      const TensorView gate = o.Matrix(rows, columns, in[0]);
      const TensorView up = o.Matrix(rows, columns, in[1]);
      SwiGluBackward(o.stream,
                     {.gate = gate,
                      .up = up,
                      .dy = o.Matrix(rows, columns, d[0]),
                      .dgate = gate,  // in place
                      .dup = up,
                      .y = o.Matrix(rows, columns)});
      return Results{Read(gate), Read(up)};
    };
  }
}

// -- rotary embedding

struct RopeShape {
  int64_t tokens;
  int64_t heads;
  int64_t head_size;
  int64_t sequence_tokens;
};

Values RopeOracle(const RopeShape& s, const Values& inputs) {
  std::vector<double> y = inputs[0];
  const int64_t half = s.head_size / 2;
  for (int64_t t = 0; t < s.tokens; ++t) {
    for (int64_t head = 0; head < s.heads; ++head) {
      for (int64_t j = 0; j < half; ++j) {
        const int64_t columns = s.heads * s.head_size;
        const double angle =
            static_cast<double>(t % s.sequence_tokens) * inputs[1][static_cast<size_t>(j)];
        const double a = At(inputs[0], columns, t, head * s.head_size + j);
        const double b = At(inputs[0], columns, t, head * s.head_size + half + j);
        At(y, columns, t, head * s.head_size + j) = a * std::cos(angle) - b * std::sin(angle);
        At(y, columns, t, head * s.head_size + half + j) =
            b * std::cos(angle) + a * std::sin(angle);
      }
    }
  }
  return {y};
}

Results RopeInPlace(const RopeShape& s,
                    Operands& operands,
                    const std::vector<double>& values,
                    const std::vector<double>& frequency,
                    RopeDirection direction) {
  const TensorView x = operands.Matrix(s.tokens, s.heads * s.head_size, values);
  const TensorView cosine = operands.Floats(s.sequence_tokens, s.head_size / 2);
  const TensorView sine = operands.Floats(s.sequence_tokens, s.head_size / 2);
  BuildRopeTable(operands.stream, {operands.Floats(s.head_size / 2, frequency), cosine, sine});
  Rope(operands.stream, {x, s.head_size, s.sequence_tokens, cosine, sine, direction});
  return {Read(x)};
}

void AddRopeCases(std::vector<OpCase>& cases) {
  for (const RopeShape& s : {RopeShape{3, 1, 2, 3},
                             RopeShape{8, 3, 10, 4},
                             RopeShape{6, 2, 64, 6},
                             RopeShape{0, 2, 8, 4}}) {
    OpCase& c = cases.emplace_back();
    c.name = absl::StrCat("Rope_", s.tokens, "x", s.heads, "x", s.head_size);
    c.inputs = {{"x", s.tokens * s.heads * s.head_size},
                {"inverse_frequency", s.head_size / 2, Kind::kConstant}};
    c.oracle = [s](const Values& in) { return RopeOracle(s, in); };
    c.forward = [s](Operands& o, const Values& in) {
      return RopeInPlace(s, o, in[0], in[1], RopeDirection::kForward);
    };
    c.backward = [s](Operands& o, const Values& in, const Values& d) {
      return RopeInPlace(s, o, d[0], in[1], RopeDirection::kBackward);
    };
  }
}

// -- embedding

void AddEmbeddingCases(std::vector<OpCase>& cases) {
  for (const auto& [tokens, hidden] :
       std::vector<std::pair<int64_t, int64_t>>{{1, 1}, {9, 13}, {20, 32}, {600, 4}, {0, 8}}) {
    const int64_t vocabulary = 7;
    OpCase& c = cases.emplace_back();
    c.name = absl::StrCat("Embedding_", tokens, "x", hidden);
    c.inputs = {{"ids", tokens, Kind::kIds, vocabulary}, {"table", vocabulary * hidden}};
    c.oracle = [hidden = hidden](const Values& in) {
      std::vector<double> y;
      for (const double id : in[0]) {
        const auto row = in[1].begin() + static_cast<int64_t>(id) * hidden;
        y.insert(y.end(), row, row + hidden);
      }
      return Values{y};
    };
    c.forward = [=, tokens = tokens, hidden = hidden](Operands& o, const Values& in) {
      const TensorView out = o.Matrix(tokens, hidden);
      EmbeddingForward(o.stream, {o.Ids(in[0]), o.Matrix(vocabulary, hidden, in[1]), out});
      return Results{Read(out)};
    };
    c.backward = [=, tokens = tokens, hidden = hidden](
                     Operands& o, const Values& in, const Values& d) {
      const TensorView dtable = o.Gradient(vocabulary, hidden);
      EmbeddingBackward(o.stream,
                        {o.Ids(in[0]), o.Matrix(tokens, hidden, d[0]), dtable, Output::kOverwrite});
      return Results{Read(dtable)};
    };
  }
}

// -- head and cross-entropy

struct HeadShape {
  int64_t tokens;
  int64_t hidden;
  int64_t vocabulary;
  int64_t chunk_tokens;  // rows of the workspace
};

Values HeadOracle(const HeadShape& s, const Values& inputs) {
  std::vector<double> loss = Zeros(s.tokens);
  for (int64_t t = 0; t < s.tokens; ++t) {
    std::vector<double> logits = Zeros(s.vocabulary);
    for (int64_t v = 0; v < s.vocabulary; ++v) {
      for (int64_t j = 0; j < s.hidden; ++j) {
        logits[static_cast<size_t>(v)] +=
            At(inputs[0], s.hidden, t, j) * At(inputs[1], s.hidden, v, j);
      }
    }
    const double max = *std::max_element(logits.begin(), logits.end());
    double sum = 0;
    for (const double logit : logits) {
      sum += std::exp(logit - max);
    }
    const auto target = static_cast<int64_t>(inputs[2][static_cast<size_t>(t)]);
    if (target >= 0) {
      loss[static_cast<size_t>(t)] = max + std::log(sum) - logits[static_cast<size_t>(target)];
    }
  }
  return {loss};
}

Results HeadForward(const HeadShape& s, Operands& operands, const Values& inputs) {
  const TensorView loss = operands.Floats(s.tokens);
  LinearCrossEntropyForward(operands.stream,
                            {.x = operands.Matrix(s.tokens, s.hidden, inputs[0]),
                             .w = operands.Matrix(s.vocabulary, s.hidden, inputs[1]),
                             .targets = operands.Ids(inputs[2]),
                             .loss = loss,
                             .workspace = operands.Workspace(s.chunk_tokens, s.vocabulary)});
  return {Read(loss)};
}

Results HeadBackward(const HeadShape& s, Operands& operands, const Values& inputs) {
  LinearCrossEntropyTrainArgs args = {
      .x = operands.Matrix(s.tokens, s.hidden, inputs[0]),
      .w = operands.Matrix(s.vocabulary, s.hidden, inputs[1]),
      .targets = operands.Ids(inputs[2]),
      .loss = operands.Floats(s.tokens),
      .dx = operands.Matrix(s.tokens, s.hidden),
      .dw = operands.Gradient(s.vocabulary, s.hidden),
      .dw_output = Output::kOverwrite,
      .workspace = operands.Workspace(s.chunk_tokens, s.vocabulary)};
  LinearCrossEntropyTrain(operands.stream, args);
  return {Read(args.dx), Read(args.dw)};
}

void AddHeadCases(std::vector<OpCase>& cases) {
  // Chunks that are the tokens, more, fewer, and one token each; the last chunk whole or not.
  for (const HeadShape& s : {HeadShape{1, 1, 1, 1},
                             HeadShape{5, 6, 11, 5},
                             HeadShape{5, 6, 11, 64},
                             HeadShape{9, 8, 64, 9},
                             HeadShape{9, 8, 24, 4},
                             HeadShape{8, 6, 11, 4},
                             HeadShape{3, 6, 11, 1},
                             HeadShape{259, 2, 5, 256},
                             HeadShape{0, 4, 6, 0}}) {
    OpCase& c = cases.emplace_back();
    c.name = absl::StrCat(
        "LinearCrossEntropy_", s.tokens, "x", s.hidden, "x", s.vocabulary, "_by_", s.chunk_tokens);
    c.inputs = {{"x", s.tokens * s.hidden},
                {"w", s.vocabulary * s.hidden},
                {"targets", s.tokens, Kind::kIds, s.vocabulary, -1}};
    c.oracle = [s](const Values& in) { return HeadOracle(s, in); };
    c.forward = [s](Operands& o, const Values& in) { return HeadForward(s, o, in); };
    // The op gives the gradient of the sum: the test's cotangents are ones.
    c.backward = [s](Operands& o, const Values& in, const Values&) {
      return HeadBackward(s, o, in);
    };
    c.unit_cotangents = true;
  }
}

}  // namespace

std::vector<OpCase> AllOpCases() {
  std::vector<OpCase> cases;
  AddGemmCases(cases);
  AddNormCases(cases);
  AddSwiGluCases(cases);
  AddRopeCases(cases);
  AddEmbeddingCases(cases);
  AddHeadCases(cases);
  AddAttentionCases(cases);
  AddLayerCases(cases);
  AddPartCases(cases);
  return cases;
}

}  // namespace ravel::kernels::testing
