#pragma once

// Shows a person the progress of a running job: one line that is drawn again and again on a
// terminal, plain lines elsewhere.

#include <string>
#include <vector>

#include "common/mutex.h"
#include "coordinator/ctl/jobs_client.h"

namespace ravel::ctl {

// "7.9k", "850", "1.2M".
std::string ShortNumber(double number);
// "▕██▌       ▏": `part` of 1, ten cells in eighths.
std::string Bar(double part);
// "step 120/2000 ▕▌         ▏ 6% 7.9k tok/s loss 2.31 ETA 3m | epoch 2, 3 workers".
std::string ProgressLine(const JobView& job);
// "replicate 2 x shard 2 x tensor 2"; empty: not known.
std::string MeshText(const std::vector<MeshAxisView>& mesh);
// [{"axis": "shard", "size": 2}, ...], as in the document of `ravelctl plan`.
json::Value MeshDocument(const std::vector<MeshAxisView>& mesh);
// "12:30:05 WorkerLost node-2: exited with signal 9 (step 57, epoch 3)".
std::string EventLine(const EventView& event);

// Draws on stderr when that is a terminal, else prints a line per event and per tenth of the steps.
// Thread-safe.
class ProgressView {
 public:
  ProgressView();
  explicit ProgressView(bool on_terminal) : on_terminal_(on_terminal) {}
  void ShowJob(const JobView& job);
  void ShowEvent(const EventView& event);
  // Any other line, above the progress line.
  void ShowLine(const std::string& line);
  // Ends the progress line, so that what follows starts on a fresh one.
  void Finish();

 private:
  void Draw() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const bool on_terminal_;
  Mutex mutex_;
  std::string line_ ABSL_GUARDED_BY(mutex_);
  bool drawn_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t last_tenth_ ABSL_GUARDED_BY(mutex_) = -1;
};

// "83.2 % of 512.0 device-seconds; lost: replay 60.1, detect 12.0", the largest first; empty before
// the job held a device.
std::string GoodputText(const json::Value& job);

}  // namespace ravel::ctl
