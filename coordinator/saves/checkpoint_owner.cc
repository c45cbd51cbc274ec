#include "coordinator/saves/checkpoint_owner.h"

#include <absl/strings/str_cat.h>

#include "common/ckpt/step_layout.h"
#include "common/json.h"

namespace ravel::coordinator {
namespace {

constexpr std::string_view kFormat = "ravel-checkpoint-owner";
constexpr int64_t kVersion = 1;
constexpr int64_t kMaxOwnerBytes = 4096;

absl::StatusOr<std::string> TextField(const json::Value& object, std::string_view field) {
  const json::Value* value = object.Find(field);
  if (value == nullptr || !value->is_string()) {
    return absl::DataLossError(absl::StrCat("OWNER: ", std::string(field), ": expected a string"));
  }
  return value->AsString();
}

absl::Status NotOurs(const store::ObjectStore& store,
                     const OwnerRecord& found,
                     const OwnerRecord& self) {
  const bool other_cluster = found.cluster_id != self.cluster_id;
  return absl::FailedPreconditionError(absl::StrCat(
      store.Locate(""),
      " belongs to job ",
      found.job_name,
      " (uid ",
      found.job_uid,
      ")",
      other_cluster ? absl::StrCat(" of another cluster (", found.cluster_id, ")") : ""));
}

}  // namespace

std::string EncodeOwner(const OwnerRecord& owner) {
  json::Value value;
  value.Set("format", kFormat);
  value.Set("version", kVersion);
  value.Set("cluster", owner.cluster_id);
  value.Set("job", owner.job_uid);
  value.Set("name", owner.job_name);
  value.Set("createdMs", owner.created_ms);
  return json::SerializePretty(value) + "\n";
}

absl::StatusOr<OwnerRecord> ParseOwner(std::string_view text) {
  const absl::StatusOr<json::Value> parsed = json::Parse(text);
  if (!parsed.ok() || !parsed->is_object()) {
    return absl::DataLossError("OWNER: not a JSON object");
  }
  ASSIGN_OR_RETURN(const std::string format, TextField(*parsed, "format"));
  if (format != kFormat) {
    return absl::DataLossError(absl::StrCat("OWNER: format: expected ", std::string(kFormat)));
  }
  const json::Value* version = parsed->Find("version");
  if (version == nullptr || !version->is_int() || version->AsInt() != kVersion) {
    return absl::FailedPreconditionError(
        absl::StrCat("OWNER: version: this program reads version ", kVersion));
  }
  OwnerRecord owner;
  ASSIGN_OR_RETURN(owner.cluster_id, TextField(*parsed, "cluster"));
  ASSIGN_OR_RETURN(owner.job_uid, TextField(*parsed, "job"));
  ASSIGN_OR_RETURN(owner.job_name, TextField(*parsed, "name"));
  const json::Value* created = parsed->Find("createdMs");
  if (created != nullptr && created->is_int()) {
    owner.created_ms = created->AsInt();
  }
  return owner;
}

absl::StatusOr<std::optional<OwnerRecord>> ReadOwner(const store::ObjectStore& store) {
  const absl::StatusOr<std::string> text = store::ReadFile(store, ckpt::kOwnerFile, kMaxOwnerBytes);
  if (absl::IsNotFound(text.status())) {
    return std::optional<OwnerRecord>();
  }
  if (!text.ok()) {
    return absl::UnavailableError(text.status().message());
  }
  absl::StatusOr<OwnerRecord> owner = ParseOwner(*text);
  if (!owner.ok()) {
    return absl::UnavailableError(
        absl::StrCat(store.Locate(""), ": ", std::string(owner.status().message())));
  }
  return std::optional<OwnerRecord>(*std::move(owner));
}

absl::Status CheckOwner(const store::ObjectStore& store, const OwnerRecord& self) {
  ASSIGN_OR_RETURN(const std::optional<OwnerRecord> found, ReadOwner(store));
  if (!found) {
    return absl::UnavailableError(
        absl::StrCat(store.Locate(ckpt::kOwnerFile),
                     " is missing: the folder is not mounted, or was emptied or replaced"));
  }
  const bool ours = found->cluster_id == self.cluster_id && found->job_uid == self.job_uid;
  return ours ? absl::OkStatus() : NotOurs(store, *found, self);
}

absl::Status ClaimFolder(store::ObjectStore& store, const OwnerRecord& self, Takeover takeover) {
  const absl::Status put = store.Put(ckpt::kOwnerFile, EncodeOwner(self));
  if (!put.ok() && !absl::IsAlreadyExists(put)) {
    return put;
  }
  const absl::Status checked = CheckOwner(store, self);
  if (!absl::IsFailedPrecondition(checked) || takeover == Takeover::kNever) {
    return checked;
  }
  ASSIGN_OR_RETURN(const std::optional<OwnerRecord> found, ReadOwner(store));
  if (!found || found->cluster_id != self.cluster_id) {
    return checked;
  }
  // A crash in between leaves a folder without an owner: the next claim, by the same job, takes it.
  RETURN_IF_ERROR(store::WithdrawIfThere(store, ckpt::kOwnerFile));
  const absl::Status taken = store.Put(ckpt::kOwnerFile, EncodeOwner(self));
  RETURN_IF_ERROR(absl::IsAlreadyExists(taken) ? absl::OkStatus() : taken);
  return CheckOwner(store, self);
}

}  // namespace ravel::coordinator
