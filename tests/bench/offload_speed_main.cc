// G7 on a CPU: steps of one rank with the state of the optimizer in memory, in a file with overlap,
// and in a file without, in turns. Prints one JSON line per turn: seconds of the median step, and
// what OffloadTimes counted in it. The weights must be the same at the end of every turn.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>

#include "common/check.h"
#include "tests/testing/training_cases.h"

namespace ravel::trainer {
namespace {

using Clock = std::chrono::steady_clock;

struct Mode {
  const char* name;
  double fraction;
  bool overlap;
};
constexpr Mode kModes[] = {{"memory", 0, true}, {"overlap", 1, true}, {"inline", 1, false}};

// 13 M parameters, 104 MiB of moments.
plan::JobSpec Job(const Mode& mode, const std::string& folder, int64_t batch) {
  plan::JobSpec spec = CaseJob("bundled_rope_scaling", folder);
  plan::ModelConfig& model = *spec.model;
  model.hidden_size = 384;
  model.intermediate_size = 1024;
  model.num_hidden_layers = 7;
  model.num_attention_heads = 6;
  model.num_key_value_heads = 6;
  model.head_dim = 64;
  spec.global_batch = batch;
  spec.virtual_ranks = 1;
  spec.evaluation_every = 0;
  spec.optimizer.offload = {.fraction = mode.fraction, .path = folder, .overlap = mode.overlap};
  return spec;
}

struct Turn {
  std::vector<double> seconds;
  optim::OffloadTimes times = {};
  std::vector<StepResult> results;
};

absl::Status Train(RankEngine& engine, int64_t steps, Turn& turn) {
  RETURN_IF_ERROR(engine.InitializeWeights());
  for (int64_t step = 0; step <= steps; ++step) {
    const auto start = Clock::now();
    ASSIGN_OR_RETURN(const StepResult result, engine.TrainStep(step));
    turn.results.push_back(result);
    if (step > 0) {
      turn.seconds.push_back(std::chrono::duration<double>(Clock::now() - start).count());
    } else if (engine.offload() != nullptr) {
      engine.offload()->TakeTimes();
    }
  }
  if (engine.offload() != nullptr) {
    RETURN_IF_ERROR(engine.offload()->Drain());
    turn.times = engine.offload()->TakeTimes();
  }
  return absl::OkStatus();
}

double MedianOf(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

int Serve(const std::string& folder, int64_t turns, int64_t steps, int64_t batch) {
  std::vector<StepResult> expected;
  for (int64_t turn = 0; turn < turns; ++turn) {
    for (const Mode& mode : kModes) {
      Turn measured;
      const absl::Status status =
          RunLocalRanks({.spec = Job(mode, folder, batch), .body = [&](RankEngine& engine, int) {
                           return Train(engine, steps, measured);
                         }});
      if (!status.ok()) {
        std::fprintf(stderr, "%s\n", status.ToString().c_str());
        return 1;
      }
      if (expected.empty()) {
        expected = measured.results;
      }
      for (size_t i = 0; i < expected.size(); ++i) {
        CHECK_MSG(expected[i].loss == measured.results[i].loss, "another history");
      }
      const double updates = static_cast<double>(steps);
      absl::PrintF(
          "{\"mode\": \"%s\", \"turn\": %d, \"step_s\": %.4f, \"moving_s\": %.4f, "
          "\"waiting_s\": %.4f, \"updating_s\": %.4f}\n",
          mode.name,
          turn,
          MedianOf(measured.seconds),
          measured.times.moving / updates,
          measured.times.waiting / updates,
          measured.times.updating / updates);
      std::fflush(stdout);
    }
  }
  return 0;
}

}  // namespace
}  // namespace ravel::trainer

int main(int argc, char** argv) {
  const std::string folder = argc > 1 ? argv[1] : "";
  const int64_t turns = argc > 2 ? std::atoll(argv[2]) : 5;
  const int64_t steps = argc > 3 ? std::atoll(argv[3]) : 5;
  const int64_t batch = argc > 4 ? std::atoll(argv[4]) : 4;
  if (folder.empty() || turns < 1 || steps < 1 || batch < 1) {
    std::fprintf(stderr,
                 "usage: offload_speed FOLDER [TURNS] [STEPS] [BATCH], of 48 tokens each\n");
    return 2;
  }
  return ravel::trainer::Serve(folder, turns, steps, batch);
}
