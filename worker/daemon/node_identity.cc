#include "worker/daemon/node_identity.h"

#include <cerrno>
#include <filesystem>

#include <absl/strings/str_cat.h>
#include <sys/stat.h>

#include "common/certificate.h"
#include "common/file_writer.h"
#include "common/json.h"

namespace ravel::daemon {
namespace {

constexpr int64_t kMaxFileBytes = 64 << 10;

std::string Folder(const std::string& work_dir) {
  return work_dir + "/identity";
}

absl::StatusOr<std::string> TextOf(const json::Value& object, const char* name) {
  const json::Value* const value = object.Find(name);
  if (value == nullptr || !value->is_string()) {
    return absl::InvalidArgumentError(absl::StrCat(name, ": expected a string"));
  }
  return value->AsString();
}

}  // namespace

absl::Status CheckNoIdentity(const std::string& work_dir) {
  std::error_code error;
  if (!std::filesystem::exists(Folder(work_dir), error) && !error) {
    return absl::OkStatus();
  }
  return absl::AlreadyExistsError(absl::StrCat(
      Folder(work_dir), ": this folder has joined a cluster; remove it to join another one"));
}

absl::Status SaveIdentity(const std::string& work_dir, const NodeIdentity& identity) {
  // Under another name until it is whole.
  const std::string part = Folder(work_dir) + ".part";
  std::error_code error;
  std::filesystem::create_directories(work_dir, error);
  std::filesystem::remove_all(part, error);
  if (mkdir(part.c_str(), 0700) != 0) {
    return ErrnoStatus(errno, part);
  }
  json::Value facts;
  facts.Set("nodeId", identity.node_id);
  facts.Set("coordinator", identity.coordinator);
  const auto write = [&part](const char* name, const std::string& text) {
    return WriteFileAtomically(absl::StrCat(part, "/", name), text, FileAccess::kOwner);
  };
  RETURN_IF_ERROR(write("node.json", json::Serialize(facts) + "\n"));
  RETURN_IF_ERROR(write("key.pem", identity.tls.key));
  RETURN_IF_ERROR(write("authority.pem", identity.tls.authority));
  RETURN_IF_ERROR(write("certificate.pem", identity.tls.certificate));
  std::filesystem::rename(part, Folder(work_dir), error);
  return error ? absl::UnavailableError(absl::StrCat(Folder(work_dir), ": ", error.message()))
               : absl::OkStatus();
}

absl::StatusOr<NodeIdentity> LoadIdentity(const std::string& work_dir) {
  const std::string folder = Folder(work_dir);
  NodeIdentity identity;
  ASSIGN_OR_RETURN(const std::string text, ReadWholeFile(folder + "/node.json", kMaxFileBytes));
  const absl::StatusOr<json::Value> facts = json::Parse(text);
  RETURN_IF_ERROR(Annotate(facts.status(), folder + "/node.json"));
  ASSIGN_OR_RETURN(identity.node_id, TextOf(*facts, "nodeId"));
  ASSIGN_OR_RETURN(identity.coordinator, TextOf(*facts, "coordinator"));
  struct stat key = {};
  const std::string key_path = folder + "/key.pem";
  if (stat(key_path.c_str(), &key) != 0) {
    return ErrnoStatus(errno, key_path);
  }
  if ((key.st_mode & 077) != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat(key_path, ": others may read this private key; chmod 600 it"));
  }
  ASSIGN_OR_RETURN(identity.tls.key, ReadWholeFile(key_path, kMaxFileBytes));
  ASSIGN_OR_RETURN(identity.tls.authority, ReadWholeFile(folder + "/authority.pem", kMaxFileBytes));
  ASSIGN_OR_RETURN(identity.tls.certificate,
                   ReadWholeFile(folder + "/certificate.pem", kMaxFileBytes));
  RETURN_IF_ERROR(Annotate(CheckKeyPair(identity.tls.certificate, identity.tls.key), folder));
  return identity;
}

absl::Status SaveCertificate(const std::string& work_dir, const NodeIdentity& identity) {
  RETURN_IF_ERROR(CheckKeyPair(identity.tls.certificate, identity.tls.key));
  if (SplitCertificates(identity.tls.authority).empty()) {
    return absl::InvalidArgumentError("the authority: expected certificates");
  }
  // First whom to trust: both authorities of a rotation, so that either certificate works with it.
  RETURN_IF_ERROR(WriteFileAtomically(
      Folder(work_dir) + "/authority.pem", identity.tls.authority, FileAccess::kOwner));
  return WriteFileAtomically(
      Folder(work_dir) + "/certificate.pem", identity.tls.certificate, FileAccess::kOwner);
}

absl::StatusOr<CertificateDates> DatesOf(const std::string& certificate) {
  ASSIGN_OR_RETURN(const CertificateFacts facts, ReadCertificate(certificate));
  return CertificateDates{
      .renew_ms = facts.not_before_ms + (facts.not_after_ms - facts.not_before_ms) / 3 * 2,
      .end_ms = facts.not_after_ms};
}

}  // namespace ravel::daemon
