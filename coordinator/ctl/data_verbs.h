#pragma once

// data prepare, data push, data batch, generate: verbs about text and token ids, without a
// coordinator.

#include <cstdint>
#include <vector>

#include "coordinator/ctl/common_options.h"

namespace ravel::ctl {

struct PrepareOptions {
  std::vector<std::string> inputs;
  std::string tokenizer = "bytes";  // "bytes", "hf:FILE", "train-bpe:VOCAB"
  std::string output;               // prefix
  double validation_fraction = 0;
  std::string document_separator;  // "": a file is a document; \n and \t are understood
  std::string
      end_of_document;  // token after each document; "": the tokenizer's own, "none": nothing
  bool require_utf8 = false;
};
int RunDataPrepare(const CommonOptions& common, const PrepareOptions& options);

struct PushOptions {
  std::string source;  // prefix of token files, or with `model` a Hugging Face folder
  std::string to;      // URL
  bool model = false;
};
int RunDataPush(const CommonOptions& common, const PushOptions& options);

struct BatchOptions {
  std::string file;
  int64_t step = 0;  // from 0: the batch that leads from state `step` to state `step` + 1
};
int RunDataBatch(const CommonOptions& common, const BatchOptions& options);

struct GenerateOptions {
  std::string checkpoint;  // step directory or exported directory
  std::string prompt;
  std::string tokenizer;  // tokenizer.json; "": the checkpoint's own
  int64_t max_new_tokens = 100;
  double temperature = 0.8;
  int64_t top_k = 40;
  int64_t seed = 0;
};
int RunGenerate(const CommonOptions& common, const GenerateOptions& options);

}  // namespace ravel::ctl
