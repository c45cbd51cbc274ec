// JobRules: the model and its data, with the paths that they name.

#include <algorithm>
#include <cerrno>
#include <cmath>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/field_error.h"
#include "common/file_writer.h"
#include "common/plan/architecture/architecture.h"
#include "common/plan/model_inventory.h"
#include "common/plan/sample_order.h"
#include "common/token_file.h"
#include "coordinator/api/field_rules_proto.h"
#include "coordinator/api/job_rules_proto.h"

namespace ravel {
namespace {

constexpr int64_t kMaxConfigBytes = 1 << 20;
// Ids checked here against the vocabulary; the trainers check every id that they read.
constexpr int64_t kCheckedTokens = int64_t{1} << 24;

bool Exists(const std::string& path) {
  return access(path.c_str(), F_OK) == 0;
}

// Opening one would wait for somebody to write.
bool IsPipe(const std::string& path) {
  struct stat facts {};
  return stat(path.c_str(), &facts) == 0 && S_ISFIFO(facts.st_mode);
}

// "num_hidden_layers" -> "numHiddenLayers".
std::string JsonName(const std::string& snake) {
  std::string out;
  bool upper = false;
  for (const char c : snake) {
    if (c == '_') {
      upper = true;
    } else {
      out += upper && c >= 'a' && c <= 'z' ? static_cast<char>(c - 'a' + 'A') : c;
      upper = false;
    }
  }
  return out;
}

// What the job file says over the architecture's defaults.
plan::ModelConfig PlainConfig(const v1::ModelConfig& config, plan::ModelConfig plain) {
  plain.vocab_size = config.vocab_size();
  plain.hidden_size = config.hidden_size();
  plain.intermediate_size = config.intermediate_size();
  plain.num_hidden_layers = config.num_hidden_layers();
  plain.num_attention_heads = config.num_attention_heads();
  plain.num_key_value_heads = config.num_key_value_heads();
  plain.head_dim = config.head_dim();
  if (config.has_max_position_embeddings()) {
    plain.max_position_embeddings = config.max_position_embeddings();
  }
  if (config.has_rms_norm_eps()) {
    plain.rms_norm_eps = config.rms_norm_eps();
  }
  if (config.has_layer_norm_eps()) {
    plain.layer_norm_eps = config.layer_norm_eps();
  }
  if (config.has_rope_theta()) {
    plain.rope_theta = config.rope_theta();
  }
  if (config.has_tie_word_embeddings()) {
    plain.tie_word_embeddings = config.tie_word_embeddings();
  }
  if (config.has_rope_scaling()) {
    const v1::RopeScaling& scaling = config.rope_scaling();
    plain.rope_scaling_factor = scaling.factor();
    plain.rope_low_freq_factor = scaling.low_freq_factor();
    plain.rope_high_freq_factor = scaling.high_freq_factor();
    plain.rope_original_max_position_embeddings = scaling.original_max_position_embeddings();
  }
  return plain;
}

}  // namespace

void JobRules::CheckModel() {
  v1::ModelSpec& model = *job().mutable_model();
  if (model.from().empty() == !model.has_config()) {
    Fail("spec.model",
         "exactly one of from (a Hugging Face directory) and config",
         model.has_config() ? "both" : "neither");
  } else if (model.has_config()) {
    CheckInlineConfig();
  } else {
    CheckModelDirectory();
  }
  spec().init_std = model.init_std();
}

void JobRules::CheckInlineConfig() {
  v1::ModelConfig& config = *job().mutable_model()->mutable_config();
  std::vector<std::string> names;
  for (const plan::Architecture* architecture : plan::AllArchitectures()) {
    names.emplace_back(architecture->model_type);
  }
  const int chosen = Choice("spec.model.config.modelType", config.mutable_model_type(), names);
  const plan::Architecture& architecture =
      *plan::AllArchitectures()[static_cast<std::size_t>(chosen)];
  const absl::StatusOr<plan::ModelConfig> valid =
      plan::ValidateModelConfig(PlainConfig(config, architecture.defaults));
  if (!valid.ok()) {
    // The planner names fields as config.json does.
    for (const FieldError& error : FieldErrorsOf(valid.status())) {
      Fail(absl::StrCat("spec.", JsonName(error.path)), error.expected, error.got);
    }
    if (FieldErrorsOf(valid.status()).empty()) {
      Fail("spec.model.config", std::string(valid.status().message()), "");
    }
    return;
  }
  config.set_intermediate_size(valid->intermediate_size);
  config.set_num_key_value_heads(valid->num_key_value_heads);
  config.set_head_dim(valid->head_dim);
  config.set_max_position_embeddings(valid->max_position_embeddings);
  if (architecture.norm == plan::NormKind::kRms) {
    config.set_rms_norm_eps(valid->rms_norm_eps);
  } else {
    config.set_layer_norm_eps(valid->layer_norm_eps);
  }
  if (architecture.positions == plan::PositionKind::kRotary) {
    config.set_rope_theta(valid->rope_theta);
  }
  config.set_tie_word_embeddings(valid->tie_word_embeddings);
  spec().model = *valid;
}

void JobRules::CheckModelDirectory() {
  v1::ModelSpec& model = *job().mutable_model();
  const std::string path = "spec.model.from";
  const std::string folder = AbsolutePath(path, model.from());
  if (folder.empty()) {
    return;
  }
  model.set_from(folder);
  spec().model_from = folder;
  if (!options_.check_paths) {
    return;
  }
  Looking(path);
  if (IsPipe(folder + "/config.json")) {
    Fail(
        path, "a Hugging Face directory with config.json", "config.json, which is no regular file");
    return;
  }
  const absl::StatusOr<std::string> text = ReadWholeFile(folder + "/config.json", kMaxConfigBytes);
  if (!text.ok()) {
    Fail(path, "a Hugging Face directory with config.json", std::string(text.status().message()));
    return;
  }
  const absl::StatusOr<plan::ModelConfig> config = plan::ParseHuggingFaceConfig(*text);
  if (!config.ok()) {
    Fail(path,
         absl::StrCat("a model that Ravel trains; ", std::string(config.status().message())),
         folder);
    return;
  }
  if (!Exists(folder + "/model.safetensors") && !Exists(folder + "/model.safetensors.index.json")) {
    Fail(path, "weights: model.safetensors or model.safetensors.index.json in it", folder);
    return;
  }
  spec().model = *config;
}

void JobRules::CheckData() {
  v1::DataSpec& data = *job().mutable_data();
  constexpr TokenFormat kFormats[] = {
      TokenFormat::kAuto, TokenFormat::kMegatron, TokenFormat::kFlatU16, TokenFormat::kFlatU32};
  spec().data.format = kFormats[ChosenIndex(data, v1::DataSpec::kFormatFieldNumber)];
  if (data.train().empty()) {
    Fail("spec.data.train", "at least one token file", "nothing");
  }
  const auto check = [&](const std::string& name, auto* sources, auto& out) {
    for (int i = 0; i < sources->size(); ++i) {
      v1::DataSource& source = *sources->Mutable(i);
      const std::string path = absl::StrCat("spec.data.", name, "[", i, "]");
      const std::string file = AbsolutePath(path + ".path", source.path());
      if (!file.empty()) {
        source.set_path(file);
      }
      out.push_back({.path = file, .weight = source.weight()});
    }
  };
  check("train", data.mutable_train(), spec().data.train);
  check("validation", data.mutable_validation(), spec().data.validation);

  const int64_t longest = spec().model.has_value() ? spec().model->max_position_embeddings : 0;
  if (data.sequence_length() == 0 && longest > 0) {
    data.set_sequence_length(longest);
  } else if (data.sequence_length() < 0 || (longest > 0 && data.sequence_length() > longest)) {
    Fail("spec.data.sequenceLength",
         longest > 0 ? absl::StrCat("1 to ", longest, ", the model's maximum")
                     : "a whole number >= 1",
         absl::StrCat(data.sequence_length()));
  }
  spec().data.sequence_length = data.sequence_length();
  spec().data.passes = data.passes();
  CheckTokenizer();
}

void JobRules::CheckTokenizer() {
  v1::DataSpec& data = *job().mutable_data();
  if (data.tokenizer().empty()) {
    const bool look = options_.check_paths && options_.check_data;
    if (look && !spec().data.train.empty() && !spec().data.train[0].path.empty()) {
      const std::string beside = spec().data.train[0].path + ".tokenizer.json";
      Looking("spec.data.train[0].path");
      if (Exists(beside)) {
        data.set_tokenizer(beside);
      }
    }
  } else {
    const std::string path = AbsolutePath("spec.data.tokenizer", data.tokenizer());
    if (!path.empty()) {
      data.set_tokenizer(path);
      Looking("spec.data.tokenizer");
      if (options_.check_paths && options_.check_data && !Exists(path)) {
        Fail("spec.data.tokenizer", "a tokenizer.json file", absl::StrCat(path, ": not found"));
      }
    }
  }
  spec().data.tokenizer = data.tokenizer();
}

int64_t JobRules::CheckTokenFile(const std::string& path, plan::DataSource& source) {
  const std::string& file = source.path;
  Looking(path);
  const absl::StatusOr<std::unique_ptr<TokenFile>> opened =
      TokenFile::Open(file, spec().data.format);
  if (!opened.ok()) {
    Fail(path, "a token file", std::string(opened.status().message()));
    return -1;
  }
  source.tokens = (*opened)->tokens();
  const int64_t sequence = spec().data.sequence_length;
  if (sequence > 0 && (*opened)->tokens() < sequence + 1) {
    Fail(path,
         absl::StrCat("at least ", sequence + 1, " tokens (sequenceLength + 1)"),
         absl::StrCat((*opened)->tokens(), " in ", file));
    return -1;
  }
  if (spec().model.has_value()) {
    const int64_t largest = (*opened)->MaxToken(0, std::min((*opened)->tokens(), kCheckedTokens));
    if (largest >= spec().model->vocab_size) {
      Fail(path,
           absl::StrCat("ids below the model's vocabulary of ", spec().model->vocab_size),
           absl::StrCat("id ", largest, " in ", file));
      return -1;
    }
  }
  return sequence > 0 ? plan::SampleCount((*opened)->tokens(), sequence) : -1;
}

void JobRules::CheckTokenFiles() {
  if (!options_.check_paths || !options_.check_data) {
    return;
  }
  int64_t samples = 0;
  bool all_known = true;
  const auto check = [&](const char* name, std::vector<plan::DataSource>& sources) {
    int64_t sum = 0;
    for (std::size_t i = 0; i < sources.size(); ++i) {
      if (!sources[i].path.empty()) {
        const int64_t count =
            CheckTokenFile(absl::StrCat("spec.data.", name, "[", i, "].path"), sources[i]);
        all_known = all_known && count >= 0;
        sum += std::max<int64_t>(count, 0);
      }
    }
    return sum;
  };
  check("validation", spec().data.validation);
  all_known = true;
  samples = check("train", spec().data.train);
  if (all_known) {
    CheckSupply(samples);
  }
}

void JobRules::CheckSupply(int64_t train_samples) {
  const int64_t passes = spec().data.passes;
  if (train_samples < 1 || spec().steps < 1 || spec().global_batch < 1 || passes < 1) {
    return;
  }
  const double needed =
      static_cast<double>(spec().steps) * static_cast<double>(spec().global_batch);
  const double there = static_cast<double>(passes) * static_cast<double>(train_samples);
  if (needed > there) {
    Fail("spec.data.passes",
         absl::StrCat(static_cast<int64_t>(std::ceil(needed / static_cast<double>(train_samples))),
                      " or more: the run takes ",
                      static_cast<int64_t>(needed),
                      " samples and the data has ",
                      train_samples),
         absl::StrCat(passes));
  }
}

}  // namespace ravel
