#include "tests/testing/device_code/simt.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <numeric>
#include <utility>
#include <vector>

#include <sys/mman.h>
#include <ucontext.h>

#include "tests/testing/device_code/block_runner.h"

constinit ravel::kernels::cuda::simt::Dimensions threadIdx;
constinit ravel::kernels::cuda::simt::Dimensions blockIdx;
constinit ravel::kernels::cuda::simt::Dimensions blockDim;
constinit ravel::kernels::cuda::simt::Dimensions gridDim;

namespace ravel::kernels::cuda::simt {
namespace {

constexpr unsigned kWarp = 32;
constexpr uint32_t kAllLanes = 0xFFFFFFFFu;
constexpr size_t kMaxThreads = 1024;
constexpr size_t kStackBytes = size_t{64} << 10;
constexpr size_t kLargePage = size_t{2} << 20;
constexpr uint8_t kPoison = 0xFF;  // NaN as fp32 and fp64

enum class State : uint8_t { kReady, kAtBlock, kAtWarp, kDone };

// The registers that __builtin_setjmp keeps. The functions of the C library would do, but save
// more, and sanitizers and fortified builds take a jump to another stack for a fault.
using Place = std::array<void*, 5>;

// A stack of its own, and where it goes on. It runs threads that have not begun, one after another,
// until one has to wait; then it is that thread's until it ends.
struct Fiber {
  Place place = {};
  std::byte* stack = nullptr;
  size_t stack_bytes = 0;
};

struct Thread {
  Fiber* fiber = nullptr;
  unsigned block_waits = 0;  // barriers it has come to; two threads are at most one apart
  unsigned warp_waits = 0;
};

// What the lanes of a warp gave at a barrier, and at the one before.
struct Warp {
  std::array<std::array<uint64_t, kWarp>, 2> values = {};
  unsigned waiting = 0;
};

class Block;
Block* running = nullptr;

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

[[noreturn, gnu::noinline]] void JumpTo(Place& place) {
  __builtin_longjmp(place.data(), 1);
}

// The threads of a block, one block at a time.
class Block {
 public:
  void Run(uint32_t shared_bytes, const std::vector<unsigned>& turns, const KernelCall& call);

  float* shared() { return shared_.data(); }
  Thread& current() { return threads_[threadIdx.x]; }
  Warp& warp() { return warps_[threadIdx.x / kWarp]; }
  std::array<bool, 3>& any() { return any_; }

  void WaitForBlock() {
    ++at_block_;
    Wait(State::kAtBlock);
  }
  // The last lane of a warp lets it go on at once: few stacks are in use between two barriers.
  void WaitForWarp(uint64_t* values, ChangeLanes change) {
    unsigned& waiting = warp().waiting;
    if (++waiting < kWarp) {
      Wait(State::kAtWarp);
      return;
    }
    if (change != nullptr) {
      change(values);
    }
    waiting = 0;
    turn_ = (turn_ - 1) / kWarp * kWarp;
    for (size_t i = turn_; i < turn_ + kWarp; ++i) {
      states_[(*turns_)[i]] = State::kReady;
    }
    Wait(State::kReady);
  }

 private:
  static void Enter();
  // Gives the turn to another thread; returns when it is this one's again.
  [[gnu::noinline]] void Wait(State state);
  // Goes on with the next thread of the round, or with RunRound at its end.
  [[noreturn]] void NextTurn();
  [[noreturn]] void Begin();
  Fiber& NewFiber();
  [[noreturn, gnu::noinline]] void RunThreads(Fiber& fiber);
  // Each thread that is ready runs until it waits for others.
  [[gnu::noinline]] void RunRound();
  // True if any thread waits no longer; a fault if threads wait and none can go on.
  bool Release();

