#include "worker/shard/step_graphs.h"

#include <utility>

#include <absl/strings/str_cat.h>

#include "common/logging.h"

namespace ravel::shard {
namespace {

// A graph takes memory of the device for each of its nodes.
constexpr size_t kMostGraphs = 64;
constexpr int64_t kMostFailures = 3;
constexpr size_t kMostNotes = 100;

}  // namespace

absl::Status StepGraphs::Run(const plan::StepSlot& slot,
                             const std::function<absl::Status()>& issue) {
  const Key key = {
      .phase = slot.phase, .part = slot.part, .turn = slot.turn, .micro_batch = slot.micro_batch};
  if (!entries_.contains(key) && entries_.size() == kMostGraphs) {
    return issue();
  }
  Entry& entry = entries_[key];
  // What is chosen on first use is chosen then.
  if (entry.off || entry.runs++ == 0) {
    return issue();
  }
  return entry.graph == nullptr ? Record(key, entry, issue) : Follow(key, entry, issue);
}

absl::Status StepGraphs::Record(const Key& key,
                                Entry& entry,
                                const std::function<absl::Status()>& issue) {
  log_.Record();
  streams_.set_log(&log_);
  const absl::Status issued = issue();
  streams_.set_log(nullptr);
  log_.Finish();
  RETURN_IF_ERROR(issued);
  ASSIGN_OR_RETURN(std::string difference, Agree(log_.difference()));
  if (!difference.empty()) {
    Fail(key, entry, difference);
    return absl::OkStatus();
  }
  absl::StatusOr<kernels::CudaGraph> graph = streams_.Capture(log_.calls());
  ASSIGN_OR_RETURN(difference, Agree(graph.ok() ? "" : std::string(graph.status().message())));
  if (!difference.empty()) {
    entry.off = true;
    Fail(key, entry, difference);
    return absl::OkStatus();
  }
  entry.calls = log_.calls();
  entry.graph = std::make_unique<kernels::CudaGraph>(*std::move(graph));
  entry.failures = 0;
  ++captured_;
  return absl::OkStatus();
}

absl::Status StepGraphs::Follow(const Key& key,
                                Entry& entry,
                                const std::function<absl::Status()>& issue) {
  log_.Follow(entry.calls);
  streams_.set_log(&log_);
  const absl::Status issued = issue();
  streams_.set_log(nullptr);
  const bool whole = log_.Finish();
  RETURN_IF_ERROR(issued);
  if (!whole && agree_ != nullptr) {
    return absl::FailedPreconditionError(absl::StrCat("graphs: program of phase ",
                                                      plan::PhaseName(key.phase),
                                                      ", turn ",
                                                      key.turn,
                                                      ", is not the one that all ranks captured: ",
                                                      log_.difference()));
  }
  if (!whole) {
    Fail(key, entry, log_.difference());
    return absl::OkStatus();
  }
  streams_.compute().Launch(*entry.graph);
  entry.failures = 0;
  ++launches_;
  return absl::OkStatus();
}

absl::StatusOr<std::string> StepGraphs::Agree(const std::string& difference) const {
  return agree_ == nullptr ? difference : agree_(difference);
}

void StepGraphs::Fail(const Key& key, Entry& entry, const std::string& why) {
  if (++entry.failures == kMostFailures) {
    entry.off = true;
  }
  if (notes_.size() < kMostNotes) {
    notes_.push_back(absl::StrCat("program of phase ",
                                  plan::PhaseName(key.phase),
                                  ", turn ",
                                  key.turn,
                                  ", is issued call by call",
                                  entry.off ? " from here on: " : " this time: ",
                                  why));
    log::Warning(absl::StrCat("graphs: ", notes_.back()));
  }
}

}  // namespace ravel::shard
