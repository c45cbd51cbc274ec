// Tables of a plan, its wire bytes, its predicted timeline, and what is tried when it does not fit.

#include "common/plan/report/plan_report.h"

#include <algorithm>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/plan/device_kind.h"
#include "common/plan/plan_pieces.h"
#include "common/plan/plan_proto.h"
#include "common/plan/report/plan_fit.h"
#include "common/plan/report/plan_printer.h"
#include "common/plan/report/step_timeline.h"
#include "common/plan/report/wire_table.h"
#include "tests/common/plan/plan_testing.h"

namespace ravel::plan {
namespace {

using ::testing::HasSubstr;

PlanRequest RequestOf(int64_t ranks, bool shared_memory = false) {
  PlanRequest request;
  request.spec = testing::SpecOf(testing::Llama(256, 6, 704, 8192), 8);
  request.ranks = ranks;
  request.shared_memory = shared_memory;
  return request;
}

ShardingPlan Make(const PlanRequest& request) {
  absl::StatusOr<ShardingPlan> plan = BuildShardingPlan(request);
  EXPECT_TRUE(plan.ok()) << plan.status();
  return plan.ok() ? *std::move(plan) : ShardingPlan{};
}

TEST(PlanReport, CategoriesAddUpToThePredictedPeak) {
  for (const bool shared : {false, true}) {
    for (const int64_t ranks : {1, 2, 4}) {
      const ShardingPlan plan = Make(RequestOf(ranks, shared));
      const MemoryReport report = ReportMemory(plan);
      int64_t sum = 0;
      for (const MemoryCategory category : {MemoryCategory::kPersistent,
                                            MemoryCategory::kWindows,
                                            MemoryCategory::kActivations,
                                            MemoryCategory::kWorkspace,
                                            MemoryCategory::kAlignment}) {
        sum += report.category_bytes(category);
      }
      EXPECT_EQ(report.total_bytes, PeakBytes(plan));
      // Peaks of several kinds of memory need not be at the same moment of a program.
      EXPECT_GE(sum, report.total_bytes);
      EXPECT_LE(sum - report.total_bytes, report.total_bytes / 20);
      EXPECT_GT(report.category_bytes(MemoryCategory::kPersistent), 0);
      EXPECT_GT(report.category_bytes(MemoryCategory::kActivations), 0);
    }
  }
}

TEST(PlanReport, GroupsSayWhatTheStrategyDoes) {
  PlanRequest request = RequestOf(4);
  request.spec.replicas = 2;
  request.spec.replicate_strategy = Strategy::kOptim;  // hfsdp
  const ShardingPlan hfsdp = Make(request);
  int64_t elements = 0;
  for (const GroupRow& row : GroupTable(hfsdp)) {
    EXPECT_EQ(row.parameter, "R,F");
    EXPECT_EQ(row.gradient, "F,F");
    EXPECT_EQ(row.optimizer, "F,F");
    EXPECT_FALSE(row.buffers.empty());
    EXPECT_GT(row.wire.outer_reduces, 0);
    elements += row.elements;
  }
  EXPECT_EQ(elements, hfsdp.inventory.parameter_count());
  request.spec.replicas = 1;
  request.spec.replicate_strategy = Strategy::kNoShard;
  request.spec.strategy = Strategy::kOptim;
  request.spec.freeze = {"model.layers.0.*"};
  const ShardingPlan zero1 = Make(request);
  int frozen = 0;
  for (const GroupRow& row : GroupTable(zero1)) {
    EXPECT_EQ(row.parameter, "R");
    EXPECT_EQ(row.optimizer, row.trainable ? "F" : "-");
    frozen += row.trainable ? 0 : 1;
  }
  EXPECT_EQ(frozen, 1);
}

TEST(PlanReport, Bf16KeepsFp32MainWeightsOfEveryGroupApartAndPrivate) {
  for (const Strategy strategy :
       {Strategy::kNoShard, Strategy::kOptim, Strategy::kOptimGradsParams}) {
    for (const bool shared : {true, false}) {
      PlanRequest request = RequestOf(4);
      request.spec.strategy = strategy;
      request.shared_memory = shared;
      request.spec.freeze = {"*layers.1.*"};
      const std::string fp32_hash = SerializePlan(Make(request));
      request.spec.compute = ComputeType::kBF16;
      const ShardingPlan plan = Make(request);
      EXPECT_NE(SerializePlan(plan), fp32_hash);
      for (size_t group = 0; group < plan.groups.size(); ++group) {
        const int id = static_cast<int>(group);
        const ProgramBuffer& stored = plan.buffers[static_cast<size_t>(StoredWeight(plan, id))];
        EXPECT_EQ(stored.kind, BufferKind::kMainWeight);
        EXPECT_EQ(stored.memory, MemoryKind::kPrivate);
        EXPECT_EQ(stored.inside, -1);
        EXPECT_EQ(stored.bytes, StoredRange(plan, id, 0).size() * 4);
        EXPECT_EQ(plan.buffers[static_cast<size_t>(GatherSource(plan, id))].kind,
                  BufferKind::kModelWeight);
      }
      for (const UnitSpec& unit : plan.inventory.units) {
        for (const ActivationSpec& saved : unit.saved) {
          const bool statistic = saved.shape.size() < 2 || saved.name == "lse";
          EXPECT_EQ(saved.dtype, statistic ? DType::kF32 : DType::kBF16) << saved.name;
        }
      }
    }
  }
}

// Bytes per parameter of what is stored, beside gradients: 14, 12, 10 and 8.
TEST(PlanReport, RemaindersAndBf16MomentsTakeTwoBytesEach) {
  PlanRequest request = RequestOf(1);
  const auto stored_bytes = [&](MainWeightForm form, StateTypes states) {
    request.spec.compute = ComputeType::kBF16;
    request.spec.optimizer.main_weights = form;
    request.spec.optimizer.state_types = states;
    const ShardingPlan plan = Make(request);
    int64_t bytes = 0;
    for (const ProgramBuffer& buffer : plan.buffers) {
      const bool stored = buffer.kind == BufferKind::kMainWeight ||
                          buffer.kind == BufferKind::kModelWeight ||
                          buffer.kind == BufferKind::kState;
      bytes += stored ? buffer.bytes : 0;
    }
    int64_t elements = 0;
    for (const GroupLayout& group : plan.groups) {
      elements += group.layout.total_elements();
    }
    EXPECT_EQ(bytes % elements, 0);
    return bytes / elements;
  };
  EXPECT_EQ(stored_bytes(MainWeightForm::kF32, kF32States), 14);
  EXPECT_EQ(stored_bytes(MainWeightForm::kBF16Remainder, kF32States), 12);
  EXPECT_EQ(stored_bytes(MainWeightForm::kF32, kBf16States), 10);
  EXPECT_EQ(stored_bytes(MainWeightForm::kBF16Remainder, kBf16States), 8);
  EXPECT_EQ(stored_bytes(MainWeightForm::kF32, kFp8States), 8);
  EXPECT_EQ(stored_bytes(MainWeightForm::kBF16Remainder, kFp8States), 6);
  EXPECT_EQ(stored_bytes(MainWeightForm::kBF16Remainder, {DType::kF8E4M3, DType::kBF16}), 7);
  request.spec.compute = ComputeType::kF32;
  EXPECT_THAT(std::string(BuildShardingPlan(request).status().message()),
              HasSubstr("training.optimizer.mainWeights: bf16_remainder needs"));
}

TEST(PlanReport, Bf16HalvesWhatIsNotStateOrGradient) {
  PlanRequest request = RequestOf(4);
  const ShardingPlan wide = Make(request);
  request.spec.compute = ComputeType::kBF16;
  const ShardingPlan narrow = Make(request);
  const auto bytes_of = [](const ShardingPlan& plan, BufferKind kind) {
    int64_t bytes = 0;
    for (const ProgramBuffer& buffer : plan.buffers) {
      bytes += buffer.kind == kind ? buffer.bytes : 0;
    }
    return bytes;
  };
  EXPECT_EQ(bytes_of(narrow, BufferKind::kGathered) * 2, bytes_of(wide, BufferKind::kGathered));
  for (const BufferKind kind :
       {BufferKind::kMainWeight, BufferKind::kState, BufferKind::kMainGrad, BufferKind::kStaging}) {
    EXPECT_EQ(bytes_of(narrow, kind), bytes_of(wide, kind)) << BufferKindName(kind);
  }
  // The shard of bf16 weights is a buffer of its own.
  EXPECT_EQ(bytes_of(wide, BufferKind::kModelWeight), 0);
  EXPECT_EQ(bytes_of(narrow, BufferKind::kModelWeight) * 2,
            bytes_of(narrow, BufferKind::kMainWeight));
  EXPECT_LT(bytes_of(narrow, BufferKind::kSaved), bytes_of(wide, BufferKind::kSaved) * 6 / 10);
  EXPECT_EQ(StepWire(narrow).gathers * 2, StepWire(wide).gathers);
  EXPECT_EQ(StepWire(narrow).reduces, StepWire(wide).reduces);
  // Two units fit where two of fp32 did: half the bytes, and no more gathers.
  EXPECT_EQ(narrow.options.gather_window_bytes * 2, wide.options.gather_window_bytes);
  EXPECT_EQ(narrow.options.staging_window_bytes, wide.options.staging_window_bytes);
  for (size_t i = 0; i < wide.programs.size(); ++i) {
    EXPECT_EQ(narrow.programs[i].instructions.size(), wide.programs[i].instructions.size());
  }
}

TEST(PlanReport, Bf16WireHalvesReducesAndSaysWhatRoundingCosts) {
  PlanRequest request = RequestOf(4);
  for (const bool shared : {true, false}) {
    request.shared_memory = shared;
    request.spec.gradient_wire = WireType::kF32;
    const ShardingPlan wide = Make(request);
    request.spec.gradient_wire = WireType::kBF16;
    const ShardingPlan narrow = Make(request);
    EXPECT_EQ(StepWire(narrow).reduces * 2, StepWire(wide).reduces);
    EXPECT_EQ(StepWire(narrow).gathers, StepWire(wide).gathers);
    EXPECT_EQ(RoundedInPlaceBytes(wide), 0);
    // Every turn reads all gradients as fp32 and writes them as bf16, for four ranks' shards: more
    // than the 2 bytes that are saved of each of three peers' shards.
    EXPECT_EQ(RoundedInPlaceBytes(narrow), StepWire(wide).reduces / 3 * 4 / 4 * 6);
    EXPECT_GT(RoundedInPlaceBytes(narrow), StepWire(wide).reduces - StepWire(narrow).reduces);
    EXPECT_EQ(PlanSummary(wide).find("bf16"), std::string::npos);
    const std::string summary = PlanSummary(narrow);
    EXPECT_NE(summary.find("gradients travel as bf16"), std::string::npos) << summary;
    EXPECT_EQ(summary.find("more than peers on this host save") != std::string::npos, shared);
  }
}

TEST(PlanReport, WireOfAStepIsTheSumOfItsGroups) {
  PlanRequest request = RequestOf(4);
  const ShardingPlan plan = Make(request);
  EXPECT_EQ(StepWire(plan).replicate(), 0);
  // Two turns; every unit's shards come from three others, twice or once per turn; each gradient is
  // reduced in both.
  int64_t shards = 0;
  for (const GroupLayout& group : plan.groups) {
    shards += group.layout.shard_elements * 4;
  }
  EXPECT_EQ(StepWire(plan).reduces, 2 * 3 * shards);
  EXPECT_LE(StepWire(plan).gathers, 2 * 2 * 3 * shards);
  EXPECT_GT(StepWire(plan).gathers, 2 * 3 * shards);
}

TEST(StepTimeline, StreamsAreInOrderAndWaitsAreKept) {
  const ShardingPlan plan = Make(RequestOf(4));
  const DeviceKind device = ParseDevices("4xH100-80G", false)->kind;
  for (const StepProgram& program : plan.programs) {
    const auto timed = SimulateProgram(plan, program, device, 4);
    ASSERT_EQ(timed.size(), program.instructions.size());
    int64_t free_at[8] = {};
    for (size_t i = 0; i < timed.size(); ++i) {
      const Instruction& at = program.instructions[i];
      EXPECT_GE(timed[i].end_ns, timed[i].begin_ns);
      for (const InstructionId wait : at.waits) {
        EXPECT_GE(timed[i].begin_ns, timed[static_cast<size_t>(wait)].end_ns);
      }
      if (at.op != OpCode::kFree) {
        EXPECT_GE(timed[i].begin_ns, free_at[static_cast<size_t>(at.stream)]);
        free_at[static_cast<size_t>(at.stream)] = timed[i].end_ns;
      }
    }
  }
  const StepTimes times = PredictStep(plan, device);
  EXPECT_GT(times.compute_ns, 0);
  EXPECT_GT(times.step_ns, times.compute_ns);
}

// The remedy of the list that begins with `change`, or nullptr.
const Remedy* Find(const std::vector<Remedy>& remedies, const std::string& change) {
  const auto found = std::find_if(remedies.begin(), remedies.end(), [&](const Remedy& remedy) {
    return remedy.change.rfind(change, 0) == 0;
  });
  return found == remedies.end() ? nullptr : &*found;
}

TEST(PlanFit, RemediesAreTriedInOrderAndEachWasPlanned) {
  PlanRequest request = RequestOf(2);
  request.spec.strategy = Strategy::kNoShard;
  const ShardingPlan plan = Make(request);
  const int64_t usable = PeakBytes(plan) * 9 / 10;
  const std::vector<Remedy> remedies = TryRemedies(request, usable);
  std::vector<std::string> order;
  for (const Remedy& remedy : remedies) {
    order.push_back(remedy.change.substr(0, remedy.change.find(':')));
    EXPECT_EQ(remedy.fits, remedy.status.ok() && remedy.peak_bytes <= usable) << remedy.change;
  }
  order.erase(std::unique(order.begin(), order.end()), order.end());
  EXPECT_THAT(order,
              ::testing::ElementsAre("devices.count",
                                     "parallelism.strategy",
                                     "parallelism.recompute",
                                     "training.microBatch",
                                     "determinism.virtualRanks",
                                     "parallelism.gatherWindow and stagingWindow",
                                     "training.optimizer.offload.fraction",
                                     "precision.compute"));
  // What is named has just that peak.
  const Remedy* const zero3 = Find(remedies, "parallelism.strategy: optim");
  ASSERT_NE(zero3, nullptr);
  PlanRequest changed = request;
  changed.spec.strategy = Strategy::kOptim;
  EXPECT_EQ(zero3->peak_bytes, PeakBytes(Make(changed)));
  const std::string message(DoesNotFit(plan, usable, remedies).message());
  EXPECT_THAT(message, HasSubstr(BytesText(PeakBytes(plan)) + " of " + BytesText(usable)));
  EXPECT_THAT(message, HasSubstr("; fits with "));
}

TEST(PlanFit, WhatDoesNotFitAloneMayFitTogether) {
  PlanRequest request = RequestOf(2);
  request.spec.strategy = Strategy::kNoShard;
  PlanRequest strongest = request;
  strongest.spec.strategy = Strategy::kOptimGradsParams;
  strongest.spec.recompute = RecomputePolicy::kBlock;
  const int64_t usable = PeakBytes(Make(strongest)) + 4096;
  const std::vector<Remedy> remedies = TryRemedies(request, usable);
  ASSERT_FALSE(remedies.empty());
  EXPECT_TRUE(std::any_of(
      remedies.begin(), remedies.end(), [](const Remedy& remedy) { return remedy.fits; }));
  // Nothing fits into nothing, and that is said.
  const std::vector<Remedy> none = TryRemedies(request, 1);
  const ShardingPlan plan = Make(request);
  EXPECT_THAT(std::string(DoesNotFit(plan, 1, none).message()),
              HasSubstr("changes that were planned fits"));
}

// A job for GPUs, in these forms.
PlanRequest GpuRequest(ComputeType compute, MainWeightForm main_weights, StateTypes moments) {
  PlanRequest request = RequestOf(2);
  request.spec.cpu_devices = false;
  request.spec.compute = compute;
  request.spec.optimizer.main_weights = main_weights;
  request.spec.optimizer.state_types = moments;
  return request;
}

constexpr char kOffloadFraction[] = "training.optimizer.offload.fraction: ";

// The changes that begin with one of the fields of number forms and change nothing else, offload
// apart.
std::vector<std::string> Forms(const std::vector<Remedy>& remedies) {
  std::vector<std::string> forms;
  for (const Remedy& remedy : remedies) {
    const bool alone = remedy.change.find(';') == std::string::npos &&
                       remedy.change.find(kOffloadFraction) == std::string::npos;
    if (alone && (remedy.change.rfind("precision.", 0) == 0 ||
                  remedy.change.rfind("training.optimizer.", 0) == 0)) {
      forms.push_back(remedy.change);
    }
  }
  return forms;
}

TEST(PlanFit, JobsAreOfferedNarrowerFormsThatTheyDoNotHaveYet) {
  constexpr auto kF32 = ComputeType::kF32;
  constexpr auto kBF16 = ComputeType::kBF16;
  constexpr auto kWide = MainWeightForm::kF32;
  constexpr auto kRemainder = MainWeightForm::kBF16Remainder;
  const auto offered = [](const PlanRequest& request) { return Forms(TryRemedies(request, 1)); };
  const std::string remainder = "training.optimizer.mainWeights: bf16_remainder";
  const std::string moments = "training.optimizer.stateDtype: bf16";
  const std::string fp8 = "training.optimizer.stateDtype: fp8";
  const std::string compute = "precision.compute: bf16";
  const std::string split = compute + ", " + remainder;
  EXPECT_THAT(offered(GpuRequest(kBF16, kWide, kF32States)),
              ::testing::ElementsAre(
                  remainder, moments, remainder + ", " + moments, remainder + ", " + fp8));
  EXPECT_THAT(offered(GpuRequest(kBF16, kRemainder, kF32States)),
              ::testing::ElementsAre(moments, fp8));
  EXPECT_THAT(offered(GpuRequest(kBF16, kWide, kBf16States)),
              ::testing::ElementsAre(remainder, remainder + ", " + fp8));
  EXPECT_THAT(offered(GpuRequest(kBF16, kRemainder, kBf16States)), ::testing::ElementsAre(fp8));
  EXPECT_THAT(offered(GpuRequest(kBF16, kRemainder, kFp8States)), ::testing::IsEmpty());
  PlanRequest wide = GpuRequest(kF32, kWide, kF32States);
  for (const bool cpu : {false, true}) {
    wide.spec.cpu_devices = cpu;
    EXPECT_THAT(offered(wide),
                ::testing::ElementsAre(compute, split, split + ", " + moments, split + ", " + fp8));
  }
}

// To a disk, whose folder a job must name, or to memory of hosts.
TEST(PlanFit, JobsAreOfferedToOffloadMoreThanTheyDo) {
  PlanRequest request = GpuRequest(ComputeType::kF32, MainWeightForm::kF32, kF32States);
  for (const bool cpu : {false, true}) {
    request.spec.cpu_devices = cpu;
    std::vector<std::string> offered;
    for (const Remedy& remedy : TryRemedies(request, 1)) {
      if (remedy.change.find(kOffloadFraction) == 0 &&
          remedy.change.find(';') == std::string::npos) {
        offered.push_back(remedy.change.substr(std::string(kOffloadFraction).size()));
      }
    }
    const std::string folder = cpu ? ", with offload.path" : "";
    EXPECT_THAT(offered, ::testing::ElementsAre("0.5" + folder, "1" + folder));
  }
}

// A CPU needs no memory of cuDNN's.
TEST(PlanReport, Bf16OfCpusReservesNothingForAttention) {
  PlanRequest request = RequestOf(2);
  request.spec.compute = ComputeType::kBF16;
  request.spec.gradient_wire = WireType::kBF16;
  for (const bool cpu : {false, true}) {
    request.spec.cpu_devices = cpu;
    const ShardingPlan plan = Make(request);
    EXPECT_EQ(plan.options.weight_type, DType::kBF16);
    EXPECT_EQ(plan.options.staged_type, DType::kBF16);
    EXPECT_EQ(plan.options.attention_workspace_bytes == 0, cpu);
  }
}

TEST(PlanFit, NarrowerFormsSaveWhatIsSaid) {
  const PlanRequest wide = GpuRequest(ComputeType::kBF16, MainWeightForm::kF32, kF32States);
  const int64_t needed = PeakBytes(Make(wide));
  const ShardingPlan narrow =
      Make(GpuRequest(ComputeType::kBF16, MainWeightForm::kBF16Remainder, kF32States));
  const int64_t usable = PeakBytes(narrow);
  ASSERT_LT(usable, needed);
  const std::vector<Remedy> remedies = TryRemedies(wide, usable);
  const Remedy* const remainder = Find(remedies, "training.optimizer.mainWeights");
  ASSERT_NE(remainder, nullptr);
  EXPECT_TRUE(remainder->fits);
  EXPECT_EQ(remainder->peak_bytes, usable);
  EXPECT_EQ(remainder->saved_bytes, needed - usable);
  // Two bytes of every parameter that a rank owns, but for what alignment takes.
  int64_t owned = 0;
  for (const GroupLayout& group : narrow.groups) {
    owned += group.layout.shard_elements;
  }
  EXPECT_NEAR(static_cast<double>(remainder->saved_bytes), 2.0 * static_cast<double>(owned), 3e5);
  EXPECT_THAT(std::string(DoesNotFit(Make(wide), usable, remedies).message()),
              HasSubstr("fits with training.optimizer.mainWeights: bf16_remainder (" +
                        BytesText(usable) + ", " + BytesText(needed - usable) + " less)"));
}

// Of cpu and of gpu jobs: every number named is that of a plan.
TEST(PlanFit, EveryRemedySavesWhatItSays) {
  for (const bool cpu : {true, false}) {
    PlanRequest request =
        cpu ? RequestOf(2) : GpuRequest(ComputeType::kBF16, MainWeightForm::kF32, kF32States);
    request.spec.strategy = Strategy::kOptim;
    const int64_t needed = PeakBytes(Make(request));
    const std::vector<Remedy> remedies = TryRemedies(request, needed / 3);
    int alone = 0;
    int64_t together = 0;  // saved by the changes so far
    for (const Remedy& remedy : remedies) {
      if (!remedy.status.ok()) {
        EXPECT_EQ(remedy.saved_bytes, 0);
        continue;
      }
      EXPECT_EQ(remedy.saved_bytes, needed - remedy.peak_bytes) << remedy.change;
      EXPECT_EQ(remedy.fits, remedy.peak_bytes <= needed / 3) << remedy.change;
      const bool joined = remedy.change.find("; ") != std::string::npos;
      alone += joined ? 0 : 1;
      if (joined) {
        EXPECT_GT(remedy.saved_bytes, together) << "joined where it does not help";
        together = remedy.saved_bytes;
      }
    }
    EXPECT_GT(alone, 5) << "cpu " << cpu;
  }
}

TEST(PlanPrinter, EqualUnitsShareALine) {
  const ShardingPlan plan = Make(RequestOf(4));
  const std::string text = PlanSummary(plan);
  EXPECT_THAT(text, HasSubstr("layers.1 .. layers.4 (4)"));
  EXPECT_THAT(text, HasSubstr("predicted peak"));
  const std::string verbose = PlanSummary(plan, {.verbose = true});
  EXPECT_THAT(verbose, HasSubstr("layers.3 "));
  EXPECT_THAT(verbose, HasSubstr("main_weight/layers.3"));
}

}  // namespace
}  // namespace ravel::plan
