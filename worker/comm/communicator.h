#pragma once

// Collectives between the ranks of one group. Implementations: local (ranks as threads of one
// process), shm (processes of one host), gloo (TCP), mixed (TCP, and shm within hosts),
// device_local (ranks as threads on one CUDA device), nccl (CUDA devices). All ranks must issue the
// same calls in the same order; a rolling hash of the calls is checked.
//
// The arena of a device communicator lies on its device, and tensor collectives (AllGather,
// ExchangePieces, ReleasePieces) are work of a stream: they wait for what that stream was given
// before, return once they are issued, and their results, and the right to overwrite what they
// read, come where the stream reaches that point. Their operands are device memory, of the arena or
// not. A call may block the host until peers have issued the same collective, never until a device
// has run it. All else (Split, Barrier, AllGatherBytes) is for hosts alone: it takes and gives host
// memory, blocks, and orders no work of streams.

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "common/plan/program/step_program.h"
#include "common/status.h"
#include "kernels/stream.h"

namespace ravel::comm {

class CollectiveLedger;

// Elements are fp32 unless a call says otherwise.
inline constexpr int64_t kElementBytes = sizeof(float);
// Most bytes of each rank in AllGatherBytes.
inline constexpr int64_t kMaxGatherBytes = int64_t{64} << 20;

// Bytes of the three memory kinds of a plan (common/plan/program/step_program.h), per rank; equal
// on all ranks.
struct ArenaSizes {
  int64_t private_bytes = 0;
  int64_t symmetric_bytes = 0;
  int64_t common_bytes = 0;
  // Number of kCommon blocks that the host keeps, one per replica: rank r's is the
  // (r * common_copies / size)-th, and arena(kCommon) is its base.
  int64_t common_copies = 1;
};

// The trainer's place in its step when it issues a collective, equal on all ranks. It goes into the
// issue hash, the ledger and error messages.
struct CollectiveTag {
  plan::OpLabel op = plan::OpLabel::kEndPhase;
  int unit = -1;
  int call = 0;
  int group = -1;  // parameter group
  plan::Phase phase = plan::Phase::kOnly;
  // The generation of the weights. For kAmaxReduce on hosts: a digest of the scales that ranks must
  // have alike by then, though no collective moves them.
  int64_t generation = 0;
};

// Pieces of all ranks that are meant for this rank; element r points at `elements` values from rank
// r (of the element size of the call: cast), readable until the call to ReleasePieces.
struct PieceViews {
  std::vector<const float*> pieces;
};

// Time that collectives spent on waiting for other ranks.
struct PeerWait {
  int64_t nanoseconds = 0;
  int rank = -1;  // of the whole group: the last to come in most of that time; -1: no wait
  // When the longest single wait began, of the steady clock.
  int64_t longest_begin_ns = 0;
};

// Failure of any call (peer lost, aborted, mismatch) is final: every later call fails at once with
// the same status. Calls come from one thread; Abort and Failure may come from any thread; Abort
// makes a blocked call return within milliseconds.
class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  // "local", "shm", "gloo", "mixed", "device_local", "nccl"
  virtual const char* transport() const = 0;
  // kCuda: the arena lies on a device, and tensor collectives take a stream of that device.
  virtual kernels::Backend backend() const { return kernels::Backend::kCpu; }
  // True where kSymmetric memory of peers and kCommon memory exist: plans with in-place gathers and
  // reads may run.
  virtual bool shared_memory() const = 0;

  // Collective; once. Zero-filled memory for the plan's arena, freed with the communicator. Without
  // shared memory the symmetric and common parts are plain private memory.
  // common_copies divides size().
  virtual absl::Status AllocateArena(const ArenaSizes& sizes) = 0;
  // kCommon: the base of this rank's own copy. Of kOffload there is none here: nullptr.
  virtual std::byte* arena(plan::MemoryKind kind) = 0;

  // Collective over all ranks of this communicator. The ranks are cut into disjoint groups that
  // cover them; `members` is the caller's own group, ascending, as ranks of this communicator. The
  // result is a communicator of that group, with rank() the position in `members`. It uses this
  // communicator's arena, before or after that is allocated (AllocateArena of the result is a bug,
  // as is a Split of it), and must not outlive it; a failure or Abort of one is that of all.
  // Distinct communicators may be used from distinct threads at once.
  struct SplitOptions {
    std::string name;  // "shard", "outer", "gather": for messages, equal on all ranks
    std::vector<int> members;
  };
  virtual absl::StatusOr<std::unique_ptr<Communicator>> Split(const SplitOptions& options) = 0;

