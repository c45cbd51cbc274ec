#pragma once

// The passes of a unit as lists of segments: the parts between which activations may move from rank
// to rank. Without such moves a unit runs the segments of a pass one after another.

#include <cstdint>
#include <string>
#include <vector>

#include "common/model/model_inventory.h"

namespace ravel::plan {

// kEvaluate: a forward without a backward to come.
enum class UnitPass : uint8_t { kForward = 1, kEvaluate = 2, kRecompute = 3, kBackward = 4 };
inline constexpr UnitPass kLastUnitPass = UnitPass::kBackward;

// t tokens, h hidden. Adding to the residual stream `hidden` is part of the product before it.
enum class SegmentKind : uint8_t {
  kTable = 1,          // hidden [t, h] = rows of the token table
  kPositions = 2,      // hidden += rows of learned positions
  kAttentionNorm = 3,  // n0 [t, h] = norm(hidden)
  kAttention = 4,      // hidden += the output product of attention over n0
  kMlpNorm = 5,        // n1 [t, h] = norm(hidden)
  kMlp = 6,            // hidden += the output product of the MLP over n1
  kFinalNorm = 7,      // n [t, h] = norm(hidden)
  kLoss = 8,           // losses [t] of n; its backward comes first of all
};
const char* SegmentName(SegmentKind kind);
const char* UnitPassName(UnitPass pass);

// The list of activations of a unit, or of all units (kShared), that a name is looked up in.
enum class ActivationList : uint8_t { kSaved = 1, kRemade = 2, kWorkspace = 3, kShared = 4 };

// What a segment does to an activation. Neither: it is overwritten before it is read, and nothing
// after the segment reads it.
struct SegmentUse {
  ActivationList list = ActivationList::kShared;
  std::string name;  // of the ActivationSpec
  bool reads = false;
  bool writes = false;
  bool operator==(const SegmentUse&) const = default;
};

struct SegmentSpec {
  SegmentKind kind = SegmentKind::kTable;
  // Each activation that it touches, once.
  std::vector<SegmentUse> uses;
  // Tensors of the unit, its own or borrowed, whose weights it reads, in the unit's order. In a
  // backward it writes the gradients of exactly these that are trained.
  std::vector<TensorId> weights;
};

// The segments of a pass in the order in which they run. kRecompute: none where the unit recomputes
// nothing. Pure.
std::vector<SegmentSpec> SegmentsOf(const ModelInventory& inventory, UnitId unit, UnitPass pass);

}  // namespace ravel::plan
