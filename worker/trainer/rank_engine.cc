#include "worker/trainer/rank_engine.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <span>
#include <utility>

#include <absl/strings/str_cat.h>

#include "common/check.h"
#include "common/logging.h"
#include "common/model/compute_type.h"
#include "common/plan/layer_drop.h"
#include "common/plan/report/plan_printer.h"
#include "common/signed_size.h"
#include "kernels/cast.h"
#include "kernels/philox.h"
#include "worker/optim/device_statistics.h"
#include "worker/optim/host_statistics.h"
#include "worker/optim/stored_state.h"
#include "worker/shard/finite_check.h"
#include "worker/trainer/exit_code.h"
#include "worker/trainer/memory_report.h"

namespace ravel::trainer {
namespace {

// What the device refuses is its fault, not that of a peer.
absl::Status MarkDeviceError(const absl::Status& status) {
  return WithCode(status,
                  absl::IsResourceExhausted(status) ? ExitCode::kOutOfMemory : ExitCode::kDevice);
}

// Whether an evaluation gathers weights between replicas.
bool GathersForEvaluation(const plan::ShardingPlan& plan) {
  return std::any_of(
      plan.programs.begin(), plan.programs.end(), [&](const plan::StepProgram& program) {
        return program.phase == plan::Phase::kEval &&
               std::any_of(program.instructions.begin(),
                           program.instructions.end(),
                           [&](const plan::Instruction& instruction) {
                             return plan::LabelOf(plan.moves, instruction) ==
                                    plan::OpLabel::kOuterGather;
                           });
      });
}

}  // namespace

absl::StatusOr<std::unique_ptr<RankEngine>> RankEngine::Create(Args args) {
  std::unique_ptr<RankEngine> engine(new RankEngine(std::move(args)));
  RETURN_IF_ERROR(engine->SetUp());
  return engine;
}

absl::Status RankEngine::CheckFit() const {
  const plan::ShardingPlan& plan = args_.plan;
  const comm::Communicator& communicator = args_.communicator;
  if (plan.ranks != communicator.size()) {
    return absl::FailedPreconditionError(
        absl::StrCat("plan is for ", plan.ranks, " ranks, the group has ", communicator.size()));
  }
  const plan::OptimizerSpec& optimizer = args_.spec.optimizer;
  if (plan.options.optimizer != optimizer.kind ||
      plan.options.weight_type != plan::WeightTypeOf(args_.spec.compute) ||
      plan.options.main_type != plan::MainTypeOf(optimizer.main_weights) ||
      plan.options.state_type != plan::StateTypeOf(optimizer.state_type)) {
    return absl::FailedPreconditionError(
        "plan and job disagree about the optimizer, or the types of weights or states");
  }
  if (args_.spec.compute == plan::ComputeType::kBF16 && args_.gpu == nullptr) {
    return absl::FailedPreconditionError(
        "plan keeps gathered weights in bf16, ranks of a host compute in fp32");
  }
  if (plan.options.gather_in_place && !communicator.shared_memory()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "plan gathers in place, which transport ", communicator.transport(), " cannot"));
  }
  if (plan.lanes.lanes != args_.spec.virtual_ranks || plan.lanes.ranks != plan.ranks ||
      plan.micro_batch.sequences * plan.lanes.micro_batches * plan.lanes.lanes !=
          args_.spec.global_batch ||
      plan.micro_batch.sequences != args_.spec.micro_batch ||
      plan.micro_batch.sequence_tokens != args_.spec.data.sequence_length ||
      plan.options.layer_drop != args_.spec.layer_drop) {
    return absl::FailedPreconditionError(
        "plan and job disagree about lanes, micro-batch or layerDrop");
  }
  if (args_.spec.gradient_wire == plan::WireType::kBF16 && plan.lanes.blocks) {
    return absl::FailedPreconditionError("plan sums lanes before their wire, which is bf16");
  }
  return absl::OkStatus();
}

absl::Status RankEngine::CheckDevice() const {
  const comm::Communicator& communicator = args_.communicator;
  if ((communicator.backend() == kernels::Backend::kCuda) != (args_.gpu != nullptr)) {
    return absl::FailedPreconditionError(
        absl::StrCat("transport ",
                     communicator.transport(),
                     args_.gpu != nullptr ? " has no memory on a device" : " needs a device"));
  }
  return absl::OkStatus();
}

