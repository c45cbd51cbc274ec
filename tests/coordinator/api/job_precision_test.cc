// Rules of spec.precision, and of the optimizer's types.

#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "coordinator/api/job_file_proto.h"

namespace ravel {
namespace {

CanonicalJob MakeTyped(const std::string& kind,
                       const std::string& precision,
                       const std::string& optimizer = "",
                       const std::string& devices = "") {
  const std::string text = absl::StrCat(R"(apiVersion: ravel/v1
kind: TrainingJob
metadata: {name: demo}
spec:
  model:
    config: {vocabSize: 257, hiddenSize: 64, intermediateSize: 128, numHiddenLayers: 2,
             numAttentionHeads: 4, maxPositionEmbeddings: 32}
  data: {train: [{path: /data/train}]}
  checkpoint: {store: /data/checkpoints}
  training: {steps: 100, globalBatch: 32, optimizer: {lr: 3e-4)",
                                        optimizer.empty() ? "" : ", ",
                                        optimizer,
                                        "}}\n  devices: {kind: ",
                                        kind,
                                        ", count: 4",
                                        devices.empty() ? "" : ", ",
                                        devices,
                                        "}\n",
                                        precision.empty() ? "" : "  precision: {",
                                        precision,
                                        precision.empty() ? "" : "}\n");
  const ParsedJobFile parsed = ParseJobFile(text);
  EXPECT_TRUE(parsed.violations.empty())
      << text << FormatViolation(parsed.violations.front(), "job.yaml");
  return Canonicalize(parsed.job, {});
}

std::string TypeViolations(const CanonicalJob& job) {
  std::string out;
  for (const JobViolation& violation : job.violations) {
    absl::StrAppend(&out, FormatViolation(violation, ""), "\n");
  }
  return out;
}

TEST(JobPrecision, GpusComputeInBf16AndCpusInFp32UnlessTold) {
  struct Case {
    const char* kind;
    const char* precision;
    const char* text;
    plan::ComputeType compute;
  };
  for (const Case& test : {Case{"gpu", "", "bf16", plan::ComputeType::kBF16},
                           Case{"gpu", "compute: fp32", "fp32", plan::ComputeType::kF32},
                           Case{"gpu", "compute: bf16", "bf16", plan::ComputeType::kBF16},
                           Case{"gpu", "compute: fp16", "fp16", plan::ComputeType::kF16},
                           Case{"cpu", "", "fp32", plan::ComputeType::kF32},
                           Case{"cpu", "compute: fp32", "fp32", plan::ComputeType::kF32},
                           Case{"cpu", "compute: bf16", "bf16", plan::ComputeType::kBF16},
                           Case{"cpu", "compute: fp16", "fp16", plan::ComputeType::kF16}}) {
    const CanonicalJob job = MakeTyped(test.kind, test.precision);
    ASSERT_TRUE(job.ok()) << TypeViolations(job);
    EXPECT_EQ(job.spec.compute, test.compute) << test.kind << " " << test.precision;
    EXPECT_EQ(job.job.spec().precision().compute(), test.text);
    EXPECT_EQ(CanonicalJson(Canonicalize(job.job, {}).job), CanonicalJson(job.job));
  }
}

TEST(JobPrecision, Fp16HasALossScaleAndNothingElseHas) {
  const auto scale_of = [](const std::string& fields) {
    const CanonicalJob job = MakeTyped("cpu", absl::StrCat("compute: fp16", fields));
    EXPECT_TRUE(job.ok()) << TypeViolations(job);
    EXPECT_EQ(CanonicalJson(Canonicalize(job.job, {}).job), CanonicalJson(job.job));
    return job.spec.loss_scale;
  };
  EXPECT_EQ(scale_of(""), plan::LossScaleSpec{});
  EXPECT_EQ(scale_of(", lossScale: {growthInterval: 100}"),
            (plan::LossScaleSpec{.growth_interval = 100}));
  EXPECT_EQ(scale_of(", lossScale: {initial: 65536}"),
            (plan::LossScaleSpec{.initial = 65536, .maximum = 65536}));
  EXPECT_EQ(scale_of(", lossScale: {initial: 8, growthFactor: 4, backoffFactor: 0.25, "
                     "growthInterval: 9, minimum: 2, maximum: 64}"),
            (plan::LossScaleSpec{.initial = 8,
                                 .growth_factor = 4,
                                 .backoff_factor = 0.25,
                                 .growth_interval = 9,
                                 .minimum = 2,
                                 .maximum = 64}));
  // A first scale that is not given keeps to bounds that are, a largest one to a least.
  EXPECT_EQ(scale_of(", lossScale: {maximum: 64}"),
            (plan::LossScaleSpec{.initial = 64, .maximum = 64}));
  EXPECT_EQ(scale_of(", lossScale: {minimum: 65536}"),
            (plan::LossScaleSpec{.initial = 65536, .minimum = 65536, .maximum = 65536}));
  EXPECT_EQ(scale_of(", lossScale: {static: 512}"),
            (plan::LossScaleSpec{.initial = 512, .minimum = 512, .maximum = 512}));
  EXPECT_EQ(MakeTyped("cpu", "compute: fp16").job.spec().precision().loss_scale().initial(), 1024);
  EXPECT_FALSE(MakeTyped("cpu", "compute: bf16").job.spec().precision().has_loss_scale());
}

TEST(JobPrecision, Fp16IsRefusedByFieldWhereItCannotWork) {
  const std::string at = "spec.precision.lossScale";
  for (const char* kind : {"cpu", "gpu"}) {
    EXPECT_EQ(TypeViolations(MakeTyped(kind, "compute: fp16, recipe: mxfp8")),
              "spec.precision.compute: expected bf16, which a recipe needs, got 'fp16'\n");
  }
  EXPECT_EQ(TypeViolations(MakeTyped("cpu", "compute: fp16", "mainWeights: bf16_remainder")),
            "spec.training.optimizer.mainWeights: expected fp32, or precision.compute bf16, got "
            "'bf16_remainder'\n");
  for (const char* other : {"compute: bf16, ", "compute: fp32, ", ""}) {
    EXPECT_EQ(TypeViolations(MakeTyped("cpu", absl::StrCat(other, "lossScale: {static: 8}"))),
              at + ": expected nothing, or precision.compute fp16, got a value\n");
  }
  const auto refused = [](const std::string& fields) {
    return TypeViolations(
        MakeTyped("cpu", absl::StrCat("compute: fp16, lossScale: {", fields, "}")));
  };
  EXPECT_EQ(refused("static: 3"),
            at + ".static: expected a power of two from 1 to 16777216, got 3\n");
  EXPECT_EQ(refused("static: 8, initial: 4"),
            at + ".initial: expected nothing beside static, got a value\n");
  EXPECT_EQ(refused("initial: 1000"),
            at + ".initial: expected a power of two from 1 to 32768, got 1000\n");
  EXPECT_EQ(refused("minimum: 64, maximum: 8"),
            at + ".maximum: expected a power of two from 64 to 16777216, got 8\n");
  EXPECT_EQ(refused("growthFactor: 3"),
            at + ".growthFactor: expected a power of two from 2 to 16777216, got 3\n");
  EXPECT_EQ(refused("growthFactor: 1"),
            at + ".growthFactor: expected a power of two from 2 to 16777216, got 1\n");
  EXPECT_EQ(refused("backoffFactor: 1"),
            at + ".backoffFactor: expected a power of two from 5.960464478e-08 to 0.5, got 1\n");
  EXPECT_EQ(refused("backoffFactor: 0.3"),
            at + ".backoffFactor: expected a power of two from 5.960464478e-08 to 0.5, got 0.3\n");
  EXPECT_EQ(refused("growthInterval: 0"),
            at + ".growthInterval: expected a whole number from 1 to 1000000000, got 0\n");
  EXPECT_EQ(refused("minimum: 0.5"),
            at + ".minimum: expected a power of two from 1 to 16777216, got 0.5\n");
}

TEST(JobPrecision, WhatNoEngineComputesIsRefusedByName) {
  EXPECT_EQ(TypeViolations(MakeTyped("gpu", "compute: fp8")),
            "spec.precision.compute: expected one of bf16, fp16, fp32, got 'fp8'\n");
  EXPECT_EQ(TypeViolations(MakeTyped("gpu", "", "stateDtype: fp4")),
            "spec.training.optimizer.stateDtype: expected one of fp32, bf16, fp8, fp8,bf16, "
            "fp8,fp32, bf16,fp8, bf16,fp32, fp32,bf16, fp32,fp8 (did you mean 'fp8'?), got "
            "'fp4'\n");
  EXPECT_EQ(TypeViolations(MakeTyped("gpu", "", "mainWeights: bf16")),
            "spec.training.optimizer.mainWeights: expected one of fp32, bf16_remainder, got "
            "'bf16'\n");
}

TEST(JobPrecision, AnEmulationIsAllowedByNameAndOfTheDevices) {
  const std::string field = "spec.precision.emulation: expected ";
  const CanonicalJob cpu = MakeTyped("cpu", "recipe: fp8_tensor");
  ASSERT_TRUE(cpu.ok()) << TypeViolations(cpu);
  EXPECT_EQ(cpu.spec.recipe.emulation, std::vector{plan::GemmPath::kCpuReference});
  EXPECT_EQ(cpu.job.spec().precision().emulation(0), "cpu_reference");
  EXPECT_EQ(CanonicalJson(Canonicalize(cpu.job, {}).job), CanonicalJson(cpu.job));
  const CanonicalJob gpu = MakeTyped("gpu", "recipe: mxfp8, emulation: [dequant_bf16]");
  ASSERT_TRUE(gpu.ok()) << TypeViolations(gpu);
  EXPECT_EQ(gpu.spec.recipe.emulation, std::vector{plan::GemmPath::kDequantBf16});
  const CanonicalJob codes = MakeTyped("gpu", "recipe: fp8_tensor");
  ASSERT_TRUE(codes.ok()) << TypeViolations(codes);
  EXPECT_TRUE(codes.spec.recipe.emulation.empty());
  EXPECT_EQ(codes.job.spec().precision().emulation_size(), 0);
  EXPECT_EQ(MakeTyped("gpu", "").job.spec().precision().emulation_size(), 0);
  EXPECT_EQ(TypeViolations(MakeTyped("gpu", "recipe: nvfp4")), "");
  EXPECT_EQ(TypeViolations(MakeTyped("gpu", "recipe: nvfp4, emulation: [dequant]")),
            field + "dequant_bf16, block_as_mxfp8, cpu_reference, got 'dequant'\n");
  // The model is too small for its blocks; the emulation is taken.
  const CanonicalJob block = MakeTyped("gpu", "recipe: fp8_block, emulation: [block_as_mxfp8]");
  EXPECT_THAT(TypeViolations(block), ::testing::Not(::testing::HasSubstr("emulation")));
  EXPECT_EQ(block.spec.recipe.emulation, std::vector{plan::GemmPath::kBlockAsMxFp8});
  EXPECT_EQ(TypeViolations(MakeTyped("gpu", "emulation: [dequant_bf16]")),
            field + "a precision.recipe beside it, got none\n");
}

TEST(JobPrecision, NvFp4HasRandomBitsForSoManySamples) {
  v1::TrainingJob job = MakeTyped("gpu", "recipe: nvfp4").job;
  const auto violations = [&job](const char* recipe, int64_t samples) {
    job.mutable_spec()->mutable_precision()->set_recipe(recipe);
    job.mutable_spec()->mutable_training()->set_global_batch(samples);
    return TypeViolations(Canonicalize(job, {}));
  };
  EXPECT_EQ(violations("nvfp4", int64_t{1} << 20), "");
  EXPECT_EQ(violations("nvfp4", int64_t{1} << 21),
            "spec.training.globalBatch: expected at most 1048576 with nvfp4, whose random bits "
            "tell as many samples apart, got 2097152\n");
  EXPECT_EQ(violations("mxfp8", int64_t{1} << 21), "");
}

TEST(JobPrecision, AnEmulationThatTheDevicesNeverTakeIsRefusedByEntry) {
  const auto refused = [](const char* kind, const char* entries) {
    return TypeViolations(MakeTyped(kind, absl::StrCat("recipe: nvfp4, emulation: ", entries)));
  };
  const std::string field = "spec.precision.emulation";
  const std::string of_gpus = ": expected dequant_bf16, the emulation of gpu devices, got ";
  EXPECT_EQ(refused("gpu", "[cpu_reference]"), field + "[0]" + of_gpus + "cpu_reference\n");
  EXPECT_EQ(refused("gpu", "[dequant_bf16, cpu_reference]"),
            field + "[1]" + of_gpus + "cpu_reference\n");
  EXPECT_EQ(refused("gpu", "[dequant_bf16, dequant_bf16]"),
            field + "[1]: expected one path, which all gemms take, got dequant_bf16 beside it\n");
  EXPECT_EQ(
      refused("cpu", "[dequant_bf16]"),
      field + "[0]: expected cpu_reference, the emulation of cpu devices, got dequant_bf16\n");
  EXPECT_EQ(TypeViolations(MakeTyped("gpu", "recipe: fp8_tensor, emulation: [cpu_reference]")),
            field + "[0]" + of_gpus + "cpu_reference\n");
  EXPECT_EQ(refused("gpu", "[block_as_mxfp8]"), field + "[0]" + of_gpus + "block_as_mxfp8\n");
  EXPECT_EQ(refused("cpu", "[cpu_reference]"), "");
}

TEST(JobPrecision, FastSumsAreOfTheirOwnPathAlone) {
  const CanonicalJob plain = MakeTyped("gpu", "recipe: fp8_tensor");
  ASSERT_TRUE(plain.ok()) << TypeViolations(plain);
  EXPECT_EQ(plain.job.spec().precision().fast_accum(), "forward");
  using plan::FastAccumulation;
  for (const auto& [text, fast] : {std::pair("none", FastAccumulation::kNone),
                                   {"forward", FastAccumulation::kForward},
                                   {"forward+dgrad", FastAccumulation::kForwardAndInputGradient}}) {
    const CanonicalJob job =
        MakeTyped("gpu", absl::StrCat("recipe: fp8_tensor, scaling: current, fastAccum: ", text));
    ASSERT_TRUE(job.ok()) << TypeViolations(job);
    EXPECT_EQ(job.spec.recipe.fast_accumulation, fast);
    EXPECT_EQ(CanonicalJson(Canonicalize(job.job, {}).job), CanonicalJson(job.job));
  }
  const std::string field = "spec.precision.fastAccum: expected ";
  for (const auto& [kind, precision] : {std::pair("cpu", "recipe: fp8_tensor, "),
                                        {"gpu", "recipe: fp8_tensor, emulation: [dequant_bf16], "},
                                        {"gpu", "recipe: mxfp8, emulation: [dequant_bf16], "},
                                        {"gpu", ""}}) {
    EXPECT_EQ(TypeViolations(MakeTyped(kind, absl::StrCat(precision, "fastAccum: forward"))),
              field +
                  "nothing, or gpu devices and recipe fp8_tensor without emulation, got "
                  "forward\n");
  }
  EXPECT_EQ(TypeViolations(MakeTyped("gpu", "recipe: fp8_tensor, fastAccum: dgrad")),
            field + "one of none, forward, forward+dgrad, got 'dgrad'\n");
  EXPECT_EQ(MakeTyped("cpu", "recipe: fp8_tensor").job.spec().precision().fast_accum(), "");
}

TEST(JobPrecision, DelayedScalesHaveChoicesOfTheirOwn) {
  const CanonicalJob plain = MakeTyped("cpu", "recipe: fp8_tensor");
  ASSERT_TRUE(plain.ok()) << TypeViolations(plain);
  EXPECT_EQ(plain.job.spec().precision().amax_algorithm(), "max");
  EXPECT_EQ(plain.job.spec().precision().first_scale(), "current");
  EXPECT_EQ(plain.spec.recipe.amax_algorithm, plan::AmaxAlgorithm::kMax);
  const CanonicalJob other =
      MakeTyped("cpu", "recipe: fp8_tensor, amaxAlgorithm: most_recent, firstScale: ones");
  ASSERT_TRUE(other.ok()) << TypeViolations(other);
  EXPECT_EQ(other.spec.recipe.amax_algorithm, plan::AmaxAlgorithm::kMostRecent);
  EXPECT_EQ(other.spec.recipe.first_scale, plan::FirstScale::kOnes);
  EXPECT_EQ(CanonicalJson(Canonicalize(other.job, {}).job), CanonicalJson(other.job));
  const std::string beside = ": expected recipe fp8_tensor with scaling delayed beside it, got ";
  EXPECT_EQ(TypeViolations(MakeTyped("cpu", "recipe: mxfp8, amaxAlgorithm: max")),
            "spec.precision.amaxAlgorithm" + beside + "'mxfp8'\n");
  EXPECT_EQ(
      TypeViolations(MakeTyped("cpu", "recipe: fp8_tensor, scaling: current, firstScale: ones")),
      "spec.precision.firstScale" + beside + "'fp8_tensor'\n");
  EXPECT_EQ(TypeViolations(MakeTyped("cpu", "recipe: fp8_tensor, firstScale: zeros")),
            "spec.precision.firstScale: expected one of current, ones, got 'zeros'\n");
}

TEST(JobPrecision, AnEpsilonIsOfScalesThatFollowFromAmaxes) {
  const std::string current = "recipe: fp8_tensor, scaling: current";
  const CanonicalJob plain = MakeTyped("cpu", current);
  ASSERT_TRUE(plain.ok()) << TypeViolations(plain);
  EXPECT_EQ(plain.spec.recipe.amax_epsilon, 0);
  const CanonicalJob given = MakeTyped("cpu", current + ", amaxEpsilon: 1e-4");
  ASSERT_TRUE(given.ok()) << TypeViolations(given);
  EXPECT_EQ(given.spec.recipe.amax_epsilon, 1e-4);
  EXPECT_EQ(CanonicalJson(Canonicalize(given.job, {}).job), CanonicalJson(given.job));
  // Of this model fp8_block takes no matrix, whatever the epsilon.
  const CanonicalJob blocks = MakeTyped("cpu", "recipe: fp8_block, amaxEpsilon: 1e-4");
  EXPECT_EQ(blocks.spec.recipe.amax_epsilon, 1e-4);
  EXPECT_EQ(TypeViolations(blocks), TypeViolations(MakeTyped("cpu", "recipe: fp8_block")));
  const std::string field = "spec.precision.amaxEpsilon: expected ";
  for (const auto& [precision, name] : {std::pair("recipe: fp8_tensor, ", "'fp8_tensor'"),
                                        {"recipe: mxfp8, ", "'mxfp8'"},
                                        {"recipe: nvfp4, ", "'nvfp4'"},
                                        {"", "nothing"}}) {
    EXPECT_EQ(TypeViolations(MakeTyped("cpu", absl::StrCat(precision, "amaxEpsilon: 1e-4"))),
              absl::StrCat(field,
                           "recipe fp8_block, or fp8_tensor with scaling current beside it, got ",
                           name,
                           "\n"));
  }
  for (const char* wrong : {"1.5", "-0.1"}) {
    EXPECT_EQ(TypeViolations(MakeTyped("cpu", absl::StrCat(current, ", amaxEpsilon: ", wrong))),
              absl::StrCat(field, "a number from 0 to 1, got ", wrong, "\n"));
  }
}

TEST(JobOptimizer, SgdHasItsOwnFieldsAndTheOthersAreRefusedByName) {
  const CanonicalJob plain = MakeTyped("cpu", "", "name: sgd");
  ASSERT_TRUE(plain.ok()) << TypeViolations(plain);
  EXPECT_EQ(plain.spec.optimizer.kind, plan::OptimizerKind::kSgd);
  EXPECT_EQ(plain.spec.optimizer.beta1, 0.9);
  const CanonicalJob nesterov = MakeTyped("cpu", "", "name: sgd, momentum: 0.5, nesterov: true");
  ASSERT_TRUE(nesterov.ok()) << TypeViolations(nesterov);
  EXPECT_EQ(nesterov.spec.optimizer.kind, plan::OptimizerKind::kSgdNesterov);
  EXPECT_EQ(nesterov.spec.optimizer.beta1, 0.5);
  for (const CanonicalJob* job : {&plain, &nesterov}) {
    const v1::OptimizerSpec& canonical = job->job.spec().training().optimizer();
    EXPECT_EQ(canonical.betas_size(), 0);
    EXPECT_FALSE(canonical.has_eps());
    EXPECT_EQ(CanonicalJson(Canonicalize(job->job, {}).job), CanonicalJson(job->job));
  }
  EXPECT_FALSE(MakeTyped("cpu", "").job.spec().training().optimizer().has_momentum());
  EXPECT_EQ(TypeViolations(MakeTyped("cpu", "", "name: sgd, betas: [0.9, 0.95], eps: 1e-8")),
            "spec.training.optimizer.betas: expected nothing, since sgd has no such field, got a "
            "value\n"
            "spec.training.optimizer.eps: expected nothing, since sgd has no such field, got a "
            "value\n");
  EXPECT_EQ(TypeViolations(MakeTyped("cpu", "", "momentum: 0.9")),
            "spec.training.optimizer.momentum: expected nothing, since adamw has no such field, "
            "got a value\n");
  EXPECT_EQ(TypeViolations(MakeTyped("cpu", "", "nesterov: true")),
            "spec.training.optimizer.nesterov: expected nothing, since adamw has no such field, "
            "got a value\n");
  EXPECT_EQ(TypeViolations(MakeTyped("cpu", "", "name: sgd, momentum: 1")),
            "spec.training.optimizer.momentum: expected a number from 0 to below 1, got 1\n");
  EXPECT_EQ(TypeViolations(MakeTyped("cpu", "", "name: sgd, momentum: 0, nesterov: true")),
            "spec.training.optimizer.nesterov: expected false, or a momentum above 0, got true\n");
  EXPECT_EQ(TypeViolations(MakeTyped("gpu", "", "name: sgd, stateDtype: bf16")),
            "spec.training.optimizer.stateDtype: expected fp32: sgd keeps its momentum so, got "
            "'bf16'\n");
}

TEST(JobOptimizer, OffloadOfCpuJobsNamesItsFolder) {
  const CanonicalJob job = MakeTyped("cpu", "", "offload: {fraction: 0.37, path: 'file:///disk/'}");
  ASSERT_TRUE(job.ok()) << TypeViolations(job);
  EXPECT_EQ(job.spec.optimizer.offload.fraction, 0.37);
  EXPECT_EQ(job.spec.optimizer.offload.path, "/disk");
  EXPECT_TRUE(job.spec.optimizer.offload.overlap);
  EXPECT_EQ(CanonicalJson(Canonicalize(job.job, {}).job), CanonicalJson(job.job));
  const CanonicalJob inlined =
      MakeTyped("cpu", "", "offload: {fraction: 1, path: /disk, overlap: false}");
  ASSERT_TRUE(inlined.ok()) << TypeViolations(inlined);
  EXPECT_FALSE(inlined.spec.optimizer.offload.overlap);
  const CanonicalJob none = MakeTyped("gpu", "");
  EXPECT_FALSE(none.job.spec().training().optimizer().has_offload());
  EXPECT_EQ(none.spec.optimizer.offload.fraction, 0);

  const std::string field = "spec.training.optimizer.offload.";
  const auto refused = [](const char* kind, const std::string& offload) {
    return TypeViolations(MakeTyped(kind, "", absl::StrCat("offload: {", offload, "}")));
  };
  for (const char* wrong : {"1.5", "-0.1", "all", "nan", "0.5x"}) {
    EXPECT_EQ(refused("cpu", absl::StrCat("path: /disk, fraction: ", wrong)),
              absl::StrCat(
                  field, "fraction: expected auto or a number from 0 to 1, got '", wrong, "'\n"));
  }
  EXPECT_EQ(refused("cpu", "fraction: 0.5"),
            field + "path: expected an absolute path or file:// URL, got nothing\n");
  EXPECT_EQ(refused("cpu", "fraction: 0.5, path: disk"),
            field + "path: expected an absolute path or file:// URL, got 'disk'\n");
  EXPECT_EQ(refused("cpu", "fraction: auto"),
            field + "path: expected an absolute path or file:// URL, got nothing\n");
  const CanonicalJob chosen = MakeTyped("gpu", "", "offload: {fraction: auto}");
  ASSERT_TRUE(chosen.ok()) << TypeViolations(chosen);
  EXPECT_TRUE(chosen.spec.optimizer.offload.automatic);
  EXPECT_EQ(chosen.spec.optimizer.offload.fraction, 0);
  EXPECT_EQ(chosen.job.spec().training().optimizer().offload().fraction(), "auto");
  EXPECT_FALSE(job.spec.optimizer.offload.automatic);
  const CanonicalJob host = MakeTyped("gpu", "", "offload: {fraction: 0.5, overlap: false}");
  ASSERT_TRUE(host.ok()) << TypeViolations(host);
  EXPECT_EQ(host.spec.optimizer.offload.fraction, 0.5);
  EXPECT_EQ(host.spec.optimizer.offload.path, "");
  EXPECT_FALSE(host.spec.optimizer.offload.overlap);
  for (const char* offload : {"fraction: 0.5, path: /disk", "path: /disk"}) {
    EXPECT_EQ(refused("gpu", offload),
              field +
                  "path: expected nothing, since what gpu devices offload lies in memory of "
                  "their hosts, or cpu devices, got '/disk'\n");
  }
}

TEST(JobOptimizer, LionHasBetasOfItsOwnAndOneStateType) {
  const CanonicalJob plain = MakeTyped("cpu", "", "name: lion");
  ASSERT_TRUE(plain.ok()) << TypeViolations(plain);
  EXPECT_EQ(plain.spec.optimizer.kind, plan::OptimizerKind::kLion);
  EXPECT_EQ(plain.spec.optimizer.beta1, 0.9);
  EXPECT_EQ(plain.spec.optimizer.beta2, 0.99);
  const v1::OptimizerSpec& canonical = plain.job.spec().training().optimizer();
  EXPECT_EQ(canonical.betas_size(), 2);
  EXPECT_FALSE(canonical.has_eps());
  EXPECT_FALSE(canonical.has_momentum());
  EXPECT_EQ(CanonicalJson(Canonicalize(plain.job, {}).job), CanonicalJson(plain.job));
  const CanonicalJob given =
      MakeTyped("cpu", "", "name: lion, betas: [0.95, 0.98], stateDtype: fp8");
  ASSERT_TRUE(given.ok()) << TypeViolations(given);
  EXPECT_EQ(given.spec.optimizer.beta1, 0.95);
  EXPECT_EQ(given.spec.optimizer.beta2, 0.98);
  EXPECT_EQ(given.spec.optimizer.state_types, plan::kFp8States);
  EXPECT_EQ(MakeTyped("cpu", "", "").spec.optimizer.beta2, 0.95);
  EXPECT_EQ(TypeViolations(MakeTyped("cpu", "", "name: lion, eps: 1e-8, momentum: 0.9")),
            "spec.training.optimizer.eps: expected nothing, since lion has no such field, got a "
            "value\n"
            "spec.training.optimizer.momentum: expected nothing, since lion has no such field, got "
            "a value\n");
  EXPECT_EQ(TypeViolations(MakeTyped("cpu", "", "name: lion, betas: [0.9, 1]")),
            TypeViolations(MakeTyped("cpu", "", "betas: [0.9, 1]")));
  EXPECT_EQ(TypeViolations(MakeTyped("cpu", "", "name: lion, stateDtype: 'fp8,bf16'")),
            "spec.training.optimizer.stateDtype: expected one type: lion keeps one average, got "
            "'fp8,bf16'\n");
}

TEST(JobPrecision, EachMomentHasAType) {
  const CanonicalJob pair = MakeTyped("cpu", "", "stateDtype: 'fp8,bf16'");
  ASSERT_TRUE(pair.ok()) << TypeViolations(pair);
  EXPECT_EQ(pair.spec.optimizer.state_types.mean, DType::kF8E4M3);
  EXPECT_EQ(pair.spec.optimizer.state_types.square, DType::kBF16);
  const CanonicalJob both = MakeTyped("cpu", "", "stateDtype: fp8");
  ASSERT_TRUE(both.ok()) << TypeViolations(both);
  EXPECT_EQ(both.spec.optimizer.state_types, plan::kFp8States);
  EXPECT_EQ(TypeViolations(MakeTyped("cpu", "", "name: sgd, stateDtype: fp8")),
            "spec.training.optimizer.stateDtype: expected fp32: sgd keeps its momentum so, got "
            "'fp8'\n");
}

TEST(JobPrecision, RemaindersGoWithBf16Alone) {
  const std::string both = "stateDtype: bf16, mainWeights: bf16_remainder";
  for (const char* kind : {"gpu", "cpu"}) {
    const CanonicalJob job = MakeTyped(kind, "compute: bf16", both);
    ASSERT_TRUE(job.ok()) << TypeViolations(job);
    EXPECT_EQ(job.spec.optimizer.state_types, plan::kBf16States);
    EXPECT_EQ(job.spec.optimizer.main_weights, plan::MainWeightForm::kBF16Remainder);
  }
  const std::string refused =
      "spec.training.optimizer.mainWeights: expected fp32, or precision.compute bf16, got "
      "'bf16_remainder'\n";
  EXPECT_EQ(TypeViolations(MakeTyped("gpu", "compute: fp32", both)), refused);
  EXPECT_EQ(TypeViolations(MakeTyped("cpu", "", both)), refused);
}

TEST(JobPrecision, SlowKernelsAreAllowedOnlyWhereTheyCouldRun) {
  EXPECT_FALSE(MakeTyped("gpu", "").spec.allow_slow_kernels);
  const std::string allowed = "allowSlowKernels: true";
  const CanonicalJob job = MakeTyped("gpu", "", "", allowed);
  ASSERT_TRUE(job.ok()) << TypeViolations(job);
  EXPECT_TRUE(job.spec.allow_slow_kernels);
  EXPECT_TRUE(MakeTyped("gpu", "compute: fp16", "", allowed).ok());
  const std::string refused =
      "spec.devices.allowSlowKernels: expected false, or gpu devices and precision.compute bf16 "
      "or fp16, got true\n";
  EXPECT_EQ(TypeViolations(MakeTyped("gpu", "compute: fp32", "", allowed)), refused);
  EXPECT_EQ(TypeViolations(MakeTyped("cpu", "", "", allowed)), refused);
  EXPECT_EQ(TypeViolations(MakeTyped("cpu", "compute: bf16", "", allowed)), refused);
}

TEST(JobPrecision, ChunksOfTokensNeedScalesOfOneToken) {
  const auto violations = [](const std::string& recipe) {
    return TypeViolations(MakeTyped(
        "cpu", absl::StrCat("recipe: ", recipe, "}\n  parallelism: {tensor: 2, tensorChunks: 4")));
  };
  const std::string refused = "spec.parallelism.tensorChunks: expected 1 with ";
  const std::string why = ", which has scales of all tokens, got 4\n";
  EXPECT_EQ(violations("mxfp8"), "");
  EXPECT_EQ(violations("nvfp4"), absl::StrCat(refused, "nvfp4", why));
  EXPECT_EQ(violations("fp8_tensor"), absl::StrCat(refused, "fp8_tensor/delayed", why));
  EXPECT_EQ(violations("fp8_tensor, scaling: current"),
            absl::StrCat(refused, "fp8_tensor/current", why));
}

}  // namespace
}  // namespace ravel
