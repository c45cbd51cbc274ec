// JobRules: devices, elasticity, lanes, checkpoints, restarts and the rest of what is not training
// itself.

#include <algorithm>
#include <bit>
#include <charconv>
#include <string>
#include <vector>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>

#include "common/model/freeze.h"
#include "common/model/gemm_paths.h"
#include "common/model/loss_scale.h"
#include "common/model/recipes.h"
#include "common/model/tensor_cut.h"
#include "common/store/open_store.h"
#include "common/time_text.h"
#include "coordinator/api/field_rules_proto.h"
#include "coordinator/api/job_rules_proto.h"

namespace ravel {
namespace {

constexpr int64_t kMinuteMs = 60'000;
constexpr int64_t kMaxDevices = 65536;
constexpr int64_t kMostLaneTokens = int64_t{1} << 30;    // what a plan can hold
constexpr int64_t kMostDrawnSamples = int64_t{1} << 20;  // PhiloxPosition::sample
constexpr int64_t kMaxSizes = 4096;

// A static scale is one that starts between equal bounds.
plan::LossScaleSpec ScaleOf(const v1::LossScaleSpec& given) {
  plan::LossScaleSpec scale;
  if (given.has_static_()) {
    scale.initial = scale.minimum = scale.maximum = given.static_();
    return scale;
  }
  const auto take = [](bool has, auto value, auto& to) { to = has ? value : to; };
  take(given.has_growth_factor(), given.growth_factor(), scale.growth_factor);
  take(given.has_backoff_factor(), given.backoff_factor(), scale.backoff_factor);
  take(given.has_growth_interval(), given.growth_interval(), scale.growth_interval);
  take(given.has_minimum(), given.minimum(), scale.minimum);
  scale.maximum = std::max({scale.maximum, scale.minimum, given.initial()});
  take(given.has_maximum(), given.maximum(), scale.maximum);
  scale.initial = std::min(std::max(scale.initial, scale.minimum), scale.maximum);
  take(given.has_initial(), given.initial(), scale.initial);
  return scale;
}

void FillScale(const plan::LossScaleSpec& scale, v1::LossScaleSpec& to) {
  to.set_initial(scale.initial);
  to.set_growth_factor(scale.growth_factor);
  to.set_backoff_factor(scale.backoff_factor);
  to.set_growth_interval(scale.growth_interval);
  to.set_minimum(scale.minimum);
  to.set_maximum(scale.maximum);
}

}  // namespace

void JobRules::CheckDevices() {
  const v1::DevicesSpec& devices = job().devices();
  spec().cpu_devices = devices.kind() == "cpu";
  spec().device_count = devices.count();
  spec().allow_slow_kernels = devices.allow_slow_kernels();
  if (!spec().cpu_devices && spec().transport != plan::Transport::kAuto) {
    Fail("spec.parallelism.transport",
         "auto: shm and gloo connect cpu devices",
         job().parallelism().transport());
  }
}

void JobRules::CheckRecipe(v1::PrecisionSpec& precision) {
  const std::string& name = precision.recipe();
  const bool per_tensor = name == "fp8_tensor";
  if (!per_tensor && !precision.scaling().empty()) {
    Fail("spec.precision.scaling", "a recipe fp8_tensor beside it", QuotedOrNothing(name));
  }
  if (per_tensor && precision.scaling().empty()) {
    precision.set_scaling("delayed");
  }
  const bool delayed = per_tensor && precision.scaling() == "delayed";
  if (!delayed && precision.amax_history() != 0) {
    Fail("spec.precision.amaxHistory",
         "recipe fp8_tensor with scaling delayed beside it",
         QuotedOrNothing(name));
  }
  if (delayed && precision.amax_history() == 0) {
    precision.set_amax_history(plan::kAmaxHistory);
  }
  if (!delayed && precision.has_amax_margin()) {
    Fail("spec.precision.amaxMargin",
         "recipe fp8_tensor with scaling delayed beside it",
         QuotedOrNothing(name));
  }
  if (delayed && !precision.has_amax_margin()) {
    precision.set_amax_margin(plan::kAmaxMargin);
  }
  CheckScales(delayed, per_tensor, precision);
  if (name.empty() && precision.keep_bf16_size() > 0) {
    Fail("spec.precision.keepBf16", "a recipe beside it", "nothing");
  }
  plan::RecipeSpec& recipe = spec().recipe;
  recipe.recipe = delayed               ? plan::Recipe::kDelayed
                  : per_tensor          ? plan::Recipe::kCurrent
                  : name == "fp8_block" ? plan::Recipe::kFloat8Block
                  : name == "mxfp8"     ? plan::Recipe::kMxFp8
                  : name == "nvfp4"     ? plan::Recipe::kNvFp4
                                        : plan::Recipe::kNone;
  recipe.keep_bf16 = {precision.keep_bf16().begin(), precision.keep_bf16().end()};
  recipe.history = delayed ? precision.amax_history() : plan::kAmaxHistory;
  recipe.margin = delayed ? precision.amax_margin() : 0;
  CheckEmulation(precision);
  if (!name.empty() && (precision.compute() == "fp32" || precision.compute() == "fp16")) {
    Fail("spec.precision.compute",
         "bf16, which a recipe needs",
         QuotedOrNothing(precision.compute()));
  }
  if (recipe.recipe != plan::Recipe::kNone && !plan::ScalesTokensApart(recipe.recipe) &&
      spec().tensor_chunks > 1) {
    Fail("spec.parallelism.tensorChunks",
         absl::StrCat(
             "1 with ", plan::RecipeName(recipe.recipe), ", which has scales of all tokens"),
         absl::StrCat(spec().tensor_chunks));
  }
  if (recipe.recipe == plan::Recipe::kNvFp4 && spec().global_batch > kMostDrawnSamples) {
    Fail("spec.training.globalBatch",
         absl::StrCat("at most ",
                      kMostDrawnSamples,
                      " with nvfp4, whose random bits tell as many samples apart"),
         absl::StrCat(spec().global_batch));
  }
  CheckShapesOf(recipe);
}

// What scales follow from, beside histories.
void JobRules::CheckScales(bool delayed, bool per_tensor, v1::PrecisionSpec& precision) {
  plan::RecipeSpec& recipe = spec().recipe;
  const auto choose =
      [&](int field, const std::string& path, std::string& given, auto& to, auto second) {
        if (!delayed && !given.empty()) {
          Fail(path,
               "recipe fp8_tensor with scaling delayed beside it",
               QuotedOrNothing(precision.recipe()));
        } else if (delayed && given.empty()) {
          given = field == v1::PrecisionSpec::kAmaxAlgorithmFieldNumber ? "max" : "current";
        } else if (delayed && !Failed(path) && ChosenIndex(precision, field) == 1) {
          to = second;
        }
      };
  recipe.amax_algorithm = plan::AmaxAlgorithm::kMax;
  recipe.first_scale = plan::FirstScale::kCurrent;
  choose(v1::PrecisionSpec::kAmaxAlgorithmFieldNumber,
         "spec.precision.amaxAlgorithm",
         *precision.mutable_amax_algorithm(),
         recipe.amax_algorithm,
         plan::AmaxAlgorithm::kMostRecent);
  choose(v1::PrecisionSpec::kFirstScaleFieldNumber,
         "spec.precision.firstScale",
         *precision.mutable_first_scale(),
         recipe.first_scale,
         plan::FirstScale::kOnes);
  const std::string epsilon = "spec.precision.amaxEpsilon";
  const bool has_epsilon = (per_tensor && !delayed) || precision.recipe() == "fp8_block";
  recipe.amax_epsilon = precision.amax_epsilon();
  if (!has_epsilon && precision.has_amax_epsilon()) {
    Fail(epsilon,
         "recipe fp8_block, or fp8_tensor with scaling current beside it",
         QuotedOrNothing(precision.recipe()));
  } else if (!(recipe.amax_epsilon >= 0 && recipe.amax_epsilon <= plan::kMostAmaxEpsilon)) {
    Fail(epsilon, "a number from 0 to 1", absl::StrCat(recipe.amax_epsilon));
  } else if (has_epsilon) {
    precision.set_amax_epsilon(recipe.amax_epsilon);
  }
}

void JobRules::CheckEmulation(v1::PrecisionSpec& precision) {
  plan::RecipeSpec& recipe = spec().recipe;
  recipe.emulation.clear();
  for (const std::string& name : precision.emulation()) {
    plan::GemmPath path = plan::GemmPath::kNone;
    if (!plan::ParseEmulation(name, path)) {
      Fail("spec.precision.emulation",
           "dequant_bf16, block_as_mxfp8, cpu_reference",
           QuotedOrNothing(name));
      return;
    }
    recipe.emulation.push_back(path);
  }
  if (Failed("spec.devices.kind")) {
    return;
  }
  const absl::StatusOr<plan::GemmPath> chosen = plan::ChooseGemmPath(recipe, spec().cpu_devices);
  if (!chosen.ok()) {
    FailAs(chosen.status());
    return;
  }
  if (plan::IsEmulation(*chosen) && recipe.emulation.empty()) {
    precision.add_emulation(plan::GemmPathName(*chosen));
    recipe.emulation = {*chosen};
  }
  CheckFastAccumulation(*chosen, precision);
}

void JobRules::CheckFastAccumulation(plan::GemmPath path, v1::PrecisionSpec& precision) {
  plan::FastAccumulation& fast = spec().recipe.fast_accumulation;
  fast = plan::FastAccumulation::kForward;
  if (Failed("spec.precision.fastAccum")) {
    return;
  }
  const bool given = !precision.fast_accum().empty();
  if (given) {
    constexpr plan::FastAccumulation kChoices[] = {
        plan::FastAccumulation::kNone,
        plan::FastAccumulation::kForward,
        plan::FastAccumulation::kForwardAndInputGradient};
    fast = kChoices[ChosenIndex(precision, v1::PrecisionSpec::kFastAccumFieldNumber)];
    const absl::Status checked = plan::CheckFastAccumulation(fast, path);
    if (!checked.ok()) {
      FailAs(checked);
    }
  } else if (plan::MayAccumulateFast(path)) {
    precision.set_fast_accum(plan::FastAccumulationName(fast));
  }
}

// Shapes and patterns; how many tokens blocks need is the planner's matter.
void JobRules::CheckShapesOf(const plan::RecipeSpec& recipe) {
  if (recipe.recipe == plan::Recipe::kNone || !spec().model.has_value()) {
    return;
  }
  constexpr plan::MicroBatchShape kWholeBlocks = {.sequences = 1, .sequence_tokens = 128};
  plan::ModelInventory inventory = plan::BuildInventory(*spec().model, kWholeBlocks);
  absl::Status applied = plan::ApplyFreeze(spec().freeze, inventory);
  if (!applied.ok()) {
    return;  // told by its own rule
  }
  const plan::GemmPath path =
      plan::ChooseGemmPath(recipe, spec().cpu_devices).value_or(plan::GemmPath::kNone);
  applied = plan::ApplyRecipe(recipe, path, kWholeBlocks, inventory);
  if (!applied.ok()) {
    FailAs(applied);
  }
}

void JobRules::CheckLossScale(v1::PrecisionSpec& precision) {
  const std::string at = "spec.precision.lossScale";
  if (precision.compute() != "fp16") {
    if (precision.has_loss_scale() && !Failed("spec.precision.compute")) {
      Fail(at, "nothing, or precision.compute fp16", "a value");
    }
    return;
  }
  v1::LossScaleSpec& given = *precision.mutable_loss_scale();
  std::vector<const google::protobuf::FieldDescriptor*> fields;
  given.GetReflection()->ListFields(given, &fields);
  bool failed = false;
  for (const google::protobuf::FieldDescriptor* field : fields) {
    const std::string path = absl::StrCat(at, ".", field->json_name());
    if (given.has_static_() && field->number() != v1::LossScaleSpec::kStaticFieldNumber) {
      Fail(path, "nothing beside static", "a value");
    }
    failed = failed || Failed(path);
  }
  if (failed) {
    return;  // told by its own rule
  }
  spec().loss_scale = ScaleOf(given);
  const absl::Status checked = plan::CheckLossScale(spec().loss_scale);
  if (!checked.ok() && given.has_static_()) {
    Fail(at + ".static", "a power of two from 1 to 16777216", absl::StrCat(given.static_()));
  } else if (!checked.ok()) {
    FailAs(checked);
  } else if (!given.has_static_()) {
    FillScale(spec().loss_scale, given);
  }
}

void JobRules::CheckPrecision() {
  v1::PrecisionSpec& precision = *job().mutable_precision();
  const bool cpu = spec().cpu_devices;
  CheckRecipe(precision);
  if (precision.compute().empty()) {
    precision.set_compute(cpu && precision.recipe().empty() ? "fp32" : "bf16");
  }
  CheckLossScale(precision);
  const bool bf16 = precision.compute() == "bf16";
  const bool fp16 = precision.compute() == "fp16";
  spec().compute = bf16   ? plan::ComputeType::kBF16
                   : fp16 ? plan::ComputeType::kF16
                          : plan::ComputeType::kF32;
  const bool narrow = bf16 || fp16;
  if ((!narrow || cpu) && spec().allow_slow_kernels && !Failed("spec.precision.compute") &&
      !Failed("spec.devices.kind")) {
    Fail("spec.devices.allowSlowKernels",
         "false, or gpu devices and precision.compute bf16 or fp16",
         "true");
  }
  if (bf16 || Failed("spec.precision.compute")) {
    return;
  }
  if (spec().optimizer.main_weights != plan::MainWeightForm::kF32) {
    Fail("spec.training.optimizer.mainWeights",
         "fp32, or precision.compute bf16",
         QuotedOrNothing(job().training().optimizer().main_weights()));
  }
}

void JobRules::CheckElastic() {
  v1::ElasticSpec& elastic = *job().mutable_elastic();
  const bool has_range = elastic.min() != 0 || elastic.max() != 0 || elastic.step() != 0;
  if (has_range && !elastic.sizes().empty()) {
    Fail("spec.elastic", "either sizes or min and max", "both");
  } else if (has_range) {
    ExpandSizes();
  } else if (elastic.sizes().empty() && !Failed("spec.devices.count")) {
    elastic.add_sizes(spec().device_count);
  }
  std::sort(elastic.mutable_sizes()->begin(), elastic.mutable_sizes()->end());
  for (int i = 0; i < elastic.sizes_size(); ++i) {
    if (elastic.sizes(i) < 1 || elastic.sizes(i) > kMaxDevices) {
      Fail("spec.elastic.sizes",
           absl::StrCat("whole numbers from 1 to ", kMaxDevices),
           absl::StrCat(elastic.sizes(i)));
    } else if (i > 0 && elastic.sizes(i) == elastic.sizes(i - 1)) {
      Fail("spec.elastic.sizes", "each size once", absl::StrCat(elastic.sizes(i), " again"));
    }
  }
  spec().elastic.sizes.assign(elastic.sizes().begin(), elastic.sizes().end());
  const auto& sizes = spec().elastic.sizes;
  if (!sizes.empty() && !Failed("spec.devices.count") && !Failed("spec.elastic.sizes") &&
      std::find(sizes.begin(), sizes.end(), spec().device_count) == sizes.end()) {
    Fail("spec.devices.count",
         absl::StrCat("one of the allowed sizes (", absl::StrJoin(sizes, ", "), ")"),
         absl::StrCat(spec().device_count));
  }
  CheckReplicas();
  spec().elastic.grow_delay_ms = DurationOf(elastic.grow_delay());
  spec().elastic.grow_every_ms = DurationOf(elastic.grow_every());
}

void JobRules::ExpandSizes() {
  v1::ElasticSpec& elastic = *job().mutable_elastic();
  const int64_t step = elastic.step() == 0 ? spec().replicas * spec().tensor : elastic.step();
  if (elastic.min() < 1 || elastic.min() > kMaxDevices) {
    Fail("spec.elastic.min",
         absl::StrCat("a whole number from 1 to ", kMaxDevices),
         elastic.min() == 0 ? "nothing" : absl::StrCat(elastic.min()));
  } else if (elastic.max() < elastic.min() || elastic.max() > kMaxDevices) {
    Fail("spec.elastic.max",
         absl::StrCat("a whole number from ", elastic.min(), " (elastic.min) to ", kMaxDevices),
         elastic.max() == 0 ? "nothing" : absl::StrCat(elastic.max()));
  } else if (step < 1 || step > kMaxDevices) {
    Fail("spec.elastic.step",
         absl::StrCat("a whole number from 1 to ", kMaxDevices),
         absl::StrCat(step));
  } else if ((elastic.max() - elastic.min()) / step >= kMaxSizes) {
    Fail("spec.elastic.step",
         absl::StrCat("steps that give at most ", kMaxSizes, " sizes"),
         absl::StrCat(step));
  } else {
    for (int64_t size = elastic.min(); size <= elastic.max(); size += step) {
      elastic.add_sizes(size);
    }
    elastic.clear_min();
    elastic.clear_max();
    elastic.clear_step();
  }
}

void JobRules::CheckDeterminism() {
  v1::DeterminismSpec& determinism = *job().mutable_determinism();
  if (determinism.mode().empty()) {
    determinism.set_mode(spec().cpu_devices ? "exact" : "fast");
  }
  spec().determinism =
      determinism.mode() == "exact" ? plan::DeterminismMode::kExact : plan::DeterminismMode::kFast;
  constexpr plan::AlgorithmChoice kAlgorithms[] = {plan::AlgorithmChoice::kMeasured,
                                                   plan::AlgorithmChoice::kProposed};
  spec().algorithms =
      kAlgorithms[ChosenIndex(determinism, v1::DeterminismSpec::kAlgorithmsFieldNumber)];
  const int64_t ranks =
      std::has_single_bit(static_cast<uint64_t>(spec().tensor)) ? spec().tensor : 1;
  if (determinism.tensor_parts() == 0) {
    determinism.set_tensor_parts(ranks);
  }
  const int64_t parts = determinism.tensor_parts();
  if (parts < 1 || parts > plan::kMostTensorParts ||
      !std::has_single_bit(static_cast<uint64_t>(parts))) {
    Fail("spec.determinism.tensorParts",
         absl::StrCat("a power of two up to ", plan::kMostTensorParts),
         absl::StrCat(parts));
  } else if (parts > 1 && parts % ranks != 0) {
    Fail("spec.determinism.tensorParts",
         absl::StrCat("a multiple of parallelism.tensor ", ranks),
         absl::StrCat(parts));
  } else {
    spec().tensor_parts = parts;
  }
  const int64_t lanes = determinism.virtual_ranks();
  const auto& sizes = spec().elastic.sizes;
  const int64_t tensor = spec().tensor;
  const int64_t largest = DivCeil(sizes.empty() ? 1 : std::max<int64_t>(sizes.back(), 1), tensor);
  if (lanes == 0) {
    determinism.set_virtual_ranks(
        static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(largest))));
  } else if (lanes < 0 || !std::has_single_bit(static_cast<uint64_t>(lanes)) ||
             lanes > kMaxDevices) {
    Fail("spec.determinism.virtualRanks",
         lanes > kMaxDevices ? absl::StrCat("at most ", kMaxDevices) : "a power of two",
         absl::StrCat(lanes));
    return;
  } else if (lanes < largest && !Failed("spec.elastic.sizes")) {
    Fail("spec.determinism.virtualRanks",
         absl::StrCat("a power of two >= ",
                      largest,
                      ", the largest allowed size",
                      tensor > 1 ? " divided by parallelism.tensor" : ""),
         absl::StrCat(lanes));
    return;
  }
  spec().virtual_ranks = determinism.virtual_ranks();
  if (spec().determinism == plan::DeterminismMode::kExact && spec().global_batch > 0 &&
      spec().global_batch % spec().virtual_ranks != 0) {
    Fail("spec.training.globalBatch",
         absl::StrCat("a multiple of the ",
                      spec().virtual_ranks,
                      " virtual ranks (determinism.virtualRanks)"),
         absl::StrCat(spec().global_batch));
    return;
  }
  const int64_t sequence = spec().data.sequence_length;
  const int64_t most = sequence > 0 ? kMostLaneTokens / sequence * spec().virtual_ranks : 0;
  if (most > 0 && spec().global_batch > most) {
    Fail("spec.training.globalBatch",
         absl::StrCat("at most ", most, " (2^30 tokens on each virtual rank)"),
         absl::StrCat(spec().global_batch));
  }
}

