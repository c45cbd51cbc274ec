// Replays the programs of a rank, instruction by instruction: state checks, faults and traces here,
// the work itself in instruction_runner, streams and events in the backend.

#include "worker/shard/unit_executor.h"

#include <chrono>
#include <utility>

#include <absl/strings/str_cat.h>

#include "common/check.h"
#include "common/fault_point.h"
#include "common/plan/program/buffer_index.h"

namespace ravel::shard {
namespace {

using plan::Instruction;
using plan::OpCode;

int64_t NowNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// An fp32 of such bytes is a NaN.
constexpr uint8_t kNanByte = 0xFF;

}  // namespace

UnitExecutor::UnitExecutor(const Args& args, ExecutorOptions options)
    : args_(args), options_(options), runner_(args) {
  CHECK_EQ(args_.modules.size(), args_.plan.inventory.units.size());
  const plan::BufferId shared =
      plan::FindBuffer(args_.plan.buffers, {.kind = plan::BufferKind::kShared});
  shared_ = ActivationViews(args_.plan.inventory.shared, args_.buffers.bytes(shared));
  programs_ = BindPrograms(
      args_.plan, args_.buffers, args_.communicators.world().rank(), shared_, runner_.quant());
  for (BoundProgram& program : programs_) {
    for (BoundInstruction& bound : program.instructions) {
      bound.memory.draws = runner_.draws();
      bound.memory.loss_scale = runner_.loss_scale();
      bound.memory.device_loss_scale =
          args_.actions == nullptr ? nullptr : args_.actions->device_loss_scale();
    }
  }
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
  for (const plan::InstructionId free : program.first_frees) {
    RETURN_IF_ERROR(runner_.state().Free(program.instructions[free].instruction.freed));
  }
  RETURN_IF_ERROR(
      args_.backend.Run({.program = program,
                         .turn = turn,
                         .watched = options_.recorder != nullptr || observer_ != nullptr,
                         .run = [&](const BoundInstruction& bound, int64_t wait_ns) {
                           return RunOne(program, bound, turn, wait_ns);
                         }}));
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
    runner_.TakePeerWait(bound.instruction);  // of what was not recorded
    RETURN_IF_ERROR(args_.backend.BeginTraced(bound.instruction.stream));
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
    status = args_.backend.Finish();
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

// Fills fresh staging with NaN, so that a wrong accumulate or an uninitialised read shows.
void UnitExecutor::Poison(const Instruction& alloc, const ReplayTurn& turn) {
  if (turn.slot.part == plan::LanePart::kMiddle || turn.slot.part == plan::LanePart::kClose) {
    return;
  }
  const plan::BufferId staging = plan::BufferOf(alloc, plan::Role::kGradient);
  args_.backend.FillBytes(args_.backend.stream(alloc.stream),
                          args_.buffers.bytes(staging),
                          kNanByte,
                          args_.plan.buffers[staging].bytes);
}

void UnitExecutor::IssueComputes() const {
  for (const BoundProgram& program : programs_) {
    for (const BoundInstruction& bound : program.instructions) {
      if (plan::IsCompute(bound.instruction.op)) {
        CHECK_MSG(bound.instruction.stream == plan::StreamId::kCompute ||
                      plan::ExchangesAddends(bound.move),
                  "units compute on one stream");
        if (!plan::ExchangesAddends(bound.move)) {  // whose addends nobody has exchanged
          runner_.IssueCompute(bound, program.phase);
        }
      }
    }
  }
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
  args_.backend.EndTraced(instruction.stream, event, *options_.recorder);
}

}  // namespace ravel::shard
