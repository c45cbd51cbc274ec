// The loop's thread starts and ends flights; a thread of each fetches. They share a flag and two
// counters, so that beats tell how far a fetch is and a launch that is given up ends it. What a
// thread brings back for a flight that is over is dropped, and its data sets are free to go.

#include "worker/daemon/launch_data_proto.h"

#include <atomic>
#include <utility>

#include <absl/strings/str_cat.h>
#include <absl/strings/strip.h>
#include <sys/stat.h>

#include "common/logging.h"
#include "common/time_text.h"
#include "proto/plan.pb.h"

namespace ravel::daemon {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kLongestFetch = std::chrono::hours(24 * 30);
constexpr milliseconds kEndWait{3000};

bool IsThere(const std::string& path) {
  struct stat facts = {};
  return stat(path.c_str(), &facts) == 0;
}

// Adds the field if it is a URL; `whole`: of a data set, not of a name in one.
absl::Status AddUrl(const std::string& field,
                    const std::string& url,
                    bool whole,
                    std::vector<NamedDataUrl>& urls) {
  if (!store::IsDataUrl(url)) {
    return absl::OkStatus();
  }
  NamedDataUrl named{.field = field, .url = url};
  if (whole) {
    absl::StatusOr<std::string> folder = store::DataFolderUrl(url);
    RETURN_IF_ERROR(Annotate(folder.status(), field));
    named.folder = *std::move(folder);
  } else {
    absl::StatusOr<store::DataUrl> split = store::SplitDataUrl(url);
    RETURN_IF_ERROR(Annotate(split.status(), field));
    named.folder = std::move(split->folder);
    named.member = std::move(split->member);
  }
  urls.push_back(std::move(named));
  return absl::OkStatus();
}

std::string ReasonOf(const absl::Status& status) {
  if (absl::IsCancelled(status)) {
    return "";
  }
  if (store::IsDataFault(status)) {
    return "DataError";
  }
  if (absl::IsOutOfRange(status)) {
    return "DataCacheTooSmall";
  }
  const bool here = absl::IsResourceExhausted(status) || absl::IsFailedPrecondition(status) ||
                    absl::IsPermissionDenied(status) || absl::IsUnauthenticated(status);
  return here ? "PreflightFailed" : "StoreUnavailable";
}

}  // namespace

absl::StatusOr<std::vector<NamedDataUrl>> DataUrlsOf(const v1::StartTrainer& start) {
  std::vector<NamedDataUrl> urls;
  v1::PlannedJob job;
  if (!job.ParseFromString(start.job())) {
    return urls;
  }
  for (const auto& [name, sources] :
       {std::pair("train", &job.train()), std::pair("validation", &job.validation())}) {
    for (int i = 0; i < sources->size(); ++i) {
      const v1::PlannedSource& source = sources->Get(i);
      const size_t before = urls.size();
      RETURN_IF_ERROR(
          AddUrl(absl::StrCat("spec.data.", name, "[", i, "].path"), source.path(), false, urls));
      if (urls.size() > before) {
        urls.back().sample_digest = source.sample_digest();
      }
    }
  }
  RETURN_IF_ERROR(AddUrl("spec.data.tokenizer", job.tokenizer(), false, urls));
  RETURN_IF_ERROR(AddUrl("spec.model.from", job.model_from(), true, urls));
  return urls;
}

std::string WithLocalData(const std::string& job,
                          const std::map<std::string, std::string>& folders) {
  v1::PlannedJob local;
  if (!local.ParseFromString(job)) {
    return job;
  }
  const auto member = [&folders](std::string* path) {
    const absl::StatusOr<store::DataUrl> split =
        store::IsDataUrl(*path) ? store::SplitDataUrl(*path) : absl::NotFoundError("");
    if (split.ok() && folders.contains(split->folder)) {
      *path = absl::StrCat(folders.at(split->folder), "/", split->member);
    }
  };
  for (auto* const sources : {local.mutable_train(), local.mutable_validation()}) {
    for (v1::PlannedSource& source : *sources) {
      member(source.mutable_path());
    }
  }
  member(local.mutable_tokenizer());
  const absl::StatusOr<std::string> model = store::DataFolderUrl(local.model_from());
  if (model.ok() && folders.contains(*model)) {
    local.set_model_from(folders.at(*model));
  }
  return local.SerializeAsString();
}

