// What a trainer says, and ends with, where its device or the device's libraries are not as a job
// needs them. On emulated devices.

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <utility>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "kernels/cuda_host/cuda_device.h"
#include "tests/testing/fake_supervisor.h"
#include "tests/testing/training_cases.h"
#include "worker/trainer/exit_code.h"

namespace ravel::trainer {
namespace {

using ::testing::HasSubstr;

class DeviceStart : public ::testing::Test {
 protected:
  DeviceStart() {
    setenv("RAVEL_CUDA_LIBRARY", RAVEL_EMULATED_CUDA_LIBRARY, 1);
    std::filesystem::remove_all(folder_);
    args_.spec = CaseJob("odd_tied", folder_);
    args_.spec.cpu_devices = false;
    args_.spec.steps = 2;
    args_.spec.allow_slow_kernels = false;
    args_.checkpoint_root = folder_ + "/store";
    args_.transport = "local";
  }
  ~DeviceStart() override { std::filesystem::remove_all(folder_); }

  const std::string folder_ = absl::StrCat(::testing::TempDir(), "/ravel_device_start_", getpid());
  EpochArgs args_;
};

TEST_F(DeviceStart, ADeviceThatOthersHoldIsNamedWithWhatIsFreeAndThePlansFigure) {
  const auto library = kernels::CudaLibrary::Open(RAVEL_EMULATED_CUDA_LIBRARY);
  ASSERT_TRUE(library.ok()) << library.status();
  const auto gpu = kernels::CudaGpu::Open(*library, 0);
  ASSERT_TRUE(gpu.ok()) << gpu.status();
  constexpr int64_t kLeft = 64 << 10;
  const auto others = (*gpu)->AllocateDevice(*(*gpu)->FreeBytes() - kLeft);
  ASSERT_TRUE(others.ok()) << others.status();
  const EpochOutcome outcome = RunEpoch(args_);
  ASSERT_EQ(outcome.results.size(), 1u);
  EXPECT_EQ(CodeOf(outcome.results[0]), ExitCode::kOutOfMemory);
  EXPECT_EQ(ReasonOf(outcome.results[0]), "DeviceOutOfMemory");
  const std::string text(outcome.results[0].message());
  EXPECT_THAT(text, HasSubstr("the plan's "));
  EXPECT_THAT(text, HasSubstr("of each rank do not fit what the device has left: "));
  EXPECT_THAT(text, HasSubstr("on device 0, which has 65536 of 8589934592 bytes free"));
}

TEST_F(DeviceStart, ADeviceThatIsNotThereIsTheDevicesError) {
  setenv("RAVEL_CUDA_LIBRARY", RAVEL_EMULATED_CUDA_LIBRARY, 1);
  args_.ranks = 1;
  args_.gpu = 7;
  const EpochOutcome outcome = RunEpoch(args_);
  EXPECT_EQ(ReasonOf(outcome.results[0]), "DeviceError");
  EXPECT_THAT(std::string(outcome.results[0].message()),
              ::testing::MatchesRegex(".*device 7 of [0-9] does not exist.*"));
}

// In a process of its own each: an emulated library reads its settings once.
class SlowKernels : public DeviceStart {
 protected:
  // Ends the process with the exit code of an epoch in which `setting` hides a library.
  void TrainWithout(const char* setting) {
    setenv(setting, "0", 1);
    const EpochOutcome outcome = RunEpoch(args_);
    std::fprintf(stderr, "%s\n", std::string(outcome.results[0].message()).c_str());
    _exit(outcome.results[0].ok() ? 0 : static_cast<int>(CodeOf(outcome.results[0])));
  }
};

TEST_F(SlowKernels, Bf16WithoutItsLibrariesIsRefusedWithWhereTheyWereSought) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  args_.spec.compute = plan::ComputeType::kBF16;
  for (const auto& [setting, message] :
       {std::pair{"RAVEL_EMULATED_CUBLASLT",
                  "libcublasLt is hidden.*spec.devices.allowSlowKernels"},
        std::pair{"RAVEL_EMULATED_CUDNN", "libcudnn is hidden.*spec.devices.allowSlowKernels"}}) {
    EXPECT_EXIT(TrainWithout(setting),
                ::testing::ExitedWithCode(static_cast<int>(ExitCode::kDevice)),
                message);
  }
}

TEST_F(SlowKernels, TheyTrainWhereTheJobAllowsThemOrComputesInFp32) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto done = ::testing::ExitedWithCode(0);
  EXPECT_EXIT(TrainWithout("RAVEL_EMULATED_CUDNN"), done, "");
  args_.spec.compute = plan::ComputeType::kBF16;
  args_.spec.allow_slow_kernels = true;
  EXPECT_EXIT(TrainWithout("RAVEL_EMULATED_CUBLASLT"), done, "");
}

// In a process of its own: NCCL is looked for once.
TEST_F(DeviceStart, TwoRanksWithoutNcclNameWhereItWasSought) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto run = [this] {
    setenv("RAVEL_NCCL_LIBRARY", "/nonexistent/libnccl.so.2", 1);
    args_.transport = "nccl";
    args_.ranks = 2;
    const EpochOutcome outcome = RunEpoch(args_);
    for (const absl::Status& result : outcome.results) {
      std::fprintf(stderr, "%s\n", std::string(result.message()).c_str());
      if (ReasonOf(result) != "DeviceError") {
        _exit(1);
      }
    }
    _exit(static_cast<int>(CodeOf(outcome.results[0])));
  };
  EXPECT_EXIT(run(),
              ::testing::ExitedWithCode(static_cast<int>(ExitCode::kDevice)),
              "2 ranks on GPUs need NCCL: .*/nonexistent/libnccl.so.2");
}

TEST(ExitCodes, AnUnmarkedErrorOfTheDeviceIsNotThatOfAPeer) {
  const auto library = kernels::CudaLibrary::Open(RAVEL_EMULATED_CUDA_LIBRARY);
  ASSERT_TRUE(library.ok()) << library.status();
  const absl::Status ecc = Annotate(library->ToStatus(214, "asking an event"), "step 7");
  EXPECT_EQ(CodeOf(ecc), ExitCode::kDevice);
  EXPECT_EQ(ReasonOf(ecc), "DeviceError");
  EXPECT_THAT(std::string(ecc.message()), HasSubstr("nvidia-smi -q -d ECC"));
  EXPECT_EQ(ReasonOf(library->ToStatus(2, "allocating")), "DeviceOutOfMemory");
  EXPECT_EQ(ReasonOf(WithCode(absl::ResourceExhaustedError("host"), ExitCode::kOutOfMemory)),
            "HostOutOfMemory");
  EXPECT_EQ(ReasonOf(absl::UnavailableError("a peer is gone")), "CommError");
  EXPECT_EQ(CodeOf(Annotate(WithCode(absl::UnavailableError("x"), ExitCode::kStore), "there")),
            ExitCode::kStore);
}

}  // namespace
}  // namespace ravel::trainer
