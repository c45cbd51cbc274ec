// The emulated devices (tests/testing/emulated_cuda) find what they are for: stray pointers,
// missing events, launches that do not fit, memory that does not live long enough.

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/attention.h"
#include "kernels/cuda/kernel_params.h"
#include "kernels/cuda_host/cuda_device.h"
#include "kernels/gemm.h"
#include "tests/kernels/cuda_host/library_path.h"
#include "tests/testing/required.h"

namespace ravel::kernels::cuda {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kCount = 1000;
constexpr uint64_t kBytes = kCount * sizeof(float);

class EmulatedDeviceTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {  // read when the library is first used
    setenv("RAVEL_EMULATED_DEVICES", "2", 1);
    setenv("RAVEL_EMULATED_MEMORY_BYTES", "268435456", 1);
    setenv("RAVEL_EMULATED_DELAY_SEED", "5", 1);
    setenv("RAVEL_EMULATED_ATTENTION", "device_code", 1);
  }
  void SetUp() override {
    absl::StatusOr<CudaLibrary> library = CudaLibrary::Open(RAVEL_EMULATED_CUDA_LIBRARY);
    ASSERT_TRUE(library.ok()) << library.status();
    library_ = std::make_unique<CudaLibrary>(*library);
  }
  void TearDown() override {
    for (void* stream : streams_) {
      f().stream_destroy(stream);
    }
    for (const auto& [memory, device] : memories_) {
      f().device_free(device, memory);
    }
  }

  const RavelCudaFunctions& f() const { return library_->functions(); }
  std::string TextOf(int32_t error) const { return error == 0 ? "" : f().error_text(error); }

  void* Allocate(uint64_t bytes, int32_t device = 0) {
    void* memory = nullptr;
    EXPECT_EQ(f().device_allocate(device, bytes, &memory), 0);
    memories_[memory] = device;
    return memory;
  }
  float* Floats(int64_t count = kCount, int32_t device = 0) {
    return static_cast<float*>(Allocate(static_cast<uint64_t>(count) * sizeof(float), device));
  }
  void Free(void* memory) {
    EXPECT_EQ(f().device_free(memories_[memory], memory), 0);
    memories_.erase(memory);
  }
  void* Stream(int32_t device = 0) {
    void* stream = nullptr;
    EXPECT_EQ(f().stream_create(device, 0, &stream), 0);
    streams_.push_back(stream);
    return stream;
  }
  void* Event(bool timed = false) {
    void* event = nullptr;
    EXPECT_EQ(f().event_create(0, timed ? 1 : 0, &event), 0);
    return event;
  }

  template <typename Params>
  std::string Launch(void* stream, Kernel kernel, Params params, Variant variant = kF32Scalar) {
    const RavelCudaLaunch launch = {.kernel = KernelId(kernel, variant),
                                    .grid = {1, 1, 1},
                                    .block = kFlatThreads,
                                    .shared_bytes = 0,
                                    .params = &params,
                                    .param_bytes = sizeof(params)};
    const std::string text = TextOf(f().launch(stream, &launch));
    std::memset(static_cast<void*>(&params), 0xAA, sizeof(params));  // the library has its copy
    return text;
  }
  // out = a + b
  std::string Add(void* stream, const float* a, const float* b, float* out, int64_t n = kCount) {
    return Launch(
        stream, Kernel::kTreeAdd, TreeAddParams{.a = a, .b = b, .out = out, .elements = n});
  }

  std::unique_ptr<CudaLibrary> library_;
  std::map<void*, int32_t> memories_;
  std::vector<void*> streams_;
};

TEST_F(EmulatedDeviceTest, MemoryHoldsNanAndBeginsAt256BytesAndAtNoMore) {
  bool at_more = true;
  for (int i = 0; i < 4; ++i) {
    const float* memory = Floats(kCount + 64 * i);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(memory) % 256, 0u);
    at_more = at_more && reinterpret_cast<uintptr_t>(memory) % 512 == 0;
    EXPECT_TRUE(std::isnan(memory[0]) && std::isnan(memory[kCount - 1]));
  }
  EXPECT_FALSE(at_more);
}

