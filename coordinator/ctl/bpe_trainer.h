#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "common/status.h"

namespace ravel::ctl {

// Learns a byte-level BPE of GPT-2's kind: counts the pieces of GPT-2's pattern, then merges the
// most frequent neighbours, of equally frequent ones the pair of smaller ids, until the vocabulary
// is full or no pair occurs twice. The same text gives the same vocabulary. Thread-compatible.
class BpeTrainer {
 public:
  // Tokens in all: 256 bytes, the merges, and <|endoftext|> last. At least 257.
  explicit BpeTrainer(int64_t vocabulary) : vocabulary_(vocabulary) {}
  // Counts the pieces of a text; bytes that are not UTF-8 are left out.
  absl::Status AddText(std::string_view text);
  // The tokenizer.json.
  std::string Train() const;

 private:
  const int64_t vocabulary_;
  std::unordered_map<std::string, int64_t> counts_;
};

}  // namespace ravel::ctl
