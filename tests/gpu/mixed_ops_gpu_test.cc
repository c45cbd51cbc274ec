// Mixed precision, copies of layout and initial values: the device gives what the CPU gives, bit
// for bit where the contract is a formula.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "common/check.h"
#include "kernels/cast.h"
#include "kernels/element_update.h"
#include "kernels/embedding.h"
#include "kernels/grouped_update.h"
#include "kernels/philox.h"
#include "kernels/rope.h"
#include "kernels/scalar/bfloat16.h"
#include "kernels/tree_reduce.h"
#include "tests/gpu/gpu.h"
#include "tests/gpu/twin.h"

namespace ravel::kernels::testing {
namespace {

constexpr int64_t kElements = 4099;

class GpuMixedOpsTest : public TwinTest {};

// Everything that an update may touch.
struct Optimizer {
  Twin main = Twin::Normal(DType::kF32, kElements, 1);
  Twin weight;
  Twin remainder = Twin(DType::kI16, kElements);
  Twin g;
  Twin m;
  Twin v;
  Twin scalars = Twin(DType::kU8, sizeof(UpdateScalars));
  Twin apply = Twin(DType::kI32, 1);
  ElementRule rule = ElementRule::kAdamW;
  PieceTable host_table;
  PieceTable device_table;
  // Of the device, in place of Update's where it is not null.
  const int64_t* device_step = nullptr;

  Optimizer(DType gradient, DType states, DType weights = DType::kBF16)
      : weight(weights, kElements),
        g(Twin::Normal(gradient, kElements, 2)),
        m(Twin::Normal(states, kElements, 3)),
        v(Twin::Normal(states, kElements, 4)) {
    for (int64_t i = 0; i < kElements; ++i) {
      const scalar::SplitWeight split = scalar::SplitOf(main.host().As<float>()[i]);
      weight.host().As<uint16_t>()[i] = split.weight;
      remainder.host().As<int16_t>()[i] = split.remainder;
      if (states == DType::kBF16) {
        v.host().As<uint16_t>()[i] &= 0x7FFF;  // squares are not negative
      } else {
        v.host().As<float>()[i] = std::fabs(v.host().As<float>()[i]);
      }
    }
    UpdateScalars values;
    values.learning_rate = 1e-2f;
    values.weight_decay = 0.1f;
    std::memcpy(scalars.host().data, &values, sizeof(values));
    *apply.host().As<int32_t>() = 1;
    for (Twin* twin : {&weight, &remainder, &v, &scalars, &apply}) {
      twin->Send();
    }
  }

  // An update of [begin, end) on the device or on the CPU.
  void Update(Stream& stream, bool split, uint32_t step, int64_t begin, int64_t end) {
    const bool on_device = stream.backend() == Backend::kCuda;
    const auto range = [&](Twin& twin) {
      return on_device ? twin.device(begin, end) : twin.host(begin, end);
    };
    ElementUpdateArgs args = {.weight = range(weight),
                              .g = range(g),
                              .m = range(m),
                              .v = range(v),
                              .seed = 77,
                              .step = step,
                              .site = 5,
                              .first_index = 1001 + begin};
    (split ? args.remainder : args.main_weight) = range(split ? remainder : main);
    args.device_scalars = (on_device ? scalars.device() : scalars.host()).As<const UpdateScalars>();
    args.apply = (on_device ? apply.device() : apply.host()).As<const int32_t>();
    args.table = on_device ? device_table : host_table;
    args.rule = rule;
    if (rule != ElementRule::kAdamW) {
      args.v = {};
    }
    if (on_device && device_step != nullptr) {
      args.step = 0;
      args.device_step = device_step;
    }
    ElementUpdate(stream, args);
  }

