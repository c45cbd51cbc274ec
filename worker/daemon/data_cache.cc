// An entry is busy while one thread works on its files; everything else is counters under the
// mutex. So two jobs that name one data set fetch it once, and nothing that is fetched, checked or
// used is removed. A set appears in `sets` by one rename after all its bytes are durable: whatever
// is there is whole, whenever this process is killed.

#include "worker/daemon/data_cache.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <set>
#include <system_error>
#include <tuple>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "common/crypto.h"
#include "common/file_writer.h"
#include "common/logging.h"
#include "common/time_text.h"
#include "common/token_check.h"

namespace ravel::daemon {
namespace {

namespace fs = std::filesystem;

constexpr char kSets[] = "sets";
constexpr char kPartial[] = "partial";
constexpr char kTrash[] = "trash";
constexpr size_t kHashDigits = 32;
constexpr std::chrono::milliseconds kBusyLook{100};
// More than what fetches write while a disk is looked at, and less than files that matter.
constexpr int64_t kSetAsideBytes = int64_t{256} << 20;

std::string StemOf(const std::string& url) {
  return Hex(Sha256(url)).substr(0, kHashDigits) + "-";
}

bool IsKey(const std::string& name) {
  return name.size() == 2 * kHashDigits + 1 && name[kHashDigits] == '-';
}

// The manifest does not count, as it does not in the manifest.
int64_t BytesIn(const std::string& folder) {
  int64_t sum = 0;
  std::error_code error;
  fs::directory_iterator files(folder, error);
  for (; !error && files != fs::directory_iterator(); files.increment(error)) {
    std::error_code ignored;
    const auto size = files->file_size(ignored);
    const bool counts = !ignored && files->path().filename() != store::kDataManifest;
    sum += counts ? static_cast<int64_t>(size) : 0;
  }
  return sum;
}

// Bytes of the folder's files, with those of the disk that are set aside for what is to come. A
// disk that compresses has fewer blocks than bytes.
int64_t AllocatedIn(const std::string& folder) {
  constexpr int64_t kStatBlockBytes = 512;
  int64_t sum = 0;
  std::error_code error;
  fs::directory_iterator files(folder, error);
  for (; !error && files != fs::directory_iterator(); files.increment(error)) {
    struct stat facts = {};
    if (stat(files->path().c_str(), &facts) == 0) {
      sum += std::max(static_cast<int64_t>(facts.st_size),
                      static_cast<int64_t>(facts.st_blocks) * kStatBlockBytes);
    }
  }
  return sum;
}

// Token files whose samples are not known may be any.
bool HasSamples(const store::DataManifest& manifest, const DataSamples& samples) {
  return std::all_of(samples.begin(), samples.end(), [&manifest](const auto& sample) {
    const store::DataTokens* const tokens = manifest.FindTokens(sample.first);
    return tokens != nullptr &&
           (tokens->sample_digest.empty() || tokens->sample_digest == sample.second);
  });
}

// OK while the ids at the places that were sampled are those of the manifest; DataLoss names a file
// in which they are not. Reads these places alone. The sizes are right.
absl::Status CheckItsSamples(const std::string& folder, const store::DataManifest& manifest) {
  for (const store::DataTokens& tokens : manifest.tokens) {
    const store::DataFile* const ids = manifest.FindFile(tokens.prefix + ".bin");
    if (tokens.sample_digest.empty() || ids == nullptr) {
      continue;
    }
    const std::string path = absl::StrCat(folder, "/", ids->name);
    const TokenFormat width =
        ids->bytes == 2 * tokens.tokens ? TokenFormat::kFlatU16 : TokenFormat::kFlatU32;
    const absl::StatusOr<TokenFileFacts> facts = CheckTokenFile(path, width, {.sample = true});
    if (!facts.ok()) {
      return absl::FailedPreconditionError(facts.status().message());
    }
    if (facts->sample_digest != tokens.sample_digest) {
      return absl::DataLossError(absl::StrCat(path, ": its ids are not those of the manifest"));
    }
  }
  return absl::OkStatus();
}

// Sizes alone: digests were right when the set got its name.
bool IsIntact(const std::string& folder, const store::DataManifest& manifest) {
  return std::all_of(
      manifest.files.begin(), manifest.files.end(), [&](const store::DataFile& file) {
        struct stat facts = {};
        return lstat((folder + "/" + file.name).c_str(), &facts) == 0 && S_ISREG(facts.st_mode) &&
               facts.st_size == file.bytes;
      });
}

absl::Status MakeFolder(const std::string& path) {
  std::error_code error;
  fs::create_directories(path, error);
  return error ? absl::FailedPreconditionError(absl::StrCat(path, ": ", error.message()))
               : absl::OkStatus();
}

// So that the order of uses outlives this process.
void Touch(const std::string& folder) {
  utimensat(AT_FDCWD, folder.c_str(), nullptr, 0);
}

}  // namespace

class DataCache::Lease : public DataLease {
 public:
  Lease(std::shared_ptr<DataCache> cache, std::string key)
      : cache_(std::move(cache)), key_(std::move(key)), folder_(cache_->Path(kSets, key_)) {}
  ~Lease() override { cache_->Release(key_); }
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;
  const std::string& folder() const override { return folder_; }

