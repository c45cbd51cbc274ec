#pragma once

// The jobs of tests/worker/trainer/golden/make_golden.py and a recorder of everything a run of
// local ranks produces.

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "common/model/job_spec.h"
#include "worker/trainer/local_ranks.h"

namespace ravel::trainer {

inline constexpr int64_t kGoldenSteps = 50;

// Names: odd_tied, odd_untied, bundled_rope_scaling (Llama); qwen2, qwen3 and gpt2, each _tied and
// _untied; shared_layers and layer_drop (Llama with layer_sharing, and with training.layerDrop).
// CaseJob also knows recipes, recipes_wide and recipes_gpt2, whose matrices every recipe takes.
std::vector<std::string> CaseNames();
// Names of models that a tensor axis of 4 divides: cut_llama, cut_qwen2, cut_qwen3 and cut_gpt2,
// each _tied and _untied.
std::vector<std::string> CutCaseNames();
// A folder of this process alone, by its name; gone when the process ends. ctest runs parts of one
// test program beside each other, whose cases have the same names.
std::string OwnFolder(const std::string& name);
// The job of a case, its token file written below `folder`. V = 8 lanes of one sequence.
plan::JobSpec CaseJob(const std::string& name, const std::string& folder);

// State and history of a run, joined over ranks: what must not depend on their number. Ranks that
// store the same must agree in every bit; Record checks that.
struct Recording {
  std::vector<StepResult> steps;                      // rank 0's
  std::vector<float> validation;                      // one per evaluation
  std::map<std::string, std::vector<float>> weights;  // by canonical name, whole tensors
  // The optimizer's first state with buffers, and its second, where it has one.
  std::map<std::string, std::vector<float>> exp_avg;
  std::map<std::string, std::vector<float>> exp_avg_sq;
  int64_t updates = 0;
  optim::LossScale loss_scale;  // of the next step, in fp16
};

struct RecordArgs {
  plan::JobSpec spec;
  int ranks = 1;
  bool shared_memory = true;
  int64_t first_step = 0;
  int64_t last_step = 0;  // one past
  bool evaluate_every_step = false;
  // Each step is issued before the result of the one before is read, as far as the engine lets it.
  bool ahead = false;
  const Recording* start = nullptr;  // state to begin with; nullptr: initial weights
  std::function<absl::Status(plan::ShardingPlan& plan)> adjust = nullptr;  // LocalRun
  EngineOptions options = {};
  kernels::CudaGpu* gpu = nullptr;                  // LocalRun
  std::optional<GemmOptions> gemms = std::nullopt;  // LocalRun
};
// One rank's part of such a run: its initial state, its steps and evaluations. Adds to `recording`
// what only rank 0 tells.
absl::Status RunRank(const RecordArgs& args, RankEngine& engine, int rank, Recording& recording);
// Adds the state that this rank stores; what no rank has added is unset (MergeState).
absl::Status AddState(RankEngine& engine, Recording& recording);
// Adds what is set in `from`, of other ranks of the same run. FailedPrecondition where both are set
// and differ.
absl::Status MergeState(const Recording& from, Recording& into);

absl::StatusOr<Recording> TryRecord(const RecordArgs& args);
// Expects it to succeed.
Recording Record(const RecordArgs& args);

// "" when all bits are equal, else what differs first.
std::string FirstDifference(const Recording& a, const Recording& b);

}  // namespace ravel::trainer
