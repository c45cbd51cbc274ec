#pragma once

// The ranks of a tensor axis in one process: all units of a model, segment by segment, each rank
// with its cut of the weights, in memory of its own. What ranks would exchange, the test hands
// over.

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "common/model/model_inventory.h"
#include "kernels/stream.h"
#include "tests/worker/model/segment_watch.h"
#include "worker/model/module.h"

namespace ravel::model {

// A mistake that a rule of the order of sums excludes.
enum class Mistake {
  kNone,
  kSumByRank,          // a rank sums its contraction whole
  kLossByRank,         // one largest logit and sum per rank
  kRoundBeforeAdding,  // of the sum, then of the residual (bf16)
  kFoldMicroBatches,   // leaves are added before micro-batches are
  kPlusZero,           // rows of the table that a rank lacks are +0
  kFirstRows,          // of a sum that is not gathered: every rank keeps the first rank's tokens
  kMembersAsOne,       // part p of a bundle is the p-th range of all its members' columns
  kSharedHeadByRank,   // a rank adds dk and dv of a key head over all its query heads at once
  kHeadNormsInOrder,   // gradients of q/k norms are added part after part, not as a tree
  kLogitsByRank,       // a chunk of logits takes the same bytes on each rank
  kWeightsByChunk,     // a weight gradient is a product of each chunk of tokens
  kPositionsByRank,    // a rank adds position gradients of its own tokens, then ranks are added
  kEmptyBlockOfZeros,  // a block of the vocabulary without rows has a largest logit of 0
};

struct RankTestModel {
  plan::ModelConfig config;
  plan::MicroBatchShape shape;
  int64_t parts = 1;
  int64_t micro_batches = 1;
  DType dtype = DType::kF32;  // of activations and weights
  plan::RecomputePolicy recompute = plan::RecomputePolicy::kNone;
  bool sequence = false;  // several ranks have their own tokens alone between products
  int64_t chunks = 1;     // of tokens, in which several ranks exchange sums
  SegmentWatch::Without without = nullptr;  // uses that segments are taken not to name
};

// Results on which all degrees must agree: by name, elements as bits.
using RankResults = std::map<std::string, std::vector<float>>;

// Runs evaluation, forward, recomputation and backward on `degree` ranks and puts together what
// they computed: hidden after each unit, losses, dhidden, and every gradient, in global shapes.
RankResults RunRanks(const RankTestModel& model, int64_t degree, Mistake mistake = Mistake::kNone);

// Names of what differs in a bit.
std::vector<std::string> Differences(const RankResults& a, const RankResults& b);

}  // namespace ravel::model
