// G5. Shapes are those of an 8B Llama: 16384 tokens of width 4096, intermediate 14336, vocabulary
// 128256.

#include <array>
#include <cmath>
#include <cstring>

#include <absl/strings/str_format.h>

#include "kernels/activation.h"
#include "kernels/cuda/kernel_params.h"
#include "kernels/cuda_host/launch_rules.h"
#include "kernels/element_update.h"
#include "kernels/norm.h"
#include "kernels/weight_update.h"
#include "tests/bench/gpu_cases.h"

namespace ravel::bench {
namespace {

using kernels::CpuStream;

constexpr int64_t kTokens = 16384;
constexpr int64_t kHidden = 4096;
constexpr int64_t kIntermediate = 14336;
constexpr int64_t kLogitTokens = 4096;
constexpr int64_t kVocabulary = 128256;
constexpr int64_t kParameters = int64_t{256} << 20;
constexpr int64_t kCheckedRows = 64;  // no case has fewer
constexpr int64_t kCheckedParameters = (int64_t{1} << 20) + 5;
constexpr double kTolerance = 1e-2;  // of the largest value: results are bf16

double Bytes(int64_t elements, int64_t each) {
  return static_cast<double>(elements * each);
}

// What was compared, and how far it was off; ends the program where that is too far.
class Check {
 public:
  void Near(const char* what,
            const std::vector<float>& actual,
            const std::vector<float>& expected) {
    const double error = RelativeError(actual, expected);
    if (!(error <= kTolerance)) {
      Fail(absl::StrFormat("%s: differs from the CPU by %.1e of its largest value", what, error));
    }
    absl::StrAppendFormat(&text_, "%s%s %.1e", text_.empty() ? "" : ", ", what, error);
  }
  std::string text() const { return text_; }

 private:
  std::string text_;
};

// fp32 matrices of the first rows, as the CPU's ops take them.
class Rows {
 public:
  explicit Rows(int64_t columns) : columns_(columns) {}
  TensorView From(GpuBench& bench, const TensorView& view) {
    values_.push_back(
        std::make_unique<std::vector<float>>(bench.Values(view, 0, kCheckedRows * columns_)));
    return MatrixView(values_.back()->data(), kCheckedRows, columns_);
  }
  TensorView Vector(std::vector<float> values) {
    values_.push_back(std::make_unique<std::vector<float>>(std::move(values)));
    return VectorView(values_.back()->data(), static_cast<int64_t>(values_.back()->size()));
  }
  TensorView Empty() {
    values_.push_back(
        std::make_unique<std::vector<float>>(static_cast<size_t>(kCheckedRows * columns_)));
    return MatrixView(values_.back()->data(), kCheckedRows, columns_);
  }
  static std::vector<float> Of(const TensorView& view) {
    return {view.As<float>(), view.As<float>() + view.elements()};
  }

