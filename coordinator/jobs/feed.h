#pragma once

// Subscriptions of watchers to jobs. Items are delivered on the strand, in order; a watcher passes
// them on and does not block.

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>
#include <variant>

#include "coordinator/jobs/job_run.h"
#include "coordinator/store/job_record.h"

namespace ravel::coordinator {

// Nothing more will come of this job.
struct FeedEnd {};
using FeedItem = std::variant<JobView, JobEventRecord, OperationRecord, FeedEnd>;
using FeedSink = std::function<void(const FeedItem&)>;
using WatchId = uint64_t;

// Used only from the controller's strand.
class Feed {
 public:
  WatchId Subscribe(const std::string& job_uid, FeedSink sink) {
    watchers_[job_uid].emplace(++last_id_, std::move(sink));
    jobs_[last_id_] = job_uid;
    return last_id_;
  }
  void Unsubscribe(WatchId id) {
    const auto job = jobs_.find(id);
    if (job == jobs_.end()) {
      return;
    }
    const auto watchers = watchers_.find(job->second);
    watchers->second.erase(id);
    if (watchers->second.empty()) {
      watchers_.erase(watchers);
    }
    jobs_.erase(job);
  }
  // Items that no one watches need not be made.
  bool IsWatched(const std::string& job_uid) const { return watchers_.contains(job_uid); }
  void Publish(const std::string& job_uid, const FeedItem& item) const {
    const auto watchers = watchers_.find(job_uid);
    if (watchers != watchers_.end()) {
      for (const auto& [id, sink] : watchers->second) {
        sink(item);
      }
    }
  }

 private:
  std::unordered_map<std::string, std::map<WatchId, FeedSink>> watchers_;  // by job
  std::unordered_map<WatchId, std::string> jobs_;
  WatchId last_id_ = 0;
};

}  // namespace ravel::coordinator
