#pragma once

// A job as its user asks for it, in plain values with every default filled in. coordinator/api
// makes it from YAML or JSON; common/plan reads it; a trainer receives it. Field meanings, defaults
// and limits are documented in proto/jobs.proto, whose names these fields share in snake_case.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/model/architecture/model_config.h"
#include "common/model/loss_scale.h"
#include "common/model/optimizer_states.h"
#include "common/model/tensor_cut.h"
#include "common/recipe.h"
#include "common/token_file.h"

namespace ravel::plan {

struct DataSource {
  std::string path;  // prefix of a Megatron .bin/.idx pair, or a flat file
  double weight = 1.0;
  int64_t tokens = 0;              // that it held when the job was admitted; 0: not looked at
  std::string sample_digest = {};  // TokenSampleDigest of then; empty: not known
};

struct DataSpec {
  std::vector<DataSource> train;
  std::vector<DataSource> validation;
  TokenFormat format = TokenFormat::kAuto;
  int64_t sequence_length = 0;
  int64_t passes = 0;
  std::string tokenizer;  // path of a tokenizer.json, or empty
};

// The weights that the optimizer updates: fp32, or the 16 bits that a bf16 model weight lacks of it
// (kernels/element_update.h). Both train with the same bits.
enum class MainWeightForm { kF32, kBF16Remainder };

// State of the optimizer that lies in a file of each worker between updates. No number depends on
// it.
struct OffloadSpec {
  double fraction = 0;  // most of its bytes, of one rank; 0: none
  std::string path;     // folder
  bool overlap = true;  // files are read and written beside the update
  // The planner chooses the fraction (plan::BuildFittingPlan), by the memory that a rank may use of
  // its device; 0: not known, so nothing leaves.
  bool automatic = false;
  int64_t device_bytes = 0;
};

struct OptimizerSpec {
  OptimizerKind kind = OptimizerKind::kAdamW;
  double lr = 0;
  double beta1 = 0.9;  // of the average of gradients, or the share of momentum that stays
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;
  double clip_norm = 1.0;  // 0: off
  StateTypes state_types = {};
  MainWeightForm main_weights = MainWeightForm::kF32;
  OffloadSpec offload = {};
};

// Quantization of matrices for gemms.
struct RecipeSpec {
  Recipe recipe = Recipe::kNone;
  std::vector<std::string> keep_bf16;    // glob patterns of tensors that stay bf16
  int64_t history = kAmaxHistory;        // of kDelayed: amaxes that a scale follows from
  int64_t margin = 0;                    // of kDelayed: binades left free above them
  std::vector<GemmPath> emulation = {};  // allowed emulations; empty: the devices' default
  FastAccumulation fast_accumulation = FastAccumulation::kForward;  // read by kFp8Tensor alone
  AmaxAlgorithm amax_algorithm = AmaxAlgorithm::kMax;               // of kDelayed
  FirstScale first_scale = FirstScale::kCurrent;                    // of kDelayed
  double amax_epsilon = 0;                                          // where HasAmaxEpsilon
  bool operator==(const RecipeSpec&) const = default;
};

enum class ScheduleKind { kConstant, kLinear, kCosine, kWsd };

struct ScheduleSpec {
  ScheduleKind kind = ScheduleKind::kCosine;
  int64_t warmup_steps = 0;
  double min_ratio = 0.1;
};

enum class Strategy { kNoShard, kOptim, kOptimGrads, kOptimGradsParams };
// Activations that backward recomputes; each includes those before it.
enum class RecomputePolicy { kNone, kNorm, kMlp, kBlock };
enum class WireType { kF32, kBF16 };
// Type of activations and of the weights that modules read. Gradients are fp32.
enum class ComputeType { kF32, kBF16, kF16 };
enum class DeterminismMode { kExact, kFast };
// The algorithm chosen before the first step, of those that a device's library offers for one
// computation: kMeasured takes the fastest one in timed runs, kProposed the first one.
enum class AlgorithmChoice { kMeasured, kProposed };
enum class Transport { kAuto, kShm, kGloo };

// Replaces the job's strategies for units of some names.
struct UnitStrategy {
  std::string match;                                // glob pattern of unit names
  Strategy strategy = Strategy::kOptimGradsParams;  // on the shard axis
  std::optional<Strategy> replicate;                // on the replicate axis; none: the job's
  bool operator==(const UnitStrategy&) const = default;
};

struct CheckpointSpec {
  std::string store;               // file:///absolute/path
  int64_t every_steps = 0;         // 0: not by steps
  int64_t every_ms = 1800 * 1000;  // 0: not by time
  bool at_start = false;
  int64_t keep_last = 3;
  int64_t keep_every_steps = 0;  // 0: none
  std::string resume_from =
      "auto";  // auto, none, step number as text, or a path of a step directory
  bool fresh = false;
  int64_t max_age_ms = 0;        // without a commit for longer the job fails; 0: no limit
  bool wait_when_busy = false;   // a save that finds the one before unfinished waits; else skipped
  int64_t max_failed_saves = 0;  // more failed saves in a row and the job fails; 0: no limit
  bool allow_numerics_change = false;  // resumes also from other numerics (numerics.h)
};

struct ElasticSpec {
  std::vector<int64_t> sizes;  // allowed device counts, ascending; never empty after validation
  int64_t grow_delay_ms = 300 * 1000;
  int64_t grow_every_ms = 900 * 1000;
};

struct RestartSpec {
  // -1: no limit, the failures of machines only wait. maxNoProgress -1: three failures that the job
  // itself causes.
  int64_t max_failures = -1;
  int64_t max_per_day = -1;
  int64_t max_no_progress = -1;
  int64_t backoff_ms = 5000;
  int64_t max_backoff_ms = 300 * 1000;
};

// A variable of the trainers' environment. A secret is a reference here, SECRET/KEY: its text is on
// nodes alone (worker/daemon/job_secrets.h).
struct EnvironmentVariable {
  std::string name;
  std::string value;
  std::string secret;  // empty: `value` is the text
  bool operator==(const EnvironmentVariable&) const = default;
};

struct JobSpec {
  std::string name;
  std::string namespace_name = "default";
  std::optional<ModelConfig>
      model;  // always present after admission; from model.from or model.config
  std::string
      model_from;  // directory to load initial weights from, or empty: random initialisation
  double init_std = 0.02;
  DataSpec data;
  int64_t steps = 0;
  int64_t global_batch = 0;  // sequences
  int64_t micro_batch = 0;   // sequences of one lane's micro-batch; 0: auto
  uint64_t seed = 0;
  double layer_drop = 0;  // probability with which a micro-batch leaves out a layer
  OptimizerSpec optimizer;
  ScheduleSpec schedule;
  int64_t evaluation_every = 0;
  int64_t evaluation_batches = 10;
  Strategy strategy = Strategy::kOptimGradsParams;   // on the shard axis
  Strategy replicate_strategy = Strategy::kNoShard;  // on the replicate axis
  int64_t replicas = 1;                              // size of the replicate axis
  int64_t tensor = 1;                                // size of the tensor axis
  bool sequence_parallel = false;                    // cut tokens over it between products
  int64_t tensor_chunks = 1;                         // TensorCut::chunks
  bool tensor_across_nodes = false;                  // its ranks may be of several hosts
  std::vector<UnitStrategy> units;                   // the first that matches a unit holds for it
  RecomputePolicy recompute = RecomputePolicy::kNone;
  WireType gradient_wire = WireType::kF32;
  ComputeType compute = ComputeType::kF32;
  LossScaleSpec loss_scale;  // of fp16 compute
  RecipeSpec recipe;
  int64_t communication_blocks = 0;  // of a GPU, that a collective may occupy; 0: NCCL's choice
  std::vector<std::string> freeze;   // glob patterns of canonical tensor names that are not trained
  bool allow_padding = false;        // units may be padded by more than 10 %
  Transport transport = Transport::kAuto;  // CPU ranks only
  bool cpu_devices = true;
  int64_t device_count = 0;         // wanted
  bool allow_slow_kernels = false;  // bf16 on a GPU without cuBLASLt or cuDNN
  ElasticSpec elastic;
  DeterminismMode determinism = DeterminismMode::kExact;
  AlgorithmChoice algorithms = AlgorithmChoice::kMeasured;
  int64_t virtual_ranks = 0;  // V; 0 = auto, never 0 after admission
  int64_t tensor_parts = 1;   // P, of the sums that a tensor axis could cut
  CheckpointSpec checkpoint;
  RestartSpec restart;
  int64_t detection_ms = 5000;           // T of the failure detector
  int64_t horizon_ms = 6 * 3600 * 1000;  // how long trainers go on without a coordinator
  int64_t max_run_time_ms = 0;           // longest time it may hold devices; 0: none
  int64_t ttl_ms = 0;                    // its record goes so long after its end; 0: stays
  double stall_factor = 5;  // a rank that is late for that many of the slowest steps is stuck
  // Longest time without progress in bootstrap, restore, first steps, evaluation and saves.
  int64_t warmup_allowance_ms = 600 * 1000;
  int64_t log_every = 1;
  // common/trace.h of the steps first..last (as metrics count them), one file per rank in
  // `trace_directory`; 0: none.
  int64_t trace_first_step = 0;
  int64_t trace_last_step = 0;
  std::string trace_directory;
  bool localise = false;    // replay a skipped step and name the first value that is not finite
  int64_t norms_every = 0;  // per-tensor norms every so many steps; 0: never
  int64_t gather_window_bytes = 0;   // 0: auto (the two largest consecutive units)
  int64_t staging_window_bytes = 0;  // 0: auto
  std::vector<EnvironmentVariable> environment;
  std::string network;  // name of the network between trainers; empty: the nodes' own
};

// The axis that a job asks for, of its first rank. Its parts are at least its ranks.
inline TensorCut TensorCutOf(const JobSpec& spec) {
  return {.parts = spec.tensor_parts > spec.tensor ? spec.tensor_parts : spec.tensor,
          .degree = spec.tensor,
          .sequence = spec.sequence_parallel,
          .chunks = spec.tensor_chunks};
}

}  // namespace ravel::plan
