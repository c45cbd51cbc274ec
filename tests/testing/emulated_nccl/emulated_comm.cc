#include "tests/testing/emulated_nccl/emulated_comm.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <random>
#include <utility>

#include <unistd.h>

namespace ravel::kernels::cuda::emulated {
namespace {

constexpr int kLooksUnderWay = 2;
constexpr size_t kNameBytes = 64;

struct Introduction {
  int32_t rank = 0;
  int32_t ranks = 0;
  char name[kNameBytes] = {};
};
struct SplitWish {
  int32_t color = 0;
  int32_t key = 0;
  int32_t rank = 0;
  char name[kNameBytes] = {};
};

// A collective in a graph, and in what runs of it.
class GraphUse {
 public:
  explicit GraphUse(std::shared_ptr<EmulatedComm> comm) : comm_(std::move(comm)) {
    comm_->AddGraphUse(1);
  }
  ~GraphUse() { comm_->AddGraphUse(-1); }
  GraphUse(const GraphUse&) = delete;
  GraphUse& operator=(const GraphUse&) = delete;

 private:
  const std::shared_ptr<EmulatedComm> comm_;
};

// What peers compare: whether it is launched with a graph is part of a collective.
uint64_t SequenceOf(uint64_t turn, bool captured) {
  return 2 * turn + (captured ? 1 : 0);
}

void SetName(char (&to)[kNameBytes], const std::string& name) {
  std::copy_n(name.data(), std::min(name.size(), kNameBytes - 1), to);
}

// Takes every rank's introduction and sends all of them to everyone.
void Introduce(const Listener& listener, const std::atomic<bool>& over) {
  std::vector<int> sockets;
  std::vector<Introduction> all;
  size_t come = 0;
  do {
    const int fd = listener.Accept(over);
    Introduction one;
    if (fd < 0 || ReadAll(fd, &one, sizeof(one), over) != MeshResult::kDone) {
      break;
    }
    all.resize(static_cast<size_t>(one.ranks));
    all[static_cast<size_t>(one.rank)] = one;
    sockets.push_back(fd);
  } while (++come < all.size());
  for (const int fd : sockets) {
    if (come == all.size()) {
      WriteAll(fd, all.data(), all.size() * sizeof(Introduction), over);
    }
    close(fd);
  }
}

// The roots of this process; those that still wait give up when it ends.
class Roots {
 public:
  ~Roots() {
    over_ = true;
    for (std::thread& thread : threads_) {
      thread.join();
    }
  }
  std::string Start() {
    auto listener = std::make_shared<Listener>();
    std::string name = listener->name();
    const std::lock_guard<std::mutex> lock(mutex_);
    threads_.emplace_back([this, listener = std::move(listener)]() mutable {
      Introduce(*listener, over_);
      listener.reset();
    });
    return name;
  }

 private:
  std::atomic<bool> over_ = false;
  std::mutex mutex_;
  std::vector<std::thread> threads_;
};

}  // namespace

NcclGraphCounts& TheNcclGraphCounts() {
  static NcclGraphCounts& counts = *new NcclGraphCounts;
  return counts;
}

NcclFaultSettings& TheNcclFaults() {
  static NcclFaultSettings& settings = *new NcclFaultSettings;
  return settings;
}

std::string StartNcclRoot() {
  static Roots roots;
  return roots.Start();
}

EmulatedComm::~EmulatedComm() {
  abort_ = true;
  if (setup_.joinable() && setup_.get_id() != std::this_thread::get_id()) {
    setup_.join();
  } else if (setup_.joinable()) {
    setup_.detach();  // it held the last reference, and ends here
  }
}

// -- joining

void EmulatedComm::StartInit(const std::string& root) {
  setting_up_ = true;
  setup_ = std::thread([self = shared_from_this(), root] { self->Init(root); });
}

void EmulatedComm::Init(const std::string& root) {
  if (TheNcclFaults().init_hangs_on_rank == rank_) {
    HangUntilAbort();
    return;
  }
  Listener own;
  Introduction mine = {.rank = rank_, .ranks = ranks_};
  SetName(mine.name, own.name());
  std::vector<Introduction> all(static_cast<size_t>(ranks_));
  const int fd = ConnectTo(root);
  MeshResult result = fd < 0 ? MeshResult::kPeerGone : WriteAll(fd, &mine, sizeof(mine), abort_);
  if (result == MeshResult::kDone) {
    result = ReadAll(fd, all.data(), all.size() * sizeof(Introduction), abort_);
  }
  if (fd >= 0) {
    close(fd);
  }
  if (result == MeshResult::kDone) {
    std::vector<std::string> names;
    for (const Introduction& one : all) {
      names.emplace_back(one.name);
    }
    result = mesh_.Connect(rank_, names, own, abort_);
  }
  if (result == MeshResult::kPeerGone) {
    Fail(kNcclRemoteError, "bootstrap: the root or a peer is gone");
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  setting_up_ = false;
}

void EmulatedComm::StartSplit(int color,
                              int key,
                              std::function<void(std::shared_ptr<EmulatedComm>)> adopt) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    setting_up_ = true;
  }
  if (setup_.joinable()) {
    setup_.join();
  }
  setup_ = std::thread([self = shared_from_this(), color, key, adopt = std::move(adopt)] {
    self->Split(color, key, adopt);
  });
}

