#include "kernels/cuda_host/cuda_library.h"

#include <cstdlib>
#include <string>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/cuda/cuda_abi.h"

namespace ravel::kernels {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;

std::string Message(const absl::Status& status) {
  return std::string(status.message());
}

TEST(CudaLibraryTest, AbsentLibraryIsNamedAndNotFound) {
  const auto library = CudaLibrary::Open("/nonexistent/libravel_cuda.so");
  ASSERT_EQ(library.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(Message(library.status()),
              HasSubstr("no CUDA: /nonexistent/libravel_cuda.so not found"));
}

TEST(CudaLibraryTest, FileThatIsNoLibraryIsRefused) {
  const auto library = CudaLibrary::Open(RAVEL_KERNELS_FOLDER "/README.md");
  ASSERT_EQ(library.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(Message(library.status()), HasSubstr("cannot load"));
}

TEST(CudaLibraryTest, AnotherAbiVersionIsRefused) {
  const auto library = CudaLibrary::Open(RAVEL_OTHER_CUDA_LIBRARY);
  ASSERT_EQ(library.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(Message(library.status()),
              HasSubstr(absl::StrCat("has ABI version ",
                                     cuda::kCudaAbiVersion + 1,
                                     ", this binary needs ",
                                     cuda::kCudaAbiVersion)));
}

TEST(CudaLibraryTest, ReportsDevicesAndErrorTextOfTheLibrary) {
  const auto library = CudaLibrary::Open(RAVEL_FAKE_CUDA_LIBRARY);
  ASSERT_TRUE(library.ok()) << library.status();
  EXPECT_EQ(library->Versions()->driver, 13020);
  const auto devices = library->Devices();
  ASSERT_TRUE(devices.ok());
  ASSERT_EQ(devices->size(), 2u);
  EXPECT_EQ((*devices)[1].name, "Fake");
  EXPECT_EQ((*devices)[1].compute_minor, 1);
  EXPECT_TRUE(library->SelfTest(0).ok());
  // With what may be done about it.
  EXPECT_THAT(Message(library->SelfTest(1)),
              HasSubstr("self-test of device 1: no kernel image; this build has code for other "
                        "compute capabilities: CMAKE_CUDA_ARCHITECTURES (error 209"));
}

TEST(CudaLibraryTest, DefaultPathIsBesideTheBinaryUnlessTheEnvironmentNamesOne) {
  unsetenv("RAVEL_CUDA_LIBRARY");
  EXPECT_THAT(DefaultCudaLibraryPath(), EndsWith("/libravel_cuda.so"));
  setenv("RAVEL_CUDA_LIBRARY", "/some/where.so", 1);
  EXPECT_EQ(DefaultCudaLibraryPath(), "/some/where.so");
  unsetenv("RAVEL_CUDA_LIBRARY");
}

}  // namespace
}  // namespace ravel::kernels
