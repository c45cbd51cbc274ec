#pragma once

// The token ids of each lane's micro-batch, from memory-mapped token files.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/model/job_spec.h"
#include "common/plan/sample_order.h"
#include "common/status.h"
#include "common/tensor_view.h"
#include "common/token_file.h"

namespace ravel::data {

struct TokenSources {
  std::vector<plan::DataSource> train;
  std::vector<plan::DataSource> validation;
  TokenFormat format = TokenFormat::kAuto;
};

// Lanes and what each of them reads in a step.
struct BatchShape {
  int64_t lanes = 1;
  int64_t micro_batches = 1;  // of a lane
  int64_t sequences = 1;      // of a micro-batch
  int64_t sequence_tokens = 0;
  int64_t vocabulary = 0;

  int64_t lane_samples() const { return micro_batches * sequences; }
  int64_t global_batch() const { return lanes * lane_samples(); }
};

// Which samples form which batch is common/plan/sample_order's business; this reads them. Sample i
// of a source is ids [i * L, i * L + L], L = sequence length: the first L are inputs, the last L
// targets. Used only from one thread.
class BatchLoader {
 public:
  // Opens all files. `seed` keys the order of samples. Errors name the file and what was expected.
  static absl::StatusOr<std::unique_ptr<BatchLoader>> Open(const TokenSources& sources,
                                                           const BatchShape& shape,
                                                           uint64_t seed);

  bool has_validation() const { return !validation_.files.empty(); }

  // Ids and targets of one micro-batch of a lane, [sequences * sequence_tokens] i32 each: the
  // lane's samples in order. An id outside the vocabulary is an error that names file, position and
  // id.
  struct LaneArgs {
    int64_t batch = 0;  // step (0-based), or evaluation batch
    int64_t lane = 0;
    int64_t micro_batch = 0;  // of the lane
    TensorView ids;
    TensorView targets;
  };
  absl::Status LoadTraining(const LaneArgs& args);
  absl::Status LoadValidation(const LaneArgs& args);

  // Asks the kernel for the pages of a lane of a later step.
  void PrefetchTraining(int64_t step, int64_t lane);

 private:
  struct Split {
    std::vector<std::string> paths;
    std::vector<std::unique_ptr<TokenFile>> files;
    plan::SampleOrderSpec order;
    int64_t cached_batch = -1;
    std::vector<plan::SampleRef> samples;  // of cached_batch
  };

  BatchLoader(const BatchShape& shape, uint64_t seed);
  absl::Status OpenSplit(const std::vector<plan::DataSource>& sources,
                         TokenFormat format,
                         const std::string& field,
                         Split& split);
  absl::Status Load(Split& split, const LaneArgs& args);
  absl::Status ReadSample(const Split& split,
                          const plan::SampleRef& sample,
                          int32_t* ids,
                          int32_t* targets);

  const BatchShape shape_;
  const uint64_t seed_;
  Split training_;
  Split validation_;
  std::vector<int32_t> row_;  // sequence_tokens + 1 ids
};

}  // namespace ravel::data
