#include "worker/trainer/subnormals.h"

#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace ravel::trainer {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr unsigned kFlushToZero = 0x8000;      // FTZ of MXCSR
constexpr unsigned kSubnormalsAreZero = 0x40;  // DAZ

// On a thread of its own, whose modes go with it.
absl::Status CheckedWith(unsigned modes) {
  absl::Status status;
  std::thread([&] {
    __builtin_ia32_ldmxcsr(__builtin_ia32_stmxcsr() | modes);
    status = CheckSubnormals();
  }).join();
  return status;
}

TEST(Subnormals, EachModeThatFlushesThemIsNamed) {
  EXPECT_TRUE(CheckedWith(0).ok()) << CheckedWith(0);
  const std::string written(CheckedWith(kFlushToZero).message());
  EXPECT_THAT(written,
              HasSubstr("subnormal numbers: this process writes zero in their place (FTZ)"));
  EXPECT_THAT(written, Not(HasSubstr("DAZ")));
  const std::string read(CheckedWith(kSubnormalsAreZero).message());
  EXPECT_THAT(read, HasSubstr("this process reads them as zero (DAZ)"));
  EXPECT_THAT(read, Not(HasSubstr("FTZ")));
  EXPECT_THAT(std::string(CheckedWith(kFlushToZero | kSubnormalsAreZero).message()),
              HasSubstr("(FTZ), and reads them as zero (DAZ)"));
}

// So that a check of the main thread, before any other is started, holds for all.
TEST(Subnormals, AThreadHasTheModesOfTheOneThatStartsIt) {
  unsigned inherited = 0;
  std::thread([&] {
    __builtin_ia32_ldmxcsr(__builtin_ia32_stmxcsr() | kFlushToZero);
    std::thread([&] { inherited = __builtin_ia32_stmxcsr(); }).join();
  }).join();
  EXPECT_NE(inherited & kFlushToZero, 0u);
  EXPECT_EQ(__builtin_ia32_stmxcsr() & (kFlushToZero | kSubnormalsAreZero), 0u);
}

}  // namespace
}  // namespace ravel::trainer
