#include "coordinator/api/job_retry_proto.h"

#include <algorithm>
#include <utility>

#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>

namespace ravel {
namespace {

// The sizes that stay, and the rest of what follows from the number of ranks that share a layer.
std::vector<JobViolation> SetTensor(int64_t tensor, v1::JobSpec& spec) {
  v1::ParallelismSpec& parallelism = *spec.mutable_parallelism();
  if (tensor < 1 || tensor > plan::kMostTensorParts) {
    return {{.path = "tensor",
             .expected = absl::StrCat("a power of two up to ", plan::kMostTensorParts),
             .got = absl::StrCat(tensor)}};
  }
  parallelism.set_tensor(tensor);
  if (tensor == 1) {
    parallelism.set_sequence_parallel(false);
    parallelism.set_tensor_chunks(1);
  }
  // Each chunk has tokens of every rank.
  int64_t sequences = 1;
  if (!absl::SimpleAtoi(spec.training().micro_batch(), &sequences)) {
    sequences = 1;  // of any number, then
  }
  const int64_t tokens = sequences * spec.data().sequence_length();
  while (parallelism.tensor_chunks() > 1 && tokens % (tensor * parallelism.tensor_chunks()) != 0) {
    parallelism.set_tensor_chunks(parallelism.tensor_chunks() / 2);
  }
  const int64_t group = std::max<int64_t>(1, parallelism.replicas()) * tensor;
  auto& sizes = *spec.mutable_elastic()->mutable_sizes();
  const std::string before = absl::StrJoin(sizes, ", ");
  sizes.erase(
      std::remove_if(sizes.begin(), sizes.end(), [&](int64_t size) { return size % group != 0; }),
      sizes.end());
  if (sizes.empty()) {
    return {
        {.path = "tensor",
         .expected = absl::StrCat(
             "whole groups of ", group, " ranks in one of the job's device counts (", before, ")"),
         .got = absl::StrCat(tensor)}};
  }
  if (std::find(sizes.begin(), sizes.end(), spec.devices().count()) == sizes.end()) {
    spec.mutable_devices()->set_count(*std::max_element(sizes.begin(), sizes.end()));
  }
  return {};
}

}  // namespace

RetriedJob ApplyRetry(const v1::RetryJobRequest& request, v1::TrainingJob job) {
  RetriedJob retried;
  if (request.allow_numerics_change()) {
    job.mutable_spec()->mutable_checkpoint()->set_allow_numerics_change(true);
  }
  if (request.tensor() != 0) {
    retried.violations = SetTensor(request.tensor(), *job.mutable_spec());
  }
  if (retried.violations.empty()) {
    CanonicalJob canonical = Canonicalize(job, {});
    retried.spec = std::move(canonical.spec);
    retried.violations = std::move(canonical.violations);
    job = std::move(canonical.job);
  }
  retried.job = std::move(job);
  return retried;
}

}  // namespace ravel
