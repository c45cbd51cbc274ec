#pragma once

// A training step as data: typed instructions with streams, waits and buffers. Built by
// program_builder, proved by program_checker, placed by buffer_plan, replayed by
// worker/shard/unit_executor.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "common/dtype.h"
#include "common/model/ids.h"
#include "common/model/model_inventory.h"
#include "common/model/optimizer_states.h"

namespace ravel::plan {

// `group` of an instruction is that of ShardingPlan::groups, `unit` the unit of the group. What an
// instruction touches is in its operands; words in capitals here are their roles. Over which axis
// of the mesh a collective goes, and from which placement to which, is its move (program_moves.h).
enum class OpCode : uint8_t {
  kGather = 1,   // parts of all ranks of the axis -> all of them. Of weights: STORED -> WEIGHTS,
                 // where those lie inside it and it is kCommon a barrier, or, before that, the
                 // parts of what is stored -> STORED (of another type: what the update wrote of
                 // kModelWeight), which always copies, also in kCommon memory: replicas have blocks
                 // of their own. Of a gradient: the parts of the final SUM -> GRADIENT
  kForward = 2,  // call `call` of `unit`: reads WEIGHTS, fills SAVED and, as scratch or for a
                 // backward that follows at once, REMADE
  kBackward = 3,      // reads WEIGHTS, SAVED, REMADE and may use the latter two up; writes GRADIENT
  kFree = 4,          // ends the life of buffer `freed`; enqueues nothing
  kAllocStaging = 5,  // begins the life of GRADIENT; back-pressure of the staging window
  kReduce = 6,        // of lanes: SEND (gradients of one lane of each rank, or the roots of their
                      // local counters) of the axis' ranks -> lane blocks of this rank's shard ->
                      // SUM, the counter kMainGrad of (group, call). Of sums: its root of all ranks
                      // of the axis -> kOuterGrad, this rank's part; of a move to Replicate then
                      // back to all. Of addends of `tensor`: SEND, the staging, of the axis' ranks
                      // -> SUM, this rank's part -> SEND of all
  kStatsReduce = 7,   // packed statistics of all ranks: row sums, non-finite count, losses, control
                      // word
  kDecideStep = 8,    // apply or skip, clip coefficient
  kOptimizerStep = 9,    // fused update of what this rank stores of `group`
  kEndPhase = 10,        // everything at rest
  kRecompute = 11,       // forward of (unit, call) again: reads WEIGHTS and SAVED, fills REMADE
  kAccumulateGrad = 12,  // SEND of this rank's lane -> SUM, the counter kLocalGrad of (group, call)
  kJoinGradients = 15,   // final sums of all calls of `group`, call 0 += call 1 ...
  kAmaxReduce = 17,  // amaxes of what this rank stores of all quantized groups, and of the step's
                     // activations -> AMAX, their maximum over all ranks; delayed scales follow
  kRefreshWeights = 18,   // codes of what this rank stores of quantized `group`, by AMAX -> STORED
  kOffloadGradient = 19,  // what the host needs for its update of `group` begins to go there: the
                          // final gradient SUM or GRADIENT and STORED, as far as there is room
};

// What plans on disk, texts, traces and ledgers call an instruction: its op, or of a collective
// what the move does over which axis. On disk (plan proto): do not renumber; equal to the op where
// the op says it all.
enum class OpLabel : uint8_t {
  kGather = 1,
  kForward = 2,
  kBackward = 3,
  kFree = 4,
  kAllocStaging = 5,
  kReduceScatter = 6,
  kStatsReduce = 7,
  kDecideStep = 8,
  kOptimizerStep = 9,
  kEndPhase = 10,
  kRecompute = 11,
  kAccumulateGrad = 12,
  kOuterReduce = 13,
  kOuterGather = 14,
  kJoinGradients = 15,
  kGatherGradient = 16,
  kAmaxReduce = 17,
  kRefreshWeights = 18,
  kOffloadGradient = 19,
  // The sum of a gradient's addends; also the name in logs and traces of a step of a unit with a
  // move, and of its collectives. Plans name such a step by its op, beside the segment.
  kTensorReduce = 20,
  kTensorGather = 21,
};
inline constexpr OpLabel kLastOpLabel = OpLabel::kTensorReduce;  // of plans

// kDownload, kUpload: copies between a device and its host, of groups that the host updates.
enum class StreamId : uint8_t {
  kCompute = 1,
  kGather = 2,
  kReduce = 3,
  kHost = 4,
  kOuter = 5,
  kDownload = 6,
  kUpload = 7,
  kTensor = 8,  // sums of activations over `tensor`
};
inline constexpr StreamId kLastStream = StreamId::kTensor;
inline constexpr size_t kStreamCount = 8;
// Index into arrays of kStreamCount entries.
constexpr size_t StreamIndex(StreamId stream) {
  return static_cast<size_t>(stream) - 1;
}

enum class BufferKind : uint8_t {
  kMainWeight = 1,  // this rank's shard, fp32 or remainders; inside `gathered` when gathers are in
                    // place, unless model weights are of another type
  kState = 2,  // of the optimizer: the `slot`-th of BufferStatesOf (optimizer_states.h). 3 is the
               // second of them in the stored form of a plan
  kMainGrad = 4,  // one slot of the lane counter of a unit's gradient call
  kGathered = 5,
  kStaging = 6,
  kReceive = 7,  // pieces of other ranks, where they cannot be read in place
  kSaved = 8,
  kWorkspace = 9,
  kShared = 10,
  kModelWeight = 11,    // parameter placement, where that, or the type, is not the optimizer's
  kLocalGrad = 12,      // full-size: one slot of the counter over this rank's own lanes
  kOuterGrad = 13,      // this replica's part of the sum over replicas
  kFullGrad = 14,       // the whole gradient, where every rank updates everything
  kOuterReceive = 15,   // as kReceive, between replicas
  kRemade = 16,         // activations that Recompute makes again for Backward
  kStateScale = 17,     // E8M0 scales of the `slot`-th state, which is fp8 (state_groups.h)
  kAmax = 18,           // amaxes of all quantized matrices (quant_layout.h), of no group
  kAmaxPart = 19,       // the part of them whose maximum this rank finds
  kAmaxReceive = 20,    // that part of other ranks, where it cannot be read in place
  kDelayedScales = 21,  // scales by which codes were cast and are next, and a word of the update's,
                        // for each slot, then the histories of all slots
  kAmaxFlags = 22,      // by tensor, not 0: a gemm of this step has met an amax that was not finite
  kLeaves = 23,         // of a unit: sums of one lane's gradients over parts (tensor_parts.h)
  kAddend = 24,         // this rank's addend of activations that ranks of `tensor` sum, fp32; of a
                        // chunk of tokens in slots 1 and 2
  kAddendReceive = 25,  // addends of other ranks, where they cannot be read in place
  kRows = 26,           // what this rank gives to a gather of activations
  kTensorSum = 27,      // this rank's part of the sum of a gradient's addends over `tensor`
  kTensorReceive = 28,  // as kReceive, between ranks of `tensor`
  kInputGradient = 29,  // gradient of what products read, summed over `tensor`
};
inline constexpr BufferKind kLastBufferKind = BufferKind::kInputGradient;

// The memory of a buffer. kPrivate: this rank's memory. kSymmetric: this rank's memory, readable by
// the ranks of the host at the same offset of their own block. kCommon: one block for all ranks of
// the host. kOffload: this rank's, in a file or in memory of the device's host
// (program_offload.h). On disk (plan proto): do not renumber.
enum class MemoryKind : uint8_t { kPrivate = 1, kSymmetric = 2, kCommon = 3, kOffload = 4 };

struct ProgramBuffer {
  std::string name;  // "gathered/layers.0", "saved/layers.0"
  BufferKind kind = BufferKind::kShared;
  MemoryKind memory = MemoryKind::kPrivate;
  UnitId unit = {};
  GroupId group = {};  // of weights and gradients
  int call = 0;  // gradients: which gradient call of the group (tied tables have two); activations:
                 // which call of the unit
  int slot = 0;  // kMainGrad: which of the CounterBuffers (lane_map.h) of the call; kState,
                 // kStateScale: which state of the optimizer
  int64_t bytes = 0;
  DType dtype = DType::kU8;  // of its elements; kU8: activations, which are of several types
  bool persistent = false;   // lives across steps
  // The buffer that holds its bytes, uncounted; none: one of its own. Main weights lie inside model
  // weights, those inside the gathered buffer where that is resident, and the staging of one lane
  // in the sum over lanes (StagedInSum). Which part it is: BufferOffset in plan_pieces.h.
  BufferId inside = {};

