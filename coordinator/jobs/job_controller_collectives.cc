// JobController: what the ranks of an epoch say about their collectives.

#include <utility>

#include <absl/strings/str_cat.h>

#include "common/logging.h"
#include "coordinator/jobs/job_controller.h"

namespace ravel::coordinator {

void JobController::CheckCollectives(Entry& entry) {
  JobRun& run = entry.run;
  const JobRecord& record = entry.record;
  CollectiveWatch::Outcome outcome =
      run.collectives.Judge(parts_.clock->MonotonicMs(),
                            {.detection_ms = DetectionOf(entry),
                             .step_seconds = run.step_times.P99(),
                             .stall_factor = record.spec.stall_factor});
  for (const int64_t rank : outcome.ask) {
    const TrainerSlot& slot = run.slots[static_cast<size_t>(rank)];
    if (!slot.exited) {
      SendToNode(slot.place.node_id,
                 TrainerCommand{record.uid, run.epoch, rank, AskForLedger{CollectiveWatch::kMost}});
    }
  }
  if (!outcome.report) {
    return;
  }
  const CollectiveReport& report = *outcome.report;
  const TrainerSlot& slot = run.slots[static_cast<size_t>(report.rank)];
  JobEventRecord event;
  event.time_ms = parts_.clock->WallMs();
  event.job_uid = record.uid;
  event.epoch = run.epoch;
  event.attempt = record.attempt;
  event.step = entry.progress.step;
  event.type = "Collectives";
  event.reason = report.reason;
  event.message = report.message;
  event.node = slot.place.node_id;
  event.rank = report.rank;
  Record(std::move(event));
  log::Warning(absl::StrCat("job ", record.name, ": ", report.reason, ": ", report.message));
  if (report.fatal) {
    run.Blame({report.reason, report.message, slot.place.node_id, report.rank, slot.step});
  }
}

}  // namespace ravel::coordinator
