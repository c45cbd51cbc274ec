#pragma once

// What a rank tells about its steps beyond the metrics: traces, norms of every tensor, and where a
// value that is not finite came from.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/status.h"
#include "common/trace.h"
#include "worker/trainer/rank_engine.h"
#include "worker/trainer/supervision.h"

namespace ravel::trainer {

// Of one rank, used only from its step thread. All ranks decide alike: the calls are collective
// where they have to be.
class StepDiagnostics {
 public:
  // Both outlive it.
  StepDiagnostics(const Assignment& assignment, RankEngine& engine);

  // Around each step (0-based).
  void BeforeStep(int64_t step);
  absl::Status AfterStep(const StepResult& result);

  // Tensors with gradients that are not finite, most first: "a.weight: 12, b.weight: 1"; of a step
  // that was localised, what was wrong first.
  const std::string& skip_reason() const { return skip_reason_; }

  // File of a rank in the trace directory.
  static std::string TraceFile(const Assignment& assignment);

 private:
  bool Traced(int64_t finished_steps) const;
  absl::Status WriteTrace();
  absl::Status WriteNorms(const optim::TensorNorms& norms) const;
  std::string NonFiniteTensors() const;

  const Assignment& assignment_;
  RankEngine& engine_;
  std::unique_ptr<trace::Recorder> recorder_;
  std::vector<trace::Event> events_;  // of all traced steps so far
  std::string skip_reason_;
};

}  // namespace ravel::trainer
