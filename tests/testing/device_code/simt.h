#pragma once

// Names of CUDA C++ for kernels compiled for the host: included before each .cu file. A thread of a
// block is a fiber; one launch runs at a time. simt.cc says how threads take turns.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#define __global__
#define __device__
#define __host__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static  // a block at a time in the whole process

namespace ravel::kernels::cuda::simt {

struct Dimensions {
  unsigned x = 1;
  unsigned y = 1;
  unsigned z = 1;
};

float* DynamicShared();

// Waits until all threads of the block that have not ended are here, too; whether any of them gave
// true.
bool SynchronizeBlock(bool value);
// Waits until all 32 threads of the warp are here, too; then, the values they gave, which the last
// of them has changed by `change`, unless it is null.
using ChangeLanes = void (*)(uint64_t* lanes);
const uint64_t* GatherWarp(uint64_t value, ChangeLanes change);
// The same; the value of a lane.
uint64_t ExchangeInWarp(uint32_t mask, uint64_t value, unsigned lane);
// The lanes that gave true.
uint32_t BallotOfWarp(uint32_t mask, bool value);
void SynchronizeWarp();
[[noreturn]] void Trap();

}  // namespace ravel::kernels::cuda::simt

extern constinit ravel::kernels::cuda::simt::Dimensions threadIdx;
extern constinit ravel::kernels::cuda::simt::Dimensions blockIdx;
extern constinit ravel::kernels::cuda::simt::Dimensions blockDim;
extern constinit ravel::kernels::cuda::simt::Dimensions gridDim;

inline void __syncthreads() {
  ravel::kernels::cuda::simt::SynchronizeBlock(false);
}
inline int __syncthreads_or(int value) {
  return ravel::kernels::cuda::simt::SynchronizeBlock(value != 0) ? 1 : 0;
}
inline void __syncwarp() {
  ravel::kernels::cuda::simt::SynchronizeWarp();
}
template <typename T>
inline T __shfl_xor_sync(uint32_t mask, T value, int step) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  const unsigned lane = threadIdx.x % 32 ^ static_cast<unsigned>(step);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = ravel::kernels::cuda::simt::ExchangeInWarp(mask, bits, lane);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}
inline uint32_t __ballot_sync(uint32_t mask, bool value) {
  return ravel::kernels::cuda::simt::BallotOfWarp(mask, value);
}
inline int __popc(uint32_t x) {
  return std::popcount(x);
}
inline float __uint_as_float(uint32_t x) {
  return std::bit_cast<float>(x);
}
inline uint32_t __float_as_uint(float x) {
  return std::bit_cast<uint32_t>(x);
}
inline double __longlong_as_double(int64_t x) {
  return std::bit_cast<double>(x);
}
[[noreturn]] inline void __trap() {
  ravel::kernels::cuda::simt::Trap();
}
// Threads of all blocks run one after another.
inline unsigned long long atomicAdd(unsigned long long* to, unsigned long long value) {
  const unsigned long long before = *to;
  *to = before + value;
  return before;
}
inline uint32_t atomicMax(uint32_t* to, uint32_t value) {
  const uint32_t before = *to;
  *to = before < value ? value : before;
  return before;
}
inline uint32_t atomicOr(uint32_t* to, uint32_t value) {
  const uint32_t before = *to;
  *to = before | value;
  return before;
}
using std::max;
using std::min;
