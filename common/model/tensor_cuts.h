#pragma once

// A rank's share of a tensor under the tensor axis, and the check that a model can be cut. Pure.

#include <cstdint>

#include "common/model/model_inventory.h"
#include "common/shape.h"
#include "common/status.h"

namespace ravel::plan {

// The largest part of a tensor that a rank of the axis has, which is its size in a flat buffer on
// all of them: the whole shape where nothing is cut. Of several parts (DimensionCut::parts) the
// length is that of all shares together.
Shape ItemShape(const TensorSpec& tensor);
int64_t ItemElements(const TensorSpec& tensor);

// The part of a tensor that the rank of a place on the axis has, as its item lies in a buffer: of a
// vocabulary the last ranks have fewer rows, or none.
Shape RankShape(const TensorSpec& tensor, int64_t coordinate);

// The same cut by a number of ranks.
DimensionCut CutInto(DimensionCut cut, int64_t ranks);
// Rows of a vocabulary in each of `parts` blocks, the last ones shorter or empty.
int64_t VocabularyBlockRows(int64_t vocabulary, int64_t parts);
// The cut of the token table and the head.
DimensionCut VocabularyCut(int64_t vocabulary, const TensorCut& axis);

// Elements of the dimension that the axis cuts, of a tensor with one, that one of its P parts has.
int64_t PartLength(const TensorSpec& tensor, const TensorCut& axis);

// Checks the axis alone, which BuildInventory needs: T and P are powers of two, T divides P, and
// sequence parallelism has ranks. Errors name the field.
absl::Status CheckDegrees(const TensorCut& axis);
// Checks that the axis of an inventory can cut its model: P divides the query heads, and the key
// heads or the other way round, and what each product sums over; under sequence parallelism the
// tokens of a micro-batch; cuts fall between blocks of quantized matrices and groups of states.
// Errors name the field and, where there is one, the tensor. `grouped_states`: an update takes 128
// elements of a row at a time (UpdatesInGroups).
absl::Status CheckTensorAxis(const ModelInventory& inventory,
                             int64_t micro_batch_tokens,
                             bool grouped_states);

}  // namespace ravel::plan
