#include "common/model/recipes.h"

#include <algorithm>
#include <array>

#include <absl/strings/str_cat.h>

#include "common/check.h"
#include "common/field_error.h"
#include "common/gemm_scales.h"
#include "common/model/architecture/architecture.h"
#include "common/model/bundles.h"
#include "common/model/freeze.h"
#include "common/model/gemm_paths.h"
#include "common/model/tensor_cuts.h"

namespace ravel::plan {
namespace {

// The multiple that the dimensions of a weight have to be.
int64_t ShapeStep(Recipe recipe) {
  return recipe == Recipe::kNvFp4 ? 32 : std::max<int64_t>(1, BlockEdge(recipe));
}

// The multiple that the tokens of a micro-batch have to be: gradients of weights have blocks along
// tokens, of which only those of fp8_block may be shorter.
int64_t TokenStep(Recipe recipe) {
  return recipe == Recipe::kFloat8Block ? 1 : std::max<int64_t>(1, BlockEdge(recipe));
}

// Products of chunks of tokens, or of each rank's share of a chunk, are gemms by themselves.
absl::Status CheckChunkTokens(Recipe recipe, GemmPath path, int64_t tokens, const TensorCut& cut) {
  if (cut.chunks == 1) {
    return absl::OkStatus();
  }
  if (!ScalesTokensApart(recipe)) {
    return FieldRefusal(
        "parallelism.tensorChunks",
        absl::StrCat("1 with ", RecipeName(recipe), ", which has scales of all tokens"),
        absl::StrCat(cut.chunks));
  }
  const int64_t step = GemmStep(path) * cut.chunks * (cut.sequence ? cut.degree : 1);
  if (tokens % step != 0) {
    return FieldRefusal("training.microBatch",
                        absl::StrCat("times data.sequenceLength a multiple of ",
                                     step,
                                     ", since a gemm of ",
                                     RecipeName(recipe),
                                     " takes ",
                                     GemmStep(path),
                                     " tokens of each of the tensorChunks"),
                        absl::StrCat(tokens, " tokens"));
  }
  return absl::OkStatus();
}

// Maps that are fused in one matrix and cut in parts each keep bf16: their columns in one part are
// not one range.
bool MayQuantize(const ModelInventory& inventory, const TensorSpec& tensor) {
  const bool cut_within = inventory.cut.cuts() && tensor.cut.parts[0] > 0;
  return tensor.trainable && tensor.shape.size() == 2 && !cut_within &&
         inventory.units[tensor.unit].kind == UnitKind::kLayer;
}

absl::Status MarkKept(const RecipeSpec& spec,
                      const ModelInventory& inventory,
                      IdVector<TensorId, bool>& kept) {
  for (size_t i = 0; i < spec.keep_bf16.size(); ++i) {
    bool matched = false;
    for (const TensorId id : inventory.tensors.ids()) {
      const TensorSpec& tensor = inventory.tensors[id];
      if (MayQuantize(inventory, tensor) && MatchesGlob(spec.keep_bf16[i], tensor.name)) {
        kept[id] = true;
        matched = true;
      }
    }
    if (!matched) {
      return FieldRefusal(absl::StrCat("precision.keepBf16[", i, "]"),
                          "a pattern that matches a trained matrix of a layer",
                          absl::StrCat("'", spec.keep_bf16[i], "'"));
    }
  }
  return absl::OkStatus();
}

// Gemms of packed codes sum over one part: its codes are whole 16 bytes of a row.
absl::Status CheckPart(GemmPath path, const TensorSpec& tensor, const TensorCut& axis) {
  const bool in_parts = axis.parts > 1 && tensor.cut.dim >= 0 && tensor.cut.chunk == 0;
  if (path != GemmPath::kNvFp4 || !in_parts || PartLength(tensor, axis) % GemmStep(path) == 0) {
    return absl::OkStatus();
  }
  return FieldRefusal(
      "precision.recipe",
      absl::StrCat("parts of ", tensor.name, " that are multiples of ", GemmStep(path)),
      absl::StrCat(PartLength(tensor, axis), " of dimension ", tensor.cut.dim));
}

absl::Status CheckShape(Recipe recipe,
                        GemmPath path,
                        const TensorSpec& tensor,
                        const TensorCut& axis) {
  RETURN_IF_ERROR(CheckPart(path, tensor, axis));
  const int64_t step = std::max(ShapeStep(recipe), GemmStep(path));
  if (tensor.shape[0] % step == 0 && tensor.shape[1] % step == 0) {
    return absl::OkStatus();
  }
  return FieldRefusal("precision.recipe",
                      absl::StrCat("matrices whose dimensions are multiples of ",
                                   step,
                                   ", or a pattern in precision.keepBf16, since ",
                                   RecipeName(recipe),
                                   " has blocks"),
                      absl::StrCat(tensor.name, " ", ShapeText(tensor.shape)));
}

// Widths of the gemms of a layer: the widest input and output, and the most elements of the weights
// that one gemm reads.
struct GemmWidths {
  int64_t input = 0;
  int64_t output = 0;
  int64_t weight = 0;
  int64_t weight_scales = 0;  // most bytes of those of one gemm's weights, in either order
};

// The forms that gemms of a path read scales of blocks in: those of weights, and of activations.
ScaleForm WeightForm(GemmPath path) {
  switch (path) {
    case GemmPath::kFp8Block:
      return ScaleForm::kSquares128;
    case GemmPath::kMxFp8:
    case GemmPath::kBlockAsMxFp8:
      return ScaleForm::kBlocks32;
    case GemmPath::kNvFp4:
      return ScaleForm::kBlocks16;
    default:
      return ScaleForm::kTensor;
  }
}
ScaleForm ActivationForm(GemmPath path) {
  return path == GemmPath::kFp8Block ? ScaleForm::kBlocks128 : WeightForm(path);
}

// Bytes of scales of a matrix that gemms read as it is and transposed.
int64_t BytesOfScales(ScaleForm form, int64_t rows, int64_t columns) {
  return std::max(ScaleBytes(form, rows, columns), ScaleBytes(form, columns, rows));
}

// The matrices of one linear map of a layer: of q|k|v all three.
std::vector<const TensorSpec*> MatricesOf(const ModelInventory& inventory,
                                          const UnitSpec& unit,
                                          const LinearNames& linear) {
  std::vector<const TensorSpec*> matrices;
  for (const TensorId id : unit.tensors) {
    const TensorSpec& tensor = inventory.tensors[id];
    const bool of_linear =
        std::any_of(linear.names.begin(), linear.names.end(), [&](std::string_view name) {
          return tensor.name.ends_with(
              absl::StrCat(".", absl::string_view(name.data(), name.size()), ".weight"));
        });
    if (of_linear && tensor.shape.size() == 2) {
      matrices.push_back(&tensor);
    }
  }
  return matrices;
}

bool AnyQuantized(const std::vector<const TensorSpec*>& matrices) {
  return std::any_of(matrices.begin(), matrices.end(), [](const TensorSpec* tensor) {
    return tensor->recipe != Recipe::kNone;
  });
}

std::array<const LinearNames*, 4> LinearsOf(const Architecture& architecture) {
  return {&architecture.qkv,
          &architecture.attention_output,
          &architecture.mlp_input,
          &architecture.mlp_output};
}

// Gemms of codes read the gradients of a quantized matrix's outputs beside those of matrices that
// keep bf16, by whole words.
absl::Status CheckBeside(GemmPath path, const ModelInventory& inventory) {
  constexpr int64_t kWord = 16;
  const Architecture& architecture = ArchitectureOf(inventory.config.architecture);
  if (GemmStep(path) == 1 || architecture.layout != MatrixLayout::kOutputInput) {
    return absl::OkStatus();  // matrices of [in, out] are fused, not beside others
  }
  for (const UnitSpec& unit : inventory.units) {
    for (const LinearNames* linear : LinearsOf(architecture)) {
      const std::vector<const TensorSpec*> matrices = MatricesOf(inventory, unit, *linear);
      for (const TensorSpec* tensor : matrices) {
        if (AnyQuantized(matrices) && tensor->shape[0] % kWord != 0) {
          return FieldRefusal("precision.keepBf16",
                              absl::StrCat("outputs that are multiples of ",
                                           kWord,
                                           " beside quantized matrices, or patterns for all that "
                                           "read the same input"),
                              absl::StrCat(tensor->name, " ", ShapeText(tensor->shape)));
        }
      }
    }
  }
  return absl::OkStatus();
}

GemmWidths WidthsOf(const ModelInventory& inventory, const UnitSpec& unit, GemmPath path) {
  const ScaleForm form = WeightForm(path);
  const Architecture& architecture = ArchitectureOf(inventory.config.architecture);
  const bool output_first = architecture.layout == MatrixLayout::kOutputInput;
  GemmWidths widths;
  for (const LinearNames* linear : LinearsOf(architecture)) {
    const std::vector<const TensorSpec*> matrices = MatricesOf(inventory, unit, *linear);
    int64_t output = 0;
    int64_t elements = 0;
    for (const TensorSpec* tensor : matrices) {
      const Shape item = ItemShape(*tensor);
      output += item[output_first ? 0 : 1];
      widths.input = std::max(widths.input, item[output_first ? 1 : 0]);
      elements += ElementCount(item);
    }
    if (AnyQuantized(matrices)) {
      widths.output = std::max(widths.output, output);
      widths.weight = std::max(widths.weight, elements);
      widths.weight_scales =
          std::max(widths.weight_scales, BytesOfScales(form, output, DivExact(elements, output)));
    }
  }
  return widths;
}

}  // namespace

const char* RecipeName(Recipe recipe) {
  switch (recipe) {
    case Recipe::kNone:
      return "none";
    case Recipe::kDelayed:
      return "fp8_tensor/delayed";
    case Recipe::kCurrent:
      return "fp8_tensor/current";
    case Recipe::kFloat8Block:
      return "fp8_block";
    case Recipe::kMxFp8:
      return "mxfp8";
    case Recipe::kNvFp4:
      return "nvfp4";
  }
  return "unknown";
}

DType CodeType(Recipe recipe) {
  CHECK(recipe != Recipe::kNone);
  return recipe == Recipe::kNvFp4 ? DType::kU8 : DType::kF8E4M3;
}

int64_t CodeBytes(Recipe recipe, int64_t elements) {
  return DivExact(elements, CodesPerByte(recipe));
}

absl::Status ApplyRecipe(const RecipeSpec& spec,
                         GemmPath path,
                         const MicroBatchShape& micro_batch,
                         ModelInventory& inventory) {
  if (spec.recipe == Recipe::kNone) {
    return spec.keep_bf16.empty()
               ? absl::OkStatus()
               : FieldRefusal("precision.keepBf16", "a precision.recipe beside it", "none");
  }
  const int64_t tokens = micro_batch.sequences * micro_batch.sequence_tokens;
  const int64_t step = std::max(TokenStep(spec.recipe), GemmStep(path));
  if (tokens % step != 0) {
    return FieldRefusal("training.microBatch",
                        absl::StrCat("times data.sequenceLength a multiple of ",
                                     step,
                                     ", since ",
                                     RecipeName(spec.recipe),
                                     " has blocks along tokens"),
                        absl::StrCat(tokens, " tokens"));
  }
  RETURN_IF_ERROR(CheckChunkTokens(spec.recipe, path, tokens, inventory.cut));
  IdVector<TensorId, bool> kept(inventory.tensors.size(), false);
  RETURN_IF_ERROR(MarkKept(spec, inventory, kept));
  for (const TensorId id : inventory.tensors.ids()) {
    TensorSpec& tensor = inventory.tensors[id];
    if (MayQuantize(inventory, tensor) && !kept[id]) {
      RETURN_IF_ERROR(CheckShape(spec.recipe, path, tensor, inventory.cut));
      tensor.recipe = spec.recipe;
    }
  }
  if (!IsQuantized(inventory)) {
    return FieldRefusal("precision.keepBf16",
                        "to leave a matrix that is quantized",
                        "patterns that match all that are trained");
  }
  RETURN_IF_ERROR(CheckBeside(path, inventory));
  DissolveBundles(inventory);
  return absl::OkStatus();
}

absl::Status SetRecipes(const IdVector<TensorId, Recipe>& recipes,
                        GemmPath path,
                        const MicroBatchShape& micro_batch,
                        ModelInventory& inventory) {
  const int64_t tokens = micro_batch.sequences * micro_batch.sequence_tokens;
  for (const TensorId id : inventory.tensors.ids()) {
    TensorSpec& tensor = inventory.tensors[id];
    if (recipes[id] != Recipe::kNone) {
      if (!MayQuantize(inventory, tensor)) {
        return absl::InvalidArgumentError(
            absl::StrCat(tensor.name, ": no recipe quantizes such a tensor"));
      }
      if (tokens % GemmStep(path) != 0 || !Multiplies(path, recipes[id])) {
        return absl::InvalidArgumentError(
            absl::StrCat(tensor.name, ": not of the path ", GemmPathName(path)));
      }
      RETURN_IF_ERROR(CheckShape(recipes[id], path, tensor, inventory.cut));
      RETURN_IF_ERROR(CheckChunkTokens(recipes[id], path, tokens, inventory.cut));
      tensor.recipe = recipes[id];
    }
  }
  RETURN_IF_ERROR(CheckBeside(path, inventory));
  DissolveBundles(inventory);
  return absl::OkStatus();
}

void ReserveRecipeScratch(GemmPath path,
                          const MicroBatchShape& micro_batch,
                          ModelInventory& inventory) {
  const DType type = DecodesOperands(path) ? DType::kBF16 : DType::kU8;
  const int64_t per_byte = CodesOfByte(ActivationForm(path));
  const int64_t tokens = micro_batch.sequences * micro_batch.sequence_tokens;
  for (UnitSpec& unit : inventory.units) {
    const GemmWidths widths =
        unit.kind == UnitKind::kLayer ? WidthsOf(inventory, unit, path) : GemmWidths{};
    if (widths.weight == 0) {
      continue;
    }
    unit.workspace.push_back({"q_weight", {1, DivExact(widths.weight, per_byte)}, type});
    unit.workspace.push_back({"q_input", {tokens, DivExact(widths.input, per_byte)}, type});
    unit.workspace.push_back({"q_gradient", {tokens, DivExact(widths.output, per_byte)}, type});
    unit.workspace.push_back({"q_scales", {kScaleSlots}});
    if (ReadsBlockScales(path)) {
      const ScaleForm form = ActivationForm(path);
      const auto add = [&](const char* name, int64_t bytes) {
        unit.workspace.push_back({name, {1, bytes}, DType::kU8});
      };
      add("q_weight_scales", widths.weight_scales);
      add("q_input_scales", BytesOfScales(form, tokens, widths.input));
      add("q_gradient_scales", BytesOfScales(form, tokens, widths.output));
    }
  }
}

bool IsQuantized(const ModelInventory& inventory) {
  return std::any_of(inventory.tensors.begin(),
                     inventory.tensors.end(),
                     [](const TensorSpec& tensor) { return tensor.recipe != Recipe::kNone; });
}

}  // namespace ravel::plan