absl::Status RankEngine::AllocateArena() {
  const plan::ShardingPlan& plan = args_.plan;
  arena_ = {.private_bytes = plan.memory.private_bytes,
            .symmetric_bytes = plan.memory.symmetric_bytes,
            .common_bytes = plan.memory.common_bytes,
            .common_copies = plan.lanes.replicas};
  absl::Status allocated = args_.communicator.AllocateArena(arena_);
  if (!absl::IsResourceExhausted(allocated)) {
    MeasureArena();
    return allocated;
  }
  if (args_.gpu != nullptr) {
    allocated = Annotate(allocated,
                         absl::StrCat("the plan's ",
                                      plan::BytesText(planned_bytes()),
                                      " of each rank do not fit what the device has left"));
  }
  return WithCode(allocated, ExitCode::kOutOfMemory);
}

absl::Status RankEngine::SetUpDevice() {
  const plan::ShardingPlan& plan = args_.plan;
  ASSIGN_OR_RETURN(
      device_, shard::DeviceStreams::Create(*args_.gpu, plan, [&communicator = args_.communicator] {
        return communicator.Failure();
      }));
  device_->compute().UseAttention(
      {.deterministic = args_.spec.determinism == plan::DeterminismMode::kExact});
  ASSIGN_OR_RETURN(memory_, shard::HostAccess::OfDevice(*device_));
  ASSIGN_OR_RETURN(auto statistics, optim::DeviceStatistics::Create(StatisticsArgs(), *device_));
  statistics_bytes_ = statistics->device_bytes();
  statistics_ = std::move(statistics);
  if (args_.spec.gradient_wire == plan::WireType::kBF16) {
    int64_t elements = 0;
    for (const plan::GroupLayout& group : plan.groups) {
      elements = std::max(elements, group.layout.total_elements());
    }
    auto wire = args_.gpu->AllocateDevice(elements * int64_t{sizeof(uint16_t)});
    if (!wire.ok()) {
      return Annotate(wire.status(), "bf16 wire");
    }
    wire_ = *std::move(wire);
  }
  return absl::OkStatus();
}

absl::Status RankEngine::SetUpBatches() {
  RETURN_IF_ERROR(executor_->PrepareDevice());
  ASSIGN_OR_RETURN(batches_,
                   DeviceBatches::Create(*args_.gpu,
                                         args_.plan.lanes.programs(),
                                         {.ids = Shared("ids"), .targets = Shared("targets")}));
  return absl::OkStatus();
}

absl::Status RankEngine::SetUpProducts() {
  if (!args_.products.has_value()) {
    return absl::OkStatus();
  }
  ASSIGN_OR_RETURN(product_choices_,
                   ChooseProducts({.options = *args_.products,
                                   .plan = args_.plan,
                                   .exact = args_.spec.determinism == plan::DeterminismMode::kExact,
                                   .communicator = args_.communicator,
                                   .streams = *device_,
                                   .executor = *executor_}));
  return absl::OkStatus();
}

absl::Status RankEngine::ChooseGraphs() {
  comm::Communicator& communicator = args_.communicator;
  shard::ExecutorOptions& options = args_.executor;
  if (args_.gpu == nullptr || args_.plan.ranks == 1) {
    return absl::OkStatus();
  }
  absl::Status why_not = communicator.Captures();
  if (!absl::IsUnimplemented(why_not)) {  // which is a matter of the transport, and so of all ranks
    if (!options.graphs || !options.exchanging_graphs) {
      why_not = absl::FailedPreconditionError("they were not asked for");
    }
    const auto mine = static_cast<std::byte>(why_not.ok() ? 0 : 1);
    std::vector<std::byte> all(Size(communicator.size()));
    RETURN_IF_ERROR(communicator.AllGatherBytes({}, {&mine, 1}, all));
    const auto refusing = std::find(all.begin(), all.end(), std::byte{1});
    if (refusing != all.end() && why_not.ok()) {
      why_not =
          absl::FailedPreconditionError(absl::StrCat("rank ", refusing - all.begin(), " has none"));
    }
  }
  options.exchanging_graphs = why_not.ok();
  if (!why_not.ok()) {
    options.graphs = false;
    log::Info(absl::StrCat("graphs: none, since ranks exchange through ",
                           communicator.transport(),
                           ": ",
                           std::string(why_not.message())));
  }
  return absl::OkStatus();
}

optim::StepStatistics::Args RankEngine::StatisticsArgs() {
  return {.plan = args_.plan,
          .groups = groups_,
          .rank = args_.communicator.rank(),
          .norms = args_.spec.norms_every > 0};
}

