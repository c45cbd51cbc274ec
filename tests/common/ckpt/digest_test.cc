#include "common/ckpt/digest.h"

#include <cstring>
#include <vector>

#include <gtest/gtest.h>

#include "common/ckpt/box_runs.h"
#include "kernels/scalar/digest.h"

namespace ravel::ckpt {
namespace {

template <typename T>
std::span<const std::byte> Bytes(const std::vector<T>& values) {
  return std::as_bytes(std::span<const T>(values));
}

TEST(DigestTest, KnownAnswers) {
  const std::vector<float> six = {1, 2, 3, 4, 5, 6};
  EXPECT_EQ(DigestRange(DType::kF32, Bytes(six), 0), 0x2ac202f4a66e5c12u);
  const std::vector<float> swapped = {4, 5, 6, 1, 2, 3};
  EXPECT_EQ(DigestRange(DType::kF32, Bytes(swapped), 0), 0x1d3112f9261fd8deu);
  EXPECT_EQ(DigestRange(DType::kU8, Bytes(std::vector<uint8_t>(4, 0)), 0), 0xb281820ba9362fc2u);
  EXPECT_EQ(DigestBox(DType::kF32, {}, {}, Bytes(std::vector<float>{3.0f})), 0x9f53b53ff713cb15u);
  EXPECT_EQ(DigestRange(DType::kF32, {}, 0), 0u);
}

TEST(DigestTest, PartsOfAnyPartitionAddUp) {
  std::vector<uint16_t> values(1000);
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<uint16_t>(i * 7919);
  }
  const uint64_t whole = DigestRange(DType::kBF16, Bytes(values), 0);
  for (const size_t cut : {1u, 333u, 999u}) {
    const uint64_t parts = DigestRange(DType::kBF16, Bytes(values).first(2 * cut), 0) +
                           DigestRange(DType::kBF16, Bytes(values).subspan(2 * cut), cut);
    EXPECT_EQ(parts, whole) << cut;
  }
}

TEST(DigestTest, ColumnsOfAMatrixAddUpToTheWhole) {
  constexpr int64_t kRows = 5;
  constexpr int64_t kColumns = 7;
  std::vector<float> whole(kRows * kColumns);
  for (size_t i = 0; i < whole.size(); ++i) {
    whole[i] = static_cast<float>(i) * 0.25f;
  }
  uint64_t sum = 0;
  for (const auto& [first, count] : {std::pair<int64_t, int64_t>{0, 3}, {3, 4}}) {
    std::vector<float> part;
    for (int64_t row = 0; row < kRows; ++row) {
      part.insert(part.end(),
                  whole.begin() + row * kColumns + first,
                  whole.begin() + row * kColumns + first + count);
    }
    sum += DigestBox(DType::kF32, {kRows, kColumns}, {{0, first}, {kRows, count}}, Bytes(part));
  }
  EXPECT_EQ(sum, DigestRange(DType::kF32, Bytes(whole), 0));
}

TEST(DigestTest, PartsOfABoxAddUpToTheBox) {
  const Shape shape = {6, 5, 4};
  const Box box = {{1, 2, 1}, {4, 2, 3}};
  std::vector<float> values(24);
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<float>(i) + 0.5f;
  }
  const uint64_t whole = DigestBox(DType::kF32, shape, box, Bytes(values));
  uint64_t sum = 0;
  for (int64_t i = 0; i < 24; i += 8) {
    sum += DigestBoxPart(
        DType::kF32, shape, box, i, Bytes(values).subspan(static_cast<size_t>(4 * i), 32));
  }
  EXPECT_EQ(sum, whole);
}

TEST(DigestTest, KernelsMixAlike) {
  const std::vector<uint64_t> values = {0, 1, 0xdeadbeefcafef00du};
  uint64_t sum = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    sum += kernels::scalar::DigestElement(100 + i, values[i]);
  }
  EXPECT_EQ(DigestRange(DType::kU64, Bytes(values), 100), sum);
}

TEST(DigestTest, AnyFlippedBitChangesIt) {
  std::vector<float> values = {1, 2, 3, 4, 5, 6, 7, 8};
  const uint64_t before = DigestRange(DType::kF32, Bytes(values), 0);
  auto* raw = reinterpret_cast<unsigned char*>(values.data());
  for (size_t bit = 0; bit < values.size() * 32; ++bit) {
    raw[bit / 8] = static_cast<unsigned char>(raw[bit / 8] ^ (1u << (bit % 8)));
    EXPECT_NE(DigestRange(DType::kF32, Bytes(values), 0), before) << bit;
    raw[bit / 8] = static_cast<unsigned char>(raw[bit / 8] ^ (1u << (bit % 8)));
  }
}

