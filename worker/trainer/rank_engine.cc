// One rank of a job: memory, communicators and programs are set up once from the plan, and each
// step runs a program per turn of lanes and micro-batch. Everything that a device does differently
// is behind the backend that is chosen here once.

#include "worker/trainer/rank_engine.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <span>
#include <utility>

#include <absl/strings/str_cat.h>

#include "common/check.h"
#include "common/plan/layer_drop.h"
#include "common/signed_size.h"
#include "kernels/cast.h"
#include "kernels/philox.h"
#include "worker/optim/stored_state.h"
#include "worker/shard/finite_check.h"
#include "worker/trainer/exit_code.h"

namespace ravel::trainer {
namespace {

// True if an evaluation gathers weights between replicas.
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

data::BatchShape ShapeOf(const plan::ShardingPlan& plan) {
  return {.lanes = plan.lanes.lanes,
          .micro_batches = plan.lanes.micro_batches,
          .sequences = plan.micro_batch.sequences,
          .sequence_tokens = plan.micro_batch.sequence_tokens,
          .vocabulary = plan.inventory.config.vocab_size};
}

}  // namespace

RankEngine::RankEngine(Args args) : args_(std::move(args)) {
  const EngineBackend::Args chosen = {.plan = args_.plan,
                                      .communicator = args_.communicator,
                                      .exact = args_.settings.exact,
                                      .norms = args_.settings.update.norms_every > 0,
                                      .options = args_.options,
                                      .gemms = args_.gemms,
                                      .offload = args_.settings.offload};
  backend_ = args_.gpu == nullptr ? EngineBackend::OnHost(chosen)
                                  : EngineBackend::OnDevice(chosen, *args_.gpu);
}

absl::StatusOr<std::unique_ptr<RankEngine>> RankEngine::Create(Args args) {
  std::unique_ptr<RankEngine> engine(new RankEngine(std::move(args)));
  RETURN_IF_ERROR(engine->SetUp());
  return engine;
}

absl::Status RankEngine::CheckGroup() const {
  const plan::ShardingPlan& plan = args_.plan;
  const comm::Communicator& communicator = args_.communicator;
  if (plan.ranks != communicator.size()) {
    return absl::FailedPreconditionError(
        absl::StrCat("plan is for ", plan.ranks, " ranks, the group has ", communicator.size()));
  }
  if (plan.options.gather_in_place && !communicator.shared_memory()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "plan gathers in place, which transport ", communicator.transport(), " cannot"));
  }
  return backend_->Check();
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
  return WithCode(backend_->ExplainArena(std::move(allocated), planned_bytes()),
                  ExitCode::kOutOfMemory);
}

void RankEngine::MakeOptimizer() {
  optimizer_ = std::make_unique<optim::StepOptimizer>(optim::StepOptimizer::Args{
      .plan = args_.plan,
      .settings = args_.settings.update,
      .rank = args_.communicator.rank(),
      .groups = groups_,
      .control = args_.control,
      .memory = backend_->memory(),
      .statistics = backend_->statistics(),
      .pieces = backend_->pieces(),
      .rule = optim::MakeUpdateRule(
          args_.plan.options.optimizer, args_.settings.update, args_.settings.seed),
      .offload = backend_->offload(),
      .host_updater = backend_->host_updater()});
}

void RankEngine::MakeExecutor() {
  modules_ =
      model::MakeModules(args_.plan.inventory,
                         args_.plan.micro_batch,
                         args_.communicator.rank() % plan::TensorRanks(args_.plan.inventory));
  executor_ = std::make_unique<shard::UnitExecutor>(
      shard::UnitExecutor::Args{.plan = args_.plan,
                                .communicators = communicators_,
                                .backend = backend_->replay(),
                                .buffers = *buffers_,
                                .groups = groups_,
                                .modules = modules_,
                                .actions = optimizer_.get(),
                                .seed = args_.settings.seed},
      shard::ExecutorOptions{.poison = args_.options.poison, .recorder = args_.options.recorder});
}

absl::Status RankEngine::OpenParts() {
  const plan::ShardingPlan& plan = args_.plan;
  comm::Communicator& communicator = args_.communicator;
  buffers_ =
      std::make_unique<shard::ArenaBuffers>(plan, communicator, backend_->offloaded().data());
  groups_.reserve(plan.groups.size());
  for (const plan::GroupId group : plan.groups.ids()) {
    groups_.emplace_back(plan, *buffers_, group, communicator.rank());
  }
  return backend_->Open(communicators_, groups_);
}

