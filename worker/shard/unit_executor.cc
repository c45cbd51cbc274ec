#include "worker/shard/unit_executor.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <random>
#include <span>
#include <thread>
#include <utility>

#include <absl/strings/str_cat.h>

#include "common/check.h"
#include "common/fault_point.h"
#include "common/mutex.h"
#include "common/plan/program/buffer_index.h"
#include "common/signed_size.h"

namespace ravel::shard {
namespace {

using plan::Instruction;
using plan::OpCode;

// Longest random delay of an instruction of a slow stream; some are stuck for longer.
constexpr uint64_t kSlowMicroseconds = 40;
// How late a slow stream begins, at times: other streams come to where they need its first one.
constexpr uint64_t kLateMicroseconds = 10'000;

int64_t NowNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// An fp32 of such bytes is a NaN.
constexpr uint8_t kNanByte = 0xFF;

// The first failure of any stream.
class FirstFailure {
 public:
  // True for the first.
  bool Set(const absl::Status& status) {
    MutexLock lock(mutex_);
    const bool first = status_.ok();
    if (first) {
      status_ = status;
    }
    return first;
  }
  absl::Status status() const {
    MutexLock lock(mutex_);
    return status_;
  }

 private:
  mutable Mutex mutex_;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
};

// A schedule slows one stream down, or none, some of its instructions very much, and each other
// instruction by a little. `first` of its stream.
void RandomDelay(uint64_t schedule,
                 plan::InstructionId instruction,
                 plan::StreamId stream,
                 bool first) {
  std::mt19937_64 random(schedule * 1000003 + Size(instruction.value()) * 101);
  random.discard(1);
  const bool slow = schedule % 6 == static_cast<uint64_t>(stream);
  const bool late = slow && first && schedule / 6 % 4 == 3;
  const uint64_t draw = random();
  const bool stuck = slow && draw % 16 == 0;
  const uint64_t most = stuck  ? 20 * kSlowMicroseconds
                        : slow ? kSlowMicroseconds
                               : kSlowMicroseconds / 8;
  const uint64_t microseconds = late                     ? kLateMicroseconds
                                : draw % 2 == 0 && !slow ? 0
                                                         : (draw >> 4) % most;
  const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(microseconds);
  while (std::chrono::steady_clock::now() < end) {
    std::this_thread::yield();
  }
}

bool OfHost(const Instruction& instruction) {
  return instruction.op == OpCode::kFree || instruction.op == OpCode::kEndPhase;
}

}  // namespace

UnitExecutor::UnitExecutor(const Args& args, ExecutorOptions options)
    : args_(args), options_(options), runner_(args) {
  CHECK_EQ(args_.modules.size(), args_.plan.inventory.units.size());
  const plan::BufferId shared =
      plan::FindBuffer(args_.plan.buffers, {.kind = plan::BufferKind::kShared});
  shared_ = ActivationViews(args_.plan.inventory.shared, args_.buffers.bytes(shared));
  programs_ = BindPrograms(args_.plan, args_.buffers, shared_);
}

UnitExecutor::~UnitExecutor() = default;

const BoundProgram& UnitExecutor::ProgramOf(const plan::StepSlot& slot) const {
  for (const BoundProgram& program : programs_) {
    const bool eval = slot.phase == plan::Phase::kEval;
    if (program.phase == slot.phase && (eval || program.part == slot.part)) {
      return program;
    }
  }
  CheckFailed(__FILE__, __LINE__, "program of phase", plan::PhaseName(slot.phase));
}

std::string UnitExecutor::RangeOf(const Instruction& instruction) const {
  return absl::StrCat(
      runner_.OpNameOf(instruction),
      " ",
      instruction.unit < 0 ? "step" : args_.plan.inventory.units[instruction.unit].name);
}

std::string UnitExecutor::NameOf(const BoundInstruction& bound, const ReplayTurn& turn) const {
  const plan::UnitId unit = bound.instruction.unit;
  std::string name = absl::StrCat(runner_.OpNameOf(bound.instruction),
                                  " of ",
                                  unit < 0 ? "step" : args_.plan.inventory.units[unit].name,
                                  " (",
                                  plan::PhaseName(turn.slot.phase),
                                  ", turn ",
                                  turn.slot.turn);
  if (args_.plan.lanes.micro_batches > 1) {
    absl::StrAppend(&name, ", micro-batch ", turn.slot.micro_batch);
  }
  return name + ")";
}

absl::Status UnitExecutor::Run(const ReplayTurn& turn) {
  const BoundProgram& program = ProgramOf(turn.slot);
  runner_.state().BeginProgram({.phase = turn.slot.phase,
                                .part = turn.slot.part,
                                .turn = turn.slot.turn,
                                .micro_batch = turn.slot.micro_batch,
                                .has_lane = runner_.HasLane(turn)});
  ++runs_;
  for (const plan::InstructionId free : program.first_frees) {
    RETURN_IF_ERROR(runner_.state().Free(program.instructions[free].instruction.freed));
  }
  const bool is_inline = options_.streams == StreamMode::kInline;
  RETURN_IF_ERROR(args_.device != nullptr ? RunOnDevice(program, turn)
                  : is_inline             ? RunInline(program, turn)
                                          : RunQueued(program, turn));
  return Annotate(runner_.state().EndPhase(), NameOf(program.instructions.back(), turn));
}

// A rank may be made slow or broken at an instruction: "execute.Backward.layers.1".
absl::Status UnitExecutor::DrillOf(const Instruction& instruction) const {
  if (!fault::Enabled()) {
    return absl::OkStatus();
  }
  return FaultPoint(
      absl::StrCat("execute.",
                   runner_.OpNameOf(instruction),
                   instruction.unit < 0 ? "" : ".",
                   instruction.unit < 0 ? "" : args_.plan.inventory.units[instruction.unit].name));
}

absl::Status UnitExecutor::RunOne(const BoundProgram& program,
                                  const BoundInstruction& bound,
                                  const ReplayTurn& turn,
                                  int64_t wait_ns) {
  if (options_.recorder != nullptr) {
    RETURN_IF_ERROR(BeginTraced(bound.instruction));
  }
  const int64_t begin_ns = options_.recorder != nullptr ? NowNs() : 0;
  absl::Status status = DrillOf(bound.instruction);
  if (status.ok() && observer_ != nullptr) {
    status = observer_->Starting(bound, turn);
  }
  if (status.ok()) {
    status = runner_.Run(bound, turn);
  }
  if (options_.poison && bound.instruction.op == OpCode::kAllocStaging) {
    Poison(bound.instruction, turn);
  }
  if (status.ok() && observer_ != nullptr) {
    status = args_.device != nullptr ? args_.device->FinishAll() : absl::OkStatus();
    status = status.ok() ? observer_->Completed(bound, turn) : status;
  }
  for (const plan::InstructionId free : bound.frees) {
    if (status.ok()) {
      status = runner_.state().Free(program.instructions[free].instruction.freed);
    }
  }
  if (options_.recorder != nullptr) {
    Record(bound, turn, begin_ns, wait_ns);
  }
  return status.ok() ? status : Annotate(status, NameOf(bound, turn));
}

// Whoever adds to what it should overwrite, or reads what nobody wrote, gets NaN.
void UnitExecutor::Poison(const Instruction& alloc, const ReplayTurn& turn) {
  if (turn.slot.part == plan::LanePart::kMiddle || turn.slot.part == plan::LanePart::kClose) {
    return;
  }
  const plan::BufferId staging = plan::BufferOf(alloc, plan::Role::kGradient);
  if (args_.device != nullptr) {
    args_.device->of(alloc.stream)
        .FillBytes(args_.buffers.bytes(staging), kNanByte, args_.plan.buffers[staging].bytes);
    return;
  }
  float* values = args_.buffers.floats(staging);
  std::fill(
      values, values + args_.buffers.elements(staging), std::numeric_limits<float>::quiet_NaN());
}

absl::Status UnitExecutor::RunInline(const BoundProgram& program, const ReplayTurn& turn) {
  for (const BoundInstruction& bound : program.instructions) {
    if (!OfHost(bound.instruction)) {
      RETURN_IF_ERROR(RunOne(program, bound, turn, 0));
    }
  }
  return absl::OkStatus();
}

absl::Status UnitExecutor::PrepareDevice() {
  timeline_ = std::make_unique<DeviceTimeline>(*args_.device);
  CHECK_MSG(args_.device != nullptr && device_programs_.empty(), "once, on a device");
  const bool alone = args_.plan.ranks == 1;
  // A graph would repeat the layers of the step in which it was captured.
  const bool repeats = args_.plan.options.layer_drop == 0;
  if (options_.graphs && repeats && (alone || options_.exchanging_graphs)) {
    const auto agree = [this](const std::string& own) { return AgreeOnGraph(own); };
    graphs_ = std::make_unique<StepGraphs>(
        *args_.device, alone ? StepGraphs::Agreement(nullptr) : StepGraphs::Agreement(agree));
  }
  for (const BoundProgram& program : programs_) {
    const auto& list = program.instructions;
    DeviceProgram& prepared = device_programs_[&program];
    prepared.range = absl::StrCat(
        "program ", plan::PhaseName(program.phase), ", ", plan::LanePartName(program.part));
    auto& orders = prepared.orders;
    orders.resize(list.size());
    for (const plan::InstructionId i : list.ids()) {
      if (OfHost(list[i].instruction)) {
        continue;
      }
      orders[i].range = RangeOf(list[i].instruction);
      if (list[i].instruction.op == OpCode::kBackward) {
        args_.modules[list[i].instruction.unit]->Prepare(
            args_.device->of(list[i].instruction.stream), list[i].memory);
      }
      for (const plan::InstructionId wait : list[i].instruction.waits) {
        const plan::InstructionId freed_with = list[wait].freed_with;
        const plan::InstructionId awaited = freed_with >= 0 ? freed_with : wait;
        // A stream is in order by itself.
        if (OfHost(list[awaited].instruction) ||
            list[awaited].instruction.stream == list[i].instruction.stream) {
          continue;
        }
        CHECK_LT(awaited, i);  // or its event would not be recorded yet
        DeviceOrder& before = orders[awaited];
        if (before.event == kNoEvent) {
          before.event = events_.size();
          ASSIGN_OR_RETURN(kernels::CudaEvent event, args_.device->gpu().MakeEvent());
          events_.push_back(std::move(event));
        }
        orders[i].waits.push_back(before.event);
      }
    }
  }
  return absl::OkStatus();
}

kernels::CudaStream::Products UnitExecutor::RehearseProducts() {
  kernels::CudaStream::Products products;
  kernels::CudaStream& stream = args_.device->compute();
  stream.Rehearse(&products);
  for (const BoundProgram& program : programs_) {
    for (const BoundInstruction& bound : program.instructions) {
      if (plan::IsCompute(bound.instruction.op)) {
        CHECK_MSG(&args_.device->of(bound.instruction.stream) == &stream,
                  "units compute on one stream");
        runner_.IssueCompute(bound, program.phase);
      }
    }
  }
  stream.Rehearse(nullptr);
  return products;
}

absl::Status UnitExecutor::RunOnDevice(const BoundProgram& program, const ReplayTurn& turn) {
  CHECK_MSG(!device_programs_.empty(), "PrepareDevice comes first");
  const kernels::CudaRange range(args_.device->gpu(), device_programs_.at(&program).range);
  const auto issue = [&] { return IssueOnDevice(program, turn); };
  const bool by_graph = UsesGraph(turn);
  RETURN_IF_ERROR(by_graph ? graphs_->Run(turn.slot, issue) : issue());
  args_.device->Join();
  return by_graph ? MarkCollectives() : absl::OkStatus();
}

// Ranks that exchange decide alike: what they look at is equal on all of them.
bool UnitExecutor::UsesGraph(const ReplayTurn& turn) const {
  const bool watched = options_.recorder != nullptr || observer_ != nullptr;
  const bool differs = turn.measured && args_.plan.ranks > 1;
  return graphs_ != nullptr && !watched && !differs && turn.slot.phase != plan::Phase::kEval;
}

absl::StatusOr<std::string> UnitExecutor::AgreeOnGraph(const std::string& difference) const {
  constexpr size_t kTextBytes = 160;
  comm::Communicator& world = args_.communicators.world();
  std::array<char, kTextBytes> mine = {};
  difference.copy(mine.data(), kTextBytes - 1);
  std::vector<char> all(kTextBytes * Size(world.size()));
  RETURN_IF_ERROR(world.AllGatherBytes(
      {}, std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all))));
  for (size_t rank = 0; rank * kTextBytes < all.size(); ++rank) {
    if (const char* text = all.data() + rank * kTextBytes; *text != '\0') {
      return absl::StrCat("rank ", rank, ": ", text);
    }
  }
  return std::string();
}

