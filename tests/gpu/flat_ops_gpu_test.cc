// Ops whose bits are promised by formula: the device gives those of the CPU.

#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/adamw.h"
#include "kernels/digest.h"
#include "kernels/reduce_add.h"
#include "kernels/row_sum.h"
#include "kernels/tree_reduce.h"
#include "tests/gpu/gpu.h"

namespace ravel::kernels::testing {
namespace {

constexpr int64_t kCount = 10007;

class GpuFlatOpsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!TheGpu().missing.empty()) {
      GTEST_SKIP() << TheGpu().missing;
    }
  }

  // The same floats in pinned memory (for the device) and on the heap (for the CPU).
  struct Pair {
    CudaMemory memory;
    std::vector<float> heap;
    TensorView device(int64_t begin = 0, int64_t n = kCount) const {
      return VectorView(static_cast<float*>(memory.data()) + begin, n);
    }
    TensorView host(int64_t begin = 0, int64_t n = kCount) {
      return VectorView(heap.data() + begin, n);
    }
    bool Same() const {
      return std::memcmp(memory.data(), heap.data(), heap.size() * sizeof(float)) == 0;
    }
  };
  Pair Random(uint64_t seed) {
    Pair pair;
    std::mt19937_64 random(seed);
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < kCount; ++i) {
      pair.heap.push_back(normal(random));
    }
    pair.memory = *TheGpu().device->AllocatePinned(kCount * int64_t{sizeof(float)});
    std::memcpy(pair.memory.data(), pair.heap.data(), pair.heap.size() * sizeof(float));
    return pair;
  }
  CudaStream& gpu() { return *TheGpu().stream; }
  void Finish() { ASSERT_TRUE(gpu().Synchronize().ok()); }

  CpuStream cpu_;
};

TEST_F(GpuFlatOpsTest, AdamWGivesTheBitsOfTheCpu) {
  Pair p = Random(1), g = Random(2), m = Random(3), v = Random(4);
  for (float& x : v.heap) {
    x *= x;
  }
  std::memcpy(v.memory.data(), v.heap.data(), v.heap.size() * sizeof(float));
  UpdateScalars scalars;
  scalars.learning_rate = 1e-3f;
  scalars.weight_decay = 0.1f;
  for (const int64_t begin : {0, 1, 4}) {
    const int64_t n = kCount - 7 - begin;
    AdamWUpdate(
        gpu(),
        {p.device(begin, n), g.device(begin, n), m.device(begin, n), v.device(begin, n), scalars});
    AdamWUpdate(cpu_,
                {p.host(begin, n), g.host(begin, n), m.host(begin, n), v.host(begin, n), scalars});
    Finish();
    EXPECT_TRUE(p.Same() && m.Same() && v.Same()) << begin;
  }
}

TEST_F(GpuFlatOpsTest, AdamWOverATableGivesTheBitsOfTheCpu) {
  Pair p = Random(1), g = Random(2), m = Random(3), v = Random(4);
  for (float& x : v.heap) {
    x *= x;
  }
  std::memcpy(v.memory.data(), v.heap.data(), v.heap.size() * sizeof(float));
  UpdateScalars scalars;
  scalars.learning_rate = 1e-3f;
  scalars.weight_decay = 0.1f;
  // Aligned and not, short, with a gap, longer than a block takes at a time.
  const std::vector<UpdatePiece> pieces = {{.offset = 0, .elements = 13},
                                           {.offset = 16, .elements = 4, .decays = 0},
                                           {.offset = 21, .elements = kCount - 40, .decays = 0}};
  const std::vector<UpdatePiece> cut = CutForBlocks(pieces);
  const CudaMemory memory =
      *TheGpu().device->AllocatePinned(static_cast<int64_t>(cut.size() * sizeof(UpdatePiece)));
  std::memcpy(memory.data(), cut.data(), cut.size() * sizeof(UpdatePiece));
  AdamWUpdate(gpu(),
              {.p = p.device(),
               .g = g.device(),
               .m = m.device(),
               .v = v.device(),
               .scalars = scalars,
               .table = {.pieces = static_cast<const UpdatePiece*>(memory.data()),
                         .count = static_cast<int64_t>(cut.size())}});
  AdamWUpdate(cpu_,
              {.p = p.host(),
               .g = g.host(),
               .m = m.host(),
               .v = v.host(),
               .scalars = scalars,
               .table = {.pieces = pieces.data(), .count = 3}});
  Finish();
  EXPECT_TRUE(p.Same() && m.Same() && v.Same());
}

