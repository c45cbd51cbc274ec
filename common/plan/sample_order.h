#pragma once

// Which samples form global batch s: a pure function of (seed, s), so that a resize moves no
// sample.

#include <cstdint>
#include <vector>

namespace ravel::plan {

struct SampleSource {
  int64_t samples = 0;  // complete samples of sequence_length + 1 ids, neighbours sharing one id
  double weight = 1.0;
};

struct SampleOrderSpec {
  std::vector<SampleSource> sources;
  uint64_t seed = 0;
  int64_t global_batch = 1;
  int64_t lanes = 1;
};

struct SampleRef {
  int source = 0;
  int64_t index = 0;  // of the sample within its source
  int64_t pass = 0;   // how often the source had been visited completely before
  bool operator==(const SampleRef&) const = default;
};

// Samples in a token file of `tokens` ids cut for `sequence_length`: (tokens - 1) /
// sequence_length.
int64_t SampleCount(int64_t tokens, int64_t sequence_length);

// The global batch of step s (0-based), in order; lane l owns entries [l * b, (l + 1) * b), b =
// global_batch / lanes. Each pass over a source is a Philox-keyed permutation of (seed, source,
// pass). Several sources are interleaved by weight with an error-diffusion rule. O(global_batch)
// for one source.
std::vector<SampleRef> SamplesOfStep(const SampleOrderSpec& spec, int64_t step);

// Evaluation batch b: samples [b * global_batch, ...) of the validation sources in file order,
// wrapping round.
std::vector<SampleRef> EvaluationSamples(const SampleOrderSpec& spec, int64_t batch);

}  // namespace ravel::plan
