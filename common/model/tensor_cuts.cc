// Sizes of cut tensors, and the rules for what may be cut. P rather than T has to divide: a job
// keeps P when it changes T, and what a part holds is the same for all T.

#include "common/model/tensor_cuts.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <string>

#include <absl/strings/str_cat.h>

#include "common/check.h"
#include "common/field_error.h"
#include "common/model/architecture/architecture.h"
#include "common/model/state_groups.h"
#include "common/recipe.h"
#include "common/signed_size.h"

namespace ravel::plan {
namespace {

constexpr char kTensorField[] = "parallelism.tensor";
constexpr char kPartsField[] = "determinism.tensorParts";
constexpr char kChunksField[] = "parallelism.tensorChunks";
constexpr int64_t kVocabularyStep = 8;
// Gemms of codes read whole accesses, and digests of codes whole words.
constexpr int64_t kCodesStep = 16;

bool IsPowerOfTwo(int64_t value) {
  return value > 0 && std::has_single_bit(static_cast<uint64_t>(value));
}

// " of NAME": the matrix with the model's query heads (0) or key heads (1).
std::string OfHeadMatrix(const ModelInventory& inventory, int which) {
  std::string name;
  for (const TensorSpec& tensor : inventory.tensors) {
    if (tensor.cut.heads > 0 && which-- >= 0) {
      name = absl::StrCat(" of ", tensor.name);
    }
  }
  return name;
}

absl::Status CheckHeads(const ModelInventory& inventory, int64_t parts, const char* field) {
  const ModelConfig& config = inventory.config;
  const int64_t heads = config.num_attention_heads;
  const int64_t key_heads = config.num_key_value_heads;
  if (heads % parts != 0) {
    return FieldRefusal(
        field,
        absl::StrCat("a divisor of the ", heads, " heads", OfHeadMatrix(inventory, 0)),
        absl::StrCat(parts));
  }
  if (key_heads % parts != 0 && parts % key_heads != 0) {
    return FieldRefusal(
        field,
        absl::StrCat(
            "a divisor or a multiple of the ", key_heads, " key heads", OfHeadMatrix(inventory, 1)),
        absl::StrCat(parts));
  }
  const Architecture& architecture = ArchitectureOf(config.architecture);
  const bool fused = architecture.qkv.names.size() == 1;
  if (fused && key_heads % parts != 0) {
    return FieldRefusal(
        field,
        absl::StrCat("a divisor of the ", key_heads, " key heads, which lie in one matrix"),
        absl::StrCat(parts));
  }
  return absl::OkStatus();
}

// Ranges that P leaves cut the dimension into: whole heads.
int64_t PiecesOf(const DimensionCut& cut, int64_t parts) {
  return cut.heads > 0 ? std::min(cut.heads, parts) : parts;
}

absl::Status CheckEven(const TensorSpec& tensor, int64_t parts, const char* field) {
  const DimensionCut& cut = tensor.cut;
  const int64_t pieces = PiecesOf(cut, parts);
  const auto check = [&](int64_t length) {
    return length % pieces == 0
               ? absl::OkStatus()
               : FieldRefusal(
                     field,
                     absl::StrCat(
                         "a divisor of ", length, ", dimension ", cut.dim, " of ", tensor.name),
                     absl::StrCat(parts));
  };
  for (const int64_t part : cut.parts) {
    RETURN_IF_ERROR(check(part));
  }
  return check(tensor.shape[Size(cut.dim)]);
}

absl::Status CheckChunks(const TensorCut& axis) {
  if (!IsPowerOfTwo(axis.chunks) || axis.chunks > kMostTensorChunks) {
    return FieldRefusal(kChunksField,
                        absl::StrCat("a power of two up to ", kMostTensorChunks),
                        absl::StrCat(axis.chunks));
  }
  return axis.chunks == 1 || axis.degree > 1
             ? absl::OkStatus()
             : FieldRefusal(
                   kChunksField, "1 without parallelism.tensor", absl::StrCat(axis.chunks));
}

// Blocks that share a scale lie in one part.
absl::Status CheckBlocks(const TensorSpec& tensor, const TensorCut& axis, bool grouped_states) {
  const DimensionCut& cut = tensor.cut;
  const int64_t length = PartLength(tensor, axis);
  const bool quantized = tensor.recipe != Recipe::kNone;
  const int64_t block = quantized ? std::max(kCodesStep, BlockEdge(tensor.recipe)) : int64_t{1};
  const std::string got = absl::StrCat(length, " of dimension ", cut.dim);
  if (length % block != 0) {
    return FieldRefusal("precision.recipe",
                        absl::StrCat("parts of ", tensor.name, " that are multiples of ", block),
                        got);
  }
  const bool in_rows = cut.dim > 0 || tensor.shape.size() == 1;
  if (grouped_states && tensor.trainable && in_rows && length % kStateGroup != 0) {
    return FieldRefusal(
        "training.optimizer.stateDtype",
        absl::StrCat(
            "fp32 or bf16, or parts of ", tensor.name, " that are multiples of ", kStateGroup),
        got);
  }
  return absl::OkStatus();
}

}  // namespace

int64_t PartLength(const TensorSpec& tensor, const TensorCut& axis) {
  return tensor.shape[Size(tensor.cut.dim)] / PiecesOf(tensor.cut, axis.parts);
}

Shape ItemShape(const TensorSpec& tensor) {
  Shape item = tensor.shape;
  if (tensor.cut.cuts()) {
    int64_t& length = item[Size(tensor.cut.dim)];
    const int64_t even = DivCeil(length, tensor.cut.pieces());
    length = tensor.cut.chunk > 0 ? std::min(length, tensor.cut.chunk) : even;
  }
  return item;
}

Shape RankShape(const TensorSpec& tensor, int64_t coordinate) {
  Shape item = ItemShape(tensor);
  if (tensor.cut.cuts()) {
    const int64_t whole = tensor.shape[Size(tensor.cut.dim)];
    int64_t& length = item[Size(tensor.cut.dim)];
    const int64_t first = coordinate / tensor.cut.copies * length;
    length = std::clamp(whole - first, int64_t{0}, length);
  }
  return item;
}

int64_t ItemElements(const TensorSpec& tensor) {
  return ElementCount(ItemShape(tensor));
}

DimensionCut CutInto(DimensionCut cut, int64_t ranks) {
  CHECK_MSG(cut.chunk == 0, "a vocabulary is cut in blocks");
  cut.ranks = ranks;
  cut.copies = cut.heads > 0 ? std::max<int64_t>(1, ranks / cut.heads) : 1;
  return cut;
}

int64_t VocabularyBlockRows(int64_t vocabulary, int64_t parts) {
  return parts <= 1 ? vocabulary : RoundUp(DivCeil(vocabulary, parts), kVocabularyStep);
}

DimensionCut VocabularyCut(int64_t vocabulary, const TensorCut& axis) {
  const int64_t blocks = axis.parts / std::min(axis.parts, axis.degree);
  return {
      .dim = 0,
      .ranks = axis.degree,
      .chunk = axis.parts > 1 ? blocks * VocabularyBlockRows(vocabulary, axis.parts) : int64_t{0}};
}

absl::Status CheckDegrees(const TensorCut& axis) {
  if (!IsPowerOfTwo(axis.degree) || axis.degree > kMostTensorParts) {
    return FieldRefusal(kTensorField,
                        absl::StrCat("a power of two up to ", kMostTensorParts),
                        absl::StrCat(axis.degree));
  }
  if (!IsPowerOfTwo(axis.parts) || axis.parts % axis.degree != 0) {
    return FieldRefusal(
        kPartsField,
        absl::StrCat("a power of two that parallelism.tensor ", axis.degree, " divides"),
        absl::StrCat(axis.parts));
  }
  if (axis.sequence && axis.degree == 1) {
    return FieldRefusal("parallelism.sequenceParallel", "false without parallelism.tensor", "true");
  }
  return CheckChunks(axis);
}

absl::Status CheckTensorAxis(const ModelInventory& inventory,
                             int64_t micro_batch_tokens,
                             bool grouped_states) {
  const TensorCut& axis = inventory.cut;
  RETURN_IF_ERROR(CheckDegrees(axis));
  if (axis.parts == 1) {
    return absl::OkStatus();
  }
  if (axis.chunks > 1 && micro_batch_tokens % (axis.degree * axis.chunks) != 0) {
    return FieldRefusal("training.microBatch",
                        absl::StrCat("times data.sequenceLength a multiple of ",
                                     axis.degree * axis.chunks,
                                     ", parallelism.tensor times tensorChunks"),
                        absl::StrCat(micro_batch_tokens, " tokens"));
  }
  if (axis.sequence && micro_batch_tokens % axis.parts != 0) {
    return FieldRefusal("training.microBatch",
                        absl::StrCat("times data.sequenceLength a multiple of ",
                                     axis.parts,
                                     ", since parallelism.sequenceParallel cuts tokens"),
                        absl::StrCat(micro_batch_tokens, " tokens"));
  }
  const char* field = axis.parts == axis.degree ? kTensorField : kPartsField;
  RETURN_IF_ERROR(CheckHeads(inventory, axis.parts, field));
  for (const TensorSpec& tensor : inventory.tensors) {
    if (tensor.cut.dim >= 0 && tensor.cut.chunk == 0) {
      RETURN_IF_ERROR(CheckEven(tensor, axis.parts, field));
      RETURN_IF_ERROR(CheckBlocks(tensor, axis, grouped_states));
    }
  }
  return absl::OkStatus();
}

}  // namespace ravel::plan