  // Costs of one call, for n ranks and S bytes of a shard, per rank. Latency is in messages, one
  // after the other:
  //
  //                    local, shm                        gloo (TCP)             nccl
  //   Barrier          O(n) flags, no bytes              n - 1 headers          one collective
  //   AllGather        a barrier in place; else          (n - 1) S sent and     as ncclAllGather:
  //                    (n - 1) S copied                  received               (n - 1) S received
  //   ExchangePieces   nothing copied: pointers          a contributor sends    sends and receives
  //                    into peers, and a barrier         (n - 1) S; every rank  in one group, the
  //                                                      receives <= (n - 1) S  same bytes
  //   AllGatherBytes   n small blocks copied             n - 1 messages         through the device
  //
  // Collectives of one communicator run one after another; those of two may overlap.

  // All ranks have arrived, and see each other's writes to shared memory.
  virtual absl::Status Barrier(const CollectiveTag& tag) = 0;

  // gathered[r*shard_elements ...) = rank r's shard. The shard may be its own slice of `gathered`.
  // When, beyond that, `gathered` lies in a copy of the kCommon arena that all ranks of this
  // communicator share, nothing is copied: the call is a barrier. Pointers are to elements of
  // `element_bytes`, whatever their type says.
  struct AllGatherOptions {
    CollectiveTag tag = {};
    const float* shard = nullptr;
    float* gathered = nullptr;
    int64_t shard_elements = 0;
    int64_t element_bytes = kElementBytes;
    // The stream of a device communicator, which needs one; others take none or a CPU stream, which
    // they ignore. It may change from one call to the next.
    kernels::Stream* stream = nullptr;
  };
  virtual absl::Status AllGather(const AllGatherOptions& options) = 0;

  // Every rank offers `staging` [size() * shard_elements] (or nullptr if it has no lane this turn);
  // the result views slice rank() of each of the first `contributors` ranks. With shared memory
  // `staging` must lie in the kSymmetric arena and is read in place; otherwise pieces arrive in
  // `receive` [size() * shard_elements]. All ranks take part. Pointers are to elements of
  // `element_bytes`, whatever their type says: 2 for a bf16 wire.
  struct ExchangeOptions {
    CollectiveTag tag = {};
    const float* staging = nullptr;
    float* receive = nullptr;
    int64_t shard_elements = 0;
    int contributors = 0;  // ranks 0 .. contributors-1 have staged a lane
    int64_t element_bytes = kElementBytes;
    kernels::Stream* stream = nullptr;  // as in AllGatherOptions
  };
  virtual absl::StatusOr<PieceViews> ExchangePieces(const ExchangeOptions& options) = 0;
  // Ends the reads of the last ExchangePieces: after all ranks have called it, staging may be
  // written again. Of a device communicator: where the stream of that exchange reaches this point.
  virtual absl::Status ReleasePieces(const CollectiveTag& tag) = 0;

  // all[r] = rank r's bytes (equal length on all ranks, at most kMaxGatherBytes), concatenated in
  // rank order. For statistics, control words, digests.
  virtual absl::Status AllGatherBytes(const CollectiveTag& tag,
                                      std::span<const std::byte> mine,
                                      std::span<std::byte> all) = 0;

  // Thread-safe; idempotent. Blocked calls of this rank return Aborted(reason), on this
  // communicator and on all that were split from the same one, and peers that share memory with it
  // are released.
  virtual void Abort(std::string_view reason) = 0;

  // Why this communicator has failed, be it only that work of its streams has: whoever waits for a
  // device asks this from time to time, since after an error of a peer that wait may not end by
  // itself. OK while all is well, and always where collectives are done when they return.
  // Thread-safe; does not block.
  virtual absl::Status Failure() const { return absl::OkStatus(); }

  // Why tensor collectives cannot become part of a graph (kernels/cuda_host/cuda_calls.h); OK where
  // they can. Then one that a log of the stream has kept, or left to a graph, counts as issued as
  // ever, and as through with the next MarkPassed.
  virtual absl::Status Captures() const {
    return absl::UnimplementedError("hosts meet in every collective");
  }
  // All that was issued is through where `stream` reaches this point.
  virtual absl::Status MarkPassed(kernels::Stream&) { return absl::OkStatus(); }

  // Rolling 64-bit hash and count of the collectives issued so far. Thread-safe.
  struct IssueState {
    uint64_t sequence = 0;
    uint64_t hash = 0;
  };
  virtual IssueState issued() const = 0;

  // Time that this rank's collectives on this communicator have waited since the last call: in
  // shared memory for ranks that had not arrived, else for what peers send. From the thread of the
  // calls.
  virtual PeerWait TakePeerWait() { return {}; }

  // Returns the log of collectives that this rank has issued on this communicator and on all that
  // were split from the same one.
  virtual CollectiveLedger& ledger() = 0;
};

}  // namespace ravel::comm
