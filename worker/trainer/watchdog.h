#pragma once

// The threads beside the step thread: one receives commands and acts on them even when the step
// thread is stuck, one tells at an even beat where the trainer is, and aborts a communicator that
// has failed on its device.

#include <chrono>
#include <cstdint>
#include <functional>
#include <thread>

#include "common/mutex.h"
#include "common/status.h"
#include "worker/comm/communicator.h"
#include "worker/trainer/command_box.h"
#include "worker/trainer/position.h"
#include "worker/trainer/supervision.h"

namespace ravel::trainer {

inline constexpr std::chrono::milliseconds kBeatInterval{200};

// Thread-safe after Start.
class Watchdog {
 public:
  // All outlive the watchdog.
  struct Options {
    Reporter& reporter;
    CommandBox& box;
    Position& position;
    int64_t epoch = 0;  // commands of another are stale: ignored
    // The next command; blocks. An error ends the process: nobody is in charge of it any more.
    std::function<absl::StatusOr<Command>()> receive;
    // Makes a blocked `receive` return.
    std::function<void()> interrupt;
    // Ends the process at once; in tests it returns.
    std::function<void(ExitCode)> exit;
    std::chrono::milliseconds beat_interval = kBeatInterval;
  };
  explicit Watchdog(Options options);
  // Stops and joins both threads.
  ~Watchdog();

  void Start();
  // Sets the communicator that a stop aborts; nullptr before it exists and before it is destroyed.
  void SetCommunicator(comm::Communicator* communicator);
  // Tells where the trainer is, now.
  void Beat();

 private:
  void ReceiveLoop();
  void BeatLoop();
  // False when there is nothing more to receive.
  bool Handle(const Command& command);
  void ReportLedger(const AskForLedger& ask);
  void End(ExitCode code, const std::string& reason);

  const Options options_;
  Mutex mutex_;
  CondVar changed_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  comm::Communicator* communicator_ ABSL_GUARDED_BY(mutex_) = nullptr;
  std::thread receiver_;
  std::thread beater_;
};

}  // namespace ravel::trainer
