#pragma once

#include <functional>
#include <memory>

#include "common/status.h"

namespace ravel::ctl {

// Ctrl-C (and SIGTERM) as an event: the first one runs the actions that are registered, a second
// one ends the process with code 130. One instance per process. Thread-safe.
class Interrupt {
 public:
  static Interrupt& Get();
  bool requested() const;
  // 128 and the number of the first signal: 130 after Ctrl-C, 143 after SIGTERM.
  int exit_code() const;

  // Runs `action` on the watcher thread when Ctrl-C comes (at once if it already came), until
  // destroyed.
  class Scope {
   public:
    explicit Scope(std::function<void()> action);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    int id_;
  };

 private:
  Interrupt();
  struct State;
  State* const state_;  // never freed: the watcher thread lives as long as the process
};

// Report, for work that stops between two pieces: an interruption is told with the way to go on,
// and its exit code is that of the signal.
int ReportEnd(const absl::Status& status);

}  // namespace ravel::ctl