  int64_t elements() const { return bytes / DTypeBytes(dtype); }
  bool operator==(const ProgramBuffer&) const = default;
};
using ProgramBuffers = IdVector<BufferId, ProgramBuffer>;

// The access of an instruction to a buffer. kWrite: the earlier content of the buffer is not read.
// kAdd: reads and writes.
enum class Access : uint8_t { kRead = 1, kWrite = 2, kAdd = 3 };

// The role of a buffer in an instruction.
enum class Role : uint8_t {
  kWeights = 1,   // gathered weights of a group. Of a unit: of the groups that it reads, its own
                  // first; a tensor whose group is not among them is not read
  kStored = 2,    // what this rank stores of a group's weights: main weight, model weight
  kState = 3,     // states of the optimizer
  kGradient = 4,  // gradient of one lane, or the whole final one. Of a backward: staging of the
                  // trainable groups that the unit writes, its own first
  kSend = 5,      // what leaves for other ranks or for a counter
  kReceive = 6,   // pieces of other ranks
  kSum = 7,       // counters and sums of gradients
  kSaved = 8,     // activations between forward and backward
  kRemade = 9,
  kScratch = 10,
  kShared = 11,         // what units hand to each other
  kAmax = 12,           // amaxes of quantized matrices and of activations
  kScales = 13,         // delayed scales
  kFlags = 14,          // of amaxes that were not finite
  kLeaves = 15,         // sums that the gradients of a backward are made of, lane by lane
  kInputGradient = 16,  // gradient of what products read
};

// The ranks that touch an operand. kLane: ranks that compute a lane in this turn. kUsed: of these,
// the ranks whose micro-batch uses the optional unit.
enum class When : uint8_t { kAlways = 1, kLane = 2, kUsed = 3 };

struct Operand {
  BufferId buffer = {};
  Access access = Access::kRead;
  Role role = Role::kShared;
  When when = When::kAlways;

