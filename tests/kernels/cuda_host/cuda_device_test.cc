// Devices, memory, streams and events against a library whose device is the host's memory.

#include "kernels/cuda_host/cuda_device.h"

#include <cstdio>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "common/status.h"
#include "kernels/cuda/nccl_library.h"
#include "kernels/gemm.h"
#include "kernels/tree_reduce.h"

namespace ravel::kernels {
namespace {

using ::testing::HasSubstr;

class CudaDeviceTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto library = CudaLibrary::Open(RAVEL_FAKE_CUDA_LIBRARY);
    ASSERT_TRUE(library.ok()) << library.status();
    auto gpu = CudaGpu::Open(*library, 0);
    ASSERT_TRUE(gpu.ok()) << gpu.status();
    gpu_ = std::move(*gpu);
    auto scratch = gpu_->AllocateDevice(cuda::kScratchBytes);
    ASSERT_TRUE(scratch.ok());
    scratch_ = std::move(*scratch);
    auto stream = gpu_->MakeStream(CudaGpu::Priority::kHigh, scratch_.data());
    ASSERT_TRUE(stream.ok());
    stream_ = std::move(*stream);
  }

  std::unique_ptr<CudaGpu> gpu_;
  CudaMemory scratch_;
  std::unique_ptr<CudaStream> stream_;
};

TEST_F(CudaDeviceTest, DeviceWithoutCodeForItIsRefusedByItsSelfTest) {
  const auto second = CudaGpu::Open(gpu_->library(), 1);
  EXPECT_THAT(std::string(second.status().message()), HasSubstr("self-test of device 1"));
  const auto third = CudaGpu::Open(gpu_->library(), 2);
  EXPECT_THAT(std::string(third.status().message()), HasSubstr("device 2 of 2 does not exist"));
}

TEST_F(CudaDeviceTest, MemoryMovesAndIsFreedOnce) {
  auto memory = gpu_->AllocateDevice(1000);
  ASSERT_TRUE(memory.ok());
  void* data = memory->data();
  EXPECT_EQ(reinterpret_cast<uintptr_t>(data) % 256, 0u);
  CudaMemory owner = std::move(*memory);
  EXPECT_EQ(owner.data(), data);
  EXPECT_EQ(memory->data(), nullptr);
}

TEST_F(CudaDeviceTest, TooMuchMemoryNamesTheBytesTheDeviceAndWhatIsFree) {
  const auto memory = gpu_->AllocateDevice(int64_t{1} << 40);
  EXPECT_EQ(memory.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(IsDeviceError(Annotate(memory.status(), "arena")));
  EXPECT_THAT(std::string(memory.status().message()),
              HasSubstr("allocating 1099511627776 bytes on device 0, which has 17179869184 of "
                        "17179869184 bytes free: out of memory"));
}

TEST_F(CudaDeviceTest, TooMuchPinnedMemoryIsWantOfTheHosts) {
  const auto memory = gpu_->AllocatePinned(int64_t{1} << 40);
  EXPECT_EQ(memory.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_FALSE(IsDeviceError(memory.status()));
  EXPECT_THAT(std::string(memory.status().message()), HasSubstr("pinned host memory"));
}

TEST_F(CudaDeviceTest, ErrorsOfTheDeviceAreToldFromThoseOfPeers) {
  const auto of_device = [this](int32_t error) {
    return IsDeviceError(gpu_->library().ToStatus(error, "work"));
  };
  EXPECT_FALSE(of_device(0));
  EXPECT_TRUE(of_device(700));
  EXPECT_TRUE(of_device(10013));  // of cuBLASLt
  EXPECT_TRUE(of_device(cuda::kNcclErrors + cuda::kNcclUnhandledCudaError));
  EXPECT_TRUE(of_device(cuda::kNcclOtherError));  // there is no NCCL
  EXPECT_FALSE(of_device(cuda::kNcclErrors + cuda::kNcclSystemError));
  EXPECT_FALSE(of_device(cuda::kNcclErrors + cuda::kNcclRemoteError));
  EXPECT_TRUE(of_device(20000));
  EXPECT_FALSE(IsDeviceError(absl::UnavailableError("a peer")));
}

TEST_F(CudaDeviceTest, ErrorsOfAMachinesSetUpSayWhatHelps) {
  const absl::Status status = gpu_->library().ToStatus(802, "self-test of device 0");
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("self-test of device 0: invalid; nvidia-fabricmanager"));
  for (const int32_t error : {35, 46, 100, 209, 214, 700, 719, 803, 999}) {
    EXPECT_NE(CudaHint(error), "") << error;
  }
  EXPECT_EQ(CudaHint(1), "");
}

TEST_F(CudaDeviceTest, WhoOpensADeviceMaySayHowItsFailureEndsTheProcess) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  auto event = gpu_->MakeEvent();
  ASSERT_TRUE(event.ok());
  gpu_->set_on_failure([](const absl::Status& status) {
    std::fprintf(stderr, "told: %s\n", std::string(status.message()).c_str());
    _exit(IsDeviceError(status) ? 12 : 1);
  });
  EXPECT_EXIT(stream_->Wait(*event),
              ::testing::ExitedWithCode(12),
              "told: CUDA: waiting for an event on device 0: invalid");
}

