#include "worker/model/decoder.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include <absl/strings/str_cat.h>

#include "common/check.h"
#include "kernels/activation.h"
#include "kernels/gemm.h"
#include "kernels/norm.h"
#include "kernels/rope.h"
#include "worker/model/rope_frequencies.h"

namespace ravel::model {
namespace {

TensorView RowOf(std::vector<float>& values) {
  return MatrixView(values.data(), 1, static_cast<int64_t>(values.size()));
}

size_t Size(int64_t elements) {
  return static_cast<size_t>(elements);
}

}  // namespace

Decoder::Decoder(const plan::ModelInventory& inventory,
                 std::vector<TensorView> weights,
                 int64_t max_tokens)
    : inventory_(inventory),
      config_(inventory.config),
      weights_(std::move(weights)),
      max_tokens_(max_tokens) {
  CHECK(max_tokens > 0 && weights_.size() == inventory.tensors.size());
  table_ = Weight("model.embed_tokens.weight");
  final_norm_ = Weight("model.norm.weight");
  head_ = config_.tie_word_embeddings ? table_ : Weight("lm_head.weight");
  const int64_t key_value = config_.num_key_value_heads * config_.head_dim;
  for (int64_t i = 0; i < config_.num_hidden_layers; ++i) {
    const auto weight = [&](const char* name) {
      return Weight(absl::StrCat("model.layers.", i, ".", name, ".weight"));
    };
    layers_.push_back({.norm0 = weight("input_layernorm"),
                       .q = weight("self_attn.q_proj"),
                       .k = weight("self_attn.k_proj"),
                       .v = weight("self_attn.v_proj"),
                       .o = weight("self_attn.o_proj"),
                       .norm1 = weight("post_attention_layernorm"),
                       .gate = weight("mlp.gate_proj"),
                       .up = weight("mlp.up_proj"),
                       .down = weight("mlp.down_proj"),
                       .keys = std::vector<float>(Size(max_tokens * key_value)),
                       .values = std::vector<float>(Size(max_tokens * key_value))});
  }
  std::vector<float> frequencies = InverseFrequencies(config_);
  const auto half = static_cast<int64_t>(frequencies.size());
  cosine_.resize(Size(max_tokens * half));
  sine_.resize(Size(max_tokens * half));
  kernels::BuildRopeTable(stream_,
                          {.inverse_frequency = VectorView(frequencies.data(), half),
                           .cosine = MatrixView(cosine_.data(), max_tokens, half),
                           .sine = MatrixView(sine_.data(), max_tokens, half)});
  hidden_.resize(Size(config_.hidden_size));
  normed_.resize(Size(config_.hidden_size));
  q_.resize(Size(config_.num_attention_heads * config_.head_dim));
  attended_.resize(q_.size());
  k_.resize(Size(key_value));
  v_.resize(Size(key_value));
  gate_.resize(Size(config_.intermediate_size));
  up_.resize(Size(config_.intermediate_size));
  scores_.resize(Size(max_tokens));
  logits_.resize(Size(config_.vocab_size));
}

TensorView Decoder::Weight(const std::string& name) const {
  const int index = inventory_.FindTensor(name);
  CHECK_MSG(index >= 0, "the inventory lacks a tensor of the model");
  return weights_[static_cast<size_t>(index)];
}

void Decoder::Multiply(const std::vector<float>& x,
                       const TensorView& weight,
                       std::vector<float>& y) {
  kernels::Gemm(stream_,
                {.a = RowOf(const_cast<std::vector<float>&>(x)),
                 .transpose_a = kernels::Transpose::kNo,
                 .b = weight,
                 .transpose_b = kernels::Transpose::kYes,
                 .c = RowOf(y),
                 .output = kernels::Output::kOverwrite});
}

void Decoder::AddProduct(const std::vector<float>& x,
                         const TensorView& weight,
                         std::vector<float>& y) {
  kernels::Gemm(stream_,
                {.a = RowOf(const_cast<std::vector<float>&>(x)),
                 .transpose_a = kernels::Transpose::kNo,
                 .b = weight,
                 .transpose_b = kernels::Transpose::kYes,
                 .c = RowOf(y),
                 .output = kernels::Output::kAccumulate});
}

void Decoder::Normalize(const TensorView& weight) {
  float rstd = 0;
  kernels::RmsNormForward(stream_,
                          {.x = RowOf(hidden_),
                           .residual = {},
                           .w = weight,
                           .epsilon = static_cast<float>(config_.rms_norm_eps),
                           .sum = {},
                           .y = RowOf(normed_),
                           .rstd = VectorView(&rstd, 1)});
}

void Decoder::Rotate(std::vector<float>& heads) {
  const int64_t half = config_.head_dim / 2;
  kernels::Rope(stream_,
                {.x = RowOf(heads),
                 .head_size = config_.head_dim,
                 .sequence_tokens = 1,
                 .cosine = MatrixView(cosine_.data() + position_ * half, 1, half),
                 .sine = MatrixView(sine_.data() + position_ * half, 1, half),
                 .direction = kernels::RopeDirection::kForward});
}

// Softmax of this position's query against all cached keys, head by head.
void Decoder::Attend(const Layer& layer) {
  const int64_t size = config_.head_dim;
  const int64_t stride = config_.num_key_value_heads * size;
  const int64_t group = config_.num_attention_heads / config_.num_key_value_heads;
  const double scale = 1.0 / std::sqrt(static_cast<double>(size));
  for (int64_t head = 0; head < config_.num_attention_heads; ++head) {
    const float* query = q_.data() + head * size;
    const int64_t column = head / group * size;
    float largest = -INFINITY;
    for (int64_t at = 0; at <= position_; ++at) {
      const float* key = layer.keys.data() + at * stride + column;
      double sum = 0;
      for (int64_t i = 0; i < size; ++i) {
        sum += static_cast<double>(query[i]) * static_cast<double>(key[i]);
      }
      scores_[Size(at)] = static_cast<float>(sum * scale);
      largest = std::max(largest, scores_[Size(at)]);
    }
    float total = 0;
    for (int64_t at = 0; at <= position_; ++at) {
      scores_[Size(at)] = std::exp(scores_[Size(at)] - largest);
      total += scores_[Size(at)];
    }
    float* out = attended_.data() + head * size;
    std::fill(out, out + size, 0.0f);
    for (int64_t at = 0; at <= position_; ++at) {
      const float weight = scores_[Size(at)] / total;
      const float* value = layer.values.data() + at * stride + column;
      for (int64_t i = 0; i < size; ++i) {
        out[i] += weight * value[i];
      }
    }
  }
}

void Decoder::RunLayer(Layer& layer) {
  Normalize(layer.norm0);
  Multiply(normed_, layer.q, q_);
  Multiply(normed_, layer.k, k_);
  Multiply(normed_, layer.v, v_);
  Rotate(q_);
  Rotate(k_);
  const auto at = static_cast<std::ptrdiff_t>(Size(position_) * k_.size());
  std::copy(k_.begin(), k_.end(), layer.keys.begin() + at);
  std::copy(v_.begin(), v_.end(), layer.values.begin() + at);
  Attend(layer);
  AddProduct(attended_, layer.o, hidden_);
  Normalize(layer.norm1);
  Multiply(normed_, layer.gate, gate_);
  Multiply(normed_, layer.up, up_);
  kernels::SwiGluForward(stream_, {.gate = RowOf(gate_), .up = RowOf(up_), .y = RowOf(gate_)});
  AddProduct(gate_, layer.down, hidden_);
}

const std::vector<float>& Decoder::Advance(int32_t token) {
  CHECK(position_ < max_tokens_);
  CHECK(token >= 0 && token < config_.vocab_size);
  const float* row = table_.Row<float>(token);
  std::copy(row, row + config_.hidden_size, hidden_.begin());
  for (Layer& layer : layers_) {
    RunLayer(layer);
  }
  Normalize(final_norm_);
  Multiply(normed_, head_, logits_);
  ++position_;
  return logits_;
}

}  // namespace ravel::model
