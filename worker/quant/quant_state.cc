// Amaxes to scales. A weight's delayed codes are cast by the scale of the history before this step,
// then its own amax joins the history; the pair (scale of the codes, scale of the next cast) is
// kept, because gathers decode by the first until the next cast. Scales of activations are constant
// within a step, whatever the number of micro-batches.

#include "worker/quant/quant_state.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <utility>

#include "common/check.h"
#include "common/signed_size.h"
#include "kernels/scalar/code_digest.h"

namespace ravel::quant {
namespace {

using plan::QuantSlot;

constexpr float kLargestE4M3 = 448.0f;
constexpr float kLargestE5M2 = 57344.0f;

TensorView Words(uint32_t* words, int64_t rows, int64_t columns) {
  TensorView view = MatrixView(nullptr, rows, columns);
  view.dtype = DType::kU32;
  view.data = words;
  return view;
}

int64_t SlotOf(int domain, QuantSlot slot) {
  return int64_t{domain} * plan::kSlotsPerDomain + static_cast<int>(slot);
}

float LargestOf(int64_t slot) {
  return slot % plan::kSlotsPerDomain == static_cast<int>(QuantSlot::kGradient) ? kLargestE5M2
                                                                                : kLargestE4M3;
}

}  // namespace

QuantState::QuantState(const plan::ModelInventory& inventory, const Memory& memory)
    : layout_(plan::QuantLayoutOf(inventory)),
      memory_(memory),
      non_finite_(layout_.domains.size(), 0) {
  CHECK(memory.amax != nullptr);
  CHECK_EQ(memory.delayed_scales != nullptr, layout_.slots > 0);
}

TensorView QuantState::Word(int64_t word) const {
  return word < 0 ? TensorView() : Words(memory_.amax + word, 1, 1);
}

float& QuantState::CastScale(int64_t slot) const {
  CHECK(slot >= 0 && slot < layout_.slots);
  return memory_.delayed_scales[2 * slot];
}

float& QuantState::NextScale(int64_t slot) const {
  CHECK(slot >= 0 && slot < layout_.slots);
  return memory_.delayed_scales[2 * slot + 1];
}

std::span<float> QuantState::History(int64_t slot) const {
  CHECK(slot >= 0 && slot < layout_.slots);
  return {memory_.delayed_scales + 2 * layout_.slots + slot * memory_.history,
          Size(memory_.history)};
}

GemmScales QuantState::ScalesOf(plan::TensorId tensor, bool stages) const {
  const plan::QuantTensor* of = layout_.Find(tensor);
  CHECK_MSG(of != nullptr, "a tensor without a recipe");
  const plan::QuantDomain& domain = layout_.domain(*of);
  GemmScales scales;
  scales.weight = {
      .recipe = of->recipe,
      .amax = Words(memory_.amax + of->grid, of->grid_rows, of->grid_columns),
      .encode = {},
      .domain_amax = of->recipe == plan::Recipe::kNvFp4 ? Word(domain.amax) : TensorView()};
  scales.non_finite = Words(&non_finite_[static_cast<size_t>(of->domain)], 1, 1);
  if (of->recipe == plan::Recipe::kDelayed) {
    scales.weight.encode =
        VectorView(memory_.delayed_scales + 2 * SlotOf(of->domain, QuantSlot::kWeight), 1);
    scales.input_encode = VectorView(&NextScale(SlotOf(of->domain, QuantSlot::kInput)), 1);
    scales.gradient_encode = VectorView(&NextScale(SlotOf(of->domain, QuantSlot::kGradient)), 1);
    if (stages) {
      scales.input_staged = Word(domain.input);
      scales.gradient_staged = Word(domain.gradient);
    }
  }
  return scales;
}

void QuantState::MeasureWeights(kernels::Stream& stream, std::span<const QuantPiece> pieces) {
  std::memset(memory_.amax, 0, Size(layout_.weight_words) * sizeof(uint32_t));
  for (const QuantPiece& piece : pieces) {
    const plan::QuantTensor& of = *layout_.Find(piece.tensor);
    const int64_t edge = plan::BlockEdge(of.recipe);
    kernels::BlockAmax(stream,
                       {.from = piece.main_weight,
                        .first_row = piece.first_row,
                        .edge = edge,
                        .amax = Words(memory_.amax + of.grid, of.grid_rows, of.grid_columns)});
    const int64_t whole = layout_.domain(of).amax;
    if (edge > 0 && whole >= 0) {
      kernels::BlockAmax(
          stream, {.from = piece.main_weight, .first_row = 0, .edge = 0, .amax = Word(whole)});
    }
  }
}

void QuantState::Maximum(std::span<const float* const> pieces, std::span<uint32_t> words) {
  std::fill(words.begin(), words.end(), 0u);
  for (const float* piece : pieces) {
    const auto* from = reinterpret_cast<const uint32_t*>(piece);
    for (size_t i = 0; i < words.size(); ++i) {
      words[i] = std::max(words[i], from[i]);
    }
  }
}

// The first cast of all is by the amax itself.
void QuantState::CastWeight(int64_t slot, uint32_t amax) {
  const float next = NextScale(slot);
  if (next != 0) {
    CastScale(slot) = next;
    return;
  }
  const bool finite = amax != 0 && amax < 0x7F800000u;
  const float scale = finite ? kLargestE4M3 / std::bit_cast<float>(amax) : 1.0f;
  CastScale(slot) =
      std::bit_cast<uint32_t>(scale) < 0x7F800000u ? scale : std::bit_cast<float>(0x7F7FFFFFu);
}

void QuantState::UpdateSlot(kernels::Stream& stream, int64_t slot, uint32_t amax) {
  kernels::UpdateDelayedScale(
      stream,
      {.history = VectorView(History(slot).data(), memory_.history),
       .amax = Words(&amax, 1, 1),
       .encode = VectorView(&NextScale(slot), 1),
       .apply = {},
       .largest = std::ldexp(LargestOf(slot), -static_cast<int>(memory_.margin))});
}

void QuantState::FinishStep(kernels::Stream& stream, bool applied) {
  for (size_t i = 0; i < layout_.domains.size(); ++i) {
    const plan::QuantDomain& domain = layout_.domains[i];
    if (domain.recipe != plan::Recipe::kDelayed) {
      continue;
    }
    const auto slot = [&](QuantSlot of) { return SlotOf(static_cast<int>(i), of); };
    if (applied) {
      CastWeight(slot(QuantSlot::kWeight), memory_.amax[domain.amax]);
      UpdateSlot(stream, slot(QuantSlot::kWeight), memory_.amax[domain.amax]);
      UpdateSlot(stream, slot(QuantSlot::kInput), memory_.amax[domain.input]);
      UpdateSlot(stream, slot(QuantSlot::kGradient), memory_.amax[domain.gradient]);
    }
    memory_.amax[domain.input] = 0;
    memory_.amax[domain.gradient] = 0;
  }
}

void QuantState::FinishLoad(kernels::Stream& stream) {
  for (int64_t slot = 0; slot < layout_.slots; ++slot) {
    UpdateSlot(stream, slot, 0);
  }
}

void QuantState::Quantize(kernels::Stream& stream, std::span<const QuantPiece> pieces) const {
  for (const QuantPiece& piece : pieces) {
    kernels::QuantizeWeight(stream,
                            {.from = piece.main_weight,
                             .first_row = piece.first_row,
                             .scales = ScalesOf(piece.tensor, false).weight,
                             .codes = piece.codes});
  }
}

void QuantState::ReadState(plan::StateRole role, int64_t first, std::span<float> to) const {
  CHECK(plan::IsOfScales(role));
  for (size_t i = 0; i < to.size(); ++i) {
    const int64_t at = first + static_cast<int64_t>(i);
    to[i] = role == plan::StateRole::kCastScale
                ? CastScale(at)
                : History(at / memory_.history)[Size(at % memory_.history)];
  }
}

void QuantState::WriteState(plan::StateRole role, int64_t first, std::span<const float> from) {
  CHECK(plan::IsOfScales(role));
  for (size_t i = 0; i < from.size(); ++i) {
    const int64_t at = first + static_cast<int64_t>(i);
    float& to = role == plan::StateRole::kCastScale
                    ? CastScale(at)
                    : History(at / memory_.history)[Size(at % memory_.history)];
    to = from[i];
  }
}

uint64_t QuantState::ReplicatedDigest() const {
  uint64_t sum = 0;
  uint64_t index = 0;
  const auto add = [&](const auto* words, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      sum += kernels::scalar::DigestElement(index++, std::bit_cast<uint32_t>(words[i]));
    }
  };
  // Amaxes of activations come behind those of weights; each rank has its own until they are
  // reduced.
  add(memory_.amax, layout_.weight_words);
  add(memory_.delayed_scales, layout_.slots * (2 + memory_.history));
  return sum;
}

