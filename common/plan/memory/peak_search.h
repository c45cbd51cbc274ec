#pragma once

// Finds the most memory of a kind that is alive at any moment of a program.

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "common/plan/memory/buffer_plan.h"
#include "common/plan/program/program_order.h"

namespace ravel::plan {

// Finds the worst moment of a program: some instructions run, at most one a stream and none before
// another; what they and those before them brought to life is alive until its last access is done.
// Instructions of a stream are one after another, so what has begun and what is done at a moment is
// a number per stream, and its bytes are a difference of two sums that are known beforehand.
class PeakSearch {
 public:
  // Lifetimes are of the program that `order` is of; all outlive this. Accesses of a lifetime but
  // the last must be before the last (K2).
  PeakSearch(const HappensBefore& order,
             const std::vector<Lifetime>& lifetimes,
             const ProgramBuffers& buffers,
             MemoryKind memory);

  // Raises `peak` to the worst moment that is found. Things get worse only when something comes to
  // life: with each birth, lets every other stream run as far as makes things worst. Births whose
  // neighbours could not reach the worst so far, even all together, are not looked at; the most
  // promising come first.
  void Improve(PeakCut& peak) const;

 private:
  using Clock = HappensBefore::Clock;
  // Per stream, how many of its instructions have begun, and how many are done.
  struct Moment {
    Clock begun = {};
    Clock done = {};
  };
  // Births of one stream, in order: [first, end) of births_.
  struct Range {
    size_t first = 0;
    size_t end = 0;
  };
  using Ranges = std::array<Range, kStreamCount>;

  void AddBytes(std::vector<int64_t>& sums, InstructionId instruction, int64_t bytes) const;
  // With what runs, this instruction runs as well.
  Moment With(const Moment& moment, InstructionId instruction) const;
  int64_t AliveAt(const Moment& moment) const;
  std::vector<BufferId> BuffersAt(const Moment& moment) const;
  // Births of a stream that are neither before nor after an instruction; none of its own stream.
  Range Beside(InstructionId instruction, size_t stream) const;
  // Bytes that are alive, or may be, at a moment when `birth` runs.
  int64_t Neighbours(InstructionId birth) const;
  // The worst moment at which `birth` runs.
  std::pair<int64_t, Moment> WorstWith(InstructionId birth) const;

  const HappensBefore& order_;
  std::vector<const Lifetime*> lives_;
  int64_t at_start_ = 0;  // bytes that are alive before the first instruction
  // Per stream, by number of its instructions: bytes that these bring to life, and that are not
  // used after them.
  std::array<std::vector<int64_t>, kStreamCount> born_;
  std::array<std::vector<int64_t>, kStreamCount> ended_;
  std::array<std::vector<InstructionId>, kStreamCount> births_;  // ascending, each once
};

}  // namespace ravel::plan
