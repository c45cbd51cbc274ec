#pragma once

// Every parameter of a model with its canonical (Hugging Face) name and shape, the unit it belongs
// to, and the activations each unit needs: the only description of a model that the planner, the
// engine and the checkpoints share.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "common/check.h"
#include "common/dtype.h"
#include "common/model/dimension_cut.h"
#include "common/model/ids.h"
#include "common/model/job_spec.h"
#include "common/model/tensor_cut.h"
#include "common/recipe.h"
#include "common/shape.h"
#include "common/status.h"

namespace ravel::plan {

enum class InitKind { kNormal, kOnes, kZeros };

struct TensorSpec {
  std::string name;  // canonical: "model.layers.0.self_attn.q_proj.weight"
  Shape shape;       // global
  UnitId unit = 0;
  BundleId bundle = {};  // or none
  int64_t block_rows = 1;
  DimensionCut cut;   // by the `tensor` axis of a mesh
  bool decay = true;  // weight decay applies (matrices yes, norms no)
  bool trainable = true;
  Recipe recipe = Recipe::kNone;  // that quantizes it for gemms (recipes.h)
  InitKind init = InitKind::kNormal;
  double init_scale = 1.0;  // of kNormal: times the job's init_std
  uint32_t site =
      0;  // ordinal of the name among all canonical names, sorted: RNG site and statistics slot
};

// Tensors whose rows are adjacent in the flat buffer, in this order, so that one GEMM covers them:
// q|k|v, gate|up. A bundle exists only if every part's element count is a multiple of the layout
// alignment.
struct BundleSpec {
  std::string name;  // "model.layers.0.self_attn.qkv"
  std::vector<TensorId> tensors;
};

// kPositions adds learned positions to `hidden`; a unit of its own, so that a tied head borrows the
// token table alone.
enum class UnitKind { kEmbedding, kPositions, kLayer, kHead };

// Memory that a unit needs for one micro-batch, in the order in which it is laid out, each 256-byte
// aligned.
struct ActivationSpec {
  std::string name;  // unique within the unit; the module asks for it by this name
  Shape shape;
  DType dtype = DType::kF32;
  // For saved activations: kept unless the job's policy is this or a later one; kNone: always kept.
  RecomputePolicy remade_from = RecomputePolicy::kNone;
};

struct UnitSpec {
  std::string name;  // "embed", "layers.0", ..., "head"
  UnitKind kind = UnitKind::kLayer;
  int layer = -1;
  std::vector<TensorId> tensors;  // tensors that are gathered with this unit, in canonical order
  // Tensors of other units that this unit also uses: the embedding table of a tied head.
  std::vector<TensorId> borrowed;
  std::vector<ActivationSpec> saved;      // live from its Forward to its Backward
  std::vector<ActivationSpec> remade;     // live from its Recompute to its Backward
  bool optional = false;                  // a micro-batch may not use it
  std::vector<ActivationSpec> workspace;  // live during one Forward or Backward of this unit
  // Gradients of tensors, by their names, that are sums of several leaves [leaves, elements]: fp32,
  // live while a lane has micro-batches left (tensor_parts.h).
  std::vector<ActivationSpec> leaves;
};

// The residual stream between units is one [tokens, hidden] buffer per direction: `hidden` written
// by each forward, `dhidden` by each backward; both are part of the inventory's shared activations.
struct ModelInventory {
  ModelConfig config;
  TensorCut cut;
  IdVector<UnitId, UnitSpec> units;  // in forward order
  // Forward calls in order; a unit may be called twice. Empty: each unit once.
  std::vector<UnitId> order;
  IdVector<TensorId, TensorSpec> tensors;
  IdVector<BundleId, BundleSpec> bundles;
  std::vector<ActivationSpec> shared;  // live for the whole micro-batch: token ids, targets,
                                       // losses, hidden, dhidden, RoPE tables

  int64_t parameter_count() const;
  // The units of all forward calls, in order.
  std::vector<UnitId> calls() const;
  // The tensor of a canonical name, or none.
  TensorId FindTensor(std::string_view name) const;
};

struct MicroBatchShape {
  int64_t sequences = 0;
  int64_t sequence_tokens = 0;
};

// Rows of logits that the fused loss keeps at once, unless the plan says otherwise
// (logits_chunk.h).
inline constexpr int64_t kLogitsChunkTokens = 256;
// fp32 elements that a layer's "scratch" has for attention: an upper bound of what any backend's
// kernels ask for, because a plan may not depend on kernels. kernels::AttentionWorkspaceElements is
// tested against it.
constexpr int64_t AttentionScratchElements(int64_t sequence_tokens, int64_t head_dim) {
  const int64_t padded_tokens = RoundUp(sequence_tokens, 64);
  const int64_t padded_head = RoundUp(head_dim, 64);
  return 11 * padded_tokens * padded_head + 4 * padded_tokens + 128 * padded_head + 32768;
}

// Pure. The config must be valid. `recompute` sorts the activations of layers into those that are
// kept and those that backward recomputes. Tensors are whole; activations are those of a rank of
// the cut.
ModelInventory BuildInventory(const ModelConfig& config,
                              const MicroBatchShape& micro_batch,
                              RecomputePolicy recompute = RecomputePolicy::kNone,
                              const TensorCut& cut = {});

// Offset in bytes of each spec when laid out one after another with 256-byte alignment; the last
// entry is the total.
std::vector<int64_t> ActivationOffsets(const std::vector<ActivationSpec>& specs);

// FLOPs of training one token: 6N + 6*layers*heads*head_dim*sequence (causal half), N without the
// embedding lookup. Layers that run twice count twice; of layers that a micro-batch leaves out with
// probability `layer_drop`, the expected share counts.
double TrainingFlopsPerToken(const ModelConfig& config,
                             int64_t sequence_tokens,
                             double layer_drop = 0);

// Makes the layers units that a micro-batch may leave out.
void MakeLayersOptional(ModelInventory& inventory);

}  // namespace ravel::plan