TEST_F(EmulatedDeviceTest, MemoryOfADeviceIsLimitedAndCounted) {
  uint64_t before = 0, after = 0, total = 0;
  ASSERT_EQ(f().memory_info(1, &before, &total), 0);
  EXPECT_EQ(total, uint64_t{268435456});
  void* memory = nullptr;
  EXPECT_EQ(TextOf(f().device_allocate(1, total + 1, &memory)), "out of memory");
  memory = Allocate(1 << 20, 1);
  ASSERT_EQ(f().memory_info(1, &after, &total), 0);
  EXPECT_EQ(before - after, uint64_t{1} << 20);
  EXPECT_EQ(TextOf(f().device_allocate(2, 1, &memory)), "invalid device ordinal");
  EXPECT_EQ(f().device_free(1, &before), 1);
}

TEST_F(EmulatedDeviceTest, MemoryGoesByItsOwnDeviceOnAnyThread) {
  void* memory = Allocate(64, 1);
  EXPECT_EQ(TextOf(f().device_free(0, memory)), "invalid argument");
  uint64_t before[2] = {}, after[2] = {}, total = 0;
  std::vector<std::unique_ptr<CudaGpu>> gpus;
  for (const int32_t device : {0, 1}) {
    ASSERT_EQ(f().memory_info(device, &before[device], &total), 0);
    gpus.push_back(*CudaGpu::Open(*library_, device));
  }
  std::vector<CudaMemory> of_both;
  for (const std::unique_ptr<CudaGpu>& gpu : gpus) {
    of_both.push_back(*gpu->AllocateDevice(1 << 20));
    of_both.push_back(*gpu->AllocatePinned(1 << 20));
    EXPECT_EQ(gpu->memory_use().bytes, 1 << 20);
  }
  std::thread([&] {
    of_both[0] = std::move(of_both[2]);  // frees the first device's, takes over the second's
    of_both.clear();
  }).join();
  for (const int32_t device : {0, 1}) {
    ASSERT_EQ(f().memory_info(device, &after[device], &total), 0);
    EXPECT_EQ(after[device], before[device]);
    EXPECT_EQ(gpus[static_cast<size_t>(device)]->memory_use().bytes, 0);
  }
}

TEST_F(EmulatedDeviceTest, StrayPointersAreNamed) {
  void* stream = Stream();
  float* x = Floats();
  std::vector<float> pageable(kCount);
  EXPECT_EQ(Add(stream, x, x, x), "");
  EXPECT_THAT(Add(stream, x, pageable.data(), x),
              HasSubstr("kernel TreeAdd (variant 0): b (1 rows of 4000 bytes) lies in no live"));
  EXPECT_THAT(Add(stream, x + 1, x, x), HasSubstr("a (1 rows of 4000 bytes) ends 4 bytes after"));
  float* freed = Floats();
  Free(freed);
  EXPECT_THAT(Add(stream, x, x, freed), HasSubstr("out (1 rows of 4000 bytes) lies in no live"));
  EXPECT_THAT(Add(stream, Floats(kCount, 1), x, x), HasSubstr("is memory of device 1"));
  EXPECT_THAT(TextOf(f().copy(stream, x, pageable.data(), kBytes)), HasSubstr("copy: from"));
  EXPECT_EQ(TextOf(f().copy(stream, x, Floats(kCount, 1), kBytes)), "");
}

