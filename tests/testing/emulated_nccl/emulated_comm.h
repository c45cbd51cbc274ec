#pragma once

// A communicator of the emulated NCCL: joins in a thread, runs its collectives one after another in
// the order of their issue, whatever their streams.

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "kernels/cuda/nccl_api.h"
#include "tests/testing/emulated_nccl/emulated_nccl.h"
#include "tests/testing/emulated_nccl/socket_mesh.h"

namespace ravel::kernels::cuda::emulated {

// Set by tests, read by all communicators of the process.
struct NcclFaultSettings {
  std::atomic<int32_t> init_hangs_on_rank = -1;
  std::atomic<int32_t> split_hangs_on_rank = -1;
  std::atomic<int32_t> hangs_on_rank = -1;
  std::atomic<int32_t> error_on_rank = -1;
  std::atomic<int32_t> delay_microseconds = -1;
};
NcclFaultSettings& TheNcclFaults();

// Collectives of all communicators of the process that became part of graphs, and how often one was
// launched with its graph.
struct NcclGraphCounts {
  std::atomic<int32_t> captured = 0;
  std::atomic<int32_t> replayed = 0;
};
NcclGraphCounts& TheNcclGraphCounts();

// The root of a new id: introduces the ranks to each other, once.
std::string StartNcclRoot();

// One call of a group, or several: messages and copies of one communicator on one stream.
struct NcclCall {
  struct Gather {
    const std::byte* shard;
    std::byte* gathered;
    size_t bytes;
  };
  std::vector<Gather> gathers;
  std::vector<SocketMesh::Message> messages;
};

class EmulatedComm : public std::enable_shared_from_this<EmulatedComm> {
 public:
  EmulatedComm(int rank, int ranks) : rank_(rank), ranks_(ranks) {}
  ~EmulatedComm();

  int rank() const { return rank_; }
  int ranks() const { return ranks_; }

  // Joins by the root's name, in a thread.
  void StartInit(const std::string& root);
  // `adopt` is given the part, or null, before this communicator is settled.
  void StartSplit(int color, int key, std::function<void(std::shared_ptr<EmulatedComm>)> adopt);
  // False while something is under way.
  bool Issue(const NcclStream& stream, NcclCall call);
  // ncclResult_t. What was issued is given to its stream in one of the first looks.
  int Look();
  void Finalize();
  // Ends what runs, tells peers by closing; later work of streams does nothing.
  void BeginAbort();
  // Until all that was given to streams has come to its turn there, as NCCL waits for its kernels:
  // behind work that never ends it never ends, either. And until no graph holds a collective of
  // this.
  void FinishAbort();
  // That alone.
  void WaitForGraphs();
  void AddGraphUse(int count);

  std::string last_error();
  void Fail(int result, const std::string& text);

 private:
  struct Pending {
    NcclStream stream;
    NcclCall call;
  };
  void Init(const std::string& root);
  void Split(int color, int key, const std::function<void(std::shared_ptr<EmulatedComm>)>& adopt);
  MeshResult MakePart(int color, int key, uint64_t turn, std::shared_ptr<EmulatedComm>* part);
  void GiveToStream(Pending pending);
  void Run(const NcclCall& call, uint64_t turn, bool captured);
  // False where the communicator is aborted.
  bool WaitForTurn(uint64_t turn);
  void EndTurn();
  void HangUntilAbort();
  void Report(MeshResult result, int gone);
  uint64_t TakeTurn() { return next_turn_++; }

  const int rank_;
  const int ranks_;
  SocketMesh mesh_;
  std::atomic<bool> abort_ = false;
  std::thread setup_;

  std::mutex mutex_;
  std::condition_variable changed_;
  int result_ = kNcclSuccess;
  std::string last_error_;
  bool setting_up_ = false;
  std::vector<Pending> pending_;  // at most one
  int looks_ = 0;
  bool finalizing_ = false;
  int graph_uses_ = 0;
  std::atomic<uint64_t> next_turn_ = 0;
  uint64_t turn_ = 0;  // whose it is
};

}  // namespace ravel::kernels::cuda::emulated
