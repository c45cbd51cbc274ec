#include "coordinator/jobs/memory_fit.h"

#include <absl/strings/match.h>
#include <gtest/gtest.h>

#include "coordinator/api/job_file_proto.h"
#include "coordinator/jobs/planner_driver.h"

namespace ravel::coordinator {
namespace {

plan::JobSpec Spec(const std::string& kind, const std::string& offload = "") {
  const ParsedJobFile parsed = ParseJobFile(
      "apiVersion: ravel/v1\nkind: TrainingJob\nmetadata: {name: large}\nspec:\n  model: {config: "
      "{vocabSize: 32000, hiddenSize: 1024, intermediateSize: 4096, numHiddenLayers: 8, "
      "numAttentionHeads: 8}}\n  data: {train: [{path: /nowhere/a}], sequenceLength: 512}\n  "
      "training: {steps: 100, globalBatch: 8, optimizer: {lr: 3e-4" +
      offload + "}}\n  devices: {kind: " + kind +
      ", count: 2}\n  elastic: {sizes: [1, 2, 4]}\n  checkpoint: {store: /ckpt}\n");
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

// Offloaded state needs memory of the hosts, which may be known to have too little of it.
TEST(MemoryFit, HostsMustHoldWhatDevicesOffload) {
  PlannerDriver planner;
  const plan::JobSpec spec = Spec("gpu", ", offload: {fraction: 1}");
  const int64_t one = planner.Check(spec, 1, true)->host_bytes;
  const int64_t two = planner.Check(spec, 2, true)->host_bytes;
  ASSERT_GT(one, two);
  EXPECT_EQ(planner.Check(Spec("gpu"), 1, true)->host_bytes, 0);
  const auto fit = [&](int64_t host_bytes, int64_t all_hosts_bytes) {
    return CheckMemory(planner,
                       spec,
                       {.gpu_bytes = int64_t{1} << 40,
                        .host_name = "node-1",
                        .host_bytes = host_bytes,
                        .all_hosts_bytes = all_hosts_bytes});
  };
  EXPECT_TRUE(fit(0, 0).status.ok()) << "the memory of hosts is not known";
  const MemoryFit enough = fit(3 * one, 3 * one);
  EXPECT_TRUE(enough.status.ok() && enough.warnings.empty()) << enough.status;

  const MemoryFit narrow = fit((one + two) / 2, 4 * one);
  EXPECT_TRUE(narrow.status.ok()) << narrow.status;
  ASSERT_EQ(narrow.warnings.size(), 1u);
  EXPECT_TRUE(absl::StrContains(narrow.warnings[0], "offload.fraction: size 1 needs "))
      << narrow.warnings[0];

  const MemoryFit small = fit(two / 2, 4 * two);
  EXPECT_TRUE(absl::IsFailedPrecondition(small.status));
  EXPECT_TRUE(absl::StrContains(small.status.message(),
                                "spec.training.optimizer.offload.fraction: size 2 needs "))
      << small.status;
  EXPECT_TRUE(absl::StrContains(small.status.message(), "to use (node-1)")) << small.status;

  const MemoryFit together = fit(two * 3 / 2, two * 3 / 2);
  EXPECT_TRUE(absl::StrContains(together.status.message(), "all hosts here have "))
      << together.status;
}

// Such a job waits, and a host with more devices may yet come: it is told so, and not refused.
TEST(MemoryFit, SaysWhenNoHostHasTheDevicesOfATensorGroup) {
  PlannerDriver planner;
  plan::JobSpec spec = Spec("gpu");
  spec.tensor = 2;
  spec.elastic.sizes = {2};
  const auto warnings = [&](const DeviceInventory& inventory) {
    const MemoryFit fit = CheckMemory(planner, spec, inventory);
    EXPECT_TRUE(fit.status.ok()) << fit.status;
    return fit.warnings;
  };
  const DeviceInventory one = {.gpu_bytes = int64_t{1} << 40, .gpus_of_host = 1, .cpus_of_host = 8};
  ASSERT_EQ(warnings(one).size(), 1u);
  EXPECT_EQ(warnings(one)[0],
            "spec.parallelism.tensor: no host that is here has 2 gpu devices, which share a "
            "layer: the job waits for one");
  EXPECT_TRUE(warnings({.gpu_bytes = int64_t{1} << 40, .gpus_of_host = 2}).empty());
  spec.tensor_across_nodes = true;
  EXPECT_TRUE(warnings(one).empty());
}

// The least that lets each size fit the devices that are here.
TEST(MemoryFit, AnAutomaticOffloadFitsWhereTheJobWithoutDoesNot) {
  PlannerDriver planner;
  const std::vector<int64_t> peaks = CheckMemory(planner, Spec("gpu"), {}).peak_bytes;
  plan::JobSpec spec = Spec("gpu", ", offload: {fraction: auto}");
  EXPECT_TRUE(absl::StrContains(CheckMemory(planner, spec, {}).status.message(),
                                "offload.fraction: expected a number"));
  const DeviceInventory inventory = {.gpu_name = "node-1",
                                     .gpu_bytes = peaks[1] / 100 * 99 * 100 / 94};
  EXPECT_FALSE(CheckMemory(planner, Spec("gpu"), inventory).status.ok());
  SetOffloadMemory(inventory, spec);
  EXPECT_EQ(spec.optimizer.offload.device_bytes, UsableBytes(inventory.gpu_bytes));
  const MemoryFit fit = CheckMemory(planner, spec, inventory);
  EXPECT_TRUE(fit.status.ok()) << fit.status;
  const auto fraction_at = [&](int64_t ranks) {
    return (*planner.Plan(spec, ranks, true))->plan.options.offload_fraction;
  };
  EXPECT_GT(fraction_at(2), 0);
  EXPECT_LT(fraction_at(2), 0.5);
  EXPECT_GT(fraction_at(1), fraction_at(2));
  // Another coordinator, from what the first has stored, plans the same.
  PlannerDriver later;
  const absl::StatusOr<plan::JobSpec> stored = later.DecodeSpec(planner.EncodeSpec(spec));
  ASSERT_TRUE(stored.ok()) << stored.status();
  EXPECT_EQ((*later.Plan(*stored, 2, true))->digest, (*planner.Plan(spec, 2, true))->digest);

  plan::JobSpec on_disk = Spec("cpu", ", offload: {fraction: auto, path: /disk}");
  SetOffloadMemory({.cpu_bytes = 1000, .cpu_count = 2}, on_disk);
  EXPECT_EQ(on_disk.optimizer.offload.device_bytes, UsableBytes(500));
  plan::JobSpec chosen = Spec("gpu", ", offload: {fraction: 0.5}");
  SetOffloadMemory(inventory, chosen);
  EXPECT_EQ(chosen.optimizer.offload.device_bytes, 0);
}

}  // namespace
}  // namespace ravel::coordinator
