#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "common/status.h"

namespace ravel::ctl {

// GPT-2's pattern, which byte-level pre-tokenizers use when they name none.
extern const char kGpt2Pattern[];
// Llama 3's.
extern const char kLlama3Pattern[];

// A pre-tokenizer's regular expression. Thread-compatible.
class SplitPattern {
 public:
  // White space (\s, \S) means Unicode's White_Space, as in the tokenizers package.
  static absl::StatusOr<std::unique_ptr<SplitPattern>> Compile(const std::string& pattern);
  virtual ~SplitPattern() = default;

  // Calls `piece` for every match and every stretch between matches, in order: together they are
  // `text`, which must be UTF-8.
  virtual absl::Status Split(std::string_view text,
                             const std::function<void(std::string_view)>& piece) const = 0;
};

}  // namespace ravel::ctl