absl::Status UnitExecutor::MarkCollectives() {
  for (comm::Communicator* group : args_.communicators.all()) {
    RETURN_IF_ERROR(group->MarkPassed(args_.device->compute()));
  }
  return absl::OkStatus();
}

absl::Status UnitExecutor::IssueOnDevice(const BoundProgram& program, const ReplayTurn& turn) {
  const auto& orders = device_programs_.at(&program).orders;
  for (const plan::InstructionId i : program.instructions.ids()) {
    const BoundInstruction& bound = program.instructions[i];
    if (OfHost(bound.instruction)) {
      continue;
    }
    kernels::CudaStream& stream = args_.device->of(bound.instruction.stream);
    for (const size_t event : orders[i].waits) {
      stream.Wait(events_[event]);
    }
    const kernels::CudaRange range(args_.device->gpu(), orders[i].range);
    RETURN_IF_ERROR(RunOne(program, bound, turn, 0));
    if (orders[i].event != kNoEvent) {
      stream.Record(events_[orders[i].event]);
    }
  }
  return absl::OkStatus();
}

absl::Status UnitExecutor::RunQueued(const BoundProgram& program, const ReplayTurn& turn) {
  FirstFailure failure;
  const auto& list = program.instructions;
  plan::IdVector<plan::InstructionId, std::shared_ptr<kernels::CpuEvent>> done(list.size());
  std::array<bool, plan::kStreamCount> begun = {};
  // Ranks and programs of one schedule differ.
  const uint64_t schedule = options_.delay_seed.value_or(0) +
                            static_cast<uint64_t>(args_.communicators.world().rank()) + runs_;
  for (const plan::InstructionId i : list.ids()) {
    const BoundInstruction& bound = list[i];
    if (OfHost(bound.instruction)) {
      continue;
    }
    std::unique_ptr<kernels::CpuQueue>& queue =
        queues_[plan::StreamIndex(bound.instruction.stream)];
    if (queue == nullptr) {
      queue = std::make_unique<kernels::CpuQueue>();
    }
    done[i] = std::make_shared<kernels::CpuEvent>();
    const bool first = !begun[plan::StreamIndex(bound.instruction.stream)];
    begun[plan::StreamIndex(bound.instruction.stream)] = true;
    kernels::CpuQueue::Work work;
    for (const plan::InstructionId wait : bound.instruction.waits) {
      const plan::InstructionId freed_with = list[wait].freed_with;
      const plan::InstructionId runs = freed_with >= 0 ? freed_with : wait;
      if (done[runs] != nullptr) {
        work.waits.push_back(done[runs]);
      }
    }
    work.done = done[i];
    work.run = [&, i, first](int64_t wait_ns) {
      if (!failure.status().ok()) {
        return;
      }
      if (options_.delay_seed.has_value()) {
        RandomDelay(schedule, i, list[i].instruction.stream, first);
      }
      const absl::Status status = RunOne(program, list[i], turn, wait_ns);
      if (!status.ok() && failure.Set(status)) {
        // Other streams of this rank may wait for peers that will not come.
        args_.communicators.world().Abort(std::string(status.message()));
      }
    };
    queue->Submit(std::move(work));
  }
  for (const std::unique_ptr<kernels::CpuQueue>& queue : queues_) {
    if (queue != nullptr) {
      queue->Drain();
    }
  }
  return failure.status();
}

