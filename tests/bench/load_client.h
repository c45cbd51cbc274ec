#pragma once

// Users of a coordinator under load: they submit, list and get through the public API, and time it.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "common/mutex.h"
#include "common/status.h"
#include "tests/bench/fake_fleet.h"

namespace ravel::bench {

struct JobShape {
  std::string name;
  int64_t devices = 8;
  std::string tokens_path;
  std::string store;
};

struct JobState {
  int64_t epoch = 0;
  std::string state;
};

// What the coordinator says of itself.
struct ServerState {
  std::string text;            // all of ServerInfo, for the record
  double strand_lag_p99 = -1;  // milliseconds; -1: this coordinator does not tell
};

// One connection. Thread-safe. Every call has a deadline of 20 s.
class JobsConnection {
 public:
  static std::unique_ptr<JobsConnection> Open(const std::string& address);
  virtual ~JobsConnection() = default;
  // The uid.
  virtual absl::StatusOr<std::string> Submit(const JobShape& shape) = 0;
  virtual absl::StatusOr<JobState> Get(const std::string& name) = 0;
  // How many jobs the answer (its first page) holds.
  virtual absl::StatusOr<int64_t> List() = 0;
  virtual absl::StatusOr<ServerState> Server() = 0;
};

double Percentile(Samples samples, double percent);

// Submits `count` jobs named PREFIX0, PREFIX1, ... over some connections at once: as fast as they
// are answered, or at most `rate` a second. Ends early at the deadline. Thread-safe.
class Submitter {
 public:
  struct Options {
    std::string address;
    std::string prefix;
    std::vector<int64_t> devices;  // taken in turn
    std::string tokens_path;
    std::string store;
    int64_t count = 0;
    int connections = 4;
    double rate = 0;  // 0: no limit
    std::chrono::seconds limit{120};
  };
  explicit Submitter(Options options);
  ~Submitter();
  void Stop();
  // Until all is submitted, or the limit.
  void Wait();

  Samples latencies() const;
  int64_t accepted() const;
  int64_t refused() const;
  std::string first_error() const;
  std::map<std::string, std::string> names() const;  // by uid
  double seconds() const;
  // Of each run of `window` accepted jobs.
  std::vector<double> RatesBy(size_t window) const;

 private:
  void Work();
  const Options options_;
  const SteadyClock::time_point started_;
  std::atomic<int64_t> next_{0};
  std::atomic<bool> stopping_{false};
  mutable Mutex mutex_;
  Samples latencies_ ABSL_GUARDED_BY(mutex_);
  std::vector<double> answered_ ABSL_GUARDED_BY(mutex_);  // seconds since the start
  std::map<std::string, std::string> names_ ABSL_GUARDED_BY(mutex_);
  int64_t refused_ ABSL_GUARDED_BY(mutex_) = 0;
  std::string first_error_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::thread> threads_;
};

// Lists all jobs twice a second and gets one ten times a second, until it is destroyed.
class Reader {
 public:
  Reader(std::string address, std::string job);
  ~Reader();
  Samples lists() const;
  Samples gets() const;
  int64_t failed() const;

 private:
  void Work(bool list);
  const std::string address_;
  const std::string job_;
  std::atomic<bool> stopping_{false};
  mutable Mutex mutex_;
  Samples lists_ ABSL_GUARDED_BY(mutex_);
  Samples gets_ ABSL_GUARDED_BY(mutex_);
  int64_t failed_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<std::thread> threads_;
};

}  // namespace ravel::bench
