// Records, merges and reads traces. Questions are answered from documents, not from the recorder,
// so that a trace of any rank and time can be asked. A wait is blamed on the rank that came last.
#include "common/trace.h"

#include <algorithm>
#include <limits>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>

#include "common/check.h"
#include "common/file_writer.h"
#include "common/signed_size.h"

namespace ravel::trace {
namespace {

constexpr int64_t kMostFileBytes = int64_t{4} << 30;
constexpr char kFormat[] = "ravel/trace/v1";

double Microseconds(int64_t ns) {
  return static_cast<double>(ns) / 1e3;
}

std::string View(std::string_view text) {
  return std::string(text);
}

// Rows of a rank, in the order in which people read them.
int64_t ThreadOf(std::string_view stream) {
  constexpr std::string_view kStreams[] = {
      "host", "compute", "gather", "reduce", "outer", "tensor", "download", "upload"};
  const auto* found = std::find(std::begin(kStreams), std::end(kStreams), stream);
  return found - std::begin(kStreams);
}

json::Value Metadata(const char* name, int64_t rank, int64_t thread, std::string text) {
  json::Value event;
  event.Set("name", name).Set("ph", "M").Set("pid", rank).Set("tid", thread);
  json::Value args;
  args.Set("name", std::move(text));
  event.Set("args", std::move(args));
  return event;
}

json::Value ChromeEvent(int64_t rank, const Event& event, int64_t origin_ns) {
  json::Value value;
  const std::string unit = event.unit.empty() ? "step" : View(event.unit);
  value.Set("name",
            absl::StrCat(event.step,
                         "/",
                         event.turn,
                         event.micro_batch > 0 ? absl::StrCat(".", event.micro_batch) : "",
                         "/",
                         View(event.phase),
                         "/",
                         unit,
                         "/",
                         View(event.op)));
  value.Set("cat", event.op).Set("ph", "X").Set("pid", rank).Set("tid", ThreadOf(event.stream));
  value.Set("ts", Microseconds(event.begin_ns - origin_ns));
  value.Set("dur", Microseconds(event.end_ns - event.begin_ns));
  json::Value args;
  args.Set("step", event.step).Set("turn", event.turn).Set("micro_batch", event.micro_batch);
  args.Set("phase", event.phase).Set("unit", event.unit).Set("op", event.op);
  args.Set("stream", event.stream).Set("call", event.call).Set("bytes", event.bytes);
  args.Set("generation", event.generation).Set("wait_us", Microseconds(event.wait_ns));
  if (event.issue_ns > 0) {
    args.Set("issue_us", Microseconds(event.issue_ns));
  }
  if (event.peer >= 0) {
    args.Set("peer", event.peer).Set("peer_wait_us", Microseconds(event.peer_wait_ns));
    args.Set("peer_wait_after_us", Microseconds(event.peer_wait_begin_ns - event.begin_ns));
  }
  value.Set("args", std::move(args));
  return value;
}

// The parts of an event that is read back.
struct ReadEvent {
  int64_t rank = 0;
  int64_t step = 0;
  double begin_us = 0;
  double end_us = 0;
  double wait_us = 0;
  double peer_wait_us = 0;
  double peer_wait_begin_us = 0;
  int64_t peer = -1;
  int64_t bytes = 0;
  double issue_us = 0;
  std::string stream;
  std::string op;
  std::string phase;
  std::string name;  // "Forward layers.3 (first, turn 0)"
};

std::string TextOf(const json::Value& object, std::string_view name) {
  const json::Value* const found = object.Find(name);
  return found != nullptr && found->is_string() ? found->AsString() : "";
}
double NumberOf(const json::Value& object, std::string_view name) {
  const json::Value* const found = object.Find(name);
  return found != nullptr && found->is_number() ? found->AsDouble() : 0;
}
int64_t WholeOf(const json::Value& object, std::string_view name) {
  const json::Value* const found = object.Find(name);
  return found != nullptr && found->is_int() ? found->AsInt() : 0;
}

std::vector<ReadEvent> EventsOf(const json::Value& document) {
  std::vector<ReadEvent> events;
  const json::Value* const list = document.Find("traceEvents");
  if (list == nullptr || !list->is_array()) {
    return events;
  }
  for (const json::Value& value : list->AsArray()) {
    const json::Value* const args = value.Find("args");
    if (TextOf(value, "ph") != "X" || args == nullptr) {
      continue;
    }
    ReadEvent event;
    event.rank = WholeOf(value, "pid");
    event.step = WholeOf(*args, "step");
    event.begin_us = NumberOf(value, "ts");
    event.end_us = event.begin_us + NumberOf(value, "dur");
    event.wait_us = NumberOf(*args, "wait_us");
    event.peer = args->Find("peer") == nullptr ? -1 : WholeOf(*args, "peer");
    event.peer_wait_us = NumberOf(*args, "peer_wait_us");
    event.peer_wait_begin_us = event.begin_us + NumberOf(*args, "peer_wait_after_us");
    event.stream = TextOf(*args, "stream");
    event.op = TextOf(*args, "op");
    event.phase = TextOf(*args, "phase");
    event.bytes = WholeOf(*args, "bytes");
    event.issue_us = NumberOf(*args, "issue_us");
    const std::string unit = TextOf(*args, "unit");
    event.name = absl::StrCat(event.op,
                              unit.empty() ? "" : " ",
                              unit,
                              " (",
                              event.phase,
                              ", turn ",
                              WholeOf(*args, "turn"),
                              ")");
    events.push_back(std::move(event));
  }
  return events;
}

int64_t LastStep(const std::vector<ReadEvent>& events) {
  int64_t last = -1;
  for (const ReadEvent& event : events) {
    last = std::max(last, event.step);
  }
  return last;
}

// Events of one step; < 0: the last.
std::vector<ReadEvent> EventsOf(const json::Value& document, int64_t step) {
  std::vector<ReadEvent> events = EventsOf(document);
  const int64_t wanted = step < 0 ? LastStep(events) : step;
  std::erase_if(events, [wanted](const ReadEvent& event) { return event.step != wanted; });
  return events;
}

// The waits of one instruction of a rank.
struct Waiting {
  double total_us = 0;
  std::map<std::pair<int64_t, std::string>, double> late_us;  // by late rank and what it did
};

template <typename Map>
typename Map::const_iterator Largest(const Map& map) {
  return std::max_element(
      map.begin(), map.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
}

// The instruction on which the last rank spent most of the others' wait; a gap counts to the next.
std::string LateInstruction(const std::vector<ReadEvent>& events, const ReadEvent& waiting) {
  const double begin = waiting.peer_wait_begin_us;
  const double end = std::min(waiting.end_us, begin + waiting.peer_wait_us);
  std::map<std::string, double> overlap;
  double cursor = begin;                   // what is before it is explained
  for (const ReadEvent& event : events) {  // of a rank by begin, as they were recorded
    if (event.rank != waiting.peer || event.end_us <= begin || cursor >= end) {
      continue;
    }
    if (event.begin_us > cursor) {
      overlap["before " + event.name] += std::min(event.begin_us, end) - cursor;
    }
    overlap[event.name] +=
        std::max(0.0, std::min(event.end_us, end) - std::max(event.begin_us, begin));
    cursor = std::max(cursor, event.end_us);
  }
  const auto most = Largest(overlap);
  return most == overlap.end() ? "" : most->first;
}

char LetterOf(const std::string& op) {
  static constexpr std::string_view kLetters =
      "|Gather:G|OuterGather:g|GatherGradient:G|Forward:F|Recompute:r|Backward:B|ReduceScatter:R"
      "|OuterReduce:R|AccumulateGrad:A|JoinGradients:A|TensorReduce:T|TensorGather:t|StatsReduce:S"
      "|OptimizerStep:O|";
  const size_t at = kLetters.find("|" + op + ":");
  return at == std::string_view::npos ? ' ' : kLetters[at + op.size() + 2];
}

// The longest operation of each column wins.
class GanttRow {
 public:
  explicit GanttRow(int width) : letters_(Size(width), '.'), share_(letters_.size(), 0.0) {}

  // Begin and end in columns.
  void Add(char letter, double begin, double end) {
    const auto last = static_cast<double>(letters_.size());
    for (double column = std::max(0.0, std::min(begin, last - 1)); column < std::min(end, last);) {
      const auto at = static_cast<size_t>(column);
      const double next = std::min(end, static_cast<double>(at) + 1);
      if (next - column > share_[at]) {
        share_[at] = next - column;
        letters_[at] = letter;
      }
      column = static_cast<double>(at) + 1;
    }
  }
  const std::string& text() const { return letters_; }

 private:
  std::string letters_;
  std::vector<double> share_;
};

// Times that belong together, as disjoint intervals in ascending order.
class Intervals {
 public:
  void Add(double begin, double end) {
    if (end > begin) {
      intervals_.emplace_back(begin, end);
    }
  }
  void Join() {
    std::sort(intervals_.begin(), intervals_.end());
    std::vector<std::pair<double, double>> joined;
    for (const auto& [begin, end] : intervals_) {
      if (!joined.empty() && begin <= joined.back().second) {
        joined.back().second = std::max(joined.back().second, end);
      } else {
        joined.emplace_back(begin, end);
      }
    }
    intervals_ = std::move(joined);
  }
  double total() const {
    double sum = 0;
    for (const auto& [begin, end] : intervals_) {
      sum += end - begin;
    }
    return sum;
  }
  // Time of [begin, end) that lies in these intervals. Call after Join.
  double Within(double begin, double end) const {
    double sum = 0;
    for (const auto& [from, to] : intervals_) {
      sum += std::max(0.0, std::min(to, end) - std::max(from, begin));
    }
    return sum;
  }
  const std::vector<std::pair<double, double>>& list() const { return intervals_; }

 private:
  std::vector<std::pair<double, double>> intervals_;
};

bool IsPass(const ReadEvent& event) {
  return event.op == "Forward" || event.op == "Recompute" || event.op == "Backward";
}
bool GathersWeights(const ReadEvent& event) {
  return event.op == "Gather" || event.op == "OuterGather";
}
bool ReducesGradients(const ReadEvent& event) {
  return event.op == "ReduceScatter" || event.op == "OuterReduce" || event.op == "GatherGradient";
}

// Overlap of one rank.
StepOverlap OverlapOf(const std::vector<const ReadEvent*>& events) {
  Intervals passes, computing, communicating, step;
  for (const ReadEvent* event : events) {
    const bool computes = event->stream == "compute";
    if (IsPass(*event)) {
      passes.Add(event->begin_us, event->end_us);
    }
    if (computes || event->bytes > 0) {
      (computes ? computing : communicating).Add(event->begin_us, event->end_us);
    }
    step.Add(event->begin_us, event->end_us);
  }
  for (Intervals* intervals : {&passes, &computing, &communicating, &step}) {
    intervals->Join();
  }
  StepOverlap overlap = {.rank = events.front()->rank};
  for (const ReadEvent* event : events) {
    const bool hidden = passes.Within(event->begin_us, event->end_us) > 0;
    if (event->bytes > 0 && GathersWeights(*event)) {
      ++overlap.gathers;
      overlap.hidden_gathers += hidden ? 1 : 0;
    } else if (event->bytes > 0 && ReducesGradients(*event)) {
      ++overlap.reduces;
      overlap.hidden_reduces += hidden ? 1 : 0;
    }
    if (IsPass(*event)) {
      overlap.longest_issue_seconds =
          std::max(overlap.longest_issue_seconds, event->issue_us / 1e6);
    }
  }
  double exposed_us = communicating.total();
  for (const auto& [begin, end] : communicating.list()) {
    exposed_us -= computing.Within(begin, end);
  }
  overlap.exposed_seconds = exposed_us / 1e6;
  if (const auto& list = step.list(); !list.empty()) {
    overlap.exposed_share = exposed_us / (list.back().second - list.front().first);
  }
  return overlap;
}

struct LoadedTrace {
  json::Value document;
  int64_t origin_wall_ns = 0;
};

absl::StatusOr<LoadedTrace> LoadTrace(const std::string& path) {
  ASSIGN_OR_RETURN(const std::string text, ReadWholeFile(path, kMostFileBytes));
  absl::StatusOr<json::Value> parsed = json::Parse(text);
  if (!parsed.ok()) {
    return Annotate(parsed.status(), path);
  }
  const json::Value* const other = parsed->Find("otherData");
  const json::Value* const events = parsed->Find("traceEvents");
  if (other == nullptr || TextOf(*other, "format") != kFormat || events == nullptr ||
      !events->is_array()) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": expected the trace of a rank (otherData.format ", kFormat, ")"));
  }
  const int64_t origin = WholeOf(*other, "origin_wall_ns");
  return LoadedTrace{.document = *std::move(parsed), .origin_wall_ns = origin};
}

}  // namespace

