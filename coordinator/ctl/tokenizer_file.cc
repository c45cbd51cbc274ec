// Reads tokenizer.json and accepts only what Ravel's encoder does exactly. Members with an effect
// on encoding are checked one by one; anything unknown is an error that names the member and what
// was expected. A tokenizer that is nearly supported would give other ids without a warning, and a
// model trained on those would be worthless.

#include "coordinator/ctl/tokenizer_file.h"

#include <absl/strings/str_cat.h>

#include "common/json.h"
#include "coordinator/ctl/split_pattern.h"

namespace ravel::ctl {
namespace {

// Tables by id are as long as the largest id: a small file must not ask for gigabytes.
constexpr int64_t kMostTokenIds = int64_t{1} << 21;

absl::Status Unsupported(const std::string& member,
                         const std::string& expected,
                         const json::Value& got) {
  std::string text = json::Serialize(got);
  if (text.size() > 120) {
    text = text.substr(0, 117) + "...";
  }
  return absl::InvalidArgumentError(absl::StrCat(member, ": expected ", expected, ", got ", text));
}

// A member that is there and not null.
const json::Value* Present(const json::Value& object, const char* name) {
  const json::Value* const value = object.Find(name);
  return value == nullptr || value->is_null() ? nullptr : value;
}

std::string TypeOf(const json::Value& object) {
  const json::Value* const type = Present(object, "type");
  return type != nullptr && type->is_string() ? type->AsString() : "";
}

absl::StatusOr<bool> BoolOr(const json::Value& object,
                            const std::string& where,
                            const char* name,
                            bool preset) {
  const json::Value* const value = Present(object, name);
  if (value == nullptr) {
    return preset;
  }
  if (!value->is_bool()) {
    return Unsupported(absl::StrCat(where, ".", name), "true or false", *value);
  }
  return value->AsBool();
}

absl::StatusOr<int32_t> IdOf(const std::string& where, const json::Value& value) {
  if (!value.is_int() || value.AsInt() < 0 || value.AsInt() >= kMostTokenIds) {
    return Unsupported(where, "an id", value);
  }
  return static_cast<int32_t>(value.AsInt());
}

absl::Status ReadByteLevel(const json::Value& step, const std::string& where, TokenizerFile& file) {
  ASSIGN_OR_RETURN(file.add_prefix_space, BoolOr(step, where, "add_prefix_space", true));
  ASSIGN_OR_RETURN(const bool use_regex, BoolOr(step, where, "use_regex", true));
  if (use_regex) {
    file.byte_level_pattern = kGpt2Pattern;
  }
  return absl::OkStatus();
}

absl::Status ReadSplit(const json::Value& step, const std::string& where, TokenizerFile& file) {
  const json::Value* const pattern = Present(step, "pattern");
  const json::Value* const regex = pattern == nullptr ? nullptr : Present(*pattern, "Regex");
  if (regex == nullptr || !regex->is_string()) {
    return Unsupported(
        where + ".pattern", "{\"Regex\": ...}", pattern == nullptr ? json::Value() : *pattern);
  }
  const json::Value* const behavior = Present(step, "behavior");
  if (behavior == nullptr || !behavior->is_string() || behavior->AsString() != "Isolated") {
    return Unsupported(
        where + ".behavior", "\"Isolated\"", behavior == nullptr ? json::Value() : *behavior);
  }
  ASSIGN_OR_RETURN(const bool invert, BoolOr(step, where, "invert", false));
  if (invert) {
    return Unsupported(where + ".invert", "false", json::Value(true));
  }
  file.split_patterns.push_back(regex->AsString());
  return absl::OkStatus();
}

absl::Status ReadPreTokenizer(const json::Value& root, TokenizerFile& file) {
  const std::string where = "pre_tokenizer";
  const json::Value* const pre = Present(root, "pre_tokenizer");
  if (pre == nullptr) {
    return Unsupported(where, "ByteLevel, or a Sequence that ends with it", json::Value());
  }
  json::Array steps;
  if (TypeOf(*pre) == "Sequence") {
    const json::Value* const list = Present(*pre, "pretokenizers");
    if (list == nullptr || !list->is_array() || list->AsArray().empty()) {
      return Unsupported(where + ".pretokenizers", "a list", *pre);
    }
    steps = list->AsArray();
  } else {
    steps.push_back(*pre);
  }
  for (std::size_t i = 0; i < steps.size(); ++i) {
    const std::string step_where =
        steps.size() == 1 ? where : absl::StrCat(where, ".pretokenizers[", i, "]");
    const std::string type = TypeOf(steps[i]);
    const bool last = i + 1 == steps.size();
    if (type == "ByteLevel" && last) {
      RETURN_IF_ERROR(ReadByteLevel(steps[i], step_where, file));
    } else if (type == "Split" && !last) {
      RETURN_IF_ERROR(ReadSplit(steps[i], step_where, file));
    } else {
      return Unsupported(step_where, last ? "ByteLevel" : "Split", json::Value(type));
    }
  }
  return absl::OkStatus();
}

absl::Status ReadModel(const json::Value& model, TokenizerFile& file) {
  if (TypeOf(model) != "BPE") {
    return Unsupported("model.type", "\"BPE\"", json::Value(TypeOf(model)));
  }
  for (const char* name : {"continuing_subword_prefix", "end_of_word_suffix", "dropout"}) {
    const json::Value* const value = Present(model, name);
    if (value != nullptr && !(value->is_string() && value->AsString().empty())) {
      return Unsupported(absl::StrCat("model.", name), "null", *value);
    }
  }
  ASSIGN_OR_RETURN(const bool byte_fallback, BoolOr(model, "model", "byte_fallback", false));
  if (byte_fallback) {
    return Unsupported("model.byte_fallback", "false (byte-level BPE)", json::Value(true));
  }
  ASSIGN_OR_RETURN(file.ignore_merges, BoolOr(model, "model", "ignore_merges", false));
  const json::Value* const vocabulary = Present(model, "vocab");
  if (vocabulary == nullptr || !vocabulary->is_object()) {
    return Unsupported(
        "model.vocab", "an object", vocabulary == nullptr ? json::Value() : *vocabulary);
  }
  for (const json::Member& member : vocabulary->AsObject()) {
    ASSIGN_OR_RETURN(const int32_t id,
                     IdOf(absl::StrCat("model.vocab.", member.name), member.value));
    file.vocabulary.emplace_back(member.name, id);
  }
  const json::Value* const merges = Present(model, "merges");
  if (merges == nullptr || !merges->is_array()) {
    return Unsupported("model.merges", "a list", merges == nullptr ? json::Value() : *merges);
  }
  for (const json::Value& merge : merges->AsArray()) {
    // "a b", or ["a", "b"] since 0.20.
    MergeRule rule;
    if (merge.is_string() && merge.AsString().find(' ') != std::string::npos) {
      const std::string& text = merge.AsString();
      rule = {text.substr(0, text.find(' ')), text.substr(text.find(' ') + 1)};
    } else if (merge.is_array() && merge.AsArray().size() == 2 && merge.AsArray()[0].is_string() &&
               merge.AsArray()[1].is_string()) {
      rule = {merge.AsArray()[0].AsString(), merge.AsArray()[1].AsString()};
    } else {
      return Unsupported(absl::StrCat("model.merges[", file.merges.size(), "]"),
                         "\"a b\" or [\"a\", \"b\"]",
                         merge);
    }
    file.merges.push_back(std::move(rule));
  }
  return absl::OkStatus();
}

absl::Status ReadAddedTokens(const json::Value& root, TokenizerFile& file) {
  const json::Value* const added = Present(root, "added_tokens");
  if (added == nullptr) {
    return absl::OkStatus();
  }
  if (!added->is_array()) {
    return Unsupported("added_tokens", "a list", *added);
  }
  for (std::size_t i = 0; i < added->AsArray().size(); ++i) {
    const json::Value& entry = added->AsArray()[i];
    const std::string where = absl::StrCat("added_tokens[", i, "]");
    const json::Value* const content = Present(entry, "content");
    const json::Value* const id = Present(entry, "id");
    if (content == nullptr || !content->is_string() || content->AsString().empty() ||
        id == nullptr) {
      return Unsupported(where, "an object with id and content", entry);
    }
    for (const char* flag : {"single_word", "lstrip", "rstrip"}) {
      ASSIGN_OR_RETURN(const bool set, BoolOr(entry, where, flag, false));
      if (set) {
        return Unsupported(absl::StrCat(where, ".", flag), "false", json::Value(true));
      }
    }
    AddedToken token;
    token.content = content->AsString();
    ASSIGN_OR_RETURN(token.id, IdOf(where + ".id", *id));
    ASSIGN_OR_RETURN(token.special, BoolOr(entry, where, "special", false));
    file.added.push_back(std::move(token));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<TokenizerFile> ReadTokenizerFile(std::string_view text) {
  ASSIGN_OR_RETURN(const json::Value root, json::Parse(text));
  TokenizerFile file;
  const json::Value* const normalizer = Present(root, "normalizer");
  if (normalizer != nullptr) {
    return Unsupported("normalizer", "null", *normalizer);
  }
  const json::Value* const model = Present(root, "model");
  if (model == nullptr) {
    return absl::InvalidArgumentError(
        "model: expected a byte-level BPE tokenizer.json, got nothing");
  }
  RETURN_IF_ERROR(ReadModel(*model, file));
  RETURN_IF_ERROR(ReadPreTokenizer(root, file));
  RETURN_IF_ERROR(ReadAddedTokens(root, file));
  return file;
}

std::string WriteTokenizerFile(const TokenizerFile& file, bool use_regex) {
  json::Value byte_level;
  byte_level.Set("type", "ByteLevel");
  byte_level.Set("add_prefix_space", false);
  byte_level.Set("trim_offsets", true);
  byte_level.Set("use_regex", use_regex);
  json::Array added;
  for (const AddedToken& token : file.added) {
    json::Value entry;
    entry.Set("id", static_cast<int64_t>(token.id));
    entry.Set("content", token.content);
    for (const char* flag : {"single_word", "lstrip", "rstrip", "normalized"}) {
      entry.Set(flag, false);
    }
    entry.Set("special", token.special);
    added.push_back(std::move(entry));
  }
  json::Object vocabulary;
  for (const auto& [token, id] : file.vocabulary) {
    vocabulary.push_back({token, static_cast<int64_t>(id)});
  }
  json::Array merges;
  for (const MergeRule& merge : file.merges) {
    merges.push_back(absl::StrCat(merge.left, " ", merge.right));
  }
  json::Value model;
  model.Set("type", "BPE");
  for (const char* name :
       {"dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"}) {
    model.Set(name, json::Value());
  }
  model.Set("fuse_unk", false);
  model.Set("byte_fallback", false);
  model.Set("ignore_merges", file.ignore_merges);
  model.Set("vocab", json::Value(std::move(vocabulary)));
  model.Set("merges", json::Value(std::move(merges)));
  json::Value root;
  root.Set("version", "1.0");
  root.Set("truncation", json::Value());
  root.Set("padding", json::Value());
  root.Set("added_tokens", json::Value(std::move(added)));
  root.Set("normalizer", json::Value());
  root.Set("pre_tokenizer", byte_level);
  root.Set("post_processor", json::Value());
  root.Set("decoder", byte_level);
  root.Set("model", std::move(model));
  return json::SerializePretty(root) + "\n";
}

}  // namespace ravel::ctl
