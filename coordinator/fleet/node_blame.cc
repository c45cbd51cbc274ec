#include "coordinator/fleet/node_blame.h"

#include <algorithm>

#include "common/failure_reason.h"

namespace ravel::coordinator {
namespace {

constexpr int64_t kFirstAvoidMs = 10 * 1000;
constexpr int64_t kWindowMs = 10 * 60 * 1000;
constexpr int64_t kQuarantineAfter = 3;
constexpr size_t kMostFailures = 64;  // of one node that are remembered

}  // namespace

bool BlamesMachine(const NodeFailure& failure) {
  return failure.reason == "DeviceError" || failure.reason == "StartFailed" ||
         (failure.reason == "ProcessCrash" && failure.starting);
}

int64_t BlameWeight(const NodeFailure& failure) {
  const FailureReason& reason = FindFailureReason(failure.reason);
  if (failure.node.empty() || reason.answer != FailureAnswer::kAvoidNode) {
    return 0;
  }
  const bool certain = BlamesMachine(failure) || reason.repeats == RepeatRule::kElsewhere ||
                       failure.reason == "PreflightFailed" || failure.reason == "DataCacheTooSmall";
  return certain ? kShunned : 1;
}

int64_t AvoidSet::Add(const NodeFailure& failure, int64_t now_ms) {
  std::erase_if(marks_,
                [now_ms](const auto& mark) { return now_ms > mark.second.until_ms + kWindowMs; });
  const int64_t weight = BlameWeight(failure);
  if (weight == 0) {
    return 0;
  }
  Mark& mark = marks_[{failure.node, failure.device}];
  const int64_t avoid_ms =
      std::min(kWindowMs, kFirstAvoidMs << std::min<int64_t>(mark.failures, 10));
  mark.failures += 1;
  mark.weight += weight;
  mark.until_ms = now_ms + avoid_ms;
  return avoid_ms;
}

int64_t AvoidSet::Weight(const std::string& node, int64_t device, int64_t now_ms) const {
  int64_t weight = 0;
  for (const int64_t place : std::set<int64_t>{-1, device}) {
    const auto mark = marks_.find({node, place});
    if (mark != marks_.end() && now_ms < mark->second.until_ms) {
      weight += mark->second.weight;
    }
  }
  return weight;
}

std::set<std::string> AvoidSet::Nodes(int64_t weight, int64_t now_ms) const {
  std::set<std::string> nodes;
  for (const auto& [place, mark] : marks_) {
    if (now_ms < mark.until_ms && Weight(place.first, place.second, now_ms) >= weight) {
      nodes.insert(place.first);
    }
  }
  return nodes;
}

std::set<std::string> NodePenalties::Nodes(int64_t now_ms) const {
  std::set<std::string> nodes;
  for (const auto& [node, failures] : failures_) {
    if (Count(node, now_ms) > 0) {
      nodes.insert(node);
    }
  }
  return nodes;
}

bool NodePenalties::Add(const NodeFailure& failure, int64_t now_ms) {
  if (BlameWeight(failure) == 0) {
    return false;
  }
  std::vector<Failure>& failures = failures_[failure.node];
  std::erase_if(failures,
                [now_ms](const Failure& old) { return old.time_ms <= now_ms - kWindowMs; });
  const bool known = std::any_of(failures.begin(), failures.end(), [&](const Failure& old) {
    return old.job_uid == failure.job_uid && old.attempt == failure.attempt;
  });
  if (!known && failures.size() < kMostFailures) {
    failures.push_back({failure.job_uid, failure.attempt, now_ms, BlamesMachine(failure)});
  }
  return BlamesMachine(failure) &&
         std::count_if(failures.begin(), failures.end(), [](const Failure& f) {
           return f.machine;
         }) >= kQuarantineAfter;
}

int64_t NodePenalties::Count(const std::string& node, int64_t now_ms) const {
  const auto failures = failures_.find(node);
  return failures == failures_.end()
             ? 0
             : std::count_if(failures->second.begin(),
                             failures->second.end(),
                             [now_ms](const Failure& f) { return f.time_ms > now_ms - kWindowMs; });
}

bool MayQuarantine(int64_t nodes, int64_t held) {
  return held < std::max<int64_t>(1, nodes / 3) && held + 1 < nodes;
}

}  // namespace ravel::coordinator
