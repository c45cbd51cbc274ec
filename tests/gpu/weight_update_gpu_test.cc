// The update of a quantized matrix with its amaxes and codes: the device gives what the ops that it
// fuses give on the CPU, bit for bit.

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include <absl/strings/str_cat.h>
#include <gtest/gtest.h>

#include "common/dtype.h"
#include "kernels/quantize.h"
#include "kernels/weight_update.h"
#include "tests/gpu/gpu.h"
#include "tests/gpu/twin.h"

namespace ravel::kernels::testing {
namespace {

using plan::Recipe;

struct MatrixCase {
  const char* name;
  Recipe recipe;
  int64_t first_row;  // of the rank's rows
  int64_t rows;
  int64_t columns;
  int64_t row_step;  // more than columns: the matrix is cut along columns
};

// Rows that begin and end within blocks and tiles, columns that fill no warp.
const MatrixCase kCases[] = {
    {"delayed", Recipe::kDelayed, 5, 77, 208, 208},
    {"current", Recipe::kCurrent, 0, 40, 144, 288},
    {"float8 block, whole", Recipe::kFloat8Block, 128, 256, 256, 256},
    {"float8 block, cut", Recipe::kFloat8Block, 100, 200, 128, 384},
    {"mxfp8, whole", Recipe::kMxFp8, 32, 64, 160, 160},
    {"mxfp8, cut", Recipe::kMxFp8, 17, 90, 96, 96},
    {"nvfp4", Recipe::kNvFp4, 8, 72, 80, 160},
};

class GpuWeightUpdateTest : public TwinTest {};

struct States {
  DType mean = DType::kF32;
  DType square = DType::kF32;
  DType gradient = DType::kF32;
  ElementRule rule = ElementRule::kAdamW;
};

// A matrix with all that its update touches.
class Weight {
 public:
  Weight(const MatrixCase& of, const States& states)
      : of_(of),
        states_(states),
        main_(Twin::Normal(DType::kF32, of.rows * of.columns, 1)),
        g_(Twin::Normal(states.gradient, of.rows * of.columns, 2)),
        m_(states.mean, of.rows * of.columns),
        v_(states.square, of.rows * of.columns),
        m_scales_(DType::kU8, Groups()),
        v_scales_(DType::kU8, Groups()),
        amax_(DType::kU32, GridRows() * GridColumns()),
        whole_(DType::kU32, 1),
        codes_(DType::kU8, of.rows * of.columns),
        encode_(DType::kF32, 1),
        apply_(DType::kI32, 1) {
    for (Twin* zero : {&m_, &v_, &m_scales_, &v_scales_}) {
      zero->Send();
    }
    std::memset(codes_.host().data, 0x55, static_cast<size_t>(of.rows * of.columns));
    codes_.Send();
  }

  void Begin(int32_t apply, float encode) {
    *apply_.host().As<int32_t>() = apply;
    *encode_.host().As<float>() = encode;
    std::memset(amax_.host().data, 0, static_cast<size_t>(4 * GridRows() * GridColumns()));
    std::memset(whole_.host().data, 0, 4);
    for (Twin* word : {&apply_, &encode_, &amax_, &whole_}) {
      word->Send();
    }
  }

