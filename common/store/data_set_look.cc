// Local paths are looked at together, as if the URLs were not in the query; their facts are then
// put beside those of the URLs, in the query's order.

#include "common/store/data_set_look.h"

#include <map>
#include <utility>

#include <absl/strings/str_cat.h>

#include "common/crypto.h"
#include "common/store/data_set.h"
#include "common/store/open_store.h"

namespace ravel::store {
namespace {

// Data sets of one look: each manifest is read once.
class Sets {
 public:
  Sets(const OpenFunction& open, const LookHooks& hooks) : open_(open), hooks_(hooks) {}

  struct Opened {
    std::unique_ptr<ObjectStore> store;
    DataSet set;
  };
  absl::StatusOr<const Opened*> Open(const NamedPath& path, const std::string& folder) {
    const auto known = opened_.find(folder);
    if (known != opened_.end()) {
      return &known->second;
    }
    if (hooks_.at) {
      hooks_.at(path);
    }
    Opened opened;
    ASSIGN_OR_RETURN(opened.store, open_(folder));
    ASSIGN_OR_RETURN(opened.set, ReadDataSet(*opened.store));
    return &(opened_[folder] = std::move(opened));
  }

 private:
  const OpenFunction& open_;
  const LookHooks& hooks_;
  std::map<std::string, Opened> opened_;
};

absl::StatusOr<TokenFileFacts> LookAtTokens(Sets& sets, const NamedPath& path, TokenFormat format) {
  ASSIGN_OR_RETURN(const DataUrl url, SplitDataUrl(path.path));
  ASSIGN_OR_RETURN(const Sets::Opened* const opened, sets.Open(path, url.folder));
  const DataTokens* const tokens = opened->set.manifest.FindTokens(url.member);
  if (tokens == nullptr) {
    return absl::NotFoundError(
        absl::StrCat(path.path, ": the data set has no token files of this name"));
  }
  if (format != TokenFormat::kAuto && format != TokenFormat::kMegatron) {
    return absl::InvalidArgumentError(
        absl::StrCat(path.path, ": data sets in stores have format megatron, or auto"));
  }
  return TokenFileFacts{.tokens = tokens->tokens,
                        .largest_id = tokens->largest_id,
                        .sample_digest = tokens->sample_digest};
}

absl::StatusOr<bool> LookAtTokenizer(Sets& sets, const NamedPath& path) {
  ASSIGN_OR_RETURN(const DataUrl url, SplitDataUrl(path.path));
  ASSIGN_OR_RETURN(const Sets::Opened* const opened, sets.Open(path, url.folder));
  return opened->set.manifest.FindFile(url.member) != nullptr;
}

absl::StatusOr<ModelFacts> LookAtModel(Sets& sets, const NamedPath& path) {
  ASSIGN_OR_RETURN(const std::string folder, DataFolderUrl(path.path));
  ASSIGN_OR_RETURN(const Sets::Opened* const opened, sets.Open(path, folder));
  const DataManifest& manifest = opened->set.manifest;
  const DataFile* const config = manifest.FindFile("config.json");
  if (config == nullptr) {
    return absl::NotFoundError(absl::StrCat(folder, ": the data set has no config.json"));
  }
  ModelFacts model;
  ASSIGN_OR_RETURN(model.config, ReadFile(*opened->store, config->name, kMaxConfigBytes));
  if (Hex(Sha256(model.config)) != config->sha256) {
    return absl::DataLossError(
        absl::StrCat(folder, ": config.json has not the SHA-256 of its manifest"));
  }
  model.weights = manifest.FindFile("model.safetensors") != nullptr ||
                  manifest.FindFile("model.safetensors.index.json") != nullptr;
  return model;
}

PathFacts Silent(const NamedPath& path, const absl::Status& why) {
  return {.silent_field = path.field,
          .silence = absl::StrCat(path.path, ": ", std::string(why.message()))};
}

PathQuery LocalPartOf(const PathQuery& query) {
  PathQuery local = query;
  std::erase_if(local.token_files, [](const NamedPath& file) { return IsDataUrl(file.path); });
  if (IsDataUrl(local.tokenizer.path)) {
    local.tokenizer = {};
  }
  if (IsDataUrl(local.model_directory.path)) {
    local.model_directory = {};
  }
  return local;
}

}  // namespace

bool IsDataFault(const absl::Status& status) {
  return absl::IsNotFound(status) || absl::IsInvalidArgument(status) || absl::IsDataLoss(status);
}

PathFacts LookAtJobPathsBy(const OpenFunction& open,
                           const PathQuery& query,
                           const LookHooks& hooks) {
  PathFacts facts = LookAtPaths(LocalPartOf(query), hooks);
  Sets sets(open, hooks);
  if (IsDataUrl(query.model_directory.path)) {
    absl::StatusOr<ModelFacts> model = LookAtModel(sets, query.model_directory);
    if (!model.ok() && !IsDataFault(model.status())) {
      return Silent(query.model_directory, model.status());
    }
    facts.model =
        model.ok() ? *std::move(model) : ModelFacts{.error = std::string(model.status().message())};
  }
  if (IsDataUrl(query.tokenizer.path)) {
    const absl::StatusOr<bool> tokenizer = LookAtTokenizer(sets, query.tokenizer);
    if (!tokenizer.ok() && !IsDataFault(tokenizer.status())) {
      return Silent(query.tokenizer, tokenizer.status());
    }
    facts.tokenizer = tokenizer.value_or(false);
  }
  std::vector<TokenFileFacts> local = std::exchange(facts.token_files, {});
  size_t next = 0;
  for (const NamedPath& file : query.token_files) {
    if (!IsDataUrl(file.path)) {
      if (next == local.size()) {
        break;  // given up
      }
      facts.token_files.push_back(std::move(local[next++]));
      continue;
    }
    if (hooks.abandoned && hooks.abandoned()) {
      break;
    }
    absl::StatusOr<TokenFileFacts> tokens = LookAtTokens(sets, file, query.format);
    if (!tokens.ok() && !IsDataFault(tokens.status())) {
      return Silent(file, tokens.status());
    }
    facts.token_files.push_back(
        tokens.ok() ? *std::move(tokens)
                    : TokenFileFacts{.error = std::string(tokens.status().message())});
  }
  return facts;
}

PathFacts LookAtJobPaths(const PathQuery& query, const LookHooks& hooks) {
  return LookAtJobPathsBy([](const std::string& url) { return OpenStore(url); }, query, hooks);
}

}  // namespace ravel::store
