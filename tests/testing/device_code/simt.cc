#include "tests/testing/device_code/simt.h"

#include <algorithm>
#include <array>
#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <numeric>
#include <vector>

#include <sys/mman.h>
#include <ucontext.h>

#include "tests/testing/device_code/block_runner.h"

constinit thread_local ravel::kernels::cuda::simt::Dimensions threadIdx;
constinit thread_local ravel::kernels::cuda::simt::Dimensions blockIdx;
constinit thread_local ravel::kernels::cuda::simt::Dimensions blockDim;
constinit thread_local ravel::kernels::cuda::simt::Dimensions gridDim;

namespace ravel::kernels::cuda::simt {
namespace {

constexpr unsigned kWarp = 32;
constexpr uint32_t kAllLanes = 0xFFFFFFFFu;
constexpr size_t kStackBytes = size_t{64} << 10;
constexpr uint8_t kPoison = 0xFF;  // NaN as fp32 and fp64

enum class State { kReady, kAtBlock, kAtWarp, kDone };

// A stack of its own, and where it goes on. It runs threads that have not begun, one after another,
// until one has to wait; then it is that thread's until it ends.
struct Fiber {
  std::jmp_buf place;
  bool begun = false;
};

struct Thread {
  State state = State::kDone;
  Fiber* fiber = nullptr;    // null: not begun, or ended
  unsigned block_waits = 0;  // barriers it has come to; two threads are at most one apart
  unsigned warp_waits = 0;
};

// What the lanes of a warp gave at a barrier, and at the one before.
struct Warp {
  std::array<std::array<uint64_t, kWarp>, 2> values = {};
};

class Block;
thread_local Block* running = nullptr;

[[noreturn]] void Fault(const char* what) {
  std::fprintf(stderr,
               "device code: %s; block (%u, %u, %u), thread %u of %u\n",
               what,
               blockIdx.x,
               blockIdx.y,
               blockIdx.z,
               threadIdx.x,
               blockDim.x);
  std::abort();
}

// The threads of a block, one block at a time. Lives as long as its host thread.
class Block {
 public:
  Block() = default;
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  ~Block() {
    for (void* stack : stacks_) {
      munmap(stack, kStackBytes);
    }
  }

  void Run(uint32_t shared_bytes, const std::vector<unsigned>& turns, const ThreadBody& body);

  float* shared() { return shared_.data(); }
  Thread& current() { return threads_[threadIdx.x]; }
  Warp& warp() { return warps_[threadIdx.x / kWarp]; }
  std::array<bool, 3>& any() { return any_; }

  // Gives the turn to another thread; returns when it is this one's again.
  void Wait(State state);

 private:
  static void Enter();
  // Goes on with a fiber until it waits or has no thread left.
  void Resume(Fiber& fiber);
  Fiber& FreeFiber();
  [[noreturn]] void RunThreads(Fiber& fiber);
  void TakeTurns();
  // Whether anyone waits no longer; a fault if none can.
  bool Release();
  bool ReleaseWarp(size_t first);

