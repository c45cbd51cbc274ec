#include "worker/daemon/look_messages_proto.h"

#include <string>

#include <absl/strings/str_cat.h>

#include "common/job_environment.h"
#include "common/store/data_set.h"

namespace ravel::daemon {
namespace {

// A job lists 1024 files for training and as many for validation, with names of 4 KiB each.
constexpr int kMaxTokenFiles = 2048;
constexpr std::size_t kMaxPathBytes = 8192;

absl::StatusOr<NamedPath> ReadPath(const char* name, const v1::NamedPath& path) {
  if (path.path().size() > kMaxPathBytes || path.field().size() > kMaxPathBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("look.", name, ": expected at most ", kMaxPathBytes, " bytes"));
  }
  if (!path.path().empty() && path.path()[0] != '/' && !store::IsDataUrl(path.path())) {
    return absl::InvalidArgumentError(
        absl::StrCat("look.", name, ": expected an absolute path or the URL of a data set"));
  }
  return NamedPath{path.field(), path.path()};
}

// Names and references are judged by launch_settings_proto, as those of launches are.
absl::StatusOr<JobNeeds> ReadNeeds(const v1::JobNeeds& message) {
  if (message.environment_size() > kMaxJobVariables) {
    return absl::InvalidArgumentError(
        absl::StrCat("look.needs: expected at most ", kMaxJobVariables, " variables"));
  }
  JobNeeds needs{.namespace_name = message.namespace_(), .network = message.network()};
  bool small =
      needs.namespace_name.size() <= kMaxPathBytes && needs.network.size() <= kMaxPathBytes;
  for (const v1::NeededVariable& variable : message.environment()) {
    small = small && variable.name().size() <= kMaxPathBytes &&
            variable.secret().size() <= kMaxPathBytes;
    needs.environment.push_back({variable.name(), variable.secret()});
  }
  if (!small) {
    return absl::InvalidArgumentError(
        absl::StrCat("look.needs: expected texts of at most ", kMaxPathBytes, " bytes"));
  }
  return needs;
}

}  // namespace

absl::StatusOr<PathQuery> FromProto(const v1::Look& look) {
  if (look.token_files_size() > kMaxTokenFiles) {
    return absl::InvalidArgumentError(
        absl::StrCat("look.token_files: expected at most ", kMaxTokenFiles));
  }
  if (look.token_format() < 0 || look.token_format() > static_cast<int>(TokenFormat::kFlatU32)) {
    return absl::InvalidArgumentError("look.token_format: not known here");
  }
  PathQuery query{.format = static_cast<TokenFormat>(look.token_format())};
  for (const v1::NamedPath& file : look.token_files()) {
    ASSIGN_OR_RETURN(NamedPath path, ReadPath("token_files", file));
    query.token_files.push_back(std::move(path));
  }
  ASSIGN_OR_RETURN(query.tokenizer, ReadPath("tokenizer", look.tokenizer()));
  ASSIGN_OR_RETURN(query.model_directory, ReadPath("model_directory", look.model_directory()));
  ASSIGN_OR_RETURN(query.needs, ReadNeeds(look.needs()));
  return query;
}

v1::LookResult ToProto(int64_t look_id, const absl::StatusOr<PathFacts>& facts) {
  v1::LookResult result;
  result.set_look_id(look_id);
  if (!facts.ok()) {
    result.set_refused(std::string(facts.status().message()));
    return result;
  }
  for (const TokenFileFacts& file : facts->token_files) {
    v1::TokenFileFacts& added = *result.add_token_files();
    added.set_error(file.error);
    added.set_tokens(file.tokens);
    added.set_largest_id(file.largest_id);
    added.set_sample_digest(file.sample_digest);
  }
  result.set_tokenizer(facts->tokenizer);
  result.set_model_error(facts->model.error);
  result.set_model_config(facts->model.config);
  result.set_model_weights(facts->model.weights);
  result.set_silent_field(facts->silent_field);
  result.set_silence(facts->silence);
  result.set_refused_field(facts->refused_field);
  result.set_refusal(facts->refusal);
  return result;
}

}  // namespace ravel::daemon