  void Update(Stream& stream, uint32_t step) {
    const bool device = stream.backend() == Backend::kCuda;
    const auto at = [device](Twin& twin) { return device ? twin.device() : twin.host(); };
    const bool encodes = of_.recipe != Recipe::kCurrent && of_.recipe != Recipe::kNvFp4;
    const bool delayed = of_.recipe == Recipe::kDelayed;
    const int64_t edge = plan::BlockEdge(of_.recipe);
    WeightUpdateArgs args;
    args.columns = of_.columns;
    args.row_step = of_.row_step;
    args.decays = step % 2 == 0;
    args.target.recipe = of_.recipe;
    args.target.first_row = of_.first_row;
    args.target.amax = Grid(at(amax_));
    args.target.epsilon = edge > 0 ? 2.5f : 0.0f;
    ElementUpdateArgs& update = args.update.update;
    update.main_weight = at(main_);
    update.g = at(g_);
    update.m = at(m_);
    update.v = states_.rule == ElementRule::kAdamW ? at(v_) : TensorView();
    update.seed = 77;
    update.step = step;
    update.site = 9;
    update.first_index = of_.first_row * of_.row_step;
    update.scalars.learning_rate = 1e-2f;
    update.scalars.weight_decay = 0.1f;
    update.apply = at(apply_).As<int32_t>();
    update.rule = states_.rule;
    if (states_.mean == DType::kF8E4M3) {
      args.update.m_scales = at(m_scales_);
    }
    if (states_.square == DType::kU8) {
      args.update.v_scales = at(v_scales_);
    }
    if (of_.recipe == Recipe::kNvFp4) {
      args.target.whole_amax = at(whole_);
    }
    if (encodes) {
      args.target.codes = MatrixView(nullptr, of_.rows, of_.columns);
      args.target.codes.dtype = DType::kU8;
      args.target.codes.data = at(codes_).data;
      args.target.encode = delayed ? at(encode_) : TensorView();
    }
    EXPECT_TRUE(FitsWeightUpdate(args));
    WeightUpdate(stream, args);
  }

  void ExpectSame(const std::string& what) const {
    const std::pair<const char*, const Twin*> all[] = {{"main weight", &main_},
                                                       {"m", &m_},
                                                       {"v", &v_},
                                                       {"scales of m", &m_scales_},
                                                       {"scales of v", &v_scales_},
                                                       {"amax", &amax_},
                                                       {"amax of all", &whole_},
                                                       {"codes", &codes_}};
    for (const auto& [name, twin] : all) {
      EXPECT_TRUE(twin->Same()) << name << ": " << what;
    }
  }
  int64_t encoded() {
    const auto* codes = codes_.host().As<uint8_t>();
    return of_.rows * of_.columns - std::count(codes, codes + of_.rows * of_.columns, 0x55);
  }

 private:
  int64_t Groups() const { return of_.rows * DivCeil(of_.columns, kUpdateGroup); }
  int64_t GridRows() const {
    const int64_t edge = plan::BlockEdge(of_.recipe);
    return edge == 0 ? 1 : DivCeil(of_.first_row + of_.rows, edge);
  }
  // A grid of a matrix whose other columns are another rank's.
  int64_t GridColumns() const {
    const int64_t edge = plan::BlockEdge(of_.recipe);
    return edge == 0 ? 1 : DivCeil(of_.row_step, edge);
  }
  TensorView Grid(TensorView words) const {
    TensorView grid = MatrixView(nullptr, GridRows(), GridColumns());
    grid.dtype = DType::kU32;
    grid.data = words.data;
    const int64_t edge = plan::BlockEdge(of_.recipe);
    return edge == 0 ? grid : ColumnsOf(grid, 0, DivCeil(of_.columns, edge));
  }

