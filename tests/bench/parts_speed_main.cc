// The cost of sums in parts (determinism.tensorParts): steps of one rank with one part and with
// several, turn by turn in one process. Prints one JSON line per pair of steps, then the median of
// the quotients.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>

#include "tests/testing/training_cases.h"

namespace ravel::trainer {
namespace {

using Clock = std::chrono::steady_clock;

// A Llama of 34 M parameters, of which 8 M are tables.
plan::JobSpec Job(const std::string& folder, int64_t parts, int64_t key_heads) {
  plan::JobSpec spec = CaseJob("bundled_rope_scaling", folder);
  plan::ModelConfig& model = *spec.model;
  model.vocab_size = 8192;
  model.hidden_size = 512;
  model.intermediate_size = 1408;
  model.num_hidden_layers = 8;
  model.num_attention_heads = 8;
  model.num_key_value_heads = key_heads;
  model.head_dim = 64;
  model.max_position_embeddings = 256;
  model.rope_scaling_factor = 1.0;
  spec.data.sequence_length = 256;
  spec.global_batch = 4;
  spec.virtual_ranks = 1;
  spec.evaluation_every = 0;
  spec.tensor_parts = parts;
  return spec;
}

double SecondsOf(RankEngine& engine, int64_t step, absl::Status& status) {
  const auto start = Clock::now();
  status.Update(engine.TrainStep(step).status());
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Steps of both engines in turns; the first pair warms up.
absl::Status Measure(RankEngine& one, RankEngine& other, int64_t pairs) {
  absl::Status status = one.InitializeWeights();
  status.Update(other.InitializeWeights());
  std::vector<double> quotients;
  for (int64_t pair = 0; pair <= pairs && status.ok(); ++pair) {
    const bool other_first = pair % 2 == 1;
    double later = other_first ? SecondsOf(other, pair, status) : 0;
    const double first = SecondsOf(one, pair, status);
    later = other_first ? later : SecondsOf(other, pair, status);
    if (pair > 0) {
      quotients.push_back(later / first);
      absl::PrintF("{\"pair\": %d, \"one_s\": %.4f, \"parts_s\": %.4f, \"quotient\": %.4f}\n",
                   pair,
                   first,
                   later,
                   quotients.back());
      std::fflush(stdout);
    }
  }
  std::sort(quotients.begin(), quotients.end());
  absl::PrintF("{\"median\": %.4f}\n", quotients.empty() ? 0.0 : quotients[quotients.size() / 2]);
  return status;
}

int Serve(const std::string& folder, int64_t parts, int64_t pairs, int64_t key_heads) {
  const absl::Status status =
      RunLocalRanks({.spec = Job(folder, 1, key_heads), .body = [&](RankEngine& one, int) {
                       return RunLocalRanks({.spec = Job(folder, parts, key_heads),
                                             .body = [&](RankEngine& other, int) {
                                               return Measure(one, other, pairs);
                                             }});
                     }});
  if (!status.ok()) {
    std::fprintf(stderr, "%s\n", status.ToString().c_str());
    return 1;
  }
  return 0;
}

}  // namespace
}  // namespace ravel::trainer

int main(int argc, char** argv) {
  const std::string folder = argc > 1 ? argv[1] : "";
  const int64_t parts = argc > 2 ? std::atoll(argv[2]) : 4;
  const int64_t pairs = argc > 3 ? std::atoll(argv[3]) : 10;
  const int64_t key_heads = argc > 4 ? std::atoll(argv[4]) : 8;
  if (folder.empty() || parts < 1 || pairs < 1 || key_heads < 1) {
    std::fprintf(stderr, "usage: parts_speed FOLDER [PARTS] [PAIRS] [KEY_HEADS]\n");
    return 2;
  }
  return ravel::trainer::Serve(folder, parts, pairs, key_heads);
}
