#include "common/ckpt/digest.h"

#include <algorithm>
#include <cstring>

#include "common/check.h"
#include "common/ckpt/box_runs.h"
#include "common/signed_size.h"

namespace ravel::ckpt {
namespace {

// The same mix as kernels/scalar/digest.h, which device code shares; a test holds the two together.
constexpr uint64_t Mix(uint64_t x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdu;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53u;
  x ^= x >> 33;
  return x;
}

template <typename Element>
uint64_t Sum(std::span<const std::byte> bytes, uint64_t first_index) {
  constexpr uint64_t kStride = 0x9e3779b97f4a7c15u;
  uint64_t sum = 0;
  uint64_t product = (first_index + 1) * kStride;
  for (size_t at = 0; at < bytes.size(); at += sizeof(Element), product += kStride) {
    Element bits = 0;
    std::memcpy(&bits, bytes.data() + at, sizeof(Element));
    sum += Mix(product ^ bits);
  }
  return sum;
}

void AppendU64(std::string& out, uint64_t value) {
  for (int byte = 0; byte < 8; ++byte) {
    out.push_back(static_cast<char>((value >> (8 * byte)) & 0xffu));
  }
}

}  // namespace

uint64_t DigestRange(DType dtype, std::span<const std::byte> bytes, uint64_t first_index) {
  CHECK_EQ(bytes.size() % Size(DTypeBytes(dtype)), 0u);
  switch (DTypeBytes(dtype)) {
    case 1:
      return Sum<uint8_t>(bytes, first_index);
    case 2:
      return Sum<uint16_t>(bytes, first_index);
    case 4:
      return Sum<uint32_t>(bytes, first_index);
    default:
      return Sum<uint64_t>(bytes, first_index);
  }
}

uint64_t DigestBoxPart(DType dtype,
                       const Shape& shape,
                       const Box& box,
                       int64_t first_element,
                       std::span<const std::byte> bytes) {
  const int64_t element_bytes = DTypeBytes(dtype);
  const int64_t end = first_element + static_cast<int64_t>(bytes.size()) / element_bytes;
  CHECK(first_element >= 0 && end <= ElementCount(box.length));
  uint64_t sum = 0;
  VisitBoxRuns(shape, box, first_element, end, [&](const BoxRun& run) {
    const size_t offset = Size((run.box_begin - first_element) * element_bytes);
    const size_t count = Size(run.elements * element_bytes);
    sum +=
        DigestRange(dtype, bytes.subspan(offset, count), static_cast<uint64_t>(run.tensor_begin));
  });
  return sum;
}

Sha256Digest StateDigest(std::vector<TensorDigest> tensors) {
  std::sort(tensors.begin(), tensors.end(), [](const TensorDigest& a, const TensorDigest& b) {
    return a.name < b.name;
  });
  Sha256Stream stream;
  for (const TensorDigest& tensor : tensors) {
    std::string record;
    AppendU64(record, tensor.name.size());
    record += tensor.name;
    record += DTypeName(tensor.dtype);
    record.push_back('\0');
    AppendU64(record, tensor.shape.size());
    for (const int64_t size : tensor.shape) {
      AppendU64(record, static_cast<uint64_t>(size));
    }
    AppendU64(record, tensor.digest64);
    stream.Update(record);
  }
  return stream.Finish();
}

}  // namespace ravel::ckpt
