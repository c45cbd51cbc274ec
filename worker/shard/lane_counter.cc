// A binary counter of partial sums over lanes. Lane l arrives as a leaf; equal levels are added,
// left operand first, so that any number of ranks gives the tree of one rank. At most log2(V) + 1
// partial sums of a shard are kept.

#include "worker/shard/lane_counter.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <utility>

#include "common/check.h"
#include "common/signed_size.h"
#include "kernels/reduce_add.h"
#include "kernels/tree_reduce.h"

namespace ravel::shard {
namespace {

// Elements of a block's sum that wait in the cache to be added to an older sum.
constexpr int64_t kChunkElements = 4096;

float Bf16Value(uint16_t bits) {
  return std::bit_cast<float>(uint32_t{bits} << 16);
}

// To nearest, ties to even; NaN stays NaN.
uint16_t Bf16Nearest(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) {
    return 0x7FFF;
  }
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

void AddRange(kernels::Stream& stream, const float* newer, float* older, int64_t elements) {
  kernels::TreeAdd(stream,
                   {.a = VectorView(older, elements),
                    .b = VectorView(const_cast<float*>(newer), elements),
                    .out = VectorView(older, elements)});
}

template <typename Piece>
std::vector<const Piece*> Shifted(std::span<const Piece* const> pieces, int64_t offset) {
  std::vector<const Piece*> shifted(pieces.begin(), pieces.end());
  for (const Piece*& piece : shifted) {
    piece += offset;
  }
  return shifted;
}

// out (=|+=) the tree sum of pieces, on a device.
void SumPieces(kernels::Stream& stream,
               std::vector<const float*> pieces,
               const TensorView& out,
               kernels::Output output) {
  if (output == kernels::Output::kOverwrite) {
    kernels::TreeSum(stream, {.pieces = std::move(pieces), .out = out});
  } else {
    kernels::ReduceAdd(stream, {.pieces = std::move(pieces), .out = out, .output = output});
  }
}
void SumPieces(kernels::Stream& stream,
               std::vector<const uint16_t*> pieces,
               const TensorView& out,
               kernels::Output output) {
  kernels::ReduceAdd(stream, {.rounded_pieces = std::move(pieces), .out = out, .output = output});
}

}  // namespace

std::vector<ShardRun> RunsOf(const std::vector<plan::OwnedPiece>& pieces) {
  std::vector<ShardRun> runs;
  for (const plan::OwnedPiece& piece : pieces) {
    const int64_t elements = piece.elements();
    CHECK(runs.empty() || runs.back().offset + runs.back().elements <= piece.shard_offset);
    if (!runs.empty() && runs.back().offset + runs.back().elements == piece.shard_offset) {
      runs.back().elements += elements;
    } else if (elements > 0) {
      runs.push_back({.offset = piece.shard_offset, .elements = elements});
    }
  }
  return runs;
}

std::vector<ShardRun> RunsWithin(const std::vector<ShardRun>& runs, int64_t begin, int64_t end) {
  std::vector<ShardRun> within;
  for (const ShardRun& run : runs) {
    const int64_t from = std::max(begin, run.offset);
    const int64_t to = std::min(end, run.offset + run.elements);
    if (from < to) {
      within.push_back({.offset = from - begin, .elements = to - from});
    }
  }
  return within;
}

void AddRuns(kernels::Stream& stream,
             const std::vector<ShardRun>& runs,
             const float* newer,
             float* older) {
  for (const ShardRun& run : runs) {
    AddRange(stream, newer + run.offset, older + run.offset, run.elements);
  }
}

void PackBf16(float* values, int64_t elements) {
  auto* bytes = reinterpret_cast<std::byte*>(values);
  for (int64_t i = 0; i < elements; ++i) {
    float value = 0;
    std::memcpy(&value, bytes + 4 * i, sizeof(value));
    const uint16_t rounded = Bf16Nearest(value);
    std::memcpy(bytes + 2 * i, &rounded, sizeof(rounded));
  }
}

LaneCounter::LaneCounter(std::vector<float*> buffers,
                         const plan::LaneMap& lanes,
                         std::vector<ShardRun> runs)
    : buffers_(std::move(buffers)),
      lanes_(lanes),
      runs_(std::move(runs)),
      root_(plan::CounterRoot(lanes)) {
  CHECK(!lanes.blocks && lanes.replicas == 1);
  CHECK_EQ(static_cast<int>(buffers_.size()), plan::CounterBuffers(lanes));
  for (int64_t turn = 0; turn < lanes.turns(); ++turn) {
    schedule_.push_back(plan::CounterSchedule(lanes, turn));
  }
}

template <typename Piece, typename Add>
void LaneCounter::ForEachBlock(int64_t turn,
                               std::span<const Piece* const> pieces,
                               const Add& add) const {
  CHECK_EQ(static_cast<int64_t>(pieces.size()), lanes_.LaneCount(turn));
  for (const plan::CounterStep& step : At(schedule_, turn)) {
    const int64_t first = step.block.first - lanes_.FirstLane(turn);
    add(step, Part(pieces, first, int64_t{1} << step.block.level));
  }
}

void LaneCounter::AddTurn(kernels::Stream& stream,
                          int64_t turn,
                          std::span<const float* const> pieces) {
  ForEachBlock(turn, pieces, [&](const plan::CounterStep& step, const auto& block) {
    if (step.add_into.empty() && block.size() == 1 && block[0] == At(buffers_, step.store)) {
      return;  // staged there
    }
    if (stream.backend() == kernels::Backend::kCuda) {
      AddBlockOnDevice(stream, step, block);
    } else {
      AddBlock(stream, step, block);
    }
  });
}

// The bits of AddBlock: an addition gives the same in either order of its operands.
template <typename Piece>
void LaneCounter::AddBlockOnDevice(kernels::Stream& stream,
                                   const plan::CounterStep& step,
                                   std::span<const Piece* const> pieces) {
  if (runs_.empty()) {
    return;
  }
  const int64_t begin = runs_.front().offset;
  const int64_t elements = runs_.back().offset + runs_.back().elements - begin;
  const bool stores = step.add_into.empty();
  float* out = At(buffers_, stores ? step.store : step.add_into.front()) + begin;
  SumPieces(stream,
            Shifted(pieces, begin),
            VectorView(out, elements),
            stores ? kernels::Output::kOverwrite : kernels::Output::kAccumulate);
  for (size_t i = 1; i < step.add_into.size(); ++i) {
    float* older = At(buffers_, step.add_into[i]) + begin;
    AddRange(stream, out, older, elements);
    out = older;
  }
}

void LaneCounter::AddBlock(kernels::Stream& stream,
                           const plan::CounterStep& step,
                           std::span<const float* const> pieces) {
  if (step.add_into.empty()) {
    float* out = At(buffers_, step.store);
    for (const ShardRun& run : runs_) {
      kernels::TreeSum(stream,
                       {.pieces = Shifted(pieces, run.offset),
                        .out = VectorView(out + run.offset, run.elements)});
    }
    return;
  }
  // Chunk by chunk through the whole chain of merges, so that every partial sum is read from the
  // cache.
  for (const ShardRun& run : runs_) {
    const int64_t end = run.offset + run.elements;
    for (int64_t begin = run.offset; begin < end; begin += kChunkElements) {
      AddChunk(stream,
               step,
               Shifted(pieces, begin),
               {.offset = begin, .elements = std::min(kChunkElements, end - begin)});
    }
  }
}

void LaneCounter::AddChunk(kernels::Stream& stream,
                           const plan::CounterStep& step,
                           const std::vector<const float*>& pieces,
                           const ShardRun& chunk) {
  if (step.add_into.empty()) {
    float* out = At(buffers_, step.store) + chunk.offset;
    kernels::TreeSum(stream, {.pieces = pieces, .out = VectorView(out, chunk.elements)});
    return;
  }
  alignas(64) std::array<float, kChunkElements> newer;
  const float* sum = pieces[0];
  if (pieces.size() > 1) {
    kernels::TreeSum(stream, {.pieces = pieces, .out = VectorView(newer.data(), chunk.elements)});
    sum = newer.data();
  }
  for (const int buffer : step.add_into) {
    float* older = At(buffers_, buffer) + chunk.offset;
    AddRange(stream, sum, older, chunk.elements);
    sum = older;
  }
}

void LaneCounter::AddRoundedTurn(kernels::Stream& stream,
                                 int64_t turn,
                                 std::span<const uint16_t* const> pieces) {
  if (stream.backend() == kernels::Backend::kCuda) {
    ForEachBlock(turn, pieces, [&](const plan::CounterStep& step, const auto& block) {
      AddBlockOnDevice(stream, step, block);
    });
    return;
  }
  std::vector<float> exact(pieces.size() * Size(kChunkElements));
  // From the last chunk to the first: a piece may be the first half of the sum's own memory, where
  // writing element i leaves all rounded values below element 2i as they are.
  for (auto run = runs_.rbegin(); run != runs_.rend(); ++run) {
    const int64_t end = run->offset + run->elements;
    const int64_t last = run->offset + (run->elements - 1) / kChunkElements * kChunkElements;
    for (int64_t begin = last; begin >= run->offset; begin -= kChunkElements) {
      const int64_t count = std::min(kChunkElements, end - begin);
      std::vector<const float*> chunk;
      for (size_t i = 0; i < pieces.size(); ++i) {
        float* to = exact.data() + i * Size(kChunkElements);
        for (int64_t j = 0; j < count; ++j) {
          to[j] = Bf16Value(pieces[i][begin + j]);
        }
        chunk.push_back(to);
      }
      ForEachBlock(
          turn,
          std::span<const float* const>(chunk),
          [&](const plan::CounterStep& step, const auto& block) {
            AddChunk(
                stream, step, {block.begin(), block.end()}, {.offset = begin, .elements = count});
          });
    }
  }
}

}  // namespace ravel::shard
