// Which state leaves memory: shares of one rank's bytes, never more, the same on all ranks, and
// nothing that is not state.

#include "common/plan/program/program_offload.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/plan/check/program_checker.h"
#include "common/plan/plan_proto.h"
#include "common/plan/report/plan_fit.h"
#include "common/plan/report/plan_printer.h"
#include "common/plan/report/plan_report.h"
#include "common/plan/save/save_headers.h"
#include "common/plan/save/save_plan.h"
#include "tests/common/plan/plan_testing.h"

namespace ravel::plan {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

PlanRequest OffloadRequest(double fraction, int64_t ranks = 1) {
  PlanRequest request = {.spec = testing::SpecOf(testing::Llama(64, 4, 96, 257), 4),
                         .ranks = ranks};
  request.spec.optimizer.offload = {.fraction = fraction, .path = "/disk"};
  return request;
}

ShardingPlan MakeOffloaded(const PlanRequest& request) {
  const absl::StatusOr<ShardingPlan> plan = BuildShardingPlan(request);
  EXPECT_TRUE(plan.ok()) << plan.status();
  return *plan;
}

OffloadFacts OffloadFactsOf(const ShardingPlan& plan) {
  return OffloadOf(plan.buffers, plan.groups, plan.options);
}

int64_t OffloadableBytes(const ShardingPlan& plan, GroupId group) {
  int64_t bytes = 0;
  for (const ProgramBuffer& buffer : plan.buffers) {
    const bool counts = buffer.group == group && MayOffload(buffer, plan.groups, plan.options);
    bytes += counts ? buffer.bytes : 0;
  }
  return bytes;
}

TEST(ProgramOffload, OffloadFractionIsLocalBytes) {
  for (const Strategy strategy :
       {Strategy::kNoShard, Strategy::kOptim, Strategy::kOptimGradsParams}) {
    for (const int64_t ranks : {1, 2, 3, 4}) {
      for (const double fraction : {0.0, 0.001, 0.2, 0.37, 0.5, 0.999, 1.0}) {
        PlanRequest request = OffloadRequest(fraction, ranks);
        request.spec.strategy = strategy;
        const ShardingPlan plan = MakeOffloaded(request);
        const OffloadFacts facts = OffloadFactsOf(plan);
        // Two fp32 moments of what one rank stores.
        int64_t local = 0;
        for (const GroupId group : plan.groups.ids()) {
          local += StoredRange(plan, group, 0).size() * 8;
        }
        EXPECT_EQ(facts.optimizer_bytes, local);
        const auto most = static_cast<int64_t>(fraction * static_cast<double>(local));
        EXPECT_LE(facts.offloaded_bytes, most);
        // The groups that stay would not have fitted.
        for (const GroupId group : plan.groups.ids()) {
          const bool leaves =
              std::find(facts.groups.begin(), facts.groups.end(), group) != facts.groups.end();
          EXPECT_TRUE(leaves || facts.offloaded_bytes + OffloadableBytes(plan, group) > most);
        }
        if (fraction == 1.0) {
          EXPECT_EQ(facts.offloaded_bytes, local);
        }
        EXPECT_LE(facts.offloaded_bytes, plan.memory.offload_bytes);
      }
    }
  }
}

// A plan has nothing that differs by rank; keys and boxes of a save are those without offload.
TEST(ProgramOffload, OffloadKeysEqualOnAllRanks) {
  for (const double fraction : {0.37, 1.0}) {
    for (const int64_t ranks : {1, 3, 4}) {
      PlanRequest request = OffloadRequest(fraction, ranks);
      request.spec.optimizer.state_types = kFp8States;
      const ShardingPlan offloaded = MakeOffloaded(request);
      request.spec.optimizer.offload = {};
      const ShardingPlan whole = MakeOffloaded(request);
      EXPECT_EQ(SavePlanHash(*BuildSavePlan(offloaded)), SavePlanHash(*BuildSavePlan(whole)));
      ASSERT_EQ(offloaded.buffers.size(), whole.buffers.size());
      for (const BufferId i : whole.buffers.ids()) {
        ProgramBuffer buffer = offloaded.buffers[i];
        buffer.memory = whole.buffers[i].memory;
        EXPECT_EQ(buffer, whole.buffers[i]);
      }
      EXPECT_EQ(offloaded.programs.size(), whole.programs.size());
    }
  }
}

TEST(ProgramOffload, MainWeightsLeaveWhereNothingGathersThem) {
  const auto kinds_of = [](const ShardingPlan& plan) {
    std::set<BufferKind> kinds;
    for (const ProgramBuffer& buffer : plan.buffers) {
      if (buffer.memory == MemoryKind::kOffload) {
        EXPECT_TRUE(plan.groups[buffer.group].trainable) << buffer.name;
        kinds.insert(buffer.kind);
      }
    }
    return kinds;
  };
  for (const bool shared : {false, true}) {
    PlanRequest request = OffloadRequest(1, 2);
    request.shared_memory = shared;
    request.spec.freeze = {"*layers.1.*"};
    EXPECT_EQ(kinds_of(MakeOffloaded(request)), (std::set<BufferKind>{BufferKind::kState}));
    EXPECT_THAT(PlanSummary(MakeOffloaded(request), {}), HasSubstr("main weights stay in memory"));
    request.spec.compute = ComputeType::kBF16;
    request.spec.optimizer.state_types = kFp8States;
    for (const MainWeightForm form : {MainWeightForm::kF32, MainWeightForm::kBF16Remainder}) {
      request.spec.optimizer.main_weights = form;
      EXPECT_EQ(kinds_of(MakeOffloaded(request)),
                (std::set<BufferKind>{
                    BufferKind::kState, BufferKind::kStateScale, BufferKind::kMainWeight}));
    }
  }
}

PlanRequest QuantizedRequest(Recipe recipe, double fraction, int64_t ranks = 2) {
  PlanRequest request = {.spec = testing::RecipeSpecOf(recipe), .ranks = ranks};
  request.spec.optimizer.offload = {.fraction = fraction, .path = "/disk"};
  return request;
}

bool IsQuantizedMain(const ShardingPlan& plan, const ProgramBuffer& buffer) {
  return buffer.kind == BufferKind::kMainWeight &&
         plan.groups[buffer.group].recipe != Recipe::kNone;
}

PlanRequest OnDevices(PlanRequest request) {
  request.spec.cpu_devices = false;
  request.spec.recipe.emulation = {GemmPath::kDequantBf16};
  request.spec.optimizer.offload.path = "";
  return request;
}

// To a file, or to the host of a device, which both make codes of them.
TEST(ProgramOffload, MainWeightsOfCodesLeave) {
  for (const testing::RecipeCase& recipe : testing::RecipeCases()) {
    for (const Strategy strategy : {Strategy::kNoShard,
                                    Strategy::kOptim,
                                    Strategy::kOptimGrads,
                                    Strategy::kOptimGradsParams}) {
      for (const bool on_device : {false, true}) {
        PlanRequest request = QuantizedRequest(recipe.recipe, 1);
        request.spec.strategy = strategy;
        const ShardingPlan plan = MakeOffloaded(on_device ? OnDevices(request) : request);
        int quantized = 0;
        for (const ProgramBuffer& buffer : plan.buffers) {
          if (IsQuantizedMain(plan, buffer)) {
            ++quantized;
            EXPECT_EQ(buffer.memory, MemoryKind::kOffload) << recipe.name << ", " << buffer.name;
          }
        }
        EXPECT_GT(quantized, 0);
      }
    }
  }
}

// All of 4 bytes per parameter of main weights leave, besides two fp32 moments.
TEST(ProgramOffload, ThePeakOfQuantizedJobsFallsByWhatLeaves) {
  for (const testing::RecipeCase& recipe : testing::RecipeCases()) {
    const int64_t before = PeakBytes(MakeOffloaded(QuantizedRequest(recipe.recipe, 0)));
    const ShardingPlan plan = MakeOffloaded(QuantizedRequest(recipe.recipe, 1));
    const OffloadFacts facts = OffloadFactsOf(plan);
    int64_t local = 0;
    for (const GroupId group : plan.groups.ids()) {
      local += StoredRange(plan, group, 0).size() * 12;
    }
    EXPECT_EQ(facts.offloaded_bytes, local) << recipe.name;
    EXPECT_NEAR(static_cast<double>(PeakBytes(plan)),
                static_cast<double>(before - facts.offloaded_bytes + facts.window_bytes),
                0.02 * static_cast<double>(before));
  }
}

// While codes are made, chunks of the update may still be leaving: the window has room for both.
TEST(ProgramOffload, TheWindowHasRoomForThePartThatCodesAreMadeOf) {
  PlanRequest request = QuantizedRequest(Recipe::kMxFp8, 1, 1);
  request.spec.model = testing::Llama(1024, 8, 4096, 257);
  const ShardingPlan plan = MakeOffloaded(request);
  int64_t most = 0;
  for (const GroupId group : plan.groups.ids()) {
    const int64_t chunks = DivCeil(StoredRange(plan, group, 0).size(), kOffloadChunkElements);
    most = std::max(most, DivCeil(OffloadableBytes(plan, group), chunks));
  }
  EXPECT_EQ(OffloadFactsOf(plan).window_bytes,
            most * kOffloadChunksAlive + kOffloadChunkElements * 4);
}

// The refusal of a plan after `change` of the first instruction for which it returns true.
std::string RefusalOf(ShardingPlan plan,
                      const std::function<bool(const ShardingPlan&, Instruction&)>& change) {
  for (StepProgram& program : plan.programs) {
    for (Instruction& at : program.instructions) {
      if (change(plan, at)) {
        return std::string(CheckPlan(plan).message());
      }
    }
  }
  return "nothing was changed";
}

// Only amaxes and codes are made of offloaded main weights, and only by reading.
TEST(ProgramOffload, OtherUsesOfOffloadedMainWeightsAreRefused) {
  const ShardingPlan plan = MakeOffloaded(QuantizedRequest(Recipe::kNvFp4, 1));
  ASSERT_TRUE(CheckPlan(plan).ok());
  for (const OpCode op : {OpCode::kAmaxReduce, OpCode::kRefreshWeights}) {
    const auto main_of = [op](const ShardingPlan& of, Instruction& at) {
      const auto main =
          std::find_if(at.operands.begin(), at.operands.end(), [&](const Operand& operand) {
            return IsQuantizedMain(of, of.buffers[operand.buffer]);
          });
      return at.op == op && main != at.operands.end() ? &*main : nullptr;
    };
    EXPECT_THAT(RefusalOf(plan,
                          [&](const ShardingPlan& of, Instruction& at) {
                            Operand* const main = main_of(of, at);
                            return main != nullptr && (main->access = Access::kWrite, true);
                          }),
                HasSubstr("K14"));
    // A moment in place of the main weight.
    EXPECT_THAT(RefusalOf(plan,
                          [&](const ShardingPlan& of, Instruction& at) {
                            Operand* const main = main_of(of, at);
                            if (main == nullptr) {
                              return false;
                            }
                            main->buffer = FindBuffer(of.buffers,
                                                      {.kind = BufferKind::kState,
                                                       .owner = of.buffers[main->buffer].group});
                            return true;
                          }),
                HasSubstr("K14"));
    // The main weight of a group without a recipe.
    EXPECT_THAT(RefusalOf(plan,
                          [&](const ShardingPlan& of, Instruction& at) {
                            Operand* const main = main_of(of, at);
                            if (main == nullptr) {
                              return false;
                            }
                            for (const GroupId group : of.groups.ids()) {
                              if (of.groups[group].recipe == Recipe::kNone) {
                                main->buffer = StoredWeight(of, group);
                              }
                            }
                            return true;
                          }),
                HasSubstr("K14"));
  }
  // A gather of main weights.
  EXPECT_THAT(RefusalOf(plan,
                        [](const ShardingPlan& of, Instruction& at) {
                          const bool gathers = at.op == OpCode::kGather && at.group >= 0 &&
                                               of.groups[at.group].recipe != Recipe::kNone;
                          if (gathers) {
                            at.operands.push_back({.buffer = StoredWeight(of, at.group),
                                                   .access = Access::kRead,
                                                   .role = Role::kStored});
                          }
                          return gathers;
                        }),
              HasSubstr("K14"));
}

// A device's host makes codes where it has main weights, beside copies up; of groups that stay, the
// device does, which takes amaxes in the update.
TEST(ProgramOffload, AHostMakesTheCodesOfItsMainWeights) {
  for (const Recipe recipe : {Recipe::kMxFp8, Recipe::kCurrent}) {
    const ShardingPlan plan = MakeOffloaded(OnDevices(QuantizedRequest(recipe, 0.5)));
    const IdVector<GroupId, bool> on_host =
        HostUpdatesOf(plan.buffers, plan.groups, plan.options).of;
    int64_t refreshed[] = {0, 0};
    const auto check = [&](const Instruction& at) {
      const bool host = on_host[at.group];
      EXPECT_EQ(at.stream, host ? StreamId::kUpload : StreamId::kCompute);
      if (at.op == OpCode::kRefreshWeights) {
        ++refreshed[host ? 1 : 0];
        const ProgramBuffer& main = plan.buffers[StoredWeight(plan, at.group)];
        EXPECT_EQ(main.memory == MemoryKind::kOffload, host);
      } else if (plan.groups[at.group].recipe != Recipe::kNone) {
        EXPECT_EQ(BufferOf(at, Role::kAmax) >= 0, !host);
      }
    };
    for (const StepProgram& program : plan.programs) {
      for (const Instruction& at : program.instructions) {
        if (at.op == OpCode::kRefreshWeights || at.op == OpCode::kOptimizerStep) {
          check(at);
        }
      }
    }
    EXPECT_GT(refreshed[0], 0);
    EXPECT_GT(refreshed[1], 0);
    const HostCodeBytes bytes = HostCodeBytesOf(plan.buffers, plan.groups, plan.options);
    EXPECT_GT(bytes.amaxes, 0);
    EXPECT_EQ(bytes.delayed, 0);
  }
  const ShardingPlan on_disk = MakeOffloaded(QuantizedRequest(Recipe::kMxFp8, 1));
  EXPECT_EQ(HostCodeBytesOf(on_disk.buffers, on_disk.groups, on_disk.options).all(), 0);
}

// The stream of a refresh follows from where main weights are.
TEST(ProgramOffload, CodesOfAHostOnAnotherStreamAreRefused) {
  const ShardingPlan plan = MakeOffloaded(OnDevices(QuantizedRequest(Recipe::kMxFp8, 1)));
  EXPECT_THAT(RefusalOf(plan,
                        [](const ShardingPlan&, Instruction& at) {
                          const bool refreshes = at.op == OpCode::kRefreshWeights;
                          at.stream = refreshes ? StreamId::kCompute : at.stream;
                          return refreshes;
                        }),
              HasSubstr("stream"));
}

// Takes groups from the end, and passes over one that is too large.
TEST(ProgramOffload, LeavesFromTheEndOfTheForwardOrder) {
  const ShardingPlan plan = MakeOffloaded(OffloadRequest(0.3));
  const OffloadFacts facts = OffloadFactsOf(plan);
  ASSERT_FALSE(facts.groups.empty());
  EXPECT_LT(facts.groups.size(), plan.groups.size());
  EXPECT_EQ(facts.groups.back(), plan.groups.last_id());
  PlanRequest large = OffloadRequest(0.2);
  large.spec.model = testing::Llama(64, 4, 96, 4099);
  const ShardingPlan headless = MakeOffloaded(large);
  const OffloadFacts rest = OffloadFactsOf(headless);
  ASSERT_FALSE(rest.groups.empty());
  EXPECT_LT(rest.groups.back(), headless.groups.last_id());
}

TEST(ProgramOffload, ThePeakFallsByWhatLeavesButForTheWindow) {
  for (const int64_t ranks : {1, 2}) {
    const int64_t before = PeakBytes(MakeOffloaded(OffloadRequest(0, ranks)));
    const ShardingPlan plan = MakeOffloaded(OffloadRequest(1, ranks));
    const OffloadFacts facts = OffloadFactsOf(plan);
    EXPECT_GT(facts.window_bytes, 0);
    const int64_t expected = before - facts.offloaded_bytes + facts.window_bytes;
    EXPECT_NEAR(static_cast<double>(PeakBytes(plan)),
                static_cast<double>(expected),
                0.02 * static_cast<double>(before));
    const MemoryReport report = ReportMemory(plan);
    EXPECT_EQ(report.total_bytes, PeakBytes(plan));
    EXPECT_THAT(PlanSummary(plan, {}), HasSubstr("offloaded to disk"));
  }
  EXPECT_THAT(PlanSummary(MakeOffloaded(OffloadRequest(0)), {}), Not(HasSubstr("offload")));
}

TEST(ProgramOffload, PlansRoundTripAndOthersAreRefused) {
  const ShardingPlan plan = MakeOffloaded(OffloadRequest(0.5, 2));
  ASSERT_GT(plan.memory.offload_bytes, 0);
  const absl::StatusOr<ShardingPlan> back = ParsePlan(SerializePlan(plan));
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(SerializePlan(*back), SerializePlan(plan));
  EXPECT_EQ(back->memory.offload_bytes, plan.memory.offload_bytes);
  for (const double wrong : {-0.1, 1.5, std::nan("")}) {
    PlanRequest request = OffloadRequest(wrong);
    EXPECT_THAT(std::string(BuildShardingPlan(request).status().message()),
                HasSubstr("training.optimizer.offload.fraction"));
  }
}

// A request of a GPU job.
PlanRequest HostRequest(double fraction, int64_t ranks = 1) {
  PlanRequest request = OffloadRequest(fraction, ranks);
  request.spec.cpu_devices = false;
  request.spec.optimizer.offload.path = "";
  return request;
}

const StepProgram& UpdatingProgram(const ShardingPlan& plan) {
  const StepSlot last = SlotOf(plan.lanes, plan.lanes.programs() - 1);
  return plan.program(last.phase, last.part);
}

// Updates of a device's host run on a stream of their own, after the copies that they wait for.
TEST(ProgramOffload, HostsOfDevicesUpdateWhatTheyHold) {
  for (const Strategy strategy :
       {Strategy::kNoShard, Strategy::kOptim, Strategy::kOptimGrads, Strategy::kOptimGradsParams}) {
    for (const double fraction : {0.0, 0.37, 1.0}) {
      PlanRequest request = HostRequest(fraction, 2);
      request.spec.strategy = strategy;
      const ShardingPlan plan = MakeOffloaded(request);
      const std::vector<GroupId> offloaded = OffloadFactsOf(plan).groups;
      const std::set<GroupId> on_host(offloaded.begin(), offloaded.end());
      std::set<GroupId> down;
      std::vector<GroupId> up;
      for (const Instruction& at : UpdatingProgram(plan).instructions) {
        if (at.op == OpCode::kOffloadGradient) {
          EXPECT_EQ(at.stream, StreamId::kDownload);
          EXPECT_TRUE(down.insert(at.group).second);
        } else if (at.op == OpCode::kOptimizerStep) {
          const bool host = on_host.count(at.group) > 0;
          EXPECT_EQ(at.stream, host ? StreamId::kUpload : StreamId::kCompute);
          EXPECT_EQ(down.count(at.group) > 0, host);
          if (host) {
            up.push_back(at.group);
          }
        }
      }
      EXPECT_EQ(down, on_host);
      // As the next forward wants them.
      EXPECT_TRUE(std::is_sorted(up.begin(), up.end()));
      const absl::StatusOr<ShardingPlan> back = ParsePlan(SerializePlan(plan));
      ASSERT_TRUE(back.ok()) << back.status();
      EXPECT_EQ(SerializePlan(*back), SerializePlan(plan));
    }
  }
}

// A slot for each chunk, as far as the ring's bytes reach.
TEST(ProgramOffload, EveryChunkHasASlotWithinTheBoundOfTheRing) {
  const auto ring_of = [](const ShardingPlan& plan) {
    return HostRingOf(plan.buffers, plan.groups, plan.options, kHostChunkElements);
  };
  PlanRequest request = HostRequest(1);
  request.spec.model = testing::Llama(2048, 3, 8192, 32000);
  const ShardingPlan plan = MakeOffloaded(request);
  int64_t chunks = 0;
  for (const GroupLayout& group : plan.groups) {
    chunks += DivCeil(group.layout.shard_elements, kHostChunkElements);
  }
  EXPECT_GT(chunks, kHostChunks);
  EXPECT_EQ(ring_of(plan).slots, chunks);
  request.spec.model = testing::Llama(2048, 30, 8192, 32000);
  constexpr int64_t kMostBytes = int64_t{8} << 30;
  const HostRing large = ring_of(MakeOffloaded(request));
  EXPECT_GT(large.slots, kHostChunks);
  EXPECT_LE(large.slots * (large.slot_bytes + large.kept_bytes), kMostBytes);
  EXPECT_GT((large.slots + 1) * (large.slot_bytes + large.kept_bytes), kMostBytes);
}

TEST(ProgramOffload, MemoryOfDevicesFallsByWhatLeaves) {
  for (const ComputeType compute : {ComputeType::kF32, ComputeType::kBF16}) {
    PlanRequest request = HostRequest(0, 2);
    request.spec.compute = compute;
    const int64_t before = PeakBytes(MakeOffloaded(request));
    request.spec.optimizer.offload.fraction = 1;
    const ShardingPlan plan = MakeOffloaded(request);
    const OffloadFacts facts = OffloadFactsOf(plan);
    EXPECT_EQ(facts.window_bytes, 0);
    EXPECT_GT(facts.pinned_bytes, 0);
    EXPECT_EQ(facts.host_bytes(), facts.offloaded_bytes + facts.pinned_bytes + facts.kept_bytes);
    EXPECT_NEAR(static_cast<double>(PeakBytes(plan)),
                static_cast<double>(before - facts.offloaded_bytes),
                0.01 * static_cast<double>(before));
    const std::string text = PlanSummary(plan, {});
    EXPECT_THAT(text, HasSubstr("offloaded to the host"));
    EXPECT_THAT(text, HasSubstr("memory of the host"));
  }
}

// The checker names the rule that a mistake breaks.
TEST(ProgramOffload, HostUpdatesOutOfOrderAreRefused) {
  const ShardingPlan plan = MakeOffloaded(HostRequest(1, 2));
  const auto refusal = [&](const std::function<bool(Instruction&)>& change) {
    ShardingPlan wrong = plan;
    for (StepProgram& program : wrong.programs) {
      for (Instruction& at : program.instructions) {
        if (change(at)) {
          return std::string(CheckPlan(wrong).message());
        }
      }
    }
    return std::string("nothing was changed");
  };
  const auto is = [](const Instruction& at, OpCode op) { return at.op == op && !at.waits.empty(); };
  EXPECT_THAT(refusal([&](Instruction& at) {
                return is(at, OpCode::kOffloadGradient) && (at.waits.clear(), true);
              }),
              HasSubstr("K7"));
  EXPECT_THAT(refusal([&](Instruction& at) {
                return is(at, OpCode::kOptimizerStep) && (at.waits.clear(), true);
              }),
              HasSubstr("K1"));  // it may write weights that are read
  EXPECT_THAT(refusal([&](Instruction& at) {
                return is(at, OpCode::kOptimizerStep) && (at.stream = StreamId::kCompute, true);
              }),
              HasSubstr("K4"));
  EXPECT_THAT(refusal([&](Instruction& at) {
                return is(at, OpCode::kOffloadGradient) && (at.stream = StreamId::kReduce, true);
              }),
              HasSubstr("K4"));
}

OffloadSizes SizesOf(const ShardingPlan& plan) {
  return OffloadSizesOf(plan.buffers, plan.groups, plan.options);
}

// Every number of bytes that can leave, by asking for each multiple of a byte count that divides
// all of them.
std::vector<int64_t> ChoicesOfBytes(const OffloadSizes& sizes) {
  int64_t step = 0;
  for (const int64_t bytes : sizes.of_groups) {
    step = std::gcd(step, bytes);
  }
  std::vector<int64_t> choices = {0};
  for (int64_t most = step; most <= sizes.total; most += step) {
    const int64_t bytes = sizes.BytesWithin(most);
    EXPECT_GE(bytes, choices.back());
    EXPECT_EQ(sizes.BytesWithin(bytes), bytes);
    if (bytes > choices.back()) {
      choices.push_back(bytes);
    }
  }
  return choices;
}

// Plans the job with every fraction that there is, and takes the first that fits, for memories of
// a device around each of them.
void ExpectLeastThatFits(PlanRequest request) {
  OffloadSpec& offload = request.spec.optimizer.offload;
  offload.fraction = 0;
  const OffloadSizes sizes = SizesOf(MakeOffloaded(request));
  std::vector<ShardingPlan> plans;
  for (const int64_t bytes : ChoicesOfBytes(sizes)) {
    offload.fraction = bytes == 0 ? 0 : sizes.FractionOf(bytes);
    plans.push_back(MakeOffloaded(request));
    EXPECT_EQ(OffloadFactsOf(plans.back()).offloaded_bytes, bytes);
  }
  EXPECT_GT(plans.size(), 6u);
  offload.fraction = 0;
  offload.automatic = true;
  for (const ShardingPlan& around : plans) {
    for (const int64_t more : {-1, 0, 1}) {
      offload.device_bytes = PeakBytes(around) + more;
      auto least = plans.begin();
      while (least + 1 != plans.end() && PeakBytes(*least) > offload.device_bytes) {
        ++least;
      }
      const absl::StatusOr<ShardingPlan> plan = BuildFittingPlan(request);
      ASSERT_TRUE(plan.ok()) << plan.status();
      EXPECT_EQ(plan->options.offload_fraction, least->options.offload_fraction)
          << offload.device_bytes;
      EXPECT_EQ(SerializePlan(*plan), SerializePlan(*least));
    }
  }
  offload.device_bytes = 0;
  EXPECT_EQ(SerializePlan(*BuildFittingPlan(request)), SerializePlan(plans.front())) << "not known";
}

// Tried on a host, in files and with narrow state; the head is larger than a layer, so a small
// fraction passes it over.
TEST(ProgramOffload, AutomaticOffloadIsTheLeastThatFits) {
  ExpectLeastThatFits(HostRequest(0, 2));
  ExpectLeastThatFits(OffloadRequest(0, 3));
  PlanRequest narrow = HostRequest(0, 4);
  narrow.spec.compute = ComputeType::kBF16;
  narrow.spec.optimizer.main_weights = MainWeightForm::kBF16Remainder;
  narrow.spec.optimizer.state_types = kFp8States;
  ExpectLeastThatFits(narrow);
}

TEST(ProgramOffload, IsOfferedToHostsThatHaveTooLittleMemory) {
  PlanRequest request = OffloadRequest(0);
  const ShardingPlan plan = MakeOffloaded(request);
  const int64_t usable = PeakBytes(plan) - 1;
  const auto offered = [&](const PlanRequest& asked) {
    const std::vector<Remedy> remedies = TryRemedies(asked, usable);
    return std::any_of(remedies.begin(), remedies.end(), [](const Remedy& remedy) {
      return remedy.fits && remedy.change.starts_with("training.optimizer.offload.fraction: 0.5");
    });
  };
  EXPECT_TRUE(offered(request));
  EXPECT_TRUE(offered(HostRequest(0)));
}

}  // namespace
}  // namespace ravel::plan
