// Finds the moment at which most bytes are alive. A moment is a vector: per stream, how many
// instructions have begun and how many are done. Its bytes are differences of prefix sums, alive =
// at start + sum over streams of (born - ended), so a moment costs O(streams) instead of
// O(buffers). Each birth is extended greedily by births of other streams that may run beside it; an
// upper bound per birth orders the search and ends it early.

#include "common/plan/memory/peak_search.h"

#include <algorithm>
#include <numeric>

#include "common/signed_size.h"

namespace ravel::plan {

PeakSearch::PeakSearch(const HappensBefore& order,
                       const std::vector<Lifetime>& lifetimes,
                       const ProgramBuffers& buffers,
                       MemoryKind memory)
    : order_(order) {
  for (const Lifetime& life : lifetimes) {
    const ProgramBuffer& buffer = buffers[life.buffer];
    const InstructionId last = life.accesses.back();
    if (buffer.memory != memory || last < 0) {  // the latter are never used
      continue;
    }
    lives_.push_back(&life);
    const int64_t bytes = ArenaBytes(buffer);
    AddBytes(ended_[order.StreamOf(last)], last, bytes);
    if (life.begin < 0) {
      at_start_ += bytes;
      continue;
    }
    const size_t stream = order.StreamOf(life.begin);
    AddBytes(born_[stream], life.begin, bytes);
    if (births_[stream].empty() || births_[stream].back() != life.begin) {
      births_[stream].push_back(life.begin);  // lifetimes are by begin
    }
  }
  for (size_t stream = 0; stream < kStreamCount; ++stream) {
    for (std::vector<int64_t>* sums : {&born_[stream], &ended_[stream]}) {
      sums->resize(Size(order.InstructionsOf(stream)) + 1);
      std::partial_sum(sums->begin(), sums->end(), sums->begin());
    }
  }
}

void PeakSearch::AddBytes(std::vector<int64_t>& sums,
                          InstructionId instruction,
                          int64_t bytes) const {
  const size_t position = Size(order_.PositionOf(instruction));
  if (sums.size() <= position) {
    sums.resize(position + 1);
  }
  sums[position] += bytes;
}

PeakSearch::Moment PeakSearch::With(const Moment& moment, InstructionId instruction) const {
  const Clock& clock = order_.ClockOf(instruction);
  Moment result = moment;
  for (size_t stream = 0; stream < kStreamCount; ++stream) {
    const int done = clock[stream] - (stream == order_.StreamOf(instruction) ? 1 : 0);
    result.begun[stream] = std::max(result.begun[stream], clock[stream]);
    result.done[stream] = std::max(result.done[stream], done);
  }
  return result;
}

int64_t PeakSearch::AliveAt(const Moment& moment) const {
  int64_t bytes = at_start_;
  for (size_t stream = 0; stream < kStreamCount; ++stream) {
    bytes += born_[stream][static_cast<size_t>(moment.begun[stream])] -
             ended_[stream][static_cast<size_t>(moment.done[stream])];
  }
  return bytes;
}

std::vector<BufferId> PeakSearch::BuffersAt(const Moment& moment) const {
  const auto covers = [&](const Clock& clock, InstructionId instruction) {
    return instruction < 0 || clock[order_.StreamOf(instruction)] >= order_.PositionOf(instruction);
  };
  std::vector<BufferId> alive;
  for (const Lifetime* life : lives_) {
    if (covers(moment.begun, life->begin) && !covers(moment.done, life->accesses.back())) {
      alive.push_back(life->buffer);
    }
  }
  return alive;
}

PeakSearch::Range PeakSearch::Beside(InstructionId instruction, size_t stream) const {
  const std::vector<InstructionId>& births = births_[stream];
  const int before = order_.ClockOf(instruction)[stream];
  const auto first = std::partition_point(births.begin(), births.end(), [&](InstructionId birth) {
    return order_.PositionOf(birth) <= before;
  });
  const auto end = std::partition_point(
      first, births.end(), [&](InstructionId birth) { return !order_.Before(instruction, birth); });
  return {.first = Size(first - births.begin()), .end = Size(end - births.begin())};
}

int64_t PeakSearch::Neighbours(InstructionId birth) const {
  const Moment alone = With({}, birth);
  Moment all = alone;
  for (size_t stream = 0; stream < kStreamCount; ++stream) {
    const Range beside = Beside(birth, stream);
    if (beside.end > beside.first) {
      all.begun[stream] = order_.PositionOf(births_[stream][beside.end - 1]);
    }
  }
  return AliveAt(all);
}

std::pair<int64_t, PeakSearch::Moment> PeakSearch::WorstWith(InstructionId birth) const {
  Moment moment = With({}, birth);
  int64_t bytes = AliveAt(moment);
  Ranges ranges;
  for (size_t stream = 0; stream < kStreamCount; ++stream) {
    ranges[stream] = Beside(birth, stream);
  }
  // Starts the birth that makes the moment worst, the first of equals, as long as one does. What
  // cannot join once cannot join later.
  for (InstructionId chosen = birth; chosen >= 0;) {
    chosen = {};
    for (size_t stream = 0; stream < kStreamCount; ++stream) {
      for (size_t i = ranges[stream].first; i < ranges[stream].end; ++i) {
        const InstructionId candidate = births_[stream][i];
        const int64_t more = AliveAt(With(moment, candidate));
        if (more > bytes || (more == bytes && chosen >= 0 && candidate < chosen)) {
          bytes = more;
          chosen = candidate;
        }
      }
    }
    if (chosen >= 0) {
      moment = With(moment, chosen);
      for (size_t stream = 0; stream < kStreamCount; ++stream) {
        const Range beside = Beside(chosen, stream);
        ranges[stream] = {.first = std::max(ranges[stream].first, beside.first),
                          .end = std::min(ranges[stream].end, beside.end)};
      }
    }
  }
  return {bytes, moment};
}

void PeakSearch::Improve(PeakCut& peak) const {
  std::vector<std::pair<int64_t, InstructionId>> births;
  for (const std::vector<InstructionId>& of_stream : births_) {
    for (const InstructionId birth : of_stream) {
      births.emplace_back(Neighbours(birth), birth);
    }
  }
  std::sort(births.begin(), births.end(), [](const auto& one, const auto& other) {
    return std::pair(-one.first, one.second) < std::pair(-other.first, other.second);
  });
  for (const auto& [most, birth] : births) {
    if (most <= peak.bytes) {
      return;
    }
    const auto [bytes, moment] = WorstWith(birth);
    if (bytes > peak.bytes) {
      peak = {.bytes = bytes, .buffers = BuffersAt(moment)};
    }
  }
}

}  // namespace ravel::plan
