#include "tests/testing/queued_replay.h"

#include <chrono>
#include <string>
#include <utility>

#include "common/mutex.h"
#include "common/plan/program/program_crossing.h"
#include "common/signed_size.h"
#include "tests/testing/hold.h"

namespace ravel::shard {
namespace {

// Longest random delay of an instruction of a slow stream; some are stuck for longer.
constexpr uint64_t kSlowMicroseconds = 40;
// How late a slow stream begins, at times: other streams come to where they need its first one.
constexpr uint64_t kLateMicroseconds = 10'000;

// The first failure of any stream.
class FirstFailure {
 public:
  // True for the first.
  bool Set(const absl::Status& status) {
    MutexLock lock(mutex_);
    const bool first = status_.ok();
    if (first) {
      status_ = status;
    }
    return first;
  }
  absl::Status status() const {
    MutexLock lock(mutex_);
    return status_;
  }

 private:
  mutable Mutex mutex_;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
};

// A schedule slows one stream down, or none, some of its instructions very much, and each other
// instruction by a little. `first` of its stream.
void RandomDelay(uint64_t schedule,
                 plan::InstructionId instruction,
                 plan::StreamId stream,
                 bool first) {
  const uint64_t number = stream == plan::StreamId::kTensor ? 0 : static_cast<uint64_t>(stream);
  const bool slow = schedule % 6 == number;
  const bool late = slow && first && schedule / 6 % 4 == 3;
  const uint64_t draw =
      testing::ScatteredBits(schedule * 1000003 + Size(instruction.value()) * 101);
  const bool stuck = slow && draw % 16 == 0;
  const uint64_t most = stuck  ? 20 * kSlowMicroseconds
                        : slow ? kSlowMicroseconds
                               : kSlowMicroseconds / 8;
  const uint64_t microseconds = late                     ? kLateMicroseconds
                                : draw % 2 == 0 && !slow ? 0
                                                         : (draw >> 4) % most;
  testing::HoldFor(std::chrono::microseconds(microseconds));
}

}  // namespace

absl::Status QueuedReplay::Run(const ProgramRun& program) {
  FirstFailure failure;
  const auto& list = program.program.instructions;
  plan::IdVector<plan::InstructionId, std::shared_ptr<kernels::CpuEvent>> done(list.size());
  std::array<bool, plan::kStreamCount> begun = {};
  // Ranks and programs of one schedule differ.
  const uint64_t schedule =
      delay_seed_.value_or(0) + static_cast<uint64_t>(world_.rank()) + ++runs_;
  for (const plan::InstructionId i : list.ids()) {
    if (!plan::RunsOnStream(list[i].instruction)) {
      continue;
    }
    const size_t stream = plan::StreamIndex(list[i].instruction.stream);
    if (queues_[stream] == nullptr) {
      queues_[stream] = std::make_unique<kernels::CpuQueue>();
    }
    done[i] = std::make_shared<kernels::CpuEvent>();
    const bool first = !std::exchange(begun[stream], true);
    kernels::CpuQueue::Work work;
    for (const plan::InstructionId wait : list[i].instruction.waits) {
      const plan::InstructionId freed_with = list[wait].freed_with;
      const plan::InstructionId runs = freed_with >= 0 ? freed_with : wait;
      if (done[runs] != nullptr) {
        work.waits.push_back(done[runs]);
      }
    }
    work.done = done[i];
    work.run = [&, i, first](int64_t wait_ns) {
      if (!failure.status().ok()) {
        return;
      }
      if (delay_seed_.has_value()) {
        RandomDelay(schedule, i, list[i].instruction.stream, first);
      }
      const absl::Status status = program.run(list[i], wait_ns);
      if (!status.ok() && failure.Set(status)) {
        world_.Abort(std::string(status.message()));
      }
    };
    queues_[stream]->Submit(std::move(work));
  }
  for (const std::unique_ptr<kernels::CpuQueue>& queue : queues_) {
    if (queue != nullptr) {
      queue->Drain();
    }
  }
  return failure.status();
}

}  // namespace ravel::shard
