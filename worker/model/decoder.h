#pragma once

// Next-token inference on one thread, with a cache of keys and values.

#include <cstdint>
#include <vector>

#include "common/plan/model_inventory.h"
#include "common/tensor_view.h"
#include "kernels/stream.h"

namespace ravel::model {

// Thread-compatible. The weights outlive it.
class Decoder {
 public:
  // `weights`: full fp32 tensors, one per tensor of the inventory, in its order. At most
  // `max_tokens` positions.
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
    TensorView norm0, q, k, v, o, norm1, gate, up, down;
    std::vector<float> keys;    // [max_tokens, kv_heads * head_dim]
    std::vector<float> values;  // the same
  };
  TensorView Weight(const std::string& name) const;
  void RunLayer(Layer& layer);
  void Attend(const Layer& layer);
  void Normalize(const TensorView& weight);
  void Multiply(const std::vector<float>& x, const TensorView& weight, std::vector<float>& y);
  void AddProduct(const std::vector<float>& x, const TensorView& weight, std::vector<float>& y);
  void Rotate(std::vector<float>& heads);

  const plan::ModelInventory& inventory_;
  const plan::ModelConfig& config_;
  const std::vector<TensorView> weights_;
  const int64_t max_tokens_;
  kernels::CpuStream stream_;
  TensorView table_, final_norm_, head_;
  std::vector<Layer> layers_;
  std::vector<float> cosine_, sine_;  // [max_tokens, head_dim / 2]
  std::vector<float> hidden_, normed_, q_, k_, v_, attended_, gate_, up_, scores_, logits_;
  int64_t position_ = 0;
};

}  // namespace ravel::model