Recorder::Recorder(size_t capacity) : capacity_(capacity) {
  CHECK(capacity > 0);
}

void Recorder::Record(const Event& event) {
  MutexLock lock(mutex_);
  if (events_.size() < capacity_) {
    events_.push_back(event);
    return;
  }
  events_[next_] = event;
  next_ = (next_ + 1) % capacity_;
  ++dropped_;
}

std::vector<Event> Recorder::Take() {
  std::vector<Event> taken;
  {
    MutexLock lock(mutex_);
    taken.swap(events_);
    next_ = 0;
    dropped_ = 0;
  }
  std::stable_sort(taken.begin(), taken.end(), [](const Event& a, const Event& b) {
    return a.begin_ns < b.begin_ns;
  });
  return taken;
}

int64_t Recorder::dropped() const {
  MutexLock lock(mutex_);
  return dropped_;
}

json::Value ToChromeTrace(const Source& source, const std::vector<Event>& events) {
  int64_t origin_ns = events.empty() ? 0 : std::numeric_limits<int64_t>::max();
  std::set<std::string_view> streams;
  for (const Event& event : events) {
    origin_ns = std::min(origin_ns, event.begin_ns);
    streams.insert(event.stream);
  }
  json::Array list;
  list.push_back(
      Metadata("process_name",
               source.rank,
               0,
               absl::StrCat("rank ", source.rank, source.host.empty() ? "" : " on ", source.host)));
  for (const std::string_view stream : streams) {
    list.push_back(Metadata("thread_name", source.rank, ThreadOf(stream), View(stream)));
  }
  for (const Event& event : events) {
    list.push_back(ChromeEvent(source.rank, event, origin_ns));
  }
  json::Value other;
  other.Set("format", kFormat).Set("job", source.job).Set("epoch", source.epoch);
  json::Array ranks;
  ranks.emplace_back(source.rank);
  other.Set("ranks", json::Value(std::move(ranks)));
  other.Set("origin_wall_ns", origin_ns + source.wall_minus_monotonic_ns);
  json::Value document;
  document.Set("displayTimeUnit", "ms");
  document.Set("otherData", std::move(other));
  document.Set("traceEvents", json::Value(std::move(list)));
  return document;
}