  Place scheduler_ = {};
  ucontext_t entry_ = {};
  std::byte* stacks_ = nullptr;
  std::deque<Fiber> fibers_;
  std::vector<Fiber*> free_;
  Fiber* active_ = nullptr;
  std::vector<State> states_;
  std::vector<Thread> threads_;
  std::vector<Warp> warps_;
  std::vector<float> shared_;
  std::array<bool, 3> any_ = {};  // by barriers, modulo 3
  unsigned at_block_ = 0;
  unsigned done_ = 0;
  const std::vector<unsigned>* turns_ = nullptr;
  size_t begun_ = 0;  // turns of threads that have begun
  size_t turn_ = 0;   // of the round
  const KernelCall* call_ = nullptr;
};

void Block::Wait(State state) {
  const unsigned thread = threadIdx.x;
  Fiber* fiber = active_;
  states_[thread] = state;
  threads_[thread].fiber = fiber;
  if (__builtin_setjmp(fiber->place.data()) == 0) {
    NextTurn();
  }
  threadIdx.x = thread;
}

void Block::NextTurn() {
  while (turn_ < begun_) {
    const unsigned thread = (*turns_)[turn_++];
    if (states_[thread] == State::kReady) {
      active_ = threads_[thread].fiber;
      JumpTo(active_->place);
    }
  }
  if (begun_ < turns_->size()) {
    Begin();
  }
  JumpTo(scheduler_);
}

// A stack takes the threads that have not begun.
void Block::Begin() {
  if (!free_.empty()) {
    active_ = free_.back();
    free_.pop_back();
    JumpTo(active_->place);
  }
  active_ = &NewFiber();
  getcontext(&entry_);
  entry_.uc_stack = {.ss_sp = active_->stack, .ss_flags = 0, .ss_size = active_->stack_bytes};
  entry_.uc_link = nullptr;
  makecontext(&entry_, &Block::Enter, 0);
  setcontext(&entry_);
  std::abort();
}

// On a fiber's stack, for ever: threads of this block, then of blocks to come.
void Block::RunThreads(Fiber& fiber) {
  for (;;) {
    while (turn_ == begun_ && begun_ < turns_->size()) {
      threadIdx.x = (*turns_)[begun_++];
      turn_ = begun_;
      call_->Run();
      states_[threadIdx.x] = State::kDone;
      ++done_;
    }
    free_.push_back(&fiber);
    if (__builtin_setjmp(fiber.place.data()) == 0) {
      NextTurn();
    }
  }
}

void Block::Enter() {
  running->RunThreads(*running->active_);
}

// Stacks lie in few large pages and begin at different lines of a cache: a switch from one to the
// next is a miss otherwise.
Fiber& Block::NewFiber() {
  constexpr size_t kColors = 64;
  constexpr size_t kColorBytes = size_t{5} * 64;
  if (stacks_ == nullptr) {
    void* stacks = mmap(nullptr,
                        kMaxThreads * kStackBytes + kLargePage,
                        PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                        -1,
                        0);
    if (stacks == MAP_FAILED) {
      std::perror("device code: stacks");
      std::abort();
    }
    const uintptr_t begin = reinterpret_cast<uintptr_t>(stacks);
    stacks_ = static_cast<std::byte*>(stacks) + (kLargePage - begin % kLargePage);
    madvise(stacks_, kMaxThreads * kStackBytes, MADV_HUGEPAGE);
  }
  const size_t index = fibers_.size();
  return fibers_.emplace_back(Fiber{.place = {},
                                    .stack = stacks_ + index * kStackBytes,
                                    .stack_bytes = kStackBytes - index % kColors * kColorBytes});
}

void Block::RunRound() {
  turn_ = 0;
  if (__builtin_setjmp(scheduler_.data()) == 0) {
    NextTurn();
  }
}

bool Block::Release() {
  if (done_ == threads_.size()) {
    return false;
  }
  if (at_block_ + done_ < threads_.size()) {
    Fault("threads wait at a barrier that others of their warp or block never reach");
  }
  std::replace(states_.begin(), states_.end(), State::kAtBlock, State::kReady);
  at_block_ = 0;
  return true;
}

void Block::Run(uint32_t shared_bytes, const std::vector<unsigned>& turns, const KernelCall& call) {
  threads_.assign(turns.size(), {});
  states_.assign(turns.size(), State::kReady);
  warps_.resize(turns.size() / kWarp);
  shared_.resize(shared_bytes / sizeof(float));
  std::memset(shared_.data(), kPoison, shared_.size() * sizeof(float));
  any_ = {};
  at_block_ = 0;
  done_ = 0;
  turns_ = &turns;
  begun_ = 0;
  call_ = &call;
  running = this;
  do {
    RunRound();
  } while (Release());
  running = nullptr;
}

unsigned Scattered(unsigned i) {
  return i * 2654435761u;
}

// Lanes of a warp have neighbouring turns.
std::vector<unsigned> TurnsOf(TurnOrder order, unsigned threads) {
  std::vector<unsigned> turns(threads);
  std::iota(turns.begin(), turns.end(), 0u);
  if (order == TurnOrder::kDescending) {
    std::reverse(turns.begin(), turns.end());
  } else if (order == TurnOrder::kScattered) {
    std::sort(turns.begin(), turns.end(), [](unsigned a, unsigned b) {
      return std::pair(Scattered(a / kWarp), Scattered(a % kWarp)) <
             std::pair(Scattered(b / kWarp), Scattered(b % kWarp));
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
  running->WaitForBlock();
  // All have read the result of the barrier before, and none is at the one after the next.
  any[(turn + 2) % 3] = false;
  return any[turn];
}

const uint64_t* GatherWarp(uint64_t value, ChangeLanes change) {
  const unsigned turn = running->current().warp_waits++ % 2;
  std::array<uint64_t, kWarp>& values = running->warp().values[turn];
  values[threadIdx.x % kWarp] = value;
  running->WaitForWarp(values.data(), change);
  return values.data();
}

uint64_t ExchangeInWarp(uint32_t mask, uint64_t value, unsigned lane) {
  if (mask != kAllLanes) {
    Fault("a part of a warp exchanges values, which is not emulated");
  }
  return GatherWarp(value, nullptr)[lane];
}

uint32_t BallotOfWarp(uint32_t mask, bool value) {
  if (mask != kAllLanes) {
    Fault("a part of a warp votes, which is not emulated");
  }
  return static_cast<uint32_t>(GatherWarp(value ? 1 : 0, [](uint64_t* lanes) {
    uint64_t votes = 0;
    for (unsigned lane = 0; lane < kWarp; ++lane) {
      votes |= lanes[lane] << lane;
    }
    std::fill_n(lanes, kWarp, votes);
  })[0]);
}

void SynchronizeWarp() {
  GatherWarp(0, nullptr);
}

void Trap() {
  Fault("trap");
}

void RunBlocks(const RavelCudaLaunch& launch, TurnOrder order, const KernelCall& call) {
  static Block& block = *new Block;  // its stacks last as long as the process
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
        block.Run(launch.shared_bytes, turns, call);
      }
    }
  }
}

}  // namespace ravel::kernels::cuda::simt