  bool writes() const { return access != Access::kRead; }
  bool operator==(const Operand&) const = default;
};

struct Instruction {
  OpCode op = OpCode::kEndPhase;
  StreamId stream = StreamId::kCompute;
  UnitId unit = {};
  int call = 0;
  GroupId group = {};   // of the instructions on weights and gradients
  BufferId freed = {};  // kFree
  MoveId move = {};     // of a collective: of the plan's MoveTable
  // The first segment of a compute instruction that is a step of a pass (program_uses.h). With a
  // move the instruction is also a collective.
  SegmentId segment = {};
  // Every buffer that it reads or writes, each once (program_operands.h).
  std::vector<Operand> operands = {};
  // Instructions of the same program whose completion this one waits for, beyond the order of its
  // own stream.
  std::vector<InstructionId> waits = {};

  bool operator==(const Instruction&) const = default;
};

// On disk: do not renumber. A step runs one program per turn: kOnly when there is one turn, else
// kFirst, kMiddle..., kLast. kOnly and kLast end with StatsReduce, DecideStep and the
// OptimizerSteps. kEval is forward only.
enum class Phase : uint8_t { kOnly = 1, kFirst = 2, kMiddle = 3, kLast = 4, kEval = 5 };

// The part of a lane that a program computes. A lane of one micro-batch is whole; else the first
// program opens it (gradients are overwritten) and the last closes it (gradients leave).
enum class LanePart : uint8_t { kWhole = 1, kOpen = 2, kMiddle = 3, kClose = 4 };

struct StepProgram {
  Phase phase = Phase::kOnly;
  LanePart part = LanePart::kWhole;
  // Temporary gathered buffers that the program before it in the step leaves for it, and that it
  // leaves for the next one; ascending. Of the same generation: a step ends with none.
  std::vector<BufferId> live_at_start = {};
  std::vector<BufferId> live_at_end = {};
  // A topological order: running them one by one in this order is correct.
  IdVector<InstructionId, Instruction> instructions;
};

struct ProgramOptions {
  int64_t ranks = 1;
  bool gather_in_place = false;      // all ranks on one host and a transport with common memory
  bool read_peers_in_place = false;  // staging of other ranks is readable: no receive buffer
  int64_t gather_window_bytes = 0;   // 0: the two largest consecutive units
  int64_t staging_window_bytes = 0;
  bool prefetch = true;
  int64_t replicas = 1;  // of the outer axis
  RecomputePolicy recompute = RecomputePolicy::kNone;
  // Type of model weights, gathered weights and activations: fp32, or bf16 or fp16, where main
  // weights are buffers of their own. Gradients are fp32; those of fp16 are scaled (loss_scale.h).
  DType weight_type = DType::kF32;
  // Type of main weights: fp32, or i16, where they are the remainders that make the bf16 model
  // weight of the same element an exact fp32.
  DType main_type = DType::kF32;
  OptimizerKind optimizer = OptimizerKind::kAdamW;
  StateTypes state_types = {};  // of the optimizer's states that have a choice
  // Type in which the lanes' gradients travel between the ranks of a replica.
  WireType gradient_wire = WireType::kF32;
  // Type in which a gradient is staged that backward writes once and nothing is added to
  // (StagedType): fp32, or the bf16 of the wire, where the kernels round what they write.
  DType staged_type = DType::kF32;
  // Thread blocks (CTAs) that a collective may use; 0: the transport's choice. No instruction
  // depends on it.
  int64_t communication_blocks = 0;
  // Least scratch of each layer, for attention engines (attention_workspace.h). 0: no more than the
  // kernels of one tile need.
  int64_t attention_workspace_bytes = 0;
  // Tokens that the head works on at a time (logits_chunk.h).
  int64_t logits_chunk_tokens = kLogitsChunkTokens;
  // Probability with which a micro-batch leaves out a layer (layer_drop.h). Above 0: layers are
  // optional units.
  double layer_drop = 0;
  // Amaxes of each delayed scale's history; 0: no scale is delayed.
  int64_t amax_history = 0;
  // Binades that delayed scales leave free above the largest amax.
  int64_t amax_margin = 0;
  // Most bytes of the optimizer's state that are kOffload, over all of them.
  double offload_fraction = 0;
  // Groups with state that is kOffload are updated by the host of a device: what an update reads is
  // copied there (kOffloadGradient) and new weights are copied back.
  bool offload_copies = false;
  // How gemms of quantized matrices are computed; kNone: nothing is quantized.
  GemmPath gemm_path = GemmPath::kNone;
  // Of that path; kForward where it has no fast sums. No instruction depends on it.
  FastAccumulation fast_accumulation = FastAccumulation::kForward;
  // Of delayed scales. No instruction depends on these, nor on the next.
  AmaxAlgorithm amax_algorithm = AmaxAlgorithm::kMax;
  FirstScale first_scale = FirstScale::kCurrent;
  // The least amax that scales follow from.
  double amax_epsilon = 0;
  // Parts of the sums that a `tensor` axis could cut (tensor_cut.h); 1: nothing is cut.
  int64_t tensor_parts = 1;
};

inline constexpr int64_t kMostCommunicationBlocks = 64;

inline constexpr DType kGradientType = DType::kF32;

// kForward, kRecompute, kBackward: a call of a unit.
bool IsCompute(OpCode op);
// kGather, kReduce, kStatsReduce, kAmaxReduce: ranks exchange, and the instruction has a move.
bool IsCollective(OpCode op);
// The first buffer of a role, or none.
BufferId BufferOf(const Instruction& instruction, Role role);
// All of a role, in order.
std::vector<BufferId> BuffersOf(const Instruction& instruction, Role role);
bool Touches(const Instruction& instruction, BufferId buffer);
// kBackward: gradients already hold earlier micro-batches or calls, or segments of this one.
bool Accumulates(const Instruction& instruction);

const char* OpName(OpLabel label);
const char* PhaseName(Phase phase);
const char* LanePartName(LanePart part);
const char* StreamName(StreamId stream);
const char* BufferKindName(BufferKind kind);
// The name of its kind, of a state its own: what reports count bytes by.
const char* BufferLabel(const ProgramOptions& options, const ProgramBuffer& buffer);
// Type of a buffer of the `slot`-th state.
DType StateBufferType(const ProgramOptions& options, int slot);
const char* MemoryKindName(MemoryKind memory);

}  // namespace ravel::plan