TEST(StateDigestTest, DependsOnEveryFieldAndNotOnTheOrder) {
  const TensorDigest a = {"a", DType::kF32, {2, 3}, 7};
  const TensorDigest b = {"b", DType::kF32, {6}, 9};
  const Sha256Digest both = StateDigest({a, b});
  EXPECT_EQ(StateDigest({b, a}), both);
  EXPECT_NE(StateDigest({a}), both);
  EXPECT_NE(StateDigest({{"c", DType::kF32, {2, 3}, 7}, b}), both);
  EXPECT_NE(StateDigest({{"a", DType::kI32, {2, 3}, 7}, b}), both);
  EXPECT_NE(StateDigest({{"a", DType::kF32, {3, 2}, 7}, b}), both);
  EXPECT_NE(StateDigest({{"a", DType::kF32, {2, 3}, 8}, b}), both);
}

TEST(BoxRunsTest, RunsVisitEveryElementOnceInOrder) {
  const Shape shape = {3, 4, 5};
  const Box box = {{1, 1, 2}, {2, 3, 3}};
  std::vector<int64_t> seen;
  VisitBoxRuns(shape, box, [&](const BoxRun& run) {
    EXPECT_EQ(run.box_begin, static_cast<int64_t>(seen.size()));
    for (int64_t i = 0; i < run.elements; ++i) {
      seen.push_back(run.tensor_begin + i);
    }
  });
  std::vector<int64_t> expected;
  for (int64_t i = 1; i < 3; ++i) {
    for (int64_t j = 1; j < 4; ++j) {
      for (int64_t k = 2; k < 5; ++k) {
        expected.push_back((i * 4 + j) * 5 + k);
      }
    }
  }
  EXPECT_EQ(seen, expected);
}

// Every range of every box of a small tensor: runs and boxes are its elements, in order.
TEST(BoxRunsTest, RangesOfBoxesAreTheirElements) {
  const Shape shape = {3, 2, 4};
  const auto add = [](std::vector<int64_t>& to, const BoxRun& run) {
    for (int64_t i = 0; i < run.elements; ++i) {
      to.push_back(run.tensor_begin + i);
    }
  };
  for (const Box& box : {Box{{0, 0, 0}, {3, 2, 4}},
                         Box{{1, 0, 0}, {2, 2, 4}},
                         Box{{0, 0, 1}, {3, 2, 2}},
                         Box{{1, 1, 0}, {2, 1, 4}}}) {
    std::vector<int64_t> all;
    VisitBoxRuns(shape, box, [&](const BoxRun& run) { add(all, run); });
    const auto total = static_cast<int64_t>(all.size());
    ASSERT_EQ(total, ElementCount(box.length));
    for (int64_t i = 0; i < total; ++i) {
      EXPECT_EQ(TensorIndex(shape, box, i), all[static_cast<size_t>(i)]);
      EXPECT_EQ(BoxIndex(shape, box, all[static_cast<size_t>(i)]), i);
    }
    for (int64_t begin = 0; begin <= total; ++begin) {
      for (int64_t end = begin; end <= total; ++end) {
        const std::vector<int64_t> expected(all.begin() + begin, all.begin() + end);
        std::vector<int64_t> runs;
        VisitBoxRuns(shape, box, begin, end, [&](const BoxRun& run) {
          EXPECT_EQ(run.box_begin, begin + static_cast<int64_t>(runs.size()));
          add(runs, run);
        });
        EXPECT_EQ(runs, expected);
        std::vector<int64_t> boxes;
        for (const Box& part : BoxesOfRange(box, begin, end)) {
          VisitBoxRuns(shape, part, [&](const BoxRun& run) { add(boxes, run); });
        }
        EXPECT_EQ(boxes, expected);
      }
    }
  }
}

TEST(BoxRunsTest, WholeRowsAreOneRun) {
  int runs = 0;
  VisitBoxRuns({8, 4, 5}, {{2, 0, 0}, {5, 4, 5}}, [&](const BoxRun& run) {
    ++runs;
    EXPECT_EQ(run.tensor_begin, 40);
    EXPECT_EQ(run.elements, 100);
  });
  EXPECT_EQ(runs, 1);
}

}  // namespace
}  // namespace ravel::ckpt
