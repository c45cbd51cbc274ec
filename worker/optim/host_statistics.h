#pragma once

// A step's statistics on a host.

#include <cstddef>
#include <functional>
#include <vector>

#include "worker/optim/step_statistics.h"

namespace ravel::optim {

// A step is known as soon as it is decided: nothing is left to read later.
class HostStatistics final : public StepStatistics {
 public:
  explicit HostStatistics(const Args& args);

  void BeginStep(kernels::Stream& stream, const Beginning& beginning) override;
  shard::StatisticsMessages Measure(kernels::Stream& stream) override;
  void EndStep(kernels::Stream&) override {}
  bool known_at_once() const override { return true; }
  int64_t unread() const override { return 0; }
  absl::StatusOr<Record> Read() override;
  void BeginEvaluation(kernels::Stream& stream) override;

 private:
  std::vector<std::byte> memory_;
  std::function<kernels::StatisticsHeader()> header_;
};

}  // namespace ravel::optim