TEST_F(EmulatedDeviceTest, LaunchesThatDoNotFitAreRefused) {
  void* stream = Stream();
  float* x = Floats();
  TreeAddParams params = {.a = x, .b = x, .out = x, .elements = 996};
  RavelCudaLaunch launch = {.kernel = KernelId(Kernel::kTreeAdd, kF32Vector),
                            .grid = {1, 1, 1},
                            .block = kFlatThreads,
                            .shared_bytes = 0,
                            .params = &params,
                            .param_bytes = sizeof(params)};
  EXPECT_EQ(TextOf(f().launch(stream, &launch)), "");
  launch.block = 128;
  EXPECT_THAT(TextOf(f().launch(stream, &launch)), HasSubstr("a block of 128 threads, not 256"));
  launch.block = 2048;
  EXPECT_THAT(TextOf(f().launch(stream, &launch)), HasSubstr("beyond the device's limits"));
  launch.block = kFlatThreads;
  params.b = x + 1;
  EXPECT_THAT(TextOf(f().launch(stream, &launch)), HasSubstr("b does not fit accesses of 16"));
  launch.param_bytes += 8;
  EXPECT_THAT(TextOf(f().launch(stream, &launch)), HasSubstr("with an argument of 40 bytes"));
  EXPECT_THAT(Launch(stream,
                     Kernel::kBiasGradient,
                     BiasGradientParams{
                         .dy = x, .partials = x, .dy_stride = 300, .rows = 2, .columns = 300}),
              HasSubstr("a grid of 1 blocks, not 2"));
}

TEST_F(EmulatedDeviceTest, AMissingEventIsNamedWhateverTheTiming) {
  void* first = Stream();
  void* second = Stream();
  void* event = Event();
  float* x = Floats();
  float* y = Floats();
  ASSERT_EQ(Add(first, x, x, x), "");
  EXPECT_THAT(Add(second, x, y, y),
              AllOf(HasSubstr("no event orders stream"),
                    HasSubstr("TreeAdd (variant 0) reads a"),
                    HasSubstr("TreeAdd (variant 0) writes out of the same memory")));
  EXPECT_EQ(Add(second, y, y, y), "");  // other memory
  ASSERT_EQ(f().event_record(event, first), 0);
  ASSERT_EQ(f().stream_wait(second, event), 0);
  EXPECT_EQ(Add(second, x, y, y), "");
  // A write may not overtake a reader, and later work is not what the event stands for.
  EXPECT_THAT(Add(first, x, x, x), HasSubstr("reads a of the same memory"));
  ASSERT_EQ(f().event_record(event, second), 0);
  ASSERT_EQ(f().stream_wait(first, event), 0);
  ASSERT_EQ(Add(first, x, x, x), "");
  EXPECT_THAT(Add(second, x, y, y), HasSubstr("no event orders"));
  ASSERT_EQ(f().stream_synchronize(first), 0);  // the host waits, so what it issues comes after
  EXPECT_EQ(Add(second, x, y, y), "");
  EXPECT_EQ(f().event_destroy(event), 0);
}

// The work of a stream that is destroyed is done. Its events stay, and the others' order, too.
TEST_F(EmulatedDeviceTest, AStreamThatIsGoneLeavesTheOthersInOrder) {
  void* gone = nullptr;
  ASSERT_EQ(f().stream_create(0, 0, &gone), 0);
  void* first = Stream();
  void* second = Stream();
  void* event = Event();
  float* x = Floats();
  float* y = Floats();
  ASSERT_EQ(Add(first, y, y, y), "");
  ASSERT_EQ(Add(gone, x, x, x), "");
  EXPECT_THAT(Add(first, x, x, x), HasSubstr("no event orders"));
  ASSERT_EQ(f().event_record(event, gone), 0);
  ASSERT_EQ(f().stream_destroy(gone), 0);
  EXPECT_EQ(Add(first, x, x, x), "");
  ASSERT_EQ(f().stream_wait(second, event), 0);
  EXPECT_THAT(Add(second, x, x, x), HasSubstr("no event orders"));
  EXPECT_THAT(Add(second, y, y, y), HasSubstr("no event orders"));
  EXPECT_EQ(f().event_destroy(event), 0);
}

