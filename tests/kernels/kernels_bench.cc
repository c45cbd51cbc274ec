// Speed of the CPU ops on one thread: JSON lines on stdout, one per case. What an op computes is
// verified by kernels_test; here results are only checked to be finite.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>

#include "common/check.h"
#include "kernels/activation.h"
#include "kernels/adamw.h"
#include "kernels/attention.h"
#include "kernels/digest.h"
#include "kernels/gemm.h"
#include "kernels/grouped_update.h"
#include "kernels/loss.h"
#include "kernels/norm.h"
#include "kernels/philox.h"
#include "kernels/quantize.h"
#include "kernels/rope.h"
#include "kernels/row_sum.h"
#include "kernels/tree_reduce.h"
#include "tests/kernels/cpu/fma_roof.h"

namespace ravel::kernels {
namespace {

// What one call of an op does; one of flops and bytes gives the reported rate.
struct Work {
  double flops = 0;
  double bytes = 0;
};

class Bench {
 public:
  explicit Bench(double roof_gflops) : roof_gflops_(roof_gflops) {}

  // Random fp32 values that live as long as the bench.
  float* Floats(int64_t n) {
    std::vector<float>& values = storage_.emplace_back(static_cast<size_t>(n));
    std::normal_distribution<float> normal;
    std::generate(values.begin(), values.end(), [&] { return normal(random_); });
    return values.data();
  }
  TensorView Matrix(int64_t rows, int64_t columns) {
    return MatrixView(Floats(rows * columns), rows, columns);
  }
  TensorView Vector(int64_t n) { return VectorView(Floats(n), n); }
  TensorView Ids(int64_t n, int32_t limit) {
    std::vector<int32_t>& values = ids_.emplace_back(static_cast<size_t>(n));
    std::uniform_int_distribution<int32_t> uniform(0, limit - 1);
    std::generate(values.begin(), values.end(), [&] { return uniform(random_); });
    return {.data = values.data(), .dtype = DType::kI32, .rank = 1, .size = {n}, .row_stride = 1};
  }

  // Warms up, then takes the median of at least 5 runs and half a second.
  void Run(const std::string& name, Work work, const std::function<void()>& op) {
    op();
    op();
    std::vector<double> seconds;
    double total = 0;
    while (seconds.size() < 5 || total < 0.5) {
      const auto begin = std::chrono::steady_clock::now();
      op();
      const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
      seconds.push_back(taken.count());
      total += taken.count();
    }
    std::sort(seconds.begin(), seconds.end());
    const double median = seconds[seconds.size() / 2];
    const bool compute = work.flops > 0;
    const double rate = (compute ? work.flops : work.bytes) / median / 1e9;
    absl::PrintF(
        "{\"id\":\"kernels\",\"case\":\"%s\",\"unit\":\"%s\",\"ours\":%.2f,\"microseconds\":%.1f,"
        "\"min_microseconds\":%.1f",
        name,
        compute ? "GFLOP/s" : "GB/s",
        rate,
        median * 1e6,
        seconds.front() * 1e6);
    if (compute && roof_gflops_ > 0) {
      absl::PrintF(",\"percent_of_fma_roof\":%.1f", 100 * rate / roof_gflops_);
    }
    absl::PrintF("}\n");
    std::fflush(stdout);
  }

  CpuStream stream;