  bool Same() const {
    return main.Same() && weight.Same() && remainder.Same() && m.Same() && v.Same();
  }
};

TEST_F(GpuMixedOpsTest, MixedAdamWGivesTheBitsOfTheCpu) {
  for (const DType gradient : {DType::kF32, DType::kBF16}) {
    for (const DType states : {DType::kF32, DType::kBF16}) {
      for (const bool split : {false, true}) {
        Optimizer optimizer(gradient, states);
        for (uint32_t step = 0; step < 3; ++step) {
          for (Stream* stream : {static_cast<Stream*>(&gpu()), static_cast<Stream*>(&cpu_)}) {
            // Pieces that begin within a draw of four.
            optimizer.Update(*stream, split, step, 0, 1 + step);
            optimizer.Update(*stream, split, step, 1 + step, kElements - 2);
          }
        }
        Finish();
        EXPECT_TRUE(optimizer.Same()) << DTypeName(gradient) << DTypeName(states) << split;
      }
    }
  }
}

TEST_F(GpuMixedOpsTest, Fp16WeightsOfAnUpdateHaveTheBitsOfTheCpu) {
  for (const DType states : {DType::kF32, DType::kBF16}) {
    for (const ElementRule rule : {ElementRule::kAdamW, ElementRule::kLion}) {
      Optimizer optimizer(DType::kF32, states, DType::kF16);
      optimizer.rule = rule;
      float* main = optimizer.main.host().As<float>();
      main[0] = 65519.0f;  // the nearest is finite, and infinite
      main[1] = -65521.0f;
      main[2] = 3e-8f;
      optimizer.main.Send();
      for (uint32_t step = 0; step < 2; ++step) {
        optimizer.Update(gpu(), false, step, 0, kElements - 2);
        optimizer.Update(cpu_, false, step, 0, kElements - 2);
      }
      Finish();
      EXPECT_TRUE(optimizer.Same()) << DTypeName(states);
      EXPECT_EQ(optimizer.weight.host().As<uint16_t>()[7],
                FloatToFp16(optimizer.main.host().As<float>()[7]));
    }
  }
}

TEST_F(GpuMixedOpsTest, MixedAdamWOverATableGivesTheBitsOfTheCpu) {
  const std::vector<UpdatePiece> pieces = {
      {.offset = 0, .elements = 14, .first_index = 3, .site = 5},
      {.offset = 17, .elements = kElements - 30, .first_index = 4098, .site = 6, .decays = 0}};
  const std::vector<UpdatePiece> cut = CutForBlocks(pieces);
  const CudaMemory memory =
      *TheGpu().device->AllocatePinned(static_cast<int64_t>(cut.size() * sizeof(UpdatePiece)));
  std::memcpy(memory.data(), cut.data(), cut.size() * sizeof(UpdatePiece));
  for (const DType states : {DType::kF32, DType::kBF16}) {
    for (const bool split : {false, true}) {
      Optimizer optimizer(DType::kF32, states);
      optimizer.host_table = {.pieces = pieces.data(), .count = 2};
      optimizer.device_table = {.pieces = static_cast<const UpdatePiece*>(memory.data()),
                                .count = static_cast<int64_t>(cut.size())};
      for (uint32_t step = 0; step < 2; ++step) {
        optimizer.Update(gpu(), split, step, 0, kElements);
        optimizer.Update(cpu_, split, step, 0, kElements);
      }
      Finish();
      EXPECT_TRUE(optimizer.Same()) << DTypeName(states) << split;
    }
  }
}

// Rows of no whole groups, one that a block does not hold, and pieces that begin within a draw.
TEST_F(GpuMixedOpsTest, GroupedUpdatesGiveTheBitsOfTheCpu) {
  constexpr int64_t kLong = 9000;
  constexpr int64_t kAll = 7 * 203 + kLong + 300;
  const std::vector<UpdatePiece> pieces = {
      {.offset = 0, .elements = 7 * 203, .first_index = 203, .site = 5, .row = 203},
      {.offset = 7 * 203,
       .elements = kLong,
       .site = 6,
       .decays = 0,
       .row = kLong,
       .first_scale = 14},
      {.offset = 7 * 203 + kLong, .elements = 300, .site = 7, .row = 300, .first_scale = 85}};
  const std::vector<UpdatePiece> cut = CutForBlocks(pieces);
  const CudaMemory memory =
      *TheGpu().device->AllocatePinned(static_cast<int64_t>(cut.size() * sizeof(UpdatePiece)));
  std::memcpy(memory.data(), cut.data(), cut.size() * sizeof(UpdatePiece));
  for (const DType mean : {DType::kF32, DType::kBF16, DType::kF8E4M3}) {
    for (const DType square : {DType::kF32, DType::kBF16, DType::kU8}) {
      for (const DType gradient : {DType::kF32, DType::kBF16}) {
        Twin main = Twin::Normal(DType::kF32, kAll, 1);
        Twin g = Twin::Normal(gradient, kAll, 2);
        Twin m(mean, kAll);
        Twin v(square, kAll);
        Twin m_scales(DType::kU8, 88);
        Twin v_scales(DType::kU8, 88);
        for (Twin* zero : {&m, &v, &m_scales, &v_scales}) {
          zero->Send();
        }
        for (uint32_t step = 0; step < 3; ++step) {
          for (Stream* stream : {static_cast<Stream*>(&gpu()), static_cast<Stream*>(&cpu_)}) {
            const bool device = stream == &gpu();
            const auto at = [device](Twin& twin) { return device ? twin.device() : twin.host(); };
            GroupedUpdateArgs args = {
                .update = {.main_weight = at(main), .g = at(g), .m = at(m), .v = at(v)}};
            args.update.seed = 77;
            args.update.step = step;
            args.update.scalars.learning_rate = 1e-2f;
            args.update.scalars.weight_decay = 0.1f;
            args.update.table = device ? PieceTable{static_cast<const UpdatePiece*>(memory.data()),
                                                    static_cast<int64_t>(cut.size())}
                                       : PieceTable{pieces.data(), std::ssize(pieces)};
            if (mean == DType::kF8E4M3) {
              args.m_scales = at(m_scales);
            }
            if (square == DType::kU8) {
              args.v_scales = at(v_scales);
            }
            GroupedUpdate(*stream, args);
          }
        }
        Finish();
        for (const Twin* twin : {&main, &m, &v, &m_scales, &v_scales}) {
          EXPECT_TRUE(twin->Same()) << DTypeName(mean) << DTypeName(square) << DTypeName(gradient);
        }
      }
    }
  }
}

TEST_F(GpuMixedOpsTest, LionGivesTheBitsOfTheCpu) {
  for (const DType state : {DType::kF32, DType::kBF16}) {
    for (const DType gradient : {DType::kF32, DType::kBF16}) {
      for (const bool split : {false, true}) {
        Optimizer optimizer(gradient, state);
        optimizer.rule = ElementRule::kLion;
        for (uint32_t step = 0; step < 3; ++step) {
          optimizer.Update(gpu(), split, step, 1, kElements - 2);
          optimizer.Update(cpu_, split, step, 1, kElements - 2);
        }
        Finish();
        EXPECT_TRUE(optimizer.Same()) << DTypeName(state) << DTypeName(gradient) << split;
      }
    }
  }
}

// In groups that share a scale: its one state as fp8.
TEST_F(GpuMixedOpsTest, LionInGroupsGivesTheBitsOfTheCpu) {
  const UpdatePiece piece = {.elements = kElements, .site = 3, .row = kElements};
  const CudaMemory memory = *TheGpu().device->AllocatePinned(sizeof(piece));
  std::memcpy(memory.data(), &piece, sizeof(piece));
  Twin main = Twin::Normal(DType::kF32, kElements, 1);
  Twin g = Twin::Normal(DType::kF32, kElements, 2);
  Twin m(DType::kF8E4M3, kElements);
  Twin scales(DType::kU8, DivCeil(kElements, kUpdateGroup));
  m.Send();
  scales.Send();
  for (uint32_t step = 0; step < 3; ++step) {
    for (Stream* stream : {static_cast<Stream*>(&gpu()), static_cast<Stream*>(&cpu_)}) {
      const bool device = stream == &gpu();
      const auto at = [device](Twin& twin) { return device ? twin.device() : twin.host(); };
      GroupedUpdateArgs args = {
          .update = {.main_weight = at(main), .g = at(g), .m = at(m), .v = {}},
          .m_scales = at(scales)};
      args.update.seed = 5;
      args.update.step = step;
      args.update.scalars.learning_rate = 1e-2f;
      args.update.scalars.weight_decay = 0.1f;
      args.update.rule = ElementRule::kLion;
      args.update.table = {device ? static_cast<const UpdatePiece*>(memory.data()) : &piece, 1};
      GroupedUpdate(*stream, args);
    }
  }
  Finish();
  for (const Twin* twin : {&main, &m, &scales}) {
    EXPECT_TRUE(twin->Same());
  }
}

TEST_F(GpuMixedOpsTest, SgdGivesTheBitsOfTheCpu) {
  for (const ElementRule rule : {ElementRule::kSgd, ElementRule::kSgdNesterov}) {
    for (const DType gradient : {DType::kF32, DType::kBF16}) {
      for (const bool split : {false, true}) {
        Optimizer optimizer(gradient, DType::kF32);
        optimizer.rule = rule;
        for (uint32_t step = 0; step < 3; ++step) {
          optimizer.Update(gpu(), split, step, 1, kElements - 2);
          optimizer.Update(cpu_, split, step, 1, kElements - 2);
        }
        Finish();
        EXPECT_TRUE(optimizer.Same()) << DTypeName(gradient) << split;
      }
    }
  }
}

// One graph for all steps: what it draws is keyed by the memory that it reads.
TEST_F(GpuMixedOpsTest, AReplayedUpdateDrawsByTheStepInMemory) {
  for (const bool split : {false, true}) {
    Optimizer optimizer(DType::kF32, DType::kBF16);
    const CudaMemory memory = *TheGpu().device->AllocatePinned(sizeof(int64_t));
    auto* step = static_cast<int64_t*>(memory.data());
    optimizer.device_step = step;
    gpu().BeginCapture();
    optimizer.Update(gpu(), split, 0, 0, kElements);
    absl::StatusOr<CudaGraph> graph = gpu().EndCapture();
    ASSERT_TRUE(graph.ok()) << graph.status();
    for (const uint32_t at : {7u, 8u, 4000000000u}) {
      *step = at;
      gpu().Launch(*graph);
      optimizer.Update(cpu_, split, at, 0, kElements);
      Finish();
      EXPECT_TRUE(optimizer.Same()) << at << split;
    }
    // Another step draws other bits.
    *step = 9;
    gpu().Launch(*graph);
    optimizer.Update(cpu_, split, 10, 0, kElements);
    Finish();
    EXPECT_FALSE(optimizer.v.Same());
  }
}

TEST_F(GpuMixedOpsTest, AFlagOnTheDeviceSkipsTheStep) {
  Optimizer optimizer(DType::kBF16, DType::kBF16);
  *optimizer.apply.host().As<int32_t>() = 0;
  optimizer.apply.Send();
  optimizer.Update(gpu(), true, 0, 0, kElements);
  Finish();
  EXPECT_TRUE(optimizer.Same());
}

TEST_F(GpuMixedOpsTest, CastsGiveTheBitsOfTheCpu) {
  struct Form {
    DType narrow;
    Bf16Rounding rounding;
  };
  for (const auto& [type, rounding] : {Form{DType::kBF16, Bf16Rounding::kNearest},
                                       Form{DType::kBF16, Bf16Rounding::kHalfAway},
                                       Form{DType::kF16, Bf16Rounding::kHalfAway}}) {
    for (const int64_t begin : {0, 1, 8}) {
      for (const int64_t end : {kElements - 3, kElements}) {
        Twin wide = Twin::Normal(DType::kF32, kElements, 9);
        Twin narrow = Twin::Normal(type, kElements, 10);
        Twin again = Twin::Normal(DType::kF32, kElements, 11);
        Cast(gpu(), {wide.device(begin, end), narrow.device(begin, end), rounding});
        Cast(gpu(), {narrow.device(begin, end), again.device(begin, end)});
        Cast(cpu_, {wide.host(begin, end), narrow.host(begin, end), rounding});
        Cast(cpu_, {narrow.host(begin, end), again.host(begin, end)});
        Finish();
        EXPECT_TRUE(narrow.Same() && again.Same()) << begin << " to " << end;
      }
    }
  }
}

// A matrix at the beginning of a vector, with a gap after each row.
TensorView MatrixOf(TensorView view, int64_t rows, int64_t columns, int64_t gap) {
  view.rank = 2;
  view.size = {rows, columns};
  view.row_stride = columns + gap;
  return view;
}

TEST_F(GpuMixedOpsTest, TranspositionGivesTheBitsOfTheCpu) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const auto& [rows, columns] :
         std::vector<std::pair<int64_t, int64_t>>{{1, 1}, {33, 64}, {40, 31}, {3, 200}}) {
      Twin from = Twin::Normal(dtype, kElements, 12);
      Twin to = Twin::Normal(dtype, kElements, 13);
      TransposeMatrix(gpu(),
                      {.from = MatrixOf(from.device(), rows, columns, 3),
                       .to = MatrixOf(to.device(), columns, rows, 2)});
      TransposeMatrix(cpu_,
                      {.from = MatrixOf(from.host(), rows, columns, 3),
                       .to = MatrixOf(to.host(), columns, rows, 2)});
      Finish();
      EXPECT_TRUE(to.Same()) << rows << "x" << columns << " " << DTypeName(dtype);
    }
  }
}

