// Fault points for tests and drills. With RAVEL_FAULTS unset a point costs one atomic load;
// otherwise the entries of its name are counted under a mutex and acted on outside of it, so that a
// stalled point does not block others. A setting that cannot be read ends the process: a drill that
// silently does nothing would pass.

#include "common/fault_point.h"

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_split.h>
#include <unistd.h>

#include "common/logging.h"
#include "common/mutex.h"
#include "common/time_text.h"

namespace ravel::fault {
namespace {

enum class Action { kKill, kExit, kStall, kStop, kHold, kError };

struct Fault {
  std::string name;
  int64_t occurrence = 1;  // 0: every one
  Action action = Action::kKill;
  int64_t argument = 0;  // exit code, or milliseconds
  std::string text;      // of an error; of a hold its path
  int64_t seen = 0;
};

constexpr std::chrono::milliseconds kHoldLook{2};

struct Faults {
  Mutex mutex;
  std::vector<Fault> list ABSL_GUARDED_BY(mutex);
};

Faults& GetFaults() {
  static Faults* const faults = new Faults;
  return *faults;
}

std::atomic<bool> any_fault = false;

absl::Status ParseAction(const std::string& text, Fault& fault) {
  const std::pair<std::string, std::string> parts = absl::StrSplit(text, absl::MaxSplits('=', 1));
  const auto& [verb, argument] = parts;
  if (verb == "kill") {
    fault.action = Action::kKill;
  } else if (verb == "stop") {
    fault.action = Action::kStop;
  } else if (verb == "exit") {
    fault.action = Action::kExit;
    if (!absl::SimpleAtoi(argument, &fault.argument)) {
      return absl::InvalidArgumentError("exit= needs a number");
    }
  } else if (verb == "stall") {
    fault.action = Action::kStall;
    ASSIGN_OR_RETURN(fault.argument, ParseDurationMs(argument));
  } else if (verb == "hold") {
    fault.action = Action::kHold;
    fault.text = argument;
    if (argument.empty()) {
      return absl::InvalidArgumentError("hold= needs a path");
    }
  } else if (verb == "error") {
    fault.action = Action::kError;
    fault.text = argument.empty() ? "injected fault" : argument;
  } else {
    return absl::InvalidArgumentError("expected kill, stop, exit=, stall=, hold= or error=");
  }
  return absl::OkStatus();
}

absl::StatusOr<Fault> ParseFault(const std::string& entry) {
  const std::pair<std::string, std::string> parts = absl::StrSplit(entry, absl::MaxSplits(':', 1));
  const std::pair<std::string, std::string> place =
      absl::StrSplit(parts.first, absl::MaxSplits('@', 1));
  Fault fault;
  fault.name = place.first;
  if (place.second == "*") {
    fault.occurrence = 0;
  } else if (!place.second.empty() &&
             (!absl::SimpleAtoi(place.second, &fault.occurrence) || fault.occurrence < 1)) {
    return absl::InvalidArgumentError("after @ expected a number from 1, or *");
  }
  RETURN_IF_ERROR(ParseAction(parts.second, fault));
  return fault;
}

bool ReadEnvironment() {
  const char* const text = std::getenv("RAVEL_FAULTS");
  if (text == nullptr || *text == '\0') {
    return false;
  }
  const absl::Status status = Configure(text);
  if (!status.ok()) {
    log::Error(absl::StrCat("RAVEL_FAULTS: ", status.message()));
    std::exit(2);
  }
  return true;
}

void Hold(const Fault& fault) {
  const std::string path = absl::StrCat(fault.text, ".", fault.seen);
  if (access(path.c_str(), F_OK) != 0) {
    return;
  }
  log::Warning(absl::StrCat("fault point ", fault.name, " waits for the end of ", path));
  while (access(path.c_str(), F_OK) == 0) {
    std::this_thread::sleep_for(kHoldLook);
  }
}

absl::Status Perform(const Fault& fault) {
  if (fault.action == Action::kHold) {
    Hold(fault);
    return absl::OkStatus();
  }
  log::Warning(absl::StrCat("fault point ", fault.name, " fires"));
  switch (fault.action) {
    case Action::kKill:
      kill(getpid(), SIGKILL);
      pause();
      break;
    case Action::kStop:
      raise(SIGSTOP);  // this thread stops here, the others with it
      break;
    case Action::kExit:
      _exit(static_cast<int>(fault.argument));
    case Action::kStall:
      std::this_thread::sleep_for(std::chrono::milliseconds(fault.argument));
      break;
    case Action::kHold:
      break;
    case Action::kError: {
      const std::string message = absl::StrCat(fault.name, ": ", fault.text);
      return fault.text == "disk full" ? absl::ResourceExhaustedError(message)
                                       : absl::InternalError(message);
    }
  }
  return absl::OkStatus();
}

}  // namespace

bool Enabled() {
  static const bool from_environment = ReadEnvironment();
  return from_environment || any_fault.load(std::memory_order_relaxed);
}

absl::Status Hit(std::string_view name) {
  Faults& faults = GetFaults();
  std::vector<Fault> due;
  {
    MutexLock lock(faults.mutex);
    for (Fault& fault : faults.list) {
      if (fault.name == name) {
        ++fault.seen;
        if (fault.occurrence == 0 || fault.occurrence == fault.seen) {
          due.push_back(fault);
        }
      }
    }
  }
  for (const Fault& fault : due) {
    RETURN_IF_ERROR(Perform(fault));
  }
  return absl::OkStatus();
}

absl::Status Configure(std::string_view text) {
  std::vector<Fault> list;
  for (const absl::string_view entry :
       absl::StrSplit(absl::string_view(text.data(), text.size()), ',', absl::SkipEmpty())) {
    absl::StatusOr<Fault> fault = ParseFault(std::string(entry));
    if (!fault.ok()) {
      return Annotate(fault.status(), std::string(entry));
    }
    list.push_back(*std::move(fault));
  }
  Faults& faults = GetFaults();
  MutexLock lock(faults.mutex);
  any_fault = !list.empty();
  faults.list = std::move(list);
  return absl::OkStatus();
}

}  // namespace ravel::fault