 private:
  double roof_gflops_;
  std::mt19937 random_{1};
  std::vector<std::vector<float>> storage_;
  std::vector<std::vector<int32_t>> ids_;
};

void RunGemms(Bench& bench) {
  struct Size {
    int64_t m;
    int64_t n;
    int64_t k;
  };
  for (const Size& s :
       {Size{512, 1536, 512}, Size{512, 1408, 512}, Size{256, 768, 256}, Size{256, 8192, 512}}) {
    const TensorView x = bench.Matrix(s.m, s.k);
    const TensorView w = bench.Matrix(s.n, s.k);
    const TensorView y = bench.Matrix(s.m, s.n);
    const double flops = 2.0 * static_cast<double>(s.m * s.n * s.k);
    const std::string size = absl::StrCat(s.m, "x", s.n, "x", s.k);
    bench.Run("gemm y=x*wT " + size, {.flops = flops}, [&] {
      Gemm(bench.stream, {.a = x, .b = w, .transpose_b = Transpose::kYes, .c = y});
    });
    bench.Run("gemm dx=y*w " + size, {.flops = flops}, [&] {
      Gemm(bench.stream, {.a = y, .b = w, .c = x});
    });
    bench.Run("gemm dw=yT*x " + size, {.flops = flops}, [&] {
      Gemm(bench.stream, {.a = y, .transpose_a = Transpose::kYes, .b = x, .c = w});
    });
  }
}

void RunAttention(
    Bench& bench, int64_t sequence, int64_t heads, int64_t kv_heads, int64_t head_size) {
  const AttentionShape shape = {.sequence_tokens = sequence,
                                .query_heads = heads,
                                .kv_heads = kv_heads,
                                .head_size = head_size,
                                .scale = 1.0f / std::sqrt(static_cast<float>(head_size))};
  const TensorView workspace = bench.Vector(AttentionWorkspaceElements(shape));
  const int64_t q_columns = heads * head_size;
  const int64_t kv_columns = kv_heads * head_size;
  const AttentionForwardArgs forward = {.shape = shape,
                                        .q = bench.Matrix(sequence, q_columns),
                                        .k = bench.Matrix(sequence, kv_columns),
                                        .v = bench.Matrix(sequence, kv_columns),
                                        .out = bench.Matrix(sequence, q_columns),
                                        .log_sum_exp = bench.Matrix(heads, sequence),
                                        .workspace = workspace};
  const AttentionBackwardArgs backward = {.shape = shape,
                                          .q = forward.q,
                                          .k = forward.k,
                                          .v = forward.v,
                                          .out = forward.out,
                                          .log_sum_exp = forward.log_sum_exp,
                                          .dout = bench.Matrix(sequence, q_columns),
                                          .dq = bench.Matrix(sequence, q_columns),
                                          .dk = bench.Matrix(sequence, kv_columns),
                                          .dv = bench.Matrix(sequence, kv_columns),
                                          .workspace = workspace};
  // Causal: half of 2 (backward 5) products of 2 * s * s * head_size.
  const double product = static_cast<double>(sequence * (sequence + 1) * heads * head_size);
  const std::string size =
      absl::StrCat("s=", sequence, " heads=", heads, "/", kv_heads, " size=", head_size);
  bench.Run("attention_forward " + size, {.flops = 2 * product}, [&] {
    AttentionForward(bench.stream, forward);
  });
  bench.Run("attention_backward " + size, {.flops = 5 * product}, [&] {
    AttentionBackward(bench.stream, backward);
  });
  CHECK(std::isfinite(backward.dq.As<float>()[0]));
}

void RunRows(Bench& bench) {
  const int64_t tokens = 512;
  const int64_t hidden = 512;
  const int64_t wide = 1408;
  const double row_bytes = 4.0 * static_cast<double>(tokens * hidden);
  RmsNormForwardArgs norm;
  norm.x = bench.Matrix(tokens, hidden);
  norm.residual = bench.Matrix(tokens, hidden);
  norm.w = bench.Vector(hidden);
  norm.sum = bench.Matrix(tokens, hidden);
  norm.y = bench.Matrix(tokens, hidden);
  norm.rstd = bench.Vector(tokens);
  bench.Run("rms_norm_forward 512x512", {.bytes = 4 * row_bytes}, [&] {
    RmsNormForward(bench.stream, norm);
  });
  RmsNormBackwardArgs back;
  back.dy = bench.Matrix(tokens, hidden);
  back.sum = norm.sum;
  back.w = norm.w;
  back.rstd = norm.rstd;
  back.dresidual = bench.Matrix(tokens, hidden);
  back.dx = bench.Matrix(tokens, hidden);
  back.dw = bench.Vector(hidden);
  bench.Run("rms_norm_backward 512x512", {.bytes = 4 * row_bytes}, [&] {
    RmsNormBackward(bench.stream, back);
  });
  const double wide_bytes = 4.0 * static_cast<double>(tokens * wide);
  const SwiGluForwardArgs glu = {
      bench.Matrix(tokens, wide), bench.Matrix(tokens, wide), bench.Matrix(tokens, wide)};
  bench.Run("swi_glu_forward 512x1408", {.bytes = 3 * wide_bytes}, [&] {
    SwiGluForward(bench.stream, glu);
  });
  SwiGluBackwardArgs glu_back;
  glu_back.gate = glu.gate;
  glu_back.up = glu.up;
  glu_back.dy = bench.Matrix(tokens, wide);
  glu_back.dgate = bench.Matrix(tokens, wide);
  glu_back.dup = bench.Matrix(tokens, wide);
  bench.Run("swi_glu_backward 512x1408", {.bytes = 5 * wide_bytes}, [&] {
    SwiGluBackward(bench.stream, glu_back);
  });
  RopeArgs rope;
  rope.x = bench.Matrix(tokens, hidden);
  rope.head_size = 64;
  rope.sequence_tokens = tokens;
  rope.cosine = bench.Matrix(tokens, 32);
  rope.sine = bench.Matrix(tokens, 32);
  BuildRopeTable(bench.stream, {bench.Vector(32), rope.cosine, rope.sine});
  bench.Run("rope 512x512", {.bytes = 2 * row_bytes}, [&] { Rope(bench.stream, rope); });
}

void RunHead(Bench& bench, int64_t tokens, int64_t hidden, int32_t vocabulary) {
  LinearCrossEntropyTrainArgs head;
  head.x = bench.Matrix(tokens, hidden);
  head.w = bench.Matrix(vocabulary, hidden);
  InitNormal(bench.stream, {.out = VectorView(head.w.As<float>(), head.w.elements())});
  head.targets = bench.Ids(tokens, vocabulary);
  head.loss = bench.Vector(tokens);
  head.dx = bench.Matrix(tokens, hidden);
  head.dw = bench.Matrix(vocabulary, hidden);
  constexpr int64_t kChunkTokens = 256;
  head.workspace = bench.Matrix(kChunkTokens, vocabulary);
  const double flops = 6.0 * static_cast<double>(tokens * hidden * vocabulary);
  bench.Run(absl::StrCat("linear_cross_entropy_train ", tokens, "x", hidden, "x", vocabulary),
            {.flops = flops},
            [&] { LinearCrossEntropyTrain(bench.stream, head); });
}

void RunFlat(Bench& bench) {
  const int64_t n = 16 << 20;
  // Apart by odd numbers of pages: equal offsets modulo a large power of two are slow on some
  // processors.
  float* base = bench.Floats(4 * n + 4 * 5120);
  const auto range = [&](int64_t i) { return VectorView(base + i * (n + 5120), n); };
  const AdamWArgs adamw = {
      range(0), range(1), range(2), range(3), MakeUpdateScalars({.learning_rate = 1e-4}, 1, 1.0f)};
  std::fill_n(adamw.v.As<float>(), n, 1e-3f);
  const double bytes = 4.0 * static_cast<double>(n);
  bench.Run("adamw 16Mi", {.bytes = 7 * bytes}, [&] { AdamWUpdate(bench.stream, adamw); });
  bench.Run("tree_sum of 4 16Mi", {.bytes = 5 * bytes}, [&] {
    TreeSum(bench.stream,
            {.pieces = {range(0).As<float>(),
                        range(1).As<float>(),
                        range(2).As<float>(),
                        range(3).As<float>()},
             .out = range(0)});
  });
  InitNormal(bench.stream, {.out = range(0)});
  std::vector<float> sums(static_cast<size_t>(n / 512));
  bench.Run("row_sum_squares 32768x512", {.bytes = bytes}, [&] {
    RowSumSquares(bench.stream,
                  {.x = MatrixView(range(0).As<float>(), n / 512, 512),
                   .sums = VectorView(sums.data(), n / 512)});
  });
  bench.Run("digest 16Mi", {.bytes = bytes}, [&] { DigestRange(bench.stream, range(0), 0); });
  bench.Run("copy 64 MiB", {.bytes = 2 * bytes}, [&] {
    CopyBytes(bench.stream, {range(1).data, range(0).data, n * 4});
  });
  bench.Run("init_normal 1Mi", {.bytes = bytes / 16}, [&] {
    InitNormal(bench.stream, {.out = VectorView(base, n / 16)});
  });
}

// Updates in mixed types, as jobs of bf16 have them: bytes are what is read and written.
void RunMixedUpdates(Bench& bench) {
  const int64_t n = 16 << 20;
  const auto flat = [&](DType dtype) {
    TensorView view = VectorView(nullptr, n);
    view.dtype = dtype;
    // The widest type: narrower ones take its first part. Zeros are values of every type.
    view.data = bench.Floats(n + 5120);
    std::fill_n(static_cast<float*>(view.data), n, 0.0f);
    return view;
  };
  const std::vector<UpdatePiece> pieces = {{.elements = n, .row = 4096}};
  struct Form {
    const char* name;
    bool split;
    DType gradient;
    DType mean;
    DType square;
    double bytes;  // of an element
  };
  constexpr Form kForms[] = {
      {"fp32 main, bf16 weight", false, DType::kF32, DType::kF32, DType::kF32, 30},
      {"remainder", true, DType::kF32, DType::kF32, DType::kF32, 28},
      {"remainder, bf16 states", true, DType::kF32, DType::kBF16, DType::kBF16, 20},
      {"remainder, bf16 gradient and states", true, DType::kBF16, DType::kBF16, DType::kBF16, 18},
      {"remainder, fp8,bf16 states", true, DType::kF32, DType::kF8E4M3, DType::kBF16, 18},
      {"remainder, fp8 states", true, DType::kF32, DType::kF8E4M3, DType::kU8, 16}};
  for (const Form& form : kForms) {
    GroupedUpdateArgs args = {.update = {.weight = flat(DType::kBF16),
                                         .g = flat(form.gradient),
                                         .m = flat(form.mean),
                                         .v = flat(form.square),
                                         .seed = 1}};
    (form.split ? args.update.remainder : args.update.main_weight) =
        flat(form.split ? DType::kI16 : DType::kF32);
    args.m_scales = form.mean == DType::kF8E4M3 ? flat(DType::kU8) : TensorView{};
    args.v_scales = form.square == DType::kU8 ? flat(DType::kU8) : TensorView{};
    args.update.scalars = MakeUpdateScalars({.learning_rate = 1e-4}, 1, 1.0f);
    args.update.table = {.pieces = pieces.data(), .count = 1};
    float* const gradient = args.update.g.As<float>();
    std::fill_n(gradient, form.gradient == DType::kF32 ? n : n / 2, 1e-3f);
    bench.Run(absl::StrCat("update 16Mi ", form.name),
              {.bytes = form.bytes * static_cast<double>(n)},
              [&] { GroupedUpdate(bench.stream, args); });
  }
}

struct NamedRecipe {
  const char* name;
  plan::Recipe recipe;
};
constexpr NamedRecipe kRecipes[] = {{"fp8_tensor", plan::Recipe::kCurrent},
                                    {"fp8_block", plan::Recipe::kFloat8Block},
                                    {"mxfp8", plan::Recipe::kMxFp8},
                                    {"nvfp4", plan::Recipe::kNvFp4}};

// Bytes are those of the source and of codes or decoded values, once each.
void RunWeightCodes(Bench& bench, const NamedRecipe& named) {
  constexpr int64_t kEdge = 2048;
  const double elements = kEdge * kEdge;
  const TensorView weight = bench.Matrix(kEdge, kEdge);
  TensorView codes =
      MatrixView(bench.Floats(kEdge * kEdge), kEdge, kEdge / plan::CodesPerByte(named.recipe));
  TensorView decoded = bench.Matrix(kEdge, kEdge);
  codes.dtype = DType::kU8;
  decoded.dtype = DType::kBF16;
  const int64_t edge = plan::BlockEdge(named.recipe);
  const int64_t grid = edge == 0 ? 1 : kEdge / edge;
  std::vector<uint32_t> amaxes(static_cast<size_t>(grid * grid), 0);
  TensorView amax = MatrixView(nullptr, grid, grid);
  amax.dtype = DType::kU32;
  amax.data = amaxes.data();
  uint32_t largest = 0x40C00000;  // 6
  TensorView domain = VectorView(nullptr, 1);
  domain.dtype = DType::kU32;
  domain.data = &largest;
  float scale = 0;
  const WeightScales scales = {.recipe = named.recipe, .amax = amax, .domain_amax = domain};
  bench.Run(absl::StrCat("block_amax 2048x2048 ", named.name), {.bytes = 4 * elements}, [&] {
    BlockAmax(bench.stream, {.from = weight, .edge = edge, .amax = amax});
  });
  bench.Run(absl::StrCat("quantize_weight 2048x2048 ", named.name), {.bytes = 5 * elements}, [&] {
    QuantizeWeight(bench.stream, {.from = weight, .scales = scales, .codes = codes});
  });
  bench.Run(absl::StrCat("decode_weight 2048x2048 ", named.name), {.bytes = 3 * elements}, [&] {
    DecodeWeight(bench.stream,
                 {.codes = codes, .scales = scales, .to = decoded, .scale = VectorView(&scale, 1)});
  });
}

void RunActivationCodes(Bench& bench, const NamedRecipe& named) {
  constexpr int64_t kRows = 1024;
  constexpr int64_t kColumns = 2048;
  TensorView from = bench.Matrix(kRows, kColumns);
  for (int64_t i = 0; i < kRows * kColumns; ++i) {
    from.As<uint16_t>()[i] = FloatToBf16(from.As<float>()[i]);
  }
  TensorView to = bench.Matrix(kRows, kColumns);
  from.dtype = to.dtype = DType::kBF16;
  float scale = 0;
  for (const ActivationRole role : {ActivationRole::kInput, ActivationRole::kGradient}) {
    for (const BlocksAlong along : {BlocksAlong::kColumns, BlocksAlong::kRows}) {
      QuantizeActivationArgs args;
      args.recipe = named.recipe;
      args.role = role;
      args.along = along;
      args.from = from;
      args.to = to;
      args.scale = VectorView(&scale, 1);
      args.draws.sequence_tokens = kRows;
      bench.Run(absl::StrCat("quantize_activation 1024x2048 ",
                             named.name,
                             role == ActivationRole::kInput ? " input" : " gradient",
                             along == BlocksAlong::kColumns ? " columns" : " rows"),
                {.bytes = 4 * static_cast<double>(kRows * kColumns)},
                [&] { QuantizeActivation(bench.stream, args); });
    }
  }
}

void RunAll() {
  const double roof = testing::MeasureFmaRoof();
  const double avx2_roof = testing::MeasureAvx2FmaRoof();
  for (const auto& [name, value] :
       {std::pair("fma roof", roof), std::pair("fma roof, avx2", avx2_roof)}) {
    absl::PrintF(
        "{\"id\":\"kernels\",\"case\":\"%s\",\"unit\":\"GFLOP/s\",\"ours\":%.2f}\n", name, value);
  }
  Bench bench(roof);
  RunGemms(bench);
  RunAttention(bench, 256, 4, 4, 64);
  RunAttention(bench, 512, 8, 8, 64);
  RunAttention(bench, 1024, 8, 2, 64);
  RunAttention(bench, 1024, 4, 4, 128);
  RunRows(bench);
  RunHead(bench, 512, 512, 8192);
  RunFlat(bench);
  RunMixedUpdates(bench);
  for (const NamedRecipe& named : kRecipes) {
    RunWeightCodes(bench, named);
    RunActivationCodes(bench, named);
  }
}

}  // namespace
}  // namespace ravel::kernels

int main() {
  ravel::kernels::RunAll();
}
