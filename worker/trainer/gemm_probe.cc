#include "worker/trainer/gemm_probe.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include <absl/strings/str_cat.h>

#include "common/check.h"
#include "common/signed_size.h"
#include "kernels/gemm.h"

namespace ravel::trainer {
namespace {

// Codes in a byte of this type.
int64_t PerByte(DType type) {
  return type == DType::kU8 ? 2 : 1;
}

// The value of a code in the type's format; NaN and infinity do not occur.
float ValueOf(DType type, uint8_t code) {
  if (type == DType::kU8) {
    constexpr float kMagnitudes[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    return (code & 8u) != 0 ? -kMagnitudes[code & 7u] : kMagnitudes[code & 7u];
  }
  if (type == DType::kF8E4M3) {
    return Fp8E4M3ToFloat(code);
  }
  return Fp16ToFloat(static_cast<uint16_t>(code << 8));  // E5M2 is its upper half
}

// The value of an element of an operand; the first of two in a byte is in its low half.
float ValueAt(DType type, const std::vector<uint8_t>& codes, int64_t at) {
  const uint32_t byte = codes[Size(at / PerByte(type))];
  return ValueOf(type,
                 static_cast<uint8_t>(type == DType::kU8 ? byte >> (at % 2 * 4) & 15u : byte));
}

// Codes of both signs, of exponents around 1; packed ones are all there are.
std::vector<uint8_t> CodesOf(DType type, int64_t count, uint32_t seed) {
  const uint32_t one = type == DType::kF8E4M3 ? 0x38 : 0x3C;
  std::vector<uint8_t> codes(Size(count / PerByte(type)));
  uint32_t state = seed;
  for (uint8_t& code : codes) {
    state = state * 1664525u + 1013904223u;
    if (type == DType::kU8) {
      code = static_cast<uint8_t>(state >> 24);
      continue;
    }
    code = static_cast<uint8_t>(one - 8 + (state >> 24) % 16 + ((state >> 20) & 1u) * 0x80);
  }
  return codes;
}

// The device's memory, part by part.
class Room {
 public:
  explicit Room(std::span<std::byte> room) : rest_(room) {}
  TensorView Take(DType type, int64_t rows, int64_t columns) {
    constexpr int64_t kAlignment = 256;
    const int64_t bytes = RoundUp(rows * columns * DTypeBytes(type), kAlignment);
    CHECK_LE(bytes, std::ssize(rest_));
    TensorView view = MatrixView(nullptr, rows, columns);
    view.dtype = type;
    view.data = rest_.data();
    rest_ = rest_.subspan(Size(bytes));
    return view;
  }

 private:
  std::span<std::byte> rest_;
};

template <typename T>
std::span<const std::byte> BytesOf(const std::vector<T>& values) {
  return std::as_bytes(std::span<const T>(values));
}

absl::Status WriteValues(shard::HostAccess& memory,
                         const std::vector<float>& values,
                         const TensorView& to) {
  if (to.dtype == DType::kF32) {
    return memory.Write(BytesOf(values), to.data);
  }
  std::vector<uint16_t> narrow;
  for (const float value : values) {
    narrow.push_back(FloatToBf16(value));
  }
  return memory.Write(BytesOf(narrow), to.data);
}

absl::StatusOr<std::vector<float>> ReadValues(shard::HostAccess& memory, const TensorView& from) {
  std::vector<float> values(Size(from.elements()));
  if (from.dtype == DType::kF32) {
    RETURN_IF_ERROR(memory.Read(from.data, std::as_writable_bytes(std::span(values))));
    return values;
  }
  std::vector<uint16_t> narrow(values.size());
  RETURN_IF_ERROR(memory.Read(from.data, std::as_writable_bytes(std::span(narrow))));
  std::transform(narrow.begin(), narrow.end(), values.begin(), Bf16ToFloat);
  return values;
}

// The scale of an element of an operand.
float ScaleOf(
    const std::vector<float>& scales, ScaleForm form, int64_t inner, int64_t row, int64_t i) {
  return form == ScaleForm::kTensor
             ? scales[0]
             : scales[Size(row * ScaleBlocks(form, inner) + i / CodesOfScale(form))];
}

// One scale for all, or one for each block: powers of two that tell rows and blocks apart.
std::vector<float> ScalesOf(ScaleForm form, int64_t outer, int64_t inner, float whole) {
  if (form == ScaleForm::kTensor) {
    return {whole};
  }
  std::vector<float> scales;
  for (int64_t row = 0; row < outer; ++row) {
    const int64_t of = form == ScaleForm::kSquares128 ? row / kScaleTileRows : row;
    for (int64_t block = 0; block < ScaleBlocks(form, inner); ++block) {
      scales.push_back(std::ldexp(1.0f, static_cast<int>((of * 3 + block * 2) % 7) - 3));
    }
  }
  return scales;
}

// Scales as they lie for a gemm.
std::vector<uint8_t> PlacedScales(const std::vector<float>& scales,
                                  ScaleForm form,
                                  int64_t outer,
                                  int64_t inner) {
  std::vector<uint8_t> bytes(Size(ScaleBytes(form, outer, inner)));
  const int64_t blocks = ScaleBlocks(form, inner);
  for (int64_t row = 0; row < (form == ScaleForm::kTensor ? 1 : outer); ++row) {
    for (int64_t block = 0; block < blocks; ++block) {
      const float scale = scales[Size(row * blocks + block)];
      const int64_t index = ScaleIndex(form, row, block, outer, blocks);
      if (form == ScaleForm::kBlocks32) {
        constexpr int kBias = 127;
        bytes[Size(index)] = static_cast<uint8_t>(std::ilogb(scale) + kBias);
      } else if (form == ScaleForm::kBlocks16) {
        constexpr int kBias = 7;  // of E4M3, whose mantissa has three bits
        bytes[Size(index)] = static_cast<uint8_t>((std::ilogb(scale) + kBias) << 3);
      } else {
        std::memcpy(bytes.data() + index * DTypeBytes(DType::kF32), &scale, sizeof(scale));
      }
    }
  }
  return bytes;
}

absl::StatusOr<TensorView> WriteScales(Room& room,
                                       shard::HostAccess& memory,
                                       const std::vector<float>& scales,
                                       ScaleForm form,
                                       int64_t outer,
                                       int64_t inner) {
  const std::vector<uint8_t> bytes = PlacedScales(scales, form, outer, inner);
  const TensorView to = form == ScaleForm::kTensor ? room.Take(DType::kF32, 1, 1)
                                                   : room.Take(DType::kU8, 1, std::ssize(bytes));
  RETURN_IF_ERROR(memory.Write(BytesOf(bytes), to.data));
  return to;
}

absl::Status RunProbe(const ProbeCase& probe,
                      kernels::CudaStream& stream,
                      shard::HostAccess& memory,
                      std::span<std::byte> bytes) {
  Room room(bytes);
  const TensorView a = room.Take(probe.a, probe.rows, probe.inner / PerByte(probe.a));
  const TensorView b = room.Take(probe.b, probe.columns, probe.inner / PerByte(probe.b));
  const TensorView c = room.Take(probe.c, probe.rows, probe.columns);
  const ProbeOperands operands = OperandsOf(probe);
  RETURN_IF_ERROR(memory.Write(BytesOf(operands.a), a.data));
  RETURN_IF_ERROR(memory.Write(BytesOf(operands.b), b.data));
  RETURN_IF_ERROR(WriteValues(memory, operands.c, c));
  ASSIGN_OR_RETURN(
      const TensorView scale_a,
      WriteScales(room, memory, operands.scale_a, probe.form_a, probe.rows, probe.inner));
  ASSIGN_OR_RETURN(
      const TensorView scale_b,
      WriteScales(room, memory, operands.scale_b, probe.form_b, probe.columns, probe.inner));
  TensorView wholes;
  TensorView factors;
  if (probe.form_a == ScaleForm::kBlocks16) {
    wholes = room.Take(DType::kF32, 1, 2);
    factors = VectorView(room.Take(DType::kF32, 1, 2).As<float>(), 2);
    RETURN_IF_ERROR(
        memory.Write(BytesOf(std::vector<float>{operands.whole_a, operands.whole_b}), wholes.data));
  }
  const auto whole = [&](int64_t at) {
    return wholes.present() ? VectorView(wholes.As<float>() + at, 1) : TensorView();
  };
  kernels::Gemm(
      stream,
      {.a = a,
       .transpose_a = kernels::Transpose::kNo,
       .b = b,
       .transpose_b = kernels::Transpose::kYes,
       .c = c,
       .output = probe.accumulates ? kernels::Output::kAccumulate : kernels::Output::kOverwrite,
       .scale_a = scale_a,
       .scale_b = scale_b,
       .form_a = probe.form_a,
       .form_b = probe.form_b,
       .whole_a = whole(0),
       .whole_b = whole(1),
       .factors = factors,
       .fast_accumulation = probe.fast});
  ASSIGN_OR_RETURN(const std::vector<float> result, ReadValues(memory, c));
  return CheckProbe(probe, operands, result);
}

// Gemms of E4M3 or packed codes with scales of these forms: of activations, and of weights.
std::vector<ProbeCase> BlockCases(ScaleForm activation, ScaleForm weight) {
  // More than a tile of rows, and blocks that end before a tile does.
  constexpr int64_t kRows = 144;
  constexpr int64_t kInner = 160;
  const DType type = activation == ScaleForm::kBlocks16 ? DType::kU8 : DType::kF8E4M3;
  const auto probe = [&](const char* name, DType c, bool accumulates, ScaleForm form_b) {
    return ProbeCase{.name = name,
                     .a = type,
                     .b = type,
                     .c = c,
                     .accumulates = accumulates,
                     .fast = false,
                     .form_a = activation,
                     .form_b = form_b,
                     .rows = kRows,
                     .columns = kRows,
                     .inner = kInner};
  };
  return {probe("forward", DType::kBF16, false, weight),
          probe("input gradient", DType::kBF16, true, weight),
          probe("weight gradient", DType::kF32, true, activation),
          probe("weight gradient, first", DType::kF32, false, activation)};
}

}  // namespace

std::vector<ProbeCase> ProbeCases(plan::GemmPath path, plan::FastAccumulation fast) {
  constexpr DType kE4M3 = DType::kF8E4M3;
  constexpr DType kE5M2 = DType::kF8E5M2;
  if (path == plan::GemmPath::kFp8Block) {
    return BlockCases(ScaleForm::kBlocks128, ScaleForm::kSquares128);
  }
  if (path == plan::GemmPath::kMxFp8 || path == plan::GemmPath::kBlockAsMxFp8) {
    return BlockCases(ScaleForm::kBlocks32, ScaleForm::kBlocks32);
  }
  if (path == plan::GemmPath::kNvFp4) {
    return BlockCases(ScaleForm::kBlocks16, ScaleForm::kBlocks16);
  }
  if (path != plan::GemmPath::kFp8Tensor) {
    return {};
  }
  const bool forward = fast != plan::FastAccumulation::kNone;
  const bool input_gradient = fast == plan::FastAccumulation::kForwardAndInputGradient;
  return {{"forward", kE4M3, kE4M3, DType::kBF16, false, forward},
          {"input gradient", kE5M2, kE4M3, DType::kBF16, true, input_gradient},
          {"weight gradient", kE5M2, kE4M3, DType::kF32, true, false},
          {"weight gradient of [in, out]", kE4M3, kE5M2, DType::kF32, false, false}};
}

ProbeOperands OperandsOf(const ProbeCase& probe) {
  ProbeOperands operands = {.a = CodesOf(probe.a, probe.rows * probe.inner, 1),
                            .b = CodesOf(probe.b, probe.columns * probe.inner, 2),
                            .c = {},
                            .scale_a = ScalesOf(probe.form_a, probe.rows, probe.inner, 0.375f),
                            .scale_b = ScalesOf(probe.form_b, probe.columns, probe.inner, 3.0f)};
  if (probe.form_a == ScaleForm::kBlocks16) {
    operands.whole_a = 0.375f;
    operands.whole_b = 3.0f;
  }
  for (int64_t i = 0; i < probe.rows * probe.columns; ++i) {
    operands.c.push_back(static_cast<float>(i % 17) - 8.0f);
  }
  return operands;
}

absl::Status CheckProbe(const ProbeCase& probe,
                        const ProbeOperands& operands,
                        std::span<const float> result) {
  const auto value = [&](DType type, const std::vector<uint8_t>& codes, int64_t row, int64_t i) {
    return double{ValueAt(type, codes, row * probe.inner + i)};
  };
  const double whole = double{operands.whole_a} * double{operands.whole_b};
  for (int64_t row = 0; row < probe.rows; ++row) {
    for (int64_t column = 0; column < probe.columns; ++column) {
      const size_t at = Size(row * probe.columns + column);
      double sum = 0;
      double magnitude = 0;
      for (int64_t i = 0; i < probe.inner; ++i) {
        const double product =
            whole * value(probe.a, operands.a, row, i) * value(probe.b, operands.b, column, i) *
            double{ScaleOf(operands.scale_a, probe.form_a, probe.inner, row, i)} *
            double{ScaleOf(operands.scale_b, probe.form_b, probe.inner, column, i)};
        sum += product;
        magnitude += std::abs(product);
      }
      const double expected = sum + (probe.accumulates ? double{operands.c[at]} : 0.0);
      // The error of sums in full, and of those that lose low bits; then the result's own rounding.
      const double bound = magnitude * std::ldexp(1.0, probe.fast ? -7 : -10) +
                           (probe.c == DType::kBF16 ? std::ldexp(std::abs(expected), -8) : 0.0);
      if (!(std::abs(double{result[at]} - expected) <= bound)) {
        return absl::FailedPreconditionError(absl::StrCat("gemm of codes, ",
                                                          probe.name,
                                                          ", element [",
                                                          row,
                                                          ", ",
                                                          column,
                                                          "]: the device gives ",
                                                          result[at],
                                                          ", expected ",
                                                          expected,
                                                          " within ",
                                                          bound));
      }
    }
  }
  return absl::OkStatus();
}

absl::Status ProbeGemms(plan::GemmPath path,
                        plan::FastAccumulation fast,
                        kernels::CudaStream& stream,
                        shard::HostAccess& memory,
                        std::span<std::byte> room) {
  const std::vector<ProbeCase> probes = ProbeCases(path, fast);
  if (probes.empty()) {
    return absl::OkStatus();
  }
  for (const ProbeCase& probe : probes) {
    RETURN_IF_ERROR(Annotate(RunProbe(probe, stream, memory, room),
                             absl::StrCat("gemm path ", plan::GemmPathName(path))));
  }
  const std::vector<std::byte> zeros(room.size());
  return memory.Write(zeros, room.data());
}

}  // namespace ravel::trainer