// It runs when the stream is there, and what it touches of pinned memory is known.
TEST_F(EmulatedDeviceTest, WorkOfTheHostIsOrderedByEventsToo) {
  void* first = Stream();
  void* second = Stream();
  void* event = Event();
  void* pinned = nullptr;
  ASSERT_EQ(f().pinned_allocate(0, 64, &pinned), 0);
  int64_t found = 0;
  const auto run = [&](const void* data) {
    const cuda::RavelCudaHostAccess access = {
        .data = data, .bytes = 64, .writes = 1, .reserved = 0};
    struct Seen {
      int64_t* found;
      void* pinned;
    };
    static Seen seen;
    seen = {&found, pinned};
    const cuda::RavelCudaHostWork work = {.run =
                                              [](void* argument) {
                                                const auto* at = static_cast<Seen*>(argument);
                                                std::memcpy(
                                                    at->found, at->pinned, sizeof(*at->found));
                                              },
                                          .argument = &seen,
                                          .accesses = &access,
                                          .access_count = 1,
                                          .reserved = 0};
    const int32_t error = f().host_work(second, &work);
    return error == 0 ? std::string() : std::string(f().error_text(error));
  };
  ASSERT_EQ(f().fill(first, pinned, 1, 64), 0);
  EXPECT_THAT(run(pinned),
              AllOf(HasSubstr("no event orders stream"), HasSubstr("work of the host")));
  EXPECT_THAT(run(&found), HasSubstr("pinned memory"));  // memory that nobody has allocated
  ASSERT_EQ(f().event_record(event, first), 0);
  ASSERT_EQ(f().stream_wait(second, event), 0);
  EXPECT_EQ(run(pinned), "");
  ASSERT_EQ(f().stream_synchronize(second), 0);
  EXPECT_EQ(found, 0x0101010101010101);
  EXPECT_EQ(f().event_destroy(event), 0);
  EXPECT_EQ(f().pinned_free(0, pinned), 0);
}

TEST_F(EmulatedDeviceTest, ReadersAndOtherColumnsDoNotConflict) {
  void* first = Stream();
  void* second = Stream();
  float* x = Floats();
  float* matrix = Floats(10 * 100);
  float* y = Floats();
  float* z = Floats();
  EXPECT_EQ(Add(first, x, x, y), "");
  EXPECT_EQ(Add(second, x, x, z), "");
  const auto add_columns = [&](void* stream, int64_t begin) {
    return Launch(stream,
                  Kernel::kAddInPlace,
                  AddInPlaceParams{.x = x,
                                   .y = matrix + begin,
                                   .x_stride = 50,
                                   .y_stride = 100,
                                   .rows = 10,
                                   .columns = 50});
  };
  EXPECT_EQ(add_columns(first, 0), "");
  EXPECT_EQ(add_columns(second, 50), "");
  EXPECT_THAT(add_columns(second, 49), HasSubstr("no event orders"));
}

TEST_F(EmulatedDeviceTest, WorkOfAStreamRunsInOrderOfIssue) {
  void* streams[2] = {Stream(), Stream()};
  void* event = Event();
  float* y = Floats();
  std::fill_n(y, kCount, 1.0f);
  for (int i = 0; i < 40; ++i) {  // y = 2y, by turns on two streams
    void* on = streams[i % 2];
    ASSERT_EQ(Add(on, y, y, y), "");
    ASSERT_EQ(f().event_record(event, on), 0);
    ASSERT_EQ(f().stream_wait(streams[1 - i % 2], event), 0);
  }
  ASSERT_EQ(f().stream_synchronize(streams[1]), 0);
  ASSERT_EQ(f().stream_synchronize(streams[0]), 0);
  EXPECT_EQ(y[kCount - 1], 0x1p40f);
  EXPECT_EQ(f().event_destroy(event), 0);
  EXPECT_EQ(TextOf(f().event_record(event, streams[0])), "invalid resource handle");
}

TEST_F(EmulatedDeviceTest, EventsKnowWhenTheyWereReached) {
  void* stream = Stream();
  void* begin = Event(true);
  void* end = Event(true);
  void* untimed = Event();
  int32_t done = 0;
  float milliseconds = -1.0f;
  EXPECT_EQ(f().event_done(begin, &done), 0);
  EXPECT_EQ(done, 1);  // never recorded, as the runtime has it
  EXPECT_EQ(f().event_elapsed(begin, end, &milliseconds), 400);
  for (void* event : {begin, untimed, end}) {
    ASSERT_EQ(f().event_record(event, stream), 0);
  }
  ASSERT_EQ(f().event_synchronize(end), 0);
  EXPECT_EQ(f().event_elapsed(begin, end, &milliseconds), 0);
  EXPECT_GE(milliseconds, 0.0f);
  EXPECT_EQ(f().event_elapsed(begin, untimed, &milliseconds), 400);
  for (void* event : {begin, untimed, end}) {
    EXPECT_EQ(f().event_destroy(event), 0);
  }
}

