#pragma once

// Which part of the optimizer's state leaves memory between updates.

#include <cstdint>
#include <vector>

#include "common/check.h"
#include "common/plan/program/program_request.h"

namespace ravel::plan {

// Elements of a group that are in memory at a time while it is updated. The next ones are fetched
// and the last ones written back meanwhile, so up to kOffloadChunksAlive times as many are.
inline constexpr int64_t kOffloadChunkElements = int64_t{1} << 20;
inline constexpr int64_t kOffloadChunksAlive = 3;

// True of state that updates alone write and nothing else needs in place: moments, their scales,
// and main weights where model weights are of another type or codes. Where both are fp32, gathers
// take main weights from where they lie, so they stay. Who has main weights makes their codes: the
// host of a device, or of a file from parts that it fetches. Weights of frozen groups stay.
bool MayOffload(const ProgramBuffer& buffer,
                const GroupLayouts& groups,
                const ProgramOptions& options);

// Makes whole groups kOffload: from the end of the forward order each one whose bytes still fit
// into ProgramOptions::offload_fraction of the bytes that one rank may offload. Never more; the
// same on all ranks, since shards are of equal size.
void OffloadState(const ProgramRequest& request, ProgramBuffers& buffers);

// Bytes of one rank that may leave, group by group, and what leaves of them.
struct OffloadSizes {
  IdVector<GroupId, int64_t> of_groups;
  int64_t total = 0;

  // The groups that leave where at most so many bytes may.
  IdVector<GroupId, bool> GroupsWithin(int64_t most) const;
  // Their bytes: never fewer for a larger `most`, and BytesWithin(BytesWithin(x)) is
  // BytesWithin(x), so these are the steps in which a growing fraction lets state leave.
  int64_t BytesWithin(int64_t most) const;
  // The fraction by which at most `bytes` leave; 0 to `total`.
  double FractionOf(int64_t bytes) const;
};
OffloadSizes OffloadSizesOf(const ProgramBuffers& buffers,
                            const GroupLayouts& groups,
                            const ProgramOptions& options);

// Elements of a group that a device's host updates at a time, and how many such chunks have memory
// of their own on their way there and back, at least: HostRingOf gives it to all where 8 GiB do.
inline constexpr int64_t kHostChunkElements = int64_t{8} << 20;
inline constexpr int64_t kHostChunks = 16;

// Bytes of an element on its way between a device and its host: its gradient goes there, fp32; of
// weights what the update reads and the host does not keep; back come the weights that it writes,
// or the codes that it makes.
struct HostChunkBytes {
  int64_t main = 0;   // fp32, both ways
  int64_t model = 0;  // back; where main weights are remainders, both ways
  bool model_comes_down = false;

  static constexpr int64_t kAlignment = 256;  // of each part of a chunk
  int64_t gradient_bytes(int64_t elements) const { return RoundUp(elements * 4, kAlignment); }
  int64_t main_bytes(int64_t elements) const { return RoundUp(elements * main, kAlignment); }
  int64_t pinned(int64_t elements) const {
    return gradient_bytes(elements) + main_bytes(elements) + RoundUp(elements * model, kAlignment);
  }
  // Of weights that an update overwrites in pinned memory.
  int64_t weights(int64_t elements) const {
    return elements * (main + (model_comes_down ? model : 0));
  }
};
HostChunkBytes HostChunkBytesOf(const GroupLayout& group, const ProgramOptions& options);

// Memory of a host for chunks under way, one slot for each: pinned bytes, and bytes in which an
// update that begins before the step is decided keeps what it overwrites.
struct HostRing {
  int64_t chunk_elements = kHostChunkElements;
  int64_t slots = 0;
  int64_t slot_bytes = 0;
  int64_t kept_bytes = 0;
};
inline constexpr int64_t kKeptSlackBytes = 4096;
HostRing HostRingOf(const ProgramBuffers& buffers,
                    const GroupLayouts& groups,
                    const ProgramOptions& options,
                    int64_t chunk_elements);

// Groups that a device's host updates, because some of their state is in its memory; none of a CPU
// job. In the order of their updates, which is that of the forward pass: the next step wants the
// new weights so. Chunks that have memory of their own are computed before the step is decided, in
// whatever order their gradients become final. The host makes the codes of such a group, too.
struct HostUpdates {
  IdVector<GroupId, bool> of;
  std::vector<GroupId> order;
};
HostUpdates HostUpdatesOf(const ProgramBuffers& buffers,
                          const GroupLayouts& groups,
                          const ProgramOptions& options);

// Pinned memory of a device's host for what the codes that it makes follow from: a copy of the
// amaxes and of the delayed scales of all ranks. 0: it makes none.
struct HostCodeBytes {
  int64_t amaxes = 0;
  int64_t delayed = 0;

  int64_t all() const { return amaxes + delayed; }
};
HostCodeBytes HostCodeBytesOf(const ProgramBuffers& buffers,
                              const GroupLayouts& groups,
                              const ProgramOptions& options);

// Bytes of one rank, and the groups in forward order.
struct OffloadFacts {
  int64_t optimizer_bytes = 0;  // that may be offloaded
  int64_t offloaded_bytes = 0;
  // Of a file: most that are in memory at a time, which is chunks of an update and a part of main
  // weights that codes are made of. Of a device's host: pinned memory for copies, and what updates
  // that begin before the step is decided keep of old state.
  int64_t window_bytes = 0;
  int64_t pinned_bytes = 0;
  int64_t kept_bytes = 0;
  // Memory of a device's host in all.
  int64_t host_bytes() const {
    return pinned_bytes == 0 ? 0 : offloaded_bytes + pinned_bytes + kept_bytes;
  }
  std::vector<GroupId> groups;
};
OffloadFacts OffloadOf(const ProgramBuffers& buffers,
                       const GroupLayouts& groups,
                       const ProgramOptions& options);

}  // namespace ravel::plan
