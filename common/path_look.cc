#include "common/path_look.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include <sys/stat.h>
#include <unistd.h>

#include "common/fault_point.h"
#include "common/file_writer.h"
#include "common/token_check.h"

namespace ravel {
namespace {

bool Exists(const std::string& path) {
  return access(path.c_str(), F_OK) == 0;
}

// Opening one would wait for somebody to write.
bool IsPipe(const std::string& path) {
  struct stat facts {};
  return stat(path.c_str(), &facts) == 0 && S_ISFIFO(facts.st_mode);
}

ModelFacts LookAtModel(const std::string& directory) {
  ModelFacts model;
  if (IsPipe(directory + "/config.json")) {
    model.error = "config.json, which is no regular file";
    return model;
  }
  absl::StatusOr<std::string> text = ReadWholeFile(directory + "/config.json", kMaxConfigBytes);
  if (!text.ok()) {
    model.error = std::string(text.status().message());
    return model;
  }
  model.config = *std::move(text);
  model.weights = Exists(directory + "/model.safetensors") ||
                  Exists(directory + "/model.safetensors.index.json");
  return model;
}

// Ids checked of each file, so that all files get a share.
int64_t ScannedTokens(std::size_t files) {
  constexpr int64_t kLeast = int64_t{1} << 16;
  const auto count = static_cast<int64_t>(std::max<std::size_t>(files, 1));
  return std::clamp(kCheckedTogether / count, kLeast, kCheckedTokens);
}

// A cold disk needs 10 ms for each of a file's places, and the look has an end.
constexpr std::size_t kMostSampledFiles = 64;

TokenFileFacts LookAtTokens(const std::string& path,
                            TokenFormat format,
                            const TokenCheckOptions& options) {
  absl::StatusOr<TokenFileFacts> facts = CheckTokenFile(path, format, options);
  return facts.ok() ? *std::move(facts)
                    : TokenFileFacts{.error = std::string(facts.status().message())};
}

}  // namespace

PathFacts LookAtPaths(const PathQuery& query, const LookHooks& hooks) {
  const auto refused = [&hooks](const NamedPath& path, PathShape shape) -> std::string {
    const RootedPath rooted = {.path = path.path, .use = PathUse::kRead, .shape = shape};
    const absl::Status status =
        hooks.roots == nullptr ? absl::OkStatus() : hooks.roots->CheckAll({&rooted, 1});
    return std::string(status.message());
  };
  const auto at = [&hooks](const NamedPath& path) {
    if (hooks.at) {
      hooks.at(path);
    }
    FaultPoint("path_look").IgnoreError();
  };
  PathFacts facts;
  if (!query.model_directory.path.empty()) {
    at({query.model_directory.field, query.model_directory.path + "/config.json"});
    facts.model.error = refused(query.model_directory, PathShape::kFolderOfFiles);
    if (facts.model.error.empty()) {
      facts.model = LookAtModel(query.model_directory.path);
    }
  }
  if (!query.tokenizer.path.empty()) {
    at(query.tokenizer);
    facts.tokenizer =
        refused(query.tokenizer, PathShape::kOne).empty() && Exists(query.tokenizer.path);
  }
  const TokenCheckOptions options{.scanned_tokens = ScannedTokens(query.token_files.size()),
                                  .sample = query.token_files.size() <= kMostSampledFiles,
                                  .abandoned = hooks.abandoned};
  for (const NamedPath& file : query.token_files) {
    if (hooks.abandoned && hooks.abandoned()) {
      break;
    }
    at(file);
    const std::string outside = refused(file, PathShape::kTokens);
    facts.token_files.push_back(outside.empty() ? LookAtTokens(file.path, query.format, options)
                                                : TokenFileFacts{.error = outside});
  }
  return facts;
}

}  // namespace ravel