void JobRules::CheckCheckpoint() {
  v1::CheckpointSpec& checkpoint = *job().mutable_checkpoint();
  const std::string& store = checkpoint.store();
  if (store.empty()) {
    Fail("spec.checkpoint.store",
         "ravel://HOST:PORT/PATH, s3://BUCKET/PATH, or the absolute path of a shared directory",
         "nothing");
  } else if (absl::StrContains(store, "://") && !absl::StartsWith(store, "file://")) {
    CheckRemoteStore("spec.checkpoint.store", store);
  } else {
    const std::string path = AbsolutePath("spec.checkpoint.store", store);
    if (!path.empty()) {
      checkpoint.set_store(absl::StrCat("file://", path));
    }
  }
  spec().checkpoint.store = checkpoint.store();
  spec().checkpoint.every_steps = checkpoint.every_steps();
  if (checkpoint.every().empty() && checkpoint.every_steps() <= 0) {
    checkpoint.set_every("30m");
  }
  spec().checkpoint.every_ms = DurationOf(checkpoint.every());
  spec().checkpoint.at_start = checkpoint.at_start();
  spec().checkpoint.max_age_ms = DurationOf(checkpoint.max_age());
  if (spec().checkpoint.max_age_ms > 0 &&
      spec().checkpoint.max_age_ms < spec().checkpoint.every_ms) {
    Fail("spec.checkpoint.maxAge",
         absl::StrCat("at least spec.checkpoint.every, ", checkpoint.every()),
         checkpoint.max_age());
  }
  spec().checkpoint.wait_when_busy = checkpoint.when_busy() == "wait";
  spec().checkpoint.max_failed_saves = checkpoint.max_failed_saves();
  spec().checkpoint.allow_numerics_change = checkpoint.allow_numerics_change();
  spec().checkpoint.keep_last = checkpoint.keep().last();
  spec().checkpoint.keep_every_steps = checkpoint.keep().every_steps();
  CheckResume();
}

