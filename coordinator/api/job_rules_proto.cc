// JobRules: rules between fields, section by section, in the order of Run. Rules of a single field
// stand in jobs.proto and are applied before the sections of the spec (ApplyRules), so code there
// sees values within their bounds. A section records violations and goes on; a field that failed
// once is not reported again. The result is the canonical job (all defaults filled in) and the
// planner's JobSpec, which must describe the same job.

#include "coordinator/api/job_rules_proto.h"

#include <algorithm>
#include <bit>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <limits>

#include <absl/strings/match.h>
#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <absl/strings/string_view.h>

#include "common/check.h"
#include "common/field_error.h"
#include "common/name_suggestion.h"
#include "common/plan/sharding_plan.h"
#include "common/time_text.h"
#include "coordinator/api/field_rules_proto.h"
#include "coordinator/api/job_limits_proto.h"

namespace ravel {
namespace {

constexpr int64_t kMostSteps = 1'000'000'000;

bool IsDnsLabel(const std::string& text, std::size_t longest) {
  const auto ok = [](char c) { return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9'); };
  return !text.empty() && text.size() <= longest && ok(text.front()) && ok(text.back()) &&
         std::all_of(text.begin(), text.end(), [&](char c) { return ok(c) || c == '-'; });
}

bool IsLabelText(const std::string& text, bool may_be_empty) {
  const auto ok = [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '-' || c == '_' || c == '.' ||
           c == '/';
  };
  return (may_be_empty || !text.empty()) && text.size() <= 63 &&
         std::all_of(text.begin(), text.end(), ok);
}

using google::protobuf::FieldDescriptor;

// Fields that not every optimizer has.
constexpr struct {
  const char* optimizer;
  const char* field;
} kFieldsOf[] = {{"adamw", "betas"},
                 {"adamw", "eps"},
                 {"sgd", "momentum"},
                 {"sgd", "nesterov"},
                 {"lion", "betas"}};
constexpr double kLionBetas[] = {0.9, 0.99};

bool HasField(std::string_view optimizer, std::string_view field) {
  return std::any_of(std::begin(kFieldsOf), std::end(kFieldsOf), [&](const auto& row) {
    return optimizer == row.optimizer && field == row.field;
  });
}

// Those that the job's optimizer has not.
std::vector<const FieldDescriptor*> ForeignFields(const v1::OptimizerSpec& optimizer) {
  const std::string name = optimizer.name().empty() ? "adamw" : optimizer.name();
  const bool known = std::any_of(std::begin(kFieldsOf), std::end(kFieldsOf), [&](const auto& row) {
    return name == row.optimizer;
  });
  std::vector<const FieldDescriptor*> fields;
  for (const auto& row : kFieldsOf) {
    const FieldDescriptor* field = optimizer.GetDescriptor()->FindFieldByName(row.field);
    CHECK(field != nullptr);
    const bool listed = std::find(fields.begin(), fields.end(), field) != fields.end();
    if (known && !listed && !HasField(name, row.field)) {
      fields.push_back(field);
    }
  }
  return fields;
}

bool IsGiven(const v1::OptimizerSpec& optimizer, const FieldDescriptor& field) {
  const google::protobuf::Reflection& access = *optimizer.GetReflection();
  return field.is_repeated() ? access.FieldSize(optimizer, &field) > 0
                             : access.HasField(optimizer, &field);
}

}  // namespace

JobRules::JobRules(const v1::TrainingJob& job, const CanonicalizeOptions& options)
    : options_(options) {
  result_.job = job;
}

CanonicalJob JobRules::Run() {
  if (!CheckLimits()) {
    return std::move(result_);
  }
  CheckHeader();
  CheckMetadata();
  ApplyRules();
  CheckTop();
  CheckModel();
  CheckTraining();
  CheckData();
  CheckSteps();
  CheckSchedule();
  CheckFreeze();
  CheckTokenFiles();
  CheckParallelism();
  CheckDevices();
  CheckOffload();
  CheckPrecision();
  CheckElastic();
  CheckDeterminism();
  CheckCheckpoint();
  CheckRestart();
  CheckRest();
  CheckEnvironment();
  CheckCommunication();
  if (result_.violations.empty() && spec().model.has_value()) {
    ResolveLanes();
  }
  return std::move(result_);
}

void JobRules::Fail(const std::string& path, std::string expected, std::string got) {
  failed_.insert(path);
  result_.violations.push_back({path, 0, 0, std::move(expected), std::move(got)});
}

void JobRules::FailAs(const absl::Status& status) {
  const std::vector<FieldError> errors = FieldErrorsOf(status);
  for (const FieldError& error : errors) {
    Fail(absl::StrCat("spec.", error.path), error.expected, error.got);
  }
  if (errors.empty()) {
    Fail("spec", std::string(status.message()), "");
  }
}

void JobRules::ApplyRules() {
  v1::OptimizerSpec& optimizer = *job().mutable_training()->mutable_optimizer();
  const std::vector<const FieldDescriptor*> foreign = ForeignFields(optimizer);
  for (const FieldDescriptor* field : foreign) {
    if (IsGiven(optimizer, *field)) {
      Fail(absl::StrCat("spec.training.optimizer.", field->json_name()),
           absl::StrCat("nothing, since ",
                        optimizer.name().empty() ? "adamw" : optimizer.name(),
                        " has no such field"),
           "a value");
    }
  }
  if (optimizer.name() == plan::OptimizerName(plan::OptimizerKind::kLion) &&
      optimizer.betas().empty()) {
    optimizer.mutable_betas()->Assign(std::begin(kLionBetas), std::end(kLionBetas));
  }
  ApplyFieldRules(job(), "spec", [this](std::string path, std::string expected, std::string got) {
    Fail(path, std::move(expected), std::move(got));
  });
  for (const FieldDescriptor* field : foreign) {
    optimizer.GetReflection()->ClearField(&optimizer, field);
  }
}

int JobRules::Choice(const std::string& path,
                     std::string* text,
                     const std::vector<std::string>& names) {
  if (text->empty()) {
    *text = names[0];
  }
  const auto found = std::find(names.begin(), names.end(), *text);
  if (found == names.end()) {
    const std::string near = SuggestName(*text, names);
    Fail(path,
         absl::StrCat(names.size() > 1 ? "one of " : "",
                      absl::StrJoin(names, ", "),
                      near.empty() ? "" : absl::StrCat(" (did you mean '", near, "'?)")),
         QuotedOrNothing(*text));
    return 0;
  }
  return static_cast<int>(found - names.begin());
}

std::string JobRules::AbsolutePath(const std::string& path, const std::string& text) {
  std::string out = text;
  if (absl::StartsWith(out, "file://")) {
    out = out.substr(7);
  }
  if (!absl::StartsWith(out, "/")) {
    Fail(path, "an absolute path or file:// URL", QuotedOrNothing(text));
    return "";
  }
  out = std::filesystem::path(out).lexically_normal().string();
  while (out.size() > 1 && out.back() == '/') {
    out.pop_back();
  }
  return out;
}

bool JobRules::CheckLimits() {
  result_.violations = CheckJobLimits(result_.job);
  return result_.violations.empty();
}

void JobRules::CheckHeader() {
  if (result_.job.api_version() != "ravel/v1") {
    Fail("apiVersion", "ravel/v1", QuotedOrNothing(result_.job.api_version()));
  }
  if (result_.job.kind() != "TrainingJob") {
    Fail("kind", "TrainingJob", QuotedOrNothing(result_.job.kind()));
  }
  if (!result_.job.has_spec()) {
    Fail("spec", "the job's settings", "nothing");
  }
}

void JobRules::CheckMetadata() {
  v1::Metadata& metadata = *result_.job.mutable_metadata();
  if (metadata.name().empty() && metadata.generate_name().empty()) {
    Fail("metadata.name", "a name (or metadata.generateName)", "nothing");
  }
  if (!metadata.name().empty() && !IsDnsLabel(metadata.name(), 63)) {
    Fail("metadata.name",
         "lowercase letters, digits and '-', at most 63",
         QuotedOrNothing(metadata.name()));
  }
  if (!metadata.generate_name().empty() && !IsDnsLabel(metadata.generate_name() + "x", 58)) {
    Fail("metadata.generateName",
         "lowercase letters, digits and '-', at most 57",
         QuotedOrNothing(metadata.generate_name()));
  }
  if (metadata.namespace_().empty()) {
    metadata.set_namespace_("default");
  }
  if (!IsDnsLabel(metadata.namespace_(), 63)) {
    Fail("metadata.namespace",
         "lowercase letters, digits and '-', at most 63",
         QuotedOrNothing(metadata.namespace_()));
  }
  if (metadata.labels_size() > 32) {
    Fail("metadata.labels", "at most 32 labels", absl::StrCat(metadata.labels_size()));
  }
  for (const auto& [key, value] : metadata.labels()) {
    if (!IsLabelText(key, false) || !IsLabelText(value, true)) {
      Fail(absl::StrCat("metadata.labels.", key),
           "letters, digits, '-', '_', '.', '/', at most 63",
           QuotedOrNothing(absl::StrCat(key, "=", value)));
    }
  }
  int64_t annotation_bytes = 0;
  for (const auto& [key, value] : metadata.annotations()) {
    annotation_bytes += static_cast<int64_t>(key.size() + value.size());
  }
  if (annotation_bytes > kMaxAnnotationBytes) {
    Fail("metadata.annotations", "at most 64 KiB together", FormatBytes(annotation_bytes));
  }
  spec().name = metadata.name();
  spec().namespace_name = metadata.namespace_();
}

void JobRules::CheckTop() {
  if (job().queue().empty()) {
    job().set_queue("default");
  }
  if (job().queue() != "default") {
    Fail("spec.queue", "default: there are no other queues yet", QuotedOrNothing(job().queue()));
  }
  if (job().priority() != 0) {
    Fail("spec.priority",
         "0: jobs are placed in the order of submission, priorities are not supported yet",
         absl::StrCat(job().priority()));
  }
  spec().max_run_time_ms = DurationOf(job().max_run_time());
  spec().ttl_ms = DurationOf(job().ttl_after_finish());
}

void JobRules::CheckTraining() {
  v1::TrainingSpec& training = *job().mutable_training();
  spec().global_batch = training.global_batch();
  if (training.micro_batch() != "auto") {
    const std::string& text = training.micro_batch();
    const auto [end, error] =
        std::from_chars(text.data(), text.data() + text.size(), spec().micro_batch);
    if (error != std::errc() || end != text.data() + text.size() || spec().micro_batch < 1) {
      Fail("spec.training.microBatch", "auto or a whole number >= 1", QuotedOrNothing(text));
    }
  }
  spec().seed = training.seed();
  if (training.layer_drop() == 0) {
    training.clear_layer_drop();  // -0, too, which would be written, and be another job
  }
  spec().layer_drop = Failed("spec.training.layerDrop") ? 0 : training.layer_drop();
  CheckOptimizer();
}

void JobRules::CheckSteps() {
  v1::TrainingSpec& training = *job().mutable_training();
  if ((training.steps() != 0) == (training.tokens() != 0)) {
    Fail("spec.training.steps",
         "exactly one of steps and tokens",
         training.steps() != 0 ? "both" : "neither");
    return;
  }
  const int64_t sequence = spec().data.sequence_length;
  if (training.tokens() > 0 && training.global_batch() > 0 && sequence > 0) {
    if (training.global_batch() > std::numeric_limits<int64_t>::max() / sequence / 2) {
      Fail("spec.training.globalBatch", "a smaller number", absl::StrCat(training.global_batch()));
      return;
    }
    const int64_t step_tokens = training.global_batch() * sequence;
    const int64_t steps =
        training.tokens() / step_tokens + (training.tokens() % step_tokens == 0 ? 0 : 1);
    if (steps * step_tokens != training.tokens()) {
      Warn(absl::StrCat("spec.training.tokens: rounded up to ",
                        steps,
                        " whole steps of ",
                        step_tokens,
                        " tokens"));
    }
    training.set_steps(steps);
    training.clear_tokens();
  }
  spec().steps = training.steps();
  if (spec().steps > kMostSteps) {
    Fail("spec.training.steps", absl::StrCat("at most ", kMostSteps), absl::StrCat(spec().steps));
  }
}

void JobRules::CheckOptimizer() {
  const v1::OptimizerSpec& optimizer = job().training().optimizer();
  plan::OptimizerSpec& out = spec().optimizer;
  if (optimizer.name() == plan::OptimizerName(plan::OptimizerKind::kSgd)) {
    out.kind = optimizer.nesterov() ? plan::OptimizerKind::kSgdNesterov : plan::OptimizerKind::kSgd;
    out.beta1 = optimizer.momentum();
    if (optimizer.nesterov() && optimizer.momentum() == 0) {
      Fail("spec.training.optimizer.nesterov", "false, or a momentum above 0", "true");
    }
    if (optimizer.state_dtype() != "fp32") {
      Fail("spec.training.optimizer.stateDtype",
           "fp32: sgd keeps its momentum so",
           QuotedOrNothing(optimizer.state_dtype()));
    }
  } else if (!Failed("spec.training.optimizer.betas")) {
    out.beta1 = optimizer.betas(0);
    out.beta2 = optimizer.betas(1);
  }
  const auto types = plan::ParseStateTypes(optimizer.state_dtype());
  if (optimizer.name() == plan::OptimizerName(plan::OptimizerKind::kLion)) {
    out.kind = plan::OptimizerKind::kLion;
    if (types.has_value() && absl::StrContains(plan::StateTypesText(*types), ',')) {
      Fail("spec.training.optimizer.stateDtype",
           "one type: lion keeps one average",
           QuotedOrNothing(optimizer.state_dtype()));
    }
  }
  if (types.has_value() && !Failed("spec.training.optimizer.stateDtype")) {
    out.state_types = *types;
  }
  out.main_weights = optimizer.main_weights() == "bf16_remainder"
                         ? plan::MainWeightForm::kBF16Remainder
                         : plan::MainWeightForm::kF32;
  out.lr = optimizer.lr();
  out.eps = optimizer.eps();
  out.weight_decay = optimizer.weight_decay();
  out.clip_norm = optimizer.clip_norm();
}

// After CheckDevices.
void JobRules::CheckOffload() {
  const v1::OffloadSpec& offload = job().training().optimizer().offload();
  const std::string path = "spec.training.optimizer.offload.path";
  plan::OffloadSpec& out = spec().optimizer.offload;
  out.automatic = offload.fraction() == "auto";
  if (!out.automatic && !offload.fraction().empty()) {
    if (!absl::SimpleAtod(offload.fraction(), &out.fraction) ||
        !(out.fraction >= 0 && out.fraction <= 1)) {
      Fail("spec.training.optimizer.offload.fraction",
           "auto or a number from 0 to 1",
           QuotedOrNothing(offload.fraction()));
      out.fraction = 0;
      return;
    }
    job().mutable_training()->mutable_optimizer()->mutable_offload()->set_fraction(
        ShortestDigits(out.fraction));
  }
  out.overlap = !offload.has_overlap() || offload.overlap();
  if (!spec().cpu_devices && !offload.path().empty()) {
    Fail(path,
         "nothing, since what gpu devices offload lies in memory of their hosts, or cpu devices",
         QuotedOrNothing(offload.path()));
  } else if (spec().cpu_devices && (out.automatic || out.fraction > 0 || !offload.path().empty())) {
    out.path = AbsolutePath(path, offload.path());
  }
}

void JobRules::CheckSchedule() {
  const v1::ScheduleSpec& schedule = job().training().schedule();
  constexpr plan::ScheduleKind kKinds[] = {plan::ScheduleKind::kCosine,
                                           plan::ScheduleKind::kConstant,
                                           plan::ScheduleKind::kLinear,
                                           plan::ScheduleKind::kWsd};
  spec().schedule.kind = kKinds[ChosenIndex(schedule, v1::ScheduleSpec::kKindFieldNumber)];
  if (spec().steps > 0 && schedule.warmup_steps() >= spec().steps) {
    Fail("spec.training.schedule.warmupSteps",
         absl::StrCat("0 to ", spec().steps - 1, ", below the job's steps"),
         absl::StrCat(schedule.warmup_steps()));
  }
  spec().schedule.warmup_steps = schedule.warmup_steps();
  spec().schedule.min_ratio = schedule.min_ratio();
  CheckEvaluation();
}

void JobRules::CheckEvaluation() {
  const v1::EvaluationSpec& evaluation = job().training().evaluation();
  if (evaluation.every() > 0 && job().data().validation().empty()) {
    Fail("spec.data.validation", "token files, because evaluation.every is set", "nothing");
  }
  spec().evaluation_every = evaluation.every();
  spec().evaluation_batches = evaluation.batches();
}

void JobRules::ResolveLanes() {
  const absl::StatusOr<plan::JobSpec> resolved = plan::ResolveBatch(spec());
  if (!resolved.ok()) {
    FailAs(resolved.status());
    return;
  }
  spec() = *resolved;
  job().mutable_determinism()->set_virtual_ranks(spec().virtual_ranks);
  CheckTensorCuts();
}

CanonicalJob Canonicalize(const v1::TrainingJob& job, const CanonicalizeOptions& options) {
  return JobRules(job, options).Run();
}

}  // namespace ravel