 private:
  const std::shared_ptr<DataCache> cache_;  // may outlive the daemon that made it, in a thread
  const std::string key_;
  const std::string folder_;
};

DataCache::DataCache(DataCacheOptions options, int lock_fd)
    : options_(std::move(options)), lock_fd_(lock_fd) {}

DataCache::~DataCache() {
  close(lock_fd_);
}

std::string DataCache::Path(const char* folder, const std::string& key) const {
  return absl::StrCat(options_.folder, "/", folder, key.empty() ? "" : "/", key);
}

absl::StatusOr<std::shared_ptr<DataCache>> DataCache::Open(DataCacheOptions options) {
  RETURN_IF_ERROR(MakeFolder(options.folder));
  const std::string lock = options.folder + "/lock";
  const int fd = open(lock.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0640);
  if (fd < 0) {
    return ErrnoStatus(errno, lock);
  }
  std::shared_ptr<DataCache> cache(new DataCache(std::move(options), fd));
  if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat(lock, ": another ravel-worker uses this folder"));
  }
  RETURN_IF_ERROR(cache->Load());
  return cache;
}

absl::Status DataCache::Load() {
  for (const char* folder : {kSets, kPartial, kTrash}) {
    RETURN_IF_ERROR(MakeFolder(Path(folder, "")));
  }
  std::error_code error;
  fs::directory_iterator left(Path(kTrash, ""), error);
  for (; !error && left != fs::directory_iterator(); left.increment(error)) {
    if (IsKey(left->path().stem().string())) {
      std::error_code ignored;
      fs::remove_all(left->path(), ignored);
    }
  }
  LoadFolder(kSets, true);
  LoadFolder(kPartial, false);
  return absl::OkStatus();
}

void DataCache::LoadFolder(const std::string& name, bool ready) {
  std::vector<std::tuple<fs::file_time_type, std::string, int64_t>> found;
  std::error_code error;
  fs::directory_iterator folders(Path(name.c_str(), ""), error);
  for (; !error && folders != fs::directory_iterator(); folders.increment(error)) {
    const std::string key = folders->path().filename().string();
    if (IsKey(key)) {
      std::error_code ignored;
      found.emplace_back(folders->last_write_time(ignored), key, BytesIn(folders->path()));
    }
  }
  std::sort(found.begin(), found.end());
  const MutexLock lock(mutex_);
  for (const auto& [time, key, bytes] : found) {
    Entry& entry = entries_[key];
    if (!entry.ready) {  // else the part is a leftover, which goes with the set
      entry = {.ready = ready, .bytes = bytes, .used = ++turn_};
    }
  }
}

std::map<std::string, int64_t> DataCache::FetchesLocked() const {
  std::map<std::string, int64_t> fetches;
  for (const auto& [key, entry] : entries_) {
    if (entry.fetching) {
      fetches[key] = entry.bytes;
    }
  }
  return fetches;
}

int64_t DataCache::BytesLocked() const {
  int64_t sum = 0;
  for (const auto& [key, entry] : entries_) {
    sum += entry.bytes;
  }
  return sum;
}

