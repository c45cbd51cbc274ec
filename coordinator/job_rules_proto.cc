#include "coordinator/job_rules_proto.h"

#include <algorithm>
#include <bit>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <limits>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <absl/strings/string_view.h>

#include "common/field_error.h"
#include "common/name_suggestion.h"
#include "common/plan/sharding_plan.h"
#include "common/time_text.h"
#include "coordinator/job_limits_proto.h"

namespace ravel {
namespace {

constexpr int64_t kSecondMs = 1000;
constexpr int64_t kLongestMs = int64_t{10} * 365 * 24 * 3600 * kSecondMs;
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

std::string Quoted(const std::string& text) {
  return text.empty() ? "nothing" : absl::StrCat("'", text, "'");
}

std::string Number(double number) {
  char digits[40];
  return std::string(digits, std::to_chars(digits, digits + sizeof digits, number).ptr);
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
  CheckPrecision();
  CheckElastic();
  CheckDeterminism();
  CheckCheckpoint();
  CheckRestart();
  CheckRest();
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

int64_t JobRules::Duration(const std::string& path,
                           std::string* text,
                           const char* preset,
                           int64_t low_ms,
                           int64_t high_ms) {
  if (text->empty()) {
    *text = preset;
  }
  const absl::StatusOr<int64_t> duration = ParseDurationMs(*text);
  if (!duration.ok() || *duration < low_ms || *duration > high_ms) {
    const std::string range =
        high_ms == kLongestMs
            ? absl::StrCat("of at least ", FormatDurationExact(low_ms))
            : absl::StrCat(
                  "from ", FormatDurationExact(low_ms), " to ", FormatDurationExact(high_ms));
    Fail(path, absl::StrCat("a duration such as 90s, 20m or 14d, ", range), Quoted(*text));
    return low_ms;
  }
  *text = FormatDurationExact(*duration);
  return *duration;
}

int64_t JobRules::Bytes(const std::string& path, std::string* text) {
  if (text->empty() || *text == "auto") {
    text->clear();
    return 0;
  }
  const absl::StatusOr<int64_t> bytes = ParseBytes(*text);
  if (!bytes.ok() || *bytes < 1) {
    Fail(path, "a size such as 512MiB or 1GiB", Quoted(*text));
    return 0;
  }
  return *bytes;
}

void JobRules::AtLeast(const std::string& path, int64_t value, int64_t low) {
  if (value < low) {
    Fail(path, absl::StrCat("a whole number >= ", low), absl::StrCat(value));
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
         Quoted(*text));
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
    Fail(path, "an absolute path or file:// URL", Quoted(text));
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
    Fail("apiVersion", "ravel/v1", Quoted(result_.job.api_version()));
  }
  if (result_.job.kind() != "TrainingJob") {
    Fail("kind", "TrainingJob", Quoted(result_.job.kind()));
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
    Fail("metadata.name", "lowercase letters, digits and '-', at most 63", Quoted(metadata.name()));
  }
  if (!metadata.generate_name().empty() && !IsDnsLabel(metadata.generate_name() + "x", 58)) {
    Fail("metadata.generateName",
         "lowercase letters, digits and '-', at most 57",
         Quoted(metadata.generate_name()));
  }
  if (metadata.namespace_().empty()) {
    metadata.set_namespace_("default");
  }
  if (!IsDnsLabel(metadata.namespace_(), 63)) {
    Fail("metadata.namespace",
         "lowercase letters, digits and '-', at most 63",
         Quoted(metadata.namespace_()));
  }
  if (metadata.labels_size() > 32) {
    Fail("metadata.labels", "at most 32 labels", absl::StrCat(metadata.labels_size()));
  }
  for (const auto& [key, value] : metadata.labels()) {
    if (!IsLabelText(key, false) || !IsLabelText(value, true)) {
      Fail(absl::StrCat("metadata.labels.", key),
           "letters, digits, '-', '_', '.', '/', at most 63",
           Quoted(absl::StrCat(key, "=", value)));
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
    Fail("spec.queue", "default: there are no other queues yet", Quoted(job().queue()));
  }
  if (job().priority() != 0) {
    Fail("spec.priority",
         "0: jobs are placed in the order of submission, priorities are not supported yet",
         absl::StrCat(job().priority()));
  }
  if (!job().max_run_time().empty()) {
    spec().max_run_time_ms =
        Duration("spec.maxRunTime", job().mutable_max_run_time(), "", 60 * kSecondMs, kLongestMs);
  }
  spec().ttl_ms = Duration(
      "spec.ttlAfterFinish", job().mutable_ttl_after_finish(), "30d", 3600 * kSecondMs, kLongestMs);
}

void JobRules::CheckTraining() {
  v1::TrainingSpec& training = *job().mutable_training();
  AtLeast("spec.training.globalBatch", training.global_batch(), 1);
  spec().global_batch = training.global_batch();
  if (training.micro_batch().empty()) {
    training.set_micro_batch("auto");
  }
  if (training.micro_batch() != "auto") {
    const std::string& text = training.micro_batch();
    const auto [end, error] =
        std::from_chars(text.data(), text.data() + text.size(), spec().micro_batch);
    if (error != std::errc() || end != text.data() + text.size() || spec().micro_batch < 1) {
      Fail("spec.training.microBatch", "auto or a whole number >= 1", Quoted(text));
    }
  }
  spec().seed = training.seed();
  CheckOptimizer();
}

void JobRules::CheckSteps() {
  v1::TrainingSpec& training = *job().mutable_training();
  AtLeast("spec.training.steps", training.steps(), 0);
  AtLeast("spec.training.tokens", training.tokens(), 0);
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
  v1::OptimizerSpec& optimizer = *job().mutable_training()->mutable_optimizer();
  const std::string path = "spec.training.optimizer.";
  Choice(path + "name", optimizer.mutable_name(), {"adamw"});
  if (!(optimizer.lr() > 0) || !std::isfinite(optimizer.lr())) {
    Fail(path + "lr", "a number above 0", optimizer.lr() == 0 ? "nothing" : Number(optimizer.lr()));
  }
  if (optimizer.betas().empty()) {
    optimizer.add_betas(0.9);
    optimizer.add_betas(0.95);
  }
  const auto in_range = [](double beta) { return beta >= 0 && beta < 1; };
  if (optimizer.betas_size() != 2 || !in_range(optimizer.betas(0)) ||
      !in_range(optimizer.betas(1))) {
    std::vector<std::string> got;
    for (const double beta : optimizer.betas()) {
      got.push_back(Number(beta));
    }
    Fail(path + "betas",
         "two numbers from 0 to below 1",
         absl::StrCat("[", absl::StrJoin(got, ", "), "]"));
  } else {
    spec().optimizer.beta1 = optimizer.betas(0);
    spec().optimizer.beta2 = optimizer.betas(1);
  }
  optimizer.set_eps(optimizer.has_eps() ? optimizer.eps() : 1e-8);
  if (!(optimizer.eps() > 0) || !std::isfinite(optimizer.eps())) {
    Fail(path + "eps", "a number above 0", Number(optimizer.eps()));
  }
  optimizer.set_weight_decay(optimizer.has_weight_decay() ? optimizer.weight_decay() : 0.1);
  if (!(optimizer.weight_decay() >= 0) || !std::isfinite(optimizer.weight_decay())) {
    Fail(path + "weightDecay", "a number >= 0", Number(optimizer.weight_decay()));
  }
  optimizer.set_clip_norm(optimizer.has_clip_norm() ? optimizer.clip_norm() : 1.0);
  if (!(optimizer.clip_norm() >= 0) || !std::isfinite(optimizer.clip_norm())) {
    Fail(path + "clipNorm", "a number >= 0 (0: off)", Number(optimizer.clip_norm()));
  }
  const bool narrow =
      Choice(path + "stateDtype", optimizer.mutable_state_dtype(), {"fp32", "bf16"}) == 1;
  const bool split =
      Choice(path + "mainWeights", optimizer.mutable_main_weights(), {"fp32", "bf16_remainder"}) ==
      1;
  spec().optimizer.state_type = narrow ? plan::StateType::kBF16 : plan::StateType::kF32;
  spec().optimizer.main_weights =
      split ? plan::MainWeightForm::kBF16Remainder : plan::MainWeightForm::kF32;
  spec().optimizer.lr = optimizer.lr();
  spec().optimizer.eps = optimizer.eps();
  spec().optimizer.weight_decay = optimizer.weight_decay();
  spec().optimizer.clip_norm = optimizer.clip_norm();
}

void JobRules::CheckSchedule() {
  v1::ScheduleSpec& schedule = *job().mutable_training()->mutable_schedule();
  constexpr plan::ScheduleKind kKinds[] = {plan::ScheduleKind::kCosine,
                                           plan::ScheduleKind::kConstant,
                                           plan::ScheduleKind::kLinear,
                                           plan::ScheduleKind::kWsd};
  spec().schedule.kind = kKinds[Choice("spec.training.schedule.kind",
                                       schedule.mutable_kind(),
                                       {"cosine", "constant", "linear", "wsd"})];
  const bool steps_known = spec().steps > 0;
  if (schedule.warmup_steps() < 0 || (steps_known && schedule.warmup_steps() >= spec().steps)) {
    Fail("spec.training.schedule.warmupSteps",
         steps_known ? absl::StrCat("0 to ", spec().steps - 1, ", below the job's steps")
                     : "a whole number >= 0",
         absl::StrCat(schedule.warmup_steps()));
  }
  schedule.set_min_ratio(schedule.has_min_ratio() ? schedule.min_ratio() : 0.1);
  if (!(schedule.min_ratio() >= 0 && schedule.min_ratio() <= 1)) {
    Fail("spec.training.schedule.minRatio", "a number from 0 to 1", Number(schedule.min_ratio()));
  }
  spec().schedule.warmup_steps = schedule.warmup_steps();
  spec().schedule.min_ratio = schedule.min_ratio();
  CheckEvaluation();
}

void JobRules::CheckEvaluation() {
  v1::EvaluationSpec& evaluation = *job().mutable_training()->mutable_evaluation();
  AtLeast("spec.training.evaluation.every", evaluation.every(), 0);
  evaluation.set_batches(evaluation.has_batches() ? evaluation.batches() : 10);
  AtLeast("spec.training.evaluation.batches", evaluation.batches(), 1);
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
}

CanonicalJob Canonicalize(const v1::TrainingJob& job, const CanonicalizeOptions& options) {
  return JobRules(job, options).Run();
}

}  // namespace ravel
