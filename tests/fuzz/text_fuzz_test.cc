// Parsers of text in common: JSON, YAML, addresses, times, tokens, certificates, records of steps.

#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gtest/gtest.h>

#include "common/field_error.h"
#include "common/json.h"
#include "common/model/architecture/model_config.h"
#include "common/model/optimizer_states.h"
#include "common/net_address.h"
#include "common/plain_text.h"
#include "common/plan/device_kind.h"
#include "common/step_record.h"
#include "common/time_text.h"
#include "common/utf8.h"
#include "common/yaml.h"
#include "coordinator/access/namespace_roots.h"
#include "tests/testing/fuzz.h"

namespace ravel::testing {
namespace {

constexpr char kSomeJson[] =
    R"({"a": [1, -2, 3.5e-7, "text \u00e9 \n", null, true, false],
 "empty": {}, "list": [[], [[]]], "big": 18446744073709551615, "name": {"name": {"name": 0}}})";
constexpr char kSomeYaml[] = R"(# a comment
kind: &kind TrainingJob
metadata: {name: "quoted \x41", labels: {a: b, 'c': "d"}}
list:
  - 1
  - [2, three, 4.0e3]
  - |
    block
    text
  - >-
    folded
    text
other: *kind
null_value: ~
)";

TEST(FuzzText, Json) {
  Fuzz({.name = "json",
        .form = FuzzForm::kText,
        .seeds = {kSomeJson, "[]", "-1.5e3", R"("\ud83d\ude00")"}},
       [](std::string_view input) {
         const absl::StatusOr<json::Value> value = json::Parse(input);
         if (!value.ok()) {
           return Refused();
         }
         const absl::StatusOr<json::Value> compact = json::Parse(json::Serialize(*value));
         const absl::StatusOr<json::Value> pretty = json::Parse(json::SerializePretty(*value));
         return AcceptedIf(compact.ok() && *compact == *value && pretty.ok() && *pretty == *value);
       });
}

TEST(FuzzText, Yaml) {
  Fuzz({.name = "yaml", .form = FuzzForm::kText, .seeds = {kSomeYaml, kSomeJson}},
       [](std::string_view input) {
         yaml::ParseError error;
         return yaml::Parse(input, &error).ok() ? Accepted() : Refused();
       });
}

TEST(FuzzText, NamespaceRoots) {
  Fuzz({.name = "namespace_roots",
        .form = FuzzForm::kText,
        .seeds = {"namespaces:\n  a: {read: [/data/a, /m], write: [/w, 's3://bucket/a']}\n"
                  "  '*': {read: [/data/./x]}\n",
                  "namespaces: {a: {write: ['ravel://host:1/a', 'file:///w']}}"}},
       [](std::string_view input) {
         const auto roots = coordinator::NamespaceRoots::Parse(input);
         if (!roots.ok()) {
           return Refused();
         }
         const RootFolders folders = roots->Of("a");
         for (const std::string& root : folders.write) {
           const bool own = roots->Expected("a", root + "/x", PathUse::kWrite).empty();
           const bool up = roots->Expected("a", root + "/../x", PathUse::kWrite).empty();
           if (!own || up) {
             return AcceptedIf(false, absl::StrCat("root ", root, own ? " is left" : " is none"));
           }
         }
         return Accepted();
       });
}

TEST(FuzzText, Utf8) {
  Fuzz({.name = "utf8", .seeds = {"aé\xe2\x82\xac\xf0\x9f\x98\x80", "\x1b[31m\r\n\t"}},
       [](std::string_view input) {
         const std::string repaired = ReplaceInvalidUtf8(input);
         const std::string escaped = EscapeControlText(input);
         return AcceptedIf(FindInvalidUtf8(repaired) == std::string_view::npos &&
                               FindInvalidUtf8(escaped) == std::string_view::npos &&
                               escaped.find('\x1b') == std::string::npos,
                           "is not repaired");
       });
}

TEST(FuzzText, Addresses) {
  Fuzz(
      {.name = "net_address",
       .form = FuzzForm::kText,
       .seeds = {"host.example:7070", "[fd00::1]:1", "127.0.0.1:65535", "1024-65535"}},
      [](std::string_view input) {
        const absl::StatusOr<PortRange> range = ParsePortRange(input);
        if (range.ok() && (range->first > range->last || range->first < 0 || range->last > 65535)) {
          return AcceptedIf(false, "is no range");
        }
        (void)IsLoopbackHost(input);
        (void)CheckReachableHost("--advertise", input);
        (void)CheckLoopbackListener(input);
        const absl::StatusOr<HostPort> parsed = ParseHostPort(input);
        if (!parsed.ok()) {
          return range.ok() ? Accepted() : Refused();
        }
        const bool six = parsed->host.find(':') != std::string::npos;
        const absl::StatusOr<HostPort> again =
            ParseHostPort(six ? absl::StrCat("[", parsed->host, "]:", parsed->port)
                              : absl::StrCat(parsed->host, ":", parsed->port));
        return AcceptedIf(again.ok() && again->host == parsed->host &&
                          again->port == parsed->port && parsed->port >= 0 &&
                          parsed->port <= 65535);
      });
}

