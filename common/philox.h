#pragma once

// Philox4x32-10 [Salmon et al. 2011]: a counter-based generator. A draw is a function of (key,
// counter) and nothing else, so the same on every rank. Standard library only.

#include <array>
#include <cstdint>

namespace ravel {

using PhiloxBlock = std::array<uint32_t, 4>;

// Ten rounds; `key` low word first.
constexpr PhiloxBlock PhiloxDraw(uint64_t key, PhiloxBlock counter) {
  uint32_t key0 = static_cast<uint32_t>(key);
  uint32_t key1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53u} * counter[0];
    const uint64_t product1 = uint64_t{0xCD9E8D57u} * counter[2];
    counter = {static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ key0,
               static_cast<uint32_t>(product1),
               static_cast<uint32_t>(product0 >> 32) ^ counter[3] ^ key1,
               static_cast<uint32_t>(product0)};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return counter;
}

}  // namespace ravel