void RankEngine::MakeParts() {
  const plan::ShardingPlan& plan = args_.plan;
  modules_ = model::MakeModules(plan.inventory, plan.micro_batch);
  if (statistics_ == nullptr) {
    statistics_ = std::make_unique<optim::HostStatistics>(StatisticsArgs());
  }
  optimizer_ = std::make_unique<optim::StepOptimizer>(
      optim::StepOptimizer::Args{.plan = plan,
                                 .spec = args_.spec,
                                 .rank = args_.communicator.rank(),
                                 .groups = groups_,
                                 .control = args_.control,
                                 .memory = memory_,
                                 .statistics = *statistics_,
                                 .pieces = pieces_,
                                 .rule = optim::MakeUpdateRule(args_.spec)});
  executor_ = std::make_unique<shard::UnitExecutor>(
      shard::UnitExecutor::Args{.plan = plan,
                                .communicators = communicators_,
                                .stream = host_stream_,
                                .buffers = *buffers_,
                                .groups = groups_,
                                .modules = modules_,
                                .actions = optimizer_.get(),
                                .device = device_.get(),
                                .wire = static_cast<uint16_t*>(wire_.data())},
      args_.executor);
}

absl::Status RankEngine::SetUp() {
  const plan::ShardingPlan& plan = args_.plan;
  comm::Communicator& communicator = args_.communicator;
  RETURN_IF_ERROR(WithCode(CheckFit(), ExitCode::kPlanMismatch));
  RETURN_IF_ERROR(WithCode(CheckDevice(), ExitCode::kPlanMismatch));
  auto loader = data::BatchLoader::Open(args_.spec);
  if (!loader.ok()) {
    return WithCode(loader.status(), ExitCode::kData);
  }
  loader_ = *std::move(loader);
  RETURN_IF_ERROR(AllocateArena());
  ASSIGN_OR_RETURN(communicators_,
                   shard::MeshCommunicators::Create(communicator, plan.mesh, plan.moves));
  buffers_ = std::make_unique<shard::ArenaBuffers>(plan, communicator);
  groups_.reserve(plan.groups.size());
  for (const plan::GroupId group : plan.groups.ids()) {
    groups_.emplace_back(plan, *buffers_, group, communicator.rank());
  }
  if (args_.gpu != nullptr) {
    RETURN_IF_ERROR(MarkDeviceError(SetUpDevice()));
  }
  auto pieces = optim::PieceTables::Create(plan, groups_, memory_, args_.gpu);
  RETURN_IF_ERROR(MarkDeviceError(pieces.status()));
  pieces_ = *std::move(pieces);
  RETURN_IF_ERROR(ChooseGraphs());
  MakeParts();
  if (args_.gpu != nullptr) {
    RETURN_IF_ERROR(MarkDeviceError(SetUpBatches()));
    RETURN_IF_ERROR(SetUpProducts());
  }
  return FillRopeTables();
}

// Computed on the host, so that a device has the same bits.
absl::Status RankEngine::FillRopeTables() {
  const plan::ModelInventory& inventory = args_.plan.inventory;
  std::vector<TensorView> shared = executor_->shared();
  std::vector<std::vector<float>> tables(shared.size());
  for (size_t i = 0; i < shared.size() && device_ != nullptr; ++i) {
    if (inventory.shared[i].name.starts_with("rope_")) {
      tables[i].resize(Size(shared[i].elements()));
      shared[i].data = tables[i].data();
    }
  }
  model::FillRopeTables(host_stream_, inventory, shared);
  for (size_t i = 0; i < shared.size(); ++i) {
    if (!tables[i].empty()) {
      RETURN_IF_ERROR(memory_.Write(std::as_bytes(std::span<const float>(tables[i])),
                                    executor_->shared()[i].data));
    }
  }
  return absl::OkStatus();
}

kernels::Stream& RankEngine::main_stream() {
  if (device_ != nullptr) {
    return device_->compute();
  }
  return host_stream_;
}

