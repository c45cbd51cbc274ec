// Moves of activations between the segments of units: ranks of a tensor axis add what each has
// computed, and hand rows to each other, over every transport of hosts. Modules compute whole
// numbers, so that a piece that is missing, doubled, late or of another rank shows.

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gtest/gtest.h>

#include "kernels/stream.h"
#include "tests/testing/tensor_plan.h"
#include "tests/worker/shard/synthetic_ranks.h"
#include "tests/worker/shard/transport_ranks.h"
#include "worker/comm/collective_ledger.h"

namespace ravel::shard {
namespace {

using model::UnitMemory;
using plan::SegmentKind;
using plan::UnitPass;

// A segment's addend on rank t is (t + 1) times its input: together T (T + 1) / 2 times.
class SummingUnit final : public model::Module {
 public:
  struct Args {
    const plan::ModelInventory& inventory;
    plan::UnitId unit;
    int64_t coordinate = 0;
    std::vector<std::string>* faults = nullptr;
  };
  explicit SummingUnit(const Args& args) : Module(ListsOf(args)), args_(args) {}

  void RunSegment(kernels::Stream&,
                  const UnitMemory& memory,
                  UnitPass pass,
                  SegmentKind kind) const override {
    Run(memory, pass, kind);
  }
  void RunSegment(kernels::Stream&,
                  const UnitMemory& memory,
                  SegmentKind kind,
                  const std::vector<model::FreshGradient>& gradients) const override {
    Run(memory, UnitPass::kBackward, kind);
    WriteGradients(kind, memory.chunk, gradients);
  }
  void RunSegment(kernels::Stream&,
                  const UnitMemory& memory,
                  SegmentKind kind,
                  const std::vector<model::AccumulatingGradient>& gradients) const override {
    Run(memory, UnitPass::kBackward, kind);
    WriteGradients(kind, memory.chunk, gradients);
  }

 private:
  static Segments ListsOf(const Args& args) {
    Segments lists;
    for (const UnitPass pass :
         {UnitPass::kForward, UnitPass::kEvaluate, UnitPass::kRecompute, UnitPass::kBackward}) {
      for (const auto& segment : plan::SegmentsOf(args.inventory, args.unit, pass)) {
        lists[pass].push_back(segment.kind);
      }
    }
    return lists;
  }

  TensorView Shared(const UnitMemory& memory, const char* name) const {
    return memory.shared[model::ActivationIndex(args_.inventory.shared, name)];
  }
  TensorView Workspace(const UnitMemory& memory, const char* name) const {
    const auto& specs = args_.inventory.units[args_.unit].workspace;
    return memory.workspace[model::ActivationIndex(specs, name)];
  }

  // addend = (t + 1) from
  void AddTo(const TensorView& addend, const TensorView& from) const {
    for (int64_t i = 0; i < addend.elements(); ++i) {
      addend.As<float>()[i] = static_cast<float>(args_.coordinate + 1) * from.As<float>()[i];
    }
  }
  // rows = [residual +] the pieces
  void Sum(const UnitMemory& memory, const float* residual) const {
    Expect(static_cast<int64_t>(memory.pieces.size()) == plan::TensorRanks(args_.inventory),
           "pieces");
    const int64_t before = memory.chunk * plan::TensorRanks(args_.inventory);
    Expect(memory.first_row == (before + args_.coordinate) * memory.rows.size[0],
           "rows of another rank");
    for (int64_t i = 0; i < memory.rows.elements(); ++i) {
      float sum = residual == nullptr ? 0 : residual[i];
      for (const TensorView& piece : memory.pieces) {
        sum += piece.As<float>()[i];
      }
      memory.rows.As<float>()[i] = sum;
    }
  }
  const float* OwnRows(const UnitMemory& memory, const TensorView& whole) const {
    return whole.As<float>() + memory.first_row * whole.size[1];
  }

