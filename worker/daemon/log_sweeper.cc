// Deletes logs of ended attempts by age, then oldest first by size, on a thread of its own, since
// deleting may take long. Only folders that look like JOB/attempt-N are touched, symbolic links are
// never followed, and attempts that run are left alone. Sizes are counted in allocated blocks, as
// the disk does.

#include "worker/daemon/log_sweeper.h"

#include <algorithm>
#include <chrono>
#include <system_error>
#include <tuple>
#include <vector>

#include <absl/strings/numbers.h>
#include <absl/strings/strip.h>
#include <sys/stat.h>

#include "common/clock.h"

namespace ravel::daemon {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMaxForgotten = 10'000;

struct Attempt {
  int64_t changed_ms = 0;  // of its newest file
  std::string job;
  int64_t number = 0;
  int64_t bytes = 0;
  fs::path path;
  auto Key() const { return std::tie(changed_ms, job, number); }
};

// The attempt in a name such as "attempt-3"; -1 for any other name.
int64_t NumberOf(const std::string& name) {
  absl::string_view digits = name;
  int64_t number = -1;
  return absl::ConsumePrefix(&digits, "attempt-") && absl::SimpleAtoi(digits, &number) ? number
                                                                                       : -1;
}

void Measure(Attempt& attempt) {
  std::error_code error;
  for (fs::directory_iterator at(attempt.path, error); !error && at != fs::directory_iterator();
       at.increment(error)) {
    struct stat facts = {};
    if (lstat(at->path().c_str(), &facts) == 0 && S_ISREG(facts.st_mode)) {
      attempt.bytes += static_cast<int64_t>(facts.st_blocks) * 512;
      attempt.changed_ms = std::max<int64_t>(
          attempt.changed_ms,
          int64_t{facts.st_mtim.tv_sec} * 1000 + facts.st_mtim.tv_nsec / 1'000'000);
    }
  }
  struct stat folder = {};
  if (attempt.changed_ms == 0 && lstat(attempt.path.c_str(), &folder) == 0) {
    attempt.changed_ms = int64_t{folder.st_mtim.tv_sec} * 1000;
  }
}

std::vector<Attempt> ListAttempts(const fs::path& folder) {
  std::vector<Attempt> attempts;
  std::error_code error;
  for (fs::directory_iterator job(folder, error); !error && job != fs::directory_iterator();
       job.increment(error)) {
    std::error_code inner;
    if (!job->is_directory(inner) || job->is_symlink(inner)) {
      continue;
    }
    for (fs::directory_iterator at(job->path(), inner); !inner && at != fs::directory_iterator();
         at.increment(inner)) {
      const int64_t number = NumberOf(at->path().filename());
      std::error_code ignored;
      if (number >= 0 && at->is_directory(ignored) && !at->is_symlink(ignored)) {
        Attempt attempt{0, job->path().filename(), number, 0, at->path()};
        Measure(attempt);
        attempts.push_back(std::move(attempt));
      }
    }
  }
  return attempts;
}

bool Remove(const Attempt& attempt) {
  std::error_code error;
  fs::remove_all(attempt.path, error);
  std::error_code not_empty;
  fs::remove(attempt.path.parent_path(), not_empty);  // only when it was the last one
  return !error;
}

}  // namespace

LogSweep SweepLogs(const fs::path& folder,
                   const LogRules& rules,
                   const AttemptSet& running,
                   int64_t now_ms) {
  LogSweep sweep;
  std::vector<Attempt> attempts = ListAttempts(folder);
  std::sort(attempts.begin(), attempts.end(), [](const Attempt& a, const Attempt& b) {
    return a.Key() < b.Key();
  });
  for (const Attempt& attempt : attempts) {
    sweep.kept_bytes += attempt.bytes;
  }
  for (const Attempt& attempt : attempts) {
    const bool too_old = now_ms - attempt.changed_ms > rules.max_age_ms;
    if (running.contains({attempt.job, attempt.number}) ||
        (!too_old && sweep.kept_bytes <= rules.limit_bytes)) {
      continue;
    }
    if (Remove(attempt)) {
      sweep.kept_bytes -= attempt.bytes;
      sweep.removed_attempts += 1;
    }
  }
  return sweep;
}

void RemoveJobLogs(const fs::path& folder, const std::string& job_uid, const AttemptSet& running) {
  if (job_uid.empty() || job_uid.find('/') != std::string::npos || job_uid[0] == '.') {
    return;  // no name of a folder in it
  }
  for (const Attempt& attempt : ListAttempts(folder)) {
    if (attempt.job == job_uid && !running.contains({attempt.job, attempt.number})) {
      Remove(attempt);
    }
  }
}

LogSweeper::LogSweeper(fs::path folder, LogRules rules)
    : folder_(std::move(folder)), rules_(rules), thread_([this] { Loop(); }) {}

LogSweeper::~LogSweeper() {
  {
    const MutexLock lock(mutex_);
    stopping_ = true;
    changed_.NotifyAll();
  }
  thread_.join();
}

void LogSweeper::Sweep(AttemptSet running) {
  const MutexLock lock(mutex_);
  running_ = std::move(running);
  sweep_ = true;
  changed_.NotifyAll();
}

void LogSweeper::Forget(const std::string& job_uid, AttemptSet running) {
  const MutexLock lock(mutex_);
  if (forgotten_.size() < kMaxForgotten) {  // else their age takes them
    forgotten_.insert(job_uid);
  }
  running_ = std::move(running);
  changed_.NotifyAll();
}

void LogSweeper::Loop() {
  while (true) {
    bool sweep = false;
    std::set<std::string> forgotten;
    AttemptSet running;
    {
      const MutexLock lock(mutex_);
      while (!stopping_ && !sweep_ && forgotten_.empty()) {
        changed_.Wait(mutex_);
      }
      if (stopping_) {
        return;
      }
      sweep = std::exchange(sweep_, false);
      forgotten = std::exchange(forgotten_, {});
      running = running_;
    }
    for (const std::string& job : forgotten) {
      RemoveJobLogs(folder_, job, running);
    }
    if (sweep) {
      SweepLogs(folder_, rules_, running, SystemClock::Get().WallMs());
    }
  }
}

}  // namespace ravel::daemon
