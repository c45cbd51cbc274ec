// Chooses what is offloaded, from sizes alone: a knapsack filled greedily from the end of the
// model, whose weights the next forward needs last. A group that does not fit is passed over, so a
// large head does not keep the layers before it in memory.

#include "common/plan/program/program_offload.h"

#include <algorithm>

#include "common/check.h"

namespace ravel::plan {
namespace {

using BytesOfGroups = IdVector<GroupId, int64_t>;

struct GroupBytes {
  BytesOfGroups may_leave;
  BytesOfGroups leaves;
  BytesOfGroups elements;
};

GroupBytes BytesOf(const ProgramBuffers& buffers, const GroupLayouts& groups, DType weight_type) {
  GroupBytes bytes = {.may_leave = BytesOfGroups(groups.size(), 0),
                      .leaves = BytesOfGroups(groups.size(), 0),
                      .elements = BytesOfGroups(groups.size(), 0)};
  for (const ProgramBuffer& buffer : buffers) {
    if (!MayOffload(buffer, groups, weight_type)) {
      continue;
    }
    bytes.may_leave[buffer.group] += buffer.bytes;
    bytes.leaves[buffer.group] += buffer.memory == MemoryKind::kOffload ? buffer.bytes : 0;
    if (buffer.kind == BufferKind::kState) {
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

bool MayOffload(const ProgramBuffer& buffer, const GroupLayouts& groups, DType weight_type) {
  if (buffer.group < 0 || !groups[buffer.group].trainable || buffer.inside >= 0) {
    return false;
  }
  return buffer.kind == BufferKind::kState || buffer.kind == BufferKind::kStateScale ||
         (buffer.kind == BufferKind::kMainWeight && buffer.dtype != weight_type &&
          groups[buffer.group].recipe == Recipe::kNone);
}

void OffloadState(const ProgramRequest& request, ProgramBuffers& buffers) {
  const double fraction = request.options.offload_fraction;
  if (fraction <= 0) {
    return;
  }
  const DType weight_type = request.options.weight_type;
  const BytesOfGroups bytes = BytesOf(buffers, request.groups, weight_type).may_leave;
  auto left = static_cast<int64_t>(fraction * static_cast<double>(Sum(bytes)));
  IdVector<GroupId, bool> leaves(bytes.size(), false);
  for (auto group = static_cast<int>(bytes.size()) - 1; group >= 0; --group) {
    if (bytes[group] <= left) {
      left -= bytes[group];
      leaves[group] = true;
    }
  }
  for (ProgramBuffer& buffer : buffers) {
    if (MayOffload(buffer, request.groups, weight_type) && leaves[buffer.group]) {
      buffer.memory = MemoryKind::kOffload;
    }
  }
}

OffloadFacts OffloadOf(const ProgramBuffers& buffers,
                       const GroupLayouts& groups,
                       const ProgramOptions& options) {
  const GroupBytes bytes = BytesOf(buffers, groups, options.weight_type);
  OffloadFacts facts = {.optimizer_bytes = Sum(bytes.may_leave),
                        .offloaded_bytes = Sum(bytes.leaves),
                        .window_bytes = 0,
                        .groups = {}};
  for (const GroupId group : groups.ids()) {
    if (bytes.leaves[group] > 0) {
      facts.groups.push_back(group);
      const int64_t chunks = DivCeil(bytes.elements[group], kOffloadChunkElements);
      const int64_t chunk_bytes = DivCeil(bytes.leaves[group], std::max<int64_t>(1, chunks));
      facts.window_bytes = std::max(facts.window_bytes, chunk_bytes * kOffloadChunksAlive);
    }
  }
  facts.window_bytes = std::min(facts.window_bytes, facts.offloaded_bytes);
  return facts;
}

}  // namespace ravel::plan
