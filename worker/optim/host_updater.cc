// Order: a slot's copies down wait until its former content has gone up; the host's work
// waits for the copies down, and, once its step is to be decided, for the decision; copies up wait
// for the host's work. The next decision overwrites the last one in pinned memory, so it waits for
// the host's work of the step before.

#include "worker/optim/host_updater.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>
#include <utility>

#include "common/check.h"
#include "common/fault_point.h"
#include "common/signed_size.h"
#include "kernels/cast.h"
#include "kernels/scalar/decide_step.h"

namespace ravel::optim {
namespace {

using kernels::cuda::RavelCudaHostAccess;

// Enough for one chunk to come down, one to be updated and one to go up, and one more.
constexpr size_t kLateSlots = 4;

RavelCudaHostAccess AccessOf(const void* data, int64_t bytes, bool writes) {
  return {
      .data = data, .bytes = static_cast<uint64_t>(bytes), .writes = writes ? 1 : 0, .reserved = 0};
}

// True if an update by either has the same bits.
bool SameUpdate(const kernels::StepOutcome& a, const kernels::StepOutcome& b) {
  static_assert(std::has_unique_object_representations_v<
                    std::array<uint32_t, sizeof(kernels::UpdateScalars) / sizeof(uint32_t)>> &&
                sizeof(kernels::UpdateScalars) % sizeof(uint32_t) == 0);
  return a.apply == b.apply && a.step == b.step &&
         std::memcmp(&a.scalars, &b.scalars, sizeof(a.scalars)) == 0;
}

TensorView Moved(TensorView view, std::byte* to) {
  view.data = to;
  return view;
}

}  // namespace

int64_t HostUpdater::NowNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

HostUpdater::HostUpdater(const Args& args)
    : args_(args),
      ring_(RingOf(args)),
      pieces_(PieceTables::OnHost(args.plan, args.groups)),
      rows_(args.groups.size()),
      of_group_(args.groups.size()),
      ready_(args.groups.size(), false),
      pool_(args.threads, args.node.cpus) {
  for (const plan::GroupId group : UpdateOrder(args.plan)) {
    if (IsOffloaded(args.plan, group)) {
      AddChunks(args.groups[group]);
    }
    if (MakesCodes(group)) {
      AddRows(args.groups[group]);
    }
  }
  OrderChunks();
}

plan::HostRing HostUpdater::RingOf(const Args& args) {
  plan::HostRing ring =
      plan::HostRingOf(args.plan.buffers, args.plan.groups, args.plan.options, args.chunk_elements);
  ring.slots = args.most_slots > 0 ? std::min(ring.slots, args.most_slots) : ring.slots;
  return ring;
}

absl::StatusOr<std::unique_ptr<HostUpdater>> HostUpdater::Create(const Args& args) {
  std::unique_ptr<HostUpdater> made(new HostUpdater(args));
  RETURN_IF_ERROR(made->Allocate());
  return made;
}

void HostUpdater::AddChunks(const shard::ParameterGroup& group) {
  const plan::GroupId id = group.index();
  const plan::HostChunkBytes bytes =
      plan::HostChunkBytesOf(args_.plan.groups[id], args_.plan.options);
  const auto holds = [&](const void* at) { return args_.state.Holds(at); };
  of_group_[id] = {.begin = chunks_.size(), .end = chunks_.size(), .absent = false};
  const ScaleCuts cuts = MakesCodes(id) ? ScaleCutsOf(group) : ScaleCuts();
  for (OffloadChunk& cut : CutIntoChunks(id, pieces_.of(id), ring_.chunk_elements, cuts.offsets)) {
    const shard::ParameterGroup::Stored stored = group.StoredAt(cut.begin, cut.elements());
    CHECK_EQ(bytes.main > 0, stored.main_weight.present() && !holds(stored.main_weight.data));
    CHECK(MakesCodes(id) || (bytes.model > 0) == stored.model_weight.present());
    Chunk chunk = {.cut = {},
                   .bytes = bytes,
                   .runs = {},
                   .state = MemoryOf(group, cut, holds),
                   .work = {},
                   .codes = {}};
    if (MakesCodes(id)) {
      AddCodes(cut, chunk);
    }
    for (kernels::UpdatePiece& piece : cut.pieces) {
      piece.offset -= cut.begin;
      if (!chunk.runs.empty() &&
          chunk.runs.back().begin + chunk.runs.back().elements == piece.offset) {
        chunk.runs.back().elements += piece.elements;
      } else {
        chunk.runs.push_back({.begin = piece.offset, .elements = piece.elements});
      }
    }
    chunk.cut = std::move(cut);
    if (MakesCodes(id)) {
      chunk.cut.pieces = {};  // its parts have them
    }
    chunk.owner = this;
    chunks_.push_back(std::move(chunk));
  }
  of_group_[id].end = chunks_.size();
}

// Groups are in forward order, so their gradients are final in the opposite one. Without overlap
// chunks come down one at a time, as they are updated.
void HostUpdater::OrderChunks() {
  const size_t slots = Size(ring_.slots);
  if (chunks_.size() > slots) {
    late_ = chunks_.size() - slots + std::min(kLateSlots, (slots + 1) / 2);
  }
  for (size_t i = 0; i < chunks_.size(); ++i) {
    down_order_.push_back(i);
  }
  if (!args_.overlap) {
    return;
  }
  std::stable_sort(down_order_.begin(), down_order_.end(), [&](size_t a, size_t b) {
    const bool early_a = a >= late_;
    const bool early_b = b >= late_;
    return early_a != early_b ? early_a : early_a && chunks_[a].cut.group > chunks_[b].cut.group;
  });
}

absl::Status HostUpdater::Allocate() {
  kernels::CudaGpu& gpu = args_.streams.gpu();
  for (kernels::CudaEvent* event : {&decision_there_, &all_updated_, &scales_there_}) {
    ASSIGN_OR_RETURN(*event, gpu.MakeEvent());
  }
  if (chunks_.empty()) {
    return absl::OkStatus();
  }
  const shard::PreferNode prefer(args_.node);
  constexpr int64_t kDecisionBytes =
      RoundUp(sizeof(kernels::StepOutcome), plan::HostChunkBytes::kAlignment);
  auto memory = gpu.AllocatePinned(ring_.slots * ring_.slot_bytes + kDecisionBytes);
  if (!memory.ok()) {
    return Annotate(memory.status(), shard::kOffloadFractionField);
  }
  pinned_ = *std::move(memory);
  ASSIGN_OR_RETURN(kept_, shard::HostState::Create(ring_.slots * ring_.kept_bytes, args_.node));
  auto* pinned = static_cast<std::byte*>(pinned_.data());
  slots_.resize(Size(ring_.slots));
  for (size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    slot.pinned = pinned + static_cast<int64_t>(i) * ring_.slot_bytes;
    slot.kept = kept_->all().data() + static_cast<int64_t>(i) * ring_.kept_bytes;
    ASSIGN_OR_RETURN(slot.downloaded, gpu.MakeEvent());
    ASSIGN_OR_RETURN(slot.updated, gpu.MakeEvent());
    ASSIGN_OR_RETURN(slot.free, gpu.MakeEvent());
  }
  decision_ = reinterpret_cast<kernels::StepOutcome*>(pinned + ring_.slots * ring_.slot_bytes);
  const size_t early = chunks_.size() - late_;
  for (size_t i = 0; i < chunks_.size(); ++i) {
    chunks_[i].slot = &slots_[i >= late_ ? i - late_ : early + i % (slots_.size() - early)];
    CHECK_LE(chunks_[i].bytes.pinned(chunks_[i].cut.elements()), ring_.slot_bytes);
    int64_t kept = chunks_[i].bytes.weights(chunks_[i].cut.elements());
    for (const std::span<std::byte> range : chunks_[i].state) {
      kept += std::ssize(range);
    }
    CHECK_LE(kept, ring_.kept_bytes);
  }
  PlaceRows();
  return absl::OkStatus();
}

void HostUpdater::UseRule(const UpdateRule& rule, int64_t tokens) {
  rule_ = &rule;
  full_tokens_ = tokens;
}

void HostUpdater::BeginStep(int64_t step,
                            double learning_rate,
                            std::optional<int64_t> updates,
                            const std::optional<LossScale>& loss_scale,
                            Updates begin) {
  may_guess_ = begin == Updates::kAsEarlyAsTheyCan;
  std::fill(ready_.begin(), ready_.end(), false);
  decided_ = false;
  codes_ahead_ = args_.codes != nullptr && args_.codes->ahead();
  all_rows_ = false;
  down_ = 0;
  up_ = 0;
  MutexLock lock(mutex_);
  CHECK_MSG(chunks_.empty() || begun_ - ended_ < std::ssize(beginnings_),
            "steps are too far ahead");
  beginnings_[Size(begun_++) % beginnings_.size()] = {
      .step = step, .learning_rate = learning_rate, .updates = updates, .loss_scale = loss_scale};
}

void HostUpdater::AddGradient(plan::GroupId group) {
  ready_[group] = true;
  if (args_.overlap) {
    Pump();
  }
}

void HostUpdater::Decide(kernels::CudaStream& stream, const kernels::StepOutcome& outcome) {
  decided_ = true;
  if (!chunks_.empty()) {
    stream.Wait(all_updated_);  // they read the decision before
    stream.CopyMemory(decision_, &outcome, sizeof(outcome));
  }
  stream.Record(decision_there_);
  args_.streams.host_work().Wait(decision_there_);
  // The step ends there, also where no update of the device has waited for the decision.
  args_.streams.compute().Wait(decision_there_);
}

void HostUpdater::Update(plan::GroupId group) {
  const Chunks& range = of_group_[group];
  CHECK_MSG(decided_ && ready_[group] && (range.begin == range.end || up_ == range.begin),
            "groups are updated in the order of the program");
  for (size_t i = range.begin; i < range.end; ++i) {
    Pump();
    CHECK_MSG(chunks_[i].down, "a chunk whose gradient is final has a slot");
    GoUp(chunks_[i]);
    ++up_;
  }
  if (args_.overlap) {
    Pump();
  } else {
    args_.streams.Join();  // nothing runs beside it
  }
}

// A late chunk's slot is free when the one before it there is on its way up.
bool HostUpdater::HasRoom(size_t chunk) const {
  if (!args_.overlap) {
    return chunk == up_;
  }
  return chunk >= late_ || chunk < up_ + slots_.size() - (chunks_.size() - late_);
}

void HostUpdater::Pump() {
  while (down_ < chunks_.size()) {
    const size_t next = down_order_[down_];
    if (!ready_[chunks_[next].cut.group] || !HasRoom(next)) {
      return;
    }
    GoDown(chunks_[next]);
    ++down_;
  }
}

std::byte* HostUpdater::MainOf(const Chunk& chunk) const {
  return chunk.slot->pinned + chunk.bytes.gradient_bytes(chunk.cut.elements());
}

std::byte* HostUpdater::ModelOf(const Chunk& chunk) const {
  return MainOf(chunk) + chunk.bytes.main_bytes(chunk.cut.elements());
}

std::byte* HostUpdater::CodesOf(const Chunk& chunk) const {
  return chunk.bytes.model > 0 ? ModelOf(chunk) : nullptr;
}

// What comes down may come with the padding between tensors, in one copy. What goes up leaves
// padding as it is.
void HostUpdater::CopyDown(kernels::CudaStream& stream, const Chunk& chunk) {
  const shard::ParameterGroup& group = args_.groups[chunk.cut.group];
  const int64_t elements = chunk.cut.elements();
  const shard::ParameterGroup::Stored stored = group.StoredAt(chunk.cut.begin, elements);
  stream.CopyMemory(chunk.slot->pinned,
                    group.optimizer_gradient() + chunk.cut.begin,
                    elements * int64_t{sizeof(float)});
  if (chunk.bytes.main > 0) {
    stream.CopyMemory(MainOf(chunk), stored.main_weight.data, elements * chunk.bytes.main);
  }
  if (chunk.bytes.model_comes_down) {
    stream.CopyMemory(ModelOf(chunk), stored.model_weight.data, elements * chunk.bytes.model);
  }
}

void HostUpdater::CopyUp(kernels::CudaStream& stream, const Chunk& chunk) {
  const shard::ParameterGroup& group = args_.groups[chunk.cut.group];
  for (const Run& run : chunk.runs) {
    const shard::ParameterGroup::Stored stored =
        group.StoredAt(chunk.cut.begin + run.begin, run.elements);
    const auto copy = [&](const std::byte* pinned, void* device, int64_t bytes) {
      stream.CopyMemory(device, pinned + run.begin * bytes, run.elements * bytes);
    };
    if (chunk.bytes.main > 0) {
      copy(MainOf(chunk), stored.main_weight.data, chunk.bytes.main);
    }
    if (stored.model_weight.present()) {
      copy(ModelOf(chunk), stored.model_weight.data, chunk.bytes.model);
    }
  }
  if (SendsCodes(chunk.cut.group)) {
    for (const Run& run : chunk.codes) {
      stream.CopyMemory(group.stored_model_weight() + chunk.cut.begin + run.begin,
                        ModelOf(chunk) + run.begin,
                        run.elements);
    }
  }
}

std::vector<RavelCudaHostAccess> HostUpdater::AccessesOf(const Slot& slot) const {
  std::vector<RavelCudaHostAccess> accesses = {AccessOf(slot.pinned, ring_.slot_bytes, true)};
  if (args_.codes != nullptr) {
    const std::span<const std::byte> memory = args_.codes->memory();
    accesses.push_back(AccessOf(memory.data(), std::ssize(memory), true));
  }
  return accesses;
}

void HostUpdater::GoDown(Chunk& chunk) {
  kernels::CudaStream& download = args_.streams.of(plan::StreamId::kDownload);
  Slot& slot = *chunk.slot;
  download.Wait(slot.free);
  CopyDown(download, chunk);
  download.Record(slot.downloaded);
  chunk.down = true;
  if (early()) {
    kernels::CudaStream& host = args_.streams.host_work();
    host.Wait(slot.downloaded);
    host.RunOnHost(&GuessChunk, &chunk, AccessesOf(slot));
  }
}

void HostUpdater::GoUp(Chunk& chunk) {
  Slot& slot = *chunk.slot;
  kernels::CudaStream& host = args_.streams.host_work();
  host.Wait(slot.downloaded);
  chunk.down = false;
  std::vector<RavelCudaHostAccess> accesses = AccessesOf(slot);
  accesses.push_back(AccessOf(decision_, sizeof(*decision_), false));
  host.RunOnHost(&FinishChunk, &chunk, accesses);
  host.Record(slot.updated);
  host.Record(all_updated_);
  kernels::CudaStream& upload = args_.streams.of(plan::StreamId::kUpload);
  upload.Wait(slot.updated);
  CopyUp(upload, chunk);
  upload.Record(slot.free);
}

void HostUpdater::GuessChunk(void* chunk) {
  auto* at = static_cast<Chunk*>(chunk);
  at->owner->Guess(*at);
}

void HostUpdater::FinishChunk(void* chunk) {
  auto* at = static_cast<Chunk*>(chunk);
  at->owner->Finish(*at);
}

double HostUpdater::ScaleOf(const Beginning& beginning) const {
  if (args_.plan.options.weight_type != DType::kF16) {
    return 1;
  }
  return beginning.loss_scale.has_value() ? beginning.loss_scale->scale
         : last_.has_value()              ? static_cast<double>(last_->loss_scale)
                                          : 1;
}

// As DecideStep has it, for a step that clips and skips nothing.
std::optional<kernels::StepOutcome> HostUpdater::Expected() {
  Beginning beginning;
  {
    MutexLock lock(mutex_);
    beginning = beginnings_[Size(ended_) % beginnings_.size()];
  }
  const std::optional<int64_t> updates =
      last_.has_value() && !beginning.updates.has_value() ? last_->updates : beginning.updates;
  const int64_t tokens = last_.has_value() ? last_->target_tokens : full_tokens_;
  if (!guesses_ || !updates.has_value() || tokens == 0) {
    return std::nullopt;
  }
  kernels::UpdateHyper hyper = rule_->hyper();
  hyper.learning_rate = beginning.learning_rate;
  kernels::StepOutcome expected = {
      .updates = *updates + 1, .step = beginning.step, .target_tokens = tokens, .apply = 1};
  expected.scalars = kernels::scalar::ScalarsOfUpdate<kernels::UpdateScalars>(
      hyper,
      expected.updates,
      static_cast<float>(1.0 / (static_cast<double>(tokens) * ScaleOf(beginning))));
  return expected;
}

void HostUpdater::Guess(Chunk& chunk) {
  if (!expected_.has_value()) {
    expected_ = Expected();
    if (!expected_.has_value()) {
      return;
    }
    if (args_.codes != nullptr) {
      args_.codes->Begin();
    }
  }
  const int64_t begin = NowNs();
  FaultPoint("offload.host_chunk").IgnoreError();
  Move(chunk, Way::kKeep);
  Apply(chunk, *expected_);
  chunk.guessed = true;
  const int64_t end = NowNs();
  Note(args_.groups[chunk.cut.group].layout().unit, "HostUpdate", StepUnderWay(), begin, end);
  MutexLock lock(mutex_);
  counts_.update_seconds += static_cast<double>(end - begin) * 1e-9;
  counts_.early_seconds += static_cast<double>(end - begin) * 1e-9;
}

void HostUpdater::Finish(Chunk& chunk) {
  const kernels::StepOutcome& decision = *decision_;
  const int64_t begin = NowNs();
  const bool early = std::exchange(chunk.guessed, false);
  const bool guess_right = expected_.has_value() && SameUpdate(*expected_, decision);
  const bool right = early && guess_right;
  if (finished_ == 0 && !guess_right && args_.codes != nullptr) {
    args_.codes->Begin();  // amaxes of what was guessed go, too
  }
  if (!right) {
    FaultPoint("offload.host_chunk").IgnoreError();
    if (early) {
      Move(chunk, Way::kRestore);
    }
    if (decision.apply != 0) {
      Apply(chunk, decision);
    } else {
      SendAgain(chunk);
    }
  }
  const int64_t end = NowNs();
  Note(args_.groups[chunk.cut.group].layout().unit,
       right ? "HostConfirm" : "HostUpdate",
       StepUnderWay(),
       begin,
       end);
  if (++finished_ == chunks_.size()) {
    if (!expected_.has_value()) {  // what it would have been says if the next one is worth its time
      guesses_ = true;
      expected_ = Expected();
    }
    guesses_ = !expected_.has_value() || SameUpdate(*expected_, decision);
    last_ = decision;
    expected_.reset();
    finished_ = 0;
    MutexLock lock(mutex_);
    ++ended_;
  }
  MutexLock lock(mutex_);
  counts_.chunks += 1;
  counts_.early += right ? 1 : 0;
  counts_.redone += early && !right ? 1 : 0;
  counts_.update_seconds += static_cast<double>(end - begin) * 1e-9;
}

shard::ParameterGroup::Stored HostUpdater::StoredOf(const Chunk& chunk) const {
  shard::ParameterGroup::Stored stored =
      args_.groups[chunk.cut.group].StoredAt(chunk.cut.begin, chunk.cut.elements());
  if (chunk.bytes.main > 0) {
    stored.main_weight = Moved(stored.main_weight, MainOf(chunk));
  }
  if (stored.model_weight.present()) {
    stored.model_weight = Moved(stored.model_weight, ModelOf(chunk));
  }
  return stored;
}

void HostUpdater::Apply(Chunk& chunk, const kernels::StepOutcome& outcome) {
  const GroupUpdate whole = {
      .group = args_.groups[chunk.cut.group],
      .stored = StoredOf(chunk),
      .gradient = VectorView(reinterpret_cast<float*>(chunk.slot->pinned), chunk.cut.elements()),
      .pieces = {},
      .outcome = outcome};
  const auto apply = [&](std::span<const kernels::UpdatePiece> pieces) {
    kernels::CpuStream stream;
    GroupUpdate update = whole;
    update.pieces = {.pieces = pieces.data(), .count = std::ssize(pieces)};
    rule_->Update(stream, update);
  };
  if (MakesCodes(chunk.cut.group)) {
    DoWork(chunk, apply, CodesOf(chunk), HostCodes::Cast::kAhead);
    return;
  }
  const std::span<const kernels::UpdatePiece> pieces = chunk.cut.pieces;
  const int64_t count = std::ssize(pieces);
  const int64_t parts = std::min(count, pool_.threads() + 1);
  pool_.Run(parts, [&](int64_t part) {
    const int64_t begin = count * part / parts;  // NOLINT(bugprone-integer-division): rounds down
    const int64_t end = count * (part + 1) / parts;
    // In two calls, so that a test can end the process where a part of a chunk is updated.
    const int64_t middle = begin + DivCeil(end - begin, 2);
    apply(pieces.subspan(Size(begin), Size(middle - begin)));
    if (middle < end) {
      FaultPoint(kHalfOfAChunk).IgnoreError();
      apply(pieces.subspan(Size(middle), Size(end - middle)));
    }
  });
}

void HostUpdater::SendAgain(Chunk& chunk) {
  if (MakesCodes(chunk.cut.group)) {
    DoWork(chunk, nullptr, CodesOf(chunk), HostCodes::Cast::kAsIs);
    return;
  }
  if (chunk.bytes.model == 0 || chunk.bytes.model_comes_down) {
    return;
  }
  const shard::ParameterGroup::Stored stored = StoredOf(chunk);
  kernels::CpuStream stream;
  kernels::Cast(stream,
                {.from = stored.main_weight,
                 .to = stored.model_weight,
                 .rounding = kernels::Bf16Rounding::kHalfAway});
}

void HostUpdater::Move(const Chunk& chunk, Way way) {
  std::byte* kept = chunk.slot->kept;
  const auto move = [&](std::byte* data, int64_t bytes) {
    std::memcpy(way == Way::kKeep ? kept : data, way == Way::kKeep ? data : kept, Size(bytes));
    kept += bytes;
  };
  for (const std::span<std::byte> range : chunk.state) {
    move(range.data(), std::ssize(range));
  }
  move(MainOf(chunk), chunk.cut.elements() * chunk.bytes.main);
  if (chunk.bytes.model_comes_down) {
    move(ModelOf(chunk), chunk.cut.elements() * chunk.bytes.model);
  }
}

HostUpdateCounts HostUpdater::TakeCounts() {
  MutexLock lock(mutex_);
  return std::exchange(counts_, HostUpdateCounts());
}

void HostUpdater::set_recorder(trace::Recorder* recorder) {
  MutexLock lock(mutex_);
  recorder_ = recorder;
}

int64_t HostUpdater::StepUnderWay() const {
  MutexLock lock(mutex_);
  return beginnings_[Size(ended_) % beginnings_.size()].step;
}

void HostUpdater::Note(
    plan::UnitId unit, const char* op, int64_t step, int64_t begin_ns, int64_t end_ns) {
  MutexLock lock(mutex_);
  if (recorder_ == nullptr) {
    return;
  }
  recorder_->Record({.begin_ns = begin_ns,
                     .end_ns = end_ns,
                     .step = step,
                     .phase = "host",
                     .unit = args_.plan.inventory.units[unit].name,
                     .op = op,
                     .stream = "host update"});
}

}  // namespace ravel::optim
