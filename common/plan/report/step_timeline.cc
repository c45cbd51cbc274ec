// Predicts the start and end of each instruction: FLOPs and bytes over the device's speeds, one
// instruction at a time on each stream, after its waits. Programs do not overlap here, although
// they do when they run.

#include "common/plan/report/step_timeline.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <map>
#include <utility>

#include "common/model/tensor_cuts.h"
#include "common/plan/layout/quant_layout.h"
#include "common/plan/plan_pieces.h"
#include "common/plan/program/program_uses.h"
#include "common/plan/report/wire_table.h"
#include "common/signed_size.h"

namespace ravel::plan {
namespace {

constexpr double kLaunchSeconds = 20e-6;   // of a collective
constexpr double kComputeSeconds = 10e-6;  // of a unit's kernels, beyond their arithmetic

class Durations {
 public:
  Durations(const ShardingPlan& plan, const DeviceKind& device, int64_t contributors)
      : plan_(plan), device_(device), contributors_(contributors) {}

  double SecondsOf(const Instruction& at) const {
    switch (at.op) {
      case OpCode::kForward:
      case OpCode::kRecompute:
        return at.segment < 0 ? UnitSeconds(at.unit, 1) : StepSeconds(at, 1);
      case OpCode::kBackward:
        return at.segment < 0 ? UnitSeconds(at.unit, 2) : StepSeconds(at, 2);
      case OpCode::kGather:
      case OpCode::kReduce:
        return CollectiveSeconds(at);
      case OpCode::kAccumulateGrad:
      case OpCode::kJoinGradients:
        return MemorySeconds(at, 3);
      case OpCode::kOptimizerStep:
        return at.stream == StreamId::kUpload ? HostSeconds(at, 7) : MemorySeconds(at, 7);
      case OpCode::kOffloadGradient:
        return 0;  // of the update, whose arithmetic takes longer
      case OpCode::kRefreshWeights:
        return at.stream != StreamId::kUpload                   ? MemorySeconds(at, 2)
               : EncodesInUpdate(plan_.groups[at.group].recipe) ? 0
                                                                : HostSeconds(at, 1);
      case OpCode::kAmaxReduce:
      case OpCode::kStatsReduce:
      case OpCode::kDecideStep:
        return plan_.ranks > 1 ? kLaunchSeconds : 0;
      case OpCode::kFree:
      case OpCode::kAllocStaging:
      case OpCode::kEndPhase:
        return 0;
    }
    return 0;
  }

 private:
  // Two FLOPs per token and matrix element, and causal attention; of optional units what is to be
  // expected.
  double UnitSeconds(UnitId unit, double passes) const {
    const UnitSpec& spec = plan_.inventory.units[unit];
    int64_t elements = 0;
    for (const std::vector<TensorId>* tensors : {&spec.tensors, &spec.borrowed}) {
      for (const TensorId tensor : *tensors) {
        elements += ItemElements(plan_.inventory.tensors[tensor]);
      }
    }
    const auto tokens =
        static_cast<double>(plan_.micro_batch.sequences * plan_.micro_batch.sequence_tokens);
    double flops = 2 * tokens * static_cast<double>(elements);
    if (spec.kind == UnitKind::kEmbedding) {
      flops = 0;
    } else if (spec.kind == UnitKind::kLayer) {
      flops += AttentionFlops();
    }
    const double used = spec.optional ? 1 - plan_.options.layer_drop : 1;
    return used * (kComputeSeconds + passes * flops / device_.flops);
  }

  // A step of a pass that ranks of the tensor axis share, and its move.
  double StepSeconds(const Instruction& at, double passes) const {
    const auto tokens =
        static_cast<double>(plan_.micro_batch.sequences * plan_.micro_batch.sequence_tokens);
    double flops = 0;
    for (const SegmentSpec& segment : SegmentsOfStep(plan_.inventory, at)) {
      int64_t elements = 0;
      const auto add = [&](TensorId tensor) {
        elements += ElementCount(plan_.inventory.tensors[tensor].shape);
      };
      std::for_each(segment.weights.begin(), segment.weights.end(), add);
      for (const TensorId tensor : segment.gradients) {
        if (plan_.inventory.tensors[tensor].trainable) {
          add(tensor);
        }
      }
      const bool multiplies = segment.kind != SegmentKind::kTable &&
                              segment.move != SegmentMove::kSumRows &&
                              segment.move != SegmentMove::kScatterRows;
      flops += multiplies ? 2 * tokens * static_cast<double>(elements) /
                                static_cast<double>(segment.chunks)
                          : 0;
      flops += segment.kind == SegmentKind::kAttention ? passes * AttentionFlops() : 0;
    }
    const UnitSpec& spec = plan_.inventory.units[at.unit];
    const double used = spec.optional ? 1 - plan_.options.layer_drop : 1;
    const auto ranks = static_cast<double>(TensorRanks(plan_.inventory));
    return used * (kComputeSeconds + flops / ranks / device_.flops +
                   (at.move < 0 ? 0 : CollectiveSeconds(at)));
  }
  // Causal.
  double AttentionFlops() const {
    const ModelConfig& config = plan_.inventory.config;
    const auto tokens =
        static_cast<double>(plan_.micro_batch.sequences * plan_.micro_batch.sequence_tokens);
    return 2 * tokens * static_cast<double>(plan_.micro_batch.sequence_tokens) *
           static_cast<double>(config.num_attention_heads * config.head_dim);
  }

