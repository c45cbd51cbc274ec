#include "coordinator/access/namespace_roots.h"

#include <algorithm>
#include <set>
#include <utility>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <absl/strings/str_split.h>

#include "common/file_writer.h"
#include "common/logging.h"
#include "common/yaml.h"

namespace ravel::coordinator {
namespace {

constexpr char kOthers[] = "*";

absl::Status Fault(const yaml::Position& position, const std::string& message) {
  return absl::InvalidArgumentError(
      absl::StrCat(position.line, ":", position.column, ": ", message));
}

// The text of a store's URL without trailing slashes; parts that a store might read otherwise than
// this comparison are refused.
absl::StatusOr<std::string> PlainUrl(std::string_view url) {
  std::string plain(url);
  const size_t host = plain.find("://") + 3;
  while (plain.size() > host && plain.back() == '/') {
    plain.pop_back();
  }
  const std::vector<std::string> parts = absl::StrSplit(plain.substr(host), '/');
  const bool bad = std::any_of(parts.begin(), parts.end(), [](const std::string& part) {
    return part.empty() || part == "." || part == ".." || absl::StrContains(part, "%") ||
           absl::StrContains(part, "?") || absl::StrContains(part, "#") ||
           absl::StrContains(part, "\\");
  });
  if (bad) {
    return absl::InvalidArgumentError(absl::StrCat(
        "expected a URL of names between single slashes, got '", std::string(url), "'"));
  }
  return plain;
}

absl::StatusOr<std::string> PlainPlace(std::string_view text) {
  return IsServiceUrl(text) ? PlainUrl(text) : PlainPath(text);
}

absl::StatusOr<std::vector<std::string>> ParseRoots(const yaml::Node& list) {
  if (list.kind != yaml::NodeKind::kSequence) {
    return Fault(list.position, absl::StrCat("expected a list of paths, got ", list.KindName()));
  }
  std::vector<std::string> roots;
  for (const yaml::Node& element : list.elements) {
    const absl::StatusOr<std::string> root =
        element.kind == yaml::NodeKind::kScalar
            ? PlainPlace(element.text)
            : absl::InvalidArgumentError(absl::StrCat("expected a path, got ", element.KindName()));
    if (!root.ok()) {
      return Fault(element.position, std::string(root.status().message()));
    }
    roots.push_back(*root);
  }
  return roots;
}

absl::StatusOr<RootFolders> ParseNamespace(const yaml::Node& node) {
  if (node.kind != yaml::NodeKind::kMapping) {
    return Fault(node.position, absl::StrCat("expected read and write, got ", node.KindName()));
  }
  RootFolders folders;
  std::set<std::string> seen;
  for (const yaml::Entry& entry : node.entries) {
    if ((entry.name != "read" && entry.name != "write") || !seen.insert(entry.name).second) {
      return Fault(entry.position,
                   absl::StrCat("expected read and write, each once, got ", entry.name));
    }
    ASSIGN_OR_RETURN((entry.name == "read" ? folders.read : folders.write),
                     ParseRoots(entry.value));
  }
  return folders;
}

}  // namespace

absl::StatusOr<NamespaceRoots> NamespaceRoots::Parse(std::string_view text) {
  yaml::ParseError error;
  ASSIGN_OR_RETURN(const yaml::Node root, yaml::Parse(text, &error));
  if (root.kind != yaml::NodeKind::kMapping || root.entries.size() != 1 ||
      root.entries[0].name != "namespaces" ||
      root.entries[0].value.kind != yaml::NodeKind::kMapping) {
    return Fault(root.position, "expected one key, namespaces, with a mapping of names to roots");
  }
  NamespaceRoots roots;
  for (const yaml::Entry& entry : root.entries[0].value.entries) {
    absl::StatusOr<RootFolders> folders = ParseNamespace(entry.value);
    RETURN_IF_ERROR(folders.status());
    if (entry.name.empty() || !roots.namespaces_.emplace(entry.name, *std::move(folders)).second) {
      return Fault(entry.position, absl::StrCat("namespace '", entry.name, "' stands here twice"));
    }
  }
  return roots;
}

RootFolders NamespaceRoots::Of(const std::string& namespace_name) const {
  auto found = namespaces_.find(namespace_name);
  found = found == namespaces_.end() ? namespaces_.find(kOthers) : found;
  return found == namespaces_.end() ? RootFolders() : found->second;
}

RootFolders NamespaceRoots::FoldersOf(const std::string& namespace_name) const {
  RootFolders folders = Of(namespace_name);
  std::erase_if(folders.read, IsServiceUrl);
  std::erase_if(folders.write, IsServiceUrl);
  return folders;
}

std::string NamespaceRoots::Expected(const std::string& namespace_name,
                                     std::string_view path,
                                     PathUse use) const {
  const RootFolders folders = Of(namespace_name);
  std::vector<std::string> roots = folders.write;
  if (use == PathUse::kRead) {
    roots.insert(roots.end(), folders.read.begin(), folders.read.end());
  }
  const absl::StatusOr<std::string> plain = PlainPlace(path);
  if (plain.ok() && std::any_of(roots.begin(), roots.end(), [&](const std::string& root) {
        return IsBeneath(root, *plain);
      })) {
    return "";
  }
  const std::string what = absl::StrCat(
      "a path that namespace ", namespace_name, use == PathUse::kRead ? " may read" : " may write");
  return roots.empty() ? absl::StrCat(what, "; the operator allows it none")
                       : absl::StrCat(what, ", beneath ", absl::StrJoin(roots, " or "));
}

absl::StatusOr<std::unique_ptr<NamespaceRootsFile>> NamespaceRootsFile::Open(
    const std::string& path) {
  std::unique_ptr<NamespaceRootsFile> file(new NamespaceRootsFile(path));
  RETURN_IF_ERROR(file->Read());
  return file;
}

std::shared_ptr<const NamespaceRoots> NamespaceRootsFile::Get() const {
  const MutexLock lock(mutex_);
  return roots_;
}

absl::Status NamespaceRootsFile::Read() {
  absl::StatusOr<std::string> text = ReadWholeFile(path_, yaml::kMaxBytes);
  const std::string seen = text.ok() ? *text : std::string(text.status().message());
  {
    const MutexLock lock(mutex_);
    if (roots_ != nullptr && seen == text_) {
      return absl::OkStatus();
    }
    text_ = seen;
  }
  RETURN_IF_ERROR(text.status());
  absl::StatusOr<NamespaceRoots> roots = NamespaceRoots::Parse(*text);
  if (!roots.ok()) {
    return absl::InvalidArgumentError(absl::StrCat(path_, ":", roots.status().message()));
  }
  const MutexLock lock(mutex_);
  roots_ = std::make_shared<const NamespaceRoots>(*std::move(roots));
  return absl::OkStatus();
}

void NamespaceRootsFile::Refresh() {
  const absl::Status read = Read();
  if (!read.ok()) {
    log::Error(absl::StrCat(
        "--namespace-roots: ", read.message(), "; the roots from before stay in force"));
  }
}

}  // namespace ravel::coordinator
