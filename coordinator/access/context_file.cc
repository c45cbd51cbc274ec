#include "coordinator/access/context_file.h"

#include <absl/strings/str_cat.h>
#include <sys/stat.h>

#include "common/certificate.h"
#include "common/file_writer.h"
#include "common/json.h"
#include "common/net_address.h"

namespace ravel::coordinator {
namespace {

constexpr int64_t kMaxBytes = 256 << 10;

absl::StatusOr<std::string> TextOf(const json::Value& object, const char* name) {
  const json::Value* const value = object.Find(name);
  if (value == nullptr || !value->is_string()) {
    return absl::InvalidArgumentError(absl::StrCat(name, ": expected a string"));
  }
  return value->AsString();
}

absl::StatusOr<ContextFile> Parse(const std::string& text) {
  ASSIGN_OR_RETURN(const json::Value object, json::Parse(text));
  ContextFile context;
  ASSIGN_OR_RETURN(context.coordinator, TextOf(object, "coordinator"));
  ASSIGN_OR_RETURN(context.authority, TextOf(object, "authority"));
  ASSIGN_OR_RETURN(context.certificate, TextOf(object, "certificate"));
  ASSIGN_OR_RETURN(context.key, TextOf(object, "key"));
  RETURN_IF_ERROR(Annotate(ParseHostPort(context.coordinator).status(), "coordinator"));
  RETURN_IF_ERROR(Annotate(ReadCertificate(context.authority).status(), "authority"));
  RETURN_IF_ERROR(Annotate(CheckKeyPair(context.certificate, context.key), "certificate"));
  return context;
}

}  // namespace

absl::Status WriteContext(const std::string& path, const ContextFile& context) {
  json::Value object;
  object.Set("schemaVersion", "ravel/v1");
  object.Set("coordinator", context.coordinator);
  object.Set("authority", context.authority);
  object.Set("certificate", context.certificate);
  object.Set("key", context.key);
  return WriteFileAtomically(path, json::Serialize(object) + "\n", FileAccess::kOwner);
}

absl::StatusOr<ContextFile> ReadContext(const std::string& path) {
  ASSIGN_OR_RETURN(const std::string text, ReadWholeFile(path, kMaxBytes));
  struct stat facts = {};
  if (stat(path.c_str(), &facts) == 0 && (facts.st_mode & 077) != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat(path, ": others may read this private key; chmod 600 it"));
  }
  absl::StatusOr<ContextFile> context = Parse(text);
  RETURN_IF_ERROR(Annotate(context.status(), path));
  return context;
}

}  // namespace ravel::coordinator
