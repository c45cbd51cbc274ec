// Backward of every unit against finite differences of the loss; the decoder against the training
// forward.

#include <cmath>

#include <gtest/gtest.h>

#include "tests/worker/model/model_memory.h"
#include "worker/model/decoder.h"
#include "worker/model/rope_frequencies.h"

namespace ravel::model {
namespace {

constexpr plan::MicroBatchShape kShape = {.sequences = 2, .sequence_tokens = 5};

plan::ModelConfig OddConfig(bool tied) {
  plan::ModelConfig config;
  config.vocab_size = 19;
  config.hidden_size = 10;
  config.intermediate_size = 13;
  config.num_hidden_layers = 2;
  config.num_attention_heads = 4;
  config.num_key_value_heads = 2;
  config.head_dim = 6;
  config.max_position_embeddings = 32;
  config.rms_norm_eps = 1e-5;
  config.tie_word_embeddings = tied;
  return config;
}

// All parts of q|k|v and gate|up are multiples of 256 elements: bundled.
plan::ModelConfig BundledConfig() {
  plan::ModelConfig config = OddConfig(false);
  config.hidden_size = 16;
  config.intermediate_size = 32;
  config.head_dim = 8;
  return config;
}

void ExpectGradientsAreSlopes(const plan::ModelConfig& config) {
  constexpr double kStep = 4e-3;
  ModelMemory model(config, kShape);
  const auto gradients = model.Gradients<FreshGradient>(0.0f);
  for (size_t t = 0; t < gradients.size(); ++t) {
    const int tensor = static_cast<int>(t);
    const std::string& name = model.inventory().tensors[t].name;
    const std::vector<float> kept = model.weight(tensor);
    double squares = 0;
    for (const float g : gradients[t]) {
      ASSERT_TRUE(std::isfinite(g)) << name;
      squares += static_cast<double>(g) * static_cast<double>(g);
    }
    const double norm = std::sqrt(squares);
    ASSERT_GT(norm, 0) << name;
    // Along the gradient, and along a direction that mixes it with fixed signs.
    for (const double mix : {0.0, 1.0}) {
      std::vector<double> direction(kept.size());
      double slope = 0;
      for (size_t i = 0; i < kept.size(); ++i) {
        const double sign = (i * 2654435761u >> 7) % 2 == 0 ? 1.0 : -1.0;
        const auto g = static_cast<double>(gradients[t][i]);
        direction[i] = g / norm + mix * sign / std::sqrt(static_cast<double>(kept.size()));
        slope += g * direction[i];
      }
      const auto loss_at = [&](double step) {
        for (size_t i = 0; i < kept.size(); ++i) {
          model.weight(tensor)[i] =
              static_cast<float>(static_cast<double>(kept[i]) + step * direction[i]);
        }
        return model.Loss();
      };
      const double measured = (loss_at(kStep) - loss_at(-kStep)) / (2 * kStep);
      model.weight(tensor) = kept;
      EXPECT_NEAR(measured / slope, 1.0, 0.01) << name << " mix " << mix;
    }
  }
}

TEST(ModelGradient, OfOddTiedSizesIsTheSlopeOfTheLoss) {
  ExpectGradientsAreSlopes(OddConfig(true));
}
TEST(ModelGradient, OfOddUntiedSizesIsTheSlopeOfTheLoss) {
  ExpectGradientsAreSlopes(OddConfig(false));
}
TEST(ModelGradient, OfBundledSizesIsTheSlopeOfTheLoss) {
  const plan::ModelConfig config = BundledConfig();
  ASSERT_EQ(ModelMemory(config, kShape).inventory().bundles.size(), 4u);
  ExpectGradientsAreSlopes(config);
}

TEST(ModelGradient, AccumulatingAddsToWhatIsThereAndFreshReplacesIt) {
  for (const plan::ModelConfig& config : {OddConfig(true), BundledConfig()}) {
    ModelMemory model(config, kShape);
    const auto fresh = model.Gradients<FreshGradient>(0.0f);
    const auto added = model.Gradients<AccumulatingGradient>(0.5f);
    for (size_t t = 0; t < fresh.size(); ++t) {
      const plan::TensorSpec& tensor = model.inventory().tensors[t];
      // A tied table is staged twice, each time from the start value.
      const bool twice = config.tie_word_embeddings && tensor.name == "model.embed_tokens.weight";
      for (size_t i = 0; i < fresh[t].size(); ++i) {
        ASSERT_NEAR(added[t][i], fresh[t][i] + (twice ? 1.0f : 0.5f), 2e-5) << tensor.name;
      }
    }
  }
}

TEST(ModelForward, IgnoredTargetsHaveNoLossAndNoGradient) {
  ModelMemory model(OddConfig(false), kShape);
  std::fill(model.targets().begin(), model.targets().end(), -1);
  EXPECT_EQ(model.Loss(), 0.0);
  for (const std::vector<float>& gradient : model.Gradients<FreshGradient>(0.0f)) {
    for (const float g : gradient) {
      ASSERT_EQ(g, 0.0f);
    }
  }
}

TEST(Decoder, GivesTheLogitsOfTheTrainingForward) {
  for (const plan::ModelConfig& config : {OddConfig(true), OddConfig(false), BundledConfig()}) {
    ModelMemory model(config, kShape);
    model.Loss();
    const std::vector<float> losses = model.TokenLosses();
    Decoder decoder(model.inventory(), model.weight_views(), kShape.sequence_tokens);
    for (size_t t = 0; t < losses.size(); ++t) {
      if (t % static_cast<size_t>(kShape.sequence_tokens) == 0) {
        decoder.Reset();
      }
      const std::vector<float>& logits = decoder.Advance(model.ids()[t]);
      double total = 0;
      for (const float logit : logits) {
        total += std::exp(static_cast<double>(logit));
      }
      const auto target = static_cast<size_t>(model.targets()[t]);
      EXPECT_NEAR(std::log(total) - static_cast<double>(logits[target]), losses[t], 1e-5) << t;
    }
  }
}

// Values of transformers' "llama3" rope type for head_dim 16, theta 10000, factor 4, low 1, high 4,
// original length 32.
TEST(RopeFrequencies, ScalesLongWavelengthsLikeLlama3) {
  plan::ModelConfig config;
  config.head_dim = 16;
  config.rope_theta = 10000;
  const std::vector<float> plain = InverseFrequencies(config);
  ASSERT_EQ(plain.size(), 8u);
  EXPECT_FLOAT_EQ(plain[0], 1.0f);
  EXPECT_FLOAT_EQ(plain[4], 0.01f);
  config.rope_scaling_factor = 4;
  config.rope_low_freq_factor = 1;
  config.rope_high_freq_factor = 4;
  config.rope_original_max_position_embeddings = 32;
  const std::vector<float> scaled = InverseFrequencies(config);
  const float expected[] = {1.0f,
                            0.127323955f,
                            0.0250000004f,
                            0.00790569466f,
                            0.00249999994f,
                            0.000790569466f,
                            0.000250000012f,
                            7.90569466e-05f};
  for (size_t i = 0; i < scaled.size(); ++i) {
    EXPECT_FLOAT_EQ(scaled[i], expected[i]) << i;
  }
}

}  // namespace
}  // namespace ravel::model
