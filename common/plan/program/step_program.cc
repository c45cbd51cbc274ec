// Questions about instructions and their operands; names of operations, phases, streams and
// buffers, as plans, traces and errors print them.

#include "common/plan/program/step_program.h"

#include <algorithm>

#include "common/signed_size.h"

namespace ravel::plan {

bool IsCompute(OpCode op) {
  return op == OpCode::kForward || op == OpCode::kBackward || op == OpCode::kRecompute;
}

bool IsCollective(OpCode op) {
  return op == OpCode::kGather || op == OpCode::kReduce || op == OpCode::kStatsReduce ||
         op == OpCode::kAmaxReduce;
}

BufferId BufferOf(const Instruction& instruction, Role role) {
  for (const Operand& operand : instruction.operands) {
    if (operand.role == role) {
      return operand.buffer;
    }
  }
  return {};
}

std::vector<BufferId> BuffersOf(const Instruction& instruction, Role role) {
  std::vector<BufferId> buffers;
  for (const Operand& operand : instruction.operands) {
    if (operand.role == role) {
      buffers.push_back(operand.buffer);
    }
  }
  return buffers;
}

bool Touches(const Instruction& instruction, BufferId buffer) {
  return std::any_of(instruction.operands.begin(),
                     instruction.operands.end(),
                     [buffer](const Operand& operand) { return operand.buffer == buffer; });
}

bool Accumulates(const Instruction& instruction) {
  return std::any_of(
      instruction.operands.begin(), instruction.operands.end(), [](const Operand& operand) {
        return operand.role == Role::kGradient && operand.access == Access::kAdd;
      });
}

const char* OpName(OpLabel label) {
  switch (label) {
    case OpLabel::kGather:
      return "Gather";
    case OpLabel::kForward:
      return "Forward";
    case OpLabel::kBackward:
      return "Backward";
    case OpLabel::kFree:
      return "Free";
    case OpLabel::kAllocStaging:
      return "AllocStaging";
    case OpLabel::kReduceScatter:
      return "ReduceScatter";
    case OpLabel::kStatsReduce:
      return "StatsReduce";
    case OpLabel::kDecideStep:
      return "DecideStep";
    case OpLabel::kOptimizerStep:
      return "OptimizerStep";
    case OpLabel::kEndPhase:
      return "EndPhase";
    case OpLabel::kRecompute:
      return "Recompute";
    case OpLabel::kAccumulateGrad:
      return "AccumulateGrad";
    case OpLabel::kOuterReduce:
      return "OuterReduce";
    case OpLabel::kOuterGather:
      return "OuterGather";
    case OpLabel::kJoinGradients:
      return "JoinGradients";
    case OpLabel::kGatherGradient:
      return "GatherGradient";
    case OpLabel::kAmaxReduce:
      return "AmaxReduce";
    case OpLabel::kRefreshWeights:
      return "RefreshWeights";
    case OpLabel::kOffloadGradient:
      return "OffloadGradient";
    case OpLabel::kTensorReduce:
      return "TensorReduce";
    case OpLabel::kTensorGather:
      return "TensorGather";
  }
  return "unknown";
}

const char* PhaseName(Phase phase) {
  switch (phase) {
    case Phase::kOnly:
      return "only";
    case Phase::kFirst:
      return "first";
    case Phase::kMiddle:
      return "middle";
    case Phase::kLast:
      return "last";
    case Phase::kEval:
      return "eval";
  }
  return "unknown";
}

const char* LanePartName(LanePart part) {
  switch (part) {
    case LanePart::kWhole:
      return "whole";
    case LanePart::kOpen:
      return "open";
    case LanePart::kMiddle:
      return "middle";
    case LanePart::kClose:
      return "close";
  }
  return "unknown";
}

const char* StreamName(StreamId stream) {
  switch (stream) {
    case StreamId::kCompute:
      return "compute";
    case StreamId::kGather:
      return "gather";
    case StreamId::kReduce:
      return "reduce";
    case StreamId::kHost:
      return "host";
    case StreamId::kOuter:
      return "outer";
    case StreamId::kDownload:
      return "download";
    case StreamId::kUpload:
      return "upload";
    case StreamId::kTensor:
      return "tensor";
  }
  return "unknown";
}

const char* BufferKindName(BufferKind kind) {
  switch (kind) {
    case BufferKind::kMainWeight:
      return "main weight";
    case BufferKind::kState:
      return "optimizer state";
    case BufferKind::kMainGrad:
      return "main grad";
    case BufferKind::kGathered:
      return "gathered";
    case BufferKind::kStaging:
      return "staging";
    case BufferKind::kReceive:
      return "receive";
    case BufferKind::kSaved:
      return "activations";
    case BufferKind::kWorkspace:
      return "workspace";
    case BufferKind::kShared:
      return "shared";
    case BufferKind::kModelWeight:
      return "model weight";
    case BufferKind::kLocalGrad:
      return "local grad";
    case BufferKind::kOuterGrad:
      return "outer grad";
    case BufferKind::kFullGrad:
      return "full grad";
    case BufferKind::kOuterReceive:
      return "outer receive";
    case BufferKind::kRemade:
      return "remade activations";
    case BufferKind::kStateScale:
      return "optimizer scale";
    case BufferKind::kAmax:
      return "amax";
    case BufferKind::kAmaxPart:
      return "amax part";
    case BufferKind::kAmaxReceive:
      return "amax receive";
    case BufferKind::kDelayedScales:
      return "delayed scales";
    case BufferKind::kAmaxFlags:
      return "amax flags";
    case BufferKind::kLeaves:
      return "leaves";
    case BufferKind::kAddend:
      return "addends";
    case BufferKind::kAddendReceive:
      return "addend receive";
    case BufferKind::kRows:
      return "own rows";
    case BufferKind::kTensorSum:
      return "tensor sum";
    case BufferKind::kTensorReceive:
      return "tensor receive";
    case BufferKind::kInputGradient:
      return "input gradient";
  }
  return "unknown";
}

const char* BufferLabel(const ProgramOptions& options, const ProgramBuffer& buffer) {
  if (buffer.kind == BufferKind::kState) {
    return At(BufferStatesOf(options.optimizer), buffer.slot).name;
  }
  return buffer.kind == BufferKind::kStateScale
             ? StateName(*ScaleRoleOf(At(BufferStatesOf(options.optimizer), buffer.slot).role))
             : BufferKindName(buffer.kind);
}

DType StateBufferType(const ProgramOptions& options, int slot) {
  return StateTypeOf(At(BufferStatesOf(options.optimizer), slot), options.state_types);
}

const char* MemoryKindName(MemoryKind memory) {
  switch (memory) {
    case MemoryKind::kPrivate:
      return "private";
    case MemoryKind::kSymmetric:
      return "symmetric";
    case MemoryKind::kOffload:
      return "offload";
    case MemoryKind::kCommon:
      return "common";
  }
  return "unknown";
}

}  // namespace ravel::plan
