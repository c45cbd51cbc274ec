// One token at a time through the trained model, for generation on the CPU. For position t each
// layer appends its key and value to a cache of max_tokens rows and attends over rows 0 to t:
//   p = softmax(q K^T / sqrt(d)) over rows 0..t,  a = p V,  hidden += a Wo
// It reuses the norms, projections and kernels of training with one row, so generated logits are
// those of the trained model. Weights are viewed without bundles, one tensor each. Cost per token:
// one pass over all weights plus the cache.

#include "worker/model/decoder.h"

#include <algorithm>
#include <cmath>
#include <string_view>
#include <utility>

#include "common/check.h"
#include "common/signed_size.h"
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

plan::ModelInventory Unbundled(plan::ModelInventory inventory) {
  for (plan::TensorSpec& tensor : inventory.tensors) {
    tensor.bundle = {};
  }
  inventory.bundles.clear();
  return inventory;
}

}  // namespace

Decoder::Decoder(const plan::ModelInventory& inventory,
                 std::vector<TensorView> weights,
                 int64_t max_tokens)
    : inventory_(Unbundled(inventory)),
      config_(inventory_.config),
      architecture_(plan::ArchitectureOf(config_.architecture)),
      weights_(std::move(weights)),
      max_tokens_(max_tokens) {
  CHECK(max_tokens > 0 && weights_.size() == inventory.tensors.size());
  for (const plan::UnitId unit : inventory_.units.ids()) {
    const UnitTensors tensors(inventory_, unit);
    switch (tensors.spec().kind) {
      case plan::UnitKind::kEmbedding:
        table_ = WeightsOf(tensors).weights[0];
        break;
      case plan::UnitKind::kPositions:
        positions_ = WeightsOf(tensors).weights[0];
        CHECK(max_tokens <= positions_.rows());
        break;
      case plan::UnitKind::kLayer:
        AddLayer(unit);
        break;
      case plan::UnitKind::kHead:
        head_memory_ = WeightsOf(tensors);
        final_norm_.emplace_back(tensors, architecture_.final_norm);
        head_ = config_.tie_word_embeddings
                    ? table_
                    : head_memory_.weights[tensors.Index(architecture_.head, "weight")];
        break;
    }
  }
  AddCalls();
  BuildRotation();
  hidden_.resize(Size(config_.hidden_size));
  normed_.resize(Size(config_.hidden_size));
  attended_.resize(Size(config_.num_attention_heads * config_.head_dim));
  qkv_.resize(attended_.size() + 2 * Size(config_.num_key_value_heads * config_.head_dim));
  inner_.resize(Size(config_.intermediate_size));
  mlp_in_.resize(inner_.size() * (architecture_.mlp == plan::MlpKind::kSwiGlu ? 2 : 1));
  scores_.resize(Size(max_tokens));
  logits_.resize(Size(config_.vocab_size));
}

UnitMemory Decoder::WeightsOf(const UnitTensors& tensors) const {
  UnitMemory memory;
  for (const plan::TensorId tensor : tensors.spec().tensors) {
    memory.weights.push_back(weights_[tensor]);
  }
  return memory;
}

void Decoder::AddLayer(plan::UnitId unit) {
  const UnitTensors tensors(inventory_, unit);
  Layer layer = {.memory = WeightsOf(tensors),
                 .attention_norm = Norm(tensors, architecture_.attention_norm),
                 .qkv = Projection(tensors, architecture_.qkv),
                 .query_norm = {},
                 .key_norm = {},
                 .attention_output = Projection(tensors, architecture_.attention_output),
                 .mlp_norm = Norm(tensors, architecture_.mlp_norm),
                 .mlp_input = Projection(tensors, architecture_.mlp_input),
                 .mlp_output = Projection(tensors, architecture_.mlp_output)};
  if (!architecture_.query_norm.empty()) {
    layer.query_norm = layer.memory.weights[tensors.Index(architecture_.query_norm, "weight")];
    layer.key_norm = layer.memory.weights[tensors.Index(architecture_.key_norm, "weight")];
  }
  layers_.push_back(std::move(layer));
}

void Decoder::AddCalls() {
  const size_t cache = Size(max_tokens_ * config_.num_key_value_heads * config_.head_dim);
  for (const plan::UnitId unit : inventory_.calls()) {
    if (inventory_.units[unit].kind == plan::UnitKind::kLayer) {
      calls_.push_back({.layer = inventory_.units[unit].layer,
                        .keys = std::vector<float>(cache),
                        .values = std::vector<float>(cache)});
    }
  }
}

void Decoder::BuildRotation() {
  if (architecture_.positions != plan::PositionKind::kRotary) {
    return;
  }
  std::vector<float> frequencies = InverseFrequencies(config_);
  const auto half = static_cast<int64_t>(frequencies.size());
  cosine_.resize(Size(max_tokens_ * half));
  sine_.resize(Size(max_tokens_ * half));
  kernels::BuildRopeTable(stream_,
                          {.inverse_frequency = VectorView(frequencies.data(), half),
                           .cosine = MatrixView(cosine_.data(), max_tokens_, half),
                           .sine = MatrixView(sine_.data(), max_tokens_, half)});
}

