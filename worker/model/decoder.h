#pragma once

// Next-token inference on one thread, with a cache of keys and values.

#include <cstdint>
#include <vector>

#include "common/model/model_inventory.h"
#include "common/tensor_view.h"
#include "kernels/stream.h"
#include "worker/model/norm.h"
#include "worker/model/projection.h"

namespace ravel::model {

// Made of the same norms and projections as the modules. Thread-compatible. The weights outlive it.
class Decoder {
 public:
  // `weights`: full fp32 tensors, one per tensor of the inventory, in its order. At most
  // `max_tokens` positions, no more than the model has.
  Decoder(const plan::ModelInventory& inventory,
          std::vector<TensorView> weights,
          int64_t max_tokens);

  // Takes the next token of the sequence (an id of the vocabulary; there must be room) and returns
  // the logits of the one after it, valid until the next call.
  const std::vector<float>& Advance(int32_t token);
  // Forgets the sequence.
  void Reset() { position_ = 0; }

  int64_t position() const { return position_; }
  int64_t max_tokens() const { return max_tokens_; }

 private:
  struct Layer {
    UnitMemory memory;  // weights alone
    Norm attention_norm;
    Projection qkv;
    TensorView query_norm, key_norm;  // absent where heads have no norm
    Projection attention_output;
    Norm mlp_norm;
    Projection mlp_input;
    Projection mlp_output;
  };
  struct LayerCall {
    int layer = 0;
    std::vector<float> keys;    // [max_tokens, kv_heads * head_dim]
    std::vector<float> values;  // the same
  };
  UnitMemory WeightsOf(const UnitTensors& tensors) const;
  void AddLayer(plan::UnitId unit);
  void AddCalls();
  void BuildRotation();
  void Embed(int32_t token);
  void RunLayer(LayerCall& call);
  void Attend(const LayerCall& call);
  void Normalize(const Norm& norm, const UnitMemory& memory);
  void NormHeads(const TensorView& heads, const TensorView& weight);

  const plan::ModelInventory inventory_;  // unbundled: tensors lie anywhere
  const plan::ModelConfig& config_;
  const plan::Architecture& architecture_;
  const plan::IdVector<plan::TensorId, TensorView> weights_;
  const int64_t max_tokens_;
  kernels::CpuStream stream_;
  UnitMemory head_memory_;
  TensorView table_, positions_, head_;
  std::vector<Norm> final_norm_;  // one
  std::vector<Layer> layers_;
  std::vector<LayerCall> calls_;      // in forward order
  std::vector<float> cosine_, sine_;  // [max_tokens, head_dim / 2]
  std::vector<float> hidden_, normed_, qkv_, attended_, mlp_in_, inner_, scores_, logits_;
  int64_t position_ = 0;
};

}  // namespace ravel::model