absl::Status WriteChromeTrace(const std::string& path,
                              const Source& source,
                              const std::vector<Event>& events) {
  return WriteFileAtomically(path, json::Serialize(ToChromeTrace(source, events)) + "\n");
}

absl::StatusOr<json::Value> MergeChromeTraces(const std::vector<std::string>& paths) {
  std::vector<LoadedTrace> traces;
  std::map<int64_t, std::string> file_of_rank;
  int64_t origin = std::numeric_limits<int64_t>::max();
  for (const std::string& path : paths) {
    ASSIGN_OR_RETURN(LoadedTrace trace, LoadTrace(path));
    const json::Value& other = *trace.document.Find("otherData");
    const json::Value* const ranks = other.Find("ranks");
    if (ranks == nullptr || !ranks->is_array()) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": otherData.ranks: expected a list"));
    }
    for (const json::Value& rank : ranks->AsArray()) {
      const int64_t number = rank.is_int() ? rank.AsInt() : -1;
      const auto [at, added] = file_of_rank.emplace(number, path);
      if (!added) {
        return absl::InvalidArgumentError(
            absl::StrCat(path, ": rank ", number, " is in ", at->second, " already"));
      }
    }
    origin = std::min(origin, trace.origin_wall_ns);
    traces.push_back(std::move(trace));
  }
  json::Array list;
  json::Array ranks;
  for (const auto& [rank, path] : file_of_rank) {
    ranks.emplace_back(rank);
  }
  for (const LoadedTrace& trace : traces) {
    const double shift_us = Microseconds(trace.origin_wall_ns - origin);
    for (json::Value event : trace.document.Find("traceEvents")->AsArray()) {
      if (TextOf(event, "ph") == "X") {
        event.Set("ts", NumberOf(event, "ts") + shift_us);
      }
      list.push_back(std::move(event));
    }
  }
  json::Value other;
  other.Set("format", kFormat);
  if (!traces.empty()) {
    const json::Value& first = *traces.front().document.Find("otherData");
    other.Set("job", TextOf(first, "job")).Set("epoch", WholeOf(first, "epoch"));
  }
  other.Set("ranks", json::Value(std::move(ranks)));
  other.Set("origin_wall_ns", traces.empty() ? 0 : origin);
  json::Value document;
  document.Set("displayTimeUnit", "ms");
  document.Set("otherData", std::move(other));
  document.Set("traceEvents", json::Value(std::move(list)));
  return document;
}

