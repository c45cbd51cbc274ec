// JobRules: the model and its data. What is at the paths that they name comes as facts: nothing is
// opened here.

#include <algorithm>
#include <cmath>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>

#include "common/check.h"
#include "common/field_error.h"
#include "common/model/architecture/architecture.h"
#include "common/model/model_inventory.h"
#include "common/plan/sample_order.h"
#include "common/store/data_set.h"
#include "coordinator/api/field_rules_proto.h"
#include "coordinator/api/job_rules_proto.h"

namespace ravel {
namespace {

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

// Applies the job file's values over the architecture's defaults.
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
  plain.layer_sharing = config.layer_sharing();
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

std::string JobRules::DataPath(const std::string& path, const std::string& text, DataPart part) {
  if (!absl::StrContains(text, "://") || absl::StartsWith(text, "file://")) {
    return AbsolutePath(path, text);
  }
  const bool known = store::IsDataUrl(text);
  absl::StatusOr<std::string> url = absl::InvalidArgumentError("");
  if (known && part == DataPart::kWhole) {
    url = store::DataFolderUrl(text);
  } else if (known) {
    const absl::StatusOr<store::DataUrl> split = store::SplitDataUrl(text);
    url = split.ok() ? absl::StatusOr<std::string>(absl::StrCat(split->folder, "/", split->member))
                     : split.status();
  }
  if (!url.ok()) {
    const char* const end = part == DataPart::kMember ? "/NAME" : "";
    Fail(path,
         absl::StrCat("an absolute path, ravel://HOST:PORT/PATH",
                      end,
                      " or s3://BUCKET/PATH",
                      end,
                      " (`ravelctl data push`)"),
         text);
    return "";
  }
  return *std::move(url);
}

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
  const std::string folder = DataPath(path, model.from(), DataPart::kWhole);
  if (folder.empty()) {
    return;
  }
  model.set_from(folder);
  spec().model_from = folder;
  if (options_.facts == nullptr) {
    return;
  }
  const ModelFacts& facts = options_.facts->model;
  if (!facts.error.empty()) {
    Fail(path, "a Hugging Face directory with config.json", facts.error);
    return;
  }
  const absl::StatusOr<plan::ModelConfig> config = plan::ParseHuggingFaceConfig(facts.config);
  if (!config.ok()) {
    Fail(path,
         absl::StrCat("a model that Ravel trains; ", std::string(config.status().message())),
         folder);
    return;
  }
  if (!facts.weights) {
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
      const std::string file = DataPath(path + ".path", source.path(), DataPart::kMember);
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
    const NamedPath beside = TokenizerBeside(spec());
    if (KnowsData() && !beside.path.empty() && options_.facts->tokenizer) {
      data.set_tokenizer(beside.path);
    }
  } else {
    const std::string path = DataPath("spec.data.tokenizer", data.tokenizer(), DataPart::kMember);
    if (!path.empty()) {
      data.set_tokenizer(path);
      if (KnowsData() && !options_.facts->tokenizer) {
        Fail("spec.data.tokenizer", "a tokenizer.json file", absl::StrCat(path, ": not found"));
      }
    }
  }
  spec().data.tokenizer = data.tokenizer();
}

int64_t JobRules::CheckTokenFile(const std::string& path,
                                 const TokenFileFacts& facts,
                                 plan::DataSource& source) {
  const std::string& file = source.path;
  if (!facts.error.empty()) {
    Fail(path, "a token file", facts.error);
    return -1;
  }
  source.tokens = facts.tokens;
  source.sample_digest = facts.sample_digest;
  const int64_t sequence = spec().data.sequence_length;
  if (sequence > 0 && facts.tokens < sequence + 1) {
    Fail(path,
         absl::StrCat("at least ", sequence + 1, " tokens (sequenceLength + 1)"),
         absl::StrCat(facts.tokens, " in ", file));
    return -1;
  }
  if (spec().model.has_value() && facts.largest_id >= spec().model->vocab_size) {
    Fail(path,
         absl::StrCat("ids below the model's vocabulary of ", spec().model->vocab_size),
         absl::StrCat("id ", facts.largest_id, " in ", file));
    return -1;
  }
  return sequence > 0 ? plan::SampleCount(facts.tokens, sequence) : -1;
}

void JobRules::CheckTokenFiles() {
  if (!KnowsData()) {
    return;
  }
  const std::vector<TokenFileFacts>& facts = options_.facts->token_files;
  std::size_t next = 0;
  bool all_known = true;
  const auto check = [&](const char* name, std::vector<plan::DataSource>& sources) {
    int64_t sum = 0;
    for (std::size_t i = 0; i < sources.size(); ++i) {
      if (sources[i].path.empty()) {
        continue;
      }
      CHECK_MSG(next < facts.size(), "facts of another job");
      const int64_t count = CheckTokenFile(
          absl::StrCat("spec.data.", name, "[", i, "].path"), facts[next++], sources[i]);
      all_known = all_known && count >= 0;
      sum += std::max<int64_t>(count, 0);
    }
    return sum;
  };
  check("validation", spec().data.validation);  // in the order of PathsOf
  all_known = true;
  const int64_t samples = check("train", spec().data.train);
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

NamedPath TokenizerBeside(const plan::JobSpec& spec) {
  if (spec.data.train.empty() || spec.data.train[0].path.empty()) {
    return {};
  }
  return {"spec.data.train[0].path", spec.data.train[0].path + ".tokenizer.json"};
}

PathQuery PathsOf(const CanonicalJob& job) {
  PathQuery query{.format = job.spec.data.format};
  const auto add = [&query](const char* name, const std::vector<plan::DataSource>& sources) {
    for (std::size_t i = 0; i < sources.size(); ++i) {
      if (!sources[i].path.empty()) {
        query.token_files.push_back(
            {absl::StrCat("spec.data.", name, "[", i, "].path"), sources[i].path});
      }
    }
  };
  add("validation", job.spec.data.validation);
  add("train", job.spec.data.train);
  const std::string& tokenizer = job.spec.data.tokenizer;
  if (tokenizer.empty()) {
    query.tokenizer = TokenizerBeside(job.spec);
  } else if (tokenizer[0] == '/' || store::IsDataUrl(tokenizer)) {  // else it was refused
    query.tokenizer = {"spec.data.tokenizer", tokenizer};
  }
  if (!job.spec.model_from.empty()) {
    query.model_directory = {"spec.model.from", job.spec.model_from};
  }
  return query;
}

}  // namespace ravel