int64_t DataCache::bytes() const {
  const MutexLock lock(mutex_);
  return BytesLocked();
}

absl::StatusOr<std::shared_ptr<DataLease>> DataCache::Get(const std::string& url,
                                                          const FetchHooks& hooks,
                                                          const DataSamples& samples) {
  const absl::StatusOr<std::unique_ptr<store::ObjectStore>> source = options_.open(url);
  const absl::StatusOr<store::DataSet> set =
      source.ok() ? store::ReadDataSet(**source) : source.status();
  absl::Status status = set.status();
  if (set.ok()) {
    if (HasSamples(set->manifest, samples)) {
      return GetSet(**source, *set, StemOf(url) + set->digest.substr(0, kHashDigits), hooks);
    }
    status = absl::InvalidArgumentError(
        "its data set is not the one that the job was submitted with; other data cannot go on with "
        "this run");
  }
  const bool refused = absl::IsPermissionDenied(status) || absl::IsUnauthenticated(status) ||
                       absl::IsFailedPrecondition(status);
  if (set.ok() || (!store::IsDataFault(status) && !refused)) {
    if (std::shared_ptr<DataLease> kept = LeaseOfUrl(url, samples)) {
      log::Warning(absl::StrCat(url, ": its copy here serves: ", status.message()));
      return kept;
    }
  }
  return status;
}

absl::StatusOr<std::shared_ptr<DataLease>> DataCache::GetSet(const store::ObjectStore& source,
                                                             const store::DataSet& set,
                                                             const std::string& key,
                                                             const FetchHooks& hooks) {
  ASSIGN_OR_RETURN(const bool ready, Claim(key, hooks));
  if (ready) {
    auto lease = std::make_shared<Lease>(shared_from_this(), key);
    if (IsIntact(lease->folder(), set.manifest)) {
      const absl::Status samples = CheckItsSamples(lease->folder(), set.manifest);
      if (samples.ok()) {
        Touch(lease->folder());
        return lease;
      }
      if (!absl::IsDataLoss(samples)) {
        return samples;  // a disk that does not read is no reason to fetch
      }
    }
    {
      const MutexLock lock(mutex_);
      Entry& entry = entries_[key];
      if (entry.users > 1) {
        return absl::FailedPreconditionError(
            absl::StrCat(lease->folder(), ": files are missing or changed while jobs use them"));
      }
      entry.ready = false;
      entry.busy = true;
    }
    log::Warning(absl::StrCat(lease->folder(), ": files are missing or changed; fetched again"));
    const absl::Status removed = RemoveFiles(key);
    if (!removed.ok()) {
      Leave(key);
      return removed;
    }
  }
  absl::Status fetched = Fetch(source, set, key, hooks);
  EndFetch(key);
  if (absl::IsResourceExhausted(fetched) || absl::IsOutOfRange(fetched)) {
    fetched.Update(RemoveFiles(key));  // others need the room
  }
  const int64_t left = fetched.ok() ? set.manifest.total_bytes() : BytesIn(Path(kPartial, key));
  {
    const MutexLock lock(mutex_);
    Entry& entry = entries_[key];
    entry.busy = false;
    entry.ready = fetched.ok();
    entry.bytes = left;
    entry.used = ++turn_;
    entry.users += fetched.ok() ? 1 : 0;
    changed_.NotifyAll();
  }
  if (!fetched.ok()) {
    return fetched;
  }
  return std::make_shared<Lease>(shared_from_this(), key);
}

std::string DataCache::ProbeNext(const std::string& stem, std::set<std::string>& probed) {
  const MutexLock lock(mutex_);
  auto newest = entries_.end();
  for (auto at = entries_.lower_bound(stem); at != entries_.end() && at->first.starts_with(stem);
       ++at) {
    const Entry& entry = at->second;
    if (entry.ready && !entry.busy && !probed.contains(at->first) &&
        (newest == entries_.end() || entry.used > newest->second.used)) {
      newest = at;
    }
  }
  if (newest == entries_.end()) {
    return "";
  }
  ++newest->second.users;
  probed.insert(newest->first);
  return newest->first;
}

