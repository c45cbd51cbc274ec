#pragma once

// A rank's reports about its steps beyond the metrics: traces, norms of every tensor, and the
// origin of a value that is not finite.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/json.h"
#include "common/status.h"
#include "common/trace.h"
#include "worker/trainer/rank_engine.h"
#include "worker/trainer/saver.h"
#include "worker/trainer/supervision.h"

namespace ravel::trainer {

// The reports of one rank. Used only from its step thread. All ranks decide alike: the calls are
// collective where they have to be.
class StepDiagnostics {
 public:
  // Both outlive it.
  StepDiagnostics(const Assignment& assignment, RankEngine& engine);

  // Before the first step and after the last: logs the parameter groups (rank 0, at the start) and
  // the memory of this rank, and keeps the latter with the traces.
  void ReportStart(const Saver& saver);
  void ReportEnd(const Saver& saver);

  // Around each step (0-based).
  void BeforeStep(int64_t step);
  absl::Status AfterStep(const StepResult& result);
  // Collective; after the last step, or before a job stops: what would have travelled with the next
  // step.
  absl::Status Finish();

  // Tensors with gradients that are not finite, most first: "a.weight: 12, b.weight: 1"; of a step
  // that was localised, what was wrong first.
  const std::string& skip_reason() const { return skip_reason_; }

  // File of a rank in the trace directory; `kind`: "trace" or "memory".
  static std::string FileOf(const Assignment& assignment, const char* kind);

 private:
  void ReportMemory(const char* when, const Saver& saver);
  void UseRecorder(trace::Recorder* recorder);
  bool Traced(int64_t finished_steps) const;
  absl::Status WriteTrace();
  // Those that are known by now, on rank 0. What cannot be written costs a line in the log.
  void WriteKnownNorms();
  absl::Status WriteNorms(const optim::TensorNorms& norms) const;
  std::string NonFiniteTensors() const;

  const Assignment& assignment_;
  RankEngine& engine_;
  std::unique_ptr<trace::Recorder> recorder_;
  std::vector<trace::Event> events_;  // of all traced steps so far
  std::string skip_reason_;
  int64_t norms_written_ = 0;  // step
  json::Value memory_;         // reports so far
};

}  // namespace ravel::trainer