TEST_F(EmulatedDeviceTest, CapturesOfSeveralStreamsAreJoinedAndReplayed) {
  void* origin = Stream();
  void* other = Stream();
  void* fork = Event();
  void* join = Event();
  float* x = Floats();
  float* y = Floats();
  void* graph = nullptr;
  ASSERT_EQ(f().capture_begin(origin), 0);
  ASSERT_EQ(f().fill(origin, x, 0, kBytes), 0);
  ASSERT_EQ(f().event_record(fork, origin), 0);
  ASSERT_EQ(f().stream_wait(other, fork), 0);
  ASSERT_EQ(Add(other, x, x, y), "");
  EXPECT_THAT(Add(origin, y, y, x), HasSubstr("no event orders"));
  ASSERT_EQ(f().event_record(join, other), 0);
  ASSERT_EQ(f().stream_wait(origin, join), 0);
  ASSERT_EQ(f().capture_end(origin, &graph), 0);
  EXPECT_TRUE(std::isnan(y[0]));  // recorded, not run
  ASSERT_EQ(f().graph_launch(graph, origin), 0);
  ASSERT_EQ(f().stream_synchronize(origin), 0);
  EXPECT_EQ(y[kCount - 1], 0.0f);
  Free(y);
  EXPECT_THAT(TextOf(f().graph_launch(graph, origin)), HasSubstr("out (1 rows of 4000 bytes)"));
  EXPECT_EQ(f().graph_destroy(graph), 0);
  EXPECT_EQ(f().event_destroy(fork), 0);
  EXPECT_EQ(f().event_destroy(join), 0);
}

TEST_F(EmulatedDeviceTest, CapturesRefuseWhatTheRuntimeRefuses) {
  void* origin = Stream();
  void* other = Stream();
  void* event = Event();
  float* x = Floats();
  void* graph = nullptr;
  void* memory = nullptr;
  ASSERT_EQ(f().capture_begin(origin), 0);
  ASSERT_EQ(f().event_record(event, origin), 0);
  ASSERT_EQ(f().stream_wait(other, event), 0);
  ASSERT_EQ(f().fill(other, x, 0, kBytes), 0);
  EXPECT_EQ(f().event_synchronize(event), 907);
  EXPECT_EQ(f().capture_end(origin, &graph), 904);  // nothing joined the other stream again
  ASSERT_EQ(f().capture_begin(origin), 0);
  EXPECT_EQ(f().stream_synchronize(origin), 900);
  EXPECT_EQ(f().capture_end(origin, &graph), 901);
  ASSERT_EQ(f().capture_begin(origin), 0);
  EXPECT_EQ(f().device_allocate(0, 1, &memory), 900);
  EXPECT_EQ(f().capture_end(origin, &graph), 901);
  ASSERT_EQ(f().event_record(event, other), 0);
  ASSERT_EQ(f().capture_begin(origin), 0);
  EXPECT_EQ(f().stream_wait(origin, event), 905);  // on work that is not captured
  int32_t error = 0;
  std::thread([&] { error = f().capture_end(origin, &graph); }).join();
  EXPECT_EQ(error, 908);
  EXPECT_EQ(f().capture_end(origin, &graph), 0);
  EXPECT_EQ(f().graph_destroy(graph), 0);
  EXPECT_EQ(f().event_destroy(event), 0);
}

