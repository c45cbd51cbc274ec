// Replays programs on a device. Instructions go to the stream that the plan names, waits become
// events, and nothing waits on the host. Programs follow each other by the waits of
// program_crossing, or whole programs are captured once and launched as graphs.

#include "worker/shard/device_replay.h"

#include <algorithm>
#include <array>
#include <span>
#include <utility>

#include <absl/strings/str_cat.h>

#include "common/check.h"
#include "common/plan/program/program_crossing.h"
#include "common/signed_size.h"
#include "kernels/cast.h"

namespace ravel::shard {
namespace {

using plan::Instruction;
using plan::OpCode;

TensorView Bf16View(void* data, int64_t elements) {
  TensorView view = VectorView(nullptr, elements);
  view.data = data;
  view.dtype = DType::kBF16;
  return view;
}

}  // namespace

absl::StatusOr<std::unique_ptr<DeviceReplay>> DeviceReplay::Create(const Args& args) {
  std::unique_ptr<DeviceReplay> made(new DeviceReplay(args));
  if (args.plan.options.gradient_wire != plan::WireType::kBF16) {
    return made;
  }
  int64_t elements = 0;
  for (const plan::ProgramBuffer& buffer : args.plan.buffers) {
    if (buffer.kind == plan::BufferKind::kStaging && buffer.dtype == plan::kGradientType) {
      elements = std::max(elements, buffer.elements());
    }
  }
  if (elements == 0) {
    return made;
  }
  auto wire = args.streams.gpu().AllocateDevice(elements * int64_t{sizeof(uint16_t)});
  if (!wire.ok()) {
    return Annotate(wire.status(), "bf16 wire");
  }
  made->wire_ = *std::move(wire);
  return made;
}

std::string DeviceReplay::RangeOf(const Instruction& instruction) const {
  return absl::StrCat(
      plan::OpName(plan::LabelOf(args_.plan.moves, instruction)),
      " ",
      instruction.unit < 0 ? "step" : args_.plan.inventory.units[instruction.unit].name);
}

absl::Status DeviceReplay::Prepare(const std::vector<BoundProgram>& programs,
                                   const model::Modules& modules) {
  CHECK_MSG(prepared_.empty(), "programs are prepared once");
  if (use_graphs_) {
    const auto agree = [this](const std::string& own) { return AgreeOnGraph(own); };
    graphs_ = std::make_unique<StepGraphs>(
        args_.streams,
        args_.plan.ranks == 1 ? StepGraphs::Agreement(nullptr) : StepGraphs::Agreement(agree));
  }
  for (const BoundProgram& program : programs) {
    RETURN_IF_ERROR(PrepareProgram(program, modules));
  }
  return PrepareCrossing(programs);
}

absl::Status DeviceReplay::PrepareProgram(const BoundProgram& program,
                                          const model::Modules& modules) {
  const auto& list = program.instructions;
  Prepared& prepared = prepared_[&program];
  prepared.range = absl::StrCat(
      "program ", plan::PhaseName(program.phase), ", ", plan::LanePartName(program.part));
  auto& orders = prepared.orders;
  orders.resize(list.size());
  for (const plan::InstructionId i : list.ids()) {
    const Instruction& instruction = list[i].instruction;
    if (!plan::RunsOnStream(instruction)) {
      continue;
    }
    orders[i].range = RangeOf(instruction);
    if (instruction.op == OpCode::kBackward && instruction.stream == plan::StreamId::kCompute) {
      modules[instruction.unit]->Prepare(args_.streams.of(instruction.stream), list[i].memory);
    }
    for (const plan::InstructionId wait : instruction.waits) {
      const plan::InstructionId freed_with = list[wait].freed_with;
      const plan::InstructionId awaited = freed_with >= 0 ? freed_with : wait;
      // A stream is in order by itself.
      if (!plan::RunsOnStream(list[awaited].instruction) ||
          list[awaited].instruction.stream == instruction.stream) {
        continue;
      }
      CHECK_LT(awaited, i);  // or its event would not be recorded yet
      Order& before = orders[awaited];
      if (before.event == kNoEvent) {
        before.event = events_.size();
        ASSIGN_OR_RETURN(kernels::CudaEvent event, args_.streams.gpu().MakeEvent());
        events_.push_back(std::move(event));
      }
      orders[i].waits.push_back(before.event);
    }
  }
  return absl::OkStatus();
}

absl::Status DeviceReplay::PrepareCrossing(const std::vector<BoundProgram>& programs) {
  const plan::ShardingPlan& plan = args_.plan;
  const plan::CrossingWaits waits =
      plan::CrossingWaitsOf(plan.programs, plan.buffers, plan.memory.offsets);
  CHECK_EQ(waits.size(), programs.size());
  for (size_t later = 0; later < waits.size(); ++later) {
    auto& orders = prepared_.at(&programs[later]).orders;
    for (const plan::InstructionId i : orders.ids()) {
      for (const plan::CrossingWait& wait : waits[later][i]) {
        Order& before = prepared_.at(&programs[wait.program]).orders[wait.instruction];
        if (before.leaving == kNoEvent) {
          before.leaving = leaving_.size();
          ASSIGN_OR_RETURN(kernels::CudaEvent event, args_.streams.gpu().MakeEvent());
          leaving_.push_back({.event = std::move(event)});
        }
        orders[i].crossing.push_back(before.leaving);
      }
    }
  }
  return absl::OkStatus();
}

absl::Status DeviceReplay::Run(const ProgramRun& program) {
  CHECK_MSG(!prepared_.empty(), "Prepare comes first");
  const kernels::CudaRange range(args_.streams.gpu(), prepared_.at(&program.program).range);
  return UsesGraph(program) ? RunGraph(program) : Issue(program, Ends::kCrossed);
}

absl::Status DeviceReplay::RunGraph(const ProgramRun& program) {
  if (!drained_) {
    args_.streams.Join();
  }
  drained_ = false;  // an error leaves work behind
  RETURN_IF_ERROR(graphs_->Run(program.turn.slot, [&] { return Issue(program, Ends::kDrained); }));
  args_.streams.Join();
  for (Leaving& leaving : leaving_) {
    leaving.recorded = false;
  }
  drained_ = true;
  return MarkCollectives();
}

// Ranks that exchange decide alike: what they look at is equal on all of them.
bool DeviceReplay::UsesGraph(const ProgramRun& program) const {
  const bool differs = program.turn.measured && args_.plan.ranks > 1;
  return graphs_ != nullptr && !program.watched && !differs &&
         program.turn.slot.phase != plan::Phase::kEval;
}

absl::StatusOr<std::string> DeviceReplay::AgreeOnGraph(const std::string& difference) const {
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

absl::Status DeviceReplay::MarkCollectives() {
  for (comm::Communicator* group : args_.communicators.all()) {
    RETURN_IF_ERROR(group->MarkPassed(args_.streams.compute()));
  }
  return absl::OkStatus();
}

absl::Status DeviceReplay::Issue(const ProgramRun& program, Ends ends) {
  const auto& list = program.program.instructions;
  const auto& orders = prepared_.at(&program.program).orders;
  drained_ = drained_ && ends == Ends::kDrained;
  for (const plan::InstructionId i : list.ids()) {
    if (!plan::RunsOnStream(list[i].instruction)) {
      continue;
    }
    kernels::CudaStream& stream = args_.streams.of(list[i].instruction.stream);
    for (const size_t event : orders[i].waits) {
      stream.Wait(events_[event]);
    }
    for (const size_t before : orders[i].crossing) {
      if (ends == Ends::kCrossed && leaving_[before].recorded) {
        stream.Wait(leaving_[before].event);
      }
    }
    const kernels::CudaRange range(args_.streams.gpu(), orders[i].range);
    RETURN_IF_ERROR(program.run(list[i], 0));
    if (orders[i].event != kNoEvent) {
      stream.Record(events_[orders[i].event]);
    }
    if (ends == Ends::kCrossed && orders[i].leaving != kNoEvent) {
      Leaving& leaving = leaving_[orders[i].leaving];
      stream.Record(leaving.event);
      leaving.recorded = true;
    }
  }
  return absl::OkStatus();
}

void DeviceReplay::FillBytes(kernels::Stream& stream, void* to, uint8_t byte, int64_t bytes) {
  static_cast<kernels::CudaStream&>(stream).FillBytes(to, byte, bytes);
}

absl::Status DeviceReplay::ExchangeStatistics(comm::Communicator& world,
                                              const comm::CollectiveTag& tag,
                                              const StatisticsMessages& messages,
                                              kernels::Stream& stream) {
  return world.AllGather({.tag = tag,
                          .shard = reinterpret_cast<const float*>(messages.mine),
                          .gathered = reinterpret_cast<float*>(messages.all),
                          .shard_elements = messages.words,
                          .element_bytes = sizeof(int64_t),
                          .stream = &stream});
}

void* DeviceReplay::PackForWire(kernels::Stream& stream, float* staging, int64_t elements) {
  kernels::Cast(stream,
                {.from = VectorView(staging, elements), .to = Bf16View(wire_.data(), elements)});
  return wire_.data();
}

absl::Status DeviceReplay::BeginTraced(plan::StreamId stream) {
  return timeline_.Begin(args_.streams.of(stream));
}

void DeviceReplay::EndTraced(plan::StreamId stream, const trace::Event& event, trace::Recorder&) {
  timeline_.End(args_.streams.of(stream), event);
}

absl::Status DeviceReplay::CollectTrace(trace::Recorder& recorder) {
  return timeline_.Collect(recorder);
}

}  // namespace ravel::shard
