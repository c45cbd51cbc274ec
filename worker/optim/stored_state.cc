// Converts between stored state and the fp32 values that checkpoints and initialisation use. Three
// cases: fp32 is copied; a main weight stored as bf16 plus remainder is joined and split exactly;
// bf16 states are widened, and narrowed only if every value is one that bf16 has (checked).
// Conversions go in chunks of 2^20 elements through host memory, so a shard in device memory needs
// no second copy of its size.

#include "worker/optim/stored_state.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <optional>
#include <vector>

#include "common/check.h"
#include "common/dtype.h"
#include "common/signed_size.h"
#include "kernels/scalar/bfloat16.h"
#include "kernels/scalar/float16.h"
#include "kernels/scalar/fp8_state.h"

namespace ravel::optim {
namespace {

// Converted at a time.
constexpr int64_t kChunkElements = int64_t{1} << 20;

template <typename T>
std::span<std::byte> Writable(std::vector<T>& values) {
  return std::as_writable_bytes(std::span<T>(values));
}
template <typename T>
std::span<const std::byte> Readable(const std::vector<T>& values) {
  return std::as_bytes(std::span<const T>(values));
}

// All of a value that bf16 has, to the bit.
uint16_t UpperHalf(float value) {
  return static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16);
}

// The state that a role of scales is of, by BufferStatesOf.
std::optional<size_t> ScaledState(plan::OptimizerKind kind, plan::StateRole role) {
  for (const plan::StateSpec& state : plan::StatesOf(kind)) {
    if (state.role == role && state.shape == plan::StateShape::kScale) {
      return Size(state.scales);
    }
  }
  return std::nullopt;
}

bool IsSquare(plan::OptimizerKind kind, plan::StateRole role) {
  return plan::BufferStatesOf(kind)[plan::BufferStateIndex(kind, role)].element ==
         plan::StateElement::kSquare;
}

TensorView StateOf(const shard::ParameterGroup& group,
                   plan::StateRole role,
                   int64_t first,
                   int64_t elements) {
  const shard::ParameterGroup::Stored stored = group.StoredAt(first, elements);
  return role == plan::StateRole::kParam
             ? stored.main_weight
             : stored.states[plan::BufferStateIndex(group.optimizer(), role)];
}

absl::Status ReadJoined(shard::HostAccess& memory,
                        const shard::ParameterGroup::Stored& stored,
                        std::vector<float>& to) {
  std::vector<uint16_t> weights(to.size());
  std::vector<int16_t> remainders(to.size());
  RETURN_IF_ERROR(memory.Read(stored.model_weight.data, Writable(weights)));
  RETURN_IF_ERROR(memory.Read(stored.remainder.data, Writable(remainders)));
  for (size_t i = 0; i < to.size(); ++i) {
    to[i] = kernels::scalar::JoinOf({weights[i], remainders[i]});
  }
  return absl::OkStatus();
}

absl::Status WriteSplit(shard::HostAccess& memory,
                        const shard::ParameterGroup::Stored& stored,
                        std::span<const float> values) {
  std::vector<uint16_t> weights(values.size());
  std::vector<int16_t> remainders(values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    const kernels::scalar::SplitWeight split = kernels::scalar::SplitOf(values[i]);
    weights[i] = split.weight;
    remainders[i] = split.remainder;
  }
  RETURN_IF_ERROR(memory.Write(Readable(weights), stored.model_weight.data));
  return memory.Write(Readable(remainders), stored.remainder.data);
}

// The codes of elements from `first` of what is stored, and all scales of the rank.
absl::Status ReadDecoded(shard::HostAccess& memory,
                         const shard::ParameterGroup& group,
                         plan::StateRole role,
                         int64_t first,
                         std::vector<float>& to) {
  const auto elements = static_cast<int64_t>(to.size());
  const size_t slot = plan::BufferStateIndex(group.optimizer(), role);
  const shard::ParameterGroup::Stored stored = group.StoredAt(first, elements);
  std::vector<uint8_t> codes(to.size());
  std::vector<uint8_t> scales(Size(stored.scales[slot].elements()));
  RETURN_IF_ERROR(memory.Read(stored.states[slot].data, Writable(codes)));
  RETURN_IF_ERROR(memory.Read(stored.scales[slot].data, Writable(scales)));
  std::fill(to.begin(), to.end(), 0.0f);  // padding, which has no scale
  const bool square = IsSquare(group.optimizer(), role);
  group.VisitScales([&](int64_t begin, int64_t end, int64_t scale) {
    for (int64_t i = std::max(begin, first); i < std::min(end, first + elements); ++i) {
      const uint8_t code = codes[Size(i - first)];
      to[Size(i - first)] = square ? kernels::scalar::DecodeSquare(code, scales[Size(scale)])
                                   : kernels::scalar::DecodeMean(code, scales[Size(scale)]);
    }
  });
  return absl::OkStatus();
}

// Scales are bytes in memory and fp32 in files.
absl::Status ReadScales(shard::HostAccess& memory,
                        const TensorView& scales,
                        int64_t first,
                        std::span<std::byte> to) {
  std::vector<uint8_t> exponents(to.size() / sizeof(float));
  CHECK(first >= 0 && first + std::ssize(exponents) <= scales.elements());
  RETURN_IF_ERROR(memory.Read(scales.As<uint8_t>() + first, Writable(exponents)));
  for (size_t i = 0; i < exponents.size(); ++i) {
    const float value = kernels::scalar::E8M0Value(exponents[i]);
    std::memcpy(to.data() + i * sizeof(value), &value, sizeof(value));
  }
  return absl::OkStatus();
}

absl::Status ReadWidened(shard::HostAccess& memory,
                         const TensorView& view,
                         std::vector<float>& to) {
  std::vector<uint16_t> narrow(to.size());
  RETURN_IF_ERROR(memory.Read(view.data, Writable(narrow)));
  std::transform(narrow.begin(), narrow.end(), to.begin(), Bf16ToFloat);
  return absl::OkStatus();
}

absl::Status WriteNarrowed(shard::HostAccess& memory,
                           const TensorView& view,
                           std::span<const float> values) {
  CHECK_EQ(FirstNotBf16(values), values.size());
  std::vector<uint16_t> narrow(values.size());
  std::transform(values.begin(), values.end(), narrow.begin(), UpperHalf);
  return memory.Write(Readable(narrow), view.data);
}

}  // namespace

