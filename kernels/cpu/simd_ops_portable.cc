#include <cstring>

#include "kernels/cpu/simd_table.h"
#include "kernels/cpu/vector_portable.h"
#include "kernels/scalar/digest.h"

namespace ravel::kernels::cpu {
namespace {

uint64_t DigestWords(const uint32_t* words, int64_t count, uint64_t first_index) {
  uint64_t sum = 0;
  for (int64_t i = 0; i < count; ++i) {
    sum += scalar::DigestElement(first_index + static_cast<uint64_t>(i), words[i]);
  }
  return sum;
}

void Copy(void* to, const void* from, int64_t bytes) {
  std::memcpy(to, from, static_cast<size_t>(bytes));
}

constexpr SimdOps kOps = MakeSimdOps<PortableVector>({.digest_words = DigestWords,
                                                      .copy_bytes = Copy,
                                                      .update_block = UpdateBlockPortable,
                                                      .quantize = &kQuantizePortable});

}  // namespace

const SimdOps& PortableOps() {
  return kOps;
}

}  // namespace ravel::kernels::cpu
