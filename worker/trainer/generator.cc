// Generates text from a checkpoint: parses requests, samples, and drives the decoder. Sampling
// sorts by (logit descending, token ascending) and draws uniform numbers from Philox by (seed,
// index of the new token), so a request has the same answer everywhere and at any time. Temperature
// 0 takes the largest logit. Context is limited to 8192 positions, since the cache of keys and
// values is allocated in full.

#include "worker/trainer/generator.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <iostream>
#include <numeric>
#include <utility>

#include <absl/strings/str_cat.h>

#include "common/json.h"
#include "common/philox.h"
#include "common/signed_size.h"
#include "common/store/open_store.h"
#include "worker/checkpoint/loader.h"

namespace ravel::trainer {
namespace {

constexpr uint32_t kGenerationPurpose = 6;  // top byte of the Philox counter
constexpr int64_t kMaxConfigBytes = int64_t{1} << 20;
constexpr int64_t kMostPositions = 8192;

double UniformDraw(uint64_t seed, int64_t index) {
  const PhiloxBlock draw =
      PhiloxDraw(seed, {static_cast<uint32_t>(index), 0, 0, kGenerationPurpose << 24});
  return static_cast<double>(draw[0]) * 0x1p-32;
}

absl::Status FieldError(std::string_view field, const char* expected) {
  return absl::InvalidArgumentError(absl::StrCat(std::string(field), ": expected ", expected));
}

absl::Status ParseField(const json::Member& member, GenerateRequest& request) {
  const json::Value& value = member.value;
  const auto integer = [&](int64_t least, const char* expected, auto& out) -> absl::Status {
    using Number = std::decay_t<decltype(out)>;
    if (!value.is_int() || value.AsInt() < least || !std::in_range<Number>(value.AsInt())) {
      return FieldError(member.name, expected);
    }
    out = static_cast<Number>(value.AsInt());
    return absl::OkStatus();
  };
  if (member.name == "tokens") {
    if (!value.is_array()) {
      return FieldError(member.name, "an array of token ids");
    }
    for (const json::Value& token : value.AsArray()) {
      if (!token.is_int() || token.AsInt() < 0 || token.AsInt() > INT32_MAX) {
        return FieldError(member.name, "token ids");
      }
      request.tokens.push_back(static_cast<int32_t>(token.AsInt()));
    }
    return absl::OkStatus();
  }
  if (member.name == "maxNewTokens") {
    return integer(0, "a whole number", request.max_new_tokens);
  }
  if (member.name == "temperature") {
    if (!value.is_number() || !(value.AsDouble() >= 0)) {
      return FieldError(member.name, "a number that is not negative");
    }
    request.temperature = value.AsDouble();
    return absl::OkStatus();
  }
  if (member.name == "topK") {
    return integer(0, "a whole number", request.top_k);
  }
  if (member.name == "seed") {
    return integer(0, "a whole number", request.seed);
  }
  if (member.name == "stopToken") {
    return integer(-1, "a token id or -1", request.stop_token);
  }
  return FieldError(member.name, "one of tokens, maxNewTokens, temperature, topK, seed, stopToken");
}

}  // namespace

absl::StatusOr<GenerateRequest> ParseGenerateRequest(std::string_view json_line) {
  ASSIGN_OR_RETURN(const json::Value value, json::Parse(json_line));
  if (!value.is_object()) {
    return absl::InvalidArgumentError("expected a JSON object");
  }
  GenerateRequest request;
  for (const json::Member& member : value.AsObject()) {
    RETURN_IF_ERROR(ParseField(member, request));
  }
  if (request.tokens.empty()) {
    return FieldError("tokens", "at least one token id");
  }
  return request;
}

int32_t SampleToken(const SampleArgs& args) {
  const std::vector<float>& logits = args.logits;
  std::vector<int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  const auto before = [&](int32_t a, int32_t b) {
    const float x = At(logits, a);
    const float y = At(logits, b);
    return x != y ? x > y : a < b;
  };
  if (args.temperature == 0) {
    return *std::min_element(order.begin(), order.end(), before);
  }
  const size_t kept = args.top_k > 0 ? std::min(order.size(), Size(args.top_k)) : order.size();
  std::partial_sort(
      order.begin(), order.begin() + static_cast<std::ptrdiff_t>(kept), order.end(), before);
  const auto largest = static_cast<double>(At(logits, order[0]));
  std::vector<double> weights;
  for (size_t i = 0; i < kept; ++i) {
    weights.push_back(
        std::exp((static_cast<double>(At(logits, order[i])) - largest) / args.temperature));
  }
  double left = args.uniform * std::accumulate(weights.begin(), weights.end(), 0.0);
  for (size_t i = 0; i < kept; ++i) {
    left -= weights[i];
    if (left < 0) {
      return order[i];
    }
  }
  return order[kept - 1];
}

absl::StatusOr<std::unique_ptr<Generator>> Generator::Open(const std::string& step_directory) {
  ASSIGN_OR_RETURN(const store::StorePlace place, store::OpenParent(step_directory));
  const store::ObjectStore& files = *place.parent;
  const std::string& name = place.name;
  ASSIGN_OR_RETURN(const std::string config_text,
                   store::ReadFile(files, name + "/hf/config.json", kMaxConfigBytes));
  ASSIGN_OR_RETURN(const plan::ModelConfig config, plan::ParseHuggingFaceConfig(config_text));
  std::unique_ptr<Generator> generator(new Generator);
  generator->inventory_ = plan::BuildInventory(config, {.sequences = 1, .sequence_tokens = 1});
  ASSIGN_OR_RETURN(
      auto loader,
      checkpoint::StepLoader::Open(&files, name, &generator->inventory_, std::nullopt));
  std::vector<plan::OwnedPiece> pieces;
  int64_t total = 0;
  for (const plan::TensorId i : generator->inventory_.tensors.ids()) {
    pieces.push_back(plan::WholePiece(i, generator->inventory_.tensors[i].shape, total));
    total += pieces.back().elements();
  }
  generator->weights_.resize(Size(total));
  RETURN_IF_ERROR(loader.ReadPieces(plan::StateRole::kParam, pieces, generator->weights_));
  std::vector<TensorView> views;
  for (const plan::OwnedPiece& piece : pieces) {
    const Shape& shape = generator->inventory_.tensors[piece.tensor].shape;
    float* data = generator->weights_.data() + piece.shard_offset;
    views.push_back(shape.size() == 1 ? VectorView(data, shape[0])
                                      : MatrixView(data, shape[0], shape[1]));
  }
  generator->decoder_ = std::make_unique<model::Decoder>(
      generator->inventory_, views, std::min(kMostPositions, config.max_position_embeddings));
  return generator;
}

const char* TextEndName(TextEnd end) {
  switch (end) {
    case TextEnd::kMaxNewTokens:
      return "maxNewTokens";
    case TextEnd::kStopToken:
      return "stopToken";
    case TextEnd::kPositions:
      return "positions";
  }
  return "unknown";
}

absl::StatusOr<GeneratedText> Generator::Generate(const GenerateRequest& request) {
  const int64_t vocabulary = inventory_.config.vocab_size;
  for (const int32_t token : request.tokens) {
    if (token < 0 || token >= vocabulary) {
      return absl::InvalidArgumentError(
          absl::StrCat("tokens: id ", token, ", expected 0 to ", vocabulary - 1));
    }
  }
  if (request.tokens.empty() ||
      static_cast<int64_t>(request.tokens.size()) > decoder_->max_tokens()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "tokens: expected 1 to ", decoder_->max_tokens(), " ids, got ", request.tokens.size()));
  }
  decoder_->Reset();
  const std::vector<float>* logits = nullptr;
  for (const int32_t token : request.tokens) {
    logits = &decoder_->Advance(token);
  }
  GeneratedText text;
  text.positions = decoder_->max_tokens();
  std::vector<int32_t>& made = text.tokens;
  while (static_cast<int64_t>(made.size()) < request.max_new_tokens) {
    const int32_t token =
        SampleToken({.logits = *logits,
                     .temperature = request.temperature,
                     .top_k = request.top_k,
                     .uniform = UniformDraw(request.seed, static_cast<int64_t>(made.size()))});
    if (token == request.stop_token) {
      text.end = TextEnd::kStopToken;
      break;
    }
    made.push_back(token);
    if (static_cast<int64_t>(made.size()) == request.max_new_tokens) {
      break;
    }
    if (decoder_->position() == decoder_->max_tokens()) {
      text.end = TextEnd::kPositions;
      break;
    }
    logits = &decoder_->Advance(token);
  }
  return text;
}

absl::Status ServeGenerator(const std::string& step_directory) {
  ASSIGN_OR_RETURN(const std::unique_ptr<Generator> generator, Generator::Open(step_directory));
  std::string line;
  while (std::getline(std::cin, line)) {
    if (line.empty()) {
      continue;
    }
    json::Value answer;
    const auto request = ParseGenerateRequest(line);
    const auto made = request.ok() ? generator->Generate(*request) : request.status();
    if (made.ok()) {
      json::Array tokens(made->tokens.begin(), made->tokens.end());
      answer.Set("tokens", json::Value(std::move(tokens)));
      answer.Set("endedBy", TextEndName(made->end)).Set("positions", made->positions);
    } else {
      answer.Set("error", json::Value(std::string(made.status().message())));
    }
    std::cout << json::Serialize(answer) << std::endl;
  }
  return absl::OkStatus();
}

}  // namespace ravel::trainer