absl::StatusOr<std::string> TextGantt(const json::Value& document, int64_t step, int width) {
  CHECK(width > 0);
  const std::vector<ReadEvent> events = EventsOf(document);
  const int64_t wanted = step < 0 ? LastStep(events) : step;
  double begin = std::numeric_limits<double>::max();
  double end = 0;
  for (const ReadEvent& event : events) {
    if (event.step == wanted) {
      begin = std::min(begin, event.begin_us);
      end = std::max(end, event.end_us);
    }
  }
  if (end <= begin) {
    return absl::NotFoundError(absl::StrCat("no events of step ", wanted, " in the trace"));
  }
  std::map<std::pair<int64_t, int64_t>, std::pair<std::string, GanttRow>> rows;
  for (const ReadEvent& event : events) {
    const char letter = LetterOf(event.op);
    if (event.step != wanted || letter == ' ') {
      continue;
    }
    const auto row = rows.try_emplace({event.rank, ThreadOf(event.stream)},
                                      absl::StrFormat("rank %d %s", event.rank, event.stream),
                                      GanttRow(width));
    const double scale = width / (end - begin);
    row.first->second.second.Add(
        letter, (event.begin_us - begin) * scale, (event.end_us - begin) * scale);
  }
  size_t label = 0;
  for (const auto& [key, row] : rows) {
    label = std::max(label, row.first.size());
  }
  std::string text = absl::StrFormat("step %d, %.3f ms\n", wanted, (end - begin) / 1e3);
  for (const auto& [key, row] : rows) {
    absl::StrAppend(
        &text, row.first, std::string(label + 1 - row.first.size(), ' '), row.second.text(), "\n");
  }
  return text +
         "G gather  F forward  r recompute  B backward  A add  R reduce  T tensor  S statistics  "
         "O optimizer  . idle\n";
}

