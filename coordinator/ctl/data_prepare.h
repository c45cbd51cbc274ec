#pragma once

// Text files -> Megatron token files.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "common/status.h"

namespace ravel::ctl {

struct PrepareRequest {
  std::vector<std::string> inputs;
  std::string tokenizer = "bytes";  // "bytes", "hf:FILE", "train-bpe:VOCAB"
  std::string output;
  double validation_fraction = 0;  // the end of each file, cut at a document or a line
  std::string document_separator;  // as it stands in the text; "": a file is a document
  std::string end_of_document;     // a token; "": the tokenizer's own if it has one; "none"
  bool require_utf8 = false;
  // Asked while documents are written; true ends the run with Cancelled. None: never.
  std::function<bool()> cancelled = {};
};

struct PrepareResult {
  int64_t vocabulary = 0;
  int64_t text_bytes = 0;
  int64_t documents = 0;
  int64_t tokens = 0;
  int64_t validation_documents = 0;
  int64_t validation_tokens = 0;
  std::vector<std::string>
      warnings;  // bytes that are not UTF-8, a tokenizer without end of document
};

// Done and all bytes, and what is done ("training", "tokenizing").
using PrepareProgress = std::function<void(const char* phase, int64_t done, int64_t all)>;

// Writes OUTPUT.tokenizer.json, OUTPUT.bin/.idx and, with a fraction, OUTPUT.validation.bin/.idx.
// Every file appears whole, the index of the training text last; after an error none has changed.
// Temporary files that a killed run with this output left are removed first.
// Errors name the file or option.
absl::StatusOr<PrepareResult> PrepareData(const PrepareRequest& request,
                                          const PrepareProgress& progress);

}  // namespace ravel::ctl