 private:
  int64_t columns_;
  std::vector<std::unique_ptr<std::vector<float>>> values_;
};

std::vector<float> FirstRows(GpuBench& bench, const TensorView& view) {
  return bench.Values(view, 0, kCheckedRows * view.columns());
}

Operation RmsNormForwardCase(GpuBench& bench) {
  const int64_t tokens = bench.Size(kTokens);
  const int64_t hidden = bench.Size(kHidden);
  kernels::RmsNormForwardArgs args = {.x = bench.RandomMatrix(tokens, hidden, DType::kBF16),
                                      .residual = bench.RandomMatrix(tokens, hidden, DType::kBF16),
                                      .w = bench.RandomVector(hidden, DType::kBF16),
                                      .sum = bench.Matrix(tokens, hidden, DType::kBF16),
                                      .y = bench.Matrix(tokens, hidden, DType::kBF16),
                                      .rstd = bench.Vector(tokens, DType::kF32)};
  kernels::RmsNormForward(bench.stream(), args);
  CpuStream cpu;
  Rows rows(hidden);
  kernels::RmsNormForwardArgs expected = {.x = rows.From(bench, args.x),
                                          .residual = rows.From(bench, args.residual),
                                          .w = rows.Vector(bench.Values(args.w)),
                                          .sum = rows.Empty(),
                                          .y = rows.Empty(),
                                          .rstd = rows.Vector(std::vector<float>(kCheckedRows))};
  kernels::RmsNormForward(cpu, expected);
  Check check;
  check.Near("sum", FirstRows(bench, args.sum), Rows::Of(expected.sum));
  check.Near("y", FirstRows(bench, args.y), Rows::Of(expected.y));
  return {.prepare = {},
          .run = [&bench, args] { kernels::RmsNormForward(bench.stream(), args); },
          .bytes = Bytes(4 * tokens * hidden, 2),
          .verified = check.text()};
}

// Sum over all rows of dy * sum * rstd, in fp64.
std::vector<float> WeightGradient(GpuBench& bench, const kernels::RmsNormBackwardArgs& args) {
  const std::vector<float> dy = bench.Values(args.dy);
  const std::vector<float> sum = bench.Values(args.sum);
  const std::vector<float> rstd = bench.Values(args.rstd);
  const size_t hidden = dy.size() / rstd.size();
  std::vector<double> dw(hidden);
  for (size_t i = 0; i < dy.size(); ++i) {
    dw[i % hidden] += double{dy[i]} * double{sum[i]} * double{rstd[i / hidden]};
  }
  return {dw.begin(), dw.end()};
}

Operation RmsNormBackwardCase(GpuBench& bench) {
  const int64_t tokens = bench.Size(kTokens);
  const int64_t hidden = bench.Size(kHidden);
  const TensorView x = bench.RandomMatrix(tokens, hidden, DType::kBF16);
  kernels::RmsNormBackwardArgs args = {
      .dy = bench.RandomMatrix(tokens, hidden, DType::kBF16),
      .sum = x,
      .w = bench.RandomVector(hidden, DType::kBF16),
      .rstd = bench.Vector(tokens, DType::kF32),
      .dresidual = bench.RandomMatrix(tokens, hidden, DType::kBF16),
      .dx = bench.Matrix(tokens, hidden, DType::kBF16),
      .dw = bench.Vector(hidden, DType::kF32)};
  kernels::RmsNormForwardArgs forward;
  forward.x = x;
  forward.w = args.w;
  forward.y = args.dx;
  forward.rstd = args.rstd;
  kernels::RmsNormForward(bench.stream(), forward);
  kernels::RmsNormBackward(bench.stream(), args);
  CpuStream cpu;
  Rows rows(hidden);
  const kernels::RmsNormBackwardArgs expected = {
      .dy = rows.From(bench, args.dy),
      .sum = rows.From(bench, args.sum),
      .w = rows.Vector(bench.Values(args.w)),
      .rstd = rows.Vector(bench.Values(args.rstd, 0, kCheckedRows)),
      .dresidual = rows.From(bench, args.dresidual),
      .dx = rows.Empty(),
      .dw = {}};
  kernels::RmsNormBackward(cpu, expected);
  Check check;
  check.Near("dx", FirstRows(bench, args.dx), Rows::Of(expected.dx));
  check.Near("dw", bench.Values(args.dw), WeightGradient(bench, args));
  return {.prepare = {},
          .run = [&bench, args] { kernels::RmsNormBackward(bench.stream(), args); },
          .bytes = Bytes(4 * tokens * hidden, 2),
          .verified = check.text()};
}

Operation SwiGluForwardCase(GpuBench& bench) {
  const int64_t tokens = bench.Size(kTokens / 2);
  const int64_t intermediate = bench.Size(kIntermediate);
  const kernels::SwiGluForwardArgs args = {
      .gate = bench.RandomMatrix(tokens, intermediate, DType::kBF16),
      .up = bench.RandomMatrix(tokens, intermediate, DType::kBF16),
      .y = bench.Matrix(tokens, intermediate, DType::kBF16)};
  kernels::SwiGluForward(bench.stream(), args);
  CpuStream cpu;
  Rows rows(intermediate);
  const TensorView y = rows.Empty();
  kernels::SwiGluForward(cpu, {rows.From(bench, args.gate), rows.From(bench, args.up), y});
  Check check;
  check.Near("y", FirstRows(bench, args.y), Rows::Of(y));
  return {.prepare = {},
          .run = [&bench, args] { kernels::SwiGluForward(bench.stream(), args); },
          .bytes = Bytes(3 * tokens * intermediate, 2),
          .verified = check.text()};
}

Operation SwiGluBackwardCase(GpuBench& bench) {
  const int64_t tokens = bench.Size(kTokens / 2);
  const int64_t intermediate = bench.Size(kIntermediate);
  const kernels::SwiGluBackwardArgs args = {
      .gate = bench.RandomMatrix(tokens, intermediate, DType::kBF16),
      .up = bench.RandomMatrix(tokens, intermediate, DType::kBF16),
      .dy = bench.RandomMatrix(tokens, intermediate, DType::kBF16),
      .dgate = bench.Matrix(tokens, intermediate, DType::kBF16),
      .dup = bench.Matrix(tokens, intermediate, DType::kBF16),
      .y = {}};
  kernels::SwiGluBackward(bench.stream(), args);
  CpuStream cpu;
  Rows rows(intermediate);
  const TensorView dgate = rows.Empty();
  const TensorView dup = rows.Empty();
  kernels::SwiGluBackward(cpu,
                          {.gate = rows.From(bench, args.gate),
                           .up = rows.From(bench, args.up),
                           .dy = rows.From(bench, args.dy),
                           .dgate = dgate,
                           .dup = dup,
                           .y = {}});
  Check check;
  check.Near("dgate", FirstRows(bench, args.dgate), Rows::Of(dgate));
  check.Near("dup", FirstRows(bench, args.dup), Rows::Of(dup));
  return {.prepare = {},
          .run = [&bench, args] { kernels::SwiGluBackward(bench.stream(), args); },
          .bytes = Bytes(5 * tokens * intermediate, 2),
          .verified = check.text()};
}

// Loss and, in place of the logits, their gradient: the part of the fused head that is not a
// gemm.
void RunCrossEntropy(GpuBench& bench,
                     const TensorView& logits,
                     const TensorView& targets,
                     const TensorView& loss) {
  using namespace kernels::cuda;  // NOLINT(google-build-using-namespace): launch rules of one call
  const Variant variant = VariantFor({logits});
  constexpr int64_t kMaxThreads = 1024;
  bench.stream().Run({.kernel = Kernel::kCrossEntropyGradient,
                      .variant = variant,
                      .grid = {BlockPerRow(bench.stream(), logits.rows()), 1, 1},
                      .block = RowThreads(logits.columns() / WidthOf(variant), 4, kMaxThreads)},
                     CrossEntropyParams{.logits = logits.data,
                                        .targets = targets.As<int32_t>(),
                                        .loss = loss.As<float>(),
                                        .logits_stride = logits.row_stride,
                                        .tokens = logits.rows(),
                                        .vocabulary = logits.columns(),
                                        .device_loss_scale = nullptr,
                                        .loss_scale = 1.0f});
}

// (losses, gradients) of rows of logits, in fp64.
std::pair<std::vector<float>, std::vector<float>> CrossEntropyOf(const std::vector<float>& logits,
                                                                 const std::vector<int32_t>& ids,
                                                                 size_t vocabulary) {
  std::vector<float> losses;
  std::vector<float> gradients(logits.size());
  for (size_t begin = 0; begin < logits.size(); begin += vocabulary) {
    double sum = 0;
    for (size_t i = begin; i < begin + vocabulary; ++i) {
      sum += std::exp(double{logits[i]});
    }
    const size_t target = begin + static_cast<size_t>(ids[begin / vocabulary]);
    losses.push_back(static_cast<float>(std::log(sum) - double{logits[target]}));
    for (size_t i = begin; i < begin + vocabulary; ++i) {
      gradients[i] = static_cast<float>(std::exp(double{logits[i]}) / sum) - (i == target ? 1 : 0);
    }
  }
  return {losses, gradients};
}

Operation CrossEntropyCase(GpuBench& bench) {
  const int64_t tokens = bench.Size(kLogitTokens);
  const int64_t vocabulary = bench.Size(kVocabulary);
  const TensorView logits = bench.RandomMatrix(tokens, vocabulary, DType::kBF16, 2.0f);
  const TensorView work = bench.Matrix(tokens, vocabulary, DType::kBF16);
  const TensorView targets = bench.RandomIds(tokens, vocabulary);
  const TensorView loss = bench.Vector(tokens, DType::kF32);
  const auto restore = [&bench, logits, work] { bench.Copy(work, logits); };
  const auto run = [&bench, work, targets, loss] { RunCrossEntropy(bench, work, targets, loss); };
  restore();
  run();
  const auto [losses, gradients] =
      CrossEntropyOf(FirstRows(bench, logits), bench.Ids(targets), static_cast<size_t>(vocabulary));
  Check check;
  check.Near("loss", bench.Values(loss, 0, kCheckedRows), losses);
  check.Near("gradient", FirstRows(bench, work), gradients);
  return {.prepare = restore,
          .run = run,
          .bytes = Bytes(2 * tokens * vocabulary, 2),
          .verified = check.text()};
}

int64_t ParametersOf(const GpuBench& bench) {
  return bench.sizes() == GpuBench::Sizes::kFull ? kParameters : kParameters / 1024;
}

kernels::UpdateScalars Scalars(int64_t t) {
  return kernels::MakeUpdateScalars({.weight_decay = 0.1, .learning_rate = 1e-4}, t, 0.5f);
}

struct FlatMemory {
  TensorView view;
  std::vector<char> host;  // of the elements that are checked, before the first update
};

// Two updates from zero states on both sides; they give the same bits.
class AdamW {
 public:
  // `main` fp32 with fp32 states, or bf16 with a remainder and bf16 states.
  AdamW(GpuBench& bench, DType type) : bench_(bench), type_(type) {
    const int64_t n = ParametersOf(bench);
    weight_ = Take(bench.RandomVector(n, type, 0.02f));
    // Any 16 bits are a remainder.
    remainder_ = Take(bench.RandomVector(type == DType::kBF16 ? n : 1, DType::kBF16));
    gradient_ = Take(bench.RandomVector(n, type));
    for (FlatMemory* state : {&m_, &v_}) {
      state->view = bench.Vector(n, type);
      bench.stream().FillZero(state->view.data, n * DTypeBytes(type));
      *state = Take(state->view);
    }
  }

