#include "worker/optim/host_codes.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "common/check.h"
#include "common/plan/layout/quant_layout.h"
#include "common/plan/program/program_offload.h"
#include "common/signed_size.h"
#include "kernels/quantize.h"
#include "worker/shard/host_state.h"

namespace ravel::optim {
namespace {

// Elements of a block, with those beside it, that one thread updates and encodes: 1 MiB of weights.
constexpr int64_t kMostInCaches = int64_t{256} << 10;
// Elements that a thread encodes at a time where it does nothing else.
constexpr int64_t kEncodedElements = int64_t{64} << 10;
// Amaxes that go up in one copy: 4 MiB of the device.
constexpr int64_t kIncomingWords = int64_t{1} << 20;

TensorView WordsAt(void* data, int64_t words) {
  TensorView view = VectorView(nullptr, words);
  view.dtype = DType::kU32;
  view.data = data;
  return view;
}

}  // namespace

HostCodes::HostCodes(const plan::ShardingPlan& plan, const shard::ParameterGroups& groups)
    : plan_(plan), groups_(groups), of_groups_(groups.size(), false) {
  for (const plan::GroupId id : groups.ids()) {
    of_groups_[id] = groups[id].recipe() != plan::Recipe::kNone && IsOffloaded(plan, id);
    if (of_groups_[id]) {
      for (const quant::QuantPiece& piece : groups[id].quant_pieces()) {
        tensors_.push_back(piece.tensor);
      }
    }
  }
}

absl::StatusOr<std::unique_ptr<HostCodes>> HostCodes::Create(const plan::ShardingPlan& plan,
                                                             const shard::ParameterGroups& groups,
                                                             int64_t coordinate,
                                                             kernels::CudaGpu& gpu,
                                                             const shard::NumaNode& node) {
  std::unique_ptr<HostCodes> made(new HostCodes(plan, groups));
  if (std::none_of(made->of_groups_.begin(), made->of_groups_.end(), [](bool of) { return of; })) {
    return nullptr;
  }
  const shard::PreferNode prefer(node);
  RETURN_IF_ERROR(made->Allocate(coordinate, gpu));
  return made;
}

absl::Status HostCodes::Allocate(int64_t coordinate, kernels::CudaGpu& gpu) {
  const plan::QuantLayout layout = plan::QuantLayoutOf(plan_.inventory);
  words_ = layout.weight_words;
  delayed_words_ = layout.slots * plan::kScalesPerSlot;
  constexpr int64_t kWordBytes = sizeof(uint32_t);
  const plan::HostCodeBytes bytes =
      plan::HostCodeBytesOf(plan_.buffers, plan_.groups, plan_.options);
  CHECK(words_ * kWordBytes <= bytes.amaxes && delayed_words_ * kWordBytes <= bytes.delayed);
  auto pinned = gpu.AllocatePinned(bytes.all());
  if (!pinned.ok()) {
    return Annotate(pinned.status(), shard::kOffloadFractionField);
  }
  pinned_ = *std::move(pinned);
  ASSIGN_OR_RETURN(incoming_, gpu.AllocateDevice(std::min(words_, kIncomingWords) * kWordBytes));
  std::memset(pinned_.data(), 0, Size(pinned_.bytes()));
  auto* const begin = static_cast<std::byte*>(pinned_.data());
  amaxes_ = reinterpret_cast<uint32_t*>(begin);
  delayed_ = delayed_words_ > 0 ? reinterpret_cast<float*>(begin + bytes.amaxes) : nullptr;
  flags_.resize(plan_.inventory.tensors.size());
  state_.emplace(
      plan_.inventory,
      coordinate,
      quant::QuantState::Gemms{.path = plan_.options.gemm_path,
                               .fast = plan_.options.fast_accumulation,
                               .amax_epsilon = static_cast<float>(plan_.options.amax_epsilon)},
      quant::QuantState::Memory{
          .amax = amaxes_, .delayed_scales = delayed_, .flags = flags_.data()});
  return absl::OkStatus();
}

HostCodes::Work HostCodes::WorkOf(const OffloadChunk& chunk) const {
  const shard::ParameterGroup& group = groups_[chunk.group];
  const bool in_parts = ScaleCutsOf(group).widest <= kMostInCaches;
  const auto visit = [&](const std::vector<kernels::UpdatePiece>& pieces, const auto& to) {
    VisitPiecesOf(group, {.pieces = pieces.data(), .count = std::ssize(pieces)}, to);
  };
  const auto add = [&](const quant::QuantPiece& piece,
                       quant::QuantState::RowRange rows,
                       std::vector<Encoding>& to) {
    const int64_t at = piece.main_weight.As<float>() - group.main_weight();
    to.push_back({.piece = &piece,
                  .rows = rows,
                  .offset = at + rows.first * piece.main_weight.columns() - chunk.begin});
  };
  Work work;
  for (OffloadChunk& cut :
       CutForCaches(group,
                    {.pieces = chunk.pieces.data(), .count = std::ssize(chunk.pieces)},
                    kMostInCaches)) {
    Part& part = work.parts.emplace_back();
    visit(cut.pieces, [&](const quant::QuantPiece& piece, int64_t first, int64_t count) {
      part.visits.push_back({.piece = &piece, .first = first, .count = count});
      const quant::QuantState::RowRange rows = state_->KnownRows(piece, first, count);
      if (in_parts && rows.rows > 0) {
        add(piece, rows, part.encodings);
      }
    });
    part.pieces = std::move(cut.pieces);
    for (kernels::UpdatePiece& piece : part.pieces) {
      piece.offset -= chunk.begin;
    }
  }
  if (in_parts) {
    return work;
  }
  visit(chunk.pieces, [&](const quant::QuantPiece& piece, int64_t first, int64_t count) {
    const quant::QuantState::RowRange rows = state_->KnownRows(piece, first, count);
    const int64_t most = std::max<int64_t>(1, kEncodedElements / piece.main_weight.columns());
    for (int64_t row = 0; row < rows.rows; row += most) {
      add(piece, {.first = rows.first + row, .rows = std::min(most, rows.rows - row)}, work.after);
    }
  });
  return work;
}

void HostCodes::Begin() {
  std::fill_n(amaxes_, words_, 0u);
  const bool all = std::all_of(tensors_.begin(), tensors_.end(), [&](plan::TensorId tensor) {
    return state_->HasHistory(tensor);
  });
  ahead_.store(all, std::memory_order_release);
}

void HostCodes::Follow(const Part& part, std::byte* codes, Cast cast) {
  kernels::CpuStream stream;
  for (const Visit& visit : part.visits) {
    state_->MeasureElements(stream, *visit.piece, visit.first, visit.count);
  }
  if (codes != nullptr) {
    for (const Encoding& encoding : part.encodings) {
      Encode(encoding, codes, cast);
    }
  }
}

void HostCodes::Encode(const Encoding& encoding, std::byte* codes, Cast cast) const {
  kernels::CpuStream stream;
  quant::QuantPiece rows = RowsOf(*encoding.piece, encoding.rows.first, encoding.rows.rows);
  rows.codes.data = codes + encoding.offset;
  if (cast == Cast::kAhead) {
    state_->QuantizeAhead(stream, rows);
  } else {
    state_->Quantize(stream, {&rows, 1});
  }
}

void HostCodes::Encode(const quant::QuantPiece& rows, std::byte* codes) const {
  kernels::CpuStream stream;
  quant::QuantPiece to = rows;
  to.codes.data = codes;
  state_->Quantize(stream, {&to, 1});
}

void HostCodes::AddAmaxes(kernels::CudaStream& stream, const TensorView& amaxes) {
  CHECK_EQ(amaxes.elements(), words_);
  auto* const device = amaxes.As<uint32_t>();
  auto* const incoming = static_cast<uint32_t*>(incoming_.data());
  for (int64_t first = 0; first < words_; first += kIncomingWords) {
    const int64_t words = std::min(kIncomingWords, words_ - first);
    stream.CopyMemory(incoming, amaxes_ + first, words * int64_t{sizeof(uint32_t)});
    kernels::LargestWords(
        stream, {.pieces = {incoming}, .out = WordsAt(device + first, words), .accumulates = true});
  }
}

void HostCodes::TakeScales(kernels::CudaStream& stream, const quant::QuantState& scales) {
  const std::span<const uint32_t> amaxes = scales.weight_amaxes();
  CHECK_EQ(std::ssize(amaxes), words_);
  stream.CopyMemory(amaxes_, amaxes.data(), std::ssize(std::as_bytes(amaxes)));
  if (delayed_words_ > 0) {
    stream.CopyMemory(
        delayed_, scales.delayed_scales().data(), delayed_words_ * int64_t{sizeof(float)});
  }
}

}  // namespace ravel::optim
