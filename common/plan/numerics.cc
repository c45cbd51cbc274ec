#include "common/plan/numerics.h"

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>
#include <absl/strings/str_join.h>
#include <absl/strings/str_split.h>

#include "common/dtype.h"
#include "common/model/compute_type.h"
#include "common/model/gemm_paths.h"
#include "common/model/logits_chunk.h"
#include "common/model/recipes.h"
#include "common/plan/layer_drop.h"

namespace ravel::plan {
namespace {

using Entries = std::map<std::string, std::string, std::less<>>;

// A space would end the entry.
std::string RecipeText(const RecipeSpec& spec) {
  std::string text = RecipeName(spec.recipe);
  if (spec.recipe == Recipe::kDelayed) {
    absl::StrAppend(&text, "/", spec.history, "/margin", spec.margin);
    absl::StrAppend(&text, spec.amax_algorithm == AmaxAlgorithm::kMostRecent ? "/most_recent" : "");
    absl::StrAppend(&text, spec.first_scale == FirstScale::kOnes ? "/ones" : "");
  }
  if (spec.amax_epsilon != 0) {
    absl::StrAppendFormat(&text, "/epsilon%.10g", spec.amax_epsilon);
  }
  if (!spec.keep_bf16.empty()) {
    absl::StrAppend(&text, ",keepBf16:", absl::StrJoin(spec.keep_bf16, ","));
  }
  return text;
}

std::string LossScaleWord(const LossScaleSpec& spec) {
  return absl::StrFormat("%.10g/%.10g/%.10g/%d/%.10g/%.10g",
                         spec.initial,
                         spec.growth_factor,
                         spec.backoff_factor,
                         spec.growth_interval,
                         spec.minimum,
                         spec.maximum);
}

Entries ParseEntries(std::string_view text) {
  Entries entries;
  for (const absl::string_view word : absl::StrSplit(std::string(text), ' ')) {
    const std::pair<std::string, std::string> entry = absl::StrSplit(word, absl::MaxSplits('=', 1));
    if (!entry.first.empty() && !entry.second.empty()) {
      entries.insert(entry);
    }
  }
  return entries;
}

}  // namespace

std::string NumericsOf(const JobSpec& spec) {
  Entries entries = {
      {"compute", ComputeName(spec.compute)},
      {"determinism", spec.determinism == DeterminismMode::kExact ? "exact" : "fast"},
      {"device", spec.cpu_devices ? "cpu" : "gpu"},
      {"gradientWire", spec.gradient_wire == WireType::kBF16 ? "bf16" : "fp32"},
      {"layerDrop", LayerDropText(spec.layer_drop)},
      {"microBatch", absl::StrCat(spec.micro_batch)},
      {"recipe", RecipeText(spec.recipe)},
      {"stateDtype", StateTypesText(spec.optimizer.state_types)},
      {"tensorParts", absl::StrCat(TensorCutOf(spec).parts)},
      {"virtualRanks", absl::StrCat(spec.virtual_ranks)}};
  // Gemms of a device may choose by the number of rows.
  if (!spec.cpu_devices && spec.tensor_chunks > 1) {
    entries.emplace("tensorChunks", absl::StrCat(spec.tensor_chunks));
  }
  if (spec.compute == ComputeType::kF16) {
    entries.emplace("lossScale", LossScaleWord(spec.loss_scale));
  }
  if (spec.recipe.recipe != Recipe::kNone) {
    const absl::StatusOr<GemmPath> path = ChooseGemmPath(spec.recipe, spec.cpu_devices);
    entries.emplace("gemmPath", GemmPathName(path.value_or(GemmPath::kNone)));
    if (path.ok() && MayAccumulateFast(*path)) {
      entries.emplace("fastAccum", FastAccumulationName(spec.recipe.fast_accumulation));
    }
  }
  if (spec.model) {
    const int64_t chunk = LogitsChunkTokens(
        spec.cpu_devices, spec.model->vocab_size, DTypeBytes(WeightTypeOf(spec.compute)));
    entries.emplace("logitsChunk", absl::StrCat(chunk));
    entries.emplace("layerSharing", spec.model->layer_sharing ? "true" : "false");
  }
  return absl::StrJoin(entries, " ", absl::PairFormatter("="));
}

std::string NumericsChange(std::string_view saved, std::string_view now) {
  Entries before = ParseEntries(saved);
  Entries after = ParseEntries(now);
  if (!before.empty() && !after.empty()) {
    before.emplace("tensorParts", "1");  // before there was a choice
    before.emplace("tensorChunks", "1");
    after.emplace("tensorChunks", "1");
  }
  std::vector<std::string> changes;
  for (const auto& [name, value] : after) {
    const auto found = before.find(name);
    if (found != before.end() && found->second != value) {
      changes.push_back(absl::StrCat(name, " was ", found->second, " and is ", value));
    }
  }
  return absl::StrJoin(changes, "; ");
}

std::string NumericsRefusal(std::string_view path, std::string_view change) {
  return absl::StrCat(absl::string_view(path.data(), path.size()),
                      " was computed with other numerics: ",
                      absl::string_view(change.data(), change.size()),
                      "; to go on with other bits set checkpoint.allowNumericsChange: true, or use "
                      "ravelctl retry --allow-numerics-change");
}

}  // namespace ravel::plan
