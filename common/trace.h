#pragma once

// Records what each rank did and when: events of a few steps, written as one Chrome-trace file per
// rank (chrome://tracing, Perfetto), merged into one timeline of all ranks, and drawn as text.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "common/json.h"
#include "common/mutex.h"
#include "common/status.h"

namespace ravel::trace {

// One instruction of a step program. Times are of the monotonic clock, nanoseconds; names outlive
// the recorder.
struct Event {
  int64_t begin_ns = 0;
  int64_t end_ns = 0;
  int64_t step = 0;  // finished steps when the step is done, as in metrics
  int64_t turn = 0;
  int64_t micro_batch = 0;  // of the lane
  std::string_view phase;   // "first", "eval"
  std::string_view unit;    // "layers.3"; "" for what belongs to none
  std::string_view op;      // "Gather"
  std::string_view stream;  // "compute": one row of the timeline
  int call = 0;
  int64_t bytes = 0;        // moved by a collective
  int64_t generation = -1;  // of the weights; -1: not about weights
  int64_t wait_ns = 0;      // of the time until begin_ns that was spent on waiting for events
  // From begin_ns on, of a collective: spent on waiting for other ranks.
  int64_t peer_wait_ns = 0;
  int64_t peer_wait_begin_ns = 0;  // when the longest of these waits began
  int64_t peer = -1;               // the rank that came last in most of that time
  int64_t issue_ns = 0;            // of a device: what the host needed to issue it
};

// Keeps the newest events. Thread-safe.
class Recorder {
 public:
  explicit Recorder(size_t capacity = 1 << 20);
  void Record(const Event& event);
  // All that are kept, by begin; the recorder is empty afterwards.
  std::vector<Event> Take();
  // Older events that made room, since the last Take.
  int64_t dropped() const;

 private:
  const size_t capacity_;
  mutable Mutex mutex_;
  std::vector<Event> events_ ABSL_GUARDED_BY(mutex_);
  size_t next_ ABSL_GUARDED_BY(mutex_) = 0;  // where the oldest is once the ring is full
  int64_t dropped_ ABSL_GUARDED_BY(mutex_) = 0;
};

// Which rank the events are of.
struct Source {
  std::string job = {};
  int64_t epoch = 0;
  int64_t rank = 0;
  std::string host = {};
  int64_t wall_minus_monotonic_ns = 0;  // lines up the clocks of different hosts
};

// The Chrome-trace document of one rank: process = rank, thread = stream, names
// "step/turn/phase/unit/op".
json::Value ToChromeTrace(const Source& source, const std::vector<Event>& events);
absl::Status WriteChromeTrace(const std::string& path,
                              const Source& source,
                              const std::vector<Event>& events);

// One document from those of several ranks, on a common time axis that begins at 0. Errors name the
// file: not a trace of ours, or two files of the same rank and epoch.
absl::StatusOr<json::Value> MergeChromeTraces(const std::vector<std::string>& paths);

// One step as text: a row per rank and stream, `width` columns of equal time; each operation is a
// letter (G gather, F forward, B backward, R reduce, O optimizer, S statistics, r recompute, .
// idle). NotFound when the document has no such step. `step` < 0: the last one.
absl::StatusOr<std::string> TextGantt(const json::Value& document, int64_t step, int width);

// Waits of one step, for events of the own rank and for other ranks: per rank and waiting
// instruction the time, largest first; only those of more than `least_share` of the step.
struct Stall {
  int64_t rank = 0;
  std::string instruction;  // "Forward layers.3 (first, turn 0)"
  double seconds = 0;
  double share = 0;  // of the step on that rank
  // The rank that came last, -1 when the wait was for no other; and what that rank did most of the
  // time, "" when nothing of it is recorded.
  int64_t late_rank = -1;
  std::string late_instruction = {};
};
std::vector<Stall> FindStalls(const json::Value& document, int64_t step, double least_share = 0.01);

// Ranks that made others wait in one step: per rank the time that all others together waited for
// it, largest first.
struct LateRank {
  int64_t rank = 0;
  double seconds = 0;
  std::string instruction;  // what it did in most of that time
};
std::vector<LateRank> FindLateRanks(const json::Value& document, int64_t step);

// The part of a step's communication that its computation hid.
struct StepOverlap {
  int64_t rank = 0;
  // Gathers of weights, and those that ran beside a forward or backward pass.
  int64_t gathers = 0;
  int64_t hidden_gathers = 0;
  // Reductions of gradients, and those that ran beside a pass.
  int64_t reduces = 0;
  int64_t hidden_reduces = 0;
  // Communication of any kind with nothing on the compute stream beside it, and its share of the
  // step.
  double exposed_seconds = 0;
  double exposed_share = 0;
  double longest_issue_seconds = 0;  // of a unit's pass, by the host; 0 but on a device
};
// Per rank, by rank; evaluations are left out.
std::vector<StepOverlap> CountOverlaps(const json::Value& document, int64_t step);

}  // namespace ravel::trace
