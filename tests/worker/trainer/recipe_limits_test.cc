// Limits of other systems, as regressions: what a checkpoint, a skipped step or a replica must not
// do to quantized weights, their scales and the optimizer's state. tests/README.md lists the
// guards.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/ckpt/manifest_proto.h"
#include "common/ckpt/step_layout.h"
#include "common/clock.h"
#include "common/dtype.h"
#include "common/model/recipes.h"
#include "common/signed_size.h"
#include "common/store/file_store.h"
#include "tests/testing/heap_bytes.h"
#include "tests/testing/recipe_cases.h"
#include "tests/testing/resume_runs.h"
#include "tests/testing/strategy_cases.h"
#include "worker/comm/issue_log.h"
#include "worker/comm/local_communicator.h"
#include "worker/optim/stored_state.h"
#include "worker/trainer/code_evidence.h"
#include "worker/trainer/initial_state.h"

namespace ravel::trainer {
namespace {

using plan::Recipe;
using ::testing::HasSubstr;

class RecipeLimits : public ::testing::Test {
 protected:
  RecipeLimits()
      : folder_(OwnFolder(absl::StrCat(
            "ravel_limits_", ::testing::UnitTest::GetInstance()->current_test_info()->name()))) {
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_ + "/disk");
  }
  ~RecipeLimits() override { std::filesystem::remove_all(folder_); }

  plan::JobSpec Job(Recipe recipe) const {
    plan::JobSpec spec = CaseJob("recipes", folder_);
    UseRecipe(recipe, spec);
    return spec;
  }
  EpochArgs Epoch(Recipe recipe, int ranks) { return runs_.Whole(Job(recipe), ranks); }