std::shared_ptr<DataLease> DataCache::LeaseOfUrl(const std::string& url,
                                                 const DataSamples& samples) {
  std::set<std::string> probed;
  for (;;) {
    const std::string key = ProbeNext(StemOf(url), probed);
    if (key.empty()) {
      return nullptr;
    }
    const std::string folder = Path(kSets, key);
    const absl::StatusOr<std::string> text = ReadWholeFile(
        absl::StrCat(folder, "/", store::kDataManifest), store::kMaxDataManifestBytes);
    const absl::StatusOr<store::DataManifest> manifest =
        text.ok() ? store::ParseDataManifest(*text) : text.status();
    const bool serves = manifest.ok() && HasSamples(*manifest, samples) &&
                        IsIntact(folder, *manifest) && CheckItsSamples(folder, *manifest).ok();
    const MutexLock lock(mutex_);
    Entry& entry = entries_[key];
    if (serves) {
      entry.used = ++turn_;
      return std::make_shared<Lease>(shared_from_this(), key);
    }
    --entry.users;  // a look is no use
  }
}

absl::StatusOr<bool> DataCache::Claim(const std::string& key, const FetchHooks& hooks) {
  int64_t told = 0;
  bool moves = true;
  for (;;) {
    // A thread that stands still is no sign of life of those that wait for it.
    const std::function<bool()>& gone = moves || !hooks.given_up ? hooks.abandoned : hooks.given_up;
    if (gone && gone()) {
      return absl::CancelledError("the data set is not wanted any more");
    }
    int64_t moved = 0;
    {
      const MutexLock lock(mutex_);
      Entry& entry = entries_[key];
      if (!entry.busy) {
        entry.used = ++turn_;
        entry.users += entry.ready ? 1 : 0;
        entry.busy = !entry.ready;
        entry.moved = 0;
        return entry.ready;
      }
      moved = entry.moved;
      changed_.WaitFor(mutex_, kBusyLook);
    }
    moves = moved > told;
    if (moves && hooks.moved) {
      hooks.moved(moved - told);
    }
    told = moved;
  }
}

std::string DataCache::TakeVictim(const std::string& but_not) {
  auto victim = entries_.end();
  for (auto at = entries_.begin(); at != entries_.end(); ++at) {
    const Entry& entry = at->second;
    if (!entry.busy && entry.users == 0 && at->first != but_not &&
        (victim == entries_.end() || entry.used < victim->second.used)) {
      victim = at;
    }
  }
  if (victim == entries_.end()) {
    return "";
  }
  victim->second.busy = true;
  return victim->first;
}

int64_t DataCache::Awaited(const std::map<std::string, int64_t>& fetches) const {
  int64_t sum = 0;
  for (const auto& [key, bytes] : fetches) {
    sum += std::max<int64_t>(bytes - AllocatedIn(Path(kPartial, key)), 0);
  }
  return sum;
}

