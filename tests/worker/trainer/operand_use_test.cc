// Operands against the bytes that instructions really touch. While an instruction runs, everything
// that it does not read by its operands is NaN, also what it is to overwrite; what it does not
// write by its operands must not change. So a read that no operand names changes the results, and a
// write that none names is found at once.

#include <algorithm>
#include <compare>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/mutex.h"
#include "common/plan/program/step_program.h"
#include "tests/testing/strategy_cases.h"
#include "worker/trainer/local_ranks.h"

namespace ravel::trainer {
namespace {

using plan::Access;
using plan::MemoryKind;
using plan::OpCode;
using plan::Operand;
using plan::Role;
using plan::When;

constexpr std::byte kPoison{0xFF};  // four of them are a NaN

// A kind of operand that a watch takes to be missing; none by default.
using Without = std::function<bool(const plan::Instruction& at, const Operand& operand)>;

// One rank's memory that no other rank may touch.
class OperandWatch final : public shard::InstructionObserver {
 public:
  OperandWatch(const plan::ShardingPlan& plan,
               const shard::ArenaBuffers& buffers,
               int rank,
               Without without)
      : plan_(plan), buffers_(buffers), rank_(rank), without_(std::move(without)) {
    for (size_t i = 0; i < plan.buffers.size(); ++i) {
      const plan::ProgramBuffer& buffer = plan.buffers[i];
      if (buffer.memory == MemoryKind::kPrivate && buffer.inside < 0) {
        base_ = buffers.bytes(static_cast<int>(i)) - plan.memory.offsets[i];
      }
    }
    kept_.resize(static_cast<size_t>(plan.memory.private_bytes));
  }

  absl::Status Starting(const shard::BoundInstruction& bound,
                        const shard::ReplayTurn& turn) override {
    Mark(bound.instruction, turn);
    std::copy_n(base_, kept_.size(), kept_.begin());
    std::ptrdiff_t begin = 0;
    for (const Range& read : reads_) {
      std::fill(base_ + begin, base_ + std::max(begin, read.begin), kPoison);
      begin = std::max(begin, read.end);
    }
    std::fill_n(base_ + begin, Bytes() - begin, kPoison);
    return absl::OkStatus();
  }

  absl::Status Completed(const shard::BoundInstruction&, const shard::ReplayTurn&) override {
    std::ptrdiff_t begin = 0;
    for (const Range& written : writes_) {
      RETURN_IF_ERROR(Restore({begin, written.begin}));
      begin = std::max(begin, written.end);
    }
    return Restore({begin, Bytes()});
  }

 private:
  std::ptrdiff_t Bytes() const { return static_cast<std::ptrdiff_t>(kept_.size()); }

  bool Applies(const plan::Instruction& at, When when, const shard::ReplayTurn& turn) const {
    if (when == When::kAlways) {
      return true;
    }
    const bool lane = plan::LaneOf(plan_, turn.slot.turn, rank_) >= 0;
    return lane &&
           (when == When::kLane || turn.used.empty() || turn.used[static_cast<size_t>(at.unit)]);
  }

  // Bytes of the memory; empty where begin is not before end.
  struct Range {
    std::ptrdiff_t begin = 0;
    std::ptrdiff_t end = 0;
    auto operator<=>(const Range&) const = default;
  };

  // Checks that the instruction left these bytes alone, and puts their content back.
  absl::Status Restore(const Range& range) {
    if (range.begin >= range.end) {
      return absl::OkStatus();
    }
    std::ptrdiff_t begin = range.begin;
    for (const Range& read : reads_) {
      const Range seen = {std::max(begin, read.begin), std::min(read.end, range.end)};
      if (seen.begin < seen.end) {
        RETURN_IF_ERROR(CheckPoison({begin, seen.begin}));
        RETURN_IF_ERROR(CheckKept(seen));
        begin = seen.end;
      }
    }
    RETURN_IF_ERROR(CheckPoison({begin, range.end}));
    std::copy(kept_.begin() + range.begin, kept_.begin() + range.end, base_ + range.begin);
    return absl::OkStatus();
  }