void JobRules::CheckRemoteStore(const std::string& field, const std::string& url) {
  const absl::Status known = store::CheckStoreUrl(url);
  if (absl::IsInvalidArgument(known)) {
    Fail(field,
         "ravel://HOST:PORT/PATH, s3://BUCKET/PATH, file:///PATH or /PATH",
         QuotedOrNothing(url));
  } else if (!known.ok()) {
    Fail(field, "a store that this coordinator can use", std::string(known.message()));
  }
}

void JobRules::CheckResume() {
  v1::CheckpointSpec& checkpoint = *job().mutable_checkpoint();
  const std::string& text = checkpoint.resume_from();
  int64_t step = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), step);
  const bool is_step = error == std::errc() && end == text.data() + text.size() && step >= 0;
  if (text != "auto" && text != "none" && !is_step) {
    if (store::IsRemoteStore(text)) {
      CheckRemoteStore("spec.checkpoint.resumeFrom", text);
    } else if (!absl::StartsWith(text, "/") && !absl::StartsWith(text, "file://")) {
      Fail("spec.checkpoint.resumeFrom",
           "auto, none, a step number, or the path or URL of a step directory",
           QuotedOrNothing(text));
    } else {
      const std::string path = AbsolutePath("spec.checkpoint.resumeFrom", text);
      if (path == "/") {
        Fail("spec.checkpoint.resumeFrom", "the path of a step directory", QuotedOrNothing(path));
      }
      checkpoint.set_resume_from(path);
    }
  }
  spec().checkpoint.resume_from = checkpoint.resume_from();
  spec().checkpoint.fresh = checkpoint.fresh();
}

