// Steps of whole models on 1, 2 and 4 ranks of a tensor axis, with everything that a trainer's step
// has but the optimizer: plan, executor, communicators and modules. Losses, hidden and every
// gradient have the bits of one rank.

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/model/segments.h"
#include "common/mutex.h"
#include "common/plan/check/program_checker.h"
#include "common/signed_size.h"
#include "kernels/philox.h"
#include "worker/comm/local_communicator.h"
#include "worker/shard/host_replay.h"
#include "worker/shard/unit_executor.h"

namespace ravel::shard {
namespace {

using ::testing::IsEmpty;

constexpr int64_t kParts = 4;
constexpr int64_t kChunkTokens = 5;  // of logits; 12 tokens are three chunks, the last one shorter

struct StepCase {
  std::string name;
  plan::ArchitectureKind architecture = plan::ArchitectureKind::kLlama;
  int64_t key_heads = 8;
  bool tied = false;
  plan::RecomputePolicy recompute = plan::RecomputePolicy::kNone;
  plan::Strategy strategy = plan::Strategy::kOptimGradsParams;
  int64_t data_ranks = 1;
  int64_t lanes = 1;
  int64_t micro_batches = 2;
  bool twice = false;  // each layer runs twice
  bool drops = false;  // every other micro-batch leaves out the first layer
  plan::ComputeType compute = plan::ComputeType::kF32;
  bool sequence = false;  // ranks of the tensor axis have their own tokens alone
  int64_t chunks = 1;     // of tokens, in which they exchange sums
};

// By name, and by place on the tensor axis where ranks may differ; elements as bits.
using Shares = std::map<std::string, std::map<int64_t, std::vector<float>>>;

plan::JobSpec JobOf(const StepCase& tested, int64_t tensor) {
  const bool gpt2 = tested.architecture == plan::ArchitectureKind::kGpt2;
  plan::ModelConfig config;
  config.architecture = tested.architecture;
  config.vocab_size = 37;
  config.hidden_size = 32;
  config.intermediate_size = gpt2 ? 0 : 40;
  config.num_hidden_layers = 2;
  config.num_attention_heads = 8;
  config.num_key_value_heads = tested.key_heads;
  config.head_dim = gpt2 ? 4 : 6;
  config.max_position_embeddings = 32;
  config.tie_word_embeddings = tested.tied;
  config.layer_sharing = tested.twice;
  plan::JobSpec spec;
  spec.model = config;
  spec.data.sequence_length = 6;
  spec.steps = 1;
  spec.micro_batch = 2;
  spec.virtual_ranks = tested.lanes;
  spec.global_batch = spec.micro_batch * tested.lanes * tested.micro_batches;
  spec.strategy = tested.strategy;
  spec.recompute = tested.recompute;
  spec.tensor = tensor;
  spec.sequence_parallel = tested.sequence && tensor > 1;
  spec.tensor_chunks = tensor > 1 ? tested.chunks : 1;
  spec.tensor_parts = kParts;
  spec.allow_padding = true;
  spec.compute = tested.compute;
  spec.layer_drop = tested.drops ? 0.5 : 0;
  return spec;
}

// As if the logits of a chunk were of fewer tokens.
absl::StatusOr<plan::ShardingPlan> PlanOf(const StepCase& tested, int64_t tensor) {
  ASSIGN_OR_RETURN(plan::ShardingPlan plan,
                   plan::BuildShardingPlan(
                       {.spec = JobOf(tested, tensor), .ranks = tested.data_ranks * tensor}));
  for (plan::ActivationSpec& spec : plan.inventory.units.back().workspace) {
    if (spec.name == "logits") {
      spec.shape[0] = kChunkTokens;
    } else if (spec.name == "parts") {
      const int64_t tokens = plan.micro_batch.sequences * plan.micro_batch.sequence_tokens;
      spec.shape[0] = DivExact(spec.shape[0], tokens) * kChunkTokens;
    } else if (spec.name == "vocabulary") {
      spec.shape[1] = kChunkTokens;
    }
  }
  plan.options.gather_window_bytes = 0;
  plan.options.staging_window_bytes = 0;
  RETURN_IF_ERROR(plan::PlanPrograms(plan));
  RETURN_IF_ERROR(plan::CheckPlan(plan));
  return plan;
}

// Results of all ranks. Ranks of one place on the tensor axis add their parts of a tensor.
class Results {
 public:
  void Add(const std::string& name, int64_t coordinate, std::vector<float> values) {
    MutexLock lock(mutex_);
    shares_[name][coordinate] = std::move(values);
  }
  // Elements of `range` of a tensor.
  void Add(const plan::TensorSpec& tensor,
           int64_t coordinate,
           int64_t first,
           const float* values,
           int64_t count) {
    MutexLock lock(mutex_);
    std::vector<float>& share = shares_[tensor.name][coordinate];
    share.resize(Size(ElementCount(tensor.shape)), kLacks);
    std::copy_n(values, count, share.begin() + first);
  }
  const Shares& shares() const { return shares_; }
  static bool Lacks(float value) { return std::memcmp(&value, &kLacks, sizeof(value)) == 0; }
  // No arithmetic makes this NaN.
  static constexpr float kLacks = std::bit_cast<float>(0x7FC0DEADu);