TEST_F(EmulatedDeviceTest, GemmsMeasureTheirAlgorithmsWhichGiveTheSameBits) {
  auto gpu = CudaGpu::Open(*library_, 0);
  ASSERT_TRUE(gpu.ok()) << gpu.status();
  const CudaMemory scratch = *(*gpu)->AllocateDevice(kScratchBytes);
  const CudaMemory flush = *(*gpu)->AllocateDevice(1 << 16);
  const auto stream = *(*gpu)->MakeStream(CudaGpu::Priority::kNormal, scratch.data());
  float* a = Floats();
  for (int64_t i = 0; i < kCount; ++i) {
    a[i] = std::sin(static_cast<float>(i));
  }
  const auto gemm = [&](float* c) {
    Gemm(
        *stream,
        {.a = MatrixView(a, 10, 20), .b = MatrixView(a + 300, 20, 30), .c = MatrixView(c, 10, 30)});
    EXPECT_TRUE(stream->Synchronize().ok());
  };
  float* first = Floats();
  float* measured = Floats();
  gemm(first);
  ASSERT_EQ((*gpu)->algorithms().size(), 1u);
  EXPECT_THAT((*gpu)->algorithms().ToText(), HasSubstr(" 0.000\n"));
  const CudaStream::Measuring measuring = {
      .flush = {std::span(static_cast<std::byte*>(flush.data()), 1 << 16)}};
  stream->MeasureGemms(&measuring);
  gemm(measured);
  EXPECT_THAT((*gpu)->algorithms().ToText(), Not(HasSubstr(" 0.000\n")));
  EXPECT_EQ(std::memcmp(first, measured, 300 * sizeof(float)), 0);
}

TEST_F(EmulatedDeviceTest, GemmsAreHeldToTheirDescription) {
  void* stream = Stream();
  float* a = Floats();
  float* c = Floats();
  RavelCudaGemm gemm = {};
  gemm.m = gemm.n = gemm.k = 4;
  gemm.a_stride = gemm.b_stride = gemm.c_stride = 4;
  gemm.input_type = gemm.output_type = static_cast<int32_t>(DType::kF32);
  gemm.a_align = gemm.b_align = gemm.c_align = 16;
  RavelCudaAlgorithm algorithms[3] = {};
  int32_t count = 0;
  ASSERT_EQ(f().gemm_candidates(0, &gemm, 0, algorithms, 3, &count), 0);
  ASSERT_EQ(count, 1);  // the other one needs workspace
  const RavelCudaGemmBuffers buffers = {.a = a,
                                        .b = a,
                                        .c = c,
                                        .workspace = nullptr,
                                        .workspace_bytes = 0,
                                        .scale_a = nullptr,
                                        .scale_b = nullptr,
                                        .factors = nullptr};
  EXPECT_EQ(TextOf(f().gemm_run(stream, &gemm, algorithms, &buffers)), "");
  EXPECT_THAT(TextOf(f().gemm_run(stream, &gemm, algorithms + 1, &buffers)),
              HasSubstr("an algorithm of another library"));
  gemm.b_align = 256;
  gemm.b_stride = 5;
  EXPECT_THAT(TextOf(f().gemm_run(stream, &gemm, algorithms, &buffers)),
              HasSubstr("b is not aligned as said"));
  gemm.b_stride = 3;
  ASSERT_EQ(f().gemm_candidates(0, &gemm, 0, algorithms, 3, &count), 0);
  EXPECT_EQ(count, 0);
}

// Four sequences of 32 tokens, four heads of two, 16 elements each, in bf16.
class EmulatedAttentionTest : public EmulatedDeviceTest {
 protected:
  static constexpr int64_t kTokens = 4 * 32;
  static constexpr int64_t kColumns = 4 * 16;
  static constexpr int64_t kKvColumns = 2 * 16;

  TensorView Bf16(int64_t columns) {
    uint16_t* data = static_cast<uint16_t*>(Allocate(kTokens * kColumns * sizeof(uint16_t)));
    for (int64_t i = 0; i < kTokens * columns; ++i) {
      data[i] = FloatToBf16(std::sin(static_cast<float>(i * 7 % 1001)));
    }
    return {.data = data,
            .dtype = DType::kBF16,
            .rank = 2,
            .size = {kTokens, columns},
            .row_stride = columns};
  }

