#pragma once

// Amaxes and codes of quantized weights that a device's host has: what its updates find and make,
// and what the reduction of amaxes leaves to it.

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "common/plan/sharding_plan.h"
#include "common/status.h"
#include "kernels/cuda_host/cuda_device.h"
#include "kernels/update.h"
#include "worker/optim/offload_chunks.h"
#include "worker/quant/quant_state.h"
#include "worker/shard/numa_node.h"
#include "worker/shard/parameter_group.h"

namespace ravel::optim {

// The host has a quantization state of its own. Its amaxes are those of its own weights while they
// are updated, and those of all ranks after TakeScales. A weight's delayed codes are cast by scales
// that only the device computes, so those are copied here, too.
//
// Calls that take a stream are of the thread that issues the rank's work. Begin, Follow and Encode
// are of work of the host, or of a thread that nobody works beside; threads may share that of the
// latter two.
class HostCodes {
 public:
  // All outlive it. `coordinate`: of the rank on the tensor axis. nullptr where the host has no
  // quantized weights. ResourceExhausted without room.
  static absl::StatusOr<std::unique_ptr<HostCodes>> Create(const plan::ShardingPlan& plan,
                                                           const shard::ParameterGroups& groups,
                                                           int64_t coordinate,
                                                           kernels::CudaGpu& gpu,
                                                           const shard::NumaNode& node);
  bool Has(plan::GroupId group) const { return of_groups_[group]; }

  // Elements of a piece that one thread has updated.
  struct Visit {
    const quant::QuantPiece* piece = nullptr;
    int64_t first = 0;
    int64_t count = 0;
  };
  // Rows of a piece, and the place of their codes in memory that has one for each of the chunk's
  // elements.
  struct Encoding {
    const quant::QuantPiece* piece = nullptr;
    quant::QuantState::RowRange rows;
    int64_t offset = 0;

    int64_t elements() const { return rows.rows * piece->main_weight.columns(); }
  };
  // A part of a chunk that one thread updates. It then takes the amaxes of the weights, and makes
  // the codes that it can, while they are in its caches.
  struct Part {
    std::vector<kernels::UpdatePiece> pieces;  // offsets from the chunk's begin
    std::vector<Visit> visits;
    std::vector<Encoding> encodings;
  };
  // The work of a chunk. Blocks that are too long for one thread are in several parts: their codes
  // are made when all of these are done.
  struct Work {
    std::vector<Part> parts;
    std::vector<Encoding> after;

    // visit(encoding), in order of offsets.
    template <typename Visitor>
    void VisitEncodings(const Visitor& visit) const {
      for (const Part& part : parts) {
        std::for_each(part.encodings.begin(), part.encodings.end(), visit);
      }
      std::for_each(after.begin(), after.end(), visit);
    }
  };
  Work WorkOf(const OffloadChunk& chunk) const;

  // Amaxes are 0.
  void Begin();
  // kAhead: by the scales that an update gives delayed codes; kAsIs: a step that is not applied
  // leaves them as they were.
  enum class Cast { kAhead, kAsIs };
  // After the update of a part. `codes`: of the chunk; nullptr: amaxes alone.
  void Follow(const Part& part, std::byte* codes, Cast cast);
  // After all parts.
  void Encode(const Encoding& encoding, std::byte* codes, Cast cast) const;
  // Codes of rows of a piece, by the scales of all ranks, to `codes`.
  void Encode(const quant::QuantPiece& rows, std::byte* codes) const;
  // False until codes that an update makes are those that are wanted: some delayed scale has no
  // history yet. It stays true until Forget, or until a weight is not finite, whose codes tell
  // nobody anything.
  bool ahead() const { return ahead_.load(std::memory_order_acquire); }
  void Forget() { ahead_.store(false, std::memory_order_release); }

  // Raises a device's amaxes of weights to those of the host, whose work `stream` has waited for.
  void AddAmaxes(kernels::CudaStream& stream, const TensorView& amaxes);
  // Copies the scales that all ranks have now. Later work of the host has to wait for `stream`.
  void TakeScales(kernels::CudaStream& stream, const quant::QuantState& scales);

  // Memory that Begin and Follow write, and Encode reads.
  std::span<const std::byte> memory() const {
    return {static_cast<const std::byte*>(pinned_.data()), static_cast<size_t>(pinned_.bytes())};
  }
  int64_t pinned_bytes() const { return pinned_.bytes(); }
  int64_t device_bytes() const { return incoming_.bytes(); }

 private:
  HostCodes(const plan::ShardingPlan& plan, const shard::ParameterGroups& groups);
  absl::Status Allocate(int64_t coordinate, kernels::CudaGpu& gpu);

  const plan::ShardingPlan& plan_;
  const shard::ParameterGroups& groups_;
  plan::IdVector<plan::GroupId, bool> of_groups_;
  std::vector<plan::TensorId> tensors_;  // of these groups
  std::vector<uint32_t> flags_;          // without use: activations are the device's
  kernels::CudaMemory pinned_;           // amaxes, delayed scales
  kernels::CudaMemory incoming_;         // device: amaxes on their way
  uint32_t* amaxes_ = nullptr;
  int64_t words_ = 0;  // of weights
  float* delayed_ = nullptr;
  int64_t delayed_words_ = 0;  // without histories
  std::optional<quant::QuantState> state_;
  std::atomic<bool> ahead_ = false;
};

}  // namespace ravel::optim