  void Update(int64_t t) { kernels::ElementUpdate(bench_.stream(), Arguments(t, false)); }
  void UpdateOnCpu(int64_t t) {
    CpuStream cpu;
    kernels::ElementUpdate(cpu, Arguments(t, true));
  }
  void RequireEqualBits() {
    for (const FlatMemory* memory : {&weight_, &remainder_, &m_, &v_}) {
      if (bench_.Bytes(memory->view, 0, Checked(memory->view)) != memory->host) {
        Fail("AdamW: the bits are not those of the CPU");
      }
    }
  }

 private:
  static int64_t Checked(const TensorView& view) {
    return std::min(view.elements(), kCheckedParameters);
  }
  FlatMemory Take(const TensorView& view) { return {view, bench_.Bytes(view, 0, Checked(view))}; }
  static TensorView HostView(FlatMemory& memory) {
    TensorView view = memory.view;
    view.data = memory.host.data();
    view.size[0] = Checked(memory.view);
    return view;
  }
  kernels::ElementUpdateArgs Arguments(int64_t t, bool host) {
    const auto view = [host](FlatMemory& memory) { return host ? HostView(memory) : memory.view; };
    kernels::ElementUpdateArgs args = {.g = view(gradient_),
                                       .m = view(m_),
                                       .v = view(v_),
                                       .seed = 7,
                                       .step = static_cast<uint32_t>(t),
                                       .scalars = Scalars(t)};
    if (type_ == DType::kF32) {
      args.main_weight = view(weight_);
    } else {
      args.weight = view(weight_);
      args.remainder = view(remainder_);
      args.remainder.dtype = DType::kI16;
    }
    return args;
  }

