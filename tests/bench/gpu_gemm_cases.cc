// G6. The gemms of a training step of an 8B Llama with 8192 tokens: forward, gradient of the
// input, and gradient of the weight in fp32, fresh and added to what is there.

#include <cmath>
#include <random>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>

#include "kernels/gemm.h"
#include "tests/bench/gpu_cases.h"

namespace ravel::bench {
namespace {

using kernels::Output;
using kernels::Transpose;

constexpr int64_t kTokens = 8192;
constexpr size_t kProbes = 256;
constexpr double kTolerance = 1e-2;  // of the largest value that is probed

struct Layer {
  const char* name;
  int64_t in;
  int64_t out;
  int64_t tokens = kTokens;
};
constexpr Layer kLayers[] = {{"qkv", 4096, 6144},
                             {"out", 4096, 4096},
                             {"gate_up", 4096, 28672},
                             {"down", 14336, 4096},
                             {"head", 4096, 128256, 2048}};

// A gemm with its operands on the host, for elements computed one by one.
class Probe {
 public:
  Probe(GpuBench& bench, const kernels::GemmArgs& args, std::vector<float> before)
      : args_(args),
        a_(bench.Values(args.a)),
        b_(bench.Values(args.b)),
        before_(std::move(before)) {}

  double Element(int64_t row, int64_t column) const {
    const bool flip_a = args_.transpose_a == Transpose::kYes;
    const bool flip_b = args_.transpose_b == Transpose::kYes;
    const int64_t depth = flip_a ? args_.a.size[0] : args_.a.size[1];
    double sum = before_.empty() ? 0 : double{before_[Index(args_.c, row, column)]};
    for (int64_t i = 0; i < depth; ++i) {
      const size_t left = flip_a ? Index(args_.a, i, row) : Index(args_.a, row, i);
      const size_t right = flip_b ? Index(args_.b, column, i) : Index(args_.b, i, column);
      sum += double{a_[left]} * double{b_[right]};
    }
    return sum;
  }
  static size_t Index(const TensorView& matrix, int64_t row, int64_t column) {
    return static_cast<size_t>(row * matrix.row_stride + column);
  }

 private:
  kernels::GemmArgs args_;
  std::vector<float> a_;
  std::vector<float> b_;
  std::vector<float> before_;
};

// Runs the gemm once and compares random elements with sums in fp64.
std::string Verify(GpuBench& bench, const kernels::GemmArgs& args) {
  kernels::Gemm(bench.stream(),
                args);  // chooses the algorithm; adds to c an unknown number of times
  std::vector<float> before;
  if (args.output == Output::kAccumulate) {
    before = bench.Values(args.c);
  }
  const Probe probe(bench, args, std::move(before));
  kernels::Gemm(bench.stream(), args);
  const std::vector<float> c = bench.Values(args.c);
  std::mt19937_64 random(std::random_device{}());
  std::vector<float> actual;
  std::vector<float> expected;
  for (size_t i = 0; i < kProbes; ++i) {
    const int64_t row = std::uniform_int_distribution<int64_t>(0, args.c.size[0] - 1)(random);
    const int64_t column = std::uniform_int_distribution<int64_t>(0, args.c.size[1] - 1)(random);
    actual.push_back(c[Probe::Index(args.c, row, column)]);
    expected.push_back(static_cast<float>(probe.Element(row, column)));
  }
  const double error = RelativeError(actual, expected);
  if (!(error <= kTolerance)) {
    Fail(absl::StrFormat("gemm: differs from sums in fp64 by %.1e of its largest value", error));
  }
  return absl::StrFormat("%d elements %.1e", kProbes, error);
}

enum class Pass { kForward, kInputGradient, kWeightGradient, kWeightGradientAdded };

kernels::GemmArgs ArgumentsOf(GpuBench& bench, const Layer& full, Pass pass) {
  const Layer layer = {
      full.name, bench.Size(full.in), bench.Size(full.out), bench.Size(full.tokens)};
  const auto random = [&](int64_t rows, int64_t columns) {
    return bench.RandomMatrix(rows, columns, DType::kBF16);
  };
  switch (pass) {
    case Pass::kForward:
      return {.a = random(layer.tokens, layer.in),
              .b = random(layer.out, layer.in),
              .transpose_b = Transpose::kYes,
              .c = bench.Matrix(layer.tokens, layer.out, DType::kBF16)};
    case Pass::kInputGradient:
      return {.a = random(layer.tokens, layer.out),
              .b = random(layer.out, layer.in),
              .c = bench.Matrix(layer.tokens, layer.in, DType::kBF16)};
    case Pass::kWeightGradient:
    case Pass::kWeightGradientAdded:
      break;
  }
  return {.a = random(layer.tokens, layer.out),
          .transpose_a = Transpose::kYes,
          .b = random(layer.tokens, layer.in),
          .c = bench.RandomMatrix(layer.out, layer.in, DType::kF32),
          .output = pass == Pass::kWeightGradient ? Output::kOverwrite : Output::kAccumulate};
}

double FlopsOf(const kernels::GemmArgs& args) {
  const int64_t depth = args.transpose_a == Transpose::kYes ? args.a.size[0] : args.a.size[1];
  return 2.0 * static_cast<double>(args.c.elements() * depth);
}

GpuCase CaseOf(const Layer& layer, Pass pass, const char* pass_name) {
  return {"G6", absl::StrCat(layer.name, "_", pass_name), [layer, pass](GpuBench& bench) {
            const kernels::GemmArgs args = ArgumentsOf(bench, layer, pass);
            const std::string verified = Verify(bench, args);
            return Operation{.prepare = {},
                             .run = [&bench, args] { kernels::Gemm(bench.stream(), args); },
                             .flops = FlopsOf(args),
                             .verified = verified};
          }};
}

}  // namespace

std::vector<GpuCase> GemmCases() {
  std::vector<GpuCase> cases;
  for (const Layer& layer : kLayers) {
    cases.push_back(CaseOf(layer, Pass::kForward, "forward"));
    cases.push_back(CaseOf(layer, Pass::kInputGradient, "dgrad"));
    cases.push_back(CaseOf(layer, Pass::kWeightGradient, "wgrad"));
    cases.push_back(CaseOf(layer, Pass::kWeightGradientAdded, "wgrad_added"));
  }
  return cases;
}

}  // namespace ravel::bench
