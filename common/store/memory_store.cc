// ObjectStore in memory, for tests of crashes. Each node has its present and its durable content; a
// power loss drops the difference, either of data only or of names as well, which are the two ways
// real file systems behave. Changing operations are counted, and one chosen operation, or all from
// it on, can be made to fail: a test runs its scenario once for each count.

#include "common/store/memory_store.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>

#include "common/check.h"
#include "common/signed_size.h"

namespace ravel::store {

struct MemoryStore::Node {
  bool is_directory = false;
  std::string data;
  std::string durable_data;
  std::map<std::string, std::shared_ptr<Node>, std::less<>> entries;
  std::map<std::string, std::shared_ptr<Node>, std::less<>> durable_entries;
};

namespace {

constexpr std::string_view kPart = ".part";

void LoseVolatile(MemoryStore::Node& node, MemoryStore::PowerLoss kind) {
  node.data = node.durable_data;
  if (kind == MemoryStore::PowerLoss::kDurableOnly) {
    node.entries = node.durable_entries;
  } else {
    node.durable_entries = node.entries;
  }
  for (const auto& [name, child] : node.entries) {
    LoseVolatile(*child, kind);
  }
}

class MemoryReader : public FileReader {
 public:
  MemoryReader(std::string data, std::string path)
      : data_(std::move(data)), path_(std::move(path)) {}
  int64_t size() const override { return static_cast<int64_t>(data_.size()); }
  absl::Status ReadAt(int64_t offset, std::span<std::byte> out) const override {
    if (offset < 0 || offset + static_cast<int64_t>(out.size()) > size()) {
      return absl::DataLossError(absl::StrCat(path_, ": truncated: ends at byte ", size()));
    }
    std::memcpy(out.data(), data_.data() + offset, out.size());
    return absl::OkStatus();
  }

 private:
  std::string data_;
  std::string path_;
};

}  // namespace

class MemoryFileWriter : public FileWriter {
 public:
  MemoryFileWriter(MemoryStore* store,
                   std::shared_ptr<MemoryStore::Node> node,
                   std::string part,
                   std::string path)
      : store_(store), node_(std::move(node)), part_(std::move(part)), path_(std::move(path)) {}
  ~MemoryFileWriter() override {
    const MutexLock lock(store_->mutex_);
    if (!finished_) {
      store_->RemoveTree(part_).IgnoreError();
    }
  }

  absl::Status Append(std::span<const std::byte> bytes) override {
    const MutexLock lock(store_->mutex_);
    RETURN_IF_ERROR(store_->Count());
    const auto added = static_cast<int64_t>(bytes.size());
    if (added > store_->capacity_ - store_->used_) {
      return absl::ResourceExhaustedError(
          absl::StrCat("write ", store_->Locate(path_), ": no space left"));
    }
    store_->used_ += added;
    node_->data.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    return absl::OkStatus();
  }
  absl::Status Finish() override {
    const MutexLock lock(store_->mutex_);
    RETURN_IF_ERROR(store_->Count());
    node_->durable_data = node_->data;
    RETURN_IF_ERROR(store_->Rename(part_, path_));
    finished_ = true;
    return store_->Sync(SplitLast(path_).first);
  }

