// State of the optimizer in memory of the device's host: the bits of a run that keeps all on the
// device, in every type of state and either form of main weights, on any number of ranks and under
// every strategy; guesses that are right, and those that are undone.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/trace.h"
#include "tests/gpu/engine_device.h"
#include "tests/gpu/offload_runs.h"
#include "tests/testing/device_runs.h"
#include "tests/testing/resume_runs.h"

namespace ravel::trainer {
namespace {

constexpr char kOffloadModel[] = "bundled_rope_scaling";

struct StateForm {
  std::string name;
  plan::ComputeType compute = plan::ComputeType::kF32;
  plan::StateTypes states = plan::kF32States;
  plan::MainWeightForm main_weights = plan::MainWeightForm::kF32;
};

RecordArgs Steps(const StrategyCase& tested, double fraction, const StateForm& form = {}) {
  RecordArgs args = DeviceSteps(tested, kOffloadModel);
  args.spec.compute = form.compute;
  args.spec.optimizer.state_types = form.states;
  args.spec.optimizer.main_weights = form.main_weights;
  args.spec.optimizer.offload.fraction = fraction;
  args.options.offload_chunk_elements = kChunkElements;
  return args;
}

class GpuOffload : public GpuEngine {};

class GpuOffloadForms : public GpuOffload, public ::testing::WithParamInterface<StateForm> {};

const StateForm kForms[] = {
    {.name = "fp32"},
    {.name = "bf16_states", .states = plan::kBf16States},
    {.name = "compute_bf16", .compute = plan::ComputeType::kBF16},
    {.name = "remainder",
     .compute = plan::ComputeType::kBF16,
     .main_weights = plan::MainWeightForm::kBF16Remainder},
    {.name = "remainder_bf16",
     .compute = plan::ComputeType::kBF16,
     .states = plan::kBf16States,
     .main_weights = plan::MainWeightForm::kBF16Remainder},
    {.name = "fp8", .compute = plan::ComputeType::kBF16, .states = plan::kFp8States},
    {.name = "remainder_fp8_bf16",
     .compute = plan::ComputeType::kBF16,
     .states = {DType::kF8E4M3, DType::kBF16},
     .main_weights = plan::MainWeightForm::kBF16Remainder}};

INSTANTIATE_TEST_SUITE_P(Forms,
                         GpuOffloadForms,
                         ::testing::ValuesIn(kForms),
                         [](const auto& tested) { return tested.param.name; });

// Every fraction and every number of ranks, though not each with each; and of these the two that
// the form's turn brings.
TEST_P(GpuOffloadForms, EveryFractionGivesTheSameBits) {
  const StateForm& form = GetParam();
  const auto turn = std::find_if(std::begin(kForms), std::end(kForms), [&](const StateForm& other) {
    return other.name == form.name;
  });
  const Recording& whole = RecordedOnce(gpu(), form.name, Steps({}, 0, form));
  struct Case {
    double fraction;
    int64_t width;
    bool overlap = true;
    bool ahead = false;
  };
  const Case cases[] = {{.fraction = 1, .width = 1},
                        {.fraction = 0.37, .width = 2},
                        {.fraction = 0.37, .width = 1, .overlap = false},
                        {.fraction = 1, .width = 3, .ahead = true}};
  for (const Case& tested : cases) {
    if (!EveryCase() && (&tested - cases) % 2 != (turn - kForms) % 2) {
      continue;
    }
    RecordArgs args = Steps({.strategy = "ZeRO3", .width = tested.width}, tested.fraction, form);
    args.spec.optimizer.offload.overlap = tested.overlap;
    args.ahead = tested.ahead;
    args.evaluate_every_step = false;
    EXPECT_EQ(FirstDifference(whole, RecordOn(gpu(), args)), "")
        << tested.fraction << " on " << tested.width << " ranks, overlap " << tested.overlap;
  }
}

TEST_F(GpuOffload, EveryStrategyGivesTheSameBits) {
  double fraction = 1;
  int64_t turn = 0;
  for (const StateForm& form : {kForms[0], kForms[3]}) {
    const Recording& whole = RecordedOnce(gpu(), form.name, Steps({}, 0, form));
    for (const StrategyCase& tested :
         {StrategyCase{.strategy = "ZeRO0", .width = 2},
          StrategyCase{.strategy = "ZeRO1", .width = 2, .in_place = true},
          StrategyCase{.strategy = "ZeRO2", .width = 4},
          StrategyCase{.strategy = "HSDP", .width = 2},
          StrategyCase{.strategy = "HFSDP", .width = 2}}) {
      if (!EveryCase() && turn++ % 2 == 1) {
        continue;
      }
      fraction = 1.37 - fraction;
      ExpectEqualRuns(whole,
                      RecordOn(gpu(), Steps(tested, fraction, form)),
                      absl::StrCat(tested.name(), " ", fraction));
    }
  }
}

// Guesses of steps that overflow are undone.
TEST_F(GpuOffload, Fp16GivesTheSameBitsThroughOverflows) {
  const auto steps = [](const StrategyCase& tested, double fraction) {
    RecordArgs args = Steps(tested, fraction, {.name = "", .compute = plan::ComputeType::kF16});
    args.spec.loss_scale = {.initial = 32768, .growth_interval = 2};
    args.last_step = 6;
    args.evaluate_every_step = false;
    args.ahead = true;
    return args;
  };
  const Recording whole = RecordOn(gpu(), steps({}, 0));
  EXPECT_LT(whole.updates, 6);
  EXPECT_GT(whole.updates, 0);
  EXPECT_EQ(FirstDifference(whole, RecordOn(gpu(), steps({.width = 2}, 1))), "");
}

// Norms are measured around updates, and evaluations run between steps.
TEST_F(GpuOffload, NormsAndEvaluationsChangeNothing) {
  for (const StateForm& form : {kForms[0], kForms[2]}) {
    RecordArgs args = Steps({.strategy = "ZeRO3", .width = 2}, 1, form);
    args.spec.norms_every = 2;
    ExpectEqualRuns(
        RecordedOnce(gpu(), form.name, Steps({}, 0, form)), RecordOn(gpu(), args), form.name);
  }
}

// Norms of weights before, and of what updates change: those of a run that keeps all on the device,
// though other steps of the run update weights before they are decided.
TEST_F(GpuOffload, NormsAreOfWeightsBeforeTheirUpdates) {
  const auto norms_of = [](double fraction, int64_t& early) {
    RecordArgs args = Steps({}, fraction, kForms[2]);
    args.options.offload_chunk_elements = 1 << 20;
    args.spec.optimizer.clip_norm = 0;
    args.spec.norms_every = 3;
    std::vector<optim::TensorNorms> norms;
    const auto body = [&](RankEngine& engine, int) -> absl::Status {
      RETURN_IF_ERROR(engine.InitializeWeights());
      for (int64_t step = 0; step < 4; ++step) {
        RETURN_IF_ERROR(engine.TrainStep(step).status());
        if (auto taken = engine.optimizer().TakeNorms(); taken.has_value()) {
          norms.push_back(*std::move(taken));
        }
      }
      early = engine.host_updater() == nullptr ? 0 : engine.host_updater()->TakeCounts().early;
      return absl::OkStatus();
    };
    EXPECT_EQ(RunOn(gpu(), args, body), absl::OkStatus());
    return norms;
  };
  int64_t early = 0;
  const std::vector<optim::TensorNorms> expected = norms_of(0, early);
  EXPECT_EQ(early, 0);
  const std::vector<optim::TensorNorms> norms = norms_of(1, early);
  EXPECT_GT(early, 0);
  ASSERT_EQ(expected.size(), 1u);
  ASSERT_EQ(norms.size(), 1u);
  EXPECT_EQ(norms[0].gradient, expected[0].gradient);
  EXPECT_EQ(norms[0].weight, expected[0].weight);
  EXPECT_EQ(norms[0].update, expected[0].update);
}

// -- guesses

// Of one rank, whose chunks have a slot each.
RecordArgs Guessing(double fraction, double clip_norm, const StateForm& form = {}) {
  RecordArgs args = Steps({}, fraction, form);
  args.options.offload_chunk_elements = 1 << 20;
  args.spec.optimizer.clip_norm = clip_norm;
  args.spec.steps = 6;
  args.last_step = 6;
  return args;
}

TEST_F(GpuOffload, UpdatesBeginBeforeTheirStepIsDecided) {
  const CountedRun run = RunCounted(gpu(), Guessing(1, 0));
  EXPECT_EQ(FirstDifference(RunCounted(gpu(), Guessing(0, 0)).recording, run.recording), "");
  EXPECT_GE(run.chunks, 4);
  ASSERT_EQ(run.counts.size(), 6u);
  for (const optim::HostUpdateCounts& counts : run.counts) {
    EXPECT_EQ(counts.chunks, run.chunks);
    EXPECT_EQ(counts.early, run.chunks);
    EXPECT_EQ(counts.redone, 0);
  }
  RecordArgs inline_args = Guessing(1, 0);
  inline_args.spec.optimizer.offload.overlap = false;
  for (const optim::HostUpdateCounts& counts : RunCounted(gpu(), inline_args).counts) {
    EXPECT_EQ(counts.chunks, run.chunks);
    EXPECT_EQ(counts.early, 0);
  }
}

// Also where the loss scale grows from step to step.
TEST_F(GpuOffload, GuessesOfFp16KnowTheScale) {
  RecordArgs args = Guessing(1, 0);
  args.spec.compute = plan::ComputeType::kF16;
  args.spec.loss_scale = {.initial = 16, .growth_interval = 2};
  const CountedRun run = RunCounted(gpu(), args);
  EXPECT_EQ(run.recording.loss_scale.scale, 128);
  ASSERT_EQ(run.counts.size(), 6u);
  for (const optim::HostUpdateCounts& counts : run.counts) {
    EXPECT_EQ(counts.early, run.chunks);
    EXPECT_EQ(counts.redone, 0);
  }
}

// Fewer slots than chunks: the first chunks of the model take turns in some of them, and as many
// chunks as there are slots are updated early.
TEST_F(GpuOffload, ChunksTakeTurnsInTheRing) {
  struct Case {
    StateForm form;
    std::vector<int64_t> slots;
  };
  for (const auto& [form, slots_of_runs] :
       {Case{.form = kForms[0], .slots = {1, 16, 0}}, Case{.form = kForms[2], .slots = {7}}}) {
    RecordArgs args = Guessing(0, 0, form);
    args.spec.model->num_hidden_layers = 4;
    args.spec.model->intermediate_size = 512;
    args.last_step = 3;
    const Recording whole = RunCounted(gpu(), args).recording;
    args.spec.optimizer.offload.fraction = 1;
    args.options.offload_chunk_elements = kChunkElements;
    for (const int64_t slots : slots_of_runs) {
      args.options.offload_slots = slots;
      const CountedRun run = RunCounted(gpu(), args);
      EXPECT_EQ(FirstDifference(whole, run.recording), "") << form.name << ", slots " << slots;
      EXPECT_GT(run.chunks, 16);
      for (const optim::HostUpdateCounts& counts : run.counts) {
        EXPECT_EQ(counts.chunks, run.chunks);
        EXPECT_EQ(counts.early, slots > 0 ? slots : run.chunks);
      }
    }
  }
}

// A wrong guess is undone, and the next step makes none; one that would have been right is
// followed by guesses again. The bound lies within the norms of the run.
TEST_F(GpuOffload, WrongGuessesAreUndone) {
  for (const StateForm& form : {kForms[0], kForms[2], kForms[6]}) {
    if (!EveryCase() && form.name == "compute_bf16") {
      continue;
    }
    std::vector<double> norms;
    for (const StepResult& step : RunCounted(gpu(), Guessing(0, 0, form)).recording.steps) {
      norms.push_back(step.grad_norm);
    }
    std::nth_element(norms.begin(), norms.begin() + 2, norms.end());
    const double bounds[] = {norms[2] * 1.0001, 1e-3};
    for (const double clip_norm : std::span(bounds, EveryCase() && form.name == "fp32" ? 2 : 1)) {
      const Recording whole = RunCounted(gpu(), Guessing(0, clip_norm, form)).recording;
      const CountedRun run = RunCounted(gpu(), Guessing(1, clip_norm, form));
      EXPECT_EQ(FirstDifference(whole, run.recording), "") << form.name;
      bool guesses = true;
      int64_t redone = 0;
      for (size_t step = 0; step < run.counts.size(); ++step) {
        const bool right = whole.steps[step].grad_norm + 1e-6 <= clip_norm;
        EXPECT_EQ(run.counts[step].early, guesses && right ? run.chunks : 0) << step;
        EXPECT_EQ(run.counts[step].redone, guesses && !right ? run.chunks : 0) << step;
        redone += run.counts[step].redone;
        guesses = right;
      }
      EXPECT_GT(redone, 0);
    }
  }
}

// A skipped step leaves no trace on the host, and the step after it takes its own gradient.
TEST_F(GpuOffload, OffloadSkipsOnNonFinite) {
  int64_t width = 2;
  for (const StateForm& form : {kForms[2], kForms[6]}) {
    const Recording whole = WithASkippedStep(gpu(), Steps({}, 0, form));
    EXPECT_EQ(whole.updates, 4);
    const RecordArgs args = Steps({.strategy = "ZeRO3", .width = width--}, 1, form);
    EXPECT_EQ(FirstDifference(whole, WithASkippedStep(gpu(), args)), "") << form.name;
  }
}

// -- memory

// Pinned: the ring and the decision, beside what every engine pins, and a word for each of three
// more streams.
TEST_F(GpuOffload, OffloadPinsOnlyTheRing) {
  const auto pinned = [&](double fraction, int64_t* planned) {
    const RecordArgs args = Steps({}, fraction);
    int64_t bytes = 0;
    const auto body = [&](RankEngine& engine, int) -> absl::Status {
      RETURN_IF_ERROR(engine.InitializeWeights());
      RETURN_IF_ERROR(engine.TrainStep(0).status());
      bytes = gpu().memory_use().pinned_bytes;
      *planned = engine.host_updater() == nullptr ? 0 : engine.host_updater()->pinned_bytes();
      return absl::OkStatus();
    };
    EXPECT_EQ(RunOn(gpu(), args, body), absl::OkStatus());
    return bytes;
  };
  int64_t ring = 0;
  const int64_t without = pinned(0, &ring);
  EXPECT_EQ(ring, 0);
  const int64_t with = pinned(1, &ring);
  EXPECT_GT(ring, 0);
  EXPECT_EQ(with - without, ring + 3 * int64_t{sizeof(uint64_t)});
}

// What is on the device at most is what is planned: nothing is copied on its way to the host.
TEST_F(GpuOffload, OffloadPeakHasNoExtraClone) {
  for (const StateForm& form : {kForms[0], kForms[3]}) {
    std::vector<int64_t> planned;
    for (const double fraction : {0.0, 1.0}) {
      const RecordArgs args = Steps({}, fraction, form);
      const auto body = [&](RankEngine& engine, int) -> absl::Status {
        gpu().ForgetMostBytes();
        RETURN_IF_ERROR(engine.InitializeWeights());
        for (int64_t step = 0; step < 2; ++step) {
          RETURN_IF_ERROR(engine.TrainStep(step).status());
        }
        EXPECT_EQ(engine.measured_bytes(), engine.planned_bytes());
        EXPECT_EQ(gpu().memory_use().most_bytes, engine.planned_bytes() + engine.device_bytes());
        planned.push_back(engine.planned_bytes());
        if (optim::HostUpdater* host = engine.host_updater(); host != nullptr) {
          const plan::ShardingPlan plan = *PlanLocalRanks({.spec = args.spec});
          const auto left = static_cast<double>(
              plan::OffloadOf(plan.buffers, plan.groups, plan.options).offloaded_bytes);
          EXPECT_NEAR(static_cast<double>(planned[0] - planned[1]), left, 32 * 256);  // alignment
          EXPECT_GT(host->kept_bytes(), 0);
        }
        return absl::OkStatus();
      };
      EXPECT_EQ(RunOn(gpu(), args, body), absl::OkStatus());
    }
  }
}

// What the plan says of the host is what is taken there.
TEST_F(GpuOffload, OffloadCountsLocalElements) {
  for (const int64_t width : {1, 3}) {
    RecordArgs args = Steps({.strategy = "ZeRO3", .width = width}, 1, kForms[3]);
    args.options.offload_chunk_elements = 0;
    const auto plan = PlanLocalRanks({.spec = args.spec, .ranks = args.ranks});
    ASSERT_TRUE(plan.ok()) << plan.status();
    const plan::OffloadFacts facts = plan::OffloadOf(plan->buffers, plan->groups, plan->options);
    const auto body = [&](RankEngine& engine, int) -> absl::Status {
      EXPECT_EQ(std::ssize(engine.offloaded()), plan->memory.offload_bytes);
      EXPECT_LT(plan->memory.offload_bytes - facts.offloaded_bytes, 64 * 4096);    // pages
      EXPECT_EQ(engine.host_updater()->pinned_bytes(), facts.pinned_bytes + 256);  // the decision
      EXPECT_EQ(engine.host_updater()->kept_bytes(), facts.kept_bytes);
      return absl::OkStatus();
    };
    EXPECT_EQ(RunOn(gpu(), args, body), absl::OkStatus());
  }
}

// -- state that goes on elsewhere

// From four ranks with all state on the host to two with none there, and back.
TEST_F(GpuOffload, AStateGoesOnAtAnotherFraction) {
  for (const StateForm& form : {kForms[0], kForms[4]}) {
    const Recording& whole = RecordedOnce(gpu(), form.name, Steps({}, 0, form));
    for (const double fraction : {0.0, 1.0}) {
      RecordArgs begin =
          Steps({.strategy = "ZeRO3", .width = fraction > 0 ? 4 : 2}, fraction, form);
      begin.last_step = 2;
      const Recording saved = RecordOn(gpu(), begin);
      RecordArgs rest =
          Steps({.strategy = "ZeRO3", .width = fraction > 0 ? 2 : 4}, 1 - fraction, form);
      rest.first_step = 2;
      rest.start = &saved;
      Recording later = RecordOn(gpu(), rest);
      PutBefore(saved, later);
      ExpectEqualRuns(whole, later, form.name);
    }
  }
}

// Through the files of checkpoints. The count of updates comes with them: another one would change
// every later update.
TEST_F(GpuOffload, OffloadStepCounterAfterLoad) {
  const std::string folder = absl::StrCat(::testing::TempDir(), "/ravel_gpu_offload_saves");
  std::filesystem::remove_all(folder);
  ResumeRuns runs(folder);
  for (const StateForm& form : {kForms[1], kForms[6]}) {
    const auto epoch = [&](double fraction) {
      plan::JobSpec spec = CaseJob(kOffloadModel, folder);
      spec.cpu_devices = false;
      spec.compute = form.compute;
      spec.optimizer.state_types = form.states;
      spec.optimizer.main_weights = form.main_weights;
      spec.optimizer.offload.fraction = fraction;
      return runs.Whole(spec, 1);
    };
    const EpochOutcome device = RunWell(epoch(0));
    const EpochOutcome host = RunWell(epoch(1));
    ExpectSameStart(RunWell(ResumeRuns::ReadBack(host, epoch(0))), device);
    ExpectSameEnd(RunWell(ResumeRuns::From(host, epoch(0))), device);
    ExpectSameEnd(RunWell(ResumeRuns::From(device, epoch(1))), device);
  }
  std::filesystem::remove_all(folder);
}

// -- what runs beside backward, counted from traces on a device that takes its time

constexpr char kPace[] = "RAVEL_EMULATED_PACE_MICROSECONDS";
constexpr int64_t kTracedSteps = 4;

class GpuOffloadOverlap : public GpuEngine {
 protected:
  void SetUp() override {
    GpuEngine::SetUp();
    if (!IsSkipped() && emulated() && std::getenv(kPace) == nullptr) {
      GTEST_SKIP() << "an emulated device without " << kPace << " has no times to compare";
    }
  }
};

struct TracedStep {
  int64_t chunks = 0;  // updated
  int64_t hidden = 0;  // of these, before the last backward ended
};

std::vector<TracedStep> TraceUpdates(kernels::CudaGpu& gpu,
                                     const RecordArgs& args,
                                     int64_t traced_steps) {
  trace::Recorder recorder;
  const auto body = [&](RankEngine& engine, int) -> absl::Status {
    RETURN_IF_ERROR(engine.InitializeWeights());
    RETURN_IF_ERROR(engine.TrainStep(0).status());
    engine.executor().set_recorder(&recorder);
    engine.host_updater()->set_recorder(&recorder);
    for (int64_t step = 1; step <= traced_steps; ++step) {
      RETURN_IF_ERROR(engine.TrainStep(step).status());
      std::byte one = {};  // read when all is done
      RETURN_IF_ERROR(engine.memory().Read(engine.offloaded().data(), {&one, 1}));
      RETURN_IF_ERROR(engine.executor().CollectTrace(recorder));
    }
    return absl::OkStatus();
  };
  EXPECT_EQ(RunOn(gpu, args, body), absl::OkStatus());
  const std::vector<trace::Event> events = recorder.Take();
  std::vector<TracedStep> steps;
  for (int64_t step = 2; step < traced_steps + 2; ++step) {
    int64_t backward_ns = 0;
    for (const trace::Event& event : events) {
      if (event.step == step && event.op == "Backward") {
        backward_ns = std::max(backward_ns, event.end_ns);
      }
    }
    TracedStep traced;
    for (const trace::Event& event : events) {
      if (event.step == step && event.op == "HostUpdate") {
        traced.chunks += 1;
        traced.hidden += event.end_ns <= backward_ns ? 1 : 0;
      }
    }
    std::printf("step %d: %d chunks updated, %d of them beside backward\n",
                static_cast<int>(step),
                static_cast<int>(traced.chunks),
                static_cast<int>(traced.hidden));
    steps.push_back(traced);
  }
  return steps;
}

// All but the last chunk, in one of the traced steps at least: a busy host may be late with one,
// and its clock and the device's are not known to agree to the microsecond.
// The embedding's gradient is final when backward ends; the first layer's, whose reduce takes half
// as long as the embedding's backward, is copied and updated beside that.
TEST_F(GpuOffloadOverlap, OffloadOverlapPays) {
  RecordArgs args = DeviceSteps({.strategy = "ZeRO3"}, "odd_untied");
  args.spec.compute = plan::ComputeType::kBF16;
  args.spec.model->num_hidden_layers = 18;
  args.spec.virtual_ranks = 1;
  args.spec.global_batch = 1;
  args.spec.optimizer.clip_norm = 0;
  args.spec.optimizer.offload.fraction = 1;
  args.spec.steps = kTracedSteps + 1;
  int64_t hidden = 0;
  for (const TracedStep& step : TraceUpdates(gpu(), args, kTracedSteps)) {
    EXPECT_EQ(step.chunks, 20);  // a group each: a unit
    hidden = std::max(hidden, step.hidden);
  }
  EXPECT_GE(hidden, 19);
  args.spec.optimizer.offload.overlap = false;
  for (const TracedStep& step : TraceUpdates(gpu(), args, 1)) {
    EXPECT_EQ(step.chunks, 20);
    EXPECT_EQ(step.hidden, 0);
  }
}

}  // namespace
}  // namespace ravel::trainer
