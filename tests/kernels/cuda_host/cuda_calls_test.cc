// Calls of a stream that are kept, and what is done of calls that follow them.

// Arguments of kernels are compared byte by byte: none has padding.
#pragma GCC diagnostic push
#pragma GCC diagnostic error "-Wpadded"
#include "kernels/cuda/kernel_params.h"
#pragma GCC diagnostic pop

#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/cuda_host/cuda_calls.h"
#include "kernels/cuda_host/cuda_device.h"

namespace ravel::kernels {
namespace {

using ::testing::HasSubstr;

class CudaCallsTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {  // as the emulated device's own tests, whichever come first
    setenv("RAVEL_EMULATED_DEVICES", "2", 1);
    setenv("RAVEL_EMULATED_MEMORY_BYTES", "268435456", 1);
    setenv("RAVEL_EMULATED_DELAY_SEED", "5", 1);
  }
  void SetUp() override {
    const auto library = CudaLibrary::Open(RAVEL_EMULATED_CUDA_LIBRARY);
    ASSERT_TRUE(library.ok()) << library.status();
    gpu_ = *CudaGpu::Open(*library, 0);
    for (auto& stream : streams_) {
      stream = *gpu_->MakeCopyStream(CudaGpu::Priority::kNormal);
    }
    event_ = *gpu_->MakeEvent();
    memory_ = *gpu_->AllocatePinned(kBytes);
    std::memset(memory_.data(), 0, kBytes);
  }
  void SetLog(CudaCallLog* log) {
    for (const auto& stream : streams_) {
      stream->set_log(log);
    }
  }
  // Fills a part of the memory by each of two streams, the second after the first.
  void Fill(uint8_t first, uint8_t second) {
    streams_[0]->FillBytes(Part(0), first, kPart);
    streams_[0]->Record(event_);
    streams_[1]->Wait(event_);
    streams_[1]->FillBytes(Part(1), second, kPart);
  }
  std::string Bytes() {
    EXPECT_TRUE(streams_[0]->Synchronize().ok());
    EXPECT_TRUE(streams_[1]->Synchronize().ok());
    return {*Part(0), *Part(1), *Part(2)};
  }
  char* Part(int64_t index) { return static_cast<char*>(memory_.data()) + index * kPart; }
  // The log holds Fill('a', 'b'), which is done.
  void RecordFill() {
    log_.Record();
    SetLog(&log_);
    Fill('a', 'b');
    SetLog(nullptr);
    ASSERT_TRUE(log_.Finish());
    EXPECT_EQ(log_.calls().size(), 4u);
    ASSERT_EQ(Bytes(), std::string("ab\0", 3));
    calls_ = log_.calls();
    std::memset(memory_.data(), 0, kBytes);
  }
  bool Follow(const std::function<void()>& issue) {
    log_.Follow(calls_);
    SetLog(&log_);
    issue();
    SetLog(nullptr);
    return log_.Finish();
  }

  static constexpr int64_t kPart = 64;
  static constexpr int64_t kBytes = 3 * kPart;
  std::unique_ptr<CudaGpu> gpu_;
  std::unique_ptr<CudaStream> streams_[2];
  CudaEvent event_;
  CudaMemory memory_;
  CudaCallLog log_;
  CudaCalls calls_;
};

TEST_F(CudaCallsTest, TheSameCallsAreNotDone) {
  RecordFill();
  EXPECT_TRUE(Follow([&] { Fill('a', 'b'); }));
  EXPECT_EQ(Bytes(), std::string(3, '\0'));
}

TEST_F(CudaCallsTest, WithTheFirstThatDiffersAllAreDone) {
  RecordFill();
  EXPECT_FALSE(Follow([&] { Fill('a', 'c'); }));
  EXPECT_THAT(log_.difference(), HasSubstr("a fill is new, or has other arguments"));
  EXPECT_EQ(Bytes(), std::string("ac\0", 3));
}

TEST_F(CudaCallsTest, MoreCallsAndFewerAreDoneAsTheyCome) {
  RecordFill();
  EXPECT_FALSE(Follow([&] {
    Fill('a', 'b');
    streams_[1]->FillBytes(Part(2), 'd', kPart);
  }));
  EXPECT_EQ(Bytes(), "abd");
  std::memset(memory_.data(), 0, kBytes);
  EXPECT_FALSE(Follow([&] { streams_[0]->FillBytes(Part(0), 'a', kPart); }));
  EXPECT_THAT(log_.difference(), HasSubstr("ends before recording an event"));
  EXPECT_EQ(Bytes(), std::string("a\0\0", 3));
}

TEST_F(CudaCallsTest, TheSameCallOnAnotherStreamDiffers) {
  RecordFill();
  EXPECT_FALSE(Follow([&] { streams_[1]->FillBytes(Part(0), 'a', kPart); }));
  EXPECT_EQ(Bytes(), std::string("a\0\0", 3));
}

// The host would wait for what was not done, or take what is not there.
TEST_F(CudaCallsTest, AWaitOfTheHostIsRefusedByName) {
  log_.Record();
  SetLog(&log_);
  Fill('a', 'b');
  EXPECT_TRUE(streams_[1]->Synchronize().ok());
  SetLog(nullptr);
  EXPECT_FALSE(log_.Finish());
  EXPECT_EQ(log_.difference(), "a wait of the host for a stream");

  RecordFill();
  std::string seen;
  EXPECT_FALSE(Follow([&] {
    streams_[0]->FillBytes(Part(0), 'a', kPart);
    EXPECT_TRUE(streams_[0]->Synchronize().ok());
    seen = *Part(0);
  }));
  EXPECT_EQ(seen, "a");
}

}  // namespace
}  // namespace ravel::kernels
