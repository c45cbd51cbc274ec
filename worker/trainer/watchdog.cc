// Two threads beside the step thread. The receiver acts on commands even while the step thread is
// stuck in a collective: a stop aborts the communicator, which releases it, and then ends the
// process. The beater reports the position at an even interval and polls the communicator for
// failures of its device. mutex_ protects the communicator's pointer: it is cleared before the
// communicator is destroyed, so neither thread can use a dead one.

#include "worker/trainer/watchdog.h"

#include <utility>

#include <absl/strings/str_cat.h>
#include <pthread.h>

#include "common/logging.h"
#include "worker/trainer/ledger_report.h"

namespace ravel::trainer {

Watchdog::Watchdog(Options options) : options_(std::move(options)) {}

void Watchdog::Start() {
  receiver_ = std::thread([this] { ReceiveLoop(); });
  beater_ = std::thread([this] { BeatLoop(); });
  pthread_setname_np(receiver_.native_handle(), "watchdog");
  pthread_setname_np(beater_.native_handle(), "watchdog-beat");
}

Watchdog::~Watchdog() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    changed_.NotifyAll();
  }
  options_.interrupt();
  for (std::thread* thread : {&receiver_, &beater_}) {
    if (thread->joinable()) {
      thread->join();
    }
  }
}

void Watchdog::SetCommunicator(comm::Communicator* communicator) {
  MutexLock lock(mutex_);
  communicator_ = communicator;
}

void Watchdog::End(ExitCode code, const std::string& reason) {
  const absl::Status status =
      WithCode(absl::AbortedError(reason.empty() ? "told to stop" : reason), code);
  {
    MutexLock lock(mutex_);
    if (communicator_ != nullptr) {
      communicator_->Abort(std::string(status.message()));
    }
  }
  options_.box.Close(status);
  options_.exit(code);
}

bool Watchdog::Handle(const Command& command) {
  if (const auto* records = std::get_if<RecordsOfGroup>(&command)) {
    if (records->epoch == options_.epoch) {
      options_.box.DeliverRecords(records->group, records->records);
    }
  } else if (const auto* allow = std::get_if<AllowSteps>(&command)) {
    if (allow->epoch == options_.epoch) {
      options_.box.AllowSteps(allow->until_step);
    }
  } else if (const auto* save = std::get_if<AskForSave>(&command)) {
    if (save->epoch == options_.epoch) {
      options_.box.RequestSave(save->sequence, save->then_stop);
    }
  } else if (const auto* commit = std::get_if<Commit>(&command)) {
    options_.box.AnswerSave(commit->step, commit->committed);
    log::Info(absl::StrCat("checkpoint of step ",
                           commit->step,
                           commit->committed ? " committed" : " not committed: ",
                           commit->reason));
  } else if (const auto* ask = std::get_if<AskForLedger>(&command)) {
    if (ask->epoch == options_.epoch) {
      ReportLedger(*ask);
    }
  } else if (const auto* stop = std::get_if<Stop>(&command)) {
    log::Info(absl::StrCat("ending with code ", static_cast<int>(stop->code), ": ", stop->reason));
    End(stop->code, stop->reason);
    return false;
  } else {
    log::Error("a second assignment is ignored");
  }
  return true;
}

void Watchdog::ReceiveLoop() {
  for (;;) {
    const absl::StatusOr<Command> command = options_.receive();
    if (!command.ok()) {
      {
        MutexLock lock(mutex_);
        if (stopping_) {
          return;
        }
      }
      log::Error(absl::StrCat("the daemon is gone: ", command.status().message()));
      End(ExitCode::kCommunicator, std::string(command.status().message()));
      return;
    }
    if (!Handle(*command)) {
      return;
    }
  }
}

void Watchdog::ReportLedger(const AskForLedger& ask) {
  LedgerReport report = {.groups = {}, .epoch = options_.epoch};
  {
    MutexLock lock(mutex_);
    if (communicator_ != nullptr) {
      report.groups = LedgerGroups(*communicator_, ask.most);
    }
  }
  options_.reporter.Ledger(report).IgnoreError();
}

void Watchdog::Beat() {
  ProgressReport report = {.step = options_.position.step(),
                           .phase = PhaseText(options_.position.phase()),
                           .phase_age_ms = options_.position.phase_age_ms(),
                           .collective_sequence = 0,
                           .collective_hash = 0,
                           .moved_bytes = options_.position.moved_bytes()};
  {
    MutexLock lock(mutex_);
    if (communicator_ != nullptr) {
      const comm::Communicator::IssueState issued = communicator_->issued();
      report.collective_sequence = issued.sequence;
      report.collective_hash = issued.hash;
      report.collectives = CollectiveStates(*communicator_);
      // Work of a device that has failed does not end by itself, nor does a wait for it.
      if (const absl::Status failure = communicator_->Failure(); !failure.ok()) {
        communicator_->Abort(std::string(failure.message()));
      }
    }
  }
  // The receiver notices when nobody listens.
  options_.reporter.Progress(report).IgnoreError();
}

void Watchdog::BeatLoop() {
  for (;;) {
    Beat();
    MutexLock lock(mutex_);
    if (!stopping_) {
      changed_.WaitFor(mutex_, options_.beat_interval);
    }
    if (stopping_) {
      return;
    }
  }
}

}  // namespace ravel::trainer
