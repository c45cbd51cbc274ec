#include "coordinator/ctl/interrupt.h"

#include <atomic>
#include <csignal>
#include <map>
#include <thread>

#include <absl/strings/str_cat.h>
#include <fcntl.h>
#include <unistd.h>

#include "common/check.h"
#include "common/mutex.h"
#include "coordinator/ctl/exit_code.h"
#include "coordinator/ctl/output.h"

namespace ravel::ctl {

struct Interrupt::State {
  Mutex mutex;
  std::map<int, std::function<void()>> actions ABSL_GUARDED_BY(mutex);
  int next_id ABSL_GUARDED_BY(mutex) = 0;
  std::atomic<bool> requested = false;
  std::thread watcher;
};

namespace {

int signal_pipe[2] = {-1, -1};
std::atomic<int> signals_seen = 0;
std::atomic<int> first_signal = 0;

void OnSignal(int signal) {
  if (signals_seen.fetch_add(1) > 0) {
    _exit(128 + signal);
  }
  first_signal = signal;
  const char byte = 1;
  (void)!write(signal_pipe[1], &byte, 1);
}

}  // namespace

Interrupt& Interrupt::Get() {
  static Interrupt interrupt;
  return interrupt;
}

Interrupt::Interrupt() : state_(new State) {
  CHECK(pipe2(signal_pipe, O_CLOEXEC) == 0);
  State* const state = state_;
  state->watcher = std::thread([state] {
    char byte = 0;
    if (read(signal_pipe[0], &byte, 1) != 1) {
      return;
    }
    // Actions run with the lock held, so that none runs after its Scope is gone; they only cancel
    // calls.
    MutexLock lock(state->mutex);
    state->requested = true;
    for (const auto& [id, action] : state->actions) {
      action();
    }
  });
  struct sigaction action {};
  action.sa_handler = OnSignal;
  sigemptyset(&action.sa_mask);
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
}

bool Interrupt::requested() const {
  return state_->requested;
}

int Interrupt::exit_code() const {
  const int signal = first_signal;
  return signal == 0 ? kExitInterrupted : 128 + signal;
}

int ReportEnd(const absl::Status& status) {
  if (!absl::IsCancelled(status)) {
    return Report(status);
  }
  Say(absl::StrCat("ravelctl: ", std::string(status.message())));
  return Interrupt::Get().exit_code();
}

Interrupt::Scope::Scope(std::function<void()> action) {
  State& state = *Interrupt::Get().state_;
  MutexLock lock(state.mutex);
  if (state.requested) {
    action();
  }
  id_ = state.next_id++;
  state.actions.emplace(id_, std::move(action));
}

Interrupt::Scope::~Scope() {
  State& state = *Interrupt::Get().state_;
  MutexLock lock(state.mutex);
  state.actions.erase(id_);
}

}  // namespace ravel::ctl
