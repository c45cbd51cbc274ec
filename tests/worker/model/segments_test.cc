// Segments of every architecture and policy: run one by one, each with nothing but the memory that
// its SegmentSpec names, they give the bits of whole passes.

#include <algorithm>
#include <cstring>
#include <set>
#include <string>
#include <tuple>

#include <gtest/gtest.h>

#include "tests/testing/sanitizer.h"
#include "tests/worker/model/model_configs.h"
#include "tests/worker/model/model_memory.h"

namespace ravel::model {
namespace {

using Gradients = std::vector<std::vector<float>>;
using plan::RecomputePolicy;

constexpr plan::MicroBatchShape kSegmentShape = {.sequences = 2, .sequence_tokens = 6};
constexpr RecomputePolicy kPolicies[] = {
    RecomputePolicy::kNone, RecomputePolicy::kNorm, RecomputePolicy::kMlp, RecomputePolicy::kBlock};

bool SameBits(const Gradients& a, const Gradients& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& x, const auto& y) {
    return x.size() == y.size() && std::memcmp(x.data(), y.data(), x.size() * sizeof(float)) == 0;
  });
}

class Segments : public ::testing::TestWithParam<NamedConfig> {};

TEST_P(Segments, TouchOnlyWhatTheyNameAndGiveTheBitsOfWholePasses) {
  for (const RecomputePolicy recompute : kPolicies) {
    ModelMemory model(
        GetParam().config, kSegmentShape, {.recompute = recompute, .parts = GetParam().parts});
    const Gradients whole = model.Gradients<FreshGradient>(0);
    const ModelMemory::Watched watched = model.WatchedGradients();
    EXPECT_EQ(watched.fault, "") << static_cast<int>(recompute);
    EXPECT_TRUE(SameBits(whole, watched.gradients)) << static_cast<int>(recompute);
  }
}

class SegmentUses : public Segments {};

TEST_P(SegmentUses, NoneCanBeLeftOut) {
  for (const RecomputePolicy recompute : kPolicies) {
    ModelMemory model(
        GetParam().config, kSegmentShape, {.recompute = recompute, .parts = GetParam().parts});
    const Gradients whole = model.Gradients<FreshGradient>(0);
    using Part = ModelMemory::Part;
    using Use =
        std::tuple<plan::UnitPass, plan::SegmentKind, plan::ActivationList, std::string, Part>;
    std::set<Use> all;
    const auto of = [](auto pass, auto kind, const plan::SegmentUse& use, Part part) {
      return Use(pass, kind, use.list, use.name, part);
    };
    model.WatchedGradients([&](auto pass, auto kind, const auto& use, Part part) {
      all.insert(of(pass, kind, use, part));
      return false;
    });
    const size_t every = all.size() / ravel::testing::Fewer(all.size(), size_t{8});
    size_t index = 0;
    for (const Use& lacking : all) {
      if (index++ % every != 0) {
        continue;
      }
      // Ids that are no tokens would end the process.
      if (std::get<3>(lacking) == "ids" || std::get<3>(lacking) == "targets") {
        continue;
      }
      const auto watched =
          model.WatchedGradients([&](auto pass, auto kind, const auto& use, Part part) {
            return of(pass, kind, use, part) == lacking;
          });
      EXPECT_TRUE(!watched.fault.empty() || !SameBits(whole, watched.gradients))
          << plan::UnitPassName(std::get<0>(lacking)) << " "
          << plan::SegmentName(std::get<1>(lacking)) << " without " << std::get<3>(lacking) << " "
          << static_cast<int>(std::get<4>(lacking)) << ", policy " << static_cast<int>(recompute);
    }
    EXPECT_GT(all.size(), 40u);
  }
}

INSTANTIATE_TEST_SUITE_P(Architectures, Segments, ::testing::ValuesIn(AllConfigs()), NameOf);
INSTANTIATE_TEST_SUITE_P(
    Architectures,
    SegmentUses,
    ::testing::Values(NamedConfig{"llama_bundled", BundledConfig()},
                      NamedConfig{"qwen3", QwenConfig(plan::ArchitectureKind::kQwen3, true)},
                      NamedConfig{"gpt2", Gpt2Config(false)},
                      NamedConfig{
                          "llama_parts", PartsConfig(plan::ArchitectureKind::kLlama, 2, false), 4}),
    NameOf);

}  // namespace
}  // namespace ravel::model