  double CollectiveSeconds(const Instruction& at) const {
    const WireBytes wire = WireOf(plan_, at, contributors_);
    if (wire.total() == 0) {
      return 0;
    }
    // Ranks of one axis lie within so many that follow each other.
    int64_t span = 1;
    const std::vector<MeshAxis>& axes = plan_.mesh.axes();
    const ProgramMove& move = plan_.moves.moves[at.move];
    for (size_t i = Size(plan_.mesh.AxisIndex(move.axes.front())); i < axes.size(); ++i) {
      span *= axes[i].size;
    }
    const bool in_node = span <= device_.devices_per_node;
    const double rate = in_node ? device_.node_bytes_per_second : device_.network_bytes_per_second;
    return kLaunchSeconds + static_cast<double>(wire.total()) / rate;
  }

  // So many fp32 numbers read or written per element of the rank's part of a group.
  double MemorySeconds(const Instruction& at, double numbers) const {
    if (at.group < 0) {
      return 0;
    }
    const bool whole = at.op == OpCode::kAccumulateGrad;
    const auto elements = static_cast<double>(whole ? plan_.groups[at.group].layout.total_elements()
                                                    : StoredRange(plan_, at.group, 0).size());
    return kComputeSeconds + numbers * 4 * elements / device_.memory_bytes_per_second;
  }

  // So many fp32 numbers that a device's host reads and writes in its memory.
  double HostSeconds(const Instruction& at, double numbers) const {
    constexpr double kHostBytesPerSecond = 80e9;  // of one socket; no host is asked
    const auto elements = static_cast<double>(StoredRange(plan_, at.group, 0).size());
    return kComputeSeconds + numbers * 4 * elements / kHostBytesPerSecond;
  }

  const ShardingPlan& plan_;
  const DeviceKind& device_;
  const int64_t contributors_;
};

}  // namespace

IdVector<InstructionId, TimedInstruction> SimulateProgram(const ShardingPlan& plan,
                                                          const StepProgram& program,
                                                          const DeviceKind& device,
                                                          int64_t contributors) {
  const Durations durations(plan, device, contributors);
  IdVector<InstructionId, TimedInstruction> timed;
  timed.reserve(program.instructions.size());
  std::array<int64_t, kStreamCount> free_at = {};
  for (const InstructionId i : program.instructions.ids()) {
    const Instruction& at = program.instructions[i];
    const bool on_stream = at.op != OpCode::kFree;
    int64_t& stream = free_at.at(StreamIndex(at.stream));
    int64_t begin = on_stream ? stream : 0;
    for (const InstructionId wait : at.waits) {
      begin = std::max(begin, timed[wait].end_ns);
    }
    const int64_t end = begin + static_cast<int64_t>(durations.SecondsOf(at) * 1e9);
    timed.push_back({.index = i, .begin_ns = begin, .end_ns = end});
    if (on_stream) {
      stream = end;
    }
  }
  return timed;
}

StepTimes PredictStep(const ShardingPlan& plan, const DeviceKind& device) {
  std::map<std::pair<const StepProgram*, int64_t>, StepTimes> known;
  const LaneMap inner = plan.lanes.Inner();
  StepTimes sum;
  for (int64_t index = 0; index < plan.lanes.programs(); ++index) {
    const StepSlot slot = SlotOf(plan.lanes, index);
    const StepProgram& program = plan.program(slot.phase, slot.part);
    const int64_t contributors = inner.LaneCount(plan.lanes.blocks ? 0 : slot.turn);
    const std::pair key(&program, contributors);
    if (known.count(key) == 0) {
      StepTimes times;
      for (const TimedInstruction& at : SimulateProgram(plan, program, device, contributors)) {
        times.step_ns = std::max(times.step_ns, at.end_ns);
        if (program.instructions[at.index].stream == StreamId::kCompute) {
          times.compute_ns += at.end_ns - at.begin_ns;
        }
      }
      known.emplace(key, times);
    }
    sum.step_ns += known[key].step_ns;
    sum.compute_ns += known[key].compute_ns;
  }
  return sum;
}

}  // namespace ravel::plan
