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

TEST(CryptoTest, UnhexTakesPairsOfDigitsOnly) {
  EXPECT_EQ(Unhex("007fFf"), std::string("\0\x7f\xff", 3));
  for (const char* text : {"", "0", "0g", "00 ", "0x"}) {
    EXPECT_EQ(Unhex(text), "") << text;
  }
}

// RFC 8032, 7.1: tests 1 and 3.
TEST(CryptoTest, Ed25519KnownAnswers) {
  struct Case {
    std::string key, public_key, message, signature;
  };
  for (const Case& known : {Case{"9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
                                 "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
                                 "",
                                 "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555"
                                 "fb8821590a33bacc61e3970"
                                 "1cf9b46bd25bf5f0595bbe24655141438e7a100b"},
                            Case{"c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7",
                                 "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
                                 "af82",
                                 "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac1"
                                 "8ff9b538d16f290ae67f760"
                                 "984dc6594a7c15e9716ed28dc027beceea1ec40a"}}) {
    const std::string key = Unhex(known.key);
    const std::string message = Unhex(known.message);
    EXPECT_EQ(Hex(PublicKeyOf(key)), known.public_key);
    const std::string signature = Sign(key, message);
    EXPECT_EQ(Hex(signature), known.signature);
    EXPECT_TRUE(IsSignature(PublicKeyOf(key), message, signature));
    EXPECT_FALSE(IsSignature(PublicKeyOf(key), message + "x", signature));
    EXPECT_FALSE(IsSignature(PublicKeyOf(RandomBytes(32)), message, signature));
    EXPECT_FALSE(IsSignature(PublicKeyOf(key), message, signature.substr(1)));
    EXPECT_FALSE(IsSignature(PublicKeyOf(key).substr(1), message, signature));
    EXPECT_FALSE(IsSignature("", message, ""));
  }
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