  const MatrixCase& of_;
  const States states_;
  Twin main_;
  Twin g_;
  Twin m_;
  Twin v_;
  Twin m_scales_;
  Twin v_scales_;
  Twin amax_;
  Twin whole_;
  Twin codes_;
  Twin encode_;
  Twin apply_;
};

TEST_F(GpuWeightUpdateTest, GivesTheBitsOfTheOpsThatItFuses) {
  constexpr DType kF8 = DType::kF8E4M3;
  constexpr DType kSquareF8 = DType::kU8;
  const States kStates[] = {{},
                            {DType::kBF16, DType::kBF16, DType::kBF16},
                            {kF8, kSquareF8},
                            {kF8, DType::kBF16},
                            {DType::kF32, kSquareF8},
                            {DType::kBF16, DType::kF32, DType::kF32, ElementRule::kLion},
                            {kF8, DType::kF32, DType::kBF16, ElementRule::kLion},
                            {DType::kF32, DType::kF32, DType::kF32, ElementRule::kSgd},
                            {DType::kF32, DType::kF32, DType::kBF16, ElementRule::kSgdNesterov}};
  for (const MatrixCase& of : kCases) {
    for (const States& states : kStates) {
      Weight weight(of, states);
      // Applied, skipped, without a scale from before, and applied again.
      const std::pair<int32_t, float> kSteps[] = {{1, 30.0f}, {0, 30.0f}, {1, 0.0f}, {1, 25.0f}};
      for (uint32_t step = 0; step < 4; ++step) {
        weight.Begin(kSteps[step].first, kSteps[step].second);
        weight.Update(gpu(), step);
        weight.Update(cpu_, step);
        Finish();
        weight.ExpectSame(absl::StrCat(of.name,
                                       ", m ",
                                       std::string(DTypeName(states.mean)),
                                       ", v ",
                                       std::string(DTypeName(states.square)),
                                       ", step ",
                                       step));
      }
      const bool encodes = of.recipe != Recipe::kCurrent && of.recipe != Recipe::kNvFp4;
      EXPECT_EQ(weight.encoded() > 0, encodes) << of.name;
    }
  }
}

// Blocks of threads take tiles in turns where there are more of these.
TEST_F(GpuWeightUpdateTest, TilesMayOutnumberBlocksOfThreads) {
  const int64_t blocks = 16 * TheGpu().device->properties().multiprocessors;
  const MatrixCase of = {"more tiles", Recipe::kMxFp8, 0, 32 * (blocks + 100), 4, 4};
  Weight weight(of, {});
  weight.Begin(1, 0.0f);
  weight.Update(gpu(), 1);
  weight.Update(cpu_, 1);
  Finish();
  weight.ExpectSame(of.name);
}

// A refresh leaves codes that an update has made.
TEST_F(GpuWeightUpdateTest, CodesStayUnlessTheyAreMissing) {
  for (const int64_t columns : {int64_t{16}, int64_t{5}}) {  // by vectors or not
    Twin weights = Twin::Normal(DType::kF32, 3 * columns, 1);
    Twin codes(DType::kU8, 3 * columns);
    Twin words(DType::kF32, 3);
    const float values[] = {8.0f, 1.0f, 0.0f};  // the scale, and both answers
    std::memcpy(words.host().data, values, sizeof(values));
    words.Send();
    codes.Send();
    for (const int64_t answer : {1, 2}) {
      for (Stream* stream : {static_cast<Stream*>(&gpu()), static_cast<Stream*>(&cpu_)}) {
        const bool device = stream == &gpu();
        const auto at = [device](Twin& twin, int64_t begin, int64_t end) {
          return device ? twin.device(begin, end) : twin.host(begin, end);
        };
        QuantizeWeightArgs args;
        args.from = MatrixView(at(weights, 0, -1).As<float>(), 3, columns);
        args.scales.recipe = Recipe::kDelayed;
        args.scales.encode = at(words, 0, 1);
        args.codes = MatrixView(nullptr, 3, columns);
        args.codes.dtype = DType::kU8;
        args.codes.data = at(codes, 0, -1).data;
        args.unless = at(words, answer, answer + 1);
        QuantizeWeight(*stream, args);
      }
      Finish();
      EXPECT_TRUE(codes.Same()) << columns;
      const auto* made = codes.host().As<uint8_t>();
      EXPECT_EQ(std::count(made, made + 3 * columns, 0) == 3 * columns, answer == 1);
    }
  }
}

TEST_F(GpuWeightUpdateTest, FitsFourElementsAtATime) {
  Twin all(DType::kF32, 64);
  WeightUpdateArgs args;
  args.columns = 16;
  args.update.update.main_weight = all.host(0, 32);
  args.update.update.g = all.host(0, 32);
  args.update.update.m = all.host(4, 36);
  EXPECT_TRUE(FitsWeightUpdate(args));
  args.update.update.m = all.host(2, 34);
  EXPECT_FALSE(FitsWeightUpdate(args));
  args.update.update.m = all.host(0, 30);
  args.columns = 15;
  EXPECT_FALSE(FitsWeightUpdate(args));
}

}  // namespace
}  // namespace ravel::kernels::testing
