// The memory of a plan against what the engine does with it: every instruction writes only the
// buffers that it is planned to write, and every buffer is used to its end.

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/plan/program/program_order.h"
#include "common/signed_size.h"
#include "tests/testing/strategy_cases.h"
#include "worker/trainer/local_ranks.h"
#include "worker/trainer/memory_report.h"

namespace ravel::trainer {
namespace {

using plan::BufferKind;
using plan::MemoryKind;

// Activations may end this much before their buffer does.
constexpr int64_t kGranule = 256;

// One arena of a rank that no other rank writes, and what it held after the last instruction.
struct Watched {
  std::byte* base = nullptr;
  std::vector<std::byte> before;
};

// Compares the arena after each instruction with what it was before it.
class ArenaWatch final : public shard::InstructionObserver {
 public:
  ArenaWatch(const plan::ShardingPlan& plan, const shard::ArenaBuffers& buffers)
      : plan_(plan), touched_(plan.buffers.size(), 0) {
    const plan::BufferPlan& memory = plan.memory;
    for (size_t i = 0; i < plan.buffers.size(); ++i) {
      const plan::ProgramBuffer& buffer = plan.buffers[i];
      const bool own = buffer.memory != MemoryKind::kCommon;
      if (own && buffer.inside < 0 && watched_.count(buffer.memory) == 0) {
        const int64_t bytes =
            buffer.memory == MemoryKind::kPrivate ? memory.private_bytes : memory.symmetric_bytes;
        Watched& arena = watched_[buffer.memory];
        arena.base = buffers.bytes(static_cast<int>(i)) - memory.offsets[i];
        arena.before.resize(static_cast<size_t>(bytes));
      }
    }
    Poison(buffers);
    for (auto& [kind, arena] : watched_) {
      std::copy_n(arena.base, arena.before.size(), arena.before.begin());
    }
  }

  absl::Status Completed(const shard::BoundInstruction& bound, const shard::ReplayTurn&) override {
    std::vector<plan::BufferId> written;
    for (const plan::Operand& operand : bound.instruction.operands) {
      if (operand.writes()) {
        written.push_back(operand.buffer);
      }
    }
    // Ids and targets come between programs.
    written.push_back(static_cast<int>(plan_.buffers.size()) - 1);
    for (auto& [kind, arena] : watched_) {
      RETURN_IF_ERROR(Compare(kind, arena, written));
    }
    return absl::OkStatus();
  }

  // The end of the furthest byte of a buffer that ever changed.
  int64_t Touched(plan::BufferId buffer) const { return touched_[Size(buffer.value())]; }

 private:
  // Temporaries, so that what is written first is seen.
  void Poison(const shard::ArenaBuffers& buffers) {
    for (size_t i = 0; i < plan_.buffers.size(); ++i) {
      const plan::ProgramBuffer& buffer = plan_.buffers[i];
      if (!buffer.persistent && buffer.kind != BufferKind::kShared &&
          buffer.memory != MemoryKind::kCommon) {
        std::memset(buffers.bytes(static_cast<int>(i)), 0xa5, static_cast<size_t>(buffer.bytes));
      }
    }
  }

  bool Holds(plan::BufferId id, int64_t offset) const {
    const int64_t begin = plan_.memory.offsets[static_cast<size_t>(id)];
    return offset >= begin && offset < begin + plan_.buffers[static_cast<size_t>(id)].bytes;
  }

  // The buffer among `written` that holds a byte, or -1.
  plan::BufferId Holder(MemoryKind kind,
                        int64_t offset,
                        const std::vector<plan::BufferId>& written) const {
    for (plan::BufferId id : written) {
      while (id >= 0 && plan_.buffers[static_cast<size_t>(id)].inside >= 0) {
        id = plan_.buffers[static_cast<size_t>(id)].inside;
      }
      if (id < 0 || plan_.buffers[static_cast<size_t>(id)].memory != kind) {
        continue;
      }
      if (Holds(id, offset)) {
        return id;
      }
    }
    return -1;
  }

