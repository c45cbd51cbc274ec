#pragma once

// The passes of a unit as lists of segments: the parts between which activations may move from rank
// to rank. Without such moves a unit runs the segments of a pass one after another.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "common/model/model_inventory.h"
#include "common/shape.h"

namespace ravel::plan {

// kEvaluate: a forward without a backward to come.
enum class UnitPass : uint8_t { kForward = 1, kEvaluate = 2, kRecompute = 3, kBackward = 4 };

// t tokens, h hidden. On one rank adding to the residual stream `hidden` is part of the product
// before it. Where the tensor axis has T ranks each computes an addend [t, h] of such a product,
// and of the gradient of what it reads, and segments from kTableSum on are between: each rank adds
// the addends of all for t / T tokens, its own. Under sequence parallelism (TensorCut::sequence) it
// then keeps these alone: norms and residuals are of t / T tokens, and what products read is
// gathered by segments from kAttentionNormed on.
enum class SegmentKind : uint8_t {
  kTable = 1,               // hidden [t, h] = rows of the token table
  kPositions = 2,           // hidden += rows of learned positions
  kAttentionNorm = 3,       // n0 [t, h] = norm(hidden)
  kAttention = 4,           // hidden += the output product of attention over n0
  kMlpNorm = 5,             // n1 [t, h] = norm(hidden)
  kMlp = 6,                 // hidden += the output product of the MLP over n1
  kFinalNorm = 7,           // n [t, h] = norm(hidden)
  kLoss = 8,                // losses [t] of n; its backward comes first of all
  kTableSum = 9,            // hidden = sum, where every rank has rows of the table
  kAttentionResidual = 10,  // hidden += sum + the bias of the output product
  kMlpResidual = 11,        // the same
  kAttentionInput = 12,     // backward: gradient of n0 = sum
  kMlpInput = 13,           // backward: gradient of n1 = sum
  kLossStatistics = 14,     // of a chunk of tokens: maxima and sums of this rank's vocabulary
  kLossOfChunk = 15,        // losses from the statistics of all ranks; backward: addend of dn
  kLossInput = 16,          // backward: gradient of n = sum
  kAttentionNormed = 17,    // n0 of all tokens
  kMlpNormed = 18,          // n1 of all tokens
  kLossNormed = 19,         // n of all tokens
  kAttentionGradient = 20,  // backward: of hidden after the attention, of all tokens
  kMlpGradient = 21,        // the same after the MLP
  kTableGradient = 22,      // the same of what rows of a table were added to
  // Parts of kAttention and kMlp, which then end before them, so that moves run beside products.
  kAttentionOutput = 23,        // addend of a chunk of tokens: the output product
  kMlpOutput = 24,              // the same
  kAttentionInputProduct = 25,  // backward: addend of a chunk of the gradient of n0
  kMlpInputProduct = 26,        // the same of n1
  kAttentionWeights = 27,       // backward: gradients of the weights that read n0
  kMlpWeights = 28,             // the same of n1
};
const char* SegmentName(SegmentKind kind);
const char* UnitPassName(UnitPass pass);

// The list of activations of a unit, or of all units (kShared), that a name is looked up in.
// kInputGradient: the one of all units that is summed while gradients of weights are computed.
enum class ActivationList : uint8_t {
  kSaved = 1,
  kRemade = 2,
  kWorkspace = 3,
  kShared = 4,
  kInputGradient = 5,
};

// A segment's use of an activation. Neither read nor written: it is overwritten before it is read,
// and nothing after the segment reads it.
struct SegmentUse {
  ActivationList list = ActivationList::kShared;
  std::string name;  // of the ActivationSpec
  bool reads = false;
  bool writes = false;
  bool operator==(const SegmentUse&) const = default;
};

// Moves that ranks of the tensor axis make around a segment.
enum class SegmentMove : uint8_t {
  kNone = 0,
  // Before it the addends of all ranks can be read, the segment sums its own tokens into
  // UnitMemory::rows, and after it the rows of all ranks are `target`.
  kSumRows = 1,
  // The segment writes UnitMemory::rows; after it those of all ranks are `target`.
  kGather = 2,
  // As kSumRows, but nothing is gathered: UnitMemory::rows are `target`, which the segment writes.
  kScatterRows = 3,
};
// True if the segment sums addends of all ranks.
constexpr bool ExchangesAddends(SegmentMove move) {
  return move == SegmentMove::kSumRows || move == SegmentMove::kScatterRows;
}
// True if rows of all ranks are put together after the segment.
constexpr bool GathersRows(SegmentMove move) {
  return move == SegmentMove::kSumRows || move == SegmentMove::kGather;
}

struct SegmentSpec {
  SegmentKind kind = SegmentKind::kTable;
  // The chunk of tokens: of the loss, or (TensorCut::chunks) of products whose addends are moved
  // and of sums.
  int chunk = 0;
  int64_t chunks = 1;
  SegmentMove move = SegmentMove::kNone;
  SegmentUse target = {};  // of a move: written by it, but of kScatterRows by the segment
  bool addend = false;     // writes UnitMemory::addend, or rows of it
  bool chunked = false;    // the addend that it writes or sums is that of a chunk alone
  // Each activation that it touches, once.
  std::vector<SegmentUse> uses = {};
  // Tensors of the unit, its own or borrowed, whose weights it reads, in the unit's order.
  std::vector<TensorId> weights = {};
  // Tensors of which a backward writes the gradients, as far as they are trained.
  std::vector<TensorId> gradients = {};
};

// The segments of a pass in the order in which they run. kRecompute: none where the unit recomputes
// nothing. Pure.
std::vector<SegmentSpec> SegmentsOf(const ModelInventory& inventory, UnitId unit, UnitPass pass);

// Ranks of the tensor axis that units are computed on; 1: none of them moves activations.
int64_t TensorRanks(const ModelInventory& inventory);
// By name; nullptr: there is none.
const ActivationSpec* FindActivation(const std::vector<ActivationSpec>& specs,
                                     std::string_view name);
// Shape and type of what ActivationList::kInputGradient names: those of this rank's residual
// stream.
const ActivationSpec& InputGradientSpec(const ModelInventory& inventory);
// Chunks of tokens in which the loss of a cut vocabulary is computed. CHECKs that `head` is one.
int64_t LossChunks(const ModelInventory& inventory, const UnitSpec& head);
// Shape of the residual stream of all tokens of a micro-batch, whatever part of them a rank has.
Shape StreamShape(const ModelInventory& inventory);

}  // namespace ravel::plan
