#include "common/crypto.h"

#include <set>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace ravel {
namespace {

TEST(CryptoTest, Sha256KnownAnswers) {  // FIPS 180-4 examples
  EXPECT_EQ(Hex(Sha256("")), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(Hex(Sha256("abc")), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

TEST(CryptoTest, PartsHashLikeTheWhole) {
  Sha256Stream stream;
  stream.Update("a");
  stream.Update("");
  stream.Update("bc");
  EXPECT_EQ(stream.Finish(), Sha256("abc"));
}

TEST(CryptoTest, Hex) {
  EXPECT_EQ(Hex(std::string("\0\x7f\xff", 3)), "007fff");
}

TEST(CryptoTest, RandomIdentifiersHaveTheirFormAndDiffer) {
  std::set<std::string> seen;
  for (int i = 0; i < 100; ++i) {
    const std::string uuid = RandomUuid();
    EXPECT_THAT(uuid,
                ::testing::MatchesRegex(
                    "[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"));
    EXPECT_TRUE(seen.insert(uuid).second);
  }
  EXPECT_EQ(RandomHex(8).size(), 16u);
  EXPECT_EQ(RandomBytes(5).size(), 5u);
}

}  // namespace
}  // namespace ravel
