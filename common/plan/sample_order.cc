// Maps a position in training to a sample without any list, so a resize or resume needs no state.
// Sources are mixed with Bresenham's rule: after n positions each source has had its share of n,
// rounded. Within one pass over a source the order is a permutation by a Feistel network keyed with
// (seed, source, pass); it permutes a power of four, and values beyond the source's size are mapped
// again until they fall inside. Cost per sample: a few Philox draws, whatever the size.

#include "common/plan/sample_order.h"

#include <bit>
#include <cmath>
#include <cstddef>

#include "common/check.h"
#include "common/philox.h"
#include "common/signed_size.h"

namespace ravel::plan {
namespace {

// The order is part of what a run is: changing anything below changes the loss curve of every job.
constexpr int kRounds = 6;
constexpr uint32_t kSampleOrderPurpose = 5;  // top byte of the counter; 0 to 4 are draws of numbers
constexpr int kShareBits = 32;

struct PassKey {
  uint64_t seed = 0;
  uint32_t source = 0;
  uint32_t pass = 0;
};

// A permutation of [0, 2^(2 * half_bits)): a balanced Feistel network whose round function is one
// Philox draw.
uint64_t Feistel(const PassKey& key, int half_bits, uint64_t value) {
  const uint64_t mask = (uint64_t{1} << half_bits) - 1;
  uint64_t left = value >> half_bits;
  uint64_t right = value & mask;
  for (uint32_t round = 0; round < kRounds; ++round) {
    const PhiloxBlock draw = PhiloxDraw(
        key.seed,
        {static_cast<uint32_t>(right), key.pass, key.source, round | (kSampleOrderPurpose << 24)});
    const uint64_t next = left ^ (draw[0] & mask);
    left = right;
    right = next;
  }
  return (left << half_bits) | right;
}

// Walks the cycle of the network until it is back inside [0, size): a permutation of [0, size),
// fewer than four tries on average.
int64_t Permuted(const PassKey& key, int64_t size, int64_t index) {
  const int bits = static_cast<int>(std::bit_width(static_cast<uint64_t>(size - 1)));
  const int half_bits = (bits + 1) / 2;
  CHECK(half_bits <= 32);
  if (half_bits == 0) {
    return 0;
  }
  auto value = static_cast<uint64_t>(index);
  do {
    value = Feistel(key, half_bits, value);
  } while (value >= static_cast<uint64_t>(size));
  return static_cast<int64_t>(value);
}

// Returns how many of `count` positions go to a source with `share` / 2^32 of them: the nearest
// integer.
int64_t ShareOf(int64_t count, uint64_t share) {
  constexpr auto kHalf = static_cast<unsigned __int128>(uint64_t{1} << (kShareBits - 1));
  const unsigned __int128 product = static_cast<unsigned __int128>(count) * share + kHalf;
  return static_cast<int64_t>(product >> kShareBits);
}

// Each source's share of what the sources before it left over, in 1 / 2^32.
std::vector<uint64_t> SharesOfRest(const std::vector<SampleSource>& sources) {
  std::vector<uint64_t> shares(sources.size(), 0);
  double rest = 0;
  for (size_t i = sources.size(); i-- > 0;) {
    CHECK(sources[i].weight >= 0 && std::isfinite(sources[i].weight));
    const double weight = sources[i].samples > 0 ? sources[i].weight : 0.0;
    rest += weight;
    if (weight > 0) {
      shares[i] = static_cast<uint64_t>(std::ldexp(weight / rest, kShareBits));
    }
  }
  CHECK_MSG(rest > 0, "no source with samples");
  return shares;
}

struct Position {
  size_t source = 0;
  int64_t visit = 0;  // visits of that source before this one
};

// Splits the stream of positions source by source with Bresenham's rule; a position goes to the
// first source whose count rises there. The last source with a share takes all that is left.
Position Locate(const std::vector<uint64_t>& shares, int64_t position) {
  for (size_t i = 0; i < shares.size(); ++i) {
    const int64_t before = ShareOf(position, shares[i]);
    if (ShareOf(position + 1, shares[i]) > before) {
      return {i, before};
    }
    position -= before;
  }
  CHECK_MSG(false, "the last share is 1");
  return {};
}

}  // namespace

int64_t SampleCount(int64_t tokens, int64_t sequence_length) {
  CHECK_GT(sequence_length, 0);
  return tokens < 1 ? 0 : (tokens - 1) / sequence_length;
}

std::vector<SampleRef> SamplesOfStep(const SampleOrderSpec& spec, int64_t step) {
  CHECK(step >= 0 && spec.global_batch > 0 && spec.lanes > 0);
  CHECK_EQ(spec.global_batch % spec.lanes, 0);
  const std::vector<uint64_t> shares = SharesOfRest(spec.sources);
  std::vector<SampleRef> samples;
  samples.reserve(Size(spec.global_batch));
  for (int64_t i = 0; i < spec.global_batch; ++i) {
    const Position at = Locate(shares, step * spec.global_batch + i);
    const int64_t size = spec.sources[at.source].samples;
    const int64_t pass = at.visit / size;
    const PassKey key = {.seed = spec.seed,
                         .source = static_cast<uint32_t>(at.source),
                         .pass = static_cast<uint32_t>(pass)};
    samples.push_back({.source = static_cast<int>(at.source),
                       .index = Permuted(key, size, at.visit % size),
                       .pass = pass});
  }
  return samples;
}

std::vector<SampleRef> EvaluationSamples(const SampleOrderSpec& spec, int64_t batch) {
  CHECK(batch >= 0 && spec.global_batch > 0);
  int64_t total = 0;
  for (const SampleSource& source : spec.sources) {
    total += source.samples;
  }
  CHECK_MSG(total > 0, "no source with samples");
  std::vector<SampleRef> samples;
  samples.reserve(Size(spec.global_batch));
  for (int64_t i = 0; i < spec.global_batch; ++i) {
    const int64_t position = batch * spec.global_batch + i;
    int64_t index = position % total;
    int source = 0;
    while (index >= At(spec.sources, source).samples) {
      index -= At(spec.sources, source).samples;
      ++source;
    }
    samples.push_back({.source = source, .index = index, .pass = position / total});
  }
  return samples;
}

}  // namespace ravel::plan