// Logarithms and sines of the device may differ from the host's in their last bit, before the one
// rounding to fp32: at most one value of fp32 apart.
void ExpectNeighbours(const TensorView& a, const TensorView& b) {
  for (int64_t i = 0; i < a.elements(); ++i) {
    const float x = a.As<float>()[i];
    const float y = b.As<float>()[i];
    ASSERT_TRUE(x == y || std::nextafterf(x, y) == y) << i << ": " << x << " and " << y;
  }
}

TEST_F(GpuMixedOpsTest, InitialValuesAreThoseOfTheCpu) {
  for (const int64_t begin : {0, 3}) {
    Twin out = Twin::Normal(DType::kF32, kElements, 14);
    const InitNormalArgs args = {.out = {}, .seed = 31, .site = 4, .first_index = 10 + begin};
    InitNormalArgs on_device = args;
    InitNormalArgs on_host = args;
    on_device.out = out.device(begin);
    on_host.out = out.host(begin);
    InitNormal(gpu(), on_device);
    InitNormal(cpu_, on_host);
    Finish();
    ExpectNeighbours(out.Result(), out.host());
  }
}

// Ranks have 4, 4 and 3 of 11 rows of a table, and the first of four has none.
TEST_F(GpuMixedOpsTest, RowsOfATableInPartsAreThoseOfTheCpu) {
  constexpr int64_t kRows = 11;
  constexpr int64_t kTokens = 9;
  const std::vector<int32_t> ids = {10, 0, 3, 4, 7, 8, 0, 4, 10};
  Twin tokens(DType::kI32, kTokens);
  std::copy(ids.begin(), ids.end(), tokens.host().As<int32_t>());
  tokens.Send();
  for (const int64_t columns : {13, 16}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const auto matrix = [&](TensorView view, int64_t rows) {
        view.rank = 2;
        view.size = {rows, columns};
        view.row_stride = columns;
        return view;
      };
      Twin table = Twin::Normal(dtype, kRows * columns, InputSeed());
      Twin dout = Twin::Normal(dtype, kTokens * columns, InputSeed() + 1);
      for (const int64_t first : {0, 4, 8, 11}) {
        const int64_t rows = std::min<int64_t>(4, kRows - first);
        const TableRows of_rank = {.first = first, .vocabulary = kRows};
        Twin out = Twin::Normal(DType::kF32, kTokens * columns, 3);
        Twin dtable = Twin::Normal(DType::kF32, std::max<int64_t>(rows, 1) * columns, 4);
        const auto part = [&](TensorView view) {
          view.data = static_cast<char*>(view.data) + first * columns * DTypeBytes(dtype);
          return matrix(view, rows);
        };
        EmbeddingForward(cpu_,
                         {.ids = tokens.host(),
                          .table = part(table.host()),
                          .out = matrix(out.host(), kTokens),
                          .rows = of_rank});
        EmbeddingForward(gpu(),
                         {.ids = tokens.device(),
                          .table = part(table.device()),
                          .out = matrix(out.device(), kTokens),
                          .rows = of_rank});
        EXPECT_TRUE(out.Same()) << first << ", " << columns << " of type " << DTypeName(dtype);
        EmbeddingBackward(cpu_,
                          {.ids = tokens.host(),
                           .dout = matrix(dout.host(), kTokens),
                           .dtable = matrix(dtable.host(), rows),
                           .output = Output::kAccumulate,
                           .rows = of_rank});
        EmbeddingBackward(gpu(),
                          {.ids = tokens.device(),
                           .dout = matrix(dout.device(), kTokens),
                           .dtable = matrix(dtable.device(), rows),
                           .output = Output::kAccumulate,
                           .rows = of_rank});
        EXPECT_TRUE(dtable.Same()) << first << ", " << columns;
      }
    }
  }
}

