#pragma once

// Text generation from a checkpoint, in token ids.

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "common/model/model_inventory.h"
#include "common/status.h"
#include "worker/model/decoder.h"

namespace ravel::trainer {

struct GenerateRequest {
  std::vector<int32_t> tokens;  // the prompt; not empty
  int64_t max_new_tokens = 100;
  double temperature = 1.0;  // 0: always the likeliest
  int64_t top_k = 0;         // 0: all
  uint64_t seed = 0;
  int32_t stop_token = -1;  // ends the text, is not part of it
};

// {"tokens":[1,2],"maxNewTokens":100,"temperature":0.8,"topK":40,"seed":1,"stopToken":2}: all but
// tokens may be absent. Errors name the field.
absl::StatusOr<GenerateRequest> ParseGenerateRequest(std::string_view json_line);

// Why a text has no more tokens: as many as were asked for, the stop token came, or every position
// that the model has (of at most 8192) was taken before either.
enum class TextEnd { kMaxNewTokens, kStopToken, kPositions };
// "maxNewTokens", "stopToken", "positions".
const char* TextEndName(TextEnd end);

struct GeneratedText {
  std::vector<int32_t> tokens;  // the new ones
  TextEnd end = TextEnd::kMaxNewTokens;
  int64_t positions = 0;  // that prompt and text may have
};

// An index of `logits`: softmax at `temperature` over the top_k largest, drawn with `uniform` in
// [0, 1). Ties go to the smaller index.
struct SampleArgs {
  const std::vector<float>& logits;
  double temperature = 1.0;
  int64_t top_k = 0;
  double uniform = 0;
};
int32_t SampleToken(const SampleArgs& args);

// Thread-compatible.
class Generator {
 public:
  // Loads the weights of a committed step directory into memory.
  static absl::StatusOr<std::unique_ptr<Generator>> Open(const std::string& step_directory);

  // The new tokens; fewer than asked for when the model's longest sequence ends or the stop token
  // comes. Draw i depends on (seed, i) alone.
  absl::StatusOr<GeneratedText> Generate(const GenerateRequest& request);

 private:
  Generator() = default;

  plan::ModelInventory inventory_;
  std::vector<float> weights_;
  std::unique_ptr<model::Decoder> decoder_;
};

// One request per line of stdin, one answer per line of stdout, until stdin ends:
// {"tokens":[...],"endedBy":"positions","positions":64} or {"error":"..."}.
absl::Status ServeGenerator(const std::string& step_directory);

}  // namespace ravel::trainer
