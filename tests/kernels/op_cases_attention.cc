#include "tests/kernels/op_cases_attention.h"

#include <algorithm>
#include <cmath>

#include <absl/strings/str_cat.h>

#include "kernels/attention.h"

namespace ravel::kernels::testing {
namespace {

struct Case {
  int64_t sequences;
  AttentionShape shape;

  int64_t tokens() const { return sequences * shape.sequence_tokens; }
  int64_t query_columns() const { return shape.query_heads * shape.head_size; }
  int64_t kv_columns() const { return shape.kv_heads * shape.head_size; }
};

// One query of one head: softmax over the keys of its sequence up to itself.
void OracleRow(const Case& c, const Values& in, int64_t token, int64_t head, double* out) {
  const AttentionShape& s = c.shape;
  const int64_t kv = head / (s.query_heads / s.kv_heads);
  const int64_t first = token / s.sequence_tokens * s.sequence_tokens;
  const double* q = in[0].data() + token * c.query_columns() + head * s.head_size;
  std::vector<double> score;
  for (int64_t key = first; key <= token; ++key) {
    const double* k = in[1].data() + key * c.kv_columns() + kv * s.head_size;
    double dot = 0;
    for (int64_t j = 0; j < s.head_size; ++j) {
      dot += q[j] * k[j];
    }
    score.push_back(dot * static_cast<double>(s.scale));
  }
  const double max = *std::max_element(score.begin(), score.end());
  double sum = 0;
  for (double& value : score) {
    value = std::exp(value - max);
    sum += value;
  }
  for (size_t i = 0; i < score.size(); ++i) {
    const double* v =
        in[2].data() + (first + static_cast<int64_t>(i)) * c.kv_columns() + kv * s.head_size;
    for (int64_t j = 0; j < s.head_size; ++j) {
      out[j] += score[i] / sum * v[j];
    }
  }
}

Values Oracle(const Case& c, const Values& in) {
  std::vector<double> out(static_cast<size_t>(c.tokens() * c.query_columns()));
  for (int64_t token = 0; token < c.tokens(); ++token) {
    for (int64_t head = 0; head < c.shape.query_heads; ++head) {
      OracleRow(
          c, in, token, head, out.data() + token * c.query_columns() + head * c.shape.head_size);
    }
  }
  return {out};
}

// Without gaps, which devices do not take.
TensorView Statistics(const Case& c, Operands& operands) {
  const int64_t rows = c.shape.StatisticRows(c.tokens());
  TensorView view = operands.Floats(rows * c.shape.sequence_tokens);
  view.rank = 2;
  view.size = {rows, c.shape.sequence_tokens};
  view.row_stride = c.shape.sequence_tokens;
  return view;
}

AttentionForwardArgs Forward(const Case& c, Operands& operands, const Values& in) {
  const int64_t elements = AttentionWorkspaceElements(c.shape);
  AttentionForwardArgs args = {.shape = c.shape,
                               .q = operands.Matrix(c.tokens(), c.query_columns(), in[0]),
                               .k = operands.Matrix(c.tokens(), c.kv_columns(), in[1]),
                               .v = operands.Matrix(c.tokens(), c.kv_columns(), in[2]),
                               .out = operands.Matrix(c.tokens(), c.query_columns()),
                               .log_sum_exp = Statistics(c, operands),
                               .workspace = operands.Floats(elements)};
  AttentionForward(operands.stream, args);
  return args;
}

Results Backward(const Case& c, Operands& operands, const Values& in, const Values& cotangents) {
  const AttentionForwardArgs forward = Forward(c, operands, in);
  const AttentionBackwardArgs args = {
      .shape = c.shape,
      .q = forward.q,
      .k = forward.k,
      .v = forward.v,
      .out = forward.out,
      .log_sum_exp = forward.log_sum_exp,
      .dout = operands.Matrix(c.tokens(), c.query_columns(), cotangents[0]),
      .dq = operands.Matrix(c.tokens(), c.query_columns()),
      .dk = operands.Matrix(c.tokens(), c.kv_columns()),
      .dv = operands.Matrix(c.tokens(), c.kv_columns()),
      .workspace = operands.Floats(AttentionWorkspaceElements(c.shape))};
  AttentionBackward(operands.stream, args);
  return {Read(args.dq), Read(args.dk), Read(args.dv)};
}

}  // namespace

void AddAttentionCases(std::vector<OpCase>& cases) {
  const auto shape = [](int64_t sequence, int64_t heads, int64_t kv_heads, int64_t head_size) {
    return AttentionShape{.sequence_tokens = sequence,
                          .query_heads = heads,
                          .kv_heads = kv_heads,
                          .head_size = head_size,
                          .scale = 1.0f / std::sqrt(static_cast<float>(head_size))};
  };
  for (const Case& c : {Case{1, shape(1, 1, 1, 1)},
                        Case{2, shape(5, 2, 1, 3)},
                        Case{1, shape(47, 2, 2, 16)},
                        Case{1, shape(49, 4, 2, 8)},
                        Case{1, shape(97, 3, 1, 20)},
                        Case{2, shape(131, 1, 1, 33)},
                        Case{1, shape(200, 2, 1, 64)},
                        Case{0, shape(4, 2, 1, 8)}}) {
    OpCase& row = cases.emplace_back();
    row.name = absl::StrCat("Attention_",
                            c.sequences,
                            "x",
                            c.shape.sequence_tokens,
                            "_heads",
                            c.shape.query_heads,
                            "of",
                            c.shape.kv_heads,
                            "x",
                            c.shape.head_size);
    row.inputs = {{"q", c.tokens() * c.query_columns()},
                  {"k", c.tokens() * c.kv_columns()},
                  {"v", c.tokens() * c.kv_columns()}};
    row.oracle = [c](const Values& in) { return Oracle(c, in); };
    row.forward = [c](Operands& o, const Values& in) {
      return Results{Read(Forward(c, o, in).out)};
    };
    row.backward = [c](Operands& o, const Values& in, const Values& d) {
      return Backward(c, o, in, d);
    };
  }
}

}  // namespace ravel::kernels::testing
