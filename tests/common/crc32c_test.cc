#include "common/crc32c.h"

#include <cstring>
#include <random>
#include <string>

#include <gtest/gtest.h>

namespace ravel {
namespace {

TEST(Crc32cTest, KnownAnswers) {  // RFC 3720, B.4
  EXPECT_EQ(Crc32c(0, "123456789", 9), 0xe3069283u);
  EXPECT_EQ(Crc32c(0, std::string(32, '\0').data(), 32), 0x8a9136aau);
  EXPECT_EQ(Crc32c(0, std::string(32, '\xff').data(), 32), 0x62a8ab43u);
  EXPECT_EQ(Crc32c(0, nullptr, 0), 0u);
}

TEST(Crc32cTest, HardwareAndPortableAgreeOnEveryLengthAndAlignment) {
  std::mt19937_64 random(20240607);
  std::string data(40000, '\0');
  for (char& c : data) {
    c = static_cast<char>(random());
  }
  for (size_t length = 0; length < 200; ++length) {
    for (size_t offset = 0; offset < 9; ++offset) {
      EXPECT_EQ(Crc32c(7, data.data() + offset, length),
                Crc32cPortable(7, data.data() + offset, length));
    }
  }
  for (const size_t length : {12287u, 12288u, 12289u, 24576u, 39990u}) {
    EXPECT_EQ(Crc32c(0, data.data() + 3, length), Crc32cPortable(0, data.data() + 3, length))
        << length;
  }
}

TEST(Crc32cTest, PartsCombineAndContinue) {
  std::string data(30000, '\0');
  for (size_t i = 0; i < data.size(); ++i) {
    data[i] = static_cast<char>(i * 131 + i / 256);
  }
  const uint32_t whole = Crc32c(0, data.data(), data.size());
  for (const size_t cut : {0u, 1u, 4096u, 12345u, 30000u}) {
    const uint32_t a = Crc32c(0, data.data(), cut);
    const uint32_t b = Crc32c(0, data.data() + cut, data.size() - cut);
    EXPECT_EQ(Crc32cCombine(a, b, data.size() - cut), whole) << cut;
    EXPECT_EQ(Crc32c(a, data.data() + cut, data.size() - cut), whole) << cut;
  }
}

}  // namespace
}  // namespace ravel