absl::Status ReadStored(shard::HostAccess& memory,
                        const shard::ParameterGroup& group,
                        plan::StateRole role,
                        int64_t first,
                        std::span<std::byte> to) {
  constexpr size_t kBytes = sizeof(float);
  CHECK_EQ(to.size() % kBytes, 0u);
  const auto elements = static_cast<int64_t>(to.size() / kBytes);
  const bool joined = role == plan::StateRole::kParam && group.keeps_remainders();
  const TensorView state = StateOf(group, role, first, elements);
  if (!joined && state.dtype == DType::kF32) {
    CHECK_MSG(state.present() || elements == 0, "frozen tensors have no states");
    return memory.Read(state.data, to);
  }
  std::vector<float> chunk;
  for (int64_t begin = 0; begin < elements; begin += kChunkElements) {
    const int64_t count = std::min(kChunkElements, elements - begin);
    chunk.resize(Size(count));
    const shard::ParameterGroup::Stored stored = group.StoredAt(first + begin, count);
    if (joined) {
      RETURN_IF_ERROR(ReadJoined(memory, stored, chunk));
    } else if (plan::IsFp8State(state.dtype)) {
      RETURN_IF_ERROR(ReadDecoded(memory, group, role, first + begin, chunk));
    } else {
      RETURN_IF_ERROR(ReadWidened(memory, StateOf(group, role, first + begin, count), chunk));
    }
    std::memcpy(to.data() + Size(begin) * kBytes, chunk.data(), Size(count) * kBytes);
  }
  return absl::OkStatus();
}

DType StoredType(const shard::ParameterGroup& group, plan::StateRole role) {
  return StateOf(group, role, 0, 0).dtype;
}

float* StoredFloats(const shard::ParameterGroup& group, plan::StateRole role) {
  const TensorView view = StateOf(group, role, 0, group.shard_elements());
  return view.dtype == DType::kF32 ? view.As<float>() : nullptr;
}

absl::Status ReadSaved(shard::HostAccess& memory,
                       const shard::ParameterGroup& group,
                       plan::StateRole role,
                       int64_t first,
                       std::span<std::byte> to) {
  if (role == plan::StateRole::kParam) {
    return ReadStored(memory, group, role, first, to);
  }
  const std::optional<size_t> scaled = ScaledState(group.optimizer(), role);
  if (scaled.has_value()) {
    return ReadScales(memory, group.StoredAt(0, 0).scales[*scaled], first, to);
  }
  const auto bytes = static_cast<int64_t>(to.size());
  const int64_t element_bytes = DTypeBytes(StoredType(group, role));
  CHECK_EQ(bytes % element_bytes, 0);
  const TensorView state = StateOf(group, role, first, bytes / element_bytes);
  CHECK_MSG(state.present() || bytes == 0, "frozen tensors have no states");
  return memory.Read(state.data, to);
}

absl::Status WriteCodes(shard::HostAccess& memory,
                        const shard::ParameterGroup& group,
                        plan::StateRole role,
                        std::span<const std::byte> codes,
                        std::span<const float> scales) {
  const size_t slot = plan::BufferStateIndex(group.optimizer(), role);
  const shard::ParameterGroup::Stored stored = group.StoredAt(0, group.shard_elements());
  CHECK(plan::IsFp8State(stored.states[slot].dtype));
  CHECK_EQ(std::ssize(codes), group.shard_elements());
  CHECK_LE(std::ssize(scales), stored.scales[slot].elements());
  std::vector<uint8_t> exponents(scales.size());
  std::transform(scales.begin(), scales.end(), exponents.begin(), kernels::scalar::E8M0RoundUp);
  RETURN_IF_ERROR(memory.Write(codes, stored.states[slot].data));
  return memory.Write(Readable(exponents), stored.scales[slot].data);
}

