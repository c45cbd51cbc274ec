// Follows a job across restarts of the coordinator. A watch that ends without a verdict is opened
// again for up to a minute since the last word; the job itself goes on meanwhile. Events are shown
// by a second thread with a stream of its own, resumed by sequence number, so none is shown twice.
// Ctrl-C detaches and leaves the job alone.

#include "coordinator/ctl/follow.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>

#include "common/clock.h"
#include "coordinator/ctl/exit_code.h"
#include "coordinator/ctl/interrupt.h"
#include "coordinator/ctl/output.h"
#include "coordinator/ctl/progress.h"

namespace ravel::ctl {
namespace {

constexpr int64_t kPatienceMs = 60 * 1000;
constexpr auto kRetryPause = std::chrono::milliseconds(500);
constexpr int64_t kLastEventsMs = 1000;

// Shows the job's events, from those of the last moments before `start`, until its client's streams
// are cancelled.
void ShowEvents(JobsClient& client, const JobName& job, ProgressView& view) {
  int64_t last_seq = 0;
  while (true) {
    const absl::Status status =
        client.Events(job, {last_seq, true, 0}, [&](const EventView& event) {
          last_seq = std::max(last_seq, event.seq);
          view.ShowEvent(event);
          return true;
        });
    if (!absl::IsUnavailable(status) || Interrupt::Get().requested()) {
      return;
    }
    std::this_thread::sleep_for(kRetryPause);
  }
}

}  // namespace

absl::StatusOr<JobView> WatchUntil(JobsClient& client,
                                   const JobName& job,
                                   int64_t timeout_ms,
                                   const std::function<bool(const JobView&)>& enough) {
  const int64_t start_ms = SystemClock::Get().MonotonicMs();
  int64_t heard_ms = start_ms;
  bool said = false;
  JobView last;
  bool done = false;
  while (true) {
    const int64_t now_ms = SystemClock::Get().MonotonicMs();
    const int64_t left_ms = timeout_ms == 0 ? 0 : timeout_ms - (now_ms - start_ms);
    if (timeout_ms > 0 && left_ms <= 0) {
      return absl::DeadlineExceededError("timed out");
    }
    const absl::Status status = client.Watch(job, left_ms, [&](const JobView& view) {
      last = view;
      heard_ms = SystemClock::Get().MonotonicMs();
      said = false;
      done = enough(view) || view.terminal();
      return !done;
    });
    if (done) {
      return last;
    }
    if (Interrupt::Get().requested()) {
      return absl::CancelledError("interrupted");
    }
    const bool lost =
        status.ok() || absl::IsUnavailable(status);  // a server that stops ends its streams
    const bool never_heard = last.name.empty();
    if (!lost || never_heard || SystemClock::Get().MonotonicMs() - heard_ms > kPatienceMs) {
      return status.ok() ? absl::UnavailableError(absl::StrCat(
                               "coordinator ", client.endpoint().address, " ended the watch"))
                         : status;
    }
    if (!said) {
      Say(absl::StrCat("ravelctl: coordinator ",
                       client.endpoint().address,
                       " cannot be reached; trying again for a minute (the job goes on)"));
      said = true;
    }
    std::this_thread::sleep_for(kRetryPause);
  }
}

std::string Outcome(const JobView& job) {
  std::string out = absl::StrCat("job ", job.namespace_name, "/", job.name, " ");
  if (job.state == "SUCCEEDED") {
    absl::StrAppend(
        &out,
        absl::StrFormat(
            "succeeded: %d steps, loss %.4g -> %.4g", job.step, job.first_loss, job.loss));
  } else if (job.state == "CANCELLED") {
    absl::StrAppend(&out, "was cancelled at step ", job.step);
  } else {
    absl::StrAppend(&out, "failed at step ", job.step, ": ", job.reason);
    if (!job.message.empty()) {
      absl::StrAppend(&out, ": ", job.message);
    }
  }
  if (job.committed_step >= 0 && !job.committed_path.empty()) {
    absl::StrAppend(&out, ", checkpoint ", job.committed_path);
  }
  return out;
}

int FollowJob(JobsClient& client, const JobName& job, FollowMode mode) {
  ProgressView view;
  std::thread events;
  absl::StatusOr<std::unique_ptr<JobsClient>> event_client = absl::UnknownError("not connected");
  if (mode == FollowMode::kProgress) {
    event_client = JobsClient::Connect(client.endpoint());
    if (event_client.ok()) {
      events = std::thread([&] { ShowEvents(**event_client, job, view); });
    }
  }
  const absl::StatusOr<JobView> end = WatchUntil(client, job, 0, [&](const JobView& now) {
    if (mode == FollowMode::kProgress) {
      view.ShowJob(now);
    }
    return false;
  });
  if (events.joinable()) {
    if (end.ok()) {
      // The last events (Succeeded, Failed) may still be on their way; the server ends the stream
      // after them.
      std::this_thread::sleep_for(std::chrono::milliseconds(kLastEventsMs) / 4);
    }
    (*event_client)->CancelStreams();
    events.join();
  }
  view.Finish();
  if (Interrupt::Get().requested()) {
    Say(absl::StrCat("detached; the job goes on. Watch it again with: ravelctl wait ",
                     job.name,
                     " --follow; stop it with: ravelctl cancel ",
                     job.name));
    return kExitInterrupted;
  }
  if (!end.ok()) {
    return Report(end.status());
  }
  Say(Outcome(*end));
  return ExitCodeOfJob(end->state, end->failure_class);
}

}  // namespace ravel::ctl
