#pragma once

// Programs of a step as CUDA graphs. What a program gives to the streams is the same in every step,
// addresses and all; what changes (batches, learning rate, counts) lies in memory that programs
// read. So it is kept when the program runs for the second time, captured as a graph, and from then
// on compared with what the host would give, call by call, and launched as one. A step that differs
// is issued as it is, by the calls that it makes. Whether a collective of NCCL is part of a graph
// is one decision of all its ranks: they agree before a capture and after it, and a step that
// differs later is an error.

#include <compare>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/plan/sharding_plan.h"
#include "common/status.h"
#include "kernels/cuda_host/cuda_calls.h"
#include "kernels/cuda_host/cuda_device.h"
#include "worker/shard/device_streams.h"

namespace ravel::shard {

// Used only from the thread that issues the rank's work.
class StepGraphs {
 public:
  // Collective over ranks that exchange. Gives all the same answer: "" where all give "", else what
  // one of them gave, and its rank.
  using Agreement = std::function<absl::StatusOr<std::string>(const std::string& difference)>;
  // The streams outlive it. Without an agreement collectives are refused.
  explicit StepGraphs(DeviceStreams& streams, Agreement agree = nullptr)
      : streams_(streams),
        agree_(std::move(agree)),
        log_(agree_ == nullptr ? kernels::CudaCallLog::Collectives::kRefused
                               : kernels::CudaCallLog::Collectives::kKept) {}

  // `issue` gives the work of the slot's program to the streams, which are joined before and after.
  // Its calls on streams are held back where a graph does them.
  absl::Status Run(const plan::StepSlot& slot, const std::function<absl::Status()>& issue);

  int64_t captured() const { return captured_; }
  int64_t launches() const { return launches_; }
  // What was issued call by call though it should not have been, and why; each is logged, too.
  const std::vector<std::string>& notes() const { return notes_; }

 private:
  struct Key {
    plan::Phase phase;
    plan::LanePart part;
    int64_t turn;
    int64_t micro_batch;
    auto operator<=>(const Key&) const = default;
  };
  struct Entry {
    int64_t runs = 0;
    int64_t failures = 0;  // in a row
    bool off = false;
    kernels::CudaCalls calls;
    std::unique_ptr<kernels::CudaGraph> graph;  // none until it is captured
  };
  absl::Status Record(const Key& key, Entry& entry, const std::function<absl::Status()>& issue);
  absl::Status Follow(const Key& key, Entry& entry, const std::function<absl::Status()>& issue);
  void Fail(const Key& key, Entry& entry, const std::string& why);
  absl::StatusOr<std::string> Agree(const std::string& difference) const;

  DeviceStreams& streams_;
  const Agreement agree_;
  kernels::CudaCallLog log_;
  std::map<Key, Entry> entries_;
  int64_t captured_ = 0;
  int64_t launches_ = 0;
  std::vector<std::string> notes_;
};

}  // namespace ravel::shard
