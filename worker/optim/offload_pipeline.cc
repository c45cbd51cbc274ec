// Three counters say how far all is: chunks fetched, updated, released, in one order for all steps,
// so the first chunk of a group is fetched while the group before it is updated, and that of a step
// while its gradients are computed. What is fetched and not released is bounded, so a slow disk
// holds up the update, and never memory.

#include "worker/optim/offload_pipeline.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include <pthread.h>

#include "common/check.h"
#include "common/fault_point.h"
#include "common/signed_size.h"
#include "worker/optim/offload_chunks.h"

namespace ravel::optim {
namespace {

using Clock = std::chrono::steady_clock;

int64_t NsOf(Clock::time_point time) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}

}  // namespace

OffloadPipeline::OffloadPipeline(const Args& args) : args_(args) {
  of_group_.resize(args.groups.size());
  for (const plan::GroupId group : UpdateOrder(args.plan)) {
    AddChunks(args.groups[group]);
  }
  if (args.overlap && !chunks_.empty()) {
    for (const Way way : {Way::kIn, Way::kOut}) {
      threads_.emplace_back([this, way] { MoveAll(way); });
    }
  }
}

OffloadPipeline::~OffloadPipeline() {
  {
    MutexLock lock(mutex_);
    stopped_ = true;
    changed_.NotifyAll();
  }
  for (std::thread& thread : threads_) {
    thread.join();
  }
}

void OffloadPipeline::AddChunks(const shard::ParameterGroup& group) {
  const plan::GroupId id = group.index();
  if (!IsOffloaded(args_.plan, id)) {
    return;
  }
  const size_t first = chunks_.size();
  for (OffloadChunk& cut :
       CutIntoChunks(id, args_.pieces.of(id), args_.chunk_elements, ScaleCutsOf(group).offsets)) {
    chunks_.push_back({.group = id, .pieces = {}, .memory = {}});
    for (const std::span<std::byte> range :
         MemoryOf(group, cut, [&](const void* at) { return args_.tier.Holds(at); })) {
      chunks_.back().memory.push_back(range);
    }
    chunks_.back().pieces = std::move(cut.pieces);
  }
  of_group_[id] = {.begin = first, .end = chunks_.size()};
}

absl::Status OffloadPipeline::Fetch(const Chunk& chunk) {
  for (const std::span<const std::byte> range : chunk.memory) {
    RETURN_IF_ERROR(args_.tier.Fetch(range, shard::OffloadTier::For::kWriting));
  }
  return absl::OkStatus();
}

absl::Status OffloadPipeline::Release(const Chunk& chunk) {
  for (const std::span<const std::byte> range : chunk.memory) {
    RETURN_IF_ERROR(args_.tier.Release(range));
  }
  return absl::OkStatus();
}

bool OffloadPipeline::MayMove(Way way) const {
  const auto alive = static_cast<size_t>(plan::kOffloadChunksAlive);
  return way == Way::kOut ? released_ < updated_
                          : fetched_ < std::min({wanted_,
                                                 updated_ + alive - 1,
                                                 released_ + std::min(alive, chunks_.size())});
}

// One at a time goes each way.
std::optional<size_t> OffloadPipeline::Claim(Way way) {
  bool& moving = way == Way::kIn ? fetching_ : releasing_;
  if (moving || !status_.ok() || !MayMove(way)) {
    return std::nullopt;
  }
  moving = true;
  return way == Way::kIn ? fetched_ : released_;
}

std::optional<size_t> OffloadPipeline::WaitForWork(Way way) {
  MutexLock lock(mutex_);
  std::optional<size_t> chunk;
  while (!stopped_ && !(chunk = Claim(way)).has_value()) {
    changed_.Wait(mutex_);
  }
  return chunk;
}