 private:
  Mutex mutex_;
  Shares shares_;
};

class KeepGradients final : public StepActions {
 public:
  KeepGradients(const plan::ShardingPlan& plan,
                ParameterGroups& groups,
                int64_t coordinate,
                Results& results)
      : plan_(plan), groups_(groups), coordinate_(coordinate), results_(results) {}
  StatisticsMessages Measure(kernels::Stream&) override {
    return {.mine = &mine_, .all = all_.data(), .words = 1};
  }
  absl::Status Decide(kernels::Stream&) override {
    for (const ParameterGroup& group : groups_) {
      for (const plan::OwnedPiece& piece : group.pieces()) {
        const plan::TensorSpec& tensor = plan_.inventory.tensors[piece.tensor];
        piece.VisitRuns(tensor.shape, [&](const plan::OwnedRun& run) {
          results_.Add(tensor,
                       coordinate_,
                       run.first,
                       group.optimizer_gradient() + run.offset,
                       run.elements);
        });
      }
    }
    return absl::OkStatus();
  }
  absl::Status UpdateGroup(kernels::Stream&, plan::GroupId, const QuantizedUpdate&) override {
    return absl::OkStatus();
  }

 private:
  const plan::ShardingPlan& plan_;
  ParameterGroups& groups_;
  const int64_t coordinate_;
  Results& results_;
  int64_t mine_ = 0;
  std::array<int64_t, 64> all_ = {};
};

class RankOfStep {
 public:
  RankOfStep(const StepCase& tested,
             const plan::ShardingPlan& plan,
             comm::Communicator& communicator,
             Results& results)
      : tested_(tested),
        plan_(plan),
        communicator_(communicator),
        results_(results),
        rank_(communicator.rank()),
        coordinate_(rank_ % plan::TensorRanks(plan.inventory)) {}

  absl::Status Run() {
    RETURN_IF_ERROR(communicator_.AllocateArena({.private_bytes = plan_.memory.private_bytes,
                                                 .symmetric_bytes = plan_.memory.symmetric_bytes,
                                                 .common_bytes = plan_.memory.common_bytes,
                                                 .common_copies = plan_.lanes.replicas}));
    ASSIGN_OR_RETURN(MeshCommunicators mesh,
                     MeshCommunicators::Create(communicator_, plan_.mesh, plan_.moves));
    const ArenaBuffers buffers(plan_, communicator_);
    ParameterGroups groups;
    groups.reserve(plan_.groups.size());
    for (const plan::GroupId group : plan_.groups.ids()) {
      groups.emplace_back(plan_, buffers, group, rank_);
      Draw(groups.back());
    }
    const model::Modules modules =
        model::MakeModules(plan_.inventory, plan_.micro_batch, coordinate_);
    KeepGradients actions(plan_, groups, coordinate_, results_);
    HostReplay backend;
    UnitExecutor executor({.plan = plan_,
                           .communicators = mesh,
                           .backend = backend,
                           .buffers = buffers,
                           .groups = groups,
                           .modules = modules,
                           .actions = &actions},
                          {.poison = true});
    RETURN_IF_ERROR(executor.Prepare());
    kernels::CpuStream stream;
    model::FillRopeTables(stream, plan_.inventory, executor.shared());
    RETURN_IF_ERROR(communicator_.Barrier({}));
    for (int64_t step = 1; step <= 2; ++step) {
      RETURN_IF_ERROR(RunStep(executor, step));
    }
    return absl::OkStatus();
  }

