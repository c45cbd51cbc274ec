#pragma once

// A training step as data: typed instructions with streams, waits and buffers. Built by
// program_builder, proved by program_checker, placed by buffer_plan, replayed by
// worker/shard/unit_executor.

#include <cstdint>
#include <string>
#include <vector>

#include "common/plan/model_inventory.h"

namespace ravel::plan {

// On disk (plan proto): do not renumber.
enum class OpCode : uint8_t {
  kGather =
      1,  // weights of `unit` -> buffer `gathered`, all ranks; in place when the buffer is kCommon
  kForward = 2,        // unit's forward: reads gathered (and borrowed), writes saved
  kBackward = 3,       // unit's backward: reads gathered, saved; writes staging
  kFree = 4,           // ends the life of buffer `freed`; enqueues nothing
  kAllocStaging = 5,   // begins the life of `staging`; back-pressure of the staging window
  kReduceScatter = 6,  // staging of all lanes of this turn -> lane blocks of this rank's shard ->
                       // the unit's counter
  kStatsReduce =
      7,  // packed statistics of all ranks: row sums, non-finite count, losses, control word
  kDecideStep = 8,     // apply or skip, clip coefficient
  kOptimizerStep = 9,  // fused update of this rank's shard of `unit`
  kEndPhase = 10,      // everything at rest
};

enum class StreamId : uint8_t { kCompute = 1, kGather = 2, kReduce = 3, kHost = 4 };

enum class BufferKind : uint8_t {
  kMainWeight = 1,  // this rank's shard; inside `gathered` when gathers are in place
  kExpAvg = 2,
  kExpAvgSq = 3,
  kMainGrad = 4,  // one slot of the lane counter of a unit's gradient call
  kGathered = 5,
  kStaging = 6,
  kReceive = 7,  // pieces of other ranks, where they cannot be read in place
  kSaved = 8,
  kWorkspace = 9,
  kShared = 10,
};

// Where a buffer lives. kPrivate: this rank's memory. kSymmetric: this rank's memory, readable by
// the ranks of the host at the same offset of their own block. kCommon: one block for all ranks of
// the host.
enum class MemoryKind : uint8_t { kPrivate = 1, kSymmetric = 2, kCommon = 3 };

struct ProgramBuffer {
  std::string name;  // "gathered/layers.0", "saved/layers.0"
  BufferKind kind = BufferKind::kShared;
  MemoryKind memory = MemoryKind::kPrivate;
  int unit = -1;
  int call = 0;  // kMainGrad, kStaging: which gradient call of the unit (tied tables have two)
  int slot = 0;  // kMainGrad: which of the CounterBuffers (lane_map.h) of the call
  int64_t bytes = 0;
  bool persistent = false;  // lives across steps
  // kMainWeight with in-place gathers: the kGathered buffer that holds its bytes; rank r's shard is
  // the slice [r * bytes, (r + 1) * bytes) of it, and the plan counts no bytes of its own. -1: a
  // buffer of its own.
  int inside = -1;

  bool operator==(const ProgramBuffer&) const = default;
};

struct Instruction {
  OpCode op = OpCode::kEndPhase;
  StreamId stream = StreamId::kCompute;
  int unit = -1;
  int call = 0;
  int gathered = -1;           // buffer ids, -1 = none
  int borrowed_unit = -1;      // tied head: the unit whose table is used ...
  int borrowed_gathered = -1;  // ... its gathered buffer ...
  int borrowed_staging = -1;   // ... and where its gradient is staged
  int staging = -1;
  int receive = -1;
  int saved = -1;
  int workspace = -1;
  int freed = -1;
  // Instructions of the same program whose completion this one waits for, beyond the order of its
  // own stream.
  std::vector<int> waits = {};
};

// On disk: do not renumber. A step runs one program per turn: kOnly when there is one turn, else
// kFirst, kMiddle..., kLast. kOnly and kLast end with StatsReduce, DecideStep and the
// OptimizerSteps. kEval is forward only.
enum class Phase : uint8_t { kOnly = 1, kFirst = 2, kMiddle = 3, kLast = 4, kEval = 5 };

struct StepProgram {
  Phase phase = Phase::kOnly;
  std::vector<Instruction>
      instructions;  // a topological order: running them one by one in this order is correct
};

struct ProgramOptions {
  int64_t ranks = 1;
  bool gather_in_place = false;      // all ranks on one host and a transport with common memory
  bool read_peers_in_place = false;  // staging of other ranks is readable: no receive buffer
  int64_t gather_window_bytes = 0;   // 0: the two largest consecutive units
  int64_t staging_window_bytes = 0;
  bool prefetch = true;
};

const char* OpName(OpCode op);
const char* PhaseName(Phase phase);
const char* StreamName(StreamId stream);
const char* BufferKindName(BufferKind kind);
const char* MemoryKindName(MemoryKind memory);

}  // namespace ravel::plan
