#include "common/plan/plan_proto.h"

#include <random>
#include <set>
#include <string>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>
#include <google/protobuf/stubs/logging.h>
#include <gtest/gtest.h>

#include "common/plan/report/wire_table.h"
#include "tests/common/plan/plan_testing.h"

namespace ravel::plan {
namespace {

using ::testing::HasSubstr;

void SetPatterns(JobSpec& spec) {
  spec.recipe = {.recipe = Recipe::kDelayed,
                 .keep_bf16 = {"*.mlp.*"},
                 .history = 77,
                 .margin = 3,
                 .emulation = {GemmPath::kDequantBf16, GemmPath::kCpuReference},
                 .fast_accumulation = FastAccumulation::kForwardAndInputGradient,
                 .amax_algorithm = AmaxAlgorithm::kMostRecent,
                 .first_scale = FirstScale::kOnes,
                 .amax_epsilon = 0.25};
  spec.freeze = {"*norm*"};
  spec.units = {
      {.match = "embed", .strategy = Strategy::kOptim, .replicate = {}},
      {.match = "layers.*", .strategy = Strategy::kOptimGrads, .replicate = Strategy::kNoShard}};
}

ModelConfig FullModel() {
  ModelConfig model = testing::Llama(64, 2, 96, 257);
  model.source_json = "{}";
  model.layer_sharing = true;
  model.rope_scaling_factor = 8;
  model.rope_original_max_position_embeddings = 1024;
  return model;
}

void SetPrecision(JobSpec& spec) {
  spec.loss_scale = {.initial = 8,
                     .growth_factor = 4,
                     .backoff_factor = 0.25,
                     .growth_interval = 9,
                     .minimum = 2,
                     .maximum = 64};
}

void SetMesh(JobSpec& spec) {
  spec.replicas = 2;
  spec.tensor = 4;
  spec.sequence_parallel = spec.tensor_across_nodes = true;
  spec.tensor_chunks = 8;
  spec.environment = {{"A", "a", ""}, {"B", "", "b/c"}};
  spec.network = "fast";
}

JobSpec FullSpec() {
  JobSpec spec = testing::SpecOf(FullModel(), 4);
  spec.namespace_name = "team";
  spec.model_from = "/models/a";
  spec.init_std = 0.03;
  spec.data.train = {{.path = "/a", .weight = 2.5, .tokens = 1000, .sample_digest = "d"}, {"/b"}};
  spec.data.validation = {{.path = "/data/v"}};
  spec.data.format = TokenFormat::kFlatU16;
  spec.data.passes = 3;
  spec.data.tokenizer = "/data/t.json";
  spec.steps = 100;
  spec.micro_batch = spec.tensor_parts = 2;
  spec.seed = ~uint64_t{0};
  spec.layer_drop = 0.25;
  spec.optimizer = {
      .lr = 1e-3, .beta1 = 0.8, .beta2 = 0.9, .eps = 1e-9, .weight_decay = 0.2, .clip_norm = 2};
  spec.schedule = {.kind = ScheduleKind::kWsd, .warmup_steps = 7, .min_ratio = 0.2};
  spec.evaluation_every = 11;
  spec.evaluation_batches = 12;
  spec.transport = Transport::kGloo;
  spec.device_count = 3;
  spec.elastic = {.sizes = {1, 2, 3}, .grow_delay_ms = 1, .grow_every_ms = 2};
  spec.determinism = DeterminismMode::kFast;
  spec.algorithms = AlgorithmChoice::kProposed;
  spec.checkpoint = {.store = "file:///s",
                     .every_steps = 5,
                     .every_ms = 6,
                     .at_start = true,
                     .keep_last = 9,
                     .keep_every_steps = 10,
                     .resume_from = "none",
                     .fresh = true,
                     .max_age_ms = 17,
                     .wait_when_busy = true,
                     .max_failed_saves = 18,
                     .allow_numerics_change = true};
  spec.restart = {.max_failures = 1,
                  .max_per_day = 2,
                  .max_no_progress = 4,
                  .backoff_ms = 5,
                  .max_backoff_ms = 6};
  spec.detection_ms = 700;
  spec.max_run_time_ms = 8'000'000;
  spec.ttl_ms = 9'000'000;
  spec.horizon_ms = 7'000'000;
  spec.stall_factor = 7;
  spec.warmup_allowance_ms = 45'000;
  spec.log_every = 8;
  spec.trace_first_step = 3;
  spec.trace_last_step = 4;
  spec.trace_directory = "/traces";
  spec.localise = true;
  spec.norms_every = 5;
  SetPatterns(spec);
  spec.gradient_wire = WireType::kBF16;
  spec.compute = ComputeType::kBF16;
  SetPrecision(spec);
  spec.communication_blocks = 6;
  spec.allow_slow_kernels = true;
  spec.optimizer.kind = OptimizerKind::kSgdNesterov;
  spec.optimizer.state_types = kBf16States;
  spec.optimizer.main_weights = MainWeightForm::kBF16Remainder;
  spec.optimizer.offload = {0.5, "/disk", false, true, 123456};
  spec.recompute = RecomputePolicy::kMlp;
  SetMesh(spec);
  spec.replicate_strategy = Strategy::kOptim;
  spec.gather_window_bytes = 1 << 20;
  spec.staging_window_bytes = 1 << 21;
  return spec;
}

TEST(JobProto, RoundTripKeepsEveryField) {
  const std::string bytes = SerializeJob(FullSpec());
  const absl::StatusOr<JobSpec> back = ParseJob(bytes);
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(SerializeJob(*back), bytes);
  EXPECT_EQ(back->name, "plan");
  EXPECT_EQ(back->namespace_name, "team");
  EXPECT_EQ(back->seed, ~uint64_t{0});
  EXPECT_EQ(back->optimizer.beta1, 0.8);
  EXPECT_EQ(back->schedule.kind, ScheduleKind::kWsd);
  EXPECT_EQ(back->elastic.sizes, (std::vector<int64_t>{1, 2, 3}));
  EXPECT_EQ(back->checkpoint.resume_from, "none");
  EXPECT_EQ(back->restart.max_no_progress, 4);
  EXPECT_EQ(back->model->rope_scaling_factor, 8);
  EXPECT_EQ(back->data.train[0].weight, 2.5);
  EXPECT_EQ(back->data.train[0].tokens, 1000);
  // Every field of the message differs from its default, so none can be forgotten in the codec.
  const v1::PlannedJob proto = ToProto(FullSpec());
  const google::protobuf::Descriptor* descriptor = proto.GetDescriptor();
  for (int i = 0; i < descriptor->field_count(); ++i) {
    const google::protobuf::FieldDescriptor* field = descriptor->field(i);
    const bool set = field->is_repeated() ? proto.GetReflection()->FieldSize(proto, field) > 0
                                          : proto.GetReflection()->HasField(proto, field);
    EXPECT_TRUE(set) << field->name();
  }
}

// Fills every field of a message, and of those inside it, with a value that is not its default.
// Numbers are different from each other where the codec takes any.
void Fill(google::protobuf::Message& message, int64_t& next) {
  const google::protobuf::Descriptor& descriptor = *message.GetDescriptor();
  const google::protobuf::Reflection& reflection = *message.GetReflection();
  using Field = google::protobuf::FieldDescriptor;
  for (int i = 0; i < descriptor.field_count(); ++i) {
    const Field* field = descriptor.field(i);
    ++next;
    switch (field->cpp_type()) {
      case Field::CPPTYPE_MESSAGE:
        if (field->is_repeated()) {
          Fill(*reflection.AddMessage(&message, field), next);
          Fill(*reflection.AddMessage(&message, field), next);
        } else {
          Fill(*reflection.MutableMessage(&message, field), next);
        }
        break;
      case Field::CPPTYPE_STRING:
        field->is_repeated()
            ? reflection.AddString(&message, field, absl::StrCat(field->name(), next))
            : reflection.SetString(&message, field, absl::StrCat(field->name(), next));
        break;
      case Field::CPPTYPE_INT64:
        field->is_repeated() ? reflection.AddInt64(&message, field, next)
                             : reflection.SetInt64(&message, field, next);
        break;
      case Field::CPPTYPE_UINT64:
        reflection.SetUInt64(&message, field, static_cast<uint64_t>(next));
        break;
      case Field::CPPTYPE_DOUBLE:
        reflection.SetDouble(&message, field, static_cast<double>(next) + 0.5);
        break;
      case Field::CPPTYPE_BOOL:
        reflection.SetBool(&message, field, true);
        break;
      case Field::CPPTYPE_INT32:  // enumerations all have a second value
        field->is_repeated() ? reflection.AddInt32(&message, field, 1)
                             : reflection.SetInt32(&message, field, 1);
        break;
      default:
        FAIL() << field->full_name() << ": a type that this test does not know";
    }
  }
}

TEST(JobProto, EveryFieldOfTheMessageSurvives) {
  v1::PlannedJob full;
  int64_t next = 0;
  Fill(full, next);
  // A model must be one that exists.
  v1::PlannedModel& model = *full.mutable_model();
  v1::PlannedModel valid = ToProto(FullSpec()).model();
  valid.set_architecture(1);  // whose layers run once: without layer_sharing
  valid.set_tie_word_embeddings(true);
  valid.set_rope_low_freq_factor(1.5);
  valid.set_rope_high_freq_factor(3.5);
  const google::protobuf::Descriptor& descriptor = *model.GetDescriptor();
  for (int i = 0; i < descriptor.field_count(); ++i) {
    EXPECT_TRUE(valid.GetReflection()->HasField(valid, descriptor.field(i)))
        << descriptor.field(i)->name();
  }
  model = valid;
  full.set_layer_drop(0.75);
  *full.mutable_loss_scale() = ToProto(FullSpec()).loss_scale();
  full.set_offload_fraction(0.75);
  // Booleans that default to true; false is the value that a codec could lose.
  for (const bool cpu : {true, false}) {
    full.set_cpu_devices(cpu);
    model.set_architecture(cpu ? 1 : 0);
    model.set_layer_sharing(!cpu);
    const absl::StatusOr<JobSpec> spec = FromProto(full);
    ASSERT_TRUE(spec.ok()) << spec.status();
    EXPECT_EQ(ToProto(*spec).DebugString(), full.DebugString());
  }
}

// Does not compile when a struct has a field more or less: the codec must know it, FullSpec above
// must set it, and then it is named here.
TEST(JobProto, EveryFieldOfTheStructIsKnown) {
  const JobSpec spec = FullSpec();
  const auto& [name,
               namespace_name,
               model,
               model_from,
               init_std,
               data,
               steps,
               global_batch,
               micro_batch,
               seed,
               layer_drop,
               optimizer,
               schedule,
               evaluation_every,
               evaluation_batches,
               strategy,
               replicate_strategy,
               replicas,
               tensor,
               sequence_parallel,
               tensor_chunks,
               tensor_across_nodes,
               units,
               recompute,
               gradient_wire,
               compute,
               loss_scale,
               recipe,
               communication_blocks,
               freeze,
               allow_padding,
               transport,
               cpu_devices,
               device_count,
               allow_slow_kernels,
               elastic,
               determinism,
               algorithms,
               virtual_ranks,
               tensor_parts,
               checkpoint,
               restart,
               detection_ms,
               horizon_ms,
               max_run_time_ms,
               ttl_ms,
               stall_factor,
               warmup_allowance_ms,
               log_every,
               trace_first_step,
               trace_last_step,
               trace_directory,
               localise,
               norms_every,
               gather_window_bytes,
               staging_window_bytes,
               environment,
               network] = spec;
  const auto& [train, validation, format, sequence_length, passes, tokenizer] = data;
  const auto& [path, weight, tokens, sample_digest] = train.front();
  const auto& [kind, warmup_steps, min_ratio] = schedule;
  const auto& [sizes, grow_delay_ms, grow_every_ms] = elastic;
  const auto& [max_failures, max_per_day, max_no_progress, backoff_ms, max_backoff_ms] = restart;
  EXPECT_TRUE(name == "plan" && tokens == 1000 && layer_drop == 0.25 && tensor_chunks == 8);
  EXPECT_EQ(warmup_steps + grow_delay_ms + max_failures, 7 + 1 + 1);
  EXPECT_EQ(units.size(), tensor == 4 && sequence_parallel && tensor_across_nodes ? 2u : 0u);
  EXPECT_TRUE(recipe.history == 77 && loss_scale.growth_interval == 9 && sample_digest == "d");
}

TEST(JobProto, ARecipeTravels) {
  const absl::StatusOr<JobSpec> back = ParseJob(SerializeJob(FullSpec()));
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(back->recipe, FullSpec().recipe);
  EXPECT_EQ(back->recipe.history, 77);
  EXPECT_EQ(back->recipe.margin, 3);
  EXPECT_EQ(back->recipe.emulation.front(), GemmPath::kDequantBf16);
  v1::PlannedJob unknown = ToProto(FullSpec());
  for (const int32_t path : {0, 3, 4, 5, 6, 7, 8}) {
    unknown.set_emulation(0, path);
    EXPECT_EQ(FromProto(unknown).ok(), path == 7) << path << ": block_as_mxfp8 is an emulation";
  }
  v1::PlannedJob faster = ToProto(FullSpec());
  faster.set_fast_accumulation(3);
  EXPECT_FALSE(FromProto(faster).ok());
}

TEST(JobProto, ALossScaleTravelsAndItsDefaultsTakeNoByte) {
  const LossScaleSpec expected = FullSpec().loss_scale;
  const auto& [initial, growth, backoff, interval, minimum, maximum] = expected;
  EXPECT_EQ(initial + growth + backoff + minimum + maximum, 8 + 4 + 0.25 + 2 + 64);
  EXPECT_EQ(interval, 9);
  const absl::StatusOr<JobSpec> back = ParseJob(SerializeJob(FullSpec()));
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(back->loss_scale, expected);
  JobSpec plain = FullSpec();
  plain.loss_scale = {};
  v1::PlannedJob proto = ToProto(plain);
  EXPECT_FALSE(proto.has_loss_scale());
  EXPECT_EQ(FromProto(proto)->loss_scale, LossScaleSpec{});
  proto.mutable_loss_scale()->set_initial(3);
  EXPECT_THAT(std::string(FromProto(proto).status().message()),
              HasSubstr("precision.lossScale.minimum"));
}

TEST(JobProto, EveryFieldOfOptimizersIsKnown) {
  const JobSpec spec = FullSpec();
  const auto& [rule,
               lr,
               beta1,
               beta2,
               eps,
               weight_decay,
               clip_norm,
               state_types,
               main_weights,
               offload] = spec.optimizer;
  const auto& [fraction, path, overlap, automatic, device_bytes] = offload;
  EXPECT_EQ(rule, OptimizerKind::kSgdNesterov);
  EXPECT_EQ(lr, 1e-3);
  EXPECT_EQ(state_types, kBf16States);
  EXPECT_EQ(main_weights, MainWeightForm::kBF16Remainder);
  EXPECT_EQ(fraction, 0.5);
  EXPECT_EQ(path, "/disk");
  EXPECT_FALSE(overlap);
  EXPECT_TRUE(automatic);
  EXPECT_EQ(device_bytes, 123456);
}

TEST(JobProto, EveryFieldOfCheckpointsIsKnown) {
  const JobSpec spec = FullSpec();
  const auto& [store,
               every_steps,
               every_ms,
               at_start,
               keep_last,
               keep_every_steps,
               resume_from,
               fresh,
               max_age_ms,
               wait_when_busy,
               max_failed_saves,
               allow_numerics_change] = spec.checkpoint;
  EXPECT_EQ(keep_last, 9);
  EXPECT_TRUE(fresh);
  EXPECT_EQ(max_age_ms, 17);
  EXPECT_TRUE(wait_when_busy);
  EXPECT_EQ(max_failed_saves, 18);
  EXPECT_TRUE(allow_numerics_change);
}

// Fails when a trainer would not know that layers are optional, or are called twice.
TEST(PlanProto, PlansOfRepeatedAndOptionalLayersRoundTrip) {
  ModelConfig config = testing::Llama(64, 2, 96, 257);
  config.layer_sharing = true;
  JobSpec spec = testing::SpecOf(config, 4);
  spec.layer_drop = 0.25;
  const ShardingPlan plan = *BuildShardingPlan({.spec = spec, .ranks = 3});
  const absl::StatusOr<ShardingPlan> back = ParsePlan(SerializePlan(plan));
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(SerializePlan(*back), SerializePlan(plan));
  EXPECT_EQ(back->options.layer_drop, 0.25);
  EXPECT_EQ(back->inventory.order, (std::vector<UnitId>{0, 1, 1, 2, 2, 3}));
  for (const UnitSpec& unit : back->inventory.units) {
    EXPECT_EQ(unit.optional, unit.kind == UnitKind::kLayer) << unit.name;
  }
  v1::ShardingPlan wrong = ToProto(plan);
  wrong.mutable_options()->set_layer_drop(1);
  EXPECT_THAT(std::string(FromProto(wrong).status().message()),
              HasSubstr("options.layer_drop: expected 0 to below 1, got 1"));
}

TEST(PlanProto, EveryFieldOfAProgramIsKnown) {
  const ShardingPlan plan = testing::PlanOf(testing::Llama(64, 2, 96, 257), 3, 4, false);
  const std::vector<StepProgram>& programs = plan.programs;
  const auto& [phase, part, live_at_start, live_at_end, instructions] = programs.front();
  const auto& [op, stream, unit, call, group, freed, move, segment, operands, waits] =
      instructions.front();
  EXPECT_NE(phase, Phase::kEval);
  EXPECT_EQ(call, 0);
}

TEST(PlanProto, PlansOfBf16WeightsAndWiresRoundTrip) {
  for (const ComputeType compute : {ComputeType::kBF16, ComputeType::kF32}) {
    for (const WireType wire : {WireType::kF32, WireType::kBF16}) {
      JobSpec spec = testing::SpecOf(testing::Llama(64, 2, 96, 257), 4);
      spec.cpu_devices = false;
      spec.gradient_wire = wire;
      spec.compute = compute;
      spec.communication_blocks = 5;
      const absl::StatusOr<ShardingPlan> plan =
          BuildShardingPlan({.spec = spec, .ranks = 2, .shared_memory = false});
      ASSERT_TRUE(plan.ok()) << plan.status();
      const absl::StatusOr<ShardingPlan> back = ParsePlan(SerializePlan(*plan));
      ASSERT_TRUE(back.ok()) << back.status();
      EXPECT_EQ(SerializePlan(*back), SerializePlan(*plan));
      EXPECT_EQ(back->options.weight_type,
                compute == ComputeType::kBF16 ? DType::kBF16 : DType::kF32);
      EXPECT_TRUE(back->buffers == plan->buffers);
      EXPECT_EQ(back->options.gradient_wire, wire);
      EXPECT_EQ(back->options.communication_blocks, 5);
      EXPECT_EQ(back->options.attention_workspace_bytes, plan->options.attention_workspace_bytes);
      EXPECT_EQ(plan->options.attention_workspace_bytes > 0, compute == ComputeType::kBF16);
      EXPECT_EQ(back->inventory.units[1].workspace.back().shape,
                plan->inventory.units[1].workspace.back().shape);
      EXPECT_EQ(StepWire(*back).total(), StepWire(*plan).total());
    }
  }
  JobSpec small = testing::SpecOf(testing::Llama(64, 2, 96, 257), 4);
  small.compute = ComputeType::kBF16;
  const ShardingPlan both = *BuildShardingPlan({.spec = small, .ranks = 2});
  small.optimizer.main_weights = MainWeightForm::kBF16Remainder;
  small.optimizer.state_types = kBf16States;
  const ShardingPlan narrow = *BuildShardingPlan({.spec = small, .ranks = 2});
  EXPECT_NE(PlanHash(narrow), PlanHash(both));
  const absl::StatusOr<ShardingPlan> back = ParsePlan(SerializePlan(narrow));
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(SerializePlan(*back), SerializePlan(narrow));
  EXPECT_EQ(back->options.main_type, DType::kI16);
  EXPECT_EQ(back->options.state_types, kBf16States);
  v1::ShardingPlan odd = ToProto(narrow);
  odd.mutable_options()->set_weight_element_bytes(4);
  EXPECT_THAT(std::string(FromProto(odd).status().message()),
              HasSubstr("fp32 weights have fp32 main weights"));
  odd = ToProto(narrow);
  odd.mutable_options()->set_state_element_bytes(3);
  EXPECT_THAT(std::string(FromProto(odd).status().message()),
              HasSubstr("options.state_element_bytes: expected 1, 2 or 4, got 3"));
  odd = ToProto(narrow);
  odd.mutable_options()->set_square_element_bytes(1);
  EXPECT_THAT(std::string(FromProto(odd).status().message()),
              HasSubstr("not those that the layouts, lanes and options need"));
  v1::ShardingPlan proto = ToProto(testing::PlanOf(testing::Llama(64, 2, 96, 257), 3, 4, false));
  proto.mutable_options()->set_weight_element_bytes(3);
  EXPECT_THAT(std::string(FromProto(proto).status().message()),
              HasSubstr("options.weight_element_bytes: expected 2 or 4, got 3"));
  proto.mutable_options()->set_weight_element_bytes(4);
  proto.mutable_options()->set_communication_blocks(65);
  EXPECT_THAT(std::string(FromProto(proto).status().message()),
              HasSubstr("options.communication_blocks: expected 0 to 64, got 65"));
  proto.mutable_options()->set_communication_blocks(0);
  proto.mutable_options()->set_attention_workspace_bytes(-1);
  EXPECT_THAT(std::string(FromProto(proto).status().message()),
              HasSubstr("options.attention_workspace_bytes: out of range"));
}

TEST(JobProto, UnknownValuesAreNamed) {
  v1::PlannedJob proto = ToProto(FullSpec());
  proto.set_transport(9);
  EXPECT_THAT(std::string(FromProto(proto).status().message()), HasSubstr("transport"));
  EXPECT_FALSE(ParseJob("\xff\xff").ok());
}

class PlanProtoTest : public ::testing::TestWithParam<testing::ModelCase> {};

TEST_P(PlanProtoTest, RoundTripGivesTheSamePlanAndTheSameBytes) {
  for (const int64_t ranks : {1, 3, 4}) {
    for (const bool shared : {true, false}) {
      const ShardingPlan plan = testing::PlanOf(GetParam().config, ranks, 4, shared);
      const std::string bytes = SerializePlan(plan);
      const absl::StatusOr<ShardingPlan> back = ParsePlan(bytes);
      ASSERT_TRUE(back.ok()) << back.status();
      EXPECT_EQ(SerializePlan(*back), bytes);
      EXPECT_EQ(SerializePlan(testing::PlanOf(GetParam().config, ranks, 4, shared)), bytes);
      EXPECT_EQ(back->memory.offsets, plan.memory.offsets);
      EXPECT_EQ(back->programs.size(), plan.programs.size());
      EXPECT_EQ(StepWire(*back).total(), StepWire(plan).total());
      EXPECT_EQ(testing::OwnedPieces(back->inventory, back->groups[1], ranks - 1),
                testing::OwnedPieces(plan.inventory, plan.groups[1], ranks - 1));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Models,
                         PlanProtoTest,
                         ::testing::ValuesIn(testing::ModelCases()),
                         testing::CaseName);

TEST(PlanProto, EveryStrategyRoundTripsAndHasAHashOfItsOwn) {
  std::set<Sha256Digest> hashes;
  size_t plans = 0;
  for (const Strategy shard :
       {Strategy::kNoShard, Strategy::kOptim, Strategy::kOptimGrads, Strategy::kOptimGradsParams}) {
    for (const Strategy replicate : {Strategy::kNoShard, Strategy::kOptim}) {
      for (const int64_t micro_batches : {1, 3}) {
        for (const RecomputePolicy recompute : {RecomputePolicy::kNone, RecomputePolicy::kBlock}) {
          JobSpec spec = testing::SpecOf(testing::Llama(64, 2, 96, 257), 8);
          spec.strategy = shard;
          spec.replicate_strategy = replicate;
          spec.replicas = replicate == Strategy::kOptim ? 2 : 1;
          if (replicate == Strategy::kOptim && shard == Strategy::kNoShard) {
            spec.replicas = 1;
            spec.freeze = {"*layernorm*"};
          }
          spec.global_batch = 8 * micro_batches;
          spec.micro_batch = 1;
          spec.recompute = recompute;
          const absl::StatusOr<ShardingPlan> plan =
              BuildShardingPlan({.spec = spec, .ranks = 4, .shared_memory = false});
          ASSERT_TRUE(plan.ok()) << plan.status();
          const absl::StatusOr<ShardingPlan> back = ParsePlan(SerializePlan(*plan));
          ASSERT_TRUE(back.ok()) << back.status();
          EXPECT_EQ(SerializePlan(*back), SerializePlan(*plan));
          EXPECT_EQ(back->roles, plan->roles);
          for (size_t i = 0; i < plan->programs.size(); ++i) {
            EXPECT_TRUE(back->programs[i].instructions == plan->programs[i].instructions);
          }
          EXPECT_EQ(back->mesh, plan->mesh);
          hashes.insert(PlanHash(*plan));
          ++plans;
        }
      }
    }
  }
  EXPECT_EQ(hashes.size(), plans);
}

TEST(PlanProto, DamagedPlansAreErrorsNotCrashes) {
  const google::protobuf::LogSilencer quiet;
  const std::string bytes =
      SerializePlan(testing::PlanOf(testing::Llama(64, 2, 96, 257), 3, 4, false));
  for (int trial = 0; trial < 4000; ++trial) {
    std::mt19937_64 random(testing::kSeed + static_cast<uint64_t>(trial));
    std::string damaged = bytes;
    const size_t edits = random() % 3 + 1;
    for (size_t i = 0; i < edits; ++i) {
      damaged[random() % damaged.size()] = static_cast<char>(random() & 0x7f);  // valid UTF-8
    }
    if (random() % 8 == 0) {
      damaged.resize(random() % damaged.size());
    }
    const absl::StatusOr<ShardingPlan> plan = ParsePlan(damaged);
    if (!plan.ok()) {
      EXPECT_FALSE(plan.status().message().empty());
    }
  }
}

TEST(PlanProto, MissingAndDoubledBuffersAreRefused) {
  const ShardingPlan plan = testing::PlanOf(testing::Llama(64, 2, 96, 257), 2, 4, true);
  v1::ShardingPlan missing = ToProto(plan);
  missing.mutable_buffers()->RemoveLast();
  EXPECT_THAT(std::string(FromProto(missing).status().message()), HasSubstr("buffers"));
  v1::ShardingPlan doubled = ToProto(plan);
  *doubled.add_buffers() = doubled.buffers(3);
  EXPECT_THAT(std::string(FromProto(doubled).status().message()), HasSubstr("buffers"));
}

TEST(PlanProto, PlansOfAnotherModelAreRefused) {
  v1::ShardingPlan proto = ToProto(testing::PlanOf(testing::Llama(64, 2, 96, 257), 2, 4, false));
  proto.mutable_model()->set_vocab_size(300);
  EXPECT_THAT(std::string(FromProto(proto).status().message()),
              HasSubstr("model.embed_tokens.weight"));
}

}  // namespace
}  // namespace ravel::plan