TEST_F(CudaDeviceTest, EventsAreRecordedWaitedForAndTimed) {
  auto begin = gpu_->MakeEvent(CudaGpu::Timing::kOn);
  auto end = gpu_->MakeEvent(CudaGpu::Timing::kOn);
  ASSERT_TRUE(begin.ok() && end.ok());
  EXPECT_FALSE(end->MillisecondsSince(*begin).ok());
  stream_->Record(*begin);
  stream_->Record(*end);
  stream_->Wait(*end);
  EXPECT_TRUE(*end->Done());
  EXPECT_TRUE(stream_->Synchronize().ok());
  EXPECT_EQ(*end->MillisecondsSince(*begin), 1.5f);
}

TEST_F(CudaDeviceTest, AnErrorOfIssuedWorkEndsTheProcessNamingIt) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  auto event = gpu_->MakeEvent();
  ASSERT_TRUE(event.ok());
  EXPECT_DEATH(stream_->Wait(*event), "waiting for an event on device 0: invalid");
}

TEST_F(CudaDeviceTest, CopiesAndOpsReachTheDevice) {
  const std::vector<float> from = {1, 2, 3};
  std::vector<float> to(3);
  CopyBytes(*stream_, {.to = to.data(), .from = from.data(), .bytes = 12});
  EXPECT_EQ(to, from);
  TreeAdd(*stream_, {VectorView(to.data(), 3), VectorView(to.data(), 3), VectorView(to.data(), 3)});
}

TEST_F(CudaDeviceTest, FirstProposalServesUntilGemmsAreMeasured) {
  std::vector<float> a(4), b(4), c(4);
  const GemmArgs gemm = {.a = MatrixView(a.data(), 2, 2),
                         .b = MatrixView(b.data(), 2, 2),
                         .c = MatrixView(c.data(), 2, 2)};
  Gemm(*stream_, gemm);
  EXPECT_EQ(c[0], 1.0f);  // the library's first proposal
  ASSERT_EQ(gpu_->algorithms().size(), 1u);
  EXPECT_THAT(gpu_->algorithms().ToText(),
              HasSubstr("ravel-gemm-algorithms-2 Fake 9.0 132 cublasLt 130100\n2x2x2-nn-"));
  auto flush = gpu_->AllocateDevice(1024);
  ASSERT_TRUE(flush.ok());
  const CudaStream::Measuring measuring = {
      .flush = {std::span(static_cast<std::byte*>(flush->data()), 1024)}};
  stream_->MeasureGemms(&measuring);
  Gemm(*stream_, gemm);
  EXPECT_THAT(gpu_->algorithms().ToText(), HasSubstr(" 1500.000\n"));
  EXPECT_EQ(c[0], 1.0f);  // all took the same time: the first remains
}

TEST_F(CudaDeviceTest, ARehearsalListsGemmsAndDoesNothing) {
  std::vector<float> a(4, 2.0f), b(4), c(4);
  GemmArgs gemm = {.a = MatrixView(a.data(), 2, 2),
                   .b = MatrixView(b.data(), 2, 2),
                   .c = MatrixView(c.data(), 2, 2)};
  stream_->UseMultiprocessors(100);
  CudaStream::GemmRequests gemms;
  stream_->Rehearse(&gemms);
  Gemm(*stream_, gemm);
  Gemm(*stream_, gemm);
  gemm.output = Output::kAccumulate;
  Gemm(*stream_, gemm);
  CopyBytes(*stream_, {.to = c.data(), .from = a.data(), .bytes = 16});
  stream_->FillBytes(c.data(), 1, 16);
  stream_->Rehearse(nullptr);
  ASSERT_EQ(gemms.size(), 2u);
  EXPECT_EQ(gemms.begin()->first, "2x2x2-nn-f32-f32-b0-s2,2,2-a8,8,8-m100");
  EXPECT_EQ(gemms.begin()->second.a, a.data());
  EXPECT_EQ(gpu_->algorithms().size(), 0u);
  EXPECT_EQ(c, std::vector<float>(4));
  Gemm(*stream_, gemm);
  EXPECT_EQ(gpu_->algorithms().size(), 1u);
}

}  // namespace
}  // namespace ravel::kernels