TEST_F(GpuMixedOpsTest, TableOfAnglesIsThatOfTheCpu) {
  constexpr int64_t kPositions = 61;
  constexpr int64_t kHalf = 32;
  Twin frequency = Twin::Normal(DType::kF32, kHalf, 15);
  Twin cosine = Twin::Normal(DType::kF32, kPositions * kHalf, 16);
  Twin sine = Twin::Normal(DType::kF32, kPositions * kHalf, 17);
  BuildRopeTable(gpu(),
                 {frequency.device(),
                  MatrixOf(cosine.device(), kPositions, kHalf, 0),
                  MatrixOf(sine.device(), kPositions, kHalf, 0)});
  BuildRopeTable(cpu_,
                 {frequency.host(),
                  MatrixOf(cosine.host(), kPositions, kHalf, 0),
                  MatrixOf(sine.host(), kPositions, kHalf, 0)});
  Finish();
  ExpectNeighbours(cosine.Result(), cosine.host());
  ExpectNeighbours(sine.Result(), sine.host());
}

TEST_F(GpuMixedOpsTest, ReplayedCaptureDoesTheWorkAgain) {
  Twin x = Twin::Normal(DType::kF32, kElements, 18);
  Twin sum = Twin::Normal(DType::kF32, kElements, 19);
  gpu().BeginCapture();
  TreeAdd(gpu(), {.a = sum.device(), .b = x.device(), .out = sum.device()});
  absl::StatusOr<CudaGraph> graph = gpu().EndCapture();
  ASSERT_TRUE(graph.ok()) << graph.status();
  EXPECT_TRUE(sum.Same());  // recorded, not run
  for (int replay = 0; replay < 3; ++replay) {
    gpu().Launch(*graph);
    TreeAdd(cpu_, {.a = sum.host(), .b = x.host(), .out = sum.host()});
  }
  Finish();
  EXPECT_TRUE(sum.Same());
}