  absl::Status Compare(MemoryKind kind,
                       Watched& arena,
                       const std::vector<plan::BufferId>& written) {
    constexpr size_t kBlock = 256;
    plan::BufferId holder = -1;  // of the byte before: written buffers are live and do not overlap
    for (size_t begin = 0; begin < arena.before.size(); begin += kBlock) {
      const size_t bytes = std::min(kBlock, arena.before.size() - begin);
      if (std::memcmp(arena.base + begin, arena.before.data() + begin, bytes) == 0) {
        continue;
      }
      // Of a block within one written buffer only the last byte that differs counts.
      const auto first = static_cast<int64_t>(begin);
      const auto last = static_cast<int64_t>(begin + bytes - 1);
      if (holder < 0 || !Holds(holder, first)) {
        holder = Holder(kind, first, written);
      }
      const bool within = holder >= 0 && Holds(holder, first) && Holds(holder, last);
      size_t i = begin;
      if (within) {
        for (i = begin + bytes - 1; arena.base[i] == arena.before[i]; --i) {
        }
      }
      for (; i < begin + bytes; ++i) {
        if (arena.base[i] == arena.before[i]) {
          continue;
        }
        const auto offset = static_cast<int64_t>(i);
        if (holder < 0 || !Holds(holder, offset)) {
          holder = Holder(kind, offset, written);
        }
        if (holder < 0) {
          return absl::InternalError(absl::StrCat(
              "writes byte ", offset, " of the ", plan::MemoryKindName(kind), " arena, unplanned"));
        }
        int64_t& end = touched_[static_cast<size_t>(holder)];
        end = std::max(end, offset + 1 - plan_.memory.offsets[static_cast<size_t>(holder)]);
      }
      std::copy_n(arena.base + begin, bytes, arena.before.begin() + static_cast<int64_t>(begin));
    }
    return absl::OkStatus();
  }

