#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "common/status.h"
#include "common/store/object_store.h"

namespace ravel::store {

// kQuick: COMMIT, manifest, sizes, headers, cover. kDeep: also every byte of every file: block,
// chunk and file sums, digests.
enum class VerifyDepth { kQuick, kDeep };

struct StepProblem {
  std::string file = {};    // relative to the step
  std::string tensor = {};  // empty: the whole file
  int64_t block = -1;       // of the tensor's chunk in that file, from 0; -1: no block
  std::string what = {};
  bool unread = false;  // the bytes are missing, short or could not be read: no proof of damage
  // "model/shard-...: tensor model.norm.weight, block 3: crc32c 0x.. but the manifest says 0x.."
  std::string Text() const;
};

struct VerifyReport {
  int64_t step = -1;  // -1: not known
  int64_t files = 0;
  int64_t tensors = 0;
  int64_t bytes = 0;                  // that the step should have
  std::vector<StepProblem> problems;  // the first kMaxProblems
  std::vector<std::string>
      stray;  // *.safetensors that the manifest does not know: a problem for other readers only
  bool ok() const { return problems.empty(); }
};
inline constexpr int kMaxProblems = 100;

// Never fails as a call: what cannot be read is a problem of the report.
VerifyReport VerifyStep(const ObjectStore& store, std::string_view directory, VerifyDepth depth);

}  // namespace ravel::store
