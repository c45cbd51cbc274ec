#pragma once

// Counts the calls of the public API, and how long their answers took.

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <absl/base/thread_annotations.h>

#include "common/latency_histogram.h"
#include "common/mutex.h"

namespace ravel::coordinator {

struct RpcLook {
  std::string method;
  std::map<std::string, int64_t> by_code;
  LatencyHistogram::Look seconds;  // of calls with one answer; streams are only counted
};

// Thread-safe.
class RpcMeter {
 public:
  static constexpr size_t kMostMethods = 64;
  // `seconds` below 0: it has no time of its own. Of methods beyond kMostMethods nothing is kept.
  void Record(const std::string& method, const std::string& code, double seconds);
  std::vector<RpcLook> Get() const;

 private:
  struct Method {
    std::map<std::string, int64_t> by_code;
    LatencyHistogram seconds;
  };
  mutable Mutex mutex_;
  std::map<std::string, std::unique_ptr<Method>> methods_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ravel::coordinator