  const plan::ShardingPlan& plan_;
  std::map<MemoryKind, Watched> watched_;
  std::vector<int64_t> touched_;
};

// Bytes at the end of a buffer that nobody has to write: padding after the last tensor, in every
// shard.
int64_t Slack(const plan::ShardingPlan& plan, const plan::ProgramBuffer& buffer) {
  constexpr int64_t kElement = 4;
  if (buffer.group < 0) {
    return kGranule;
  }
  const plan::GroupLayout& group = plan.groups[static_cast<size_t>(buffer.group)];
  return (group.layout.padding_elements + 1) * kElement;
}

// Codes and maxima may be the same after an update, and vectors of all ranks are padded.
bool MayStayAsItIs(const plan::ShardingPlan& plan, const plan::ProgramBuffer& buffer) {
  if (buffer.group < 0) {
    return buffer.kind == BufferKind::kAmax || buffer.kind == BufferKind::kAmaxPart ||
           buffer.kind == BufferKind::kAmaxReceive || buffer.kind == BufferKind::kDelayedScales ||
           buffer.kind == BufferKind::kAmaxFlags;
  }
  return buffer.persistent && plan.groups[buffer.group].recipe != plan::Recipe::kNone &&
         (buffer.kind == BufferKind::kModelWeight || buffer.kind == BufferKind::kGathered);
}

// The buffers whose end nothing has touched.
std::vector<std::string> UnusedBuffers(const plan::ShardingPlan& plan, const ArenaWatch& watch) {
  std::vector<std::string> names;
  for (const plan::BufferId id : plan.buffers.ids()) {
    const plan::ProgramBuffer& buffer = plan.buffers[id];
    // Scratch is what kernels may need on any machine; position tables are older than the watch.
    const bool watched = buffer.inside < 0 && buffer.memory != MemoryKind::kCommon &&
                         buffer.kind != BufferKind::kWorkspace &&
                         buffer.kind != BufferKind::kShared && !MayStayAsItIs(plan, buffer);
    if (watched && watch.Touched(id) < buffer.bytes - Slack(plan, buffer)) {
      names.push_back(buffer.name);
    }
  }
  return names;
}

class ArenaUse : public ::testing::TestWithParam<StrategyCase> {};

RecordArgs ArenaArgs(const StrategyCase& tested, const char* model) {
  return ArgsOf(tested, JobOf(tested, model, OwnFolder("ravel_arena_use")));
}

// Bytes on a rank between steps, for each parameter of its shards.
double RestBytesPerParameter(const plan::ShardingPlan& plan) {
  int64_t bytes = 0;
  for (const plan::ProgramBuffer& buffer : plan.buffers) {
    const bool rests = buffer.kind == BufferKind::kMainWeight ||
                       buffer.kind == BufferKind::kModelWeight ||
                       buffer.kind == BufferKind::kState || buffer.kind == BufferKind::kStateScale;
    bytes += rests && buffer.inside < 0 ? buffer.bytes : 0;
  }
  int64_t elements = 0;  // with padding
  for (const plan::GroupLayout& group : plan.groups) {
    elements += group.layout.shard_elements;
  }
  return static_cast<double>(bytes) / static_cast<double>(elements);
}

// Two steps of the case with an evaluation between them. `rest_bytes`: of RestBytesPerParameter.
void ExpectMeasuredIsPlanned(const StrategyCase& tested,
                             const RecordArgs& args,
                             std::optional<double> rest_bytes = {}) {
  LocalRun run = {.spec = args.spec,
                  .ranks = tested.ranks(),
                  .shared_memory = args.shared_memory,
                  .adjust = args.adjust};
  const absl::StatusOr<plan::ShardingPlan> plan = PlanLocalRanks(run);
  ASSERT_TRUE(plan.ok()) << plan.status();
  if (rest_bytes.has_value()) {
    EXPECT_NEAR(RestBytesPerParameter(*plan), *rest_bytes, *rest_bytes / 100);
  }
  run.body = [&](RankEngine& engine, int rank) -> absl::Status {
    RETURN_IF_ERROR(engine.InitializeWeights());
    ArenaWatch watch(*plan, engine.buffers());
    engine.executor().set_observer(&watch);
    RETURN_IF_ERROR(engine.TrainStep(0).status());
    RETURN_IF_ERROR(engine.Evaluate().status());
    RETURN_IF_ERROR(engine.TrainStep(1).status());
    engine.executor().set_observer(nullptr);
    if (rank == 0) {
      EXPECT_THAT(UnusedBuffers(*plan, watch), ::testing::IsEmpty());
    }
    return absl::OkStatus();
  };
  EXPECT_EQ(RunLocalRanks(run), absl::OkStatus());
}

TEST_P(ArenaUse, MeasuredIsPlanned) {
  ExpectMeasuredIsPlanned(GetParam(), ArenaArgs(GetParam(), "odd_tied"));
}

TEST_P(ArenaUse, MeasuredIsPlannedInBf16) {
  RecordArgs args = ArenaArgs(GetParam(), "odd_tied");
  args.spec.compute = plan::ComputeType::kBF16;
  ExpectMeasuredIsPlanned(GetParam(), args);
}

class ArenaUseWithCodes : public ArenaUse {};

TEST_P(ArenaUseWithCodes, MeasuredIsPlanned) {
  RecordArgs args = ArenaArgs(GetParam(), "recipes");
  args.spec.compute = plan::ComputeType::kBF16;
  args.spec.recipe = {.recipe = GetParam().in_place ? plan::Recipe::kNvFp4 : plan::Recipe::kDelayed,
                      .keep_bf16 = {},
                      .history = 3};
  ExpectMeasuredIsPlanned(GetParam(), args);
}

// Bytes per parameter of main weights, bf16 weights and moments, and what they are by arithmetic.
struct StateForm {
  plan::MainWeightForm main_weights;
  plan::StateTypes states;
  double bytes;
};
constexpr plan::StateTypes kFp8AndBf16 = {DType::kF8E4M3, DType::kBF16};
constexpr plan::StateTypes kBf16AndF32 = {DType::kBF16, DType::kF32};
constexpr double kScaleBytes = 1.0 / 128;
constexpr StateForm kStateForms[] = {
    {plan::MainWeightForm::kF32, plan::kF32States, 6 + 8},
    {plan::MainWeightForm::kF32, plan::kBf16States, 6 + 4},
    {plan::MainWeightForm::kF32, kBf16AndF32, 6 + 6},
    {plan::MainWeightForm::kF32, kFp8AndBf16, 6 + 3 + kScaleBytes},
    {plan::MainWeightForm::kF32, plan::kFp8States, 6 + 2 + 2 * kScaleBytes},
    {plan::MainWeightForm::kBF16Remainder, plan::kF32States, 4 + 8},
    {plan::MainWeightForm::kBF16Remainder, plan::kBf16States, 4 + 4},
    {plan::MainWeightForm::kBF16Remainder, kBf16AndF32, 4 + 6},
    {plan::MainWeightForm::kBF16Remainder, kFp8AndBf16, 4 + 3 + kScaleBytes},
    {plan::MainWeightForm::kBF16Remainder, plan::kFp8States, 4 + 2 + 2 * kScaleBytes},
};

// Every type of states in both forms of main weights: planned bytes are those of the arithmetic,
// but for padding, and every byte is used.
TEST(StateMemory, MeasuredIsPlannedInEveryForm) {
  const StrategyCase tested = {.strategy = "ZeRO3", .width = 2};
  for (const StateForm& form : kStateForms) {
    SCOPED_TRACE(absl::StrCat(plan::StateTypesText(form.states), ": ", form.bytes, " bytes"));
    RecordArgs args = ArenaArgs(tested, "recipes");
    args.spec.compute = plan::ComputeType::kBF16;
    args.spec.optimizer.state_types = form.states;
    args.spec.optimizer.main_weights = form.main_weights;
    ExpectMeasuredIsPlanned(tested, args, form.bytes);
  }
}

std::vector<StrategyCase> ArenaCases() {
  std::vector<StrategyCase> cases;
  int64_t turn = 0;
  for (const NamedStrategy& strategy : MatrixStrategies()) {
    for (const bool in_place : {false, true}) {
      cases.push_back({.strategy = strategy.name,
                       .width = 2,
                       .micro_batches = turn % 2 == 0 ? 1 : 3,
                       .recompute = turn % 3 == 0 ? plan::RecomputePolicy::kBlock
                                                  : plan::RecomputePolicy::kNone,
                       .small_windows = turn % 4 == 3,
                       .in_place = in_place});
      ++turn;
    }
  }
  return cases;
}
std::string ArenaCaseName(const ::testing::TestParamInfo<StrategyCase>& test) {
  return test.param.name() + (test.param.in_place ? "_shared" : "");
}
INSTANTIATE_TEST_SUITE_P(Strategies, ArenaUse, ::testing::ValuesIn(ArenaCases()), ArenaCaseName);

// Codes are quantized by the CPU's reference: one case of each strategy, memories and recipes in
// turn, or both with RAVEL_EVERY_CASE (label slow).
std::vector<StrategyCase> ArenaCasesWithCodes() {
  const std::vector<StrategyCase> all = ArenaCases();
  if (std::getenv("RAVEL_EVERY_CASE") != nullptr) {
    return all;
  }
  std::vector<StrategyCase> cases;
  for (size_t i = 0; i + 1 < all.size(); i += 2) {
    cases.push_back(all[i + (i / 2) % 2]);
  }
  return cases;
}
INSTANTIATE_TEST_SUITE_P(Strategies,
                         ArenaUseWithCodes,
                         ::testing::ValuesIn(ArenaCasesWithCodes()),
                         ArenaCaseName);

// A plan in which one buffer is larger than what the engine makes of it is told.
TEST(MemoryLedger, ABufferThatGrowsIsSeen) {
  const StrategyCase tested = {.strategy = "ZeRO3", .width = 2};
  const RecordArgs args = ArgsOf(tested, JobOf(tested, "odd_tied", OwnFolder("ravel_arena_grown")));
  LocalRun run = {.spec = args.spec, .ranks = 2, .adjust = args.adjust};
  run.body = [&](RankEngine& engine, int rank) -> absl::Status {
    RETURN_IF_ERROR(engine.InitializeWeights());
    plan::ShardingPlan grown = *PlanLocalRanks(run);
    ArenaWatch watch(grown, engine.buffers());
    engine.executor().set_observer(&watch);
    RETURN_IF_ERROR(engine.TrainStep(0).status());
    engine.executor().set_observer(nullptr);
    if (rank != 0) {
      return absl::OkStatus();
    }
    for (const BufferKind kind : {BufferKind::kMainWeight,
                                  BufferKind::kState,
                                  BufferKind::kMainGrad,
                                  BufferKind::kGathered,
                                  BufferKind::kStaging}) {
      const auto buffer = std::find_if(grown.buffers.begin(),
                                       grown.buffers.end(),
                                       [&](const auto& at) { return at.kind == kind; });
      if (buffer == grown.buffers.end() || buffer->inside >= 0) {
        continue;
      }
      buffer->bytes += 1 << 20;
      EXPECT_THAT(UnusedBuffers(grown, watch), ::testing::ElementsAre(buffer->name));
      buffer->bytes -= 1 << 20;
    }
    return absl::OkStatus();
  };
  EXPECT_EQ(RunLocalRanks(run), absl::OkStatus());
}

TEST(MemoryLedger, MappingsOfAProcessAreToldApart) {
  const std::string smaps =
      "555500000000-555500010000 r-xp 00000000 fe:01 123   /opt/ravel-trainer\n"
      "Size: 64 kB\nPss: 40 kB\nPss_Dirty: 1 kB\n"
      "555600000000-555600010000 rw-p 00000000 00:00 0 [heap]\nPss: 8 kB\n"
      "7f0000000000-7f0000100000 rw-s 00000000 00:01 5 /memfd:ravel-group (deleted)\nPss: 100 kB\n"
      "7f0000200000-7f0000300000 rw-s 00200000 00:01 5 /memfd:ravel-group (deleted)\nPss: 900 kB\n"
      "7f0000400000-7f0000500000 r--s 00000000 fe:01 7 /data/corpus.bin\nPss: 300 kB\n"
      "7f0000500000-7f0000600000 rw-s 00000000 fe:01 9 /disk/#77 (deleted)\nPss: 24 kB\n"
      "7f0000600000-7f0000700000 rw-p 00000000 00:00 0 \nPss: 64 kB\n"
      "7ffc00000000-7ffc00100000 rw-p 00000000 00:00 0 [stack]\nPss: 12 kB\n";
  MappedPlaces places = {.arena_planned_bytes = 1000000,
                         .arenas = {{reinterpret_cast<const std::byte*>(0x7f0000280000), 4096}},
                         .data_files = {"/data/corpus"},
                         .save_staging = {},
                         .offloaded = {reinterpret_cast<const std::byte*>(0x7f0000500000), 4096}};
  std::map<std::string, int64_t> kib;
  int64_t sum = 0;
  for (const MemoryLine& line : MemoryOfProcess(smaps, places)) {
    kib[line.what] = line.measured_bytes / 1024;
    sum += line.measured_bytes / 1024;
  }
  EXPECT_EQ(sum, 40 + 8 + 100 + 900 + 300 + 24 + 64 + 12);
  EXPECT_EQ(kib["arena"], 900);
  EXPECT_EQ(kib["communicator control blocks"], 100);
  EXPECT_EQ(kib["data files"], 300);
  EXPECT_EQ(kib["offloaded state"], 24);
  EXPECT_EQ(kib["heap"], 8);
  EXPECT_EQ(kib["main stack"], 12);
  EXPECT_EQ(kib["programs and libraries"], 40);
  EXPECT_EQ(kib["other anonymous memory"], 64);

  // Of this process: what is touched is seen.
  const std::vector<std::byte> staging(8 << 20, std::byte{1});
  places.save_staging = staging;
  const auto own = MemoryOfProcess(places);
  ASSERT_TRUE(own.ok()) << own.status();
  for (const MemoryLine& line : *own) {
    if (line.what == "save staging") {
      EXPECT_EQ(line.planned_bytes, 8 << 20);
      EXPECT_GE(line.measured_bytes, line.planned_bytes);
      EXPECT_LE(line.measured_bytes, line.planned_bytes + 8192);
    }
  }
}

}  // namespace
}  // namespace ravel::trainer