// Drawn in the stream's scratch where the main weights are none that a kernel could fill, and split
// on the host: memory that is made and freed here would wait for peers that are a step ahead.
absl::Status RankEngine::DrawNormal(const shard::ParameterGroup& group,
                                    const plan::OwnedRun& run,
                                    const plan::TensorSpec& tensor) {
  constexpr int64_t kDrawnElements = int64_t{1} << 20;
  const auto draw = [&](float* to, int64_t first, int64_t elements) {
    kernels::InitNormal(
        main_stream(),
        {.out = VectorView(to, elements),
         .seed = args_.spec.seed,
         .site = tensor.site,
         .first_index = run.first + first,
         .standard_deviation = static_cast<float>(args_.spec.init_std * tensor.init_scale)});
  };
  if (!group.keeps_remainders()) {
    draw(group.main_weight() + run.offset, 0, run.elements);
    return absl::OkStatus();
  }
  auto* drawn = static_cast<float*>(device_->compute().Scratch(
      std::min(run.elements, kDrawnElements) * static_cast<int64_t>(sizeof(float))));
  std::vector<float> values;
  for (int64_t first = 0; first < run.elements; first += kDrawnElements) {
    values.resize(Size(std::min(kDrawnElements, run.elements - first)));
    draw(drawn, first, static_cast<int64_t>(values.size()));
    RETURN_IF_ERROR(memory_.Read(drawn, std::as_writable_bytes(std::span<float>(values))));
    RETURN_IF_ERROR(
        optim::WriteStored(memory_, group, plan::StateRole::kParam, run.offset + first, values));
  }
  return absl::OkStatus();
}

absl::Status RankEngine::InitializeWeights() {
  std::vector<float> constant;
  for (const shard::ParameterGroup& group : groups_) {
    for (const plan::OwnedPiece& piece : group.pieces()) {
      const plan::TensorSpec& tensor = args_.plan.inventory.tensors[piece.tensor];
      if (tensor.init == plan::InitKind::kNormal) {
        absl::Status drawn;
        const auto draw = [&](const auto& run) { drawn.Update(DrawNormal(group, run, tensor)); };
        piece.VisitRuns(tensor.shape, draw);
        RETURN_IF_ERROR(drawn);
      } else {
        constant.assign(Size(piece.elements()), tensor.init == plan::InitKind::kOnes ? 1.0f : 0.0f);
        RETURN_IF_ERROR(optim::WriteStored(
            memory_, group, plan::StateRole::kParam, piece.shard_offset, constant));
      }
    }
  }
  RefreshWeights();
  return absl::OkStatus();
}

void RankEngine::RefreshWeights() {
  for (const shard::ParameterGroup& group : groups_) {
    if (group.rounds_weights() && !group.keeps_remainders()) {
      const shard::ParameterGroup::Stored stored = group.StoredAt(0, group.shard_elements());
      kernels::Cast(main_stream(),
                    {.from = stored.main_weight,
                     .to = stored.model_weight,
                     .rounding = kernels::Bf16Rounding::kHalfAway});
    }
  }
  if (device_ != nullptr) {
    device_->Join();
  }
}

TensorView RankEngine::Shared(std::string_view name) const {
  return executor_->shared()[model::ActivationIndex(args_.plan.inventory.shared, name)];
}

void RankEngine::PrefetchStep(int64_t step) {
  for (int64_t turn = 0; turn < args_.plan.lanes.turns(); ++turn) {
    if (LaneOf(turn) >= 0) {
      loader_->PrefetchTraining(step, LaneOf(turn));
    }
  }
}

absl::Status RankEngine::RunSlot(int64_t step, const plan::StepSlot& slot, int64_t program) {
  const bool training = slot.phase != plan::Phase::kEval;
  if (LaneOf(slot.turn) >= 0) {
    const DeviceBatches::Batch to =
        device_ != nullptr
            ? batches_.host(program)
            : DeviceBatches::Batch{.ids = Shared("ids"), .targets = Shared("targets")};
    const data::BatchLoader::LaneArgs lane = {.batch = step,
                                              .lane = LaneOf(slot.turn),
                                              .micro_batch = slot.micro_batch,
                                              .ids = to.ids,
                                              .targets = to.targets};
    RETURN_IF_ERROR(WithCode(training ? loader_->LoadTraining(lane) : loader_->LoadValidation(lane),
                             ExitCode::kData));
    if (device_ != nullptr) {
      batches_.Upload(device_->compute(), program);
    }
  }
  const plan::LayerDraw draw = {.seed = args_.spec.seed,
                                .probability = training ? args_.spec.layer_drop : 0,
                                .step = step,
                                .lane = LaneOf(slot.turn),
                                .micro_batch = slot.micro_batch};
  return executor_->Run({.slot = slot,
                         .used = plan::UsedUnits(args_.plan.inventory, draw),
                         .step = step + 1,
                         .measured = training && optimizer_->NormsDue(step)});
}

