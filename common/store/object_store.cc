#include "common/store/object_store.h"

#include <algorithm>
#include <utility>

#include <absl/strings/str_cat.h>

#include "common/signed_size.h"

namespace ravel::store {

std::string JoinPath(std::string_view a, std::string_view b) {
  if (a.empty() || b.empty()) {
    return std::string(a.empty() ? b : a);
  }
  return absl::StrCat(std::string(a), "/", std::string(b));
}

std::pair<std::string_view, std::string_view> SplitLast(std::string_view path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string_view::npos) {
    return {"", path};
  }
  return {path.substr(0, slash), path.substr(slash + 1)};
}

absl::Status ObjectStore::Put(std::string_view path, std::string_view contents) {
  ASSIGN_OR_RETURN(const std::unique_ptr<FileWriter> writer,
                   Create(path, static_cast<int64_t>(contents.size())));
  RETURN_IF_ERROR(writer->Append(std::as_bytes(std::span(contents.data(), contents.size()))));
  return writer->Finish();
}

absl::StatusOr<bool> Exists(const ObjectStore& store, std::string_view path) {
  const auto [parent, name] = SplitLast(path);
  const absl::StatusOr<std::vector<ListedEntry>> entries = store.List(parent);
  if (absl::IsNotFound(entries.status())) {
    return false;
  }
  RETURN_IF_ERROR(entries.status());
  for (const ListedEntry& entry : *entries) {
    if (entry.name == name) {
      return true;
    }
  }
  return false;
}

absl::StatusOr<std::string> ReadFile(const ObjectStore& store,
                                     std::string_view path,
                                     int64_t max_bytes) {
  ASSIGN_OR_RETURN(const std::unique_ptr<FileReader> reader, store.Open(path));
  if (reader->size() > max_bytes) {
    return absl::DataLossError(absl::StrCat(
        store.Locate(path), ": ", reader->size(), " bytes, expected at most ", max_bytes));
  }
  std::string contents(Size(reader->size()), '\0');
  RETURN_IF_ERROR(
      reader->ReadAt(0, std::as_writable_bytes(std::span(contents.data(), contents.size()))));
  return contents;
}

absl::Status WithdrawIfThere(ObjectStore& store, std::string_view path) {
  const absl::Status withdrawn = store.Withdraw(path);
  return absl::IsNotFound(withdrawn) ? absl::OkStatus() : withdrawn;
}

absl::Status MakeDirectories(ObjectStore& store, std::string_view directory) {
  for (size_t end = 0; end < directory.size();) {
    end = std::min(directory.find('/', end), directory.size());
    RETURN_IF_ERROR(store.MakeDirectory(directory.substr(0, end)));
    ++end;
  }
  return absl::OkStatus();
}

}  // namespace ravel::store