TEST_F(GpuFlatOpsTest, TreeSumsGiveTheBitsOfTheCpu) {
  for (const size_t count : {1u, 2u, 8u, 64u, 128u}) {
    std::vector<Pair> pairs;
    TreeSumArgs on_gpu, on_cpu;
    for (size_t i = 0; i < count; ++i) {
      pairs.push_back(Random(i));
    }
    for (Pair& pair : pairs) {
      on_gpu.pieces.push_back(pair.device().As<float>());
      on_cpu.pieces.push_back(pair.host().As<float>());
    }
    Pair out = Random(99);
    on_gpu.out = out.device();
    on_cpu.out = out.host();
    TreeSum(gpu(), on_gpu);
    TreeSum(cpu_, on_cpu);
    Finish();
    EXPECT_TRUE(out.Same()) << count;
  }
}

TEST_F(GpuFlatOpsTest, SumsOfBf16PiecesGiveTheBitsOfTheCpu) {
  for (const size_t count : {1u, 2u, 4u, 64u, 128u}) {
    for (const Output output : {Output::kOverwrite, Output::kAccumulate}) {
      std::vector<Pair> pairs;  // of two bf16 values each
      ReduceAddArgs on_gpu, on_cpu;
      for (size_t i = 0; i < count; ++i) {
        pairs.push_back(Random(i));
      }
      const int64_t shift = count == 2 ? 1 : 0;  // no access of vectors
      for (Pair& pair : pairs) {
        auto* of_gpu = static_cast<float*>(pair.memory.data());
        for (size_t i = 0; i < pair.heap.size(); ++i) {  // no NaN in the lower halves
          const uint32_t finite = std::bit_cast<uint32_t>(pair.heap[i]) & 0xFFFFBFFFu;
          of_gpu[i] = pair.heap[i] = std::bit_cast<float>(finite);
        }
        on_gpu.rounded_pieces.push_back(pair.device().As<uint16_t>() + shift);
        on_cpu.rounded_pieces.push_back(pair.host().As<uint16_t>() + shift);
      }
      Pair out = Random(99);
      on_gpu.out = out.device();
      on_cpu.out = out.host();
      on_gpu.output = on_cpu.output = output;
      ReduceAdd(gpu(), on_gpu);
      ReduceAdd(cpu_, on_cpu);
      Finish();
      EXPECT_TRUE(out.Same()) << count;
    }
  }
}

TEST_F(GpuFlatOpsTest, RowSumsAndDigestsGiveTheBitsOfTheCpu) {
  for (const int64_t columns : {1, 127, 128, 1000}) {
    Pair x = Random(static_cast<uint64_t>(columns));
    Pair sums = Random(5);
    const int64_t rows = kCount / columns;
    RowSumSquares(gpu(), {MatrixView(x.device().As<float>(), rows, columns), sums.device(0, rows)});
    RowSumSquares(cpu_, {MatrixView(x.host().As<float>(), rows, columns), sums.host(0, rows)});
    Finish();
    EXPECT_TRUE(sums.Same()) << columns;
    EXPECT_EQ(DigestRange(gpu(), x.device(), 17), DigestRange(cpu_, x.host(), 17));
  }
}

TEST_F(GpuFlatOpsTest, ReduceAddCountsAndSquares) {
  Pair a = Random(1), out = Random(2);
  a.heap[100] = INFINITY;
  static_cast<float*>(a.memory.data())[100] = INFINITY;
  const CudaMemory statistics = *TheGpu().device->AllocatePinned(16);
  double* squares = static_cast<double*>(statistics.data());
  int64_t* non_finite = reinterpret_cast<int64_t*>(squares + 1);
  *non_finite = 3;
  ReduceAdd(gpu(),
            {.pieces = {a.device().As<float>()},
             .out = out.device(),
             .output = Output::kAccumulate,
             .squared_norm = squares,
             .non_finite = non_finite});
  ReduceAdd(cpu_,
            {.pieces = {a.host().As<float>()}, .out = out.host(), .output = Output::kAccumulate});
  Finish();
  EXPECT_TRUE(out.Same());
  EXPECT_EQ(*non_finite, 4);
  EXPECT_TRUE(std::isinf(*squares));
}

}  // namespace
}  // namespace ravel::kernels::testing