struct LaunchData::Flight {
  v1::Launch launch;
  std::vector<NamedDataUrl> urls;
  std::vector<Done> waiting;
  // Shared with the thread.
  std::atomic<bool> given_up = false;
  std::atomic<int64_t> moved_bytes = 0;
};

// The threads that have not ended.
struct LaunchData::Running {
  Mutex mutex;
  CondVar changed;
  int threads ABSL_GUARDED_BY(mutex) = 0;

  void Add(int change) {
    const MutexLock lock(mutex);
    threads += change;
    changed.NotifyAll();
  }
};

LaunchData::LaunchData(boost::asio::io_context& context,
                       std::shared_ptr<DataCache> cache,
                       milliseconds limit)
    : cache_(std::move(cache)),
      limit_(limit),
      running_(std::make_shared<Running>()),
      threads_(context, kMaxThreads) {}

LaunchData::~LaunchData() {
  for (const auto& [job, flight] : flights_) {
    flight->given_up = true;
  }
  const auto end = std::chrono::steady_clock::now() + kEndWait;
  const MutexLock lock(running_->mutex);
  while (running_->threads > 0 && std::chrono::steady_clock::now() < end) {
    running_->changed.WaitFor(running_->mutex, milliseconds(50));
  }
}

int LaunchData::threads() const {
  const MutexLock lock(running_->mutex);
  return running_->threads;
}

void LaunchData::Start(const v1::Launch& launch, Done done) {
  const absl::StatusOr<std::vector<NamedDataUrl>> urls =
      launch.trainers().empty() ? std::vector<NamedDataUrl>() : DataUrlsOf(launch.trainers(0));
  if (!urls.ok()) {
    done({.status = urls.status(), .reason = "DataError"});
    return;
  }
  if (urls->empty()) {
    done({.status = absl::OkStatus(), .launch = launch});
    return;
  }
  const auto found = flights_.find(launch.job_uid());
  if (found != flights_.end() && found->second->launch.epoch() == launch.epoch()) {
    found->second->waiting.push_back(std::move(done));
    return;
  }
  if (found != flights_.end() && found->second->launch.epoch() > launch.epoch()) {
    done({.status = absl::CancelledError("a newer launch of the job is here"), .reason = {}});
    return;
  }
  Stop(launch.job_uid(), launch.epoch());
  if (cache_ == nullptr) {
    done({.status = absl::FailedPreconditionError(
              absl::StrCat(urls->front().field, ": this node has no data cache")),
          .reason = "PreflightFailed"});
    return;
  }
  Begin(launch, *urls, std::move(done));
}

void LaunchData::Begin(const v1::Launch& launch, const std::vector<NamedDataUrl>& urls, Done done) {
  const auto flight = std::make_shared<Flight>();
  flight->launch = launch;
  flight->urls = urls;
  flight->waiting.push_back(std::move(done));
  flights_[launch.job_uid()] = flight;
  BoundedThreads::Work work = [this, flight, cache = cache_, running = running_](
                                  WorkProgress& progress) -> std::function<void()> {
    const FetchHooks hooks = {
        .moved = [&flight](int64_t bytes) { flight->moved_bytes += bytes; },
        .abandoned = [&] { return flight->given_up.load() || !progress.GoesOn(); },
        .given_up = [&] { return flight->given_up.load(); }};
    Fetched fetched = FetchAll(*cache, flight->urls, hooks);
    running->Add(-1);
    return [this, flight, fetched = std::move(fetched)] { OnFetched(flight, fetched); };
  };
  running_->Add(1);
  const bool started =
      threads_.Run({limit_, kLongestFetch},
                   std::move(work),
                   [this, flight](const std::string& /*part*/, milliseconds limit) {
                     flight->given_up = true;
                     Finish(flight,
                            {.status = absl::UnavailableError(absl::StrCat(flight->urls[0].field,
                                                                           ": ",
                                                                           flight->urls[0].url,
                                                                           ": no byte came within ",
                                                                           limit.count() / 1000,
                                                                           " s")),
                             .reason = "StoreUnavailable"});
                   });
  if (!started) {
    running_->Add(-1);
    Finish(flight,
           {.status = absl::ResourceExhaustedError("this node fetches for too many launches"),
            .reason = "PreflightFailed"});
    return;
  }
  log::Info(absl::StrCat("job ", launch.job_uid(), ": fetches ", urls[0].folder));
}