 private:
  // Weights by their places in the model: the same on any number of ranks.
  void Draw(ParameterGroup& group) const {
    kernels::CpuStream stream;
    for (const plan::OwnedPiece& piece : group.pieces()) {
      const plan::TensorSpec& tensor = plan_.inventory.tensors[piece.tensor];
      piece.VisitRuns(tensor.shape, [&](const plan::OwnedRun& run) {
        float* out = group.main_weight() + run.offset;
        kernels::InitNormal(stream,
                            {.out = VectorView(out, run.elements),
                             .seed = 7,
                             .site = tensor.site,
                             .first_index = run.first,
                             .standard_deviation = 0.3f});
        if (run.first == 0) {
          out[0] = -0.0f;
        }
        if (group.rounds_weights()) {
          auto* rounded = reinterpret_cast<uint16_t*>(group.stored_model_weight()) + run.offset;
          std::transform(out, out + run.elements, rounded, FloatToBf16);
        }
      });
    }
  }

  absl::Status RunStep(UnitExecutor& executor, int64_t step) {
    for (int64_t program = 0; program < plan_.lanes.programs(); ++program) {
      const plan::StepSlot slot = plan::SlotOf(plan_.lanes, program);
      const int64_t lane = plan::LaneOf(plan_, slot.turn, rank_);
      const int64_t sample = (step * 8 + lane) * 8 + slot.micro_batch;
      Load(executor, sample);
      RETURN_IF_ERROR(executor.Run({.slot = slot, .used = UsedIn(slot.micro_batch), .step = step}));
      Keep(executor, "loss", sample, lane);
      Keep(executor, "hidden", sample, lane);
      Keep(executor, "dhidden", sample, lane);
    }
    Load(executor, step);
    RETURN_IF_ERROR(
        executor.Run({.slot = {.phase = plan::Phase::kEval}, .used = {}, .step = step}));
    Keep(executor, "loss", -step, plan::LaneOf(plan_, 0, rank_));
    return absl::OkStatus();
  }

  plan::IdVector<plan::UnitId, bool> UsedIn(int64_t micro_batch) const {
    plan::IdVector<plan::UnitId, bool> used(plan_.inventory.units.size(), true);
    used[1] = !tested_.drops || micro_batch % 2 == 0;
    return used;
  }

  TensorView Shared(const UnitExecutor& executor, const char* name) const {
    return executor.shared()[model::ActivationIndex(plan_.inventory.shared, name)];
  }
  void Load(const UnitExecutor& executor, int64_t sample) const {
    const TensorView ids = Shared(executor, "ids");
    const TensorView targets = Shared(executor, "targets");
    const int64_t vocabulary = plan_.inventory.config.vocab_size;
    for (int64_t i = 0; i < ids.elements(); ++i) {
      ids.As<int32_t>()[i] = static_cast<int32_t>((3 * i + 5 * sample) % vocabulary);
      targets.As<int32_t>()[i] =
          static_cast<int32_t>(i == 3 ? -1 : (5 * i + 1 + 7 * sample) % vocabulary);
    }
  }
  void Keep(const UnitExecutor& executor, const char* name, int64_t sample, int64_t lane) {
    if (lane < 0) {
      return;
    }
    const TensorView view = Shared(executor, name);
    std::vector<float> values(Size(view.elements()));
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] =
          view.dtype == DType::kF32 ? view.As<float>()[i] : Bf16ToFloat(view.As<uint16_t>()[i]);
    }
    if (plan_.inventory.cut.sequence && std::string(name) != "loss") {
      const size_t ranks = Size(plan::TensorRanks(plan_.inventory));
      std::vector<float> all(values.size() * ranks, Results::kLacks);
      std::copy(values.begin(), values.end(), all.begin() + coordinate_ * view.elements());
      values = std::move(all);
    }
    results_.Add(absl::StrCat(name, " of ", sample), coordinate_, std::move(values));
  }

  const StepCase& tested_;
  const plan::ShardingPlan& plan_;
  comm::Communicator& communicator_;
  Results& results_;
  const int rank_;
  const int64_t coordinate_;
};

// One value for each element: ranks that have the same of a tensor agree on it.
std::vector<float> Joined(const std::map<int64_t, std::vector<float>>& shares) {
  const size_t elements = shares.begin()->second.size();
  std::vector<float> joined;
  for (size_t i = 0; i < elements; ++i) {
    std::vector<float> values;
    for (const auto& [coordinate, share] : shares) {
      if (!Results::Lacks(share[i])) {
        values.push_back(share[i]);
      }
    }
    if (values.empty()) {
      return {};  // which equals nothing
    }
    for (const float value : values) {
      if (std::memcmp(&value, values.data(), sizeof(value)) != 0) {
        return {};
      }
    }
    joined.push_back(values[0]);
  }
  return joined;
}