absl::Status RankEngine::SetUp() {
  RETURN_IF_ERROR(WithCode(CheckGroup(), ExitCode::kPlanMismatch));
  auto loader =
      data::BatchLoader::Open(args_.settings.data, ShapeOf(args_.plan), args_.settings.seed);
  if (!loader.ok()) {
    return WithCode(loader.status(), ExitCode::kData);
  }
  loader_ = *std::move(loader);
  RETURN_IF_ERROR(WithCode(backend_->OpenOffload(), ExitCode::kData));
  // Before the arena: groups within a host decide whose memory it is (comm/mixed_communicator.h).
  ASSIGN_OR_RETURN(
      communicators_,
      shard::MeshCommunicators::Create(args_.communicator, args_.plan.mesh, args_.plan.moves));
  RETURN_IF_ERROR(AllocateArena());
  RETURN_IF_ERROR(OpenParts());
  MakeOptimizer();
  MakeExecutor();
  ASSIGN_OR_RETURN(
      gemm_choices_,
      backend_->Prepare(*executor_, {.ids = Shared("ids"), .targets = Shared("targets")}));
  return FillRopeTables();
}

// Computed on the host, so that a device has the same bits.
absl::Status RankEngine::FillRopeTables() {
  const plan::ModelInventory& inventory = args_.plan.inventory;
  std::vector<TensorView> shared = executor_->shared();
  std::vector<std::vector<float>> tables(shared.size());
  for (size_t i = 0; i < shared.size(); ++i) {
    if (inventory.shared[i].name.starts_with("rope_")) {
      tables[i].resize(Size(shared[i].elements()));
      shared[i].data = tables[i].data();
    }
  }
  kernels::CpuStream stream;
  model::FillRopeTables(stream, inventory, shared);
  for (size_t i = 0; i < shared.size(); ++i) {
    if (!tables[i].empty()) {
      RETURN_IF_ERROR(memory().Write(std::as_bytes(std::span<const float>(tables[i])),
                                     executor_->shared()[i].data));
    }
  }
  return absl::OkStatus();
}

// Drawn in the stream's scratch where the main weights are none that a kernel could fill, and
// written, or split, by the host: memory that is made and freed here would wait for peers that are
// a step ahead.
absl::Status RankEngine::DrawNormal(const shard::ParameterGroup& group,
                                    const plan::OwnedRun& run,
                                    const plan::TensorSpec& tensor) {
  constexpr int64_t kDrawnElements = int64_t{1} << 20;
  const auto draw = [&](float* to, int64_t first, int64_t elements) {
    kernels::InitNormal(
        main_stream(),
        {.out = VectorView(to, elements),
         .seed = args_.settings.seed,
         .site = tensor.site,
         .first_index = run.first + first,
         .standard_deviation = static_cast<float>(args_.settings.init_std * tensor.init_scale)});
  };
  if (!group.keeps_remainders() && memory().Reaches(group.main_weight())) {
    float* const weights = group.main_weight() + run.offset;
    draw(weights, 0, run.elements);
    return memory().Settle(std::as_bytes(std::span<const float>(weights, Size(run.elements))));
  }
  auto* drawn = static_cast<float*>(backend_->Scratch(std::min(run.elements, kDrawnElements) *
                                                      static_cast<int64_t>(sizeof(float))));
  std::vector<float> values;
  for (int64_t first = 0; first < run.elements; first += kDrawnElements) {
    values.resize(Size(std::min(kDrawnElements, run.elements - first)));
    draw(drawn, first, static_cast<int64_t>(values.size()));
    RETURN_IF_ERROR(memory().Read(drawn, std::as_writable_bytes(std::span<float>(values))));
    RETURN_IF_ERROR(
        optim::WriteStored(memory(), group, plan::StateRole::kParam, run.offset + first, values));
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
            memory(), group, plan::StateRole::kParam, piece.shard_offset, constant));
      }
    }
  }
  return RefreshWeights();
}

absl::Status RankEngine::RefreshWeights(shard::UnitExecutor::Refresh refresh) {
  for (const shard::ParameterGroup& group : groups_) {
    if (group.rounds_weights() && !memory().Reaches(group.main_weight())) {
      RETURN_IF_ERROR(optim::RoundStored(memory(), group));
    } else if (group.rounds_weights() && !group.keeps_remainders()) {
      const shard::ParameterGroup::Stored stored = group.StoredAt(0, group.shard_elements());
      kernels::Cast(main_stream(),
                    {.from = stored.main_weight,
                     .to = stored.model_weight,
                     .rounding = kernels::Bf16Rounding::kHalfAway});
      // The next use tells what has failed.
      const std::span<const float> used(stored.main_weight.As<float>(),
                                        Size(group.shard_elements()));
      memory().Settle(std::as_bytes(used)).IgnoreError();
    }
  }
  if (quant() != nullptr) {
    backend_->Join();  // another stream reads main weights
    RETURN_IF_ERROR(executor_->RefreshQuantized(refresh));
  }
  backend_->Join();
  return absl::OkStatus();
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
    const BatchViews to = backend_->HostBatch(program);
    const data::BatchLoader::LaneArgs lane = {.batch = step,
                                              .lane = LaneOf(slot.turn),
                                              .micro_batch = slot.micro_batch,
                                              .ids = to.ids,
                                              .targets = to.targets};
    RETURN_IF_ERROR(WithCode(training ? loader_->LoadTraining(lane) : loader_->LoadValidation(lane),
                             ExitCode::kData));
    backend_->Upload(program);
  }
  const plan::LayerDraw draw = {.seed = args_.settings.seed,
                                .probability = training ? args_.plan.options.layer_drop : 0,
                                .step = step,
                                .lane = LaneOf(slot.turn),
                                .micro_batch = slot.micro_batch};
  absl::Status ran = executor_->Run({.slot = slot,
                                     .used = plan::UsedUnits(args_.plan.inventory, draw),
                                     .step = step + 1,
                                     .loss_scale = optimizer_->loss_scale().scale,
                                     .measured = training && optimizer_->NormsDue(step)});
  // Of a disk that holds offloaded state; collectives fail otherwise.
  return absl::IsDataLoss(ran) ? WithCode(std::move(ran), ExitCode::kDevice) : ran;
}