MeshResult EmulatedComm::MakePart(int color,
                                  int key,
                                  uint64_t turn,
                                  std::shared_ptr<EmulatedComm>* part) {
  Listener own;
  SplitWish mine = {.color = color, .key = key, .rank = rank_};
  SetName(mine.name, own.name());
  std::vector<SplitWish> all(static_cast<size_t>(ranks_));
  int gone = 0;
  const MeshResult result = mesh_.Gather(SequenceOf(turn, false),
                                         reinterpret_cast<const std::byte*>(&mine),
                                         reinterpret_cast<std::byte*>(all.data()),
                                         sizeof(mine),
                                         abort_,
                                         &gone);
  if (result != MeshResult::kDone || color < 0) {
    return result;
  }
  std::erase_if(all, [&](const SplitWish& wish) { return wish.color != color; });
  std::sort(all.begin(), all.end(), [](const SplitWish& a, const SplitWish& b) {
    return a.key != b.key ? a.key < b.key : a.rank < b.rank;
  });
  std::vector<std::string> names;
  int rank = 0;
  for (size_t i = 0; i < all.size(); ++i) {
    names.emplace_back(all[i].name);
    rank = all[i].rank == rank_ ? static_cast<int>(i) : rank;
  }
  *part = std::make_shared<EmulatedComm>(rank, static_cast<int>(all.size()));
  return (*part)->mesh_.Connect(rank, names, own, abort_);
}

void EmulatedComm::Split(int color,
                         int key,
                         const std::function<void(std::shared_ptr<EmulatedComm>)>& adopt) {
  if (TheNcclFaults().split_hangs_on_rank == rank_) {
    HangUntilAbort();
  }
  const uint64_t turn = TakeTurn();
  std::shared_ptr<EmulatedComm> part;
  if (WaitForTurn(turn)) {
    const MeshResult result = MakePart(color, key, turn, &part);
    if (result != MeshResult::kDone) {
      part = nullptr;
      Report(result, -1);
    }
    adopt(std::move(part));
  }
  EndTurn();
  const std::lock_guard<std::mutex> lock(mutex_);
  setting_up_ = false;
}

// -- collectives

bool EmulatedComm::Issue(const NcclStream& stream, NcclCall call) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (setting_up_ || finalizing_ || !pending_.empty()) {
    return false;
  }
  pending_.push_back({stream, std::move(call)});
  looks_ = 0;
  return true;
}

int EmulatedComm::Look() {
  std::vector<Pending> ready;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (result_ != kNcclSuccess) {
      return result_;
    }
    if (setting_up_ || (finalizing_ && turn_ != next_turn_)) {
      return kNcclInProgress;
    }
    if (pending_.empty()) {
      return kNcclSuccess;
    }
    if (++looks_ <= kLooksUnderWay) {
      return kNcclInProgress;
    }
    ready.swap(pending_);
  }
  GiveToStream(std::move(ready[0]));
  const std::lock_guard<std::mutex> lock(mutex_);
  return result_;
}

