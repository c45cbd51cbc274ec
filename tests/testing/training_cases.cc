#include "tests/testing/training_cases.h"

#include <bit>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <system_error>

#include <absl/strings/str_cat.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "common/check.h"
#include "common/model/architecture/architecture.h"
#include "common/mutex.h"
#include "worker/optim/stored_state.h"

namespace ravel::trainer {
namespace {

constexpr int64_t kTokens = 4001;

plan::ModelConfig BaseModel() {
  plan::ModelConfig model;
  model.num_hidden_layers = 2;
  model.max_position_embeddings = 64;
  model.rms_norm_eps = 1e-5;
  model.rope_theta = 10000.0;
  return model;
}

plan::ModelConfig OddModel() {
  plan::ModelConfig model = BaseModel();
  model.vocab_size = 61;
  model.hidden_size = 30;
  model.intermediate_size = 37;
  model.num_attention_heads = 6;
  model.head_dim = 6;
  return model;
}

// Matrices that every recipe takes.
plan::ModelConfig RecipeModel(const std::string& name) {
  const bool wide = name == "recipes_wide";
  plan::ModelConfig model = BaseModel();
  model.vocab_size = 97;
  model.hidden_size = wide ? 256 : 128;
  model.intermediate_size = wide ? 1024 : 256;
  model.num_attention_heads = wide ? 8 : 4;
  model.num_key_value_heads = wide ? 4 : 2;
  model.head_dim = wide ? 32 : 64;
  if (name == "recipes_gpt2") {
    model.architecture = plan::ArchitectureKind::kGpt2;
    model.num_key_value_heads = 4;
    model.head_dim = 32;
  }
  return model;
}

plan::ModelConfig CutModel(const std::string& name) {
  plan::ModelConfig model = BaseModel();
  const std::string family = name.substr(name.find('_') + 1);
  const plan::Architecture* architecture =
      plan::FindArchitecture(family.substr(0, family.find('_')));
  CHECK(architecture != nullptr);
  model.architecture = architecture->kind;
  model.tie_word_embeddings = name.ends_with("_tied");
  model.vocab_size = 61;
  model.hidden_size = 32;
  model.intermediate_size = 48;
  model.num_attention_heads = 4;
  model.num_key_value_heads = model.tie_word_embeddings ? 2 : 4;
  model.head_dim = 6;
  if (architecture->kind == plan::ArchitectureKind::kGpt2) {
    model.num_key_value_heads = 4;
    model.head_dim = 8;
  }
  return model;
}

plan::ModelConfig CaseModel(const std::string& name) {
  if (name.starts_with("cut_")) {
    return CutModel(name);
  }
  plan::ModelConfig model = OddModel();
  if (name == "odd_tied") {
    model.num_key_value_heads = 2;
    model.tie_word_embeddings = true;
    return model;
  }
  if (name == "odd_untied") {
    model.num_key_value_heads = 3;
    return model;
  }
  if (name == "shared_layers") {
    model.num_key_value_heads = 2;
    model.tie_word_embeddings = true;
    model.layer_sharing = true;
    return model;
  }
  if (name == "layer_drop") {
    model.num_hidden_layers = 4;
    model.num_key_value_heads = 3;
    return model;
  }
  const std::string family = name.substr(0, name.find('_'));
  if (const plan::Architecture* architecture = plan::FindArchitecture(family)) {
    model.architecture = architecture->kind;
    model.tie_word_embeddings = name.ends_with("_tied");
    model.num_key_value_heads = model.tie_word_embeddings ? 2 : 3;
    if (architecture->kind == plan::ArchitectureKind::kGpt2) {
      model.num_key_value_heads = model.num_attention_heads;
      model.head_dim = model.hidden_size / model.num_attention_heads;
    }
    return model;
  }
  if (name.starts_with("recipes")) {
    return RecipeModel(name);
  }
  CHECK(name == "bundled_rope_scaling");
  model = BaseModel();
  model.vocab_size = 97;
  model.hidden_size = 32;
  model.intermediate_size = 64;
  model.num_attention_heads = 4;
  model.num_key_value_heads = 2;
  model.head_dim = 16;
  model.rope_scaling_factor = 4.0;
  model.rope_low_freq_factor = 1.0;
  model.rope_high_freq_factor = 4.0;
  model.rope_original_max_position_embeddings = 32;
  return model;
}

// The walk of make_golden.py, as flat uint16. Other processes may be reading the file.
void WriteTokens(const std::string& path, int64_t vocabulary) {
  std::vector<uint16_t> ids;
  int64_t x = 3;
  for (int64_t i = 0; i < kTokens; ++i) {
    ids.push_back(static_cast<uint16_t>(x));
    x = (5 * x + 7 + (i % 7 == 0 ? i : 0) + (i % 11 == 0 ? 3 * i : 0)) % vocabulary;
  }
  const std::string own = absl::StrCat(path, ".", getpid());
  std::ofstream file(own, std::ios::binary);
  file.write(reinterpret_cast<const char*>(ids.data()),
             static_cast<std::streamsize>(ids.size() * sizeof(uint16_t)));
  file.close();
  CHECK(file.good());
  std::filesystem::rename(own, path);
}

using Tensors = std::map<std::string, std::vector<float>>;

// Elements that no rank has given yet.
constexpr uint32_t kUnsetBits = 0x7fc0dead;

// What a rank stores, on the host; empty for a frozen tensor's moments.
absl::StatusOr<std::vector<float>> ReadShard(RankEngine& engine,
                                             const shard::ParameterGroup& group,
                                             plan::StateRole role) {
  const bool there = role == plan::StateRole::kParam || group.layout().trainable;
  std::vector<float> shard(there ? static_cast<size_t>(group.shard_elements()) : 0);
  if (there) {
    RETURN_IF_ERROR(optim::ReadStored(
        engine.memory(), group, role, 0, std::as_writable_bytes(std::span<float>(shard))));
  }
  return shard;
}

void CopyPiece(const plan::TensorSpec& tensor,
               const plan::OwnedPiece& piece,
               const std::vector<float>& shard,
               Tensors& out) {
  std::vector<float>& values = out[tensor.name];
  values.resize(static_cast<size_t>(ElementCount(tensor.shape)), std::bit_cast<float>(kUnsetBits));
  if (shard.empty()) {
    return;
  }
  piece.VisitRuns(tensor.shape, [&](const plan::OwnedRun& run) {
    for (int64_t i = 0; i < run.elements; ++i) {
      const float value = shard[static_cast<size_t>(run.offset + i)];
      float& joined = values[static_cast<size_t>(run.first + i)];
      const auto bits = std::bit_cast<uint32_t>(joined);
      ASSERT_TRUE(bits == kUnsetBits || bits == std::bit_cast<uint32_t>(value))
          << "ranks disagree about " << tensor.name << " [" << run.first + i << "]";
      joined = value;
    }
  });
}

absl::Status LoadPiece(RankEngine& engine,
                       const shard::ParameterGroup& group,
                       const plan::OwnedPiece& piece,
                       plan::StateRole role,
                       const Tensors& tensors) {
  if (role != plan::StateRole::kParam && !group.layout().trainable) {
    return absl::OkStatus();  // a frozen tensor's moments
  }
  const std::vector<float>& values = tensors.at(engine.tensor(piece.tensor).name);
  absl::Status written;
  piece.VisitRuns(engine.tensor(piece.tensor).shape, [&](const plan::OwnedRun& run) {
    written.Update(
        optim::WriteStored(engine.memory(),
                           group,
                           role,
                           run.offset,
                           std::span(values).subspan(static_cast<size_t>(run.first),
                                                     static_cast<size_t>(run.elements))));
  });
  return written;
}

absl::Status LoadState(RankEngine& engine, const Recording& from) {
  using plan::StateRole;
  for (const shard::ParameterGroup& group : engine.groups()) {
    for (const plan::OwnedPiece& piece : group.pieces()) {
      RETURN_IF_ERROR(LoadPiece(engine, group, piece, StateRole::kParam, from.weights));
      const Tensors* states[] = {&from.exp_avg, &from.exp_avg_sq};
      size_t index = 0;
      for (const plan::StateSpec& state : plan::BufferStatesOf(group.optimizer())) {
        RETURN_IF_ERROR(LoadPiece(engine, group, piece, state.role, *states[index++]));
      }
    }
  }
  engine.set_updates(from.updates);
  if (engine.optimizer().scales_loss()) {
    engine.set_loss_scale(from.loss_scale);
  }
  return engine.RefreshWeights();
}

absl::Status MergeTensors(const char* role, const Tensors& from, Tensors& into) {
  for (const auto& [name, values] : from) {
    std::vector<float>& joined = into[name];
    joined.resize(values.size(), std::bit_cast<float>(kUnsetBits));
    for (size_t i = 0; i < values.size(); ++i) {
      const auto bits = std::bit_cast<uint32_t>(values[i]);
      const auto known = std::bit_cast<uint32_t>(joined[i]);
      if (bits == kUnsetBits) {
        continue;
      }
      if (known != kUnsetBits && known != bits) {
        return absl::FailedPreconditionError(
            absl::StrCat("ranks disagree about ", role, " of ", name, " [", i, "]"));
      }
      joined[i] = values[i];
    }
  }
  return absl::OkStatus();
}

std::string CompareTensors(const char* role, const Tensors& a, const Tensors& b) {
  for (const auto& [name, values] : a) {
    const auto other = b.find(name);
    if (other == b.end() || other->second.size() != values.size()) {
      return absl::StrCat(role, " of ", name, ": missing or of another size");
    }
    for (size_t i = 0; i < values.size(); ++i) {
      if (std::bit_cast<uint32_t>(values[i]) != std::bit_cast<uint32_t>(other->second[i])) {
        return absl::StrCat(
            role, " of ", name, " [", i, "]: ", values[i], " and ", other->second[i]);
      }
    }
  }
  return a.size() == b.size() ? "" : absl::StrCat(role, ": another number of tensors");
}

}  // namespace

std::vector<std::string> CaseNames() {
  return {"odd_tied",
          "odd_untied",
          "bundled_rope_scaling",
          "qwen2_tied",
          "qwen2_untied",
          "qwen3_tied",
          "qwen3_untied",
          "gpt2_tied",
          "gpt2_untied",
          "shared_layers",
          "layer_drop"};
}

std::vector<std::string> CutCaseNames() {
  std::vector<std::string> names;
  for (const char* family : {"llama", "qwen2", "qwen3", "gpt2"}) {
    for (const char* suffix : {"_tied", "_untied"}) {
      names.push_back(absl::StrCat("cut_", family, suffix));
    }
  }
  return names;
}

std::string OwnFolder(const std::string& name) {
  struct Root {
    Root() { CHECK(mkdtemp(path.data()) != nullptr); }
    ~Root() {
      std::error_code error;
      if (getpid() == owner) {  // not at the end of a child that was forked from it
        std::filesystem::remove_all(path, error);
      }
    }
    std::string path = ::testing::TempDir() + "ravel-XXXXXX";
    const pid_t owner = getpid();
  };
  static const Root root;
  return root.path + "/" + name;
}

plan::JobSpec CaseJob(const std::string& name, const std::string& folder) {
  plan::JobSpec spec;
  spec.name = name;
  spec.model = CaseModel(name);
  spec.init_std = 0.05;
  spec.data.sequence_length = name == "bundled_rope_scaling" ? 48
                              : name.starts_with("recipes")  ? 32
                              : name.starts_with("cut_")     ? 16
                                                             : 17;
  spec.data.format = TokenFormat::kFlatU16;
  std::filesystem::create_directories(folder);
  const std::string path = absl::StrCat(folder, "/", name, ".u16");
  WriteTokens(path, spec.model->vocab_size);
  spec.data.train = {{.path = path, .weight = 1.0}};
  spec.data.validation = {{.path = path, .weight = 1.0}};
  spec.steps = kGoldenSteps;
  spec.global_batch = 8;
  spec.virtual_ranks = 8;
  spec.seed = 1234;
  spec.layer_drop = name == "layer_drop" ? 0.3 : 0;
  spec.optimizer = {
      .lr = 1e-2, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1, .clip_norm = 1.0};
  spec.schedule = {.kind = plan::ScheduleKind::kCosine, .warmup_steps = 5, .min_ratio = 0.1};
  spec.evaluation_every = 1;
  spec.evaluation_batches = 2;
  spec.allow_slow_kernels = true;  // both paths are compared
  return spec;
}

absl::Status RunRank(const RecordArgs& args, RankEngine& engine, int rank, Recording& recording) {
  RETURN_IF_ERROR(args.start == nullptr ? engine.InitializeWeights()
                                        : LoadState(engine, *args.start));
  for (int64_t step = args.first_step; step < args.last_step; ++step) {
    RETURN_IF_ERROR(engine.IssueStep(step));
    const bool last = step + 1 == args.last_step;
    while (engine.unread_steps() > (args.ahead && !last ? engine.lag() : 0)) {
      ASSIGN_OR_RETURN(const StepResult result, engine.ReadStep());
      if (rank == 0) {
        recording.steps.push_back(result);
      }
    }
    if (args.evaluate_every_step) {
      ASSIGN_OR_RETURN(const float loss, engine.Evaluate());
      if (rank == 0) {
        recording.validation.push_back(loss);
      }
    }
  }
  return absl::OkStatus();
}

absl::Status AddState(RankEngine& engine, Recording& to) {
  to.updates = engine.updates();
  to.loss_scale = engine.optimizer().loss_scale();
  for (const shard::ParameterGroup& group : engine.groups()) {
    ASSIGN_OR_RETURN(const auto weights, ReadShard(engine, group, plan::StateRole::kParam));
    for (const plan::OwnedPiece& piece : group.pieces()) {
      CopyPiece(engine.tensor(piece.tensor), piece, weights, to.weights);
    }
    Tensors* states[] = {&to.exp_avg, &to.exp_avg_sq};
    size_t index = 0;
    for (const plan::StateSpec& state : plan::BufferStatesOf(group.optimizer())) {
      ASSIGN_OR_RETURN(const auto values, ReadShard(engine, group, state.role));
      for (const plan::OwnedPiece& piece : group.pieces()) {
        CopyPiece(engine.tensor(piece.tensor), piece, values, *states[index]);
      }
      ++index;
    }
  }
  return absl::OkStatus();
}

absl::Status MergeState(const Recording& from, Recording& into) {
  into.updates = from.updates;
  into.loss_scale = from.loss_scale;
  RETURN_IF_ERROR(MergeTensors("weight", from.weights, into.weights));
  RETURN_IF_ERROR(MergeTensors("exp_avg", from.exp_avg, into.exp_avg));
  return MergeTensors("exp_avg_sq", from.exp_avg_sq, into.exp_avg_sq);
}

absl::StatusOr<Recording> TryRecord(const RecordArgs& args) {
  Recording recording;
  Mutex mutex;
  const auto body = [&](RankEngine& engine, int rank) -> absl::Status {
    RETURN_IF_ERROR(RunRank(args, engine, rank, recording));
    MutexLock lock(mutex);
    return AddState(engine, recording);
  };
  RETURN_IF_ERROR(RunLocalRanks({.spec = args.spec,
                                 .ranks = args.ranks,
                                 .shared_memory = args.shared_memory,
                                 .body = body,
                                 .adjust = args.adjust,
                                 .options = args.options,
                                 .gpu = args.gpu,
                                 .gemms = args.gemms}));
  return recording;
}

Recording Record(const RecordArgs& args) {
  auto recording = TryRecord(args);
  EXPECT_TRUE(recording.ok()) << recording.status();
  return recording.ok() ? *std::move(recording) : Recording{};
}

std::string FirstDifference(const Recording& a, const Recording& b) {
  if (a.steps.size() != b.steps.size()) {
    return "another number of steps";
  }
  for (size_t i = 0; i < a.steps.size(); ++i) {
    if (std::bit_cast<uint32_t>(a.steps[i].loss) != std::bit_cast<uint32_t>(b.steps[i].loss)) {
      return absl::StrCat("loss of step ", i, ": ", a.steps[i].loss, " and ", b.steps[i].loss);
    }
    if (a.steps[i].skipped != b.steps[i].skipped ||
        a.steps[i].loss_scale != b.steps[i].loss_scale) {
      return absl::StrCat("step ", i, ": one is skipped, or another loss scale");
    }
    // The norm of a skipped step is infinite or NaN, of any sign.
    if (!a.steps[i].skipped && std::bit_cast<uint64_t>(a.steps[i].grad_norm) !=
                                   std::bit_cast<uint64_t>(b.steps[i].grad_norm)) {
      return absl::StrCat(
          "grad_norm of step ", i, ": ", a.steps[i].grad_norm, " and ", b.steps[i].grad_norm);
    }
  }
  for (const std::string& difference : {CompareTensors("weight", a.weights, b.weights),
                                        CompareTensors("exp_avg", a.exp_avg, b.exp_avg),
                                        CompareTensors("exp_avg_sq", a.exp_avg_sq, b.exp_avg_sq)}) {
    if (!difference.empty()) {
      return difference;
    }
  }
  if (a.loss_scale != b.loss_scale) {
    return "another loss scale after the last step";
  }
  return a.updates == b.updates ? "" : "another number of updates";
}

}  // namespace ravel::trainer
