#pragma once

// Who watches what. Items are delivered on the strand, in order; a watcher passes them on and does
// not block.

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <variant>

#include "coordinator/job_record.h"
#include "coordinator/job_run.h"

namespace ravel::coordinator {

// Nothing more will come of this job.
struct FeedEnd {};
using FeedItem = std::variant<JobView, JobEventRecord, OperationRecord, FeedEnd>;
using FeedSink = std::function<void(const FeedItem&)>;
using WatchId = uint64_t;

// Used only from the controller's strand.
class Feed {
 public:
  WatchId Subscribe(std::string job_uid, FeedSink sink) {
    watchers_.emplace(++last_id_, Watcher{std::move(job_uid), std::move(sink)});
    return last_id_;
  }
  void Unsubscribe(WatchId id) { watchers_.erase(id); }
  void Publish(const std::string& job_uid, const FeedItem& item) const {
    for (const auto& [id, watcher] : watchers_) {
      if (watcher.job_uid == job_uid) {
        watcher.sink(item);
      }
    }
  }

 private:
  struct Watcher {
    std::string job_uid;
    FeedSink sink;
  };
  std::map<WatchId, Watcher> watchers_;
  WatchId last_id_ = 0;
};

}  // namespace ravel::coordinator
