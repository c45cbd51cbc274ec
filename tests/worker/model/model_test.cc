// Backward of every unit against finite differences of the loss; the decoder against the training
// forward.

#include <cmath>

#include <gtest/gtest.h>

#include "tests/worker/model/model_configs.h"
#include "tests/worker/model/model_memory.h"
#include "worker/model/decoder.h"
#include "worker/model/rope_frequencies.h"

namespace ravel::model {
namespace {

constexpr plan::MicroBatchShape kShape = {.sequences = 2, .sequence_tokens = 6};

class EveryModel : public ::testing::TestWithParam<NamedConfig> {
 protected:
  const plan::ModelConfig& config() const { return GetParam().config; }
  ModelMemory Model(ModelMemory::Options options = {}) const {
    options.parts = GetParam().parts;
    return ModelMemory(config(), kShape, options);
  }
};

void ExpectGradientsAreSlopes(ModelMemory model) {
  constexpr double kStep = 4e-3;
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

TEST_P(EveryModel, GradientsAreTheSlopesOfTheLoss) {
  ExpectGradientsAreSlopes(Model());
}

TEST(ModelGradient, BundledSizesAreBundled) {
  ASSERT_EQ(ModelMemory(BundledConfig(), kShape).inventory().bundles.size(), 4u);
}

TEST_P(EveryModel, AccumulatingAddsToWhatIsThereAndFreshReplacesIt) {
  ModelMemory model = Model();
  const auto fresh = model.Gradients<FreshGradient>(0.0f);
  const auto added = model.Gradients<AccumulatingGradient>(0.5f);
  for (size_t t = 0; t < fresh.size(); ++t) {
    const plan::TensorSpec& tensor = model.inventory().tensors[t];
    // A tied table is staged twice, each time from the start value; so is a layer that runs twice.
    const bool twice = (config().tie_word_embeddings && t == 0) ||
                       (config().layer_sharing && tensor.name.find("layers") != std::string::npos);
    for (size_t i = 0; i < fresh[t].size(); ++i) {
      ASSERT_NEAR(added[t][i], fresh[t][i] + (twice ? 1.0f : 0.5f), 4e-5) << tensor.name;
    }
  }
}

// Losses and gradients, bit for bit, whatever backward makes again.
TEST_P(EveryModel, RecomputeChangesNoBit) {
  ModelMemory model = Model();
  const auto expected = model.Gradients<FreshGradient>(0.0f);
  const std::vector<float> losses = model.TokenLosses();
  size_t kept = model.inventory().units[2].saved.size();
  for (const auto policy :
       {plan::RecomputePolicy::kNorm, plan::RecomputePolicy::kMlp, plan::RecomputePolicy::kBlock}) {
    ModelMemory remaking = Model({.recompute = policy});
    const plan::UnitSpec& layer = remaking.inventory().units[2];
    ASSERT_LT(layer.saved.size(), kept);
    kept = layer.saved.size();
    EXPECT_EQ(remaking.Gradients<FreshGradient>(0.0f), expected) << static_cast<int>(policy);
    EXPECT_EQ(remaking.TokenLosses(), losses) << static_cast<int>(policy);
    EXPECT_EQ(remaking.Loss(), model.Loss());
  }
  EXPECT_EQ(kept, 1u);  // block: the input of the layer alone
}

// A frozen tensor gets no gradient; those of the others stay the same, bit for bit.
TEST_P(EveryModel, FrozenTensorsAreSkippedAndChangeNoOtherGradient) {
  ModelMemory model = Model();
  const auto expected = model.Gradients<FreshGradient>(0.0f);
  for (const char* frozen : {"bias",
                             "norm",
                             "ln_",
                             "attn",
                             "k_proj",
                             "mlp",
                             "embed",
                             "wte",
                             "head",
                             "layers.1",
                             "weight"}) {
    ModelMemory part = Model({.recompute = {}, .frozen = frozen});
    const auto gradients = part.Gradients<FreshGradient>(0.0f);
    // A bundle of which a part is frozen is no longer one GEMM, which rounds otherwise.
    const bool exact = model.inventory().bundles.empty() || std::string(frozen) != "k_proj";
    for (size_t t = 0; t < expected.size(); ++t) {
      const plan::TensorSpec& tensor = part.inventory().tensors[t];
      ASSERT_EQ(gradients[t].size(), tensor.trainable ? expected[t].size() : 0u);
      for (size_t i = 0; i < gradients[t].size(); ++i) {
        ASSERT_NEAR(gradients[t][i], expected[t][i], exact ? 0.0 : 2e-5)
            << tensor.name << " with frozen " << frozen;
      }
    }
  }
}

TEST_P(EveryModel, IgnoredTargetsHaveNoLossAndNoGradient) {
  ModelMemory model = Model();
  std::fill(model.targets().begin(), model.targets().end(), -1);
  EXPECT_EQ(model.Loss(), 0.0);
  for (const std::vector<float>& gradient : model.Gradients<FreshGradient>(0.0f)) {
    for (const float g : gradient) {
      ASSERT_EQ(g, 0.0f);
    }
  }
}

TEST_P(EveryModel, DecoderGivesTheLogitsOfTheTrainingForward) {
  ModelMemory model = Model();
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
    EXPECT_NEAR(std::log(total) - static_cast<double>(logits[target]), losses[t], 2e-5) << t;
  }
}

INSTANTIATE_TEST_SUITE_P(Architectures, EveryModel, ::testing::ValuesIn(AllConfigs()), NameOf);

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