LaunchData::Fetched LaunchData::FetchAll(DataCache& cache,
                                         const std::vector<NamedDataUrl>& urls,
                                         const FetchHooks& hooks) {
  Fetched fetched;
  std::map<std::string, DataSamples> samples;  // by folder
  for (const NamedDataUrl& named : urls) {
    if (!named.sample_digest.empty()) {
      samples[named.folder][named.member] = named.sample_digest;
    }
  }
  for (const NamedDataUrl& named : urls) {
    const auto fail = [&](const absl::Status& status) {
      fetched.status = Annotate(status, absl::StrCat(named.field, ": ", named.url));
      fetched.leases.clear();
      return fetched;
    };
    std::shared_ptr<DataLease>& lease = fetched.leases[named.folder];
    if (lease == nullptr) {
      absl::StatusOr<std::shared_ptr<DataLease>> got =
          cache.Get(named.folder, hooks, samples[named.folder]);
      if (!got.ok()) {
        return fail(got.status());
      }
      lease = *std::move(got);
    }
    const std::string path = absl::StrCat(lease->folder(), "/", named.member);
    if (!named.member.empty() && !IsThere(path) && !IsThere(path + ".idx")) {
      return fail(absl::NotFoundError("the data set has nothing of this name"));
    }
  }
  return fetched;
}

void LaunchData::OnFetched(const std::shared_ptr<Flight>& flight, Fetched fetched) {
  if (flight->given_up) {
    return;
  }
  LaunchDataResult result{.status = fetched.status, .reason = {}, .launch = flight->launch};
  if (fetched.status.ok()) {
    std::map<std::string, std::string> folders;
    for (const auto& [url, lease] : fetched.leases) {
      folders[url] = lease->folder();
    }
    for (v1::StartTrainer& start : *result.launch.mutable_trainers()) {
      start.set_job(WithLocalData(start.job(), folders));
    }
    leases_[flight->launch.job_uid()] = std::move(fetched.leases);
    log::Info(absl::StrCat("job ",
                           flight->launch.job_uid(),
                           ": its data is here, ",
                           FormatBytes(flight->moved_bytes),
                           " read"));
  } else {
    result.reason = ReasonOf(fetched.status);
  }
  Finish(flight, result);
}

void LaunchData::Finish(const std::shared_ptr<Flight>& flight, const LaunchDataResult& result) {
  const auto found = flights_.find(flight->launch.job_uid());
  if (found != flights_.end() && found->second == flight) {
    flights_.erase(found);
  }
  for (const Done& done : std::exchange(flight->waiting, {})) {
    done(result);
  }
}

void LaunchData::Stop(const std::string& job_uid, int64_t epoch) {
  const auto found = flights_.find(job_uid);
  if (found == flights_.end() || found->second->launch.epoch() > epoch) {
    return;
  }
  const std::shared_ptr<Flight> flight = found->second;
  flight->given_up = true;
  Finish(flight, {.status = absl::CancelledError("the launch was given up"), .reason = {}});
}

void LaunchData::StopAll() {
  while (!flights_.empty()) {
    Stop(flights_.begin()->first, flights_.begin()->second->launch.epoch());
  }
}

void LaunchData::Keep(const std::set<std::string>& jobs) {
  std::erase_if(leases_, [&jobs](const auto& entry) { return !jobs.contains(entry.first); });
}

int64_t LaunchData::MovedBytes(const std::string& job_uid) const {
  const auto found = flights_.find(job_uid);
  return found == flights_.end() ? -1 : found->second->moved_bytes.load();
}

}  // namespace ravel::daemon
