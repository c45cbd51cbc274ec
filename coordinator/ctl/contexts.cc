#include "coordinator/ctl/contexts.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>

#include <absl/strings/ascii.h>
#include <absl/strings/str_cat.h>
#include <sys/stat.h>

#include "common/file_writer.h"
#include "coordinator/ctl/common_options.h"

namespace ravel::ctl {
namespace {

constexpr int64_t kMaxNameBytes = 63;
constexpr char kEnding[] = ".json";

std::string Variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

bool IsName(const std::string& name) {
  return !name.empty() && name.size() <= kMaxNameBytes && name[0] != '.' &&
         std::all_of(name.begin(), name.end(), [](char c) {
           return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '.' || c == '_' ||
                  c == '-' || c == '@';
         });
}

}  // namespace

std::string ContextFolder() {
  if (std::string folder = Variable("RAVEL_CONFIG_DIR"); !folder.empty()) {
    return folder;
  }
  const std::string xdg = Variable("XDG_CONFIG_HOME");
  return xdg.empty() ? Variable("HOME") + "/.config/ravel" : xdg + "/ravel";
}

absl::StatusOr<std::string> ContextPath(const std::string& name) {
  if (name.find('/') != std::string::npos) {
    return name;
  }
  if (!IsName(name)) {
    return absl::InvalidArgumentError(
        "context: expected 1 to 63 letters, digits, '.', '_', '-', '@', or a path with a '/'");
  }
  return absl::StrCat(ContextFolder(), "/contexts/", name, kEnding);
}

std::string CurrentContext() {
  const absl::StatusOr<std::string> name = ReadWholeFile(ContextFolder() + "/current", 256);
  const std::string text = name.ok() ? std::string(absl::StripAsciiWhitespace(*name)) : "";
  return IsName(text) ? text : "";
}

absl::Status UseContext(const std::string& name) {
  ASSIGN_OR_RETURN(const std::string path, ContextPath(name));
  if (name.find('/') != std::string::npos) {
    return absl::InvalidArgumentError("context: expected a name of `ravelctl context list`");
  }
  RETURN_IF_ERROR(coordinator::ReadContext(path).status());
  return WriteFileAtomically(ContextFolder() + "/current", name + "\n");
}

std::vector<std::string> ContextNames() {
  std::vector<std::string> names;
  std::error_code error;
  for (const auto& entry :
       std::filesystem::directory_iterator(ContextFolder() + "/contexts", error)) {
    if (entry.path().extension() == kEnding) {
      names.push_back(entry.path().stem());
    }
  }
  std::sort(names.begin(), names.end());
  return names;
}

std::string ContextNameOf(const HostPort& address, const std::string& coordinator) {
  const std::string host =
      address.host.find(':') == std::string::npos ? address.host : "coordinator";
  const absl::StatusOr<std::string> path = ContextPath(host);
  std::error_code error;
  if (!path.ok() || !std::filesystem::exists(*path, error)) {
    return host;  // saving it says what is wrong
  }
  const absl::StatusOr<coordinator::ContextFile> known = coordinator::ReadContext(*path);
  return known.ok() && known->coordinator == coordinator ? host
                                                         : absl::StrCat(host, "-", address.port);
}

absl::Status SaveContext(const std::string& name, const coordinator::ContextFile& context) {
  ASSIGN_OR_RETURN(const std::string path, ContextPath(name));
  const bool ours = name.find('/') == std::string::npos;
  if (ours) {
    const mode_t before = umask(077);
    std::error_code error;
    std::filesystem::create_directories(std::filesystem::path(path).parent_path(), error);
    umask(before);
    if (error) {
      return absl::UnavailableError(absl::StrCat(path, ": ", error.message()));
    }
  }
  return coordinator::WriteContext(path, context);
}

absl::StatusOr<ChosenEndpoint> ChooseEndpoint(const EndpointOptions& options) {
  ChosenEndpoint chosen;
  chosen.endpoint.address = options.coordinator.value_or(kDefaultCoordinator);
  const std::string name = !options.context.empty() ? options.context
                           : options.coordinator    ? ""
                                                    : CurrentContext();
  if (name.empty()) {
    return chosen;
  }
  ASSIGN_OR_RETURN(chosen.context_path, ContextPath(name));
  ASSIGN_OR_RETURN(coordinator::ContextFile context, coordinator::ReadContext(chosen.context_path));
  if (!options.coordinator) {
    chosen.endpoint.address = context.coordinator;
  }
  chosen.endpoint.context = std::make_shared<const coordinator::ContextFile>(std::move(context));
  return chosen;
}

}  // namespace ravel::ctl