absl::Status RankEngine::IssueStep(int64_t step) {
  CHECK_MSG(unread_steps() <= 1, "the result of the step before the last has not been read");
  const plan::LaneMap& lanes = args_.plan.lanes;
  backend_->BeginPrograms();
  optimizer_->BeginStep(main_stream(), step, Shared("loss"), Shared("targets"));
  for (int64_t program = 0; program < lanes.programs(); ++program) {
    const plan::StepSlot slot = plan::SlotOf(lanes, program);
    RETURN_IF_ERROR(RunSlot(step, slot, program));
    if (program == 0 && step + 1 < args_.settings.update.steps) {
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
  if (optimizer_->unread() > 0) {
    RETURN_IF_ERROR(optimizer_->ReadStep());
  }
  unread_.pop_front();
  const optim::StepDecision& decision = optimizer_->decision();
  const double scale = optimizer_->last_loss_scale().scale;
  return StepResult{.step = step + 1,
                    .loss = decision.loss,
                    .grad_norm = decision.grad_norm,
                    .learning_rate = optimizer_->learning_rate(),
                    .target_tokens = optimizer_->totals().target_tokens,
                    .non_finite = optimizer_->totals().non_finite,
                    .skipped = !decision.apply,
                    .loss_scale = optimizer_->scales_loss() ? scale : 0,
                    .lowers_scale = optimizer_->loss_scale().scale < scale,
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
                            .memory = memory()});
  executor_->set_observer(&check);
  // A lower scale might not overflow. What the replay leaves is what the step has left.
  if (optimizer_->scales_loss()) {
    optimizer_->set_loss_scale(optimizer_->last_loss_scale());
  }
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
  backend_->statistics().BeginEvaluation(main_stream());
  for (int64_t batch = 0; batch < args_.settings.evaluation_batches; ++batch) {
    RETURN_IF_ERROR(EvaluateBatch(batch));
  }
  RETURN_IF_ERROR(memory().Read(backend_->statistics().evaluation(),
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
  RETURN_IF_ERROR(backend_->replay().Finish());
  return args_.communicator.Barrier(
      {.op = plan::OpLabel::kOuterGather, .phase = plan::Phase::kEval});
}

absl::Status RankEngine::EvaluateBatch(int64_t batch) {
  backend_->BeginPrograms();
  for (int64_t program = 0; program < args_.plan.lanes.programs(); ++program) {
    plan::StepSlot slot = plan::SlotOf(args_.plan.lanes, program);
    slot.phase = plan::Phase::kEval;
    slot.part = plan::LanePart::kWhole;
    RETURN_IF_ERROR(WaitForReaders());
    RETURN_IF_ERROR(RunSlot(batch, slot, program));
    if (LaneOf(slot.turn) >= 0) {
      backend_->statistics().AddEvaluation(
          main_stream(), slot.turn, Shared("loss"), Shared("targets"));
    }
  }
  // The next batch but one takes the place of this one on its way to the device.
  return backend_->FinishBatches();
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
  std::vector<double> all(message.size() * Size(args_.plan.ranks));
  RETURN_IF_ERROR(
      args_.communicator.AllGatherBytes({.op = plan::OpLabel::kEndPhase, .unit = -1, .call = 0},
                                        std::as_bytes(std::span<const double>(message)),
                                        std::as_writable_bytes(std::span<double>(all))));
  std::vector<std::vector<double>> losses;
  std::vector<std::vector<double>> tokens;
  for (int64_t rank = 0; rank < args_.plan.ranks; ++rank) {
    if (!plan::CountsLane(args_.plan, rank)) {
      continue;
    }
    const double* from = all.data() + Size(rank) * message.size();
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
    return backend_->MeasureBytes(part);
  };
  const ArenaSpans parts = arenas();
  measured_bytes_ =
      measure(parts[0]) + measure(parts[1]) + DivCeil(measure(parts[2]), args_.plan.lanes.width());
}

}  // namespace ravel::trainer
