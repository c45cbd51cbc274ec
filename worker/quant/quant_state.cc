// Amaxes to scales. A weight's delayed codes are cast by the scale of the history before this step,
// then its own amax joins the history; the pair (scale of the codes, scale of the next cast) is
// kept, because gathers decode by the first until the next cast. Scales of activations are constant
// within a step, whatever the number of micro-batches.

#include "worker/quant/quant_state.h"

#include <algorithm>
#include <bit>

#include "common/check.h"
#include "common/model/gemm_paths.h"
#include "common/model/tensor_cuts.h"
#include "common/signed_size.h"
#include "kernels/scalar/code_digest.h"

namespace ravel::quant {
namespace {

using plan::QuantSlot;

static_assert(plan::kSlotsPerDomain == kernels::kDelayedSlots &&
              plan::kScalesPerSlot == kernels::kDelayedWords);

TensorView Words(uint32_t* words, int64_t rows, int64_t columns) {
  TensorView view = MatrixView(nullptr, rows, columns);
  view.dtype = DType::kU32;
  view.data = words;
  return view;
}

int64_t SlotOf(int domain, QuantSlot slot) {
  return int64_t{domain} * plan::kSlotsPerDomain + static_cast<int>(slot);
}

}  // namespace

QuantPiece RowsOf(const QuantPiece& piece, int64_t first, int64_t rows) {
  return {.tensor = piece.tensor,
          .first_row = piece.first_row + first,
          .main_weight = RowsOf(piece.main_weight, first, rows),
          .codes = RowsOf(piece.codes, first, rows)};
}

QuantState::QuantState(const plan::ModelInventory& inventory,
                       int64_t coordinate,
                       const Gemms& gemms,
                       const Memory& memory)
    : layout_(plan::QuantLayoutOf(inventory)), gemms_(gemms), memory_(memory) {
  CHECK(memory.amax != nullptr && memory.flags != nullptr);
  CHECK_EQ(memory.delayed_scales != nullptr, layout_.slots > 0);
  for (const plan::QuantTensor& of : layout_.tensors) {
    GridPart grid = {.rows = of.grid_rows, .columns = of.grid_columns};
    const plan::TensorSpec& tensor = inventory.tensors[of.tensor];
    const int64_t edge = plan::BlockEdge(of.recipe);
    if (edge > 0 && tensor.cut.cuts()) {
      CHECK_MSG(tensor.cut.parts[0] == 0, "maps that the axis cuts within keep bf16");
      const int64_t length = plan::ItemShape(tensor)[Size(tensor.cut.dim)];
      const int64_t blocks = DivExact(length, edge);
      const int64_t first = coordinate / tensor.cut.copies * blocks;
      (tensor.cut.dim == 0 ? grid.first_row : grid.first_column) = first;
      (tensor.cut.dim == 0 ? grid.rows : grid.columns) = blocks;
    }
    grids_.push_back(grid);
  }
}

TensorView QuantState::Word(int64_t word) const {
  return word < 0 ? TensorView() : Words(memory_.amax + word, 1, 1);
}

TensorView QuantState::GridOf(const plan::QuantTensor& of) const {
  const GridPart& part = At(grids_, layout_.index_of[of.tensor]);
  const TensorView whole = Words(memory_.amax + of.grid, of.grid_rows, of.grid_columns);
  return ColumnsOf(RowsOf(whole, part.first_row, part.rows), part.first_column, part.columns);
}

float* QuantState::CastScale(int64_t slot) const {
  CHECK(slot >= 0 && slot < layout_.slots);
  return memory_.delayed_scales + kernels::kDelayedWords * slot;
}

float* QuantState::NextScale(int64_t slot) const {
  return CastScale(slot) + 1;
}

GemmScales QuantState::ScalesOf(plan::TensorId tensor, bool stages) const {
  const plan::QuantTensor* of = layout_.Find(tensor);
  CHECK_MSG(of != nullptr, "a tensor without a recipe");
  const plan::QuantDomain& domain = layout_.domain(*of);
  GemmScales scales;
  scales.of_codes = !plan::DecodesOperands(gemms_.path);
  scales.as_mxfp8 = gemms_.path == plan::GemmPath::kBlockAsMxFp8;
  scales.of_blocks = plan::ReadsBlockScales(gemms_.path);
  scales.amax_epsilon = gemms_.amax_epsilon;
  if (plan::MayAccumulateFast(gemms_.path)) {
    scales.fast_forward = gemms_.fast != plan::FastAccumulation::kNone;
    scales.fast_input_gradient = gemms_.fast == plan::FastAccumulation::kForwardAndInputGradient;
  }
  scales.weight = {
      .recipe = of->recipe,
      .amax = GridOf(*of),
      .encode = {},
      .domain_amax = of->recipe == plan::Recipe::kNvFp4 ? Word(domain.amax) : TensorView()};
  if (stages) {
    scales.non_finite = Words(memory_.flags + tensor.value(), 1, 1);
  }
  if (of->recipe == plan::Recipe::kDelayed) {
    scales.weight.encode = VectorView(CastScale(SlotOf(of->domain, QuantSlot::kWeight)), 1);
    scales.input_encode = VectorView(NextScale(SlotOf(of->domain, QuantSlot::kInput)), 1);
    scales.gradient_encode = VectorView(NextScale(SlotOf(of->domain, QuantSlot::kGradient)), 1);
    if (stages) {
      scales.input_staged = Word(domain.input);
      scales.gradient_staged = Word(domain.gradient);
    }
  }
  return scales;
}

void QuantState::MeasureWeights(kernels::Stream& stream, std::span<const QuantPiece> pieces) {
  for (const QuantPiece& piece : pieces) {
    MeasureBox(stream, *layout_.Find(piece.tensor), piece.main_weight, piece.first_row, 0);
  }
}

void QuantState::MeasureBox(kernels::Stream& stream,
                            const plan::QuantTensor& of,
                            const TensorView& weights,
                            int64_t first_row,
                            int64_t first_column) {
  const int64_t edge = plan::BlockEdge(of.recipe);
  TensorView grid = GridOf(of);
  if (edge > 0) {
    grid = ColumnsOf(grid, DivExact(first_column, edge), DivCeil(weights.columns(), edge));
  }
  kernels::BlockAmax(stream,
                     {.from = weights,
                      .first_row = first_row,
                      .edge = edge,
                      .amax = grid,
                      .epsilon = gemms_.amax_epsilon});
  const int64_t whole = layout_.domain(of).amax;
  if (edge > 0 && whole >= 0) {
    kernels::BlockAmax(stream, {.from = weights, .first_row = 0, .edge = 0, .amax = Word(whole)});
  }
}

// Whole rows together; of a row that is cut the block that is, if one is, and then all others.
void QuantState::MeasureElements(kernels::Stream& stream,
                                 const QuantPiece& piece,
                                 int64_t first,
                                 int64_t count) {
  const plan::QuantTensor& of = *layout_.Find(piece.tensor);
  const int64_t edge = plan::BlockEdge(of.recipe);
  const int64_t columns = piece.main_weight.columns();
  CHECK(first >= 0 && count >= 0 && first + count <= piece.main_weight.elements());
  while (count > 0) {
    const int64_t row = first / columns;
    const int64_t column = first % columns;
    int64_t rows = column == 0 ? count / columns : 0;
    int64_t width = columns;
    if (rows == 0) {
      rows = 1;
      width = std::min(count, columns - column);
      width = edge > 0 && column % edge > 0 ? std::min(width, edge - column % edge) : width;
    }
    const int64_t block = edge > 0 ? column / edge * edge : 0;
    MeasureBox(stream,
               of,
               MatrixView(piece.main_weight.Row<float>(row) + column, rows, width),
               piece.first_row + row,
               block);
    first += rows * width;
    count -= rows * width;
  }
}

int64_t QuantState::weight_bytes() const {
  return layout_.weight_words * DTypeBytes(DType::kU32);
}

// Every domain is delayed where one is, so that their words lie one after another.
kernels::DelayedScalesArgs QuantState::DelayedScales() const {
  const auto domains = static_cast<int64_t>(layout_.domains.size());
  CHECK_EQ(layout_.slots, domains * kernels::kDelayedSlots);
  for (int64_t i = 0; i < domains; ++i) {
    const plan::QuantDomain& domain = At(layout_.domains, i);
    CHECK(domain.amax == i && domain.input == domains + 2 * i &&
          domain.gradient == domain.input + 1);
  }
  return {.weight_amax = Words(memory_.amax, 1, domains),
          .activation_amax = Words(memory_.amax + domains, domains, 2),
          .scales = MatrixView(memory_.delayed_scales, layout_.slots, kernels::kDelayedWords),
          .histories = MatrixView(histories(), layout_.slots, memory_.history),
          .apply = {},
          .margin = memory_.margin,
          .newest = memory_.algorithm == plan::AmaxAlgorithm::kMostRecent,
          .ones = memory_.first == plan::FirstScale::kOnes};
}

void QuantState::FinishStep(kernels::Stream& stream, const TensorView& apply) {
  if (layout_.slots > 0) {
    kernels::DelayedScalesArgs args = DelayedScales();
    args.apply = apply;
    kernels::UpdateDelayedScales(stream, args);
  }
}

void QuantState::FinishLoad(kernels::Stream& stream) {
  if (layout_.slots > 0) {
    kernels::DelayedScalesArgs args = DelayedScales();
    args.weight_amax = {};
    args.activation_amax = {};
    kernels::UpdateDelayedScales(stream, args);
  }
}

void QuantState::Quantize(kernels::Stream& stream,
                          std::span<const QuantPiece> pieces,
                          bool encoded) const {
  for (const QuantPiece& piece : pieces) {
    const plan::QuantTensor& of = *layout_.Find(piece.tensor);
    const bool kept = encoded && of.recipe == plan::Recipe::kDelayed;
    kernels::QuantizeWeight(
        stream,
        {.from = piece.main_weight,
         .first_row = piece.first_row,
         .scales = ScalesOf(piece.tensor, false).weight,
         .codes = piece.codes,
         .unless = kept ? VectorView(CastScale(SlotOf(of.domain, QuantSlot::kWeight)) + 2, 1)
                        : TensorView()});
  }
}

QuantState::RowRange QuantState::KnownRows(const QuantPiece& piece,
                                           int64_t first,
                                           int64_t count) const {
  const plan::QuantTensor& of = *layout_.Find(piece.tensor);
  if (!plan::EncodesInUpdate(of.recipe)) {
    return {};
  }
  const int64_t columns = piece.main_weight.columns();
  const int64_t edge = std::max<int64_t>(1, plan::BlockEdge(of.recipe));
  const int64_t begin = RoundUp(piece.first_row + DivCeil(first, columns), edge);
  const int64_t end = (piece.first_row + (first + count) / columns) / edge * edge;
  return begin < end ? RowRange{.first = begin - piece.first_row, .rows = end - begin} : RowRange();
}

void QuantState::QuantizeAhead(kernels::Stream& stream, const QuantPiece& rows) const {
  const plan::QuantTensor& of = *layout_.Find(rows.tensor);
  kernels::WeightScales scales = ScalesOf(rows.tensor, false).weight;
  if (of.recipe == plan::Recipe::kDelayed) {
    scales.encode = VectorView(NextScale(SlotOf(of.domain, QuantSlot::kWeight)), 1);
  }
  kernels::QuantizeWeight(stream,
                          {.from = rows.main_weight,
                           .first_row = rows.first_row,
                           .scales = scales,
                           .codes = rows.codes});
}

bool QuantState::HasHistory(plan::TensorId tensor) const {
  const plan::QuantTensor& of = *layout_.Find(tensor);
  return of.recipe != plan::Recipe::kDelayed ||
         *NextScale(SlotOf(of.domain, QuantSlot::kWeight)) != 0;
}

QuantState::RowRange QuantState::QuantizeUpdated(kernels::Stream& stream,
                                                 const QuantPiece& piece,
                                                 int64_t first,
                                                 int64_t count) const {
  CHECK_MSG(stream.backend() == kernels::Backend::kCpu, "a device's scales are not read here");
  const RowRange range = KnownRows(piece, first, count);
  if (range.rows == 0 || !HasHistory(piece.tensor)) {
    return {};
  }
  QuantizeAhead(stream, RowsOf(piece, range.first, range.rows));
  return range;
}

QuantState::Target QuantState::TargetOf(const QuantPiece& piece, bool encodes) const {
  const plan::QuantTensor& of = *layout_.Find(piece.tensor);
  const int64_t edge = plan::BlockEdge(of.recipe);
  Target target = {.target = {.recipe = of.recipe,
                              .first_row = piece.first_row,
                              .amax = GridOf(of),
                              .epsilon = gemms_.amax_epsilon,
                              .whole_amax = edge > 0 ? Word(layout_.domain(of).amax) : TensorView(),
                              .codes = {},
                              .encode = {}},
                   .encoded = {}};
  if (!encodes || !plan::EncodesInUpdate(of.recipe)) {
    return target;
  }
  if (of.recipe == plan::Recipe::kDelayed) {
    target.target.codes = piece.codes;
    target.target.encode = VectorView(NextScale(SlotOf(of.domain, QuantSlot::kWeight)), 1);
    return target;
  }
  const int64_t begin = RoundUp(piece.first_row, edge);
  const int64_t end = (piece.first_row + piece.codes.rows()) / edge * edge;
  if (begin < end) {
    target.target.codes = piece.codes;
    target.encoded = {.first = begin - piece.first_row, .rows = end - begin};
  }
  return target;
}

QuantState::StateRange QuantState::StateOf(plan::StateRole role,
                                           int64_t first,
                                           int64_t elements) const {
  CHECK(plan::IsOfScales(role));
  const bool casts = role == plan::StateRole::kCastScale;
  CHECK_LE(first + elements, casts ? layout_.slots : layout_.slots * memory_.history);
  return casts ? StateRange{.data = memory_.delayed_scales + kernels::kDelayedWords * first,
                            .stride = kernels::kDelayedWords}
               : StateRange{.data = histories() + first};
}

std::span<const uint32_t> QuantState::weight_amaxes() const {
  return {memory_.amax, Size(layout_.weight_words)};
}

std::span<const float> QuantState::delayed_scales() const {
  return {memory_.delayed_scales, Size(layout_.slots * (kernels::kDelayedWords + memory_.history))};
}

uint64_t QuantState::ReplicatedDigest() const {
  uint64_t sum = 0;
  uint64_t index = 0;
  const auto add = [&](const auto& words) {
    for (const auto word : words) {
      sum += kernels::scalar::DigestElement(index++, std::bit_cast<uint32_t>(word));
    }
  };
  // Amaxes of activations come behind those of weights; each rank has its own until they are
  // reduced.
  add(weight_amaxes());
  add(delayed_scales());
  return sum;
}

uint64_t QuantState::ScalesDigest(plan::TensorId tensor,
                                  std::span<const uint32_t> amaxes,
                                  std::span<const float> delayed) const {
  const plan::QuantTensor& of = *layout_.Find(tensor);
  const plan::QuantDomain& domain = layout_.domain(of);
  const bool has_slot = of.recipe == plan::Recipe::kDelayed;
  const kernels::scalar::Scales whole = kernels::scalar::WeightTensorScales(
      of.recipe,
      domain.amax < 0 ? 0 : At(amaxes, domain.amax),
      has_slot ? At(delayed, kernels::kDelayedWords * SlotOf(of.domain, QuantSlot::kWeight))
               : 0.0f);
  uint64_t sum = kernels::scalar::TensorScaleDigest(whole);
  if (plan::BlockEdge(of.recipe) > 0) {
    for (int64_t block = 0; block < of.grid_rows * of.grid_columns; ++block) {
      sum += kernels::scalar::BlockScaleDigest(
          block,
          kernels::scalar::WeightBlockScales(of.recipe, At(amaxes, of.grid + block), whole.encode));
    }
  }
  return sum;
}

TensorView QuantState::flags() const {
  return Words(memory_.flags, 1, static_cast<int64_t>(layout_.index_of.size()));
}

}  // namespace ravel::quant