  // All of a range at once: most of a test's time is here.
  absl::Status CheckKept(const Range& range) const {
    const std::byte* kept = kept_.data() + range.begin;
    const auto bytes = static_cast<size_t>(range.end - range.begin);
    return std::memcmp(kept, base_ + range.begin, bytes) == 0
               ? absl::OkStatus()
               : Changed(range.begin +
                         (std::mismatch(kept, kept + bytes, base_ + range.begin).first - kept));
  }
  // Each byte is poison if the first is, and each other equals the one before.
  absl::Status CheckPoison(const Range& range) const {
    if (range.begin >= range.end) {
      return absl::OkStatus();
    }
    const std::byte* data = base_ + range.begin;
    const auto bytes = static_cast<size_t>(range.end - range.begin);
    if (data[0] == kPoison && std::memcmp(data, data + 1, bytes - 1) == 0) {
      return absl::OkStatus();
    }
    return Changed(
        range.begin +
        (std::find_if(data, data + bytes, [](std::byte at) { return at != kPoison; }) - data));
  }
  absl::Status Changed(std::ptrdiff_t byte) const {
    return absl::InternalError(
        absl::StrCat("rank ", rank_, " writes byte ", byte, " without an operand"));
  }

  // Collects the bytes that the operands read and those that they write.
  void Mark(const plan::Instruction& at, const shard::ReplayTurn& turn) {
    reads_.clear();
    writes_.clear();
    for (const Operand& operand : at.operands) {
      const plan::ProgramBuffer& buffer = plan_.buffers[static_cast<size_t>(operand.buffer)];
      if (buffer.memory != MemoryKind::kPrivate || !Applies(at, operand.when, turn) ||
          (without_ && without_(at, operand))) {
        continue;
      }
      const std::ptrdiff_t begin = buffers_.bytes(operand.buffer) - base_;
      if (operand.access != Access::kWrite) {
        reads_.push_back({begin, begin + buffer.bytes});
      }
      if (operand.writes()) {
        writes_.push_back({begin, begin + buffer.bytes});
      }
    }
    std::sort(reads_.begin(), reads_.end());
    std::sort(writes_.begin(), writes_.end());
  }

  const plan::ShardingPlan& plan_;
  const shard::ArenaBuffers& buffers_;
  const int rank_;
  const Without without_;
  std::byte* base_ = nullptr;
  std::vector<std::byte> kept_;  // what the memory held before the instruction
  std::vector<Range> reads_;     // ascending
  std::vector<Range> writes_;    // ascending
};

// A run of which every instruction is watched.
absl::StatusOr<Recording> RecordWatched(const RecordArgs& args, const Without& without = nullptr) {
  const LocalRun planned = {.spec = args.spec,
                            .ranks = args.ranks,
                            .shared_memory = args.shared_memory,
                            .adjust = args.adjust};
  ASSIGN_OR_RETURN(const plan::ShardingPlan plan, PlanLocalRanks(planned));
  Recording recording;
  Mutex mutex;
  LocalRun run = planned;
  run.body = [&](RankEngine& engine, int rank) -> absl::Status {
    OperandWatch watch(plan, engine.buffers(), rank, without);
    engine.executor().set_observer(&watch);
    RETURN_IF_ERROR(RunRank(args, engine, rank, recording));
    engine.executor().set_observer(nullptr);
    MutexLock lock(mutex);
    return AddState(engine, recording);
  };
  RETURN_IF_ERROR(RunLocalRanks(run));
  return recording;
}

// One step of eight lanes, and an evaluation.
RecordArgs OneStep(const StrategyCase& tested, const std::string& model, bool shared_memory) {
  RecordArgs args = ArgsOf(tested, JobOf(tested, model, OwnFolder("ravel_operand_use")));
  args.shared_memory = shared_memory;
  args.spec.gradient_wire = tested.micro_batches > 1 ? plan::WireType::kBF16 : plan::WireType::kF32;
  args.spec.virtual_ranks = 8;
  args.spec.global_batch = 8 * tested.micro_batches;
  args.last_step = 1;
  args.evaluate_every_step = true;
  return args;
}

struct WatchedCase {
  StrategyCase strategy;
  std::string model;
  bool shared_memory = true;  // else all memory is this rank's own

