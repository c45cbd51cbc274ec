#include "coordinator/api/job_looks_proto.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>

#include "common/clock.h"
#include "common/mutex.h"
#include "coordinator/api/job_roots_proto.h"
#include "coordinator/jobs/job_controller.h"

namespace ravel::coordinator {
namespace {

constexpr auto kGoneEvery = std::chrono::milliseconds(100);
constexpr int64_t kLeastMs = 1000;  // with less left no second node is asked

int64_t NowMs() {
  return SystemClock::Get().MonotonicMs();
}

// The place where the caller waits for the strand.
struct Call {
  Mutex mutex;
  CondVar changed;
  std::optional<LookAnswer> answer ABSL_GUARDED_BY(mutex);
  bool given_up ABSL_GUARDED_BY(mutex) = false;
};

// Used when no node could look. Data is checked again before every first launch; a plan needs
// config.json now.
absl::StatusOr<CanonicalJob> WithoutFacts(CanonicalJob job, const absl::Status& why) {
  if (!job.ok()) {
    return job;
  }
  if (!job.spec.model_from.empty()) {
    return absl::UnavailableError(
        absl::IsNotFound(why)
            ? absl::StrCat(why.message(),
                           " to look at spec.model.from; submit again when one is ready")
            : absl::StrCat("spec.model.from: ", why.message(), "; submit again"));
  }
  job.warnings.push_back(absl::StrCat("spec.data: ",
                                      why.message(),
                                      absl::IsNotFound(why) ? " to look at its paths" : "",
                                      "; nodes check them when the job is placed",
                                      job.spec.data.tokenizer.empty()
                                          ? ", and a tokenizer beside the data is not looked for"
                                          : ""));
  return job;
}

}  // namespace

absl::StatusOr<CanonicalJob> JobLooks::Look(const v1::TrainingJob& job,
                                            const std::function<bool()>& gone) {
  CanonicalJob bare = Canonicalize(job, {});
  if (roots_ != nullptr) {  // before any node is asked: nothing tells what lies outside
    const std::vector<JobViolation> outside = RootViolations(*roots_->Get(), bare.spec);
    bare.violations.insert(bare.violations.end(), outside.begin(), outside.end());
    if (!outside.empty()) {
      return bare;
    }
  }
  const PathQuery query = PathsOf(bare);
  if (query.empty()) {
    return bare;
  }
  const LookAnswer answer = AskNodes(query, bare.spec.cpu_devices, gone);
  if (absl::IsCancelled(answer.status)) {
    return answer.status;
  }
  if (!answer.status.ok()) {
    return WithoutFacts(std::move(bare), answer.status);
  }
  if (!answer.facts.silent_field.empty()) {
    bare.violations.push_back({answer.facts.silent_field,
                               0,
                               0,
                               "paths that answer",
                               absl::StrCat(answer.facts.silence, " on node ", answer.node_id)});
    return bare;
  }
  return Canonicalize(job, {.facts = &answer.facts});
}

LookAnswer JobLooks::AskNodes(const PathQuery& query,
                              bool cpu_devices,
                              const std::function<bool()>& gone) {
  const int64_t end_ms = NowMs() + limits_.all_ms;
  LookAnswer answer =
      Ask({.query = query, .cpu_devices = cpu_devices, .limit_ms = limits_.node_ms}, gone);
  const bool silent =
      answer.status.ok() ? !answer.facts.silent_field.empty() : absl::IsUnavailable(answer.status);
  const int64_t left_ms = end_ms - NowMs();
  if (!silent || answer.node_id.empty() || left_ms < std::min(kLeastMs, limits_.all_ms / 2)) {
    return answer;
  }
  LookAnswer other = Ask({.query = query,
                          .cpu_devices = cpu_devices,
                          .but_not = {answer.node_id},
                          .limit_ms = std::min(limits_.node_ms, left_ms)},
                         gone);
  return other.status.ok() || absl::IsCancelled(other.status) ? other : answer;
}

LookAnswer JobLooks::Ask(LookWish wish, const std::function<bool()>& gone) {
  const auto call = std::make_shared<Call>();
  wish.done = [call](LookAnswer answer) {
    MutexLock lock(call->mutex);
    call->answer = std::move(answer);
    call->changed.NotifyAll();
  };
  wish.wanted = [call] {
    MutexLock lock(call->mutex);
    return !call->given_up;
  };
  // A strand that is behind answers later than the look's own end.
  const int64_t end_ms = NowMs() + wish.limit_ms + 2 * NodeLooks::GraceMs(wish.limit_ms);
  strand_->PostNamed("LookOnNode", [controller = controller_, wish = std::move(wish)] {
    controller->LookOnNode(wish);
  });
  MutexLock lock(call->mutex);
  while (!call->answer) {
    const bool left = gone();
    if (left || NowMs() >= end_ms) {
      call->given_up = true;
      return {left ? absl::CancelledError("the client is gone")
                   : absl::UnavailableError("no node found the time")};
    }
    call->changed.WaitFor(call->mutex, kGoneEvery);
  }
  return *std::move(call->answer);
}

}  // namespace ravel::coordinator
