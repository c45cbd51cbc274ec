#include "tests/kernels/op_cases_parts.h"

#include <algorithm>
#include <cmath>

#include <absl/strings/str_cat.h>

#include "kernels/part_sum.h"
#include "kernels/vocabulary_loss.h"

namespace ravel::kernels::testing {
namespace {

using Kind = InputSpec::Kind;

struct SumShape {
  int64_t rows;
  int64_t columns;
  int64_t pieces;
  bool residual;
  bool bias;
};

Values SumOracle(const SumShape& s, const Values& in) {
  const auto columns = static_cast<size_t>(s.columns);
  std::vector<double> sums(static_cast<size_t>(s.rows) * columns);
  for (size_t i = 0; i < sums.size(); ++i) {
    sums[i] = (s.residual ? in[0][i] : 0.0) + (s.bias ? in[1][i % columns] : 0.0);
    for (size_t piece = 2; piece < in.size(); ++piece) {
      sums[i] += in[piece][i];
    }
  }
  return {sums};
}

Results SumForward(const SumShape& s, Operands& operands, const Values& in) {
  SumPartsArgs args = {.pieces = {}, .out = operands.Matrix(s.rows, s.columns)};
  for (size_t piece = 2; piece < in.size(); ++piece) {
    const TensorView view = operands.Floats(s.rows * s.columns, in[piece]);
    args.pieces.push_back(MatrixView(view.As<float>(), s.rows, s.columns));
  }
  if (s.residual) {
    args.residual = operands.Matrix(s.rows, s.columns, in[0]);
  }
  if (s.bias) {
    args.bias = operands.Vector(s.columns, in[1]);
  }
  SumParts(operands.stream, args);
  return {Read(args.out)};
}

void AddSumCases(std::vector<OpCase>& cases) {
  for (const SumShape s : {SumShape{3, 16, 1, false, false},
                           SumShape{3, 16, 1, true, true},
                           SumShape{5, 11, 2, true, false},
                           SumShape{4, 8, 2, false, true},
                           SumShape{2, 37, 4, true, true},
                           SumShape{1, 64, 8, false, false},
                           SumShape{3, 9, 16, true, true},
                           SumShape{0, 9, 2, true, true}}) {
    OpCase& c = cases.emplace_back();
    c.name = absl::StrCat("SumParts_",
                          s.rows,
                          "x",
                          s.columns,
                          "_of_",
                          s.pieces,
                          s.residual ? "_residual" : "",
                          s.bias ? "_bias" : "");
    c.inputs = {{"residual", s.rows * s.columns}, {"bias", s.columns}};
    for (int64_t piece = 0; piece < s.pieces; ++piece) {
      c.inputs.push_back({absl::StrCat("piece", piece), s.rows * s.columns});
    }
    c.oracle = [s](const Values& in) { return SumOracle(s, in); };
    c.forward = [s](Operands& o, const Values& in) { return SumForward(s, o, in); };
  }
}

struct LossShape {
  int64_t tokens;
  int64_t vocabulary;
  int64_t blocks;
  int64_t block_rows;
};

Values LossOracle(const LossShape& s, const Values& in) {
  std::vector<double> loss(static_cast<size_t>(s.tokens));
  for (size_t t = 0; t < loss.size(); ++t) {
    const auto row = in[0].begin() + static_cast<int64_t>(t) * s.vocabulary;
    const double max = *std::max_element(row, row + s.vocabulary);
    double sum = 0;
    for (int64_t j = 0; j < s.vocabulary; ++j) {
      sum += std::exp(row[j] - max);
    }
    const auto target = static_cast<int64_t>(in[1][t]);
    loss[t] = target < 0 ? 0.0 : max + std::log(sum) - row[target];
  }
  return {loss};
}

// The losses, and the logits as they are after the last pass.
Results RunLoss(const LossShape& s, Operands& operands, const Values& in, bool gradient) {
  const TensorView logits = operands.Matrix(s.tokens, s.vocabulary, in[0]);
  const TensorView targets = operands.Ids(in[1]);
  const TensorView loss = operands.Floats(s.tokens);
  const TensorView flat = operands.Floats(3 * s.blocks * s.tokens);
  const TensorView statistics = MatrixView(flat.As<float>(), 3 * s.blocks, s.tokens);
  const auto block = [&](int64_t b) {
    const int64_t first = std::min(b * s.block_rows, s.vocabulary);
    const int64_t rows = std::min(s.block_rows, s.vocabulary - first);
    return VocabularyGradientArgs{.logits = ColumnsOf(logits, first, rows),
                                  .targets = targets,
                                  .first_id = first,
                                  .statistics = RowsOf(statistics, 3 * b, 3)};
  };
  for (int64_t b = 0; b < s.blocks; ++b) {
    const VocabularyGradientArgs at = block(b);
    VocabularyStatistics(operands.stream, {at.logits, at.targets, at.first_id, at.statistics});
  }
  VocabularyLoss(
      operands.stream,
      {.statistics = statistics, .targets = targets, .vocabulary = s.vocabulary, .loss = loss});
  for (int64_t b = 0; gradient && b < s.blocks; ++b) {
    VocabularyGradient(operands.stream, block(b));
  }
  return {Read(gradient ? logits : loss)};
}

void AddLossCases(std::vector<OpCase>& cases) {
  for (const LossShape s : {LossShape{5, 11, 1, 16},
                            LossShape{5, 13, 2, 8},
                            LossShape{7, 32, 4, 8},
                            LossShape{4, 9, 4, 8},
                            LossShape{3, 100, 16, 8},
                            LossShape{0, 9, 2, 8}}) {
    OpCase& c = cases.emplace_back();
    c.name = absl::StrCat("VocabularyLoss_", s.tokens, "x", s.vocabulary, "_in_", s.blocks);
    c.inputs = {{"logits", s.tokens * s.vocabulary},
                {"targets", s.tokens, Kind::kIds, s.vocabulary, -1}};
    c.oracle = [s](const Values& in) { return LossOracle(s, in); };
    c.forward = [s](Operands& o, const Values& in) { return RunLoss(s, o, in, false); };
    c.backward = [s](Operands& o, const Values& in, const Values&) {
      return RunLoss(s, o, in, true);
    };
    c.unit_cotangents = true;
  }
}

}  // namespace

void AddPartCases(std::vector<OpCase>& cases) {
  AddSumCases(cases);
  AddLossCases(cases);
}

}  // namespace ravel::kernels::testing
