#pragma once

// `ravelctl data push`: a prepared data set, or a Hugging Face folder, into a store, from which
// nodes fetch it.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "common/status.h"
#include "common/store/data_set.h"

namespace ravel::ctl {

struct DataPushRequest {
  std::string source;  // a prefix of token files, or a model's folder
  std::string to;      // URL of the data set's folder in the store, which is made
  store::DataSetKind kind = store::DataSetKind::kTokens;
};

struct DataPushResult {
  std::string url;  // as jobs name the data set
  store::DataManifest manifest;
  std::string digest;  // of the manifest
  int64_t copied_files = 0;
  int64_t copied_bytes = 0;
  bool was_there = false;  // the same data set, whole
};

// The work at hand ("reading", "copying"), and bytes of all.
using DataPushProgress = std::function<void(const char* phase, int64_t done, int64_t all)>;

// Tokens: PREFIX.bin and .idx, and PREFIX.tokenizer.json and PREFIX.validation.* if they are there.
// Model: config.json, and every other *.json and *.safetensors of the folder. Each file is read
// whole before anything is written; token files are checked as trainers check them. Files that an
// interrupted push has finished are compared and stay; the manifest comes last. AlreadyExists when
// another content has a file's name or the manifest's; nothing of the store is ever replaced.
// Errors name the file or the option.
absl::StatusOr<DataPushResult> PushData(const DataPushRequest& request,
                                        const DataPushProgress& progress);

}  // namespace ravel::ctl
