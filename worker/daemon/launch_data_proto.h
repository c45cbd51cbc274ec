#pragma once

// The data sets that a launch names by URL: fetched into this node's cache before its trainers
// start, which then read local files.

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "common/status.h"
#include "proto/fleet.pb.h"
#include "worker/daemon/bounded_threads.h"
#include "worker/daemon/data_cache.h"

namespace ravel::daemon {

// One path of a job that is a URL.
struct NamedDataUrl {
  std::string field;               // spec.data.train[0].path
  std::string url;                 // as the job names it
  std::string folder = {};         // URL of the data set
  std::string member = {};         // file or prefix in it; empty: the folder itself
  std::string sample_digest = {};  // of token files; empty: not known
};
// InvalidArgument names the field whose URL is none. A job that cannot be read names none.
absl::StatusOr<std::vector<NamedDataUrl>> DataUrlsOf(const v1::StartTrainer& start);
// The same job with local paths: `folders` has the folder of each data set by its URL.
std::string WithLocalData(const std::string& job,
                          const std::map<std::string, std::string>& folders);

struct LaunchDataResult {
  absl::Status status;  // names field and URL
  // The reason for a status that is not OK (common/failure_reason.h): DataError when the data set
  // is absent or wrong, StoreUnavailable, DataCacheTooSmall, PreflightFailed when it is another
  // fault of this node. Empty: the launch was given up.
  std::string reason = {};
  v1::Launch launch = {};  // with local paths
};

// Used only from the thread of its io_context.
class LaunchData {
 public:
  using Done = std::function<void(const LaunchDataResult&)>;

  // `limit`: for a store or a disk that stands still.
  LaunchData(boost::asio::io_context& context,
             std::shared_ptr<DataCache> cache,
             std::chrono::milliseconds limit);
  // Tells the threads to end, and waits a little for them.
  ~LaunchData();
  LaunchData(const LaunchData&) = delete;
  LaunchData& operator=(const LaunchData&) = delete;

  // Calls `done` once, inside this call when the job names no URL. The data sets stay in the cache
  // until Keep. The same launch again shares the fetch; one of a newer epoch ends the older one.
  void Start(const v1::Launch& launch, Done done);
  // Gives launches of the job up to that epoch up.
  void Stop(const std::string& job_uid, int64_t epoch);
  void StopAll();
  // Data sets of other jobs may go.
  void Keep(const std::set<std::string>& jobs);
  // Bytes that have come for the job's launch; -1: nothing is fetched for it.
  int64_t MovedBytes(const std::string& job_uid) const;

  // Threads that have not ended, hanging ones too.
  int threads() const;

  static constexpr int kMaxThreads = 8;

 private:
  using Leases = std::map<std::string, std::shared_ptr<DataLease>>;  // by URL of the data set
  struct Flight;
  struct Fetched {
    absl::Status status;
    std::string field;  // at fault
    Leases leases;
  };
  struct Running;

  static Fetched FetchAll(DataCache& cache,
                          const std::vector<NamedDataUrl>& urls,
                          const FetchHooks& hooks);
  void Begin(const v1::Launch& launch, const std::vector<NamedDataUrl>& urls, Done done);
  void OnFetched(const std::shared_ptr<Flight>& flight, Fetched fetched);
  void Finish(const std::shared_ptr<Flight>& flight, const LaunchDataResult& result);

  const std::shared_ptr<DataCache> cache_;
  const std::chrono::milliseconds limit_;
  std::map<std::string, std::shared_ptr<Flight>> flights_;  // by job
  std::map<std::string, Leases> leases_;                    // by job
  const std::shared_ptr<Running> running_;                  // shared with the threads
  BoundedThreads threads_;
};

}  // namespace ravel::daemon