  void Run(const UnitMemory& memory, UnitPass pass, SegmentKind kind) const {
    const TensorView hidden = Shared(memory, "hidden");
    const TensorView dhidden = Shared(memory, "dhidden");
    switch (kind) {
      case SegmentKind::kTable:
        if (pass == UnitPass::kBackward) {
          CheckStream(dhidden, DhiddenFactor(), "dhidden");
        } else {
          for (int64_t i = 0; i < memory.addend.elements(); ++i) {
            memory.addend.As<float>()[i] = static_cast<float>((args_.coordinate + 1) * (i % 7 + 1));
          }
        }
        return;
      case SegmentKind::kAttention:
      case SegmentKind::kMlp:
        if (pass != UnitPass::kRecompute) {  // what products of chunks read
          const TensorView& from = pass == UnitPass::kBackward ? dhidden : hidden;
          std::copy_n(from.As<float>(), from.elements(), Workspace(memory, "d_a").As<float>());
        }
        return;
      case SegmentKind::kAttentionOutput:
      case SegmentKind::kMlpOutput:
      case SegmentKind::kAttentionInputProduct:
      case SegmentKind::kMlpInputProduct: {
        TensorView from = Workspace(memory, "d_a");
        from = MatrixView(from.As<float>(), hidden.size[0], hidden.size[1]);
        const int64_t rows = memory.addend.size[0];
        return AddTo(memory.addend, RowsOf(from, memory.chunk * rows, rows));
      }
      case SegmentKind::kAttentionWeights:
      case SegmentKind::kMlpWeights:
        return;
      case SegmentKind::kTableSum:
      case SegmentKind::kAttentionInput:
      case SegmentKind::kMlpInput:
      case SegmentKind::kLossInput:
        return Sum(memory, nullptr);
      case SegmentKind::kAttentionResidual:
      case SegmentKind::kMlpResidual:
        return Sum(memory, OwnRows(memory, hidden));
      case SegmentKind::kAttentionNorm:
      case SegmentKind::kMlpNorm:
        for (int64_t i = 0; pass == UnitPass::kBackward && i < dhidden.elements(); ++i) {
          dhidden.As<float>()[i] += memory.input_gradient.As<float>()[i];
        }
        return;
      case SegmentKind::kFinalNorm:
        return FinalNorm(memory, pass);
      case SegmentKind::kLossStatistics:
        for (int64_t i = 0; i < memory.rows.elements(); ++i) {
          memory.rows.As<float>()[i] = StatisticOf(args_.coordinate, memory.chunk, i);
        }
        return;
      case SegmentKind::kLossOfChunk:
        return LossOfChunk(memory, pass);
      default:
        Expect(false, "no segment of these ranks");
    }
  }

  static float StatisticOf(int64_t coordinate, int chunk, int64_t i) {
    return static_cast<float>(coordinate * 1000 + chunk * 100 + i % 50);
  }
  void LossOfChunk(const UnitMemory& memory, UnitPass pass) const {
    const TensorView all = Workspace(memory, "vocabulary");
    const int64_t own = all.elements() / plan::TensorRanks(args_.inventory);
    for (int64_t i = 0; i < all.elements(); ++i) {
      Expect(all.As<float>()[i] == StatisticOf(i / own, memory.chunk, i % own), "statistics");
    }
    if (pass != UnitPass::kBackward) {
      return;
    }
    const int64_t chunk_rows = Workspace(memory, "logits").size[0];
    const int64_t columns = memory.addend.size[1];
    const int64_t end = std::min(memory.addend.size[0], (memory.chunk + 1) * chunk_rows);
    for (int64_t i = memory.chunk * chunk_rows * columns; i < end * columns; ++i) {
      memory.addend.As<float>()[i] = static_cast<float>((args_.coordinate + 1) * (i % 7 + 1));
    }
  }

  void FinalNorm(const UnitMemory& memory, UnitPass pass) const {
    if (pass != UnitPass::kBackward) {
      CheckStream(Shared(memory, "hidden"), HiddenFactor(), "hidden");
      return;
    }
    const TensorView dn = Workspace(memory, "dn");
    std::copy_n(dn.As<float>(), dn.elements(), Shared(memory, "dhidden").As<float>());
  }