TEST_F(GpuMixedOpsTest, AnEventOrdersTwoStreams) {
  CudaGpu& device = *TheGpu().device;
  const auto scratch = device.AllocateDevice(cuda::kScratchBytes);
  ASSERT_TRUE(scratch.ok()) << scratch.status();
  const auto other = device.MakeStream(CudaGpu::Priority::kHigh, scratch->data());
  auto produced = device.MakeEvent();
  ASSERT_TRUE(other.ok() && produced.ok());
  Twin x = Twin::Normal(DType::kF32, kElements, 20);
  Twin sum = Twin::Normal(DType::kF32, kElements, 21);
  for (int turn = 0; turn < 50; ++turn) {
    CudaStream& producer = turn % 2 == 0 ? gpu() : **other;
    CudaStream& consumer = turn % 2 == 0 ? **other : gpu();
    TreeAdd(producer, {.a = x.device(), .b = x.device(), .out = x.device()});
    TreeAdd(cpu_, {.a = x.host(), .b = x.host(), .out = x.host()});
    producer.Record(*produced);
    consumer.Wait(*produced);
    TreeAdd(consumer, {.a = sum.device(), .b = x.device(), .out = sum.device()});
    TreeAdd(cpu_, {.a = sum.host(), .b = x.host(), .out = sum.host()});
  }
  ASSERT_TRUE((*other)->Synchronize().ok());
  Finish();
  EXPECT_TRUE(x.Same() && sum.Same());
}

}  // namespace
}  // namespace ravel::kernels::testing