void EmulatedComm::GiveToStream(Pending pending) {
  std::vector<NcclAccess> accesses;
  for (const NcclCall::Gather& gather : pending.call.gathers) {
    accesses.push_back({gather.shard, gather.bytes, false});
    accesses.push_back({gather.gathered, gather.bytes * static_cast<size_t>(ranks_), true});
  }
  for (const SocketMesh::Message& message : pending.call.messages) {
    accesses.push_back({message.data, message.bytes, !message.outgoing});
  }
  std::shared_ptr<GraphUse> use;  // shared by the graph and what runs of it
  if (pending.stream.capturing(pending.stream.stream)) {
    use = std::make_shared<GraphUse>(shared_from_this());
    ++TheNcclGraphCounts().captured;
  }
  const auto call = std::make_shared<const NcclCall>(std::move(pending.call));
  const int32_t error =
      pending.stream.issue(pending.stream.stream,
                           "nccl",
                           accesses.data(),
                           accesses.size(),
                           [self = shared_from_this(), call, use]() -> std::function<void()> {
                             TheNcclGraphCounts().replayed += use != nullptr ? 1 : 0;
                             return [self, call, use, turn = self->TakeTurn()] {
                               self->Run(*call, turn, use != nullptr);
                             };
                           });
  if (error != 0) {
    Fail(1, pending.stream.error_text(error));
  }
}

bool EmulatedComm::WaitForTurn(uint64_t turn) {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return abort_ || turn_ == turn; });
  return !abort_;
}

void EmulatedComm::EndTurn() {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++turn_;
  changed_.notify_all();
}

void EmulatedComm::HangUntilAbort() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return abort_.load(); });
}

void EmulatedComm::Report(MeshResult result, int gone) {
  if (result == MeshResult::kPeerGone) {
    Fail(kNcclRemoteError,
         gone < 0 ? "a peer is gone" : "rank " + std::to_string(gone) + " closed its connection");
    HangUntilAbort();
  }
}

void EmulatedComm::Run(const NcclCall& call, uint64_t turn, bool captured) {
  const uint64_t sequence = SequenceOf(turn, captured);
  NcclFaultSettings& faults = TheNcclFaults();
  if (WaitForTurn(turn)) {
    int32_t rank = rank_;
    if (faults.error_on_rank.compare_exchange_strong(rank, -1)) {
      Fail(2, "injected system error");
      HangUntilAbort();
    } else if (faults.hangs_on_rank == rank_) {
      HangUntilAbort();
    }
  }
  if (const int32_t most = faults.delay_microseconds; most > 0 && !abort_) {
    std::mt19937_64 random(turn * 31 + static_cast<uint64_t>(rank_));
    random.discard(1);
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait_for(lock, std::chrono::microseconds(random() % static_cast<uint64_t>(most)), [&] {
      return abort_.load();
    });
  }
  int gone = -1;
  MeshResult result = abort_ ? MeshResult::kAborted : MeshResult::kDone;
  for (const NcclCall::Gather& gather : call.gathers) {
    if (result == MeshResult::kDone) {
      result = mesh_.Gather(sequence, gather.shard, gather.gathered, gather.bytes, abort_, &gone);
    }
  }
  if (result == MeshResult::kDone) {
    result = mesh_.Move(sequence, call.messages, abort_, &gone);
  }
  Report(result, gone);
  EndTurn();
}

// -- the end

void EmulatedComm::Finalize() {
  const std::lock_guard<std::mutex> lock(mutex_);
  finalizing_ = true;
}

void EmulatedComm::BeginAbort() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    abort_ = true;
    pending_.clear();
    changed_.notify_all();
  }
  if (setup_.joinable()) {
    setup_.join();
  }
  mesh_.Close();
}

void EmulatedComm::AddGraphUse(int count) {
  const std::lock_guard<std::mutex> lock(mutex_);
  graph_uses_ += count;
  changed_.notify_all();
}

void EmulatedComm::FinishAbort() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return turn_ == next_turn_ && graph_uses_ == 0; });
}

void EmulatedComm::WaitForGraphs() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return graph_uses_ == 0; });
}

std::string EmulatedComm::last_error() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return last_error_;
}

void EmulatedComm::Fail(int result, const std::string& text) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (result_ == kNcclSuccess) {
    result_ = result;
    last_error_ = text;
  }
}

}  // namespace ravel::kernels::cuda::emulated
