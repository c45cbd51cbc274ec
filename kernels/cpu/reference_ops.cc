#include "kernels/cpu/reference_ops.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <numbers>

#include "common/signed_size.h"
#include "kernels/cpu/simd_ops.h"
#include "kernels/scalar/bfloat16.h"
#include "kernels/scalar/digest.h"
#include "kernels/scalar/float16.h"
#include "kernels/scalar/philox.h"

namespace ravel::kernels::cpu {

namespace {

float ValueAt(const TensorView& row, int64_t column) {
  switch (row.dtype) {
    case DType::kBF16:
      return scalar::Bf16Value(row.As<uint16_t>()[column]);
    case DType::kF16:
      return scalar::Fp16Value(row.As<uint16_t>()[column]);
    default:
      return row.As<float>()[column];
  }
}

// The row is of the table's type or fp32: -0 is its sign's bit alone.
void FillMinusZero(const TensorView& row) {
  if (row.dtype == DType::kF32) {
    std::fill_n(row.As<float>(), row.columns(), -0.0f);
  } else {
    std::fill_n(row.As<uint16_t>(), row.columns(), uint16_t{0x8000});
  }
}

}  // namespace

void EmbeddingForward(const EmbeddingForwardArgs& args) {
  const int32_t* ids = args.ids.As<int32_t>();
  const size_t bytes = Size(DTypeBytes(args.out.dtype) * args.out.columns());
  for (int64_t token = 0; token < args.out.rows(); ++token) {
    const int64_t row = ids[token] - args.rows.first;
    const TensorView out = RowsOf(args.out, token, 1);
    if (row < 0 || row >= args.table.rows()) {
      FillMinusZero(out);
    } else if (out.dtype == args.table.dtype) {
      std::memcpy(out.data, RowsOf(args.table, row, 1).data, bytes);
    } else {
      const TensorView from = RowsOf(args.table, row, 1);
      for (int64_t j = 0; j < out.columns(); ++j) {
        out.As<float>()[j] = ValueAt(from, j);
      }
    }
  }
}

void BuildRopeTable(const RopeTableArgs& args) {
  const float* inverse_frequency = args.inverse_frequency.As<float>();
  for (int64_t position = 0; position < args.cosine.rows(); ++position) {
    for (int64_t j = 0; j < args.cosine.columns(); ++j) {
      const double angle =
          static_cast<double>(position) * static_cast<double>(inverse_frequency[j]);
      args.cosine.Row<float>(position)[j] = static_cast<float>(std::cos(angle));
      args.sine.Row<float>(position)[j] = static_cast<float>(std::sin(angle));
    }
  }
}

namespace {

struct NormalPair {
  double first;
  double second;
};

// Box and Muller; the first draw is moved half a step off zero, whose logarithm does not exist.
NormalPair BoxMuller(uint32_t radius_bits, uint32_t angle_bits) {
  constexpr double kStep = 0x1p-32;
  const double radius =
      std::sqrt(-2.0 * std::log((static_cast<double>(radius_bits) + 0.5) * kStep));
  const double angle = 2.0 * std::numbers::pi * static_cast<double>(angle_bits) * kStep;
  return {radius * std::cos(angle), radius * std::sin(angle)};
}

}  // namespace

void InitNormal(const InitNormalArgs& args) {
  float* out = args.out.As<float>();
  const int64_t n = args.out.elements();
  const double deviation = static_cast<double>(args.standard_deviation);
  for (int64_t i = 0; i < n;) {
    const uint64_t index = static_cast<uint64_t>(args.first_index + i);
    const scalar::PhiloxWords words = scalar::Philox4x32(
        args.seed, scalar::PhiloxCounter({.block = index / 4, .site = args.site}));
    const NormalPair low = BoxMuller(words[0], words[1]);
    const NormalPair high = BoxMuller(words[2], words[3]);
    const double values[4] = {low.first, low.second, high.first, high.second};
    for (size_t word = index % 4; word < 4 && i < n; ++word, ++i) {
      out[i] = static_cast<float>(values[word] * deviation);
    }
  }
}

namespace {

template <typename Word>
uint64_t DigestOf(const void* data, int64_t count, uint64_t first_index) {
  const char* bytes = static_cast<const char*>(data);
  uint64_t sum = 0;
  for (int64_t i = 0; i < count; ++i) {
    Word word;
    std::memcpy(&word, bytes + static_cast<size_t>(i) * sizeof(Word), sizeof(Word));
    sum += scalar::DigestElement(first_index + static_cast<uint64_t>(i), word);
  }
  return sum;
}

}  // namespace

uint64_t DigestRange(const TensorView& range, uint64_t first_index) {
  const int64_t count = range.elements();
  switch (DTypeBytes(range.dtype)) {
    case 1:
      return DigestOf<uint8_t>(range.data, count, first_index);
    case 2:
      return DigestOf<uint16_t>(range.data, count, first_index);
    case 4:
      return ActiveOps().digest_words(range.As<uint32_t>(), count, first_index);
    default:
      return DigestOf<uint64_t>(range.data, count, first_index);
  }
}

double TreeSumDouble(const double* values, int64_t count) {
  // The subtree of `width` leaves that starts at `values`, of which `count` exist.
  struct Node {
    static double Sum(const double* values, int64_t count, int64_t width) {
      if (count <= 0) {
        return 0.0;
      }
      if (width == 1) {
        return values[0];
      }
      const int64_t half = width / 2;
      return Sum(values, count < half ? count : half, half) +
             Sum(values + half, count - half, half);
    }
  };
  if (count <= 0) {
    return 0.0;
  }
  return Node::Sum(
      values, count, static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(count))));
}

}  // namespace ravel::kernels::cpu