  // Every addition multiplies the stream by 1 + T (T + 1) / 2, each half of each layer's.
  float HiddenFactor() const {
    const int64_t ranks = plan::TensorRanks(args_.inventory);
    const int64_t sum = ranks * (ranks + 1) / 2;
    int64_t factor = sum;
    for (int64_t layer = 0; layer < 2 * args_.inventory.config.num_hidden_layers; ++layer) {
      factor *= 1 + sum;
    }
    return static_cast<float>(factor);
  }
  float DhiddenFactor() const { return HiddenFactor(); }
  void CheckStream(const TensorView& stream, float factor, const char* name) const {
    for (int64_t i = 0; i < stream.elements(); ++i) {
      Expect(stream.As<float>()[i] == factor * static_cast<float>(i % 7 + 1), name);
    }
  }

  // The tensors that the segment names get 1, or 1 more; a chunked loss writes with its first
  // chunk.
  template <typename Gradient>
  void WriteGradients(SegmentKind kind, int chunk, const std::vector<Gradient>& gradients) const {
    const plan::UnitSpec& unit = args_.inventory.units[args_.unit];
    std::vector<plan::TensorId> tensors = unit.tensors;
    tensors.insert(tensors.end(), unit.borrowed.begin(), unit.borrowed.end());
    for (const auto& segment : plan::SegmentsOf(args_.inventory, args_.unit, UnitPass::kBackward)) {
      if (segment.kind != kind || segment.chunk != chunk || chunk > 0) {
        continue;
      }
      for (const plan::TensorId named : segment.gradients) {
        const auto at = std::find(tensors.begin(), tensors.end(), named) - tensors.begin();
        const TensorView& view = gradients[static_cast<size_t>(at)].view;
        for (int64_t i = 0; view.present() && i < view.elements(); ++i) {
          float& value = view.template As<float>()[i];
          value = Gradient::kOutput == kernels::Output::kAccumulate ? value + 1 : 1;
        }
      }
    }
  }

  void Expect(bool holds, const char* what) const {
    if (!holds && args_.faults->size() < 5) {
      args_.faults->push_back(
          absl::StrCat("unit ", args_.unit.value(), ", rank ", args_.coordinate, ": ", what));
    }
  }

  const Args args_;
};

class GradientsAreOnes final : public StepActions {
 public:
  GradientsAreOnes(const plan::ShardingPlan& plan,
                   ParameterGroups& groups,
                   std::vector<std::string>& faults)
      : plan_(plan), groups_(groups), faults_(faults) {}
  StatisticsMessages Measure(kernels::Stream&) override {
    return {.mine = &mine_, .all = all_.data(), .words = 1};
  }
  absl::Status Decide(kernels::Stream&) override {
    for (const ParameterGroup& group : groups_) {
      const int64_t calls = group.layout().unit == 0 ? 2 : 1;  // the tied table
      const int64_t each = plan_.lanes.lanes * plan_.lanes.micro_batches * calls;
      for (const plan::OwnedPiece& piece : group.pieces()) {
        for (int64_t i = 0; i < piece.elements(); ++i) {
          if (group.optimizer_gradient()[piece.shard_offset + i] != static_cast<float>(each)) {
            faults_.push_back(absl::StrCat("gradient of ",
                                           plan_.inventory.tensors[piece.tensor].name,
                                           " is ",
                                           group.optimizer_gradient()[piece.shard_offset + i],
                                           ", expected ",
                                           each));
            return absl::OkStatus();
          }
        }
      }
    }
    return absl::OkStatus();
  }
  absl::Status UpdateGroup(kernels::Stream&, plan::GroupId, const QuantizedUpdate&) override {
    return absl::OkStatus();
  }