TEST(FuzzText, TimesAndSizes) {
  Fuzz({.name = "time_text",
        .form = FuzzForm::kText,
        .seeds = {"90s", "1.5h", "20m", "1h30m", "250ms", "0"}},
       [](std::string_view input) {
         (void)ParseBytes(input);
         const absl::StatusOr<int64_t> time = ParseDurationMs(input);
         if (!time.ok()) {
           return Refused();
         }
         const absl::StatusOr<int64_t> again = ParseDurationMs(FormatDurationExact(*time));
         (void)FormatDuration(*time);
         return AcceptedIf(*time >= 0 && again.ok() && *again == *time);
       });
  Fuzz({.name = "byte_sizes",
        .form = FuzzForm::kText,
        .seeds = {"80GiB", "512MiB", "4k", "1GB", "4096", "1.5TiB"}},
       [](std::string_view input) {
         const absl::StatusOr<int64_t> bytes = ParseBytes(input);
         if (!bytes.ok()) {
           return Refused();
         }
         (void)FormatBytes(*bytes);
         const absl::StatusOr<int64_t> again = ParseBytes(absl::StrCat(*bytes));
         return AcceptedIf(*bytes >= 0 && again.ok() && *again == *bytes);
       });
}

TEST(FuzzText, Devices) {
  Fuzz({.name = "devices",
        .form = FuzzForm::kText,
        .seeds = {"64xH100-80G", "4xcpu-16G", "4", "8xANY-12GiB"}},
       [](std::string_view input) {
         const absl::StatusOr<plan::DeviceRequest> devices = plan::ParseDevices(input, false);
         (void)plan::ParseStateTypes(input);
         return devices.ok() ? AcceptedIf(devices->count >= 0 && devices->kind.memory_bytes >= 0 &&
                                              devices->kind.usable_bytes() >= 0,
                                          "has negative sizes")
                             : Refused();
       });
  Fuzz(
      {.name = "state_types", .form = FuzzForm::kText, .seeds = {"bf16", "fp32"}},
      [](std::string_view input) { return plan::ParseStateTypes(input) ? Accepted() : Refused(); });
}

TEST(FuzzText, HuggingFaceConfigs) {
  Fuzz({.name = "huggingface_config",
        .form = FuzzForm::kText,
        .seeds =
            {R"({"model_type": "llama", "vocab_size": 97, "hidden_size": 36, "head_dim": 6,
  "intermediate_size": 52, "num_hidden_layers": 2, "num_attention_heads": 6, "rms_norm_eps": 1e-5,
  "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": false,
  "rope_theta": 10000.0, "hidden_act": "silu", "rope_scaling": {"rope_type": "llama3",
  "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
  "original_max_position_embeddings": 32}})",
             R"({"model_type": "gpt2", "vocab_size": 97, "n_embd": 36, "n_layer": 2, "n_head": 6,
  "n_positions": 64, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new"})"}},
       [](std::string_view input) {
         const absl::StatusOr<plan::ModelConfig> config = plan::ParseHuggingFaceConfig(input);
         if (!config.ok()) {
           return Refused();
         }
         const std::string written = plan::WriteHuggingFaceConfig(*config);
         return AcceptedIf(plan::ParseHuggingFaceConfig(written).ok(), "is refused when written");
       });
}

TEST(FuzzText, StepRecords) {
  StepRecord record;
  record.step = 7;
  record.loss = 3.5f;
  record.grad_norm = 1e-9;
  record.tokens = 1 << 20;
  record.world_size = 3;
  Fuzz({.name = "step_record",
        .form = FuzzForm::kText,
        .seeds = {json::Serialize(StepRecordJson(record))}},
       [](std::string_view input) {
         const absl::StatusOr<StepRecord> parsed = ParseStepRecord(input);
         if (!parsed.ok()) {
           return Refused();
         }
         const std::string text = json::Serialize(StepRecordJson(*parsed));
         const absl::StatusOr<StepRecord> again = ParseStepRecord(text);
         return AcceptedIf(again.ok() && json::Serialize(StepRecordJson(*again)) == text);
       });
}

TEST(FuzzText, FieldErrors) {
  Fuzz({.name = "field_error",
        .form = FuzzForm::kText,
        .seeds = {std::string(
            *FieldRefusal("training.lr", "a number", "x").GetPayload("ravel.FieldErrors"))}},
       [](std::string_view input) {
         absl::Status status = absl::InvalidArgumentError("x");
         status.SetPayload("ravel.FieldErrors", absl::Cord(std::string(input)));
         const std::vector<FieldError> errors = FieldErrorsOf(status);
         return errors.empty()
                    ? Refused()
                    : AcceptedIf(FieldErrorsOf(WithFieldErrors(absl::InvalidArgumentError("x"),
                                                               errors)) == errors);
       });
}

}  // namespace
}  // namespace ravel::testing