std::map<std::string, std::vector<float>> RunStepOf(const StepCase& tested, int64_t tensor) {
  const absl::StatusOr<plan::ShardingPlan> plan = PlanOf(tested, tensor);
  EXPECT_TRUE(plan.ok()) << plan.status();
  if (!plan.ok()) {
    return {};
  }
  Results results;
  auto communicators = *comm::CreateLocalGroup(static_cast<int>(plan->ranks));
  std::vector<std::thread> threads;
  for (const std::unique_ptr<comm::Communicator>& communicator : communicators) {
    threads.emplace_back([&] {
      const absl::Status status = RankOfStep(tested, *plan, *communicator, results).Run();
      EXPECT_TRUE(status.ok()) << status;
      if (!status.ok()) {
        communicator->Abort("a rank failed");
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  std::map<std::string, std::vector<float>> joined;
  for (const auto& [name, shares] : results.shares()) {
    joined[name] = Joined(shares);
  }
  return joined;
}

std::vector<std::string> Different(const std::map<std::string, std::vector<float>>& a,
                                   const std::map<std::string, std::vector<float>>& b) {
  std::vector<std::string> names;
  for (const auto& [name, values] : a) {
    const auto other = b.find(name);
    if (values.empty() || other == b.end() || other->second.size() != values.size() ||
        std::memcmp(other->second.data(), values.data(), values.size() * sizeof(float)) != 0) {
      names.push_back(name);
    }
  }
  return names;
}

class TensorModules : public ::testing::TestWithParam<StepCase> {};

TEST_P(TensorModules, StepsHaveTheBitsOfOneRank) {
  const auto one = RunStepOf(GetParam(), 1);
  EXPECT_GT(one.size(), 20u);
  for (const int64_t tensor : {2, 4}) {
    for (const bool sequence : {false, true}) {
      for (const int64_t chunks : {1, 2}) {
        StepCase tested = GetParam();
        tested.sequence = sequence;
        tested.chunks = chunks;
        if (12 % (tensor * chunks) != 0) {
          continue;
        }
        const auto other = RunStepOf(tested, tensor);
        EXPECT_EQ(other.size(), one.size());
        EXPECT_THAT(Different(one, other), IsEmpty())
            << tensor << (sequence ? " own tokens" : "") << " chunks " << chunks;
      }
    }
  }
}

std::vector<StepCase> AllSteps() {
  using plan::ArchitectureKind;
  using plan::RecomputePolicy;
  using plan::Strategy;
  return {
      {.name = "llama", .strategy = Strategy::kNoShard},
      {.name = "llama_tied",
       .key_heads = 4,
       .tied = true,
       .recompute = RecomputePolicy::kMlp,
       .strategy = Strategy::kOptim},
      {.name = "llama_two_data_ranks",
       .key_heads = 4,
       .strategy = Strategy::kOptimGrads,
       .data_ranks = 2,
       .lanes = 4},
      {.name = "qwen2_1kv",
       .architecture = ArchitectureKind::kQwen2,
       .key_heads = 1,
       .micro_batches = 3},
      {.name = "qwen2_2kv_tied",
       .architecture = ArchitectureKind::kQwen2,
       .key_heads = 2,
       .tied = true},
      {.name = "qwen3_2kv",
       .architecture = ArchitectureKind::kQwen3,
       .key_heads = 2,
       .recompute = RecomputePolicy::kNorm},
      {.name = "qwen3_tied",
       .architecture = ArchitectureKind::kQwen3,
       .tied = true,
       .recompute = RecomputePolicy::kBlock},
      {.name = "qwen3_bf16",
       .architecture = ArchitectureKind::kQwen3,
       .key_heads = 4,
       .compute = plan::ComputeType::kBF16},
      {.name = "llama_layers_twice",
       .key_heads = 4,
       .recompute = RecomputePolicy::kBlock,
       .twice = true},
      {.name = "qwen2_layers_left_out",
       .architecture = ArchitectureKind::kQwen2,
       .key_heads = 2,
       .drops = true},
      {.name = "gpt2_bf16",
       .architecture = ArchitectureKind::kGpt2,
       .tied = true,
       .compute = plan::ComputeType::kBF16},
      {.name = "gpt2", .architecture = ArchitectureKind::kGpt2, .micro_batches = 1},
      {.name = "gpt2_tied",
       .architecture = ArchitectureKind::kGpt2,
       .tied = true,
       .recompute = RecomputePolicy::kBlock,
       .strategy = Strategy::kOptimGrads,
       .data_ranks = 2,
       .lanes = 2},
  };
}
INSTANTIATE_TEST_SUITE_P(Models,
                         TensorModules,
                         ::testing::ValuesIn(AllSteps()),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace ravel::shard