 private:
  MemoryStore* store_;
  std::shared_ptr<MemoryStore::Node>
      node_;  // shared: the file may be renamed or removed while it is written
  std::string part_;
  std::string path_;
  bool finished_ = false;
};

MemoryStore::MemoryStore() : root_(std::make_shared<Node>()) {
  const MutexLock lock(mutex_);
  root_->is_directory = true;
}
MemoryStore::~MemoryStore() = default;

std::string MemoryStore::Locate(std::string_view path) const {
  return absl::StrCat("memory:/", std::string(path));
}

absl::Status MemoryStore::Count() {
  const int64_t operation = operations_++;
  const bool fails = (fail_from_ >= 0 && operation >= fail_from_) || operation == fail_once_;
  return fails ? failure_ : absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<MemoryStore::Node>> MemoryStore::Find(std::string_view path) const {
  std::shared_ptr<Node> node = root_;
  while (!path.empty()) {
    const size_t slash = std::min(path.find('/'), path.size());
    const auto found = node->entries.find(path.substr(0, slash));
    if (found == node->entries.end()) {
      return absl::NotFoundError(absl::StrCat(std::string(path), ": No such file or directory"));
    }
    node = found->second;
    path.remove_prefix(std::min(slash + 1, path.size()));
  }
  return node;
}

absl::StatusOr<std::unique_ptr<FileWriter>> MemoryStore::Create(std::string_view path,
                                                                int64_t expected_bytes) {
  const MutexLock lock(mutex_);
  RETURN_IF_ERROR(Count());
  const auto [parent, name] = SplitLast(path);
  ASSIGN_OR_RETURN(const std::shared_ptr<Node> directory, Find(parent));
  if (expected_bytes > capacity_ - used_) {
    return absl::ResourceExhaustedError(absl::StrCat("create ", Locate(path), ": no space left"));
  }
  if (directory->entries.contains(name)) {
    return absl::AlreadyExistsError(absl::StrCat("create ", Locate(path), ": File exists"));
  }
  const std::string part = absl::StrCat(std::string(path), ".", ++parts_, std::string(kPart));
  const std::shared_ptr<Node> node = std::make_shared<Node>();
  directory->entries.emplace(std::string(SplitLast(part).second), node);
  return std::make_unique<MemoryFileWriter>(this, node, part, std::string(path));
}

absl::StatusOr<std::unique_ptr<FileReader>> MemoryStore::Open(std::string_view path) const {
  const MutexLock lock(mutex_);
  ASSIGN_OR_RETURN(const std::shared_ptr<Node> node, Find(path));
  if (node->is_directory) {
    return absl::FailedPreconditionError(absl::StrCat(Locate(path), ": not a regular file"));
  }
  return std::make_unique<MemoryReader>(node->data, Locate(path));
}

absl::StatusOr<std::vector<ListedEntry>> MemoryStore::List(std::string_view directory) const {
  const MutexLock lock(mutex_);
  ASSIGN_OR_RETURN(const std::shared_ptr<Node> node, Find(directory));
  if (!node->is_directory) {
    return absl::FailedPreconditionError(absl::StrCat(Locate(directory), ": not a directory"));
  }
  std::vector<ListedEntry> entries;
  for (const auto& [name, child] : node->entries) {
    if (!child->is_directory && absl::EndsWith(name, std::string(kPart))) {
      continue;
    }
    entries.push_back({name, child->is_directory, static_cast<int64_t>(child->data.size())});
  }
  return entries;
}

absl::Status MemoryStore::MakeDirectory(std::string_view path) {
  const MutexLock lock(mutex_);
  RETURN_IF_ERROR(Count());
  const auto [parent, name] = SplitLast(path);
  ASSIGN_OR_RETURN(const std::shared_ptr<Node> directory, Find(parent));
  const auto [at, added] = directory->entries.emplace(std::string(name), nullptr);
  if (added) {
    at->second = std::make_shared<Node>();
    at->second->is_directory = true;
  }
  return Sync(parent);
}

absl::Status MemoryStore::Rename(std::string_view from, std::string_view to) {
  RETURN_IF_ERROR(Count());
  if (Find(to).ok()) {
    return absl::AlreadyExistsError(
        absl::StrCat("rename ", Locate(from), " to ", Locate(to), ": File exists"));
  }
  ASSIGN_OR_RETURN(std::shared_ptr<Node> node, Find(from));
  const auto [from_parent, from_name] = SplitLast(from);
  const auto [to_parent, to_name] = SplitLast(to);
  ASSIGN_OR_RETURN(const std::shared_ptr<Node> source, Find(from_parent));
  ASSIGN_OR_RETURN(const std::shared_ptr<Node> target, Find(to_parent));
  source->entries.erase(source->entries.find(from_name));
  target->entries.emplace(std::string(to_name), std::move(node));
  return absl::OkStatus();
}

absl::Status MemoryStore::Sync(std::string_view folder) {
  RETURN_IF_ERROR(Count());
  ASSIGN_OR_RETURN(const std::shared_ptr<Node> node, Find(folder));
  node->durable_entries = node->entries;
  return absl::OkStatus();
}

absl::Status MemoryStore::RemoveTree(std::string_view path) {
  ASSIGN_OR_RETURN(const std::shared_ptr<Node> node, Find(path));
  std::vector<std::string> names;
  for (const auto& [name, child] : node->entries) {
    names.push_back(name);
  }
  for (const std::string& name : names) {
    RETURN_IF_ERROR(RemoveTree(JoinPath(path, name)));
  }
  RETURN_IF_ERROR(Count());
  const auto [parent, name] = SplitLast(path);
  ASSIGN_OR_RETURN(const std::shared_ptr<Node> directory, Find(parent));
  directory->entries.erase(directory->entries.find(name));
  used_ -= static_cast<int64_t>(node->data.size());
  return absl::OkStatus();
}

absl::Status MemoryStore::PublishIfAbsent(std::string_view from, std::string_view to) {
  const MutexLock lock(mutex_);
  const absl::StatusOr<std::shared_ptr<Node>> source = Find(from);
  if (source.ok() && (*source)->is_directory) {
    std::erase_if((*source)->entries, [](const auto& entry) {
      return !entry.second->is_directory && absl::EndsWith(entry.first, std::string(kPart));
    });
    RETURN_IF_ERROR(Sync(from));
  }
  const absl::Status renamed = Rename(from, to);
  if (!renamed.ok() && !absl::IsAlreadyExists(renamed) && !absl::IsNotFound(renamed)) {
    return renamed;
  }
  const std::string_view target = SplitLast(to).first;
  const absl::Status synced = Sync(target);
  if (!synced.ok() && !absl::IsNotFound(synced)) {
    return synced;
  }
  RETURN_IF_ERROR(renamed);
  return SplitLast(from).first == target ? absl::OkStatus() : Sync(SplitLast(from).first);
}

absl::Status MemoryStore::Withdraw(std::string_view path) {
  const MutexLock lock(mutex_);
  RETURN_IF_ERROR(RemoveTree(path));
  return Sync(SplitLast(path).first);
}

void MemoryStore::LosePower(PowerLoss kind) {
  const MutexLock lock(mutex_);
  fail_from_ = -1;
  fail_once_ = -1;
  LoseVolatile(*root_, kind);
}

int64_t MemoryStore::operations() const {
  const MutexLock lock(mutex_);
  return operations_;
}

void MemoryStore::FailFrom(int64_t operation, absl::Status status) {
  const MutexLock lock(mutex_);
  fail_from_ = operation;
  failure_ = std::move(status);
}

void MemoryStore::FailOnce(int64_t operation, absl::Status status) {
  const MutexLock lock(mutex_);
  fail_once_ = operation;
  failure_ = std::move(status);
}

void MemoryStore::SetCapacity(int64_t bytes) {
  const MutexLock lock(mutex_);
  capacity_ = bytes;
}

absl::Status MemoryStore::FlipBit(std::string_view path, int64_t byte, int bit) {
  const MutexLock lock(mutex_);
  ASSIGN_OR_RETURN(const std::shared_ptr<Node> node, Find(path));
  CHECK(byte >= 0 && Size(byte) < node->data.size());
  char& target = At(node->data, byte);
  target = static_cast<char>(static_cast<unsigned char>(target) ^ (1u << bit));
  return absl::OkStatus();
}

absl::Status MemoryStore::Truncate(std::string_view path, int64_t size) {
  const MutexLock lock(mutex_);
  ASSIGN_OR_RETURN(const std::shared_ptr<Node> node, Find(path));
  node->data.resize(Size(size));
  return absl::OkStatus();
}

absl::Status MemoryStore::Overwrite(std::string_view path, std::string_view contents) {
  const MutexLock lock(mutex_);
  ASSIGN_OR_RETURN(const std::shared_ptr<Node> node, Find(path));
  node->data = std::string(contents);
  return absl::OkStatus();
}

}  // namespace ravel::store