size_t FirstNotScale(std::span<const float> scales) {
  const auto other = [](float scale) {
    const uint8_t exponent = kernels::scalar::E8M0RoundUp(scale);
    return exponent == 255 || std::bit_cast<uint32_t>(kernels::scalar::E8M0Value(exponent)) !=
                                  std::bit_cast<uint32_t>(scale);
  };
  return Size(std::find_if(scales.begin(), scales.end(), other) - scales.begin());
}

size_t FirstNanCode(std::span<const std::byte> codes, bool square) {
  const auto is_nan = [square](std::byte code) {
    return (code | std::byte{square ? uint8_t{0} : uint8_t{0x80}}) == std::byte{0xFF};
  };
  return Size(std::find_if(codes.begin(), codes.end(), is_nan) - codes.begin());
}

size_t FirstNotBf16(std::span<const float> values) {
  const auto wide = [](float value) { return (std::bit_cast<uint32_t>(value) & 0xffffu) != 0; };
  return Size(std::find_if(values.begin(), values.end(), wide) - values.begin());
}

absl::Status WriteStored(shard::HostAccess& memory,
                         const shard::ParameterGroup& group,
                         plan::StateRole role,
                         int64_t first,
                         std::span<const float> values) {
  const auto elements = static_cast<int64_t>(values.size());
  const bool split = role == plan::StateRole::kParam && group.keeps_remainders();
  const TensorView state = StateOf(group, role, first, elements);
  if (!split && state.dtype == DType::kF32) {
    CHECK_MSG(state.present() || elements == 0, "frozen tensors have no states");
    return memory.Write(std::as_bytes(values), state.data);
  }
  for (int64_t begin = 0; begin < elements; begin += kChunkElements) {
    const int64_t count = std::min(kChunkElements, elements - begin);
    const std::span<const float> chunk = Part(values, begin, count);
    const shard::ParameterGroup::Stored stored = group.StoredAt(first + begin, count);
    CHECK_MSG(split || state.dtype == DType::kBF16, "fp8 states are written as codes");
    RETURN_IF_ERROR(split
                        ? WriteSplit(memory, stored, chunk)
                        : WriteNarrowed(memory, StateOf(group, role, first + begin, count), chunk));
  }
  return absl::OkStatus();
}

absl::Status ReadScales(shard::HostAccess& memory,
                        const quant::QuantState& quant,
                        plan::StateRole role,
                        int64_t first,
                        std::span<float> to) {
  const quant::QuantState::StateRange range = quant.StateOf(role, first, std::ssize(to));
  std::vector<float> values(to.size() * Size(range.stride));
  RETURN_IF_ERROR(memory.Read(range.data, std::as_writable_bytes(std::span<float>(values))));
  for (size_t i = 0; i < to.size(); ++i) {
    to[i] = values[i * Size(range.stride)];
  }
  return absl::OkStatus();
}

absl::Status WriteScales(shard::HostAccess& memory,
                         const quant::QuantState& quant,
                         plan::StateRole role,
                         int64_t first,
                         std::span<const float> from) {
  const quant::QuantState::StateRange range = quant.StateOf(role, first, std::ssize(from));
  std::vector<float> values(from.size() * Size(range.stride), 0.0f);
  for (size_t i = 0; i < from.size(); ++i) {
    values[i * Size(range.stride)] = from[i];
  }
  return memory.Write(std::as_bytes(std::span<const float>(values)), range.data);
}

absl::Status RoundStored(shard::HostAccess& memory, const shard::ParameterGroup& group) {
  std::vector<float> values;
  std::vector<uint16_t> rounded;
  for (int64_t begin = 0; begin < group.shard_elements(); begin += kChunkElements) {
    const int64_t count = std::min(kChunkElements, group.shard_elements() - begin);
    const shard::ParameterGroup::Stored stored = group.StoredAt(begin, count);
    values.resize(Size(count));
    rounded.resize(Size(count));
    RETURN_IF_ERROR(memory.Read(stored.main_weight.data, Writable(values)));
    const bool fp16 = stored.model_weight.dtype == DType::kF16;
    std::transform(values.begin(),
                   values.end(),
                   rounded.begin(),
                   fp16 ? kernels::scalar::Fp16Nearest : kernels::scalar::Bf16HalfAway);
    RETURN_IF_ERROR(memory.Write(Readable(rounded), stored.model_weight.data));
  }
  return absl::OkStatus();
}

}  // namespace ravel::optim