  const std::string folder_;
  ResumeRuns runs_{folder_};
};

const quant::QuantPiece& FirstPiece(RankEngine& engine) {
  for (const shard::ParameterGroup& group : engine.groups()) {
    if (!group.quant_pieces().empty()) {
      return group.quant_pieces().front();
    }
  }
  CheckFailed(__FILE__, __LINE__, "pieces", "this rank has no quantized row");
}

// Everything that a load has to fill is NaN before it.
TEST_F(RecipeLimits, LoadTouchesEveryParameter) {
  constexpr float kUntouched = std::numeric_limits<float>::quiet_NaN();
  for (const RecipeForm& form : kRecipeForms) {
    SCOPED_TRACE(form.name);
    const EpochOutcome whole = RunWell(Epoch(form.recipe, 4));
    LocalRun run = {.spec = Job(form.recipe), .ranks = 2};
    auto ranks = comm::CreateLocalGroup(2);
    ASSERT_TRUE(ranks.ok()) << ranks.status();
    run.body = [&](RankEngine& engine, int rank) -> absl::Status {
      const auto visit = [&](const auto& action) {
        for (const shard::ParameterGroup& group : engine.groups()) {
          for (const plan::StateRole role :
               {plan::StateRole::kParam, plan::StateRole::kExpAvg, plan::StateRole::kExpAvgSq}) {
            for (const plan::OwnedPiece& piece : group.pieces()) {
              action(group, role, piece);
            }
          }
        }
      };
      visit([&](const auto& group, plan::StateRole role, const plan::OwnedPiece& piece) {
        float* state = optim::StoredFloats(group, role);
        std::fill_n(state + piece.shard_offset, piece.elements(), kUntouched);
      });
      Assignment assignment;
      assignment.rank = rank;
      assignment.world_size = 2;
      assignment.spec = run.spec;
      assignment.plan = PlanLocalRanks(run).value();
      assignment.restore_path = whole.committed.at(kResumeStep);
      Position position(SystemClock::Get());
      RETURN_IF_ERROR(PrepareState(assignment, *At(*ranks, rank), engine, position));
      visit([&](const auto& group, plan::StateRole role, const plan::OwnedPiece& piece) {
        const float* state = optim::StoredFloats(group, role) + piece.shard_offset;
        EXPECT_TRUE(std::none_of(state, state + piece.elements(), [](float value) {
          return std::isnan(value);
        })) << engine.tensor(piece.tensor).name;
      });
      EXPECT_EQ(engine.updates(), kResumeStep);
      return absl::OkStatus();
    };
    const absl::Status ran = RunLocalRanks(run);
    EXPECT_TRUE(ran.ok()) << ran;
  }
}

// The codes of a whole weight, decoded and encoded again by the amaxes of what was decoded.
std::vector<uint8_t> EncodedAgain(RankEngine& engine, const quant::QuantPiece& piece) {
  kernels::CpuStream stream;
  const int64_t rows = piece.main_weight.size[0];
  const int64_t columns = piece.main_weight.size[1];
  kernels::WeightScales scales = engine.quant()->ScalesOf(piece.tensor, false).weight;
  std::vector<uint16_t> decoded(Size(rows * columns));
  TensorView narrow = MatrixView(nullptr, rows, columns);
  narrow.dtype = DType::kBF16;
  narrow.data = decoded.data();
  float whole = 0;
  kernels::DecodeWeight(
      stream,
      {.codes = piece.codes, .scales = scales, .to = narrow, .scale = VectorView(&whole, 1)});
  std::vector<float> values(decoded.size());
  std::transform(decoded.begin(), decoded.end(), values.begin(), Bf16ToFloat);
  std::vector<uint32_t> amaxes(Size(scales.amax.size[0] * scales.amax.size[1]), 0);
  scales.amax.data = amaxes.data();
  const TensorView wide = MatrixView(values.data(), rows, columns);
  kernels::BlockAmax(stream,
                     {.from = wide, .edge = plan::BlockEdge(scales.recipe), .amax = scales.amax});
  std::vector<uint8_t> codes(Size(piece.codes.size[0] * piece.codes.size[1]));
  TensorView to = piece.codes;
  to.data = codes.data();
  kernels::QuantizeWeight(stream, {.from = wide, .scales = scales, .codes = to});
  return codes;
}

// MXFP8 weights that are decoded and encoded again have other codes: a load casts main weights.
TEST_F(RecipeLimits, NeverRequantizeDecodedCodes) {
  const auto body = [](RankEngine& engine, int) -> absl::Status {
    RETURN_IF_ERROR(engine.InitializeWeights());
    int64_t weights = 0;
    int64_t others = 0;
    for (const shard::ParameterGroup& group : engine.groups()) {
      for (const quant::QuantPiece& piece : group.quant_pieces()) {
        const std::vector<uint8_t> again = EncodedAgain(engine, piece);
        others += std::memcmp(again.data(), piece.codes.data, again.size()) != 0 ? 1 : 0;
        ++weights;
      }
    }
    EXPECT_EQ(weights, 14);
    EXPECT_GT(others, 0);
    return absl::OkStatus();
  };
  plan::JobSpec spec = Job(Recipe::kMxFp8);
  spec.init_std = 0.0675;  // amaxes of many blocks are just above 448 * 2^-11, to which they round
  const absl::Status ran = RunLocalRanks({.spec = spec, .ranks = 1, .body = body});
  EXPECT_TRUE(ran.ok()) << ran;
  const EpochOutcome whole = RunWell(Epoch(Recipe::kMxFp8, 4));
  ExpectSameStart(RunWell(ResumeRuns::ReadBack(whole, Epoch(Recipe::kMxFp8, 2))), whole);
}

// Codes of initial weights and of later ones are cast from fp32; by way of bf16 some would differ.
TEST_F(RecipeLimits, OneRoundingOrderPerJob) {
  for (const RecipeForm& form : kRecipeForms) {
    SCOPED_TRACE(form.name);
    const auto body = [](RankEngine& engine, int) -> absl::Status {
      RETURN_IF_ERROR(engine.InitializeWeights());
      kernels::CpuStream queue;
      for (int64_t step = 0; step < 3; ++step) {
        const quant::QuantPiece& piece = FirstPiece(engine);
        const auto cast = [&](const float* from) {
          std::vector<uint8_t> codes(Size(piece.codes.size[0] * piece.codes.size[1]));
          TensorView to = piece.codes;
          to.data = codes.data();
          TensorView source = piece.main_weight;
          source.data = const_cast<float*>(from);
          kernels::QuantizeWeight(queue,
                                  {.from = source,
                                   .first_row = piece.first_row,
                                   .scales = engine.quant()->ScalesOf(piece.tensor, false).weight,
                                   .codes = to});
          return codes;
        };
        const auto* main = piece.main_weight.As<float>();
        const std::vector<uint8_t> codes = cast(main);
        EXPECT_EQ(std::memcmp(codes.data(), piece.codes.data, codes.size()), 0) << step;
        std::vector<float> rounded(main,
                                   main + piece.main_weight.size[0] * piece.main_weight.size[1]);
        for (float& value : rounded) {
          value = Bf16ToFloat(FloatToBf16(value));
        }
        EXPECT_NE(cast(rounded.data()), codes) << step;
        RETURN_IF_ERROR(engine.TrainStep(step).status());
      }
      return absl::OkStatus();
    };
    const absl::Status ran = RunLocalRanks({.spec = Job(form.recipe), .ranks = 1, .body = body});
    EXPECT_TRUE(ran.ok()) << ran;
  }
  const EpochOutcome saved = RunWell(Epoch(Recipe::kCurrent, 1));
  EXPECT_EQ(ManifestOf(saved.committed.at(kResumeStep)).quant.rounding, "fp32");
}

// With the histories that were saved the run goes on as it was; with new ones it does not.
TEST_F(RecipeLimits, DelayedScaleSurvivesReload) {
  const EpochOutcome whole = RunWell(Epoch(Recipe::kDelayed, 4));
  ExpectSameStart(RunWell(ResumeRuns::ReadBack(whole, Epoch(Recipe::kDelayed, 2))), whole);
  ExpectSameEnd(RunWell(ResumeRuns::From(whole, Epoch(Recipe::kDelayed, 2))), whole);
  EpochArgs other = ResumeRuns::From(whole, Epoch(Recipe::kDelayed, 2));
  other.spec.recipe.history = kCaseHistory + 1;  // what was saved does not fit
  const EpochOutcome renewed = RunWell(other);
  ASSERT_EQ(renewed.steps.size(), 3u);
  EXPECT_NE(renewed.steps[0].loss, whole.steps[3].loss);
}

// Tensors that a bundle fuses are saved each by its name, in its own shape.
TEST_F(RecipeLimits, BundleMembersReshardByName) {
  const auto plan = PlanLocalRanks({.spec = Job(Recipe::kFloat8Block), .ranks = 4});
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_FALSE(plan->inventory.bundles.empty());
  const EpochOutcome four = RunWell(Epoch(Recipe::kFloat8Block, 4));
  const EpochOutcome one = RunWell(Epoch(Recipe::kFloat8Block, 1));
  const ckpt::Manifest of_four = ManifestOf(four.committed.at(kResumeStep));
  const ckpt::Manifest of_one = ManifestOf(one.committed.at(kResumeStep));
  std::set<std::string> domains;
  for (const ckpt::QuantizedRecord& weight : of_four.quant.tensors) {
    domains.insert(weight.domain);
  }
  EXPECT_EQ(domains.size(), 8u) << "q, k, v and gate, up share";
  for (const plan::TensorSpec& tensor : plan->inventory.tensors) {
    const ckpt::TensorRecord* found = of_four.FindTensor(tensor.name);
    ASSERT_NE(found, nullptr) << tensor.name;
    EXPECT_EQ(found->shape, tensor.shape) << tensor.name;
    EXPECT_EQ(found->digest64, of_one.FindTensor(tensor.name)->digest64) << tensor.name;
  }
  EXPECT_EQ(of_four.quant, of_one.quant);
}

TEST_F(RecipeLimits, SteadyStateAllocatesNothing) {
  for (const RecipeForm& form : kRecipeForms) {
    const auto body = [&](RankEngine& engine, int rank) -> absl::Status {
      RETURN_IF_ERROR(engine.InitializeWeights());
      int64_t first = 0;
      for (int64_t step = 0; step < 20; ++step) {
        RETURN_IF_ERROR(engine.TrainStep(step).status());
        RETURN_IF_ERROR(engine.Evaluate().status());  // a barrier too: the other rank is at rest
        first = step == 1 ? testing::HeapBytes() : first;
      }
      // Room for what threads keep at hand: two kilobytes per step would show.
      EXPECT_TRUE(rank != 0 || testing::HeapBytes() < first + 32 * 1024) << form.name;
      EXPECT_LE(engine.measured_bytes(), engine.planned_bytes() + RankEngine::kMostMeasuredSlack);
      return absl::OkStatus();
    };
    const absl::Status ran = RunLocalRanks({.spec = Job(form.recipe), .ranks = 2, .body = body});
    EXPECT_TRUE(ran.ok()) << ran;
  }
}

// The first update has a bias correction of its own: it moves weights by the learning rate.
TEST_F(RecipeLimits, StepCountStartsAtZero) {
  plan::JobSpec spec = Job(Recipe::kCurrent);
  spec.optimizer.weight_decay = 0;
  spec.schedule = {.kind = plan::ScheduleKind::kConstant, .warmup_steps = 0};
  const auto body = [&](RankEngine& engine, int) -> absl::Status {
    EXPECT_EQ(engine.updates(), 0);
    RETURN_IF_ERROR(engine.InitializeWeights());
    EXPECT_EQ(engine.updates(), 0);
    const TensorView& view = FirstPiece(engine).main_weight;
    const auto* weights = view.As<float>();
    const std::vector<float> before(weights, weights + view.size[0] * view.size[1]);
    RETURN_IF_ERROR(engine.TrainStep(0).status());
    EXPECT_EQ(engine.updates(), 1);
    float most = 0;
    for (size_t i = 0; i < before.size(); ++i) {
      most = std::max(most, std::fabs(weights[i] - before[i]));
    }
    EXPECT_NEAR(most, spec.optimizer.lr, 1e-3 * spec.optimizer.lr);
    return absl::OkStatus();
  };
  const absl::Status ran = RunLocalRanks({.spec = spec, .ranks = 1, .body = body});
  EXPECT_TRUE(ran.ok()) << ran;
}

struct SkipMode {
  const char* name;
  Recipe recipe = Recipe::kNone;
  plan::StateTypes states = plan::kF32States;
  plan::MainWeightForm main_weights = plan::MainWeightForm::kF32;
  double offload = 0;
};

absl::Status FillFirstGroup(RankEngine& engine, float value) {
  const shard::ParameterGroup& group = engine.groups().front();
  for (const plan::OwnedPiece& piece : group.pieces()) {
    const std::vector<float> values(Size(piece.elements()), value);
    RETURN_IF_ERROR(optim::WriteStored(
        engine.memory(), group, plan::StateRole::kParam, piece.shard_offset, values));
  }
  return engine.RefreshWeights(shard::UnitExecutor::Refresh::kLoaded);
}

// Weights, moments, codes, scales and histories; of this rank.
struct SkipState {
  Recording state;
  uint64_t scales = 0;
};
absl::StatusOr<SkipState> StateOf(RankEngine& engine) {
  SkipState now;
  RETURN_IF_ERROR(AddState(engine, now.state));
  now.scales = engine.quant() == nullptr ? 0 : engine.quant()->ReplicatedDigest();
  for (const shard::ParameterGroup& group : engine.groups()) {
    for (const quant::QuantPiece& piece : group.quant_pieces()) {
      const auto* codes = piece.codes.As<uint8_t>();
      for (int64_t i = 0; i < piece.codes.size[0] * piece.codes.size[1]; ++i) {
        now.scales = now.scales * 31 + codes[i];
      }
    }
  }
  return now;
}

TEST_F(RecipeLimits, SkipChangesNothingInEveryMode) {
  constexpr plan::MainWeightForm kRemainder = plan::MainWeightForm::kBF16Remainder;
  for (const SkipMode& mode :
       {SkipMode{.name = "fp32"},
        SkipMode{.name = "bf16 states", .states = plan::kBf16States},
        SkipMode{.name = "fp8 states", .states = plan::kFp8States},
        SkipMode{.name = "remainder", .main_weights = kRemainder},
        SkipMode{.name = "offload", .offload = 1},
        SkipMode{.name = "delayed", .recipe = Recipe::kDelayed},
        SkipMode{.name = "current", .recipe = Recipe::kCurrent},
        SkipMode{.name = "block", .recipe = Recipe::kFloat8Block},
        SkipMode{.name = "mxfp8, fp8 states, offload",
        .recipe = Recipe::kMxFp8,
        .states = plan::kFp8States,
        .offload = 1},
        SkipMode{
            .name = "nvfp4, remainder", .recipe = Recipe::kNvFp4, .main_weights = kRemainder}}) {
    SCOPED_TRACE(mode.name);
    plan::JobSpec spec = CaseJob("recipes", folder_);
    UseRecipe(mode.recipe, spec);
    spec.optimizer.state_types = mode.states;
    spec.optimizer.main_weights = mode.main_weights;
    spec.optimizer.offload = {.fraction = mode.offload, .path = folder_ + "/disk"};
    const auto body = [&](RankEngine& engine, int) -> absl::Status {
      RETURN_IF_ERROR(engine.InitializeWeights());
      for (int64_t step = 0; step < 2; ++step) {
        RETURN_IF_ERROR(engine.TrainStep(step).status());
      }
      RETURN_IF_ERROR(FillFirstGroup(engine, std::numeric_limits<float>::quiet_NaN()));
      ASSIGN_OR_RETURN(const SkipState before, StateOf(engine));
      ASSIGN_OR_RETURN(const StepResult skipped, engine.TrainStep(2));
      EXPECT_TRUE(skipped.skipped);
      ASSIGN_OR_RETURN(const SkipState after, StateOf(engine));
      EXPECT_EQ(FirstDifference(before.state, after.state), "");
      EXPECT_EQ(before.scales, after.scales);
      EXPECT_EQ(engine.updates(), 2);
      RETURN_IF_ERROR(FillFirstGroup(engine, 0.01f));
      ASSIGN_OR_RETURN(const StepResult next, engine.TrainStep(3));
      EXPECT_FALSE(next.skipped);
      return absl::OkStatus();
    };
    const absl::Status ran = RunLocalRanks({.spec = spec, .ranks = 2, .body = body});
    EXPECT_TRUE(ran.ok()) << ran;
  }
}

// Ranks exchange no scales, so a difference would stay: the next reduce of amaxes names both ranks.
TEST_F(RecipeLimits, ARankWithOtherScalesIsNamed) {
  for (const bool shared_memory : {true, false}) {
    for (const Recipe recipe : {Recipe::kDelayed, Recipe::kMxFp8}) {
      const auto body = [&](RankEngine& engine, int rank) -> absl::Status {
        RETURN_IF_ERROR(engine.InitializeWeights());
        RETURN_IF_ERROR(engine.TrainStep(0).status());
        if (rank == 1 && recipe == Recipe::kDelayed) {
          float history = 0;
          const plan::StateRole role = plan::StateRole::kAmaxHistory;
          shard::HostAccess& memory = engine.memory();
          RETURN_IF_ERROR(optim::ReadScales(memory, *engine.quant(), role, 5, {&history, 1}));
          history = std::nextafter(history, 1.0f);
          RETURN_IF_ERROR(optim::WriteScales(memory, *engine.quant(), role, 5, {&history, 1}));
        } else if (rank == 1) {
          const plan::TensorId tensor = engine.quant()->layout().tensors[3].tensor;
          ++*engine.quant()->ScalesOf(tensor, false).weight.amax.As<uint32_t>();
        }
        return engine.TrainStep(1).status();
      };
      const absl::Status ran = RunLocalRanks(
          {.spec = Job(recipe), .ranks = 3, .shared_memory = shared_memory, .body = body});
      EXPECT_THAT(std::string(ran.message()), HasSubstr(comm::kMismatchText));
      EXPECT_THAT(std::string(ran.message()), HasSubstr("AmaxReduce"));
      EXPECT_THAT(std::string(ran.message()), HasSubstr(", scales "));
    }
  }
}

// The manifest, with another digest of one weight's codes, published as if it had been so.
void ChangeDigest(const std::string& step_directory, size_t weight) {
  ckpt::Manifest manifest = ManifestOf(step_directory);
  manifest.quant.tensors[weight].digest64 ^= 1;
  const std::string bytes = ckpt::EncodeManifest(manifest);
  const auto write = [&](std::string_view name, const std::string& content) {
    std::ofstream(absl::StrCat(step_directory, "/", std::string(name)),
                  std::ios::binary | std::ios::trunc)
        << content;
  };
  write(ckpt::kManifestFile, bytes);
  write(ckpt::kCommitFile, ckpt::EncodeCommit(ckpt::MakeCommitRecord(manifest, bytes)));
}

TEST_F(RecipeLimits, CodesThatWereNotTrainedWithAreNamedAtLoad) {
  const EpochOutcome whole = RunWell(Epoch(Recipe::kNvFp4, 2));
  const std::string directory = whole.committed.at(kResumeStep);
  const std::string name = ManifestOf(directory).quant.tensors[3].name;
  ChangeDigest(directory, 3);
  const EpochOutcome refused = RunEpoch(ResumeRuns::From(whole, Epoch(Recipe::kNvFp4, 3)));
  for (const absl::Status& result : refused.results) {
    EXPECT_THAT(std::string(result.message()),
                HasSubstr("codes of 1 quantized weight(s) are not those that were trained with: " +
                          name + ": digest64 "));
  }
  // Another recipe has other codes.
  EXPECT_EQ(RunWell(ResumeRuns::From(whole, Epoch(Recipe::kMxFp8, 3))).steps.size(), 3u);
}

}  // namespace
}  // namespace ravel::trainer
