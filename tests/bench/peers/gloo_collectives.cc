// The Gloo library's side of the collectives' benchmark: its own algorithms, over the loopback
// interface.

#include <algorithm>
#include <map>
#include <utility>

#include <gloo/allgather.h>
#include <gloo/barrier.h>
#include <gloo/reduce_scatter.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/transport/tcp/device.h>

#include "tests/bench/collective_rank.h"

namespace ravel::bench {
namespace {

class Gloo final : public Collectives {
 public:
  Gloo(int rank, int ranks, const std::string& folder) : ranks_(ranks) {
    auto context = std::make_shared<gloo::rendezvous::Context>(rank, ranks);
    gloo::rendezvous::FileStore store(folder);
    std::shared_ptr<gloo::transport::Device> device =
        gloo::transport::tcp::CreateDevice("127.0.0.1");
    context->connectFullMesh(store, device);
    context_ = context;
    input_.resize(static_cast<size_t>((kRotatedBytes + kMostBytes) / kFloat));
    output_.resize(input_.size());
  }

  bool Has(const std::string& name) const override { return name != "all_gather_in_place"; }

  // The library's reduce-scatter is bound to one buffer, which it also destroys: one for each slot.
  void Prepare(const std::string& name, int64_t bytes) override {
    auto& reduces = reduces_[bytes];
    while (name == "reduce_scatter" && static_cast<int64_t>(reduces.size()) < SlotsOf(bytes)) {
      const auto slot = static_cast<int64_t>(reduces.size());
      const auto elements = static_cast<int>(bytes / kFloat);
      reduces.push_back(std::make_unique<gloo::ReduceScatterHalvingDoubling<float>>(
          context_,
          std::vector<float*>{input(name, bytes, slot)},
          elements,
          std::vector<int>(static_cast<size_t>(ranks_), elements / ranks_)));
    }
  }

  void Turn(const std::string& name, int64_t bytes, int64_t slot) override {
    if (name == "barrier") {
      Barrier();
    } else if (name == "reduce_scatter") {
      reduces_.at(bytes)[static_cast<size_t>(slot)]->run();
    } else {
      const auto shard = static_cast<size_t>(bytes / kFloat / ranks_);
      gloo::AllgatherOptions options(context_);
      options.setInput(input(name, bytes, slot), shard);
      options.setOutput(const_cast<float*>(output(name, bytes, slot)),
                        shard * static_cast<size_t>(ranks_));
      gloo::allgather(options);
    }
  }

  void Barrier() override {
    gloo::BarrierOptions options(context_);
    gloo::barrier(options);
  }

  float* input(const std::string& name, int64_t bytes, int64_t slot) override {
    const int64_t own = name == "reduce_scatter" ? bytes : bytes / ranks_;
    return input_.data() + own / kFloat * slot;
  }

  const float* output(const std::string& name, int64_t bytes, int64_t slot) override {
    return name == "reduce_scatter" ? input(name, bytes, slot)
                                    : output_.data() + bytes / kFloat * slot;
  }

 private:
  static constexpr int64_t kFloat = sizeof(float);

  const int ranks_;
  std::shared_ptr<gloo::Context> context_;
  std::vector<float> input_, output_;
  // By bytes, then slot.
  std::map<int64_t, std::vector<std::unique_ptr<gloo::ReduceScatterHalvingDoubling<float>>>>
      reduces_;
};

}  // namespace

std::unique_ptr<Collectives> MakeGloo(int rank, int ranks, const std::string& folder) {
  return std::make_unique<Gloo>(rank, ranks, folder);
}

}  // namespace ravel::bench