uint64_t QuantState::ScalesDigest(plan::TensorId tensor) const {
  const plan::QuantTensor& of = *layout_.Find(tensor);
  const plan::QuantDomain& domain = layout_.domain(of);
  const bool delayed = of.recipe == plan::Recipe::kDelayed;
  const kernels::scalar::Scales whole = kernels::scalar::WeightTensorScales(
      of.recipe,
      domain.amax < 0 ? 0 : memory_.amax[domain.amax],
      delayed ? CastScale(SlotOf(of.domain, QuantSlot::kWeight)) : 0.0f);
  uint64_t sum = kernels::scalar::TensorScaleDigest(whole);
  if (plan::BlockEdge(of.recipe) > 0) {
    for (int64_t block = 0; block < of.grid_rows * of.grid_columns; ++block) {
      sum += kernels::scalar::BlockScaleDigest(
          block,
          kernels::scalar::WeightBlockScales(
              of.recipe, memory_.amax[of.grid + block], whole.encode));
    }
  }
  return sum;
}

std::vector<plan::TensorId> QuantState::TakeNonFinite() {
  std::vector<plan::TensorId> found;
  for (const plan::QuantTensor& tensor : layout_.tensors) {
    uint32_t& flag = non_finite_[static_cast<size_t>(tensor.domain)];
    if (std::exchange(flag, 0) != 0) {
      found.push_back(tensor.tensor);
    }
  }
  return found;
}

}  // namespace ravel::quant