  GpuBench& bench_;
  DType type_;
  FlatMemory weight_, remainder_, gradient_, m_, v_;
};

Operation AdamWCase(GpuBench& bench, DType type) {
  const auto adamw = std::make_shared<AdamW>(bench, type);
  for (const int64_t t : {1, 2}) {
    adamw->Update(t);
    adamw->UpdateOnCpu(t);
  }
  adamw->RequireEqualBits();
  return {.prepare = {},
          .run = [adamw] { adamw->Update(3); },
          // fp32: reads 16 bytes of an element and writes 12; else reads 10 and writes 8.
          .bytes = Bytes(ParametersOf(bench), type == DType::kF32 ? 28 : 18),
          .verified = "the CPU's bits after two updates"};
}

// A matrix of kFloat8Block, whose update also takes amaxes and makes codes. Two updates on both
// sides; the first rows, which are whole blocks, have the same bits.
class BlockAdamW {
 public:
  explicit BlockAdamW(GpuBench& bench)
      : bench_(bench), columns_(bench.sizes() == GpuBench::Sizes::kFull ? kHidden : 512) {
    const int64_t n = ParametersOf(bench);
    rows_ = n / columns_;
    Take(kMain, bench.RandomVector(n, DType::kF32, 0.02f));
    Take(kGradient, bench.RandomVector(n, DType::kF32));
    for (const Part state : {kMean, kSquare}) {
      const TensorView view = bench.Vector(n, DType::kF32);
      bench.stream().FillZero(view.data, n * DTypeBytes(DType::kF32));
      Take(state, view);
    }
    Take(kCodes, bench.Vector(n, DType::kU8));
    const TensorView amax = bench.Vector(n / (kEdge * kEdge), DType::kU32);
    bench.stream().FillZero(amax.data, amax.elements() * DTypeBytes(DType::kU32));
    Take(kAmax, amax);
  }