void Decoder::Normalize(const Norm& norm, const UnitMemory& memory) {
  float mean = 0;
  float rstd = 0;
  norm.Forward(stream_,
               {.memory = memory,
                .x = RowOf(hidden_),
                .copy = {},
                .y = RowOf(normed_),
                .statistics = {.mean = VectorView(&mean, 1), .rstd = VectorView(&rstd, 1)}});
}

void Decoder::NormHeads(const TensorView& heads, const TensorView& weight) {
  if (weight.present()) {
    kernels::HeadNormForward(
        stream_,
        {.x = heads, .w = weight, .epsilon = static_cast<float>(config_.rms_norm_eps), .y = heads});
  }
}

// Softmax of this position's query against all cached keys, head by head.
void Decoder::Attend(const LayerCall& call) {
  const int64_t size = config_.head_dim;
  const int64_t stride = config_.num_key_value_heads * size;
  const int64_t group = config_.num_attention_heads / config_.num_key_value_heads;
  const double scale = 1.0 / std::sqrt(static_cast<double>(size));
  for (int64_t head = 0; head < config_.num_attention_heads; ++head) {
    const float* query = qkv_.data() + head * size;
    const int64_t column = head / group * size;
    float largest = -INFINITY;
    for (int64_t at = 0; at <= position_; ++at) {
      const float* key = call.keys.data() + at * stride + column;
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
      const float* value = call.values.data() + at * stride + column;
      for (int64_t i = 0; i < size; ++i) {
        out[i] += weight * value[i];
      }
    }
  }
}

void Decoder::RunLayer(LayerCall& call) {
  const Layer& layer = layers_[Size(call.layer)];
  Normalize(layer.attention_norm, layer.memory);
  layer.qkv.Forward(stream_, {.memory = layer.memory, .x = RowOf(normed_), .y = RowOf(qkv_)});
  const auto query = static_cast<int64_t>(attended_.size());
  const int64_t key_value = config_.num_key_value_heads * config_.head_dim;
  NormHeads(ColumnsOf(RowOf(qkv_), 0, query), layer.query_norm);
  NormHeads(ColumnsOf(RowOf(qkv_), query, key_value), layer.key_norm);
  if (!cosine_.empty()) {
    const int64_t half = config_.head_dim / 2;
    kernels::Rope(stream_,
                  {.x = ColumnsOf(RowOf(qkv_), 0, query + key_value),
                   .head_size = config_.head_dim,
                   .sequence_tokens = 1,
                   .cosine = MatrixView(cosine_.data() + position_ * half, 1, half),
                   .sine = MatrixView(sine_.data() + position_ * half, 1, half),
                   .direction = kernels::RopeDirection::kForward});
  }
  const float* key = qkv_.data() + query;
  std::copy_n(key, key_value, call.keys.data() + position_ * key_value);
  std::copy_n(key + key_value, key_value, call.values.data() + position_ * key_value);
  Attend(call);
  layer.attention_output.Forward(stream_,
                                 {.memory = layer.memory,
                                  .x = RowOf(attended_),
                                  .y = RowOf(hidden_),
                                  .output = kernels::Output::kAccumulate});
  Normalize(layer.mlp_norm, layer.memory);
  layer.mlp_input.Forward(stream_,
                          {.memory = layer.memory, .x = RowOf(normed_), .y = RowOf(mlp_in_)});
  const TensorView input = RowOf(mlp_in_);
  if (architecture_.mlp == plan::MlpKind::kSwiGlu) {
    const int64_t inner = config_.intermediate_size;
    kernels::SwiGluForward(stream_,
                           {.gate = ColumnsOf(input, 0, inner),
                            .up = ColumnsOf(input, inner, inner),
                            .y = RowOf(inner_)});
  } else {
    kernels::GeluForward(stream_, {.x = input, .y = RowOf(inner_)});
  }
  layer.mlp_output.Forward(stream_,
                           {.memory = layer.memory,
                            .x = RowOf(inner_),
                            .y = RowOf(hidden_),
                            .output = kernels::Output::kAccumulate});
}

void Decoder::Embed(int32_t token) {
  std::copy_n(table_.Row<float>(token), config_.hidden_size, hidden_.begin());
  for (int64_t i = 0; positions_.present() && i < config_.hidden_size; ++i) {
    hidden_[Size(i)] += positions_.Row<float>(position_)[i];
  }
}

const std::vector<float>& Decoder::Advance(int32_t token) {
  CHECK(position_ < max_tokens_);
  CHECK(token >= 0 && token < config_.vocab_size);
  Embed(token);
  for (LayerCall& call : calls_) {
    RunLayer(call);
  }
  Normalize(final_norm_.front(), head_memory_);
  kernels::Gemm(stream_,
                {.a = RowOf(normed_),
                 .transpose_a = kernels::Transpose::kNo,
                 .b = head_,
                 .transpose_b = kernels::Transpose::kYes,
                 .c = RowOf(logits_),
                 .output = kernels::Output::kOverwrite});
  ++position_;
  return logits_;
}

}  // namespace ravel::model