  // Gradients of q, with attention's workspace of so many bytes.
  std::vector<uint16_t> Gradients(CudaStream& stream, int64_t workspace_bytes) {
    const CudaStream::AttentionOptions options = {
        .workspace = Allocate(static_cast<uint64_t>(workspace_bytes)),
        .workspace_bytes = workspace_bytes};
    stream.UseAttention(options);
    const AttentionShape shape = {
        .sequence_tokens = 32, .query_heads = 4, .kv_heads = 2, .head_size = 16, .scale = 0.25f};
    const TensorView q = Bf16(kColumns), k = Bf16(kKvColumns), v = Bf16(kKvColumns);
    const TensorView out = Bf16(kColumns), dq = Bf16(kColumns);
    const TensorView lse = MatrixView(Floats(4 * kTokens), 4 * kTokens / 32, 32);
    AttentionForward(
        stream,
        {.shape = shape, .q = q, .k = k, .v = v, .out = out, .log_sum_exp = lse, .workspace = {}});
    AttentionBackward(stream,
                      {.shape = shape,
                       .q = q,
                       .k = k,
                       .v = v,
                       .out = out,
                       .log_sum_exp = lse,
                       .dout = Bf16(kColumns),
                       .dq = dq,
                       .dk = Bf16(kKvColumns),
                       .dv = Bf16(kKvColumns),
                       .workspace = {}});
    EXPECT_TRUE(stream.Synchronize().ok());
    return {dq.As<uint16_t>(), dq.As<uint16_t>() + kTokens * kColumns};
  }
};

TEST_F(EmulatedAttentionTest, RunsThroughPlansInPartsWhereWorkspaceIsSmall) {
  auto gpu = CudaGpu::Open(*library_, 0);
  ASSERT_TRUE(gpu.ok()) << gpu.status();
  EXPECT_EQ((*gpu)->no_cudnn(), "");
  const CudaMemory scratch = *(*gpu)->AllocateDevice(kScratchBytes);
  const auto stream = *(*gpu)->MakeStream(CudaGpu::Priority::kNormal, scratch.data());
  const std::vector<uint16_t> whole = Gradients(*stream, 1 << 20);
  const std::string report = stream->AttentionReport();
  EXPECT_EQ(Gradients(*stream, 16384), whole);  // one sequence and one head of keys at a time
  EXPECT_NE(stream->AttentionReport(), report);
  const std::vector<uint16_t> own = Gradients(*stream, 16383);  // too little for any part
  EXPECT_NE(own, whole);  // the library's own kernels, whose sums are in another order
  for (size_t i = 0; i < whole.size(); ++i) {
    EXPECT_NEAR(Bf16ToFloat(own[i]), Bf16ToFloat(whole[i]), 0.02f) << i;
  }
}

// Kernels of a library by id and bytes of their argument.
std::vector<std::pair<int32_t, uint64_t>> KernelsOf(const RavelCudaFunctions& functions) {
  constexpr uint64_t kMostBytes = 1024;
  std::vector<std::pair<int32_t, uint64_t>> kernels;
  for (int32_t kernel = 0; kernel < kKernelIds; ++kernel) {
    for (uint64_t bytes = 1; bytes <= kMostBytes; ++bytes) {
      if (functions.has_kernel(kernel, bytes) != 0) {
        kernels.emplace_back(kernel, bytes);
      }
    }
  }
  return kernels;
}

TEST_F(EmulatedDeviceTest, EveryKernelIsEmulated) {
  const auto emulated = KernelsOf(f());
  for (int32_t kernel = 0; kernel < static_cast<int32_t>(Kernel::kCount); ++kernel) {
    EXPECT_TRUE(std::any_of(emulated.begin(), emulated.end(), [kernel](const auto& entry) {
      return entry.first / kKernelVariants == kernel;
    })) << kernel;
  }
}

TEST_F(EmulatedDeviceTest, TheKernelsAreThoseOfTheBuiltLibrary) {
  if (testing::BuiltCudaLibrary().empty()) {
    ravel::testing::SkipWithout("cuda", "built without CUDA");
    return;
  }
  const auto built = CudaLibrary::Open(testing::BuiltCudaLibrary());
  ASSERT_TRUE(built.ok()) << built.status();
  EXPECT_EQ(KernelsOf(f()), KernelsOf(built->functions()));
}

}  // namespace
}  // namespace ravel::kernels::cuda
