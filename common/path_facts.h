#pragma once

// The paths of users that a job names, its other needs of a node, and the findings of a look. The
// coordinator asks with a PathQuery, a node answers with PathFacts: the rules of job files know no
// file system.

#include <cstdint>
#include <string>
#include <vector>

#include "common/token_file.h"

namespace ravel {

inline constexpr int64_t kMaxConfigBytes = int64_t{1} << 20;  // of a config.json
// Ids compared with the vocabulary before a job is accepted, of one file and of all files together;
// the trainers check every id that they read.
inline constexpr int64_t kCheckedTokens = int64_t{1} << 24;
inline constexpr int64_t kCheckedTogether = int64_t{1} << 26;

struct NamedPath {
  std::string field;  // of the job file: spec.data.train[0].path
  std::string path;
};

struct NeededVariable {
  std::string name;
  std::string secret = {};  // SECRET/KEY; empty: by value
};

// The needs of a job beside devices and paths: things that a node's operator grants.
struct JobNeeds {
  std::string namespace_name = {};
  std::vector<NeededVariable> environment = {};
  std::string network = {};  // empty: the node's own

  bool empty() const { return environment.empty() && network.empty(); }
};

struct PathQuery {
  std::vector<NamedPath> token_files = {};
  TokenFormat format = TokenFormat::kAuto;
  NamedPath tokenizer = {};        // no path: not asked
  NamedPath model_directory = {};  // no path: not asked
  // Asked of nodes alone: a look on another machine passes them over.
  JobNeeds needs = {};

  bool empty() const {
    return token_files.empty() && tokenizer.path.empty() && model_directory.path.empty() &&
           needs.empty();
  }
};

struct TokenFileFacts {
  std::string error = {};  // why the path is no token file; empty: it is one
  int64_t tokens = 0;
  int64_t largest_id = 0;          // of those that were checked, the first ones
  std::string sample_digest = {};  // TokenSampleDigest; empty: not known
};

struct ModelFacts {
  std::string error = {};   // why config.json cannot be read; empty: it can
  std::string config = {};  // its text, at most kMaxConfigBytes
  bool weights = false;     // model.safetensors, or its index, lies beside it
};

struct PathFacts {
  std::vector<TokenFileFacts> token_files = {};  // in the order of the query
  bool tokenizer = false;                        // the path leads to something
  ModelFacts model = {};
  // The field whose path did not answer in time, and how that is said. The other facts are not
  // there then. Empty: all paths answered.
  std::string silent_field = {};
  std::string silence = {};
  // The field of the job file, below `spec`, that the node cannot serve, and why. The other facts
  // are not there then. Empty: it serves all needs.
  std::string refused_field = {};
  std::string refusal = {};
};

}  // namespace ravel
