#include "worker/store/disk_set.h"

#include <algorithm>
#include <cerrno>
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

#include "common/fault_point.h"
#include "common/signed_size.h"

namespace ravel::store_server {
namespace {

using store::FileStore;
using store::JoinPath;
using store::ListedEntry;
using store::SplitLast;

constexpr size_t kMaxPathBytes = 1024;
constexpr size_t kMaxNameBytes = 255 - 22;  // ".<upload>.part" fits behind it
constexpr size_t kMaxDepth = 16;
constexpr int64_t kSmallBytes = 16 << 20;

absl::Status Error(std::string_view what, const std::string& path) {
  return ErrnoStatus(errno, absl::StrCat(std::string(what), " ", path));
}

size_t DepthOf(std::string_view path) {
  return path.empty() ? 0 : Size(std::count(path.begin(), path.end(), '/') + 1);
}

std::string PartName(const std::string& file, std::string_view upload) {
  return absl::StrCat(file, ".", std::string(upload), std::string(kPartEnding));
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
    if (absl::EndsWith(name, std::string(kPartEnding))) {
      return refuse("no name that ends in .part");
    }
  }
  return absl::OkStatus();
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
    disks->disks_.push_back(std::make_unique<FileStore>(
        folder, [book = &disks->book_](const std::string& path) { return book->Unlink(path); }));
    used += TreeBytes(folder);
  }
  if (disks->disks_.empty()) {
    return absl::InvalidArgumentError("--data: expected at least one folder");
  }
  disks->book_.Add(used, 0);
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

int64_t DiskSet::FreeBytes() const {
  int64_t free = 0;
  for (const auto& disk : disks_) {
    free = std::max(free, FreeOn(*disk) - options_.min_free_bytes);
  }
  free = std::min(free, book_.LeftBytes());
  return std::max<int64_t>(free, 0);
}

// Small files end what was begun: manifest.pb and COMMIT a save whose bytes are all there.
int64_t DiskSet::RoomFor(int64_t bytes, const FileStore& disk) const {
  const int64_t kept = options_.min_free_bytes;
  return FreeOn(disk) - (bytes <= kSmallBytes ? kept / 2 : kept);
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
  const int64_t room = RoomFor(expected_bytes, files);
  // An empty file needs none: DELETED begins the removal of a step, which makes room.
  if (expected_bytes > 0 && room <= std::max<int64_t>(expected_bytes - offset, 0)) {
    return absl::ResourceExhaustedError(absl::StrCat("create ",
                                                     std::string(path),
                                                     ": No space left on device: ",
                                                     expected_bytes,
                                                     " bytes are needed, ",
                                                     std::max<int64_t>(room, 0),
                                                     " are free"));
  }
  const std::string full = files.Locate(path);
  return Upload::Open(&book_, PartName(full, upload), full, offset, expected_bytes);
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
  return ChecksumOfFile(*reader, reader->size());
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
    const absl::Status removed = disk->Withdraw(path);
    if (absl::IsNotFound(removed)) {
      continue;
    }
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
      if (!absl::EndsWith(path, std::string(kPartEnding)) || ::lstat(path.c_str(), &status) != 0 ||
          !S_ISREG(status.st_mode) ||
          static_cast<int64_t>(status.st_mtim.tv_sec) * 1000 > now_ms - age_ms) {
        continue;
      }
      if (book_.Unlink(path) == 0) {
        removed += status.st_size;
      }
    }
  }
  return removed;
}

}  // namespace ravel::store_server