absl::Status UnitExecutor::BeginTraced(const Instruction& instruction) {
  runner_.TakePeerWait(instruction);  // of what was not recorded
  return timeline_ == nullptr ? absl::OkStatus()
                              : timeline_->Begin(args_.device->of(instruction.stream));
}

absl::Status UnitExecutor::CollectTrace(trace::Recorder& recorder) {
  return timeline_ == nullptr ? absl::OkStatus() : timeline_->Collect(recorder);
}

void UnitExecutor::Record(const BoundInstruction& bound,
                          const ReplayTurn& turn,
                          int64_t begin_ns,
                          int64_t wait_ns) {
  const Instruction& instruction = bound.instruction;
  const auto& units = args_.plan.inventory.units;
  const comm::PeerWait peers = runner_.TakePeerWait(instruction);
  const trace::Event event = {
      .begin_ns = begin_ns,
      .end_ns = NowNs(),
      .step = turn.step,
      .turn = turn.slot.turn,
      .micro_batch = turn.slot.micro_batch,
      .phase = plan::PhaseName(turn.slot.phase),
      .unit = instruction.unit < 0 ? std::string_view()
                                   : std::string_view(units[instruction.unit].name),
      .op = runner_.OpNameOf(instruction),
      .stream = plan::StreamName(instruction.stream),
      .call = instruction.call,
      .bytes = runner_.BytesOf(instruction, turn),
      .generation =
          instruction.group < 0 ? -1 : static_cast<int64_t>(generation(instruction.group)),
      .wait_ns = wait_ns,
      .peer_wait_ns = peers.nanoseconds,
      .peer_wait_begin_ns = peers.longest_begin_ns,
      .peer = peers.rank};
  if (timeline_ == nullptr) {
    options_.recorder->Record(event);
  } else {
    timeline_->End(args_.device->of(instruction.stream), event);
  }
}

}  // namespace ravel::shard
