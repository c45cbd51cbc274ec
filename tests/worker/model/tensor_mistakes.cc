#include "tests/worker/model/tensor_mistakes.h"

#include <algorithm>
#include <string>
#include <vector>

#include <absl/strings/match.h>

#include "common/check.h"
#include "common/shape.h"
#include "kernels/gemm.h"
#include "worker/model/unit_parts.h"

namespace ravel::model {
namespace {

using kernels::Output;
using plan::SegmentKind;

// Gradients of what the first product of an MLP gives.
TensorView MlpGradient(const Mistaken& mistaken) {
  return Activation(mistaken.inventory.units[mistaken.unit], "mlp_in", "d_b").In(mistaken.memory);
}

// The same of q, k and v, with the slots of shared key heads.
TensorView AttentionGradient(const Mistaken& mistaken) {
  const plan::UnitSpec& spec = mistaken.inventory.units[mistaken.unit];
  const plan::LocalSizes sizes =
      plan::LocalSizesOf(mistaken.inventory.config, mistaken.inventory.cut);
  const int64_t tokens = Activation(spec, "qkv", "d_a").In(mistaken.memory).size[0];
  return Carve(mistaken.memory.workspace[ActivationIndex(spec.workspace, "d_a")],
               tokens,
               (sizes.query_heads + 2 * sizes.kv_slots) * mistaken.inventory.config.head_dim);
}

// The addend is a sum over ranges of gate and up side by side, first all of gate.
void MultiplyRanges(const Mistaken& mistaken) {
  const UnitTensors tensors(mistaken.inventory, mistaken.unit);
  const TensorView dy = MlpGradient(mistaken);
  const int64_t members = std::ssize(tensors.architecture().mlp_input.names);
  const int64_t inner = DivExact(dy.size[1], members);
  const int64_t ranges = mistaken.inventory.cut.local_parts();
  const int64_t width = DivExact(dy.size[1], ranges);
  const TensorView out = mistaken.memory.addend;
  std::vector<float> kept(static_cast<size_t>(out.elements()));
  kernels::CpuStream stream;
  for (int64_t range = 0; range < ranges; ++range) {
    const TensorView sum = MatrixView(kept.data(), out.size[0], out.size[1]);
    Output output = Output::kOverwrite;
    for (int64_t at = range * width; at < (range + 1) * width;) {
      const int64_t member = at / inner;
      const int64_t count = std::min((range + 1) * width, (member + 1) * inner) - at;
      const size_t weight = tensors.Index(
          tensors.architecture().mlp_input.names[static_cast<size_t>(member)], "weight");
      kernels::Gemm(stream,
                    {.a = ColumnsOf(dy, at, count),
                     .b = RowsOf(mistaken.memory.weights[weight], at - member * inner, count),
                     .c = sum,
                     .output = output});
      output = Output::kAccumulate;
      at += count;
    }
    for (int64_t i = 0; i < out.elements(); ++i) {
      float& to = out.As<float>()[i];
      to = range == 0 ? kept[static_cast<size_t>(i)] : to + kept[static_cast<size_t>(i)];
    }
  }
}

// The first slot of each key head gets all of them, and the others zero.
void AddSlots(const Mistaken& mistaken) {
  const plan::LocalSizes sizes =
      plan::LocalSizesOf(mistaken.inventory.config, mistaken.inventory.cut);
  const int64_t head = mistaken.inventory.config.head_dim;
  const TensorView gradient = AttentionGradient(mistaken);
  for (int64_t slot = 0; slot < 2 * sizes.kv_slots; ++slot) {
    const int64_t first = slot / sizes.kv_sharing * sizes.kv_sharing;
    for (int64_t row = 0; slot != first && row < gradient.size[0]; ++row) {
      float* const heads = gradient.Row<float>(row) + sizes.query_heads * head;
      for (int64_t i = 0; i < head; ++i) {
        heads[first * head + i] += heads[slot * head + i];
        heads[slot * head + i] = 0;
      }
    }
  }
}

// Runs while all rows but [first, first + count) are zero.
void RunWithRows(const TensorView& view,
                 int64_t first,
                 int64_t count,
                 absl::FunctionRef<void()> run) {
  CHECK(view.contiguous() && view.dtype == DType::kF32);
  const std::vector<float> kept(view.As<float>(), view.As<float>() + view.elements());
  std::fill_n(view.As<float>(), first * view.size[1], 0.0f);
  const int64_t end = (first + count) * view.size[1];
  std::fill_n(view.As<float>() + end, view.elements() - end, 0.0f);
  run();
  std::copy(kept.begin(), kept.end(), view.As<float>());
}

void RunChunks(const TensorView& gradient,
               int64_t chunks,
               Output output,
               absl::FunctionRef<void(Output)> run) {
  const int64_t rows = DivExact(gradient.size[0], chunks);
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    RunWithRows(
        gradient, chunk * rows, rows, [&] { run(chunk == 0 ? output : Output::kAccumulate); });
  }
}

}  // namespace

void DropHeadNormLeaves(plan::ModelInventory& inventory) {
  for (plan::UnitSpec& unit : inventory.units) {
    std::erase_if(unit.leaves, [](const plan::ActivationSpec& leaf) {
      return absl::EndsWith(leaf.name, ".q_norm.weight") ||
             absl::EndsWith(leaf.name, ".k_norm.weight");
    });
  }
}

void AfterForward(const Mistaken& mistaken, SegmentKind kind) {
  if (mistaken.mistake != Mistake::kEmptyBlockOfZeros || kind != SegmentKind::kLossStatistics) {
    return;
  }
  const plan::TensorCut& cut = mistaken.inventory.cut;
  for (int64_t part = 0; part < cut.local_parts(); ++part) {
    const plan::VocabularyBlock block =
        plan::VocabularyBlockOf(cut, mistaken.inventory.config.vocab_size, cut.first_part() + part);
    if (block.rows == 0) {
      std::fill_n(mistaken.memory.rows.Row<float>(3 * part), mistaken.memory.rows.size[1], 0.0f);
    }
  }
}

void RunBackward(const Mistaken& mistaken,
                 SegmentKind kind,
                 Output output,
                 absl::FunctionRef<void(Output)> run) {
  const plan::TensorCut& cut = mistaken.inventory.cut;
  const bool mlp = kind == SegmentKind::kMlpWeights;
  if (mistaken.mistake == Mistake::kWeightsByChunk &&
      (mlp || kind == SegmentKind::kAttentionWeights)) {
    const TensorView gradient = mlp ? MlpGradient(mistaken) : AttentionGradient(mistaken);
    RunChunks(gradient, cut.chunks, output, run);
    return;
  }
  if (mistaken.mistake == Mistake::kPositionsByRank && kind == SegmentKind::kPositions &&
      cut.sequence) {
    const plan::UnitSpec& spec = mistaken.inventory.units[mistaken.unit];
    const TensorView& all = mistaken.memory.workspace[ActivationIndex(spec.workspace, "dy_all")];
    const int64_t rows = DivExact(all.size[0], cut.degree);
    RunWithRows(all, cut.coordinate * rows, rows, [&] { run(output); });
    return;
  }
  run(output);
  if (cut.degree > 1 && mistaken.mistake == Mistake::kMembersAsOne &&
      kind == SegmentKind::kMlpInputProduct) {
    MultiplyRanges(mistaken);
  }
  if (cut.degree > 1 && mistaken.mistake == Mistake::kSharedHeadByRank &&
      kind == SegmentKind::kAttention) {
    AddSlots(mistaken);
  }
  AfterForward(mistaken, kind);
}

}  // namespace ravel::model
