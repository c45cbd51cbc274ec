#pragma once

// The members of a tokenizer.json that Ravel understands, read and checked.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "common/status.h"

namespace ravel::ctl {

struct AddedToken {
  int32_t id = 0;
  std::string content;
  bool special = false;
};

struct MergeRule {
  std::string left;  // stand-ins, as in the vocabulary
  std::string right;
};

struct TokenizerFile {
  std::vector<std::pair<std::string, int32_t>> vocabulary;  // stand-ins -> id
  std::vector<MergeRule> merges;
  std::vector<AddedToken> added;
  // The pre-tokenizer: each pattern cuts the pieces of the one before; then ByteLevel adds a space
  // in front of a piece (if asked to) and cuts by its own pattern ("": not at all).
  std::vector<std::string> split_patterns;
  bool add_prefix_space = false;
  std::string byte_level_pattern;
  bool ignore_merges = false;
};

absl::StatusOr<TokenizerFile> ReadTokenizerFile(std::string_view text);
// A file that the tokenizers package loads: ByteLevel with GPT-2's pattern or (use_regex off) whole
// texts as one piece.
std::string WriteTokenizerFile(const TokenizerFile& file, bool use_regex);

}  // namespace ravel::ctl
