// Our side of the collectives' benchmark: the shared-memory communicator as the engine uses it.

#include <atomic>

#include <absl/strings/str_cat.h>

#include "common/check.h"
#include "kernels/tree_reduce.h"
#include "tests/bench/collective_rank.h"
#include "worker/comm/communicator_factory.h"

namespace ravel::bench {
namespace {

void CheckOk(const absl::Status& status) {
  CHECK_MSG(status.ok(), status.ToString().c_str());
}

class Ours final : public Collectives {
 public:
  Ours(int rank, int ranks) : rank_(rank), ranks_(ranks) {
    auto made = comm::CreateCommunicator(
        {.transport = "shm",
         .rank = rank,
         .size = ranks,
         .rendezvous = [](std::string_view, std::string record)
             -> absl::StatusOr<std::vector<std::string>> { return ExchangeRecords(record); }});
    CheckOk(made.status());
    group_ = *std::move(made);
    const int64_t all = kRotatedBytes + kMostBytes;
    CheckOk(
        group_->AllocateArena({.private_bytes = all, .symmetric_bytes = all, .common_bytes = all}));
  }

  bool Has(const std::string& name) const override { return name != "ping" || ranks_ == 2; }
  void Prepare(const std::string&, int64_t) override {}

  void Turn(const std::string& name, int64_t bytes, int64_t slot) override {
    if (name == "barrier") {
      Barrier();
    } else if (name == "ping") {
      Ping();
    } else if (name == "copy") {
      kernels::CopyBytes(stream_,
                         {.to = const_cast<float*>(output(name, bytes, slot)),
                          .from = input(name, bytes, slot),
                          .bytes = bytes});
    } else if (name == "reduce_scatter") {
      Reduce(bytes, slot);
    } else {
      CheckOk(group_->AllGather({.tag = {plan::OpLabel::kGather, 0, 0},
                                 .shard = input(name, bytes, slot),
                                 .gathered = const_cast<float*>(output(name, bytes, slot)),
                                 .shard_elements = bytes / kFloat / ranks_}));
    }
  }

  void Barrier() override { CheckOk(group_->Barrier({})); }

  float* input(const std::string& name, int64_t bytes, int64_t slot) override {
    if (name == "all_gather_in_place") {
      return At(plan::MemoryKind::kCommon, bytes * slot) + rank_ * (bytes / kFloat / ranks_);
    }
    const int64_t own = name == "reduce_scatter" || name == "copy" ? bytes : bytes / ranks_;
    return At(plan::MemoryKind::kSymmetric, own * slot);
  }

  const float* output(const std::string& name, int64_t bytes, int64_t slot) override {
    if (name == "all_gather_in_place") {
      return At(plan::MemoryKind::kCommon, bytes * slot);
    }
    const int64_t own = name == "reduce_scatter" ? bytes / ranks_ : bytes;
    return At(plan::MemoryKind::kPrivate, own * slot);
  }

 private:
  static constexpr int64_t kFloat = sizeof(float);

  float* At(plan::MemoryKind kind, int64_t offset) {
    return reinterpret_cast<float*>(group_->arena(kind) + offset);
  }

  // One cache line to the other rank and back.
  void Ping() {
    auto* lines =
        reinterpret_cast<std::atomic<uint64_t>*>(group_->arena(plan::MemoryKind::kCommon));
    std::atomic<uint64_t>& mine = lines[rank_ * 16];
    std::atomic<uint64_t>& other = lines[(1 - rank_) * 16];
    ++pings_;
    if (rank_ == 0) {
      mine.store(pings_, std::memory_order_release);
    }
    while (other.load(std::memory_order_acquire) != pings_) {
    }
    if (rank_ == 1) {
      mine.store(pings_, std::memory_order_release);
    }
  }

  // What the executor does: pieces are read where they were staged and summed in one pass.
  void Reduce(int64_t bytes, int64_t slot) {
    const int64_t shard = bytes / kFloat / ranks_;
    const auto views = group_->ExchangePieces({.tag = {plan::OpLabel::kReduceScatter, 0, 0},
                                               .staging = input("reduce_scatter", bytes, slot),
                                               .shard_elements = shard,
                                               .contributors = ranks_});
    CheckOk(views.status());
    float* sum = const_cast<float*>(output("reduce_scatter", bytes, slot));
    kernels::TreeSum(stream_, {.pieces = views->pieces, .out = VectorView(sum, shard)});
    CheckOk(group_->ReleasePieces({plan::OpLabel::kReduceScatter, 0, 0}));
  }

  const int rank_;
  const int ranks_;
  uint64_t pings_ = 0;
  kernels::CpuStream stream_;
  std::unique_ptr<comm::Communicator> group_;
};

}  // namespace

std::unique_ptr<Collectives> MakeOurs(int rank, int ranks) {
  return std::make_unique<Ours>(rank, ranks);
}

}  // namespace ravel::bench