void JobRules::CheckRestart() {
  v1::RestartSpec& restart = *job().mutable_restart();
  plan::RestartSpec& out = spec().restart;
  out.max_failures = restart.max_failures();
  out.max_per_day = restart.max_per_day();
  out.max_no_progress = restart.max_no_progress();
  out.backoff_ms = DurationOf(restart.backoff());
  if (restart.max_backoff().empty()) {
    restart.set_max_backoff(FormatDurationExact(std::max(out.backoff_ms, 5 * kMinuteMs)));
  }
  out.max_backoff_ms = DurationOf(restart.max_backoff());
  if (!Failed("spec.restart.maxBackoff") && out.max_backoff_ms < out.backoff_ms) {
    Fail("spec.restart.maxBackoff",
         absl::StrCat("at least restart.backoff, ", restart.backoff()),
         QuotedOrNothing(restart.max_backoff()));
  }
}

void JobRules::CheckRest() {
  spec().detection_ms = DurationOf(job().detection().time());
  spec().horizon_ms = DurationOf(job().detection().horizon());
  spec().stall_factor = job().detection().stall_factor();
  spec().warmup_allowance_ms = DurationOf(job().detection().warmup_allowance());
  const v1::ObservabilitySpec& observability = job().observability();
  spec().log_every = observability.log_every();
  spec().norms_every = observability.norms_every();
  spec().localise = observability.localise();
  if (observability.has_trace()) {
    CheckTrace();
  }
  if (spec().norms_every > 0 && !observability.has_trace() &&
      store::IsRemoteStore(spec().checkpoint.store)) {
    Fail("spec.observability.trace.directory",
         "a directory, because norms are appended to a file and checkpoint.store is none",
         "nothing");
  }
}

void JobRules::CheckTrace() {
  const v1::TraceSpec& trace = job().observability().trace();
  const std::string at = "spec.observability.trace";
  if (!Failed(at + ".firstStep") && trace.last_step() < trace.first_step()) {
    Fail(at + ".lastStep",
         absl::StrCat("a whole number >= ", trace.first_step()),
         absl::StrCat(trace.last_step()));
  }
  const std::string directory = AbsolutePath(at + ".directory", trace.directory());
  spec().trace_first_step = trace.first_step();
  spec().trace_last_step = trace.last_step();
  spec().trace_directory = directory;
}

}  // namespace ravel
