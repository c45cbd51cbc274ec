// A part is NAME.<upload>.part. Its blocks are written in order and past the page cache (O_DIRECT),
// up to four together: filling fresh pages of the cache costs more CPU than all the rest, and each
// wait for the disk costs a turn of the scheduler on a busy host. What is not aligned, such as the
// end of a file, and all of a file on a file system without O_DIRECT, takes plain writes whose way
// to the disk is begun every 8 MiB, so that the fdatasync at the end finds little to do. The size
// of the part is what counts as written, since space is reserved without changing it. A killed
// server loses nothing that it has acknowledged; a host that loses power may lose blocks of parts,
// which the checksum of the whole file finds before it gets its name.

#include "worker/store/disk_set.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <map>
#include <system_error>
#include <utility>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_split.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "common/check.h"
#include "common/crc32c.h"
#include "common/fault_point.h"
#include "common/signed_size.h"

namespace ravel::store_server {
namespace {

using store::FileStore;
using store::JoinPath;
using store::ListedEntry;
using store::SplitLast;

constexpr std::string_view kPart = ".part";
constexpr size_t kMaxPathBytes = 1024;
constexpr size_t kMaxNameBytes = 255 - 22;  // ".<upload>.part" fits behind it
constexpr size_t kMaxDepth = 16;
constexpr int64_t kFlushBytes = 8 << 20;
constexpr int64_t kReadBytes = 1 << 20;
constexpr size_t kMaxSums = 1024;         // of parts between two streams
constexpr size_t kBlockBytes = 2 << 20;   // that clients send
constexpr size_t kBufferBytes = 8 << 20;  // of one write past the page cache
constexpr size_t kAlignment = 4096;       // of its offset, size and memory

absl::Status Error(std::string_view what, const std::string& path) {
  return ErrnoStatus(errno, absl::StrCat(std::string(what), " ", path));
}

size_t DepthOf(std::string_view path) {
  return path.empty() ? 0 : Size(std::count(path.begin(), path.end(), '/') + 1);
}

std::string PartName(const std::string& file, std::string_view upload) {
  return absl::StrCat(file, ".", std::string(upload), std::string(kPart));
}

int64_t FileBytes(const std::string& path) {
  struct stat status = {};
  return ::lstat(path.c_str(), &status) == 0 && S_ISREG(status.st_mode) ? status.st_size : 0;
}

// All files of a tree, parts too.
int64_t TreeBytes(const std::string& path) {
  std::error_code error;
  if (!std::filesystem::is_directory(std::filesystem::symlink_status(path, error))) {
    return FileBytes(path);
  }
  int64_t bytes = 0;
  for (auto at = std::filesystem::recursive_directory_iterator(path, error);
       !error && at != std::filesystem::recursive_directory_iterator();
       at.increment(error)) {
    bytes += FileBytes(at->path().string());
  }
  return bytes;
}

absl::Status WriteAll(int fd, std::string_view data, int64_t offset, const std::string& path) {
  while (!data.empty()) {
    const ssize_t written = ::pwrite(fd, data.data(), data.size(), offset);
    if (written < 0) {
      if (errno == EINTR) {
        continue;
      }
      return Error("write", path);
    }
    data.remove_prefix(Size(written));
    offset += written;
  }
  return absl::OkStatus();
}

// crc32c of bytes [0, end).
absl::StatusOr<uint32_t> CrcOfFile(const store::FileReader& reader, int64_t end) {
  std::vector<std::byte> buffer;
  uint32_t crc = 0;
  for (int64_t at = 0; at < end; at += kReadBytes) {
    buffer.resize(Size(std::min(kReadBytes, end - at)));
    RETURN_IF_ERROR(reader.ReadAt(at, buffer));
    crc = Crc32c(crc, buffer.data(), buffer.size());
  }
  return crc;
}

}  // namespace

absl::Status CheckPath(std::string_view field, std::string_view path) {
  const auto refuse = [&](std::string_view what) {
    return absl::InvalidArgumentError(
        absl::StrCat(std::string(field), ": expected a path in the store: ", std::string(what)));
  };
  if (path.size() > kMaxPathBytes) {
    return refuse("at most 1024 bytes");
  }
  if (path.empty()) {
    return absl::OkStatus();
  }
  const std::vector<std::string> names = absl::StrSplit(std::string(path), '/');
  if (names.size() > kMaxDepth) {
    return refuse("at most 16 folders deep");
  }
  for (const std::string& name : names) {
    const bool control = std::any_of(name.begin(), name.end(), [](char c) {
      return static_cast<unsigned char>(c) < 0x20 || c == 0x7f;
    });
    if (name.empty() || name == "." || name == ".." || name.size() > kMaxNameBytes || control) {
      return refuse("no empty, relative, overlong or unprintable part");
    }
    if (absl::EndsWith(name, std::string(kPart))) {
      return refuse("no name that ends in .part");
    }
  }
  return absl::OkStatus();
}

Upload::~Upload() {
  if (fd_ >= 0) {
    if (written_ > 0 && pending_ == 0 && !spent_) {
      disks_->Remember(part_, written_, crc_);
    }
    ::close(fd_);
  }
  if (direct_fd_ >= 0) {
    ::close(direct_fd_);
  }
  disks_->AddUsed(0, -reserved_);
}

absl::Status Upload::Open(int64_t offset, int64_t expected_bytes) {
  fd_ = ::open(part_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0640);
  struct stat status = {};
  if (fd_ < 0 || ::fstat(fd_, &status) != 0) {
    return Error("create", part_);
  }
  if (offset > status.st_size) {
    return absl::OutOfRangeError(absl::StrCat(
        path_, ": ", status.st_size, " bytes of this upload are written, not ", offset));
  }
  if (status.st_size > offset) {
    if (::ftruncate(fd_, offset) != 0) {
      return Error("truncate", part_);
    }
    disks_->AddUsed(offset - status.st_size, 0);
  }
  direct_fd_ = ::open(part_.c_str(), O_WRONLY | O_DIRECT | O_CLOEXEC | O_NOFOLLOW);
  if (direct_fd_ >= 0) {
    buffer_.reset(static_cast<char*>(std::aligned_alloc(kAlignment, kBufferBytes)));
    CHECK(buffer_ != nullptr);
  }
  written_ = offset;
  started_ = offset;
  const int64_t more = std::max<int64_t>(expected_bytes - offset, 0);
  RETURN_IF_ERROR(disks_->Reserve(more));
  reserved_ = more;
  if (more > 0 && ::fallocate(fd_, FALLOC_FL_KEEP_SIZE, 0, expected_bytes) != 0 &&
      (errno == ENOSPC || errno == EDQUOT || errno == EFBIG)) {
    return Error("reserve space for", path_);
  }
  const std::optional<uint32_t> known = disks_->Recall(part_, offset);
  if (known) {
    crc_ = *known;
  } else if (offset > 0) {
    const auto [folder, name] = SplitLast(part_);
    const FileStore store{std::string(folder)};
    ASSIGN_OR_RETURN(const auto reader, store.Open(name));
    ASSIGN_OR_RETURN(crc_, CrcOfFile(*reader, offset));
  }
  return absl::OkStatus();
}

absl::StatusOr<size_t> Upload::PutDirect(std::string_view data) {
  size_t done = 0;
  while (direct_fd_ >= 0 && data.data() == buffer_.get() &&
         (Size(written_) + done) % kAlignment == 0 && data.size() - done >= kAlignment) {
    const size_t bytes = (data.size() - done) / kAlignment * kAlignment;
    const ssize_t written =
        ::pwrite(direct_fd_, data.data() + done, bytes, written_ + static_cast<int64_t>(done));
    if (written > 0) {
      done += Size(written);
    } else if (written == 0 || errno == EINVAL) {
      ::close(direct_fd_);  // it is stricter than it said: the cache takes the rest
      direct_fd_ = -1;
    } else if (errno != EINTR) {
      return Error("write", path_);
    }
  }
  return done;
}

absl::Status Upload::Put(std::string_view data) {
  const absl::StatusOr<size_t> direct = PutDirect(data);
  absl::Status written = direct.status();
  if (direct.ok()) {
    written = WriteAll(fd_, data.substr(*direct), written_ + static_cast<int64_t>(*direct), path_);
  }
  if (!written.ok()) {
    spent_ = true;
    if (::ftruncate(fd_, written_) != 0) {
      return Error("truncate", part_);
    }
    return written;
  }
  const auto bytes = static_cast<int64_t>(data.size());
  if (*direct > 0) {  // on the disk already
    started_ = written_ + static_cast<int64_t>(*direct);
  }
  written_ += bytes;
  reserved_ -= bytes;
  disks_->AddUsed(bytes, -bytes);
  if (written_ - started_ >= kFlushBytes) {
    // A hint: an error shows at the end, in fdatasync.
    (void)::sync_file_range(fd_, started_, written_ - started_, SYNC_FILE_RANGE_WRITE);
    started_ = written_;
  }
  return absl::OkStatus();
}

absl::Status Upload::Append(std::string_view data, uint32_t crc32c) {
  RETURN_IF_ERROR(FaultPoint("store.append"));
  const int64_t needed = pending_ + static_cast<int64_t>(data.size());
  if (needed > reserved_) {
    RETURN_IF_ERROR(disks_->Reserve(needed - reserved_));
    reserved_ = needed;
  }
  if (Size(needed) > kBufferBytes) {
    RETURN_IF_ERROR(Flush());
  }
  crc_ = Crc32cCombine(crc_, crc32c, data.size());
  if (direct_fd_ < 0 || Size(written_) % kAlignment != 0 || data.size() > kBufferBytes) {
    return Put(data);
  }
  std::memcpy(buffer_.get() + pending_, data.data(), data.size());
  pending_ += static_cast<int64_t>(data.size());
  return absl::OkStatus();
}

bool Upload::MayTakeMore() const {
  return pending_ > 0 && Size(pending_) + kBlockBytes <= kBufferBytes;
}

absl::Status Upload::Flush() {
  const std::string_view data(buffer_.get(), Size(pending_));
  pending_ = 0;
  return data.empty() ? absl::OkStatus() : Put(data);
}

absl::Status Upload::Finish(int64_t size, uint32_t crc32c) {
  RETURN_IF_ERROR(Flush());
  spent_ = true;
  if (size != written_ || crc32c != crc_) {
    ::unlink(part_.c_str());
    disks_->AddUsed(-written_, 0);
    return absl::DataLossError(absl::StrCat(
        path_, ": ", written_, " bytes arrived, ", size, " were sent, or their checksum differs"));
  }
  if (::fdatasync(fd_) != 0) {
    return Error("fdatasync", path_);
  }
  RETURN_IF_ERROR(FaultPoint("store.finish"));
  const auto [folder, name] = SplitLast(path_);
  FileStore store{std::string(folder)};
  const absl::Status named = store.PublishIfAbsent(SplitLast(part_).second, name);
  if (absl::IsAlreadyExists(named)) {
    ::unlink(part_.c_str());
    disks_->AddUsed(-written_, 0);
  }
  return named;
}

absl::StatusOr<std::unique_ptr<DiskSet>> DiskSet::Open(const DiskOptions& options) {
  std::unique_ptr<DiskSet> disks(new DiskSet(options));
  int64_t used = 0;
  for (const std::string& folder : options.folders) {
    std::error_code error;
    if (!absl::StartsWith(folder, "/") || !std::filesystem::is_directory(folder, error)) {
      return absl::FailedPreconditionError(
          absl::StrCat("--data ", folder, ": expected the absolute path of a folder"));
    }
    disks->disks_.push_back(std::make_unique<FileStore>(folder));
    used += TreeBytes(folder);
  }
  if (disks->disks_.empty()) {
    return absl::InvalidArgumentError("--data: expected at least one folder");
  }
  disks->AddUsed(used, 0);
  return disks;
}

int DiskSet::DiskOf(std::string_view path) const {
  for (size_t i = 0; i < disks_.size(); ++i) {
    struct stat status = {};
    if (::lstat(disks_[i]->Locate(path).c_str(), &status) == 0) {
      return static_cast<int>(i);
    }
  }
  return -1;
}

int64_t DiskSet::FreeOn(const FileStore& disk) {
  struct statvfs status = {};
  if (::statvfs(disk.root().c_str(), &status) != 0) {
    return 0;
  }
  return static_cast<int64_t>(status.f_bavail * status.f_frsize);
}

int DiskSet::EmptiestDisk() const {
  int best = 0;
  for (size_t i = 1; i < disks_.size(); ++i) {
    if (FreeOn(*disks_[i]) > FreeOn(*At(disks_, best))) {
      best = static_cast<int>(i);
    }
  }
  return best;
}

int DiskSet::DiskForFolder(std::string_view path) const {
  constexpr size_t kSpreadLevels = 2;
  for (std::string_view at = SplitLast(path).first; DepthOf(at) >= kSpreadLevels;
       at = SplitLast(at).first) {
    const int disk = DiskOf(at);
    if (disk >= 0) {
      return disk;
    }
  }
  return EmptiestDisk();
}

absl::Status DiskSet::Reserve(int64_t bytes) {
  const MutexLock lock(mutex_);
  if (options_.quota_bytes > 0 && used_ + reserved_ + bytes > options_.quota_bytes) {
    return absl::ResourceExhaustedError(absl::StrCat("the store's quota of ",
                                                     options_.quota_bytes,
                                                     " bytes is used up: ",
                                                     used_ + reserved_,
                                                     " are used, ",
                                                     bytes,
                                                     " more were asked for"));
  }
  reserved_ += bytes;
  return absl::OkStatus();
}

void DiskSet::AddUsed(int64_t bytes, int64_t reserved) {
  const MutexLock lock(mutex_);
  used_ += bytes;
  reserved_ += reserved;
}

void DiskSet::Remember(const std::string& part, int64_t size, uint32_t crc32c) {
  const MutexLock lock(mutex_);
  if (sums_.size() >= kMaxSums) {
    sums_.erase(sums_.begin());
  }
  sums_[part] = {size, crc32c};
}

std::optional<uint32_t> DiskSet::Recall(const std::string& part, int64_t size) {
  const MutexLock lock(mutex_);
  const auto found = sums_.find(part);
  if (found == sums_.end()) {
    return std::nullopt;
  }
  const PartSum sum = found->second;
  sums_.erase(found);
  return sum.size == size ? std::optional<uint32_t>(sum.crc32c) : std::nullopt;
}

int64_t DiskSet::used_bytes() const {
  const MutexLock lock(mutex_);
  return used_;
}

int64_t DiskSet::FreeBytes() const {
  int64_t free = 0;
  for (const auto& disk : disks_) {
    free = std::max(free, FreeOn(*disk) - options_.min_free_bytes);
  }
  const MutexLock lock(mutex_);
  if (options_.quota_bytes > 0) {
    free = std::min(free, options_.quota_bytes - used_ - reserved_);
  }
  return std::max<int64_t>(free, 0);
}

absl::StatusOr<std::unique_ptr<Upload>> DiskSet::BeginUpload(std::string_view path,
                                                             std::string_view upload,
                                                             int64_t offset,
                                                             int64_t expected_bytes) {
  const std::string_view folder = SplitLast(path).first;
  if (DiskOf(path) >= 0) {
    return absl::AlreadyExistsError(absl::StrCat("create ", std::string(path), ": File exists"));
  }
  const int disk = folder.empty() ? EmptiestDisk() : DiskOf(folder);
  if (disk < 0) {
    return absl::NotFoundError(
        absl::StrCat("create ", std::string(path), ": No such file or directory"));
  }
  const FileStore& files = *At(disks_, disk);
  const int64_t free = FreeOn(files) - options_.min_free_bytes;
  if (free <= std::max<int64_t>(expected_bytes - offset, 0)) {
    return absl::ResourceExhaustedError(absl::StrCat("create ",
                                                     std::string(path),
                                                     ": No space left on device: ",
                                                     expected_bytes,
                                                     " bytes are needed, ",
                                                     std::max<int64_t>(free, 0),
                                                     " are free"));
  }
  const std::string full = files.Locate(path);
  std::unique_ptr<Upload> made(new Upload(this, PartName(full, upload), full));
  RETURN_IF_ERROR(made->Open(offset, expected_bytes));
  return made;
}

absl::StatusOr<int64_t> DiskSet::WrittenOf(std::string_view path, std::string_view upload) const {
  for (const auto& disk : disks_) {
    const int64_t bytes = FileBytes(PartName(disk->Locate(path), upload));
    if (bytes > 0) {
      return bytes;
    }
  }
  return 0;
}

absl::StatusOr<std::unique_ptr<store::FileReader>> DiskSet::OpenFile(std::string_view path) const {
  const int disk = DiskOf(path);
  return At(disks_, std::max(disk, 0))->Open(path);
}

absl::StatusOr<uint32_t> DiskSet::ChecksumOf(std::string_view path) const {
  ASSIGN_OR_RETURN(const auto reader, OpenFile(path));
  return CrcOfFile(*reader, reader->size());
}

absl::StatusOr<FileFacts> DiskSet::Stat(std::string_view path) const {
  const FileStore& disk = *At(disks_, std::max(DiskOf(path), 0));
  struct stat status = {};
  const std::string full = disk.Locate(path);
  if (::stat(full.c_str(), &status) != 0) {
    return Error("stat", full);
  }
  FileFacts facts;
  facts.is_folder = S_ISDIR(status.st_mode);
  facts.size = facts.is_folder ? 0 : status.st_size;
  ASSIGN_OR_RETURN(facts.changed_ms, disk.ChangedMs(path));
  return facts;
}

absl::StatusOr<std::vector<ListedEntry>> DiskSet::List(std::string_view path) const {
  std::map<std::string, ListedEntry> all;
  absl::Status missing;
  bool found = false;
  for (const auto& disk : disks_) {
    absl::StatusOr<std::vector<ListedEntry>> entries = disk->List(path);
    if (absl::IsNotFound(entries.status())) {
      missing = entries.status();
      continue;
    }
    RETURN_IF_ERROR(entries.status());
    found = true;
    for (ListedEntry& entry : *entries) {
      all.emplace(entry.name, std::move(entry));
    }
  }
  if (!found) {
    return missing;
  }
  std::vector<ListedEntry> entries;
  for (auto& [name, entry] : all) {
    entries.push_back(std::move(entry));
  }
  return entries;
}

absl::Status DiskSet::MakeFolder(std::string_view path, bool parents) {
  const MutexLock lock(names_);
  const int there = DiskOf(path);
  if (there >= 0) {
    return At(disks_, there)->MakeDirectory(path);  // durable, whoever made it
  }
  const std::string_view parent = SplitLast(path).first;
  if (!parents && !parent.empty() && DiskOf(parent) < 0) {
    return absl::NotFoundError(
        absl::StrCat("mkdir ", std::string(path), ": No such file or directory"));
  }
  return store::MakeDirectories(*At(disks_, DiskForFolder(path)), path);
}

absl::Status DiskSet::Publish(std::string_view from, std::string_view to) {
  const MutexLock lock(names_);
  const int disk = DiskOf(from);
  const int taken = DiskOf(to);
  const std::string_view parent = SplitLast(to).first;
  if (disk < 0 || taken >= 0 || (!parent.empty() && DiskOf(parent) < 0)) {
    // Nothing changes; the disk makes durable what is there, and says why.
    const absl::Status why =
        At(disks_, std::max(taken >= 0 ? taken : disk, 0))->PublishIfAbsent(from, to);
    return disk >= 0 && taken >= 0 && absl::IsNotFound(why)
               ? absl::AlreadyExistsError(
                     absl::StrCat("publish ", std::string(to), ": File exists"))
               : why;
  }
  FileStore& files = *At(disks_, disk);
  if (!parent.empty()) {
    RETURN_IF_ERROR(store::MakeDirectories(files, parent));
  }
  RETURN_IF_ERROR(FaultPoint("store.publish"));
  return files.PublishIfAbsent(from, to);
}

absl::Status DiskSet::Withdraw(std::string_view path) {
  absl::Status missing = absl::NotFoundError(
      absl::StrCat("withdraw ", std::string(path), ": No such file or directory"));
  bool found = false;
  for (const auto& disk : disks_) {
    const std::string full = disk->Locate(path);
    const int64_t before = TreeBytes(full);
    const absl::Status removed = disk->Withdraw(path);
    if (absl::IsNotFound(removed)) {
      continue;
    }
    AddUsed(TreeBytes(full) - before, 0);
    RETURN_IF_ERROR(removed);
    found = true;
  }
  return found ? absl::OkStatus() : missing;
}

int64_t DiskSet::RemoveOldParts(int64_t now_ms, int64_t age_ms) {
  int64_t removed = 0;
  for (const auto& disk : disks_) {
    std::error_code error;
    for (auto at = std::filesystem::recursive_directory_iterator(disk->root(), error);
         !error && at != std::filesystem::recursive_directory_iterator();
         at.increment(error)) {
      const std::string path = at->path().string();
      struct stat status = {};
      if (!absl::EndsWith(path, std::string(kPart)) || ::lstat(path.c_str(), &status) != 0 ||
          !S_ISREG(status.st_mode) ||
          static_cast<int64_t>(status.st_mtim.tv_sec) * 1000 > now_ms - age_ms) {
        continue;
      }
      if (::unlink(path.c_str()) == 0) {
        removed += status.st_size;
      }
    }
  }
  AddUsed(-removed, 0);
  return removed;
}

}  // namespace ravel::store_server
