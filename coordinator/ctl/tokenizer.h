#pragma once

// Text <-> token ids by a Hugging Face tokenizer.json of the byte-level BPE kind (GPT-2, Llama 3,
// and those that `data prepare` writes). Equal to Tokenizer.encode(text, add_special_tokens=False)
// of the tokenizers package.

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "common/status.h"

namespace ravel::ctl {

// Thread-compatible: Encode keeps a cache.
class Tokenizer {
 public:
  // Errors name the member of the file that is not supported, and what was expected.
  static absl::StatusOr<std::unique_ptr<Tokenizer>> FromJson(std::string_view text);
  static absl::StatusOr<std::unique_ptr<Tokenizer>> FromFile(const std::string& path);
  virtual ~Tokenizer() = default;

  // Largest id + 1.
  virtual int64_t vocabulary() const = 0;
  // The id of a token as written in the file, such as "<|endoftext|>"; -1 when there is none.
  virtual int32_t FindToken(std::string_view token) const = 0;
  // The token that ends a document: <|endoftext|>, <|end_of_text|>, </s>, <|eot_id|> or <eos>; -1
  // when there is none.
  virtual int32_t end_of_document() const = 0;

  // Returns true if a text may be cut after a line end between two ASCII letters and its parts
  // encoded one by one.
  virtual bool may_cut_lines() const = 0;

  // Appends the ids of `text`. Bytes that are not UTF-8 become the ids of those bytes.
  virtual absl::Status Encode(std::string_view text, std::vector<int32_t>& ids) = 0;
  // The bytes of the ids; special tokens are left out. InvalidArgument for an id outside the
  // vocabulary.
  virtual absl::StatusOr<std::string> Decode(std::span<const int32_t> ids) const = 0;
};

// tokenizer.json of plain bytes: id = byte, then <|endoftext|> = 256.
std::string BytesTokenizerJson();

}  // namespace ravel::ctl
