#pragma once

// This node's copies of data sets that jobs name by URL: fetched once, shared by all jobs, and
// removed when room is needed. Folders below the cache's own: `sets` has whole and verified data
// sets, `partial` those on their way, `trash` those on their way out. Names are made of the URL and
// of the manifest, so another content of the same URL is another entry.

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>

#include "common/mutex.h"
#include "common/status.h"
#include "common/store/data_set_look.h"
#include "worker/daemon/data_fetch.h"

namespace ravel::daemon {

struct DataCacheOptions {
  std::string folder;  // absolute; made when missing
  int64_t limit_bytes = 0;
  // Stays free on the file system: logs lie there, too.
  int64_t keep_free_bytes = int64_t{1} << 30;
  store::OpenFunction open;
};

// TokenSampleDigest of the token files of a set, by their prefix, where they are known.
using DataSamples = std::map<std::string, std::string>;

// A URL's files are kept while there is one. Thread-safe.
class DataLease {
 public:
  virtual ~DataLease() = default;
  virtual const std::string& folder() const = 0;
};

// Thread-safe.
class DataCache : public std::enable_shared_from_this<DataCache> {
 public:
  // Takes what an earlier process has left: whole sets are used, parts go on. FailedPrecondition
  // when another process has the folder.
  static absl::StatusOr<std::shared_ptr<DataCache>> Open(DataCacheOptions options);
  ~DataCache();
  DataCache(const DataCache&) = delete;
  DataCache& operator=(const DataCache&) = delete;

  // The data set at a URL, fetched if it is not here; waits for another thread that fetches it,
  // and tells that one's bytes.
  // When its store does not answer, or has other token files than `samples` says, a copy of the
  // same URL that is here and has those serves. Entries that nobody uses go, the least recently
  // used first, to keep the limit. Blocks. Errors: those of ReadDataSet and FetchDataSet;
  // InvalidArgument for a set with other samples; ResourceExhausted when there is no room for it;
  // OutOfRange, and nothing is removed, when it is larger than the whole limit.
  absl::StatusOr<std::shared_ptr<DataLease>> Get(const std::string& url,
                                                 const FetchHooks& hooks,
                                                 const DataSamples& samples = {});

  // Bytes of all entries, as they count for the limit.
  int64_t bytes() const;
  // The folder that whole data sets are in.
  std::string sets_folder() const { return options_.folder + "/sets"; }

 private:
  struct Entry {
    bool ready = false;     // whole, in `sets`; else some part of it may be in `partial`
    bool busy = false;      // one thread fetches, checks or removes it
    bool fetching = false;  // it has room for `bytes`, and may not have taken all of it
    int64_t users = 0;
    int64_t bytes = 0;
    int64_t moved = 0;  // bytes that have come while it was busy
    int64_t used = 0;   // the turn of its newest use
  };
  class Lease;

  DataCache(DataCacheOptions options, int lock_fd);
  absl::Status Load();
  void LoadFolder(const std::string& name, bool ready);
  std::string Path(const char* folder, const std::string& key) const;

  absl::StatusOr<std::shared_ptr<DataLease>> GetSet(const store::ObjectStore& source,
                                                    const store::DataSet& set,
                                                    const std::string& key,
                                                    const FetchHooks& hooks);
  // The newest entry that is whole and has not been probed, as a user of it; empty: none is left.
  std::string ProbeNext(const std::string& stem, std::set<std::string>& probed);
  // The newest entry of the URL that is whole and has these samples; nullptr without one.
  std::shared_ptr<DataLease> LeaseOfUrl(const std::string& url, const DataSamples& samples);
  // Waits until this thread has the entry: true when it is whole and leased, false when it is busy
  // for this thread.
  absl::StatusOr<bool> Claim(const std::string& key, const FetchHooks& hooks);
  absl::Status MakeRoom(const std::string& key, int64_t bytes);
  // Marks the entry to be removed next as busy; empty when all are in use.
  std::string TakeVictim(const std::string& but_not) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Bytes of the data sets that are being fetched, whole, by key.
  std::map<std::string, int64_t> FetchesLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Bytes that these have yet to take of the disk.
  int64_t Awaited(const std::map<std::string, int64_t>& fetches) const;
  int64_t BytesLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Fetch(const store::ObjectStore& source,
                     const store::DataSet& set,
                     const std::string& key,
                     const FetchHooks& hooks);
  absl::Status RemoveFiles(const std::string& key);
  void EndFetch(const std::string& key);
  void Leave(const std::string& key);
  void Forget(const std::string& key);
  void Release(const std::string& key);

  const DataCacheOptions options_;
  const int lock_fd_;

  mutable Mutex mutex_;  // never held during a call to a file system or a store
  CondVar changed_;
  std::map<std::string, Entry> entries_ ABSL_GUARDED_BY(mutex_);
  int64_t turn_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace ravel::daemon