std::vector<Stall> FindStalls(const json::Value& document, int64_t step, double least_share) {
  const std::vector<ReadEvent> events = EventsOf(document, step);
  std::map<int64_t, std::pair<double, double>> span;  // by rank
  std::map<std::pair<int64_t, std::string>, Waiting> waits;
  for (const ReadEvent& event : events) {
    const auto at = span.try_emplace(event.rank, event.begin_us, event.end_us).first;
    at->second.first = std::min(at->second.first, event.begin_us - event.wait_us);
    at->second.second = std::max(at->second.second, event.end_us);
    Waiting& waiting = waits[{event.rank, event.name}];
    waiting.total_us += event.wait_us;
    if (event.peer >= 0) {
      waiting.total_us += event.peer_wait_us;
      waiting.late_us[{event.peer, LateInstruction(events, event)}] += event.peer_wait_us;
    }
  }
  std::vector<Stall> stalls;
  for (const auto& [key, waiting] : waits) {
    const auto& [begin, end] = span.at(key.first);
    const double share = end > begin ? waiting.total_us / (end - begin) : 0;
    if (waiting.total_us <= 0 || share < least_share) {
      continue;
    }
    Stall stall = {.rank = key.first,
                   .instruction = key.second,
                   .seconds = waiting.total_us / 1e6,
                   .share = share};
    if (const auto late = Largest(waiting.late_us); late != waiting.late_us.end()) {
      std::tie(stall.late_rank, stall.late_instruction) = late->first;
    }
    stalls.push_back(std::move(stall));
  }
  std::stable_sort(stalls.begin(), stalls.end(), [](const Stall& a, const Stall& b) {
    return a.seconds > b.seconds;
  });
  return stalls;
}

std::vector<LateRank> FindLateRanks(const json::Value& document, int64_t step) {
  const std::vector<ReadEvent> events = EventsOf(document, step);
  std::map<int64_t, std::map<std::string, double>> waited;  // by late rank, what it did
  for (const ReadEvent& event : events) {
    if (event.peer >= 0) {
      waited[event.peer][LateInstruction(events, event)] += event.peer_wait_us;
    }
  }
  std::vector<LateRank> late;
  for (const auto& [rank, instructions] : waited) {
    double total_us = 0;
    for (const auto& [name, microseconds] : instructions) {
      total_us += microseconds;
    }
    late.push_back(
        {.rank = rank, .seconds = total_us / 1e6, .instruction = Largest(instructions)->first});
  }
  std::stable_sort(late.begin(), late.end(), [](const LateRank& a, const LateRank& b) {
    return a.seconds > b.seconds;
  });
  return late;
}

std::vector<StepOverlap> CountOverlaps(const json::Value& document, int64_t step) {
  const std::vector<ReadEvent> events = EventsOf(document, step);
  std::map<int64_t, std::vector<const ReadEvent*>> by_rank;
  for (const ReadEvent& event : events) {
    if (event.phase != "eval") {
      by_rank[event.rank].push_back(&event);
    }
  }
  std::vector<StepOverlap> overlaps;
  for (const auto& [rank, of_rank] : by_rank) {
    overlaps.push_back(OverlapOf(of_rank));
  }
  return overlaps;
}

}  // namespace ravel::trace
