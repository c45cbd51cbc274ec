#include "tests/kernels/op_cases_layers.h"

#include <cmath>
#include <utility>

#include <absl/strings/str_cat.h>

#include "kernels/activation.h"
#include "kernels/bias.h"
#include "kernels/embedding.h"
#include "kernels/norm.h"

namespace ravel::kernels::testing {
namespace {

using Kind = InputSpec::Kind;

constexpr double kEpsilon = 1e-5;

struct Sizes {
  int64_t rows;
  int64_t columns;
};

size_t At(const Sizes& s, int64_t row, int64_t column) {
  return static_cast<size_t>(row * s.columns + column);
}

// -- LayerNorm

Values LayerNormOracle(const Sizes& s, const Values& in) {
  std::vector<double> y(in[0].size());
  for (int64_t row = 0; row < s.rows; ++row) {
    double mean = 0;
    double variance = 0;
    for (int64_t j = 0; j < s.columns; ++j) {
      mean += in[0][At(s, row, j)] / static_cast<double>(s.columns);
    }
    for (int64_t j = 0; j < s.columns; ++j) {
      variance += std::pow(in[0][At(s, row, j)] - mean, 2) / static_cast<double>(s.columns);
    }
    for (int64_t j = 0; j < s.columns; ++j) {
      const auto column = static_cast<size_t>(j);
      y[At(s, row, j)] =
          (in[0][At(s, row, j)] - mean) / std::sqrt(variance + kEpsilon) * in[1][column] +
          in[2][column];
    }
  }
  return {y};
}

LayerNormForwardArgs RunLayerNorm(const Sizes& s, Operands& operands, const Values& in) {
  LayerNormForwardArgs args;
  args.x = operands.Matrix(s.rows, s.columns, in[0]);
  args.w = operands.Vector(s.columns, in[1]);
  args.b = operands.Vector(s.columns, in[2]);
  args.epsilon = static_cast<float>(kEpsilon);
  args.copy = operands.Matrix(s.rows, s.columns);
  args.y = operands.Matrix(s.rows, s.columns);
  args.mean = operands.Floats(s.rows);
  args.rstd = operands.Floats(s.rows);
  LayerNormForward(operands.stream, args);
  return args;
}

Results LayerNormGradients(const Sizes& s,
                           Operands& operands,
                           const Values& in,
                           const Values& cotangents) {
  const LayerNormForwardArgs forward = RunLayerNorm(s, operands, in);
  LayerNormBackwardArgs args;
  args.dy = operands.Matrix(s.rows, s.columns, cotangents[0]);
  args.x = forward.copy;
  args.w = forward.w;
  args.mean = forward.mean;
  args.rstd = forward.rstd;
  args.dx = args.dy;  // in place
  args.dw = operands.Gradient(s.columns);
  args.db = operands.Gradient(s.columns);
  LayerNormBackward(operands.stream, args);
  return {Read(args.dx), Read(args.dw), Read(args.db)};
}

void AddLayerNormCases(std::vector<OpCase>& cases) {
  for (const Sizes& s : {Sizes{3, 2}, Sizes{4, 7}, Sizes{5, 64}, Sizes{2, 257}, Sizes{0, 16}}) {
    OpCase& c = cases.emplace_back();
    c.name = absl::StrCat("LayerNorm_", s.rows, "x", s.columns);
    c.inputs = {{"x", s.rows * s.columns}, {"w", s.columns}, {"b", s.columns}};
    c.oracle = [s](const Values& in) { return LayerNormOracle(s, in); };
    c.forward = [s](Operands& o, const Values& in) {
      return Results{Read(RunLayerNorm(s, o, in).y)};
    };
    c.backward = [s](Operands& o, const Values& in, const Values& d) {
      return LayerNormGradients(s, o, in, d);
    };
    // Two columns are +-1 but for epsilon: their slope is what is left of a difference of ones.
    c.backward_tolerance = s.columns == 2 ? 2e-4 : 2e-5;
  }
}

// -- RMSNorm per head

struct HeadSizes {
  int64_t tokens;
  int64_t heads;
  int64_t size;
};

Values HeadNormOracle(const HeadSizes& s, const Values& in) {
  std::vector<double> y(in[0].size());
  for (size_t head = 0; head < y.size(); head += static_cast<size_t>(s.size)) {
    double squares = 0;
    for (size_t j = 0; j < static_cast<size_t>(s.size); ++j) {
      squares += in[0][head + j] * in[0][head + j];
    }
    const double root = std::sqrt(squares / static_cast<double>(s.size) + kEpsilon);
    for (size_t j = 0; j < static_cast<size_t>(s.size); ++j) {
      y[head + j] = in[0][head + j] / root * in[1][j];
    }
  }
  return {y};
}

void AddHeadNormCases(std::vector<OpCase>& cases) {
  for (const HeadSizes& s :
       {HeadSizes{3, 2, 1}, HeadSizes{4, 3, 10}, HeadSizes{5, 2, 64}, HeadSizes{0, 2, 8}}) {
    const int64_t columns = s.heads * s.size;
    OpCase& c = cases.emplace_back();
    c.name = absl::StrCat("HeadNorm_", s.tokens, "x", s.heads, "x", s.size);
    c.inputs = {{"x", s.tokens * columns}, {"w", s.size}};
    c.oracle = [s](const Values& in) { return HeadNormOracle(s, in); };
    c.forward = [=](Operands& o, const Values& in) {
      const TensorView x = o.Matrix(s.tokens, columns, in[0]);
      HeadNormForward(o.stream,
                      {.x = x,
                       .w = o.Vector(s.size, in[1]),
                       .epsilon = static_cast<float>(kEpsilon),
                       .y = x});  // in place
      return Results{Read(x)};
    };
    c.backward = [=](Operands& o, const Values& in, const Values& d) {
      const TensorView dy = o.Matrix(s.tokens, columns, d[0]);
      const TensorView dw = o.Gradient(s.size);
      HeadNormBackward(o.stream,
                       {.dy = dy,
                        .x = o.Matrix(s.tokens, columns, in[0]),
                        .w = o.Vector(s.size, in[1]),
                        .epsilon = static_cast<float>(kEpsilon),
                        .dx = dy,  // in place
                        .dw = dw});
      return Results{Read(dy), Read(dw)};
    };
  }
}

// -- GELU

double Gelu(double x) {
  return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}

void AddGeluCases(std::vector<OpCase>& cases) {
  for (const Sizes& s : {Sizes{1, 1}, Sizes{3, 13}, Sizes{5, 64}, Sizes{0, 8}, Sizes{2, 0}}) {
    OpCase& c = cases.emplace_back();
    c.name = absl::StrCat("Gelu_", s.rows, "x", s.columns);
    c.inputs = {{"x", s.rows * s.columns}};
    c.oracle = [](const Values& in) {
      std::vector<double> y = in[0];
      for (double& value : y) {
        value = Gelu(value);
      }
      return Values{y};
    };
    c.forward = [s](Operands& o, const Values& in) {
      const TensorView y = o.Matrix(s.rows, s.columns);
      GeluForward(o.stream, {.x = o.Matrix(s.rows, s.columns, in[0]), .y = y});
      return Results{Read(y)};
    };
    c.backward = [s](Operands& o, const Values& in, const Values& d) {
      const TensorView x = o.Matrix(s.rows, s.columns, in[0]);
      GeluBackward(o.stream,
                   {.x = x,
                    .dy = o.Matrix(s.rows, s.columns, d[0]),
                    .dx = x,  // in place
                    .y = o.Matrix(s.rows, s.columns)});
      return Results{Read(x)};
    };
  }
}

// -- bias

void AddBiasCases(std::vector<OpCase>& cases) {
  for (const Sizes& s : {Sizes{1, 1}, Sizes{7, 13}, Sizes{33, 64}, Sizes{0, 8}, Sizes{3, 0}}) {
    for (const Output output : {Output::kOverwrite, Output::kAccumulate}) {
      const bool adds = output == Output::kAccumulate;
      OpCase& c = cases.emplace_back();
      c.name = absl::StrCat(adds ? "AddBias_" : "SetBias_", s.rows, "x", s.columns);
      c.inputs = {{"bias", s.columns}};
      if (adds) {
        c.inputs.push_back({"y", s.rows * s.columns, Kind::kConstant});
      }
      c.oracle = [=](const Values& in) {
        std::vector<double> y =
            adds ? in[1] : std::vector<double>(static_cast<size_t>(s.rows * s.columns));
        for (size_t i = 0; i < y.size(); ++i) {
          y[i] += in[0][i % static_cast<size_t>(s.columns)];
        }
        return Values{y};
      };
      c.forward = [=](Operands& o, const Values& in) {
        const TensorView y =
            adds ? o.Matrix(s.rows, s.columns, in[1]) : o.Matrix(s.rows, s.columns);
        AddBias(o.stream, {.bias = o.Vector(s.columns, in[0]), .y = y, .output = output});
        return Results{Read(y)};
      };
      c.backward = [=](Operands& o, const Values&, const Values& d) {
        const std::vector<double> zeros(static_cast<size_t>(s.columns));
        const TensorView db = adds ? o.Gradient(s.columns, zeros) : o.Gradient(s.columns);
        BiasGradient(o.stream,
                     {.dy = o.Matrix(s.rows, s.columns, d[0]), .db = db, .output = output});
        return Results{Read(db)};
      };
    }
  }
}

// -- learned positions

void AddPositionCases(std::vector<OpCase>& cases) {
  constexpr int64_t kPositions = 6;
  constexpr int64_t kSequence = 4;
  for (const Sizes& s : {Sizes{1, 1}, Sizes{8, 13}, Sizes{12, 32}, Sizes{0, 8}}) {
    OpCase& c = cases.emplace_back();
    c.name = absl::StrCat("AddPositions_", s.rows, "x", s.columns);
    c.inputs = {{"x", s.rows * s.columns, Kind::kConstant}, {"table", kPositions * s.columns}};
    c.oracle = [s](const Values& in) {
      std::vector<double> y = in[0];
      for (int64_t row = 0; row < s.rows; ++row) {
        for (int64_t j = 0; j < s.columns; ++j) {
          y[At(s, row, j)] += in[1][At(s, row % kSequence, j)];
        }
      }
      return Values{y};
    };
    c.forward = [s](Operands& o, const Values& in) {
      const TensorView x = o.Matrix(s.rows, s.columns, in[0]);
      AddPositions(
          o.stream,
          {.x = x, .table = o.Matrix(kPositions, s.columns, in[1]), .sequence_tokens = kSequence});
      return Results{Read(x)};
    };
    c.backward = [s](Operands& o, const Values&, const Values& d) {
      const TensorView dtable = o.Gradient(kPositions, s.columns);
      PositionGradient(o.stream,
                       {.dx = o.Matrix(s.rows, s.columns, d[0]),
                        .dtable = dtable,
                        .sequence_tokens = kSequence,
                        .output = Output::kOverwrite});
      return Results{Read(dtable)};
    };
  }
}

}  // namespace

void AddLayerCases(std::vector<OpCase>& cases) {
  AddLayerNormCases(cases);
  AddHeadNormCases(cases);
  AddGeluCases(cases);
  AddBiasCases(cases);
  AddPositionCases(cases);
}

}  // namespace ravel::kernels::testing