void OffloadPipeline::Move(Way way, size_t chunk) {
  const auto start = Clock::now();
  const Chunk& at = At(chunk);
  absl::Status moved = way == Way::kIn ? Fetch(at) : Release(at);
  MutexLock lock(mutex_);
  ++(way == Way::kIn ? fetched_ : released_);
  (way == Way::kIn ? fetching_ : releasing_) = false;
  Note(at.group,
       way == Way::kIn ? "OffloadFetch" : "OffloadRelease",
       start,
       Clock::now(),
       times_.moving);
  status_.Update(moved);
  changed_.NotifyAll();
}

void OffloadPipeline::MoveAll(Way way) {
  pthread_setname_np(pthread_self(), way == Way::kIn ? "offload-in" : "offload-out");
  FaultPoint("offload.thread").IgnoreError();  // only ever held
  for (auto chunk = WaitForWork(way); chunk.has_value(); chunk = WaitForWork(way)) {
    Move(way, *chunk);
  }
}

void OffloadPipeline::BeginStep(int64_t step) {
  MutexLock lock(mutex_);
  step_ = step;
  if (overlaps()) {
    wanted_ = updated_ + chunks_.size();
    changed_.NotifyAll();
  }
}

absl::Status OffloadPipeline::Decide(bool apply) {
  begun_ = apply;
  return apply || !overlaps() ? absl::OkStatus() : ReleaseFetched();
}

// Nothing is fetched any more, and what was is released as it came.
absl::Status OffloadPipeline::ReleaseFetched() {
  size_t begin = 0;
  size_t end = 0;
  {
    MutexLock lock(mutex_);
    wanted_ = updated_;
    while (fetching_) {
      changed_.Wait(mutex_);
    }
    RETURN_IF_ERROR(status_);
    begin = updated_;
    end = fetched_;
  }
  for (size_t chunk = begin; chunk < end; ++chunk) {
    RETURN_IF_ERROR(Release(At(chunk)));
  }
  MutexLock lock(mutex_);
  fetched_ = begin;
  return absl::OkStatus();
}

// What is not begun is done here: a thread that has no core would be waited for.
absl::Status OffloadPipeline::HelpUntil(Way way, size_t moved) {
  mutex_.Lock();
  while ((way == Way::kIn ? fetched_ : released_) < moved && status_.ok()) {
    Way next = Way::kIn;
    std::optional<size_t> chunk = Claim(next);
    if (!chunk.has_value()) {
      next = Way::kOut;
      chunk = Claim(next);
    }
    if (!chunk.has_value()) {
      changed_.Wait(mutex_);
      continue;
    }
    mutex_.Unlock();
    Move(next, *chunk);
    mutex_.Lock();
  }
  const absl::Status status = status_;
  mutex_.Unlock();
  return status;
}

absl::Status OffloadPipeline::WaitForChunk(size_t chunk) {
  const auto start = Clock::now();
  const absl::Status status = HelpUntil(Way::kIn, chunk + 1);
  MutexLock lock(mutex_);
  times_.waiting += std::chrono::duration<double>(Clock::now() - start).count();
  return status;
}

absl::Status OffloadPipeline::UpdateInline(const Chunk& chunk, const UpdateChunk& update) {
  const auto start = Clock::now();
  RETURN_IF_ERROR(Fetch(chunk));
  const auto fetched = Clock::now();
  update({.pieces = chunk.pieces.data(), .count = std::ssize(chunk.pieces)});
  const auto updated = Clock::now();
  RETURN_IF_ERROR(Release(chunk));
  const auto released = Clock::now();
  MutexLock lock(mutex_);
  double moving = 0;
  Note(chunk.group, "OffloadFetch", start, fetched, moving);
  Note(chunk.group, "OffloadUpdate", fetched, updated, times_.updating);
  Note(chunk.group, "OffloadRelease", updated, released, moving);
  times_.moving += moving;
  times_.waiting += moving;
  return absl::OkStatus();
}