  void Update(int64_t t) { kernels::WeightUpdate(bench_.stream(), Arguments(t, rows_, false)); }
  void UpdateOnCpu(int64_t t) {
    CpuStream cpu;
    kernels::WeightUpdate(cpu, Arguments(t, kEdge, true));
  }
  void RequireEqualBits() {
    for (const FlatMemory& part : parts_) {
      if (bench_.Bytes(part.view, 0, Checked(part.view)) != part.host) {
        Fail("AdamW of blocks: the bits are not those of the CPU");
      }
    }
  }

 private:
  enum Part : size_t { kMain, kGradient, kMean, kSquare, kCodes, kAmax, kParts };
  static constexpr int64_t kEdge = 128;

  int64_t Checked(const TensorView& view) const {
    return view.dtype == DType::kU32 ? columns_ / kEdge : kEdge * columns_;
  }
  void Take(Part part, const TensorView& view) {
    parts_[part] = {view, bench_.Bytes(view, 0, Checked(view))};
  }
  TensorView Flat(Part part, int64_t elements, bool host) {
    TensorView view = parts_[part].view;
    view.size[0] = elements;
    if (host) {
      view.data = parts_[part].host.data();
    }
    return view;
  }
  TensorView Rows(Part part, int64_t rows, int64_t columns, bool host) {
    const TensorView flat = Flat(part, rows * columns, host);
    TensorView view = MatrixView(nullptr, rows, columns);
    view.dtype = flat.dtype;
    view.data = flat.data;
    return view;
  }
  kernels::WeightUpdateArgs Arguments(int64_t t, int64_t rows, bool host) {
    const int64_t n = rows * columns_;
    kernels::WeightUpdateArgs args;
    args.columns = columns_;
    args.row_step = columns_;
    args.update.update = {.main_weight = Flat(kMain, n, host),
                          .g = Flat(kGradient, n, host),
                          .m = Flat(kMean, n, host),
                          .v = Flat(kSquare, n, host),
                          .step = static_cast<uint32_t>(t),
                          .scalars = Scalars(t)};
    args.target.recipe = plan::Recipe::kFloat8Block;
    args.target.amax = Rows(kAmax, rows / kEdge, columns_ / kEdge, host);
    args.target.codes = Rows(kCodes, rows, columns_, host);
    return args;
  }

  GpuBench& bench_;
  const int64_t columns_;
  int64_t rows_ = 0;
  std::array<FlatMemory, kParts> parts_;
};

Operation BlockAdamWCase(GpuBench& bench) {
  const auto adamw = std::make_shared<BlockAdamW>(bench);
  for (const int64_t t : {1, 2}) {
    adamw->Update(t);
    adamw->UpdateOnCpu(t);
  }
  adamw->RequireEqualBits();
  return {.prepare = {},
          .run = [adamw] { adamw->Update(3); },
          .bytes = Bytes(ParametersOf(bench), 29),
          .verified = "the CPU's bits after two updates"};
}

}  // namespace

std::vector<GpuCase> MemoryBoundCases() {
  return {{"G5", "rms_norm_forward", RmsNormForwardCase},
          {"G5", "rms_norm_backward", RmsNormBackwardCase},
          {"G5", "swiglu_forward", SwiGluForwardCase},
          {"G5", "swiglu_backward", SwiGluBackwardCase},
          {"G5", "cross_entropy", CrossEntropyCase},
          {"G5", "adamw_fp32", [](GpuBench& bench) { return AdamWCase(bench, DType::kF32); }},
          {"G5", "adamw_bf16", [](GpuBench& bench) { return AdamWCase(bench, DType::kBF16); }},
          {"G5", "adamw_fp8_block", BlockAdamWCase}};
}

}  // namespace ravel::bench