  std::string name() const {
    return absl::StrCat(strategy.name(), "_", model, shared_memory ? "_shared" : "_copied");
  }
};

class OperandUse : public ::testing::TestWithParam<WatchedCase> {};

TEST_P(OperandUse, NothingElseIsReadOrWritten) {
  const WatchedCase& tested = GetParam();
  const RecordArgs args = OneStep(tested.strategy, tested.model, tested.shared_memory);
  const absl::StatusOr<Recording> watched = RecordWatched(args);
  ASSERT_TRUE(watched.ok()) << watched.status();
  EXPECT_EQ(FirstDifference(Record(args), *watched), "");
}

TEST_P(OperandUse, NothingElseIsReadOrWrittenInBf16) {
  const WatchedCase& tested = GetParam();
  RecordArgs args = OneStep(tested.strategy, tested.model, tested.shared_memory);
  args.spec.compute = plan::ComputeType::kBF16;
  const absl::StatusOr<Recording> watched = RecordWatched(args);
  ASSERT_TRUE(watched.ok()) << watched.status();
  EXPECT_EQ(FirstDifference(Record(args), *watched), "");
}

// Leaves of one lane's gradients outlive its micro-batches.
TEST(OperandUseOfParts, NothingElseIsReadOrWritten) {
  for (const int64_t micro_batches : {1, 3}) {
    const StrategyCase tested = {.width = 2, .micro_batches = micro_batches};
    RecordArgs args = OneStep(tested, "bundled_rope_scaling", true);
    args.spec.tensor_parts = 4;
    const absl::StatusOr<Recording> watched = RecordWatched(args);
    ASSERT_TRUE(watched.ok()) << watched.status();
    EXPECT_EQ(FirstDifference(Record(args), *watched), "");
  }
}

// Steps of ranks that share each layer: sums beside products touch what they name alone. One model
// whole and one by parts of the sequence, or each both ways with RAVEL_EVERY_CASE (label slow).
TEST(OperandUseOnTensor, NothingElseIsReadOrWritten) {
  for (const std::string model : {"recipes_gpt2", "bundled_rope_scaling"}) {
    for (const bool sequence : {false, true}) {
      if (sequence != (model == "bundled_rope_scaling") &&
          std::getenv("RAVEL_EVERY_CASE") == nullptr) {
        continue;
      }
      const StrategyCase tested = {.recompute = plan::RecomputePolicy::kBlock,
                                   .tensor = 2,
                                   .sequence = sequence,
                                   .chunks = 2};
      const RecordArgs args = OneStep(tested, model, sequence);
      const absl::StatusOr<Recording> watched = RecordWatched(args);
      ASSERT_TRUE(watched.ok()) << tested.name() << ": " << watched.status();
      EXPECT_EQ(FirstDifference(Record(args), *watched), "") << model << " " << tested.name();
    }
  }
}

// The same of four that share a layer, in groups, by strategies that keep whole gradients, in bf16
// and with codes.
TEST(OperandUseOnTensor, NothingElseIsReadOrWrittenInGroups) {
  const struct {
    StrategyCase strategy;
    const char* model;
    plan::ComputeType compute = plan::ComputeType::kF32;
    plan::Recipe recipe = plan::Recipe::kNone;
  } cases[] = {
      {{.strategy = "ZeRO1", .width = 2, .tensor = 4, .chunks = 2}, "cut_qwen3_tied"},
      {{.strategy = "ZeRO2", .width = 2, .micro_batches = 3, .tensor = 4}, "cut_llama_untied"},
      {{.strategy = "HSDP", .width = 1, .tensor = 2, .sequence = true},
       "cut_qwen2_tied",
       plan::ComputeType::kBF16},
      {{.width = 2, .tensor = 2, .sequence = true},
       "recipes",
       plan::ComputeType::kBF16,
       plan::Recipe::kMxFp8},
      {{.width = 2, .tensor = 2, .chunks = 2},
       "recipes",
       plan::ComputeType::kBF16,
       plan::Recipe::kMxFp8},
  };
  for (const auto& one : cases) {
    RecordArgs args = OneStep(one.strategy, one.model, true);
    args.spec.compute = one.compute;
    args.spec.recipe.recipe = one.recipe;
    const absl::StatusOr<Recording> watched = RecordWatched(args);
    ASSERT_TRUE(watched.ok()) << one.strategy.name() << ": " << watched.status();
    EXPECT_EQ(FirstDifference(Record(args), *watched), "") << one.strategy.name();
  }
}

std::vector<WatchedCase> WatchedCases() {
  std::vector<WatchedCase> cases;
  int64_t turn = 0;
  for (const NamedStrategy& strategy : MatrixStrategies()) {
    for (const std::string model : {"odd_tied", "bundled_rope_scaling"}) {
      for (const bool shared : {false, true}) {
        const StrategyCase tested = {.strategy = strategy.name,
                                     .width = turn % 5 == 4 ? 3 : 2,
                                     .micro_batches = turn % 2 == 0 ? 1 : 3,
                                     .recompute = turn % 3 == 0 ? plan::RecomputePolicy::kBlock
                                                                : plan::RecomputePolicy::kNone,
                                     .small_windows = turn % 4 == 3,
                                     .in_place = shared && turn % 2 == 1};
        cases.push_back({.strategy = tested, .model = model, .shared_memory = shared});
        ++turn;
      }
    }
  }
  return cases;
}
INSTANTIATE_TEST_SUITE_P(Strategies,
                         OperandUse,
                         ::testing::ValuesIn(WatchedCases()),
                         [](const auto& test) { return test.param.name(); });

class OperandUseWithCodes : public ::testing::TestWithParam<WatchedCase> {};

TEST_P(OperandUseWithCodes, NothingElseIsReadOrWritten) {
  const WatchedCase& tested = GetParam();
  RecordArgs args = OneStep(tested.strategy, "recipes", tested.shared_memory);
  args.spec.compute = plan::ComputeType::kBF16;
  args.spec.recipe = {
      .recipe = tested.shared_memory ? plan::Recipe::kNvFp4 : plan::Recipe::kDelayed,
      .keep_bf16 = {},
      .history = 3};
  const absl::StatusOr<Recording> watched = RecordWatched(args);
  ASSERT_TRUE(watched.ok()) << watched.status();
  EXPECT_EQ(FirstDifference(Record(args), *watched), "");
}

// Codes are quantized by the CPU's reference, so that a case takes seconds: one of each strategy.
std::vector<WatchedCase> CasesWithCodes() {
  const std::vector<WatchedCase> all = WatchedCases();
  std::vector<WatchedCase> cases;
  for (size_t i = 0; i + 3 < all.size(); i += 4) {
    cases.push_back(all[i + (i / 4) % 2]);
  }
  return cases;
}
INSTANTIATE_TEST_SUITE_P(Strategies,
                         OperandUseWithCodes,
                         ::testing::ValuesIn(CasesWithCodes()),
                         [](const auto& test) { return test.param.name(); });

// The watch can fail: without any one kind of operand it says so, or results differ.
TEST(OperandWatch, EveryKindOfOperandIsMissed) {
  std::set<std::pair<plan::OpLabel, Role>> seen;
  for (const char* strategy : {"HFSDP", "ZeRO1", "ZeRO0"}) {
    const StrategyCase tested = {
        .strategy = strategy, .width = 2, .recompute = plan::RecomputePolicy::kBlock};
    RecordArgs args = OneStep(tested, "odd_tied", false);
    args.evaluate_every_step = false;
    const auto plan = PlanLocalRanks(
        {.spec = args.spec, .ranks = args.ranks, .shared_memory = false, .adjust = args.adjust});
    ASSERT_TRUE(plan.ok()) << plan.status();
    const Recording expected = Record(args);
    for (const plan::StepProgram& program : plan->programs) {
      for (const plan::Instruction& at : program.instructions) {
        const plan::OpLabel label = plan::LabelOf(plan->moves, at);
        for (const Operand& operand : at.operands) {
          // Nothing is written when staging is opened, and without what units share a token id
          // would be outside the vocabulary, which ends the process.
          const bool ids = plan::IsCompute(at.op) && operand.role == Role::kShared;
          if (program.phase == plan::Phase::kEval || at.op == OpCode::kAllocStaging || ids ||
              !seen.insert({label, operand.role}).second) {
            continue;
          }
          const auto watched = RecordWatched(args, [&](const auto& other, const Operand& of) {
            return plan::LabelOf(plan->moves, other) == label && of.role == operand.role;
          });
          EXPECT_TRUE(!watched.ok() || !FirstDifference(expected, *watched).empty())
              << plan::OpName(label) << " without role " << static_cast<int>(operand.role);
        }
      }
    }
  }
  EXPECT_GT(seen.size(), 20U);
}

}  // namespace
}  // namespace ravel::trainer
