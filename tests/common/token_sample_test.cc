#include "common/token_sample.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace ravel {
namespace {

std::vector<int32_t> Counted(int64_t tokens) {
  std::vector<int32_t> ids(static_cast<size_t>(tokens));
  std::iota(ids.begin(), ids.end(), 0);
  return ids;
}

ReadIdsFunction From(const std::vector<int32_t>& ids) {
  return [&ids](int64_t begin, std::span<int32_t> out) {
    EXPECT_GE(begin, 0);
    EXPECT_LE(begin + std::ssize(out), std::ssize(ids));
    std::copy_n(ids.begin() + begin, out.size(), out.begin());
    return absl::OkStatus();
  };
}

std::string DigestOf(const std::vector<int32_t>& ids) {
  return TokenSampleDigest(std::ssize(ids), From(ids)).value_or("");
}

// SHA-256 by Python's hashlib: count, then ids at i * (tokens - 64) // 15, all little-endian.
// gen: python3 -c 'import hashlib,struct; n=100000; h=hashlib.sha256(struct.pack("<q",n));
//   [h.update(struct.pack("<64i",*range(p,p+64))) for p in [i*(n-64)//15 for i in range(16)]];
//   print(h.hexdigest())'
TEST(TokenSampleTest, TheDigestIsThatOfAnotherImplementation) {
  EXPECT_EQ(DigestOf(Counted(100'000)),
            "c4fe90fb372782e7bf23d67b63d6fd3d8e258ca00ae19628ed8ba66447d95bc4");
}

TEST(TokenSampleTest, FirstAndLastIdsAndThoseBetweenCount) {
  for (const int64_t tokens : {1, 2, 63, 64, 65, 127, 1000, 4096, 4097, 100'000}) {
    const std::vector<int32_t> ids = Counted(tokens);
    const std::string digest = DigestOf(ids);
    ASSERT_EQ(digest.size(), 64u) << tokens;
    EXPECT_NE(DigestOf(Counted(tokens + 1)), digest) << tokens;
    for (const size_t at : {size_t{0}, ids.size() - 1}) {
      std::vector<int32_t> other = ids;
      other[at] ^= 1;
      EXPECT_NE(DigestOf(other), digest) << tokens << " at " << at;
    }
    std::vector<int32_t> turned = ids;
    std::rotate(turned.begin(), turned.begin() + (tokens > 1 ? 1 : 0), turned.end());
    EXPECT_EQ(DigestOf(turned) == digest, tokens == 1) << tokens;
  }
  EXPECT_EQ(DigestOf({}).size(), 64u);
}

TEST(TokenSampleTest, PlacesAreSpreadOverAnyLength) {
  constexpr int64_t kTokens = int64_t{1} << 45;
  std::set<int64_t> places;
  const auto read = [&](int64_t begin, std::span<int32_t> ids) {
    EXPECT_EQ(std::ssize(ids), kSampleIds);
    EXPECT_LE(begin + kSampleIds, kTokens);
    places.insert(begin);
    return absl::OkStatus();
  };
  ASSERT_TRUE(TokenSampleDigest(kTokens, read).ok());
  EXPECT_EQ(std::ssize(places), kSamplePlaces);
  EXPECT_EQ(*places.begin(), 0);
  EXPECT_EQ(*places.rbegin(), kTokens - kSampleIds);
}

TEST(TokenSampleTest, AnErrorOfTheReaderIsTheResult) {
  const auto fail = [](int64_t, std::span<int32_t>) { return absl::DataLossError("gone"); };
  EXPECT_EQ(TokenSampleDigest(5, fail).status(), absl::DataLossError("gone"));
}

}  // namespace
}  // namespace ravel