absl::Status DataCache::MakeRoom(const std::string& key, int64_t bytes) {
  if (bytes > options_.limit_bytes) {  // the room of all others would not be enough
    return absl::OutOfRangeError(
        absl::StrCat("the data set has ",
                     FormatBytes(bytes),
                     ", more than the whole data cache of this node may have (",
                     FormatBytes(options_.limit_bytes),
                     "): start its ravel-worker with a larger --data-cache-bytes, or use a smaller "
                     "data set"));
  }
  for (;;) {
    std::map<std::string, int64_t> others_bytes;
    {
      const MutexLock lock(mutex_);
      entries_[key].bytes = 0;
      others_bytes = FetchesLocked();
    }
    // Taken before the look at the disk: bytes that come meanwhile count twice rather than never.
    const int64_t awaited = Awaited(others_bytes);
    struct statvfs facts = {};
    if (statvfs(options_.folder.c_str(), &facts) != 0) {
      return absl::FailedPreconditionError(ErrnoStatus(errno, options_.folder).message());
    }
    const auto block = static_cast<int64_t>(facts.f_frsize);
    const int64_t kept =
        std::min(options_.keep_free_bytes, static_cast<int64_t>(facts.f_blocks) * block / 20);
    const int64_t free =
        std::max<int64_t>(static_cast<int64_t>(facts.f_bavail) * block - kept - awaited, 0);
    if (awaited - Awaited(others_bytes) > kSetAsideBytes) {
      continue;  // the room of a file was set aside between the two looks
    }
    const int64_t missing = bytes - AllocatedIn(Path(kPartial, key));
    std::string victim;
    {
      const MutexLock lock(mutex_);
      if (FetchesLocked() != others_bytes) {
        continue;  // one began or ended meanwhile
      }
      const int64_t others = BytesLocked();
      if (others + bytes <= options_.limit_bytes && missing <= free) {
        entries_[key].bytes = bytes;
        entries_[key].fetching = true;
        return absl::OkStatus();
      }
      victim = TakeVictim(key);
      if (victim.empty()) {
        return absl::ResourceExhaustedError(
            absl::StrCat("no room in ",
                         options_.folder,
                         ": the data set has ",
                         FormatBytes(bytes),
                         "; --data-cache-bytes ",
                         FormatBytes(options_.limit_bytes),
                         ", in use ",
                         FormatBytes(others),
                         ", free on the disk beyond what stays free and what other fetches await ",
                         FormatBytes(free)));
      }
    }
    log::Info(absl::StrCat("data cache: ", victim, " is removed to make room"));
    const absl::Status removed = RemoveFiles(victim);
    if (!removed.ok()) {
      Leave(victim);
      return removed;
    }
    Forget(victim);
  }
}

absl::Status DataCache::Fetch(const store::ObjectStore& source,
                              const store::DataSet& set,
                              const std::string& key,
                              const FetchHooks& hooks) {
  RETURN_IF_ERROR(MakeRoom(key, set.manifest.total_bytes()));
  const std::string partial = Path(kPartial, key);
  RETURN_IF_ERROR(MakeFolder(partial));
  const FetchHooks counted = {.moved =
                                  [&](int64_t bytes) {
                                    {
                                      const MutexLock lock(mutex_);
                                      entries_[key].moved += bytes;
                                    }
                                    if (hooks.moved) {
                                      hooks.moved(bytes);
                                    }
                                  },
                              .abandoned = hooks.abandoned};
  RETURN_IF_ERROR(FetchDataSet(source, set.manifest, partial, counted));
  const absl::Status kept =
      WriteFileAtomically(absl::StrCat(partial, "/", store::kDataManifest), set.text);
  if (!kept.ok()) {
    return absl::IsResourceExhausted(kept) ? kept : absl::FailedPreconditionError(kept.message());
  }
  const std::string whole = Path(kSets, key);
  EndFetch(key);  // all of it is on the disk
  if (rename(partial.c_str(), whole.c_str()) != 0) {
    return absl::FailedPreconditionError(ErrnoStatus(errno, whole).message());
  }
  return SyncFolder(Path(kSets, ""));
}

// Renamed first: what is removed half is in neither folder that counts.
absl::Status DataCache::RemoveFiles(const std::string& key) {
  for (const char* folder : {kSets, kPartial}) {
    const std::string trash = Path(kTrash, absl::StrCat(key, ".", RandomHex(4)));
    if (rename(Path(folder, key).c_str(), trash.c_str()) == 0) {
      std::error_code ignored;
      fs::remove_all(trash, ignored);
    } else if (errno != ENOENT) {
      return absl::FailedPreconditionError(ErrnoStatus(errno, Path(folder, key)).message());
    }
  }
  return absl::OkStatus();
}

// Nothing more is written to its part.
void DataCache::EndFetch(const std::string& key) {
  const MutexLock lock(mutex_);
  entries_[key].fetching = false;
}

// The entry stays, for another thread to try.
void DataCache::Leave(const std::string& key) {
  const MutexLock lock(mutex_);
  entries_[key].busy = false;
  changed_.NotifyAll();
}

void DataCache::Forget(const std::string& key) {
  const MutexLock lock(mutex_);
  entries_.erase(key);
  changed_.NotifyAll();
}

void DataCache::Release(const std::string& key) {
  const MutexLock lock(mutex_);
  Entry& entry = entries_[key];
  --entry.users;
  entry.used = ++turn_;
}

}  // namespace ravel::daemon