absl::Status OffloadPipeline::Update(plan::GroupId group, const UpdateChunk& update) {
  if (!begun_) {
    return absl::OkStatus();
  }
  const Chunks& range = of_group_[group];
  for (size_t i = range.begin; i < range.end; ++i) {
    const Chunk& chunk = chunks_[i];
    RETURN_IF_ERROR(FaultPoint("offload.chunk"));
    if (!overlaps()) {
      RETURN_IF_ERROR(UpdateInline(chunk, update));
      continue;
    }
    size_t next = 0;
    {
      MutexLock lock(mutex_);
      next = updated_;
    }
    CHECK_MSG(next % chunks_.size() == i, "groups are updated in the order of the program");
    RETURN_IF_ERROR(WaitForChunk(next));
    const auto start = Clock::now();
    update({.pieces = chunk.pieces.data(), .count = std::ssize(chunk.pieces)});
    MutexLock lock(mutex_);
    Note(chunk.group, "OffloadUpdate", start, Clock::now(), times_.updating);
    ++updated_;
    changed_.NotifyAll();
  }
  begun_ = range.end < chunks_.size();
  return absl::OkStatus();
}

// Nothing else reads meanwhile, so all of the moving is waited for.
absl::Status OffloadPipeline::ReadPart(plan::GroupId group,
                                       const quant::QuantPiece& part,
                                       const VisitPieces& visit) {
  const std::span<const float> weights(part.main_weight.As<float>(),
                                       Size(part.main_weight.elements()));
  RETURN_IF_ERROR(FaultPoint("offload.read"));
  const auto start = Clock::now();
  RETURN_IF_ERROR(args_.tier.Fetch(std::as_bytes(weights), shard::OffloadTier::For::kReading));
  const auto fetched = Clock::now();
  visit({&part, 1});
  const auto visited = Clock::now();
  RETURN_IF_ERROR(args_.tier.Release(std::as_bytes(weights), shard::OffloadTier::For::kReading));
  const auto released = Clock::now();
  MutexLock lock(mutex_);
  double moving = 0;
  Note(group, "OffloadReadFetch", start, fetched, moving);
  Note(group, "OffloadReadRelease", visited, released, moving);
  times_.moving += moving;
  times_.waiting += moving;
  return absl::OkStatus();
}

absl::Status OffloadPipeline::ReadMainWeights(plan::GroupId group,
                                              std::span<const quant::QuantPiece> pieces,
                                              const VisitPieces& visit) {
  for (const quant::QuantPiece& piece : pieces) {
    if (!args_.tier.Holds(piece.main_weight.data)) {
      visit({&piece, 1});
      continue;
    }
    const int64_t rows = piece.main_weight.size[0];
    const int64_t most = std::max<int64_t>(1, args_.chunk_elements / piece.main_weight.size[1]);
    for (int64_t row = 0; row < rows; row += most) {
      const quant::QuantPiece part = quant::RowsOf(piece, row, std::min(most, rows - row));
      RETURN_IF_ERROR(ReadPart(group, part, visit));
    }
  }
  return absl::OkStatus();
}

absl::Status OffloadPipeline::Drain() {
  if (!overlaps()) {
    return absl::OkStatus();
  }
  size_t updated = 0;
  {
    MutexLock lock(mutex_);
    updated = updated_;
  }
  return HelpUntil(Way::kOut, updated);
}

OffloadTimes OffloadPipeline::TakeTimes() {
  MutexLock lock(mutex_);
  return std::exchange(times_, OffloadTimes());
}

void OffloadPipeline::set_recorder(trace::Recorder* recorder) {
  MutexLock lock(mutex_);
  recorder_ = recorder;
}

// A release may be of the step before the one that is named.
void OffloadPipeline::Note(plan::GroupId group, const char* op, Time begin, Time end, double& sum) {
  sum += std::chrono::duration<double>(end - begin).count();
  if (recorder_ == nullptr) {
    return;
  }
  const plan::UnitId unit = args_.plan.groups[group].unit;
  recorder_->Record({.begin_ns = NsOf(begin),
                     .end_ns = NsOf(end),
                     .step = step_,
                     .phase = "host",
                     .unit = args_.plan.inventory.units[unit].name,
                     .op = op,
                     .stream = "offload"});
}

}  // namespace ravel::optim
