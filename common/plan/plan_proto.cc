// The half of the plan codec that is about JobSpec. Enumerations are checked on reading, since
// bytes may come from a newer program; the resolved model is validated as a config.json is.
// Serialisation is deterministic: the coordinator stores these bytes and sends the same ones to
// trainers.

#include "common/plan/plan_proto.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <limits>
#include <utility>

#include <absl/strings/str_cat.h>

#include "common/plan/plan_parts_proto.h"

namespace ravel::plan {
namespace {

constexpr StateTypes kStateNumbers[] = {kF32States, kBf16States, kFp8States};
constexpr int32_t kStateKinds = 3;

int32_t StateNumber(DType StateTypes::*state, const StateTypes& types) {
  return static_cast<int32_t>(
      std::find_if(std::begin(kStateNumbers),
                   std::end(kStateNumbers),
                   [&](const StateTypes& kind) { return kind.*state == types.*state; }) -
      std::begin(kStateNumbers));
}

// Of both types: the first, plus 3 for each step around the table from it to the second. So 0, 1
// and 2 are pairs of equals, as they were when there was one type.
int32_t StateTypesNumber(const StateTypes& types) {
  const int32_t mean = StateNumber(&StateTypes::mean, types);
  const int32_t square = StateNumber(&StateTypes::square, types);
  const int32_t step = (square - mean + kStateKinds) % kStateKinds;
  return mean + kStateKinds * step;
}

absl::Status StateTypesFromNumber(int32_t number, StateTypes& types) {
  if (number < 0 || number >= kStateKinds * kStateKinds) {
    return absl::InvalidArgumentError(absl::StrCat("state_type: expected 0 to 8, got ", number));
  }
  types.mean = kStateNumbers[number % kStateKinds].mean;
  types.square = kStateNumbers[(number % kStateKinds + number / kStateKinds) % kStateKinds].square;
  return absl::OkStatus();
}

}  // namespace

v1::PlannedModel ModelToProto(const ModelConfig& model) {
  v1::PlannedModel proto;
  proto.set_architecture(static_cast<int32_t>(model.architecture));
  proto.set_vocab_size(model.vocab_size);
  proto.set_hidden_size(model.hidden_size);
  proto.set_intermediate_size(model.intermediate_size);
  proto.set_num_hidden_layers(model.num_hidden_layers);
  proto.set_num_attention_heads(model.num_attention_heads);
  proto.set_num_key_value_heads(model.num_key_value_heads);
  proto.set_head_dim(model.head_dim);
  proto.set_max_position_embeddings(model.max_position_embeddings);
  proto.set_rms_norm_eps(model.rms_norm_eps);
  proto.set_rope_theta(model.rope_theta);
  proto.set_tie_word_embeddings(model.tie_word_embeddings);
  proto.set_rope_scaling_factor(model.rope_scaling_factor);
  proto.set_rope_low_freq_factor(model.rope_low_freq_factor);
  proto.set_rope_high_freq_factor(model.rope_high_freq_factor);
  proto.set_rope_original_max_position_embeddings(model.rope_original_max_position_embeddings);
  proto.set_layer_norm_eps(model.layer_norm_eps);
  proto.set_layer_sharing(model.layer_sharing);
  proto.set_source_json(model.source_json);
  return proto;
}

absl::StatusOr<ModelConfig> ModelFromProto(const v1::PlannedModel& proto) {
  ModelConfig model;
  RETURN_IF_ERROR(
      ReadEnum("model.architecture", proto.architecture(), kLastArchitecture, model.architecture));
  model.vocab_size = proto.vocab_size();
  model.hidden_size = proto.hidden_size();
  model.intermediate_size = proto.intermediate_size();
  model.num_hidden_layers = proto.num_hidden_layers();
  model.num_attention_heads = proto.num_attention_heads();
  model.num_key_value_heads = proto.num_key_value_heads();
  model.head_dim = proto.head_dim();
  model.max_position_embeddings = proto.max_position_embeddings();
  model.rms_norm_eps = proto.rms_norm_eps();
  model.rope_theta = proto.rope_theta();
  model.tie_word_embeddings = proto.tie_word_embeddings();
  model.rope_scaling_factor = proto.rope_scaling_factor();
  model.rope_low_freq_factor = proto.rope_low_freq_factor();
  model.rope_high_freq_factor = proto.rope_high_freq_factor();
  model.rope_original_max_position_embeddings = proto.rope_original_max_position_embeddings();
  model.layer_norm_eps = proto.layer_norm_eps();
  model.layer_sharing = proto.layer_sharing();
  model.source_json = proto.source_json();
  return ValidateModelConfig(std::move(model));
}

namespace {

void DataToProto(const JobSpec& spec, v1::PlannedJob& proto) {
  for (const DataSource& source : spec.data.train) {
    v1::PlannedSource& added = *proto.add_train();
    added.set_path(source.path);
    added.set_weight(source.weight);
    added.set_tokens(source.tokens);
    added.set_sample_digest(source.sample_digest);
  }
  for (const DataSource& source : spec.data.validation) {
    v1::PlannedSource& added = *proto.add_validation();
    added.set_path(source.path);
    added.set_weight(source.weight);
    added.set_tokens(source.tokens);
    added.set_sample_digest(source.sample_digest);
  }
  proto.set_token_format(static_cast<int32_t>(spec.data.format));
  proto.set_sequence_length(spec.data.sequence_length);
  proto.set_passes(spec.data.passes);
  proto.set_tokenizer(spec.data.tokenizer);
}

void TrainingToProto(const JobSpec& spec, v1::PlannedJob& proto) {
  proto.set_steps(spec.steps);
  proto.set_global_batch(spec.global_batch);
  proto.set_micro_batch(spec.micro_batch);
  proto.set_seed(spec.seed);
  proto.set_lr(spec.optimizer.lr);
  proto.set_beta1(spec.optimizer.beta1);
  proto.set_beta2(spec.optimizer.beta2);
  proto.set_eps(spec.optimizer.eps);
  proto.set_weight_decay(spec.optimizer.weight_decay);
  proto.set_clip_norm(spec.optimizer.clip_norm);
  proto.set_state_type(StateTypesNumber(spec.optimizer.state_types));
  proto.set_main_weights(static_cast<int32_t>(spec.optimizer.main_weights));
  proto.set_offload_fraction(spec.optimizer.offload.fraction);
  proto.set_offload_path(spec.optimizer.offload.path);
  proto.set_offload_inline(!spec.optimizer.offload.overlap);
  proto.set_offload_automatic(spec.optimizer.offload.automatic);
  proto.set_offload_device_bytes(spec.optimizer.offload.device_bytes);
  proto.set_optimizer(static_cast<int32_t>(spec.optimizer.kind));
  proto.set_layer_drop(spec.layer_drop);
  proto.set_schedule_kind(static_cast<int32_t>(spec.schedule.kind));
  proto.set_warmup_steps(spec.schedule.warmup_steps);
  proto.set_min_ratio(spec.schedule.min_ratio);
  proto.set_evaluation_every(spec.evaluation_every);
  proto.set_evaluation_batches(spec.evaluation_batches);
}

void LossScaleToProto(const LossScaleSpec& spec, v1::PlannedLossScale& proto) {
  proto.set_initial(spec.initial);
  proto.set_growth_factor(spec.growth_factor);
  proto.set_backoff_factor(spec.backoff_factor);
  proto.set_growth_interval(spec.growth_interval);
  proto.set_minimum(spec.minimum);
  proto.set_maximum(spec.maximum);
}

LossScaleSpec LossScaleFromProto(const v1::PlannedLossScale& proto) {
  return {.initial = proto.initial(),
          .growth_factor = proto.growth_factor(),
          .backoff_factor = proto.backoff_factor(),
          .growth_interval = proto.growth_interval(),
          .minimum = proto.minimum(),
          .maximum = proto.maximum()};
}

void ParallelismToProto(const JobSpec& spec, v1::PlannedJob& proto) {
  proto.set_strategy(static_cast<int32_t>(spec.strategy));
  proto.set_replicate_strategy(static_cast<int32_t>(spec.replicate_strategy));
  proto.set_replicas(spec.replicas);
  proto.set_tensor(spec.tensor == 1 ? 0 : spec.tensor);
  proto.set_sequence_parallel(spec.sequence_parallel);
  proto.set_tensor_chunks(spec.tensor_chunks == 1 ? 0 : spec.tensor_chunks);
  proto.set_tensor_across_nodes(spec.tensor_across_nodes);
  for (const UnitStrategy& unit : spec.units) {
    v1::PlannedUnitStrategy& added = *proto.add_units();
    added.set_match(unit.match);
    added.set_strategy(static_cast<int32_t>(unit.strategy));
    if (unit.replicate.has_value()) {
      added.set_replicate(static_cast<int32_t>(*unit.replicate));
    }
  }
  proto.set_recompute(static_cast<int32_t>(spec.recompute));
  proto.set_gradient_wire(static_cast<int32_t>(spec.gradient_wire));
  proto.set_compute(static_cast<int32_t>(spec.compute));
  if (spec.loss_scale != LossScaleSpec{}) {
    LossScaleToProto(spec.loss_scale, *proto.mutable_loss_scale());
  }
  proto.set_recipe(static_cast<int32_t>(spec.recipe.recipe));
  for (const std::string& pattern : spec.recipe.keep_bf16) {
    proto.add_keep_bf16(pattern);
  }
  proto.set_amax_history(spec.recipe.history == kAmaxHistory ? 0 : spec.recipe.history);
  proto.set_amax_margin(spec.recipe.margin);
  for (const GemmPath path : spec.recipe.emulation) {
    proto.add_emulation(static_cast<int32_t>(path));
  }
  proto.set_fast_accumulation(static_cast<int32_t>(spec.recipe.fast_accumulation));
  proto.set_amax_algorithm(static_cast<int32_t>(spec.recipe.amax_algorithm));
  proto.set_first_scale(static_cast<int32_t>(spec.recipe.first_scale));
  proto.set_amax_epsilon(spec.recipe.amax_epsilon);
  proto.set_communication_blocks(spec.communication_blocks);
  for (const std::string& pattern : spec.freeze) {
    proto.add_freeze(pattern);
  }
  proto.set_allow_padding(spec.allow_padding);
  proto.set_gather_window_bytes(spec.gather_window_bytes);
  proto.set_staging_window_bytes(spec.staging_window_bytes);
}

void RunningToProto(const JobSpec& spec, v1::PlannedJob& proto) {
  proto.set_transport(static_cast<int32_t>(spec.transport));
  proto.set_cpu_devices(spec.cpu_devices);
  proto.set_device_count(spec.device_count);
  proto.set_allow_slow_kernels(spec.allow_slow_kernels);
  for (const int64_t size : spec.elastic.sizes) {
    proto.add_sizes(size);
  }
  proto.set_grow_delay_ms(spec.elastic.grow_delay_ms);
  proto.set_grow_every_ms(spec.elastic.grow_every_ms);
  proto.set_determinism(static_cast<int32_t>(spec.determinism));
  proto.set_algorithms(static_cast<int32_t>(spec.algorithms));
  proto.set_virtual_ranks(spec.virtual_ranks);
  proto.set_tensor_parts(spec.tensor_parts == 1 ? 0 : spec.tensor_parts);
  proto.set_store(spec.checkpoint.store);
  proto.set_every_steps(spec.checkpoint.every_steps);
  proto.set_every_ms(spec.checkpoint.every_ms);
  proto.set_at_start(spec.checkpoint.at_start);
  proto.set_keep_last(spec.checkpoint.keep_last);
  proto.set_keep_every_steps(spec.checkpoint.keep_every_steps);
  proto.set_resume_from(spec.checkpoint.resume_from);
  proto.set_fresh(spec.checkpoint.fresh);
  proto.set_max_age_ms(spec.checkpoint.max_age_ms);
  proto.set_wait_when_busy(spec.checkpoint.wait_when_busy);
  proto.set_max_failed_saves(spec.checkpoint.max_failed_saves);
  proto.set_allow_numerics_change(spec.checkpoint.allow_numerics_change);
  proto.set_max_failures(spec.restart.max_failures);
  proto.set_max_per_day(spec.restart.max_per_day);
  proto.set_max_no_progress(spec.restart.max_no_progress);
  proto.set_backoff_ms(spec.restart.backoff_ms);
  proto.set_max_backoff_ms(spec.restart.max_backoff_ms);
  proto.set_detection_ms(spec.detection_ms);
  proto.set_horizon_ms(spec.horizon_ms);
  proto.set_max_run_time_ms(spec.max_run_time_ms);
  proto.set_ttl_ms(spec.ttl_ms);
  proto.set_stall_factor(spec.stall_factor);
  proto.set_warmup_allowance_ms(spec.warmup_allowance_ms);
  proto.set_log_every(spec.log_every);
  proto.set_trace_first_step(spec.trace_first_step);
  proto.set_trace_last_step(spec.trace_last_step);
  proto.set_trace_directory(spec.trace_directory);
  proto.set_localise(spec.localise);
  proto.set_norms_every(spec.norms_every);
  for (const EnvironmentVariable& variable : spec.environment) {
    v1::PlannedVariable& added = *proto.add_environment();
    added.set_name(variable.name);
    added.set_value(variable.value);
    added.set_secret(variable.secret);
  }
  proto.set_network(spec.network);
}

DataSource SourceFromProto(const v1::PlannedSource& proto) {
  return {.path = proto.path(),
          .weight = proto.weight(),
          .tokens = proto.tokens(),
          .sample_digest = proto.sample_digest()};
}

absl::Status DataFromProto(const v1::PlannedJob& proto, JobSpec& spec) {
  for (const v1::PlannedSource& source : proto.train()) {
    spec.data.train.push_back(SourceFromProto(source));
  }
  for (const v1::PlannedSource& source : proto.validation()) {
    spec.data.validation.push_back(SourceFromProto(source));
  }
  RETURN_IF_ERROR(
      ReadEnum("token_format", proto.token_format(), TokenFormat::kFlatU32, spec.data.format));
  spec.data.sequence_length = proto.sequence_length();
  spec.data.passes = proto.passes();
  spec.data.tokenizer = proto.tokenizer();
  return absl::OkStatus();
}

absl::Status TrainingFromProto(const v1::PlannedJob& proto, JobSpec& spec) {
  spec.steps = proto.steps();
  spec.global_batch = proto.global_batch();
  spec.micro_batch = proto.micro_batch();
  spec.seed = proto.seed();
  spec.optimizer = {.kind = OptimizerKind::kAdamW,
                    .lr = proto.lr(),
                    .beta1 = proto.beta1(),
                    .beta2 = proto.beta2(),
                    .eps = proto.eps(),
                    .weight_decay = proto.weight_decay(),
                    .clip_norm = proto.clip_norm()};
  RETURN_IF_ERROR(StateTypesFromNumber(proto.state_type(), spec.optimizer.state_types));
  RETURN_IF_ERROR(ReadEnum("optimizer", proto.optimizer(), kLastOptimizer, spec.optimizer.kind));
  RETURN_IF_ERROR(ReadEnum("main_weights",
                           proto.main_weights(),
                           MainWeightForm::kBF16Remainder,
                           spec.optimizer.main_weights));
  RETURN_IF_ERROR(CheckOffloadFraction("offload_fraction", proto.offload_fraction()));
  spec.optimizer.offload = {.fraction = proto.offload_fraction(),
                            .path = proto.offload_path(),
                            .overlap = !proto.offload_inline(),
                            .automatic = proto.offload_automatic(),
                            .device_bytes = proto.offload_device_bytes()};
  RETURN_IF_ERROR(
      ReadEnum("schedule_kind", proto.schedule_kind(), ScheduleKind::kWsd, spec.schedule.kind));
  spec.schedule.warmup_steps = proto.warmup_steps();
  spec.schedule.min_ratio = proto.min_ratio();
  RETURN_IF_ERROR(CheckLayerDrop("layer_drop", proto.layer_drop()));
  spec.layer_drop = proto.layer_drop();
  spec.evaluation_every = proto.evaluation_every();
  spec.evaluation_batches = proto.evaluation_batches();
  return absl::OkStatus();
}

absl::StatusOr<UnitStrategy> UnitFromProto(const v1::PlannedUnitStrategy& proto) {
  UnitStrategy unit;
  unit.match = proto.match();
  RETURN_IF_ERROR(
      ReadEnum("units.strategy", proto.strategy(), Strategy::kOptimGradsParams, unit.strategy));
  if (proto.has_replicate()) {
    RETURN_IF_ERROR(ReadEnum("units.replicate",
                             proto.replicate(),
                             Strategy::kOptimGradsParams,
                             unit.replicate.emplace()));
  }
  return unit;
}

absl::Status ParallelismFromProto(const v1::PlannedJob& proto, JobSpec& spec) {
  RETURN_IF_ERROR(
      ReadEnum("strategy", proto.strategy(), Strategy::kOptimGradsParams, spec.strategy));
  RETURN_IF_ERROR(ReadEnum("replicate_strategy",
                           proto.replicate_strategy(),
                           Strategy::kOptimGradsParams,
                           spec.replicate_strategy));
  RETURN_IF_ERROR(
      ReadEnum("recompute", proto.recompute(), RecomputePolicy::kBlock, spec.recompute));
  RETURN_IF_ERROR(
      ReadEnum("gradient_wire", proto.gradient_wire(), WireType::kBF16, spec.gradient_wire));
  RETURN_IF_ERROR(ReadEnum("compute", proto.compute(), ComputeType::kF16, spec.compute));
  if (proto.has_loss_scale()) {
    spec.loss_scale = LossScaleFromProto(proto.loss_scale());
    RETURN_IF_ERROR(CheckLossScale(spec.loss_scale));
  }
  RETURN_IF_ERROR(ReadEnum("recipe", proto.recipe(), Recipe::kNvFp4, spec.recipe.recipe));
  spec.recipe.keep_bf16 = {proto.keep_bf16().begin(), proto.keep_bf16().end()};
  spec.recipe.history = proto.amax_history() == 0 ? kAmaxHistory : proto.amax_history();
  spec.recipe.margin = proto.amax_margin();
  for (const int32_t path : proto.emulation()) {
    GemmPath& emulation = spec.recipe.emulation.emplace_back();
    RETURN_IF_ERROR(ReadEnum("emulation", path, kLastGemmPath, emulation));
    if (!IsEmulation(emulation)) {
      return absl::InvalidArgumentError(absl::StrCat("emulation ", path, " is none"));
    }
  }
  RETURN_IF_ERROR(ReadEnum("fast_accumulation",
                           proto.fast_accumulation(),
                           kLastFastAccumulation,
                           spec.recipe.fast_accumulation));
  RETURN_IF_ERROR(ReadEnum("amax_algorithm",
                           proto.amax_algorithm(),
                           AmaxAlgorithm::kMostRecent,
                           spec.recipe.amax_algorithm));
  RETURN_IF_ERROR(
      ReadEnum("first_scale", proto.first_scale(), FirstScale::kOnes, spec.recipe.first_scale));
  spec.recipe.amax_epsilon = proto.amax_epsilon();
  spec.communication_blocks = proto.communication_blocks();
  // 0: written before there were replicas.
  spec.replicas = std::max<int64_t>(1, proto.replicas());
  spec.tensor = std::max<int64_t>(1, proto.tensor());
  spec.sequence_parallel = proto.sequence_parallel();
  spec.tensor_chunks = std::max<int64_t>(1, proto.tensor_chunks());
  spec.tensor_across_nodes = proto.tensor_across_nodes();
  for (const v1::PlannedUnitStrategy& from : proto.units()) {
    ASSIGN_OR_RETURN(UnitStrategy unit, UnitFromProto(from));
    spec.units.push_back(std::move(unit));
  }
  spec.freeze = {proto.freeze().begin(), proto.freeze().end()};
  spec.allow_padding = proto.allow_padding();
  spec.gather_window_bytes = proto.gather_window_bytes();
  spec.staging_window_bytes = proto.staging_window_bytes();
  return absl::OkStatus();
}

absl::Status RunningFromProto(const v1::PlannedJob& proto, JobSpec& spec) {
  RETURN_IF_ERROR(ReadEnum("transport", proto.transport(), Transport::kGloo, spec.transport));
  RETURN_IF_ERROR(
      ReadEnum("determinism", proto.determinism(), DeterminismMode::kFast, spec.determinism));
  RETURN_IF_ERROR(
      ReadEnum("algorithms", proto.algorithms(), AlgorithmChoice::kProposed, spec.algorithms));
  spec.cpu_devices = proto.cpu_devices();
  spec.device_count = proto.device_count();
  spec.allow_slow_kernels = proto.allow_slow_kernels();
  spec.elastic = {.sizes = {proto.sizes().begin(), proto.sizes().end()},
                  .grow_delay_ms = proto.grow_delay_ms(),
                  .grow_every_ms = proto.grow_every_ms()};
  spec.virtual_ranks = proto.virtual_ranks();
  spec.tensor_parts = std::max<int64_t>(1, proto.tensor_parts());
  spec.checkpoint = {.store = proto.store(),
                     .every_steps = proto.every_steps(),
                     .every_ms = proto.every_ms(),
                     .at_start = proto.at_start(),
                     .keep_last = proto.keep_last(),
                     .keep_every_steps = proto.keep_every_steps(),
                     .resume_from = proto.resume_from(),
                     .fresh = proto.fresh(),
                     .max_age_ms = proto.max_age_ms(),
                     .wait_when_busy = proto.wait_when_busy(),
                     .max_failed_saves = proto.max_failed_saves(),
                     .allow_numerics_change = proto.allow_numerics_change()};
  spec.restart = {.max_failures = proto.max_failures(),
                  .max_per_day = proto.max_per_day(),
                  .max_no_progress = proto.max_no_progress(),
                  .backoff_ms = proto.backoff_ms(),
                  .max_backoff_ms = proto.max_backoff_ms()};
  spec.detection_ms = proto.detection_ms();
  spec.horizon_ms = proto.horizon_ms();
  spec.max_run_time_ms = proto.max_run_time_ms();
  spec.ttl_ms = proto.ttl_ms();
  // Jobs of older databases have neither.
  spec.stall_factor = proto.stall_factor() > 0 ? proto.stall_factor() : spec.stall_factor;
  spec.warmup_allowance_ms =
      proto.warmup_allowance_ms() > 0 ? proto.warmup_allowance_ms() : spec.warmup_allowance_ms;
  spec.log_every = proto.log_every();
  spec.trace_first_step = proto.trace_first_step();
  spec.trace_last_step = proto.trace_last_step();
  spec.trace_directory = proto.trace_directory();
  spec.localise = proto.localise();
  spec.norms_every = proto.norms_every();
  for (const v1::PlannedVariable& variable : proto.environment()) {
    spec.environment.push_back({variable.name(), variable.value(), variable.secret()});
  }
  spec.network = proto.network();
  return absl::OkStatus();
}

}  // namespace

v1::PlannedJob ToProto(const JobSpec& spec) {
  v1::PlannedJob proto;
  proto.set_name(spec.name);
  proto.set_namespace_(spec.namespace_name);
  if (spec.model.has_value()) {
    *proto.mutable_model() = ModelToProto(*spec.model);
  }
  proto.set_model_from(spec.model_from);
  proto.set_init_std(spec.init_std);
  DataToProto(spec, proto);
  TrainingToProto(spec, proto);
  ParallelismToProto(spec, proto);
  RunningToProto(spec, proto);
  return proto;
}

absl::StatusOr<JobSpec> FromProto(const v1::PlannedJob& proto) {
  JobSpec spec;
  spec.name = proto.name();
  spec.namespace_name = proto.namespace_();
  if (proto.has_model()) {
    ASSIGN_OR_RETURN(spec.model, ModelFromProto(proto.model()));
  }
  spec.model_from = proto.model_from();
  spec.init_std = proto.init_std();
  RETURN_IF_ERROR(DataFromProto(proto, spec));
  RETURN_IF_ERROR(TrainingFromProto(proto, spec));
  RETURN_IF_ERROR(ParallelismFromProto(proto, spec));
  RETURN_IF_ERROR(RunningFromProto(proto, spec));
  return spec;
}

std::string SerializeJob(const JobSpec& spec) {
  return ToProto(spec).SerializeAsString();
}

absl::StatusOr<JobSpec> ParseJob(std::string_view bytes) {
  v1::PlannedJob proto;
  if (bytes.size() > std::numeric_limits<int>::max() ||
      !proto.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
    return absl::InvalidArgumentError("job: not a PlannedJob message");
  }
  return FromProto(proto);
}

}  // namespace ravel::plan
