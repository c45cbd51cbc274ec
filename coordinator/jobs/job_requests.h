#pragma once

// Requests of people to the controller, and their answers.

#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>

#include "common/status.h"
#include "coordinator/fleet/membership.h"
#include "coordinator/jobs/job_run.h"
#include "coordinator/store/job_record.h"

namespace ravel::coordinator {

// Called on the strand, once: inside the call when nothing has to be written, else when it is
// durable or refused.
template <typename Value>
using Answer = std::function<void(absl::StatusOr<Value>)>;
using StatusAnswer = std::function<void(absl::Status)>;

struct NodeView {
  NodeRecord record;
  // READY, SUSPECT, LOST (vanished), LEFT (ended in order), DRAINING (jobs are still on it),
  // DRAINED, QUARANTINED.
  std::string state;
  std::string message;
  int64_t penalties = 0;  // attempts of all jobs that failed there in the last 10 minutes
  int64_t devices = 0;
  int64_t devices_free = 0;
};

struct SubmitDraft {
  std::string request_id;
  std::string hash;
  JobRecord record;  // names, canonical, planned, spec
  // Nodes that would refuse its launch: they are used only where no others can run it.
  std::set<std::string> unfit = {};
};

// A request about a job. Two of one id must be equal in verb and detail.
struct RequestText {
  std::string id;
  std::string verb;
  std::string detail = {};
};

struct RetryDraft {
  std::string request_id;
  // Changes of the job's spec; a job that is tried again as it is has none.
  bool allow_numerics_change = false;
  struct Sharing {  // of layers, and the device counts that go with it
    int64_t tensor = 1;
    bool sequence_parallel = false;
    int64_t tensor_chunks = 1;
    int64_t device_count = 1;
    std::vector<int64_t> sizes;
  };
  std::optional<Sharing> sharing = {};
  std::string canonical = {};            // JobRecord::canonical with the changes
  std::vector<int64_t> peak_bytes = {};  // JobRecord::peak_bytes with `sharing`
};

// The spec with the draft's changes, which is what a placed job is planned from.
inline plan::JobSpec ChangedBy(const RetryDraft& draft, plan::JobSpec spec) {
  spec.checkpoint.allow_numerics_change |= draft.allow_numerics_change;
  if (draft.sharing) {
    spec.tensor = draft.sharing->tensor;
    spec.sequence_parallel = draft.sharing->sequence_parallel;
    spec.tensor_chunks = draft.sharing->tensor_chunks;
    spec.device_count = draft.sharing->device_count;
    spec.elastic.sizes = draft.sharing->sizes;
  }
  return spec;
}

struct DeleteDraft {
  std::string request_id;
  bool force = false;             // also a job that is not over: it is cancelled first
  bool with_checkpoints = false;  // else they stay where they are
  std::string reason = {};        // of the cancellation
};

struct JobKey {
  std::string namespace_name;
  std::string name;
  auto operator<=>(const JobKey&) const = default;
};

inline absl::Status NoJob(const JobKey& key) {
  return absl::NotFoundError(
      absl::StrCat("no job named ", key.name, " in namespace ", key.namespace_name));
}

// A place in the order of submission.
struct JobCursor {
  int64_t created_ms = -1;
  std::string uid;
  auto operator<=>(const JobCursor&) const = default;
};

// A job to look at until the strand goes on.
struct JobGlimpse {
  const JobRecord& record;
  const JobProgress& progress;
  const std::vector<JobCondition>& conditions;
  double eta_seconds = -1;
  int64_t failed_saves = 0;
  int64_t skipped_saves = 0;
  const Goodput* goodput = nullptr;
};

}  // namespace ravel::coordinator