 private:
  const plan::ShardingPlan& plan_;
  ParameterGroups& groups_;
  std::vector<std::string>& faults_;
  int64_t mine_ = 0;
  std::array<int64_t, 64> all_ = {};
};

absl::Status RunRank(const plan::ShardingPlan& plan,
                     comm::Communicator& communicator,
                     std::vector<std::string>& faults) {
  RETURN_IF_ERROR(RunPrograms(
      {.plan = plan,
       .module =
           [&](plan::UnitId unit, int64_t coordinate) {
             return std::make_unique<SummingUnit>(SummingUnit::Args{.inventory = plan.inventory,
                                                                    .unit = unit,
                                                                    .coordinate = coordinate,
                                                                    .faults = &faults});
           },
       .actions =
           [&](ParameterGroups& groups) {
             return std::make_unique<GradientsAreOnes>(plan, groups, faults);
           }},
      communicator));
  bool named = false;
  for (const auto& log : communicator.ledger().logs()) {
    named = named || log->group().name == plan::kTensorAxis;
  }
  if (!named) {
    faults.push_back("no log of the tensor axis");
  }
  return absl::OkStatus();
}

struct MovesCase {
  std::string transport;
  plan::Strategy strategy = plan::Strategy::kOptimGradsParams;
  int64_t data_ranks = 1;
  int64_t tensor_ranks = 2;
  int64_t micro_batches = 1;
  plan::RecomputePolicy recompute = plan::RecomputePolicy::kNone;
  int64_t chunks = 1;

  std::string name() const {
    return absl::StrCat(transport,
                        "_strategy",
                        static_cast<int>(strategy),
                        "_",
                        data_ranks,
                        "x",
                        tensor_ranks,
                        "_micro",
                        micro_batches,
                        "_recompute",
                        static_cast<int>(recompute),
                        "_chunks",
                        chunks);
  }
};

class ActivationMoves : public ::testing::TestWithParam<MovesCase> {};

TEST_P(ActivationMoves, EveryRankHasTheSumsOfItsGroup) {
  const MovesCase& tested = GetParam();
  plan::JobSpec spec = SyntheticJob(4, tested.micro_batches);
  spec.strategy = tested.strategy;
  spec.recompute = tested.recompute;
  const absl::StatusOr<plan::ShardingPlan> plan =
      plan::TensorPlan({.spec = spec,
                        .data_ranks = tested.data_ranks,
                        .tensor_ranks = tested.tensor_ranks,
                        .chunks = tested.chunks,
                        .shared_memory = tested.transport == "local" || tested.transport == "shm"});
  ASSERT_TRUE(plan.ok()) << plan.status();
  RunRanks(tested.transport, static_cast<size_t>(plan->ranks), [&](comm::Communicator& group) {
    std::vector<std::string> faults;
    const absl::Status status = RunRank(*plan, group, faults);
    EXPECT_TRUE(status.ok()) << status;
    for (const std::string& fault : faults) {
      ADD_FAILURE() << fault;
    }
    if (!status.ok()) {
      group.Abort("a rank failed");
    }
  });
}

std::vector<MovesCase> AllMoves() {
  std::vector<MovesCase> cases;
  int turn = 0;
  for (const char* transport : {"local", "shm", "gloo", "mixed"}) {
    for (const plan::Strategy strategy : {plan::Strategy::kNoShard,
                                          plan::Strategy::kOptim,
                                          plan::Strategy::kOptimGrads,
                                          plan::Strategy::kOptimGradsParams}) {
      cases.push_back({.transport = transport,
                       .strategy = strategy,
                       .data_ranks = turn % 3 + 1,
                       .tensor_ranks = turn % 2 == 0 ? 2 : 4,
                       .micro_batches = turn % 4 == 3 ? 3 : 1,
                       .recompute = turn % 2 == 1 ? plan::RecomputePolicy::kBlock
                                                  : plan::RecomputePolicy::kNone,
                       .chunks = turn % 2 == 1 || turn % 3 == 0 ? 1 : 2});
      ++turn;
    }
  }
  return cases;
}
INSTANTIATE_TEST_SUITE_P(Transports,
                         ActivationMoves,
                         ::testing::ValuesIn(AllMoves()),
                         [](const auto& test) { return test.param.name(); });

}  // namespace
}  // namespace ravel::shard
