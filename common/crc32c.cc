#include "common/crc32c.h"

#include <array>
#include <cstring>

namespace ravel {
namespace {

constexpr uint32_t kPolynomial = 0x82f63b78u;  // reflected

using ByteTable = std::array<uint32_t, 256>;

// Sums of single bytes, and of bytes followed by 1 to 7 zeros: eight bytes a step.
constexpr std::array<ByteTable, 8> MakeTables() {
  std::array<ByteTable, 8> tables = {};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) {
      crc = (crc >> 1) ^ ((crc & 1u) != 0 ? kPolynomial : 0u);
    }
    tables[0][byte] = crc;
  }
  for (size_t t = 1; t < 8; ++t) {
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t crc = tables[t - 1][byte];
      tables[t][byte] = (crc >> 8) ^ tables[0][crc & 0xffu];
    }
  }
  return tables;
}
constexpr std::array<ByteTable, 8> kTables = MakeTables();

// a * b modulo the polynomial, reflected: bit 31 is x^0.
constexpr uint32_t Multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t bit = 0x80000000u; bit != 0; bit >>= 1) {
    if ((a & bit) != 0) {
      product ^= b;
    }
    b = (b >> 1) ^ ((b & 1u) != 0 ? kPolynomial : 0u);
  }
  return product;
}

// x^(8 * bytes) modulo the polynomial: multiplying by it appends that many zero bytes.
constexpr uint32_t PowerOfBytes(uint64_t bytes) {
  uint32_t power = 0x80000000u;   // x^0
  uint32_t square = 0x00800000u;  // x^8
  for (; bytes != 0; bytes >>= 1) {
    if ((bytes & 1u) != 0) {
      power = Multiply(power, square);
    }
    square = Multiply(square, square);
  }
  return power;
}

constexpr size_t kStreamBytes = 4096;

// Appends kStreamBytes zeros by four lookups.
constexpr std::array<ByteTable, 4> MakeShiftTables() {
  const uint32_t power = PowerOfBytes(kStreamBytes);
  std::array<ByteTable, 4> tables = {};
  for (uint32_t t = 0; t < 4; ++t) {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      tables[t][byte] = Multiply(power, byte << (8 * t));
    }
  }
  return tables;
}
constexpr std::array<ByteTable, 4> kShiftTables = MakeShiftTables();

uint64_t Shift(uint64_t crc) {
  return kShiftTables[0][crc & 0xffu] ^ kShiftTables[1][(crc >> 8) & 0xffu] ^
         kShiftTables[2][(crc >> 16) & 0xffu] ^ kShiftTables[3][(crc >> 24) & 0xffu];
}

uint64_t Load(const uint8_t* p) {
  uint64_t word = 0;
  std::memcpy(&word, p, sizeof(word));
  return word;
}

// Three independent streams hide the instruction's latency.
__attribute__((target("sse4.2"))) uint32_t Crc32cHardware(uint32_t start,
                                                          const uint8_t* p,
                                                          size_t size) {
  uint64_t crc = ~start;
  while (size >= 3 * kStreamBytes) {
    uint64_t b = 0;
    uint64_t c = 0;
    for (size_t i = 0; i < kStreamBytes; i += 8) {
      crc = __builtin_ia32_crc32di(crc, Load(p + i));
      b = __builtin_ia32_crc32di(b, Load(p + kStreamBytes + i));
      c = __builtin_ia32_crc32di(c, Load(p + 2 * kStreamBytes + i));
    }
    crc = Shift(Shift(crc) ^ b) ^ c;
    p += 3 * kStreamBytes;
    size -= 3 * kStreamBytes;
  }
  for (; size >= 8; p += 8, size -= 8) {
    crc = __builtin_ia32_crc32di(crc, Load(p));
  }
  uint32_t tail = static_cast<uint32_t>(crc);
  for (; size > 0; ++p, --size) {
    tail = __builtin_ia32_crc32qi(tail, *p);
  }
  return ~tail;
}

}  // namespace

uint32_t Crc32cPortable(uint32_t start, const void* data, size_t size) {
  const auto* p = static_cast<const uint8_t*>(data);
  uint32_t crc = ~start;
  for (; size >= 8; p += 8, size -= 8) {
    const uint64_t word = Load(p) ^ crc;
    crc = 0;
    for (size_t i = 0; i < 8; ++i) {
      crc ^= kTables[7 - i][(word >> (8 * i)) & 0xffu];
    }
  }
  for (; size > 0; ++p, --size) {
    crc = (crc >> 8) ^ kTables[0][(crc ^ *p) & 0xffu];
  }
  return ~crc;
}

uint32_t Crc32c(uint32_t crc, const void* data, size_t size) {
  static const bool hardware = __builtin_cpu_supports("sse4.2") != 0;
  return hardware ? Crc32cHardware(crc, static_cast<const uint8_t*>(data), size)
                  : Crc32cPortable(crc, data, size);
}

uint32_t Crc32cCombine(uint32_t crc_a, uint32_t crc_b, uint64_t size_b) {
  return Multiply(PowerOfBytes(size_b), crc_a) ^ crc_b;
}

}  // namespace ravel
