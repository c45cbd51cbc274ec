#pragma once

#include <string>
#include <vector>

#include "common/status.h"

namespace ravel::ctl {

// A verb and what can follow it.
struct CompletionEntry {
  std::string verb;                // "submit", "nodes list"
  std::vector<std::string> words;  // options ("--follow") and verbs of a group
  bool takes_job = false;  // names of jobs are asked from the coordinator, for at most 300 ms
};

// The script for `shell`: bash, zsh or fish.
absl::StatusOr<std::string> CompletionScript(const std::string& shell,
                                             const std::vector<CompletionEntry>& entries);

}  // namespace ravel::ctl
