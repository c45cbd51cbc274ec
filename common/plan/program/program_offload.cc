// Chooses what is offloaded, from sizes alone: a knapsack filled greedily from the end of the
// model, whose weights the next forward needs last. A group that does not fit is passed over, so a
// large head does not keep the layers before it in memory.

#include "common/plan/program/program_offload.h"

#include <algorithm>

#include "common/check.h"
#include "common/model/recipes.h"
#include "common/plan/layout/quant_layout.h"

namespace ravel::plan {
namespace {

// Pinned and kept memory of a device's host beside the state.
constexpr int64_t kHostRingBytes = int64_t{8} << 30;

using BytesOfGroups = IdVector<GroupId, int64_t>;

struct GroupBytes {
  BytesOfGroups may_leave;
  BytesOfGroups leaves;
  BytesOfGroups elements;
};

GroupBytes BytesOf(const ProgramBuffers& buffers,
                   const GroupLayouts& groups,
                   const ProgramOptions& options) {
  GroupBytes bytes = {.may_leave = BytesOfGroups(groups.size(), 0),
                      .leaves = BytesOfGroups(groups.size(), 0),
                      .elements = BytesOfGroups(groups.size(), 0)};
  for (const ProgramBuffer& buffer : buffers) {
    if (!MayOffload(buffer, groups, options)) {
      continue;
    }
    bytes.may_leave[buffer.group] += buffer.bytes;
    bytes.leaves[buffer.group] += buffer.memory == MemoryKind::kOffload ? buffer.bytes : 0;
    if (buffer.kind != BufferKind::kStateScale) {
      bytes.elements[buffer.group] = buffer.elements();
    }
  }
  return bytes;
}

int64_t Sum(const BytesOfGroups& bytes) {
  int64_t sum = 0;
  for (const int64_t of_group : bytes) {
    sum += of_group;
  }
  return sum;
}

}  // namespace

HostUpdates HostUpdatesOf(const ProgramBuffers& buffers,
                          const GroupLayouts& groups,
                          const ProgramOptions& options) {
  HostUpdates updates = {.of = IdVector<GroupId, bool>(groups.size(), false), .order = {}};
  if (!options.offload_copies) {
    return updates;
  }
  const BytesOfGroups leaves = BytesOf(buffers, groups, options).leaves;
  for (const GroupId group : groups.ids()) {
    updates.of[group] = leaves[group] > 0;
    if (updates.of[group]) {
      updates.order.push_back(group);
    }
  }
  return updates;
}

HostRing HostRingOf(const ProgramBuffers& buffers,
                    const GroupLayouts& groups,
                    const ProgramOptions& options,
                    int64_t chunk_elements) {
  HostRing ring = {.chunk_elements = chunk_elements};
  if (!options.offload_copies) {
    return ring;
  }
  const GroupBytes bytes = BytesOf(buffers, groups, options);
  for (const GroupId group : groups.ids()) {
    const int64_t elements = bytes.elements[group];
    if (bytes.leaves[group] == 0 || elements == 0) {
      continue;
    }
    const HostChunkBytes each = HostChunkBytesOf(groups[group], options);
    const int64_t most = std::min(elements, chunk_elements);
    ring.slots += DivCeil(elements, chunk_elements);
    ring.slot_bytes = std::max(ring.slot_bytes, each.pinned(most));
    // Whole scales of a row may lie at both ends.
    ring.kept_bytes = std::max(
        ring.kept_bytes,
        DivCeil(bytes.leaves[group], elements) * most + each.weights(most) + kKeptSlackBytes);
  }
  const int64_t bytes_of_slot = std::max<int64_t>(1, ring.slot_bytes + ring.kept_bytes);
  ring.slots = std::min(ring.slots, std::max(kHostChunks, kHostRingBytes / bytes_of_slot));
  return ring;
}

HostChunkBytes HostChunkBytesOf(const GroupLayout& group, const ProgramOptions& options) {
  const bool whole = group.recipe == Recipe::kNone;
  const bool main = whole && options.main_type == options.weight_type;
  const bool model = whole && options.weight_type != DType::kF32;
  const bool codes = EncodesInUpdate(group.recipe);
  return {.main = main ? DTypeBytes(DType::kF32) : 0,
          .model = model   ? DTypeBytes(options.weight_type)
                   : codes ? CodeBytes(group.recipe, 1)
                           : 0,
          .model_comes_down = model && options.main_type == DType::kI16};
}

HostCodeBytes HostCodeBytesOf(const ProgramBuffers& buffers,
                              const GroupLayouts& groups,
                              const ProgramOptions& options) {
  HostCodeBytes bytes;
  const std::vector<GroupId> on_host = HostUpdatesOf(buffers, groups, options).order;
  if (std::none_of(on_host.begin(), on_host.end(), [&](GroupId group) {
        return groups[group].recipe != Recipe::kNone;
      })) {
    return bytes;
  }
  for (const ProgramBuffer& buffer : buffers) {
    const int64_t of_it = RoundUp(buffer.bytes, HostChunkBytes::kAlignment);
    bytes.amaxes += buffer.kind == BufferKind::kAmax ? of_it : 0;
    bytes.delayed += buffer.kind == BufferKind::kDelayedScales ? of_it : 0;
  }
  return bytes;
}

bool MayOffload(const ProgramBuffer& buffer,
                const GroupLayouts& groups,
                const ProgramOptions& options) {
  if (buffer.group < 0 || !groups[buffer.group].trainable || buffer.inside >= 0) {
    return false;
  }
  if (buffer.kind != BufferKind::kMainWeight) {
    return buffer.kind == BufferKind::kState || buffer.kind == BufferKind::kStateScale;
  }
  return groups[buffer.group].recipe != Recipe::kNone || buffer.dtype != options.weight_type;
}

OffloadSizes OffloadSizesOf(const ProgramBuffers& buffers,
                            const GroupLayouts& groups,
                            const ProgramOptions& options) {
  OffloadSizes sizes = {.of_groups = BytesOf(buffers, groups, options).may_leave};
  sizes.total = Sum(sizes.of_groups);
  return sizes;
}

IdVector<GroupId, bool> OffloadSizes::GroupsWithin(int64_t most) const {
  IdVector<GroupId, bool> leaves(of_groups.size(), false);
  for (auto group = static_cast<int>(of_groups.size()) - 1; group >= 0; --group) {
    if (of_groups[group] <= most) {
      most -= of_groups[group];
      leaves[group] = true;
    }
  }
  return leaves;
}

int64_t OffloadSizes::BytesWithin(int64_t most) const {
  const IdVector<GroupId, bool> leaves = GroupsWithin(most);
  int64_t bytes = 0;
  for (const GroupId group : leaves.ids()) {
    bytes += leaves[group] ? of_groups[group] : 0;
  }
  return bytes;
}

// Half a byte more, so that rounding makes it neither less nor another byte.
double OffloadSizes::FractionOf(int64_t bytes) const {
  const auto all = static_cast<double>(total);
  return bytes < total ? (static_cast<double>(bytes) + 0.5) / all : 1;
}

void OffloadState(const ProgramRequest& request, ProgramBuffers& buffers) {
  const double fraction = request.options.offload_fraction;
  if (fraction <= 0) {
    return;
  }
  const OffloadSizes sizes = OffloadSizesOf(buffers, request.groups, request.options);
  const IdVector<GroupId, bool> leaves =
      sizes.GroupsWithin(static_cast<int64_t>(fraction * static_cast<double>(sizes.total)));
  for (ProgramBuffer& buffer : buffers) {
    if (MayOffload(buffer, request.groups, request.options) && leaves[buffer.group]) {
      buffer.memory = MemoryKind::kOffload;
    }
  }
}

OffloadFacts OffloadOf(const ProgramBuffers& buffers,
                       const GroupLayouts& groups,
                       const ProgramOptions& options) {
  const GroupBytes bytes = BytesOf(buffers, groups, options);
  OffloadFacts facts = {.optimizer_bytes = Sum(bytes.may_leave),
                        .offloaded_bytes = Sum(bytes.leaves),
                        .window_bytes = 0,
                        .groups = {}};
  int64_t read_bytes = 0;  // of main weights, while the last chunks may still be leaving
  for (const GroupId group : groups.ids()) {
    if (bytes.leaves[group] > 0) {
      facts.groups.push_back(group);
      const int64_t chunks = DivCeil(bytes.elements[group], kOffloadChunkElements);
      const int64_t chunk_bytes = DivCeil(bytes.leaves[group], std::max<int64_t>(1, chunks));
      facts.window_bytes = std::max(facts.window_bytes, chunk_bytes * kOffloadChunksAlive);
      if (groups[group].recipe != Recipe::kNone) {
        const int64_t part = std::min(bytes.elements[group], kOffloadChunkElements);
        read_bytes = std::max(read_bytes, part * DTypeBytes(DType::kF32));
      }
    }
  }
  facts.window_bytes += read_bytes;
  facts.window_bytes = std::min(facts.window_bytes, facts.offloaded_bytes);
  if (options.offload_copies) {
    const HostRing ring = HostRingOf(buffers, groups, options, kHostChunkElements);
    facts.window_bytes = 0;
    facts.pinned_bytes =
        ring.slots * ring.slot_bytes + HostCodeBytesOf(buffers, groups, options).all();
    facts.kept_bytes = ring.slots * ring.kept_bytes;
  }
  return facts;
}

}  // namespace ravel::plan