  std::jmp_buf scheduler_;
  ucontext_t entry_ = {};
  std::deque<Fiber> fibers_;
  std::vector<Fiber*> free_;
  std::vector<void*> stacks_;
  Fiber* active_ = nullptr;
  std::vector<Thread> threads_;
  std::vector<Warp> warps_;
  std::vector<float> shared_;
  std::array<bool, 3> any_ = {};  // by barriers, modulo 3
  const std::vector<unsigned>* turns_ = nullptr;
  size_t next_ = 0;  // turn of the first thread that has not begun
  const ThreadBody* body_ = nullptr;
};

void Block::Wait(State state) {
  const unsigned thread = threadIdx.x;
  Fiber* fiber = active_;
  threads_[thread].state = state;
  threads_[thread].fiber = fiber;
  if (_setjmp(fiber->place) == 0) {
    _longjmp(scheduler_, 1);
  }
  threadIdx.x = thread;
}

// On a fiber's stack, for ever: threads of this block, then of blocks to come.
void Block::RunThreads(Fiber& fiber) {
  for (;;) {
    while (next_ < turns_->size()) {
      const unsigned thread = (*turns_)[next_++];
      threadIdx.x = thread;
      (*body_)();
      threads_[threadIdx.x].state = State::kDone;
    }
    free_.push_back(&fiber);
    if (_setjmp(fiber.place) == 0) {
      _longjmp(scheduler_, 1);
    }
  }
}

void Block::Enter() {
  running->RunThreads(*running->active_);
}

Fiber& Block::FreeFiber() {
  if (free_.empty()) {
    void* stack = mmap(nullptr,
                       kStackBytes,
                       PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                       -1,
                       0);
    if (stack == MAP_FAILED) {
      std::perror("device code: a stack");
      std::abort();
    }
    stacks_.push_back(stack);
    return fibers_.emplace_back();
  }
  Fiber& fiber = *free_.back();
  free_.pop_back();
  return fiber;
}

void Block::Resume(Fiber& fiber) {
  active_ = &fiber;
  if (_setjmp(scheduler_) != 0) {
    return;
  }
  if (fiber.begun) {
    _longjmp(fiber.place, 1);
  }
  fiber.begun = true;
  getcontext(&entry_);
  entry_.uc_stack = {.ss_sp = stacks_.back(), .ss_flags = 0, .ss_size = kStackBytes};
  entry_.uc_link = nullptr;
  makecontext(&entry_, &Block::Enter, 0);
  setcontext(&entry_);
}

// Each thread runs until it waits for others.
void Block::TakeTurns() {
  for (const unsigned thread : *turns_) {
    if (threads_[thread].state == State::kReady && threads_[thread].fiber != nullptr) {
      Resume(*threads_[thread].fiber);
    }
  }
  while (next_ < turns_->size()) {
    Resume(FreeFiber());
  }
}

bool Block::ReleaseWarp(size_t first) {
  for (size_t i = first; i < first + kWarp; ++i) {
    if (threads_[i].state != State::kAtWarp) {
      return false;
    }
  }
  for (size_t i = first; i < first + kWarp; ++i) {
    threads_[i].state = State::kReady;
  }
  return true;
}

bool Block::Release() {
  bool released = false;
  size_t at_block = 0;
  size_t done = 0;
  for (size_t i = 0; i < threads_.size(); ++i) {
    released = (i % kWarp == 0 && ReleaseWarp(i)) || released;
    at_block += threads_[i].state == State::kAtBlock ? 1 : 0;
    done += threads_[i].state == State::kDone ? 1 : 0;
  }
  if (at_block > 0 && at_block + done == threads_.size()) {
    for (Thread& thread : threads_) {
      if (thread.state == State::kAtBlock) {
        thread.state = State::kReady;
      }
    }
    return true;
  }
  if (!released && done < threads_.size()) {
    Fault("threads wait at a barrier that others of their warp or block never reach");
  }
  return released;
}

void Block::Run(uint32_t shared_bytes, const std::vector<unsigned>& turns, const ThreadBody& body) {
  threads_.assign(turns.size(), {.state = State::kReady});
  warps_.resize((turns.size() + kWarp - 1) / kWarp);
  shared_.resize(shared_bytes / sizeof(float));
  std::memset(shared_.data(), kPoison, shared_.size() * sizeof(float));
  any_ = {};
  turns_ = &turns;
  next_ = 0;
  body_ = &body;
  running = this;
  do {
    TakeTurns();
  } while (Release());
  running = nullptr;
}

std::vector<unsigned> TurnsOf(TurnOrder order, unsigned threads) {
  std::vector<unsigned> turns(threads);
  std::iota(turns.begin(), turns.end(), 0u);
  if (order == TurnOrder::kDescending) {
    std::reverse(turns.begin(), turns.end());
  } else if (order == TurnOrder::kScattered) {
    std::sort(turns.begin(), turns.end(), [](unsigned a, unsigned b) {
      return a * 2654435761u < b * 2654435761u;
    });
  }
  return turns;
}

}  // namespace

float* DynamicShared() {
  return running->shared();
}

bool SynchronizeBlock(bool value) {
  const unsigned turn = running->current().block_waits++ % 3;
  std::array<bool, 3>& any = running->any();
  any[turn] = any[turn] || value;
  running->Wait(State::kAtBlock);
  // All have read the result of the barrier before, and none is at the one after the next.
  any[(turn + 2) % 3] = false;
  return any[turn];
}

uint64_t ExchangeInWarp(uint32_t mask, uint64_t value, unsigned lane) {
  if (mask != kAllLanes) {
    Fault("a part of a warp exchanges values, which is not emulated");
  }
  const unsigned turn = running->current().warp_waits++ % 2;
  std::array<uint64_t, kWarp>& values = running->warp().values[turn];
  values[threadIdx.x % kWarp] = value;
  running->Wait(State::kAtWarp);
  return values[lane];
}

uint32_t BallotOfWarp(uint32_t mask, bool value) {
  uint32_t votes = 0;
  const unsigned turn = running->current().warp_waits % 2;
  const std::array<uint64_t, kWarp>& values = running->warp().values[turn];
  ExchangeInWarp(mask, value ? 1 : 0, 0);
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    votes |= static_cast<uint32_t>(values[lane]) << lane;
  }
  return votes;
}

void SynchronizeWarp() {
  ExchangeInWarp(kAllLanes, 0, 0);
}

void Trap() {
  Fault("trap");
}

void RunBlocks(const RavelCudaLaunch& launch, TurnOrder order, const ThreadBody& body) {
  static thread_local Block block;
  const auto place = [&](uint32_t i, uint32_t count) {
    return order == TurnOrder::kDescending ? count - 1 - i : i;
  };
  gridDim = {launch.grid[0], launch.grid[1], launch.grid[2]};
  blockDim = {launch.block, 1, 1};
  threadIdx = {0, 0, 0};
  const std::vector<unsigned> turns = TurnsOf(order, launch.block);
  for (uint32_t z = 0; z < launch.grid[2]; ++z) {
    for (uint32_t y = 0; y < launch.grid[1]; ++y) {
      for (uint32_t x = 0; x < launch.grid[0]; ++x) {
        blockIdx = {place(x, launch.grid[0]), place(y, launch.grid[1]), place(z, launch.grid[2])};
        block.Run(launch.shared_bytes, turns, body);
      }
    }
  }
}

}  // namespace ravel::kernels::cuda::simt