absl::Status RankEngine::IssueStep(int64_t step) {
  CHECK_MSG(unread_steps() <= 1, "the result of the step before the last has not been read");
  const plan::LaneMap& lanes = args_.plan.lanes;
  if (device_ != nullptr) {
    batches_.BeginStep();
  }
  optimizer_->BeginStep(main_stream(), step, Shared("loss"), Shared("targets"));
  for (int64_t program = 0; program < lanes.programs(); ++program) {
    const plan::StepSlot slot = plan::SlotOf(lanes, program);
    RETURN_IF_ERROR(RunSlot(step, slot, program));
    if (program == 0 && step + 1 < args_.spec.steps) {
      PrefetchStep(step + 1);
    }
    if (program + 1 < lanes.programs()) {
      optimizer_->AddMicroBatch(main_stream(), slot.turn);
    }
  }
  optimizer_->EndStep(main_stream());
  unread_.push_back(step);
  return absl::OkStatus();
}

absl::StatusOr<StepResult> RankEngine::ReadStep() {
  CHECK_MSG(!unread_.empty(), "every step was read");
  const int64_t step = unread_.front();
  if (device_ != nullptr) {
    RETURN_IF_ERROR(optimizer_->ReadStep());
  }
  unread_.pop_front();
  const optim::StepDecision& decision = optimizer_->decision();
  return StepResult{.step = step + 1,
                    .loss = decision.loss,
                    .grad_norm = decision.grad_norm,
                    .learning_rate = optimizer_->learning_rate(),
                    .target_tokens = optimizer_->totals().target_tokens,
                    .non_finite = optimizer_->totals().non_finite,
                    .skipped = !decision.apply,
                    .control = optimizer_->control()};
}

absl::StatusOr<StepResult> RankEngine::TrainStep(int64_t step) {
  CHECK_MSG(unread_.empty(), "results are read in turn");
  RETURN_IF_ERROR(IssueStep(step));
  return ReadStep();
}

absl::StatusOr<std::string> RankEngine::Localise(int64_t step) {
  shard::FiniteCheck check({.plan = args_.plan,
                            .buffers = *buffers_,
                            .groups = groups_,
                            .rank = args_.communicator.rank(),
                            .memory = memory_});
  executor_->set_observer(&check);
  const auto replayed = TrainStep(step);
  executor_->set_observer(nullptr);
  RETURN_IF_ERROR(replayed.status());
  if (!replayed->skipped) {
    return absl::InternalError(
        absl::StrCat("step ", step + 1, " was skipped, but not when it was replayed"));
  }
  struct Finding {
    int64_t order = std::numeric_limits<int64_t>::max();
    std::array<char, 504> text = {};
  };
  Finding mine;
  if (check.found().has_value()) {
    mine.order = check.found()->order;
    check.found()->text.copy(mine.text.data(), mine.text.size() - 1);
  }
  std::vector<Finding> all(Size(args_.plan.ranks));
  RETURN_IF_ERROR(
      args_.communicator.AllGatherBytes({.op = plan::OpLabel::kEndPhase, .unit = -1, .call = 2},
                                        std::as_bytes(std::span<const Finding>(&mine, 1)),
                                        std::as_writable_bytes(std::span<Finding>(all))));
  const auto first = std::min_element(
      all.begin(), all.end(), [](const auto& a, const auto& b) { return a.order < b.order; });
  return first->order == std::numeric_limits<int64_t>::max()
             ? std::string("every value of the replay is finite: only the norm overflows")
             : std::string(first->text.data());
}

absl::Status RankEngine::ExchangeLastNorms() {
  if (!optimizer_->norms_pending()) {
    return absl::OkStatus();
  }
  const std::vector<std::byte> mine = optimizer_->PackNorms();
  std::vector<std::byte> all(mine.size() * Size(args_.plan.ranks));
  RETURN_IF_ERROR(args_.communicator.AllGatherBytes(
      {.op = plan::OpLabel::kEndPhase, .unit = -1, .call = 3}, mine, all));
  optimizer_->UnpackNorms(all);
  return absl::OkStatus();
}

