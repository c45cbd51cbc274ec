#include "coordinator/jobs/memory_fit.h"

#include <absl/strings/match.h>
#include <gtest/gtest.h>

#include "coordinator/api/job_file_proto.h"
#include "coordinator/jobs/planner_driver.h"

namespace ravel::coordinator {
namespace {

plan::JobSpec Spec(const std::string& kind) {
  const ParsedJobFile parsed = ParseJobFile(
      "apiVersion: ravel/v1\nkind: TrainingJob\nmetadata: {name: large}\nspec:\n  model: {config: "
      "{vocabSize: 32000, hiddenSize: 1024, intermediateSize: 4096, numHiddenLayers: 8, "
      "numAttentionHeads: 8}}\n  data: {train: [{path: /nowhere/a}], sequenceLength: 512}\n  "
      "training: {steps: 100, globalBatch: 8, optimizer: {lr: 3e-4}}\n  devices: {kind: " +
      kind + ", count: 2}\n  elastic: {sizes: [1, 2, 4]}\n  checkpoint: {store: /ckpt}\n");
  const CanonicalJob job = Canonicalize(parsed.job, {});
  EXPECT_TRUE(job.ok()) << FormatViolation(
      job.violations.empty() ? JobViolation() : job.violations[0], "");
  return job.spec;
}

TEST(MemoryFit, AJobThatNoDeviceCanHoldIsRefusedWithWhatWouldHelp) {
  PlannerDriver planner;
  const MemoryFit known = CheckMemory(planner, Spec("gpu"), {});
  ASSERT_TRUE(known.status.ok());
  ASSERT_EQ(known.warnings.size(), 1u);
  EXPECT_TRUE(absl::StrContains(known.warnings[0], "no node with a gpu"));
  ASSERT_EQ(known.peak_bytes.size(), 3u);
  EXPECT_GT(known.peak_bytes[0], known.peak_bytes[1]);
  EXPECT_EQ(known.peak_bytes[2], 0) << "more than devices.count";

  const MemoryFit small = CheckMemory(
      planner, Spec("gpu"), {.gpu_name = "node-1", .gpu_bytes = known.peak_bytes[1] / 2});
  EXPECT_TRUE(absl::IsFailedPrecondition(small.status));
  const std::string text(small.status.message());
  EXPECT_TRUE(absl::StrContains(text, "spec.devices.count: on node-1: does not fit: needs "))
      << text;
  EXPECT_TRUE(absl::StrContains(text, "; most of it is ")) << text;
  EXPECT_TRUE(absl::StrContains(text, "fits with ") || absl::StrContains(text, "none of ")) << text;
}

TEST(MemoryFit, OneSizeThatFitsIsEnough) {
  PlannerDriver planner;
  const std::vector<int64_t> peaks = CheckMemory(planner, Spec("gpu"), {}).peak_bytes;
  const int64_t between = (peaks[0] + peaks[1]) / 2;
  const MemoryFit fit =
      CheckMemory(planner, Spec("gpu"), {.gpu_name = "node-1", .gpu_bytes = between * 100 / 94});
  EXPECT_TRUE(fit.status.ok()) << fit.status;
  ASSERT_EQ(fit.warnings.size(), 1u);
  EXPECT_TRUE(absl::StrContains(fit.warnings[0], "size 1 needs ")) << fit.warnings[0];
  EXPECT_EQ(UsableBytes(100), 94);
}

TEST(MemoryFit, RanksOfACpuNodeShareItsMemory) {
  PlannerDriver planner;
  // A rank alone on the node may use all of it.
  const std::vector<int64_t> peaks = CheckMemory(planner, Spec("cpu"), {}).peak_bytes;
  const MemoryFit fit =
      CheckMemory(planner, Spec("cpu"), {.cpu_name = "node-1", .cpu_bytes = peaks[0] * 2});
  EXPECT_TRUE(fit.status.ok() && fit.warnings.empty()) << fit.status;
  EXPECT_FALSE(CheckMemory(planner, Spec("cpu"), {.cpu_name = "node-1", .cpu_bytes = peaks[1] / 2})
                   .status.ok());
}

}  // namespace
}  // namespace ravel::coordinator
