#include "coordinator/api/job_looks_proto.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <iterator>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>

#include "common/clock.h"
#include "common/mutex.h"
#include "coordinator/api/job_roots_proto.h"
#include "coordinator/jobs/job_controller.h"

namespace ravel::coordinator {
namespace {

constexpr auto kGoneEvery = std::chrono::milliseconds(100);
constexpr int64_t kLeastMs = 1000;      // with less left no second node is asked
constexpr std::size_t kShownNodes = 4;  // of those that refuse a field

int64_t NowMs() {
  return SystemClock::Get().MonotonicMs();
}

// The place where the caller waits for the strand.
struct Call {
  Mutex mutex;
  CondVar changed;
  std::vector<LookAnswer> answers ABSL_GUARDED_BY(mutex);
  bool given_up ABSL_GUARDED_BY(mutex) = false;

  bool Complete() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    return !answers.empty() && std::ssize(answers) >= answers.front().answers;
  }
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

// Refusals of one field, as texts that begin with their node.
std::string Listed(const std::set<std::string>& refusals) {
  const std::size_t shown = std::min(refusals.size(), kShownNodes);
  const std::vector<std::string> first(
      refusals.begin(), std::next(refusals.begin(), static_cast<std::ptrdiff_t>(shown)));
  return absl::StrCat(absl::StrJoin(first, "; "),
                      shown == refusals.size()
                          ? ""
                          : absl::StrCat("; and ", refusals.size() - shown, " nodes more"));
}

// The answers of all nodes about a job's needs.
struct NeedsSurvey {
  bool served = false;   // by some node
  bool complete = true;  // all nodes have answered
  // By field. Sorted, as nodes answer in any order and the same job shall get the same text.
  std::map<std::string, std::set<std::string>> refusals;
  std::set<std::string> refusing;

  void Add(const LookAnswer& answer) {
    if (!answer.status.ok() || !answer.facts.silent_field.empty() || answer.unasked > 0) {
      complete = false;
    }
    if (!answer.status.ok() || !answer.facts.silent_field.empty()) {
      return;
    }
    if (answer.facts.refused_field.empty()) {
      served = true;
      return;
    }
    refusing.insert(answer.node_id);
    refusals["spec." + answer.facts.refused_field].insert(
        absl::StrCat("node ", answer.node_id, ": ", answer.facts.refusal));
  }
};

}  // namespace

absl::StatusOr<LookedJob> JobLooks::Look(const v1::TrainingJob& job, const Gone& gone) {
  const int64_t end_ms = NowMs() + limits_.all_ms;
  CanonicalJob bare = Canonicalize(job, {});
  if (roots_ != nullptr) {  // before any node is asked: nothing tells what lies outside
    const std::vector<JobViolation> outside = RootViolations(*roots_->Get(), bare.spec);
    bare.violations.insert(bare.violations.end(), outside.begin(), outside.end());
    if (!outside.empty()) {
      return LookedJob{std::move(bare)};
    }
  }
  ASSIGN_OR_RETURN(NeedsFindings needs, AskForNeeds(bare, gone));
  LookWish wish{.query = PathsOf(bare),
                .cpu_devices = bare.spec.cpu_devices,
                .but_not = needs.refusing,
                .limit_ms = limits_.node_ms};
  LookedJob looked;
  looked.refusing = std::move(needs.refusing);
  ASSIGN_OR_RETURN(looked.job, LookAtPaths(job, std::move(bare), std::move(wish), {end_ms, gone}));
  std::vector<JobViolation>& violations = looked.job.violations;
  violations.insert(violations.end(), needs.violations.begin(), needs.violations.end());
  std::vector<std::string>& warnings = looked.job.warnings;
  warnings.insert(warnings.end(), needs.warnings.begin(), needs.warnings.end());
  return looked;
}

absl::StatusOr<JobLooks::NeedsFindings> JobLooks::AskForNeeds(const CanonicalJob& job,
                                                              const Gone& gone) {
  NeedsFindings findings;
  const JobNeeds needs = NeedsOf(job);
  if (needs.empty() || !job.ok()) {  // else nodes would refuse what is refused already
    return findings;
  }
  NeedsSurvey survey;
  for (const LookAnswer& answer : AskAll({.query = {.needs = needs},
                                  .cpu_devices = job.spec.cpu_devices,
                                  .each = true,
                                  .limit_ms = limits_.needs_ms},
                                         gone)) {
    if (absl::IsCancelled(answer.status)) {
      return answer.status;
    }
    survey.Add(answer);
  }
  if (!survey.served && survey.complete) {
    for (const auto& [field, refusals] : survey.refusals) {
      findings.violations.push_back({field, 0, 0, "", Listed(refusals)});
    }
    return findings;
  }
  for (const auto& [field, refusals] : survey.refusals) {
    findings.warnings.push_back(
        absl::StrCat(field, ": ", Listed(refusals), "; the job is placed on other nodes"));
  }
  if (!survey.served) {
    findings.warnings.emplace_back(
        "spec: no node has said that it serves the variables, secrets, network and store that the "
        "job asks for; nodes check them when it is placed");
  }
  findings.refusing = std::move(survey.refusing);
  return findings;
}

absl::StatusOr<CanonicalJob> JobLooks::LookAtPaths(const v1::TrainingJob& job,
                                                   CanonicalJob bare,
                                                   LookWish wish,
                                                   const Asker& asker) {
  if (wish.query.empty()) {
    return bare;
  }
  const LookAnswer answer = AskNodes(std::move(wish), asker);
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

LookAnswer JobLooks::AskNodes(LookWish wish, const Asker& asker) {
  LookAnswer answer = Ask(wish, asker.gone);
  const bool silent =
      answer.status.ok() ? !answer.facts.silent_field.empty() : absl::IsUnavailable(answer.status);
  const int64_t left_ms = asker.end_ms - NowMs();
  if (!silent || answer.node_id.empty() || left_ms < std::min(kLeastMs, limits_.all_ms / 2)) {
    return answer;
  }
  wish.but_not.insert(answer.node_id);
  wish.limit_ms = std::min(limits_.node_ms, left_ms);
  LookAnswer other = Ask(std::move(wish), asker.gone);
  return other.status.ok() || absl::IsCancelled(other.status) ? other : answer;
}

LookAnswer JobLooks::Ask(LookWish wish, const Gone& gone) {
  return AskAll(std::move(wish), gone).front();
}

std::vector<LookAnswer> JobLooks::AskAll(LookWish wish, const Gone& gone) {
  const auto call = std::make_shared<Call>();
  wish.done = [call](LookAnswer answer) {
    MutexLock lock(call->mutex);
    call->answers.push_back(std::move(answer));
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
  while (!call->Complete()) {
    const bool left = gone();
    if (left || NowMs() >= end_ms) {
      call->given_up = true;
      call->answers.push_back({left ? absl::CancelledError("the client is gone")
                                    : absl::UnavailableError("no node found the time")});
      break;
    }
    call->changed.WaitFor(call->mutex, kGoneEvery);
  }
  return call->answers;
}

}  // namespace ravel::coordinator