absl::StatusOr<float> RankEngine::Evaluate() {
  const plan::LaneMap& lanes = args_.plan.lanes;
  std::vector<optim::LaneLoss> mine(Size(lanes.turns()));
  statistics_->BeginEvaluation(main_stream());
  for (int64_t batch = 0; batch < args_.spec.evaluation_batches; ++batch) {
    RETURN_IF_ERROR(EvaluateBatch(batch));
  }
  RETURN_IF_ERROR(memory_.Read(statistics_->evaluation(),
                               std::as_writable_bytes(std::span<optim::LaneLoss>(mine))));
  MeasureArena();
  return CombineEvaluation(mine);
}

// Each program of an evaluation gathers the weights of the other replicas anew, into memory that
// the ranks of a replica read in place; no collective of the program before it waits for them.
absl::Status RankEngine::WaitForReaders() {
  if (!args_.plan.options.gather_in_place || !GathersForEvaluation(args_.plan)) {
    return absl::OkStatus();
  }
  if (device_ != nullptr) {
    RETURN_IF_ERROR(device_->FinishAll());
  }
  return args_.communicator.Barrier(
      {.op = plan::OpLabel::kOuterGather, .phase = plan::Phase::kEval});
}

absl::Status RankEngine::EvaluateBatch(int64_t batch) {
  if (device_ != nullptr) {
    batches_.BeginStep();
  }
  for (int64_t program = 0; program < args_.plan.lanes.programs(); ++program) {
    plan::StepSlot slot = plan::SlotOf(args_.plan.lanes, program);
    slot.phase = plan::Phase::kEval;
    slot.part = plan::LanePart::kWhole;
    RETURN_IF_ERROR(WaitForReaders());
    RETURN_IF_ERROR(RunSlot(batch, slot, program));
    if (LaneOf(slot.turn) >= 0) {
      statistics_->AddEvaluation(main_stream(), slot.turn, Shared("loss"), Shared("targets"));
    }
  }
  // The next batch but one takes the place of this one on its way to the device.
  return device_ == nullptr ? absl::OkStatus() : device_->Finish(device_->compute());
}

absl::StatusOr<float> RankEngine::CombineEvaluation(const std::vector<optim::LaneLoss>& mine) {
  const plan::LaneMap& lanes = args_.plan.lanes;
  std::vector<double> message;  // loss sums by turn, then token counts
  for (const optim::LaneLoss& lane : mine) {
    message.push_back(lane.sum);
  }
  for (const optim::LaneLoss& lane : mine) {
    message.push_back(static_cast<double>(lane.tokens));
  }
  std::vector<double> all(message.size() * Size(lanes.ranks));
  RETURN_IF_ERROR(
      args_.communicator.AllGatherBytes({.op = plan::OpLabel::kEndPhase, .unit = -1, .call = 0},
                                        std::as_bytes(std::span<const double>(message)),
                                        std::as_writable_bytes(std::span<double>(all))));
  std::vector<std::vector<double>> losses;
  std::vector<std::vector<double>> tokens;
  for (size_t rank = 0; rank < Size(lanes.ranks); ++rank) {
    const double* from = all.data() + rank * message.size();
    losses.emplace_back(from, from + mine.size());
    tokens.emplace_back(from + mine.size(), from + message.size());
  }
  return static_cast<float>(optim::TreeOverLanes(lanes, losses) /
                            optim::TreeOverLanes(lanes, tokens));
}

RankEngine::ArenaSpans RankEngine::arenas() const {
  const auto part = [&](plan::MemoryKind kind, int64_t bytes) {
    const std::byte* begin = args_.communicator.arena(kind);
    return std::span(begin, begin == nullptr ? 0 : Size(bytes));
  };
  return {part(plan::MemoryKind::kPrivate, arena_.private_bytes),
          part(plan::MemoryKind::kSymmetric, arena_.symmetric_bytes),
          part(plan::MemoryKind::kCommon, arena_.common_bytes)};
}

int64_t RankEngine::planned_bytes() const {
  const plan::BufferPlan& memory = args_.plan.memory;
  return memory.private_bytes + memory.symmetric_bytes +
         DivCeil(memory.common_bytes * args_.plan.lanes.replicas, args_.plan.ranks);
}

void RankEngine::MeasureArena() {
  const auto measure = [&](std::span<const std::byte> part) {
    return args_.gpu == nullptr ? ResidentBytes(part) : std::ssize(part);
  };
  const ArenaSpans parts = arenas();
  measured_bytes_ =
      measure(parts[0]) + measure(parts[1]) + DivCeil(measure(parts[2]), args_.plan.lanes.width());
}

}  // namespace ravel::trainer
