#include "common/store/blob_tree.h"

#include <algorithm>
#include <random>
#include <set>
#include <utility>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>

#include "common/check.h"
#include "common/signed_size.h"

namespace ravel::store {
namespace {

constexpr std::string_view kLinksFolder = ".links";
constexpr int64_t kMaxLinkBytes = 1024;
constexpr int64_t kMaxMovedBytes = 16 << 20;

class BlobReader : public FileReader {
 public:
  BlobReader(const BlobStore* blobs, BlobFacts facts) : blobs_(blobs), facts_(std::move(facts)) {}
  int64_t size() const override { return facts_.size; }
  absl::Status ReadAt(int64_t offset, std::span<std::byte> out) const override {
    if (offset < 0 || offset > facts_.size || Size(facts_.size - offset) < out.size()) {
      return absl::DataLossError(
          absl::StrCat(blobs_->Locate(facts_.key), ": truncated: ends at byte ", facts_.size));
    }
    return out.empty() ? absl::OkStatus() : blobs_->ReadAt(facts_, offset, out);
  }

 private:
  const BlobStore* blobs_;
  const BlobFacts facts_;
};

bool IsBelow(std::string_view path, std::string_view folder) {
  return path.size() > folder.size() && path.starts_with(folder) && path[folder.size()] == '/';
}

absl::Status Missing(std::string_view what, const std::string& where) {
  return absl::NotFoundError(
      absl::StrCat(std::string(what), " ", where, ": No such file or directory"));
}

absl::Status Taken(std::string_view what, const std::string& where) {
  return absl::AlreadyExistsError(absl::StrCat(std::string(what), " ", where, ": File exists"));
}

absl::StatusOr<std::string> ReadBlob(const BlobStore& blobs,
                                     const BlobFacts& facts,
                                     int64_t max_bytes) {
  if (facts.size > max_bytes) {
    return absl::FailedPreconditionError(absl::StrCat(
        blobs.Locate(facts.key), ": ", facts.size, " bytes, expected at most ", max_bytes));
  }
  std::string content(Size(facts.size), '\0');
  if (!content.empty()) {
    RETURN_IF_ERROR(
        blobs.ReadAt(facts, 0, std::as_writable_bytes(std::span(content.data(), content.size()))));
  }
  return content;
}

}  // namespace

BlobTree::BlobTree(std::unique_ptr<BlobStore> blobs, std::string prefix)
    : blobs_(std::move(blobs)), prefix_(std::move(prefix)) {}

std::string BlobTree::Locate(std::string_view path) const {
  return blobs_->Locate(Key(path));
}

// Names hold no '~': see step_layout.
std::string BlobTree::LinkKey(std::string_view name) const {
  std::string escaped(name);
  std::replace(escaped.begin(), escaped.end(), '/', '~');
  return Key(JoinPath(kLinksFolder, escaped));
}

absl::StatusOr<BlobTree::Links> BlobTree::LoadLinks() const {
  const std::string folder = Key(kLinksFolder) + "/";
  ASSIGN_OR_RETURN(const BlobListing listing, blobs_->List(folder, BlobStore::Depth::kAll));
  Links links;
  for (const BlobFacts& blob : listing.blobs) {
    std::string name = blob.key.substr(folder.size());
    std::replace(name.begin(), name.end(), '~', '/');
    {
      const MutexLock lock(mutex_);
      const auto read = read_links_.find(blob.key);
      if (read != read_links_.end() && read->second.first == blob.version) {
        links[name] = read->second.second;
        continue;
      }
    }
    const absl::StatusOr<std::string> target = ReadBlob(*blobs_, blob, kMaxLinkBytes);
    if (absl::IsNotFound(target.status())) {
      continue;  // removed meanwhile
    }
    RETURN_IF_ERROR(target.status());
    links[name] = *target;
    const MutexLock lock(mutex_);
    read_links_[blob.key] = {blob.version, *target};
  }
  return links;
}

absl::StatusOr<std::string> BlobTree::Resolve(const Links& links, std::string_view path) const {
  for (std::string_view at = path; !at.empty(); at = SplitLast(at).first) {
    const auto link = links.find(std::string(at));
    if (link != links.end()) {
      return absl::StrCat(link->second, std::string(path.substr(at.size())));
    }
  }
  for (const auto& [name, target] : links) {
    if (path == target || IsBelow(path, target)) {
      return Missing("open", Locate(path));
    }
  }
  return std::string(path);
}

absl::StatusOr<bool> BlobTree::IsFolder(const Links& links, std::string_view path) const {
  if (path.empty() || links.contains(std::string(path))) {
    return true;
  }
  const absl::StatusOr<std::string> place = Resolve(links, path);
  if (absl::IsNotFound(place.status())) {
    return false;
  }
  RETURN_IF_ERROR(place.status());
  ASSIGN_OR_RETURN(const BlobListing below,
                   blobs_->List(Key(*place) + "/", BlobStore::Depth::kOneLevel));
  return !below.blobs.empty() || !below.prefixes.empty();
}

absl::Status BlobTree::CheckParent(const Links& links, std::string_view path) const {
  ASSIGN_OR_RETURN(const bool there, IsFolder(links, SplitLast(path).first));
  return there ? absl::OkStatus() : Missing("create", Locate(path));
}

absl::Status BlobTree::ProbeWritable() const {
  std::random_device random;
  const std::string key = Key(absl::StrFormat(".probe-%08x%08x", random(), random()));
  RETURN_IF_ERROR(blobs_->PutIfAbsent(key, "1"));
  const absl::Status second = blobs_->PutIfAbsent(key, "2");
  RETURN_IF_ERROR(blobs_->Delete(key));
  if (absl::IsAlreadyExists(second)) {
    return absl::OkStatus();
  }
  RETURN_IF_ERROR(second);
  return absl::FailedPreconditionError(absl::StrCat(
      Locate(""),
      ": the store replaces objects in spite of If-None-Match: two commits could both win"));
}

absl::Status BlobTree::MakeRoot() {
  return ProbeWritable();
}

absl::StatusOr<std::unique_ptr<FileWriter>> BlobTree::Create(std::string_view path,
                                                             int64_t expected_bytes) {
  ASSIGN_OR_RETURN(const Links links, LoadLinks());
  RETURN_IF_ERROR(CheckParent(links, path));
  ASSIGN_OR_RETURN(const std::string place, Resolve(links, path));
  const absl::Status there = blobs_->Head(Key(place)).status();
  if (there.ok()) {
    return Taken("create", Locate(path));
  }
  if (!absl::IsNotFound(there)) {
    return there;
  }
  return blobs_->Write(Key(place), expected_bytes);
}

absl::Status BlobTree::Put(std::string_view path, std::string_view contents) {
  ASSIGN_OR_RETURN(const Links links, LoadLinks());
  RETURN_IF_ERROR(CheckParent(links, path));
  ASSIGN_OR_RETURN(const std::string place, Resolve(links, path));
  return blobs_->PutIfAbsent(Key(place), contents);
}

absl::StatusOr<std::unique_ptr<FileReader>> BlobTree::Open(std::string_view path) const {
  ASSIGN_OR_RETURN(const Links links, LoadLinks());
  ASSIGN_OR_RETURN(const std::string place, Resolve(links, path));
  absl::StatusOr<BlobFacts> facts = blobs_->Head(Key(place));
  if (absl::IsNotFound(facts.status())) {
    ASSIGN_OR_RETURN(const bool folder, IsFolder(links, path));
    return folder
               ? absl::FailedPreconditionError(absl::StrCat(Locate(path), ": not a regular file"))
               : Missing("open", Locate(path));
  }
  RETURN_IF_ERROR(facts.status());
  return std::make_unique<BlobReader>(blobs_.get(), *std::move(facts));
}

absl::StatusOr<std::vector<ListedEntry>> BlobTree::List(std::string_view directory) const {
  ASSIGN_OR_RETURN(const Links links, LoadLinks());
  ASSIGN_OR_RETURN(const std::string place, Resolve(links, directory));
  const std::string prefix = place.empty() && prefix_.empty() ? "" : Key(place) + "/";
  ASSIGN_OR_RETURN(const BlobListing listing, blobs_->List(prefix, BlobStore::Depth::kOneLevel));
  std::set<std::string> hidden = {std::string(kLinksFolder)};
  std::map<std::string, ListedEntry> entries;
  for (const auto& [name, target] : links) {
    const auto [parent, last] = SplitLast(name);
    if (parent == directory) {
      entries[std::string(last)] = {std::string(last), true, 0};
    }
    const auto [target_parent, target_last] = SplitLast(target);
    if (target_parent == place) {
      hidden.insert(std::string(target_last));
    }
  }
  for (const BlobFacts& blob : listing.blobs) {
    const std::string name = blob.key.substr(prefix.size());
    if (!name.empty() && !absl::StartsWith(name, ".probe-")) {
      entries.emplace(name, ListedEntry{name, false, blob.size});
    }
  }
  for (const std::string& below : listing.prefixes) {
    const std::string name = below.substr(prefix.size(), below.size() - prefix.size() - 1);
    if (!hidden.contains(name)) {
      entries.emplace(name, ListedEntry{name, true, 0});
    }
  }
  const bool empty = listing.blobs.empty() && listing.prefixes.empty();
  if (entries.empty() && empty && !directory.empty() && !links.contains(std::string(directory))) {
    return Missing("list", Locate(directory));
  }
  std::vector<ListedEntry> sorted;
  for (auto& [name, entry] : entries) {
    sorted.push_back(std::move(entry));
  }
  return sorted;
}

absl::Status BlobTree::MakeDirectory(std::string_view path) {
  ASSIGN_OR_RETURN(const Links links, LoadLinks());
  if (links.contains(std::string(path))) {
    return absl::OkStatus();
  }
  RETURN_IF_ERROR(CheckParent(links, path));
  ASSIGN_OR_RETURN(const std::string place, Resolve(links, path));
  const absl::Status made = blobs_->PutIfAbsent(Key(place) + "/", "");
  return absl::IsAlreadyExists(made) ? absl::OkStatus() : made;
}

absl::Status BlobTree::CheckNoOtherName(const Links& links,
                                        const std::string& place,
                                        std::string_view from,
                                        std::string_view to) const {
  for (const auto& [name, target] : links) {
    if (target == place && name != from && name != to) {
      return absl::UnavailableError(
          absl::StrCat("publish ", Locate(from), ": it is renamed to ", name, " at the same time"));
    }
  }
  return absl::OkStatus();
}

absl::Status BlobTree::PublishFolder(const Links& links,
                                     std::string_view from,
                                     std::string_view to) {
  ASSIGN_OR_RETURN(const std::string place, Resolve(links, from));
  const bool linked = links.contains(std::string(from));
  if (!linked && place != from) {
    return absl::FailedPreconditionError(
        absl::StrCat("publish ", Locate(from), ": is part of a folder that was published"));
  }
  const auto taken = links.find(std::string(to));
  if (taken == links.end()) {
    ASSIGN_OR_RETURN(const bool there, IsFolder(links, to));
    if (there) {
      return Taken("publish", Locate(to));
    }
    RETURN_IF_ERROR(CheckParent(links, to));
    RETURN_IF_ERROR(blobs_->PutIfAbsent(LinkKey(to), place));
    ASSIGN_OR_RETURN(const Links now, LoadLinks());
    const absl::Status alone = CheckNoOtherName(now, place, from, to);
    if (!alone.ok()) {
      RETURN_IF_ERROR(blobs_->Delete(LinkKey(to)));
      return alone;
    }
  } else if (taken->second != place) {
    return Taken("publish", Locate(to));
  }  // else an earlier call was cut off here
  return linked ? blobs_->Delete(LinkKey(from)) : absl::OkStatus();
}

absl::Status BlobTree::PublishFile(const BlobFacts& from,
                                   std::string_view to_path,
                                   const std::string& to) {
  ASSIGN_OR_RETURN(const std::string content, ReadBlob(*blobs_, from, kMaxMovedBytes));
  const absl::Status put = blobs_->PutIfAbsent(Key(to), content);
  if (absl::IsAlreadyExists(put)) {
    // The same content: an earlier call was cut off before it removed `from`.
    ASSIGN_OR_RETURN(const BlobFacts there, blobs_->Head(Key(to)));
    const absl::StatusOr<std::string> found = ReadBlob(*blobs_, there, kMaxMovedBytes);
    if (!found.ok() || *found != content) {
      return Taken("publish", Locate(to_path));
    }
  } else {
    RETURN_IF_ERROR(put);
  }
  return blobs_->Delete(from.key);
}

absl::Status BlobTree::PublishIfAbsent(std::string_view from, std::string_view to) {
  ASSIGN_OR_RETURN(const Links links, LoadLinks());
  ASSIGN_OR_RETURN(const bool folder, IsFolder(links, from));
  if (folder) {
    return PublishFolder(links, from, to);
  }
  const auto published = links.find(std::string(to));
  if (published != links.end() && published->second == from) {  // before it was cut off, perhaps
    RETURN_IF_ERROR(CheckNoOtherName(links, published->second, from, to));
  }
  ASSIGN_OR_RETURN(const std::string place, Resolve(links, from));
  const absl::StatusOr<BlobFacts> facts = blobs_->Head(Key(place));
  if (absl::IsNotFound(facts.status())) {
    return Missing("publish", Locate(from));
  }
  RETURN_IF_ERROR(facts.status());
  RETURN_IF_ERROR(CheckParent(links, to));
  ASSIGN_OR_RETURN(const bool taken, IsFolder(links, to));
  if (taken) {
    return Taken("publish", Locate(to));
  }
  ASSIGN_OR_RETURN(const std::string target, Resolve(links, to));
  return PublishFile(*facts, to, target);
}

absl::Status BlobTree::DeleteAll(const std::string& place) {
  const std::string prefix = Key(place) + "/";
  RETURN_IF_ERROR(blobs_->DropUnfinished(prefix));
  ASSIGN_OR_RETURN(const BlobListing listing, blobs_->List(prefix, BlobStore::Depth::kAll));
  std::vector<std::string> markers;
  for (const BlobFacts& blob : listing.blobs) {
    if (absl::EndsWith(blob.key, "/")) {
      markers.push_back(blob.key);
      continue;
    }
    RETURN_IF_ERROR(blobs_->Delete(blob.key));
  }
  for (auto marker = markers.rbegin(); marker != markers.rend(); ++marker) {
    RETURN_IF_ERROR(blobs_->Delete(*marker));
  }
  return absl::OkStatus();
}

absl::Status BlobTree::Withdraw(std::string_view path) {
  ASSIGN_OR_RETURN(const Links links, LoadLinks());
  ASSIGN_OR_RETURN(const bool folder, IsFolder(links, path));
  if (!folder) {
    ASSIGN_OR_RETURN(const std::string place, Resolve(links, path));
    RETURN_IF_ERROR(blobs_->Head(Key(place)).status());
    return blobs_->Delete(Key(place));
  }
  // Links that were published into it go first, then its own blobs, and its name last.
  for (const auto& [name, target] : links) {
    if (IsBelow(name, path)) {
      RETURN_IF_ERROR(DeleteAll(target));
      RETURN_IF_ERROR(blobs_->Delete(LinkKey(name)));
    }
  }
  ASSIGN_OR_RETURN(const std::string place, Resolve(links, path));
  if (!links.contains(std::string(path))) {
    return DeleteAll(place);
  }
  const bool is_only_name = CheckNoOtherName(links, place, path, path).ok();
  RETURN_IF_ERROR(is_only_name ? DeleteAll(place) : absl::OkStatus());
  return blobs_->Delete(LinkKey(path));
}

absl::StatusOr<int64_t> BlobTree::ChangedMs(std::string_view path) const {
  ASSIGN_OR_RETURN(const Links links, LoadLinks());
  ASSIGN_OR_RETURN(const std::string place, Resolve(links, path));
  ASSIGN_OR_RETURN(const BlobListing listing, blobs_->List(Key(place), BlobStore::Depth::kAll));
  int64_t changed_ms = 0;
  for (const BlobFacts& blob : listing.blobs) {
    if (blob.key == Key(place) || absl::StartsWith(blob.key, Key(place) + "/")) {
      changed_ms = std::max(changed_ms, blob.changed_ms);
    }
  }
  return changed_ms > 0 ? absl::StatusOr<int64_t>(changed_ms)
                        : absl::UnimplementedError(Locate(path));
}

}  // namespace ravel::store
