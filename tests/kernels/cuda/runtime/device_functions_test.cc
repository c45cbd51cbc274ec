// Every function on a handle selects the handle's device, on whichever thread it is called: one
// that has no device, or another.

#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/cuda/functions.h"
#include "tests/kernels/cuda/runtime/fake_runtime.h"

namespace ravel::kernels::cuda {

// Of the rest of the library.
int32_t Fail(std::string) {
  return kOtherError;
}
void ReleaseAttention(StreamHandle&) {}

namespace {

using ::testing::Contains;
using ::testing::IsEmpty;

// One of each, on a device.
struct Handles {
  void* memory = nullptr;
  void* pinned = nullptr;
  void* stream = nullptr;
  void* event = nullptr;
  void* graph = nullptr;
};

class DeviceFunctionsTest : public ::testing::Test {
 protected:
  DeviceFunctionsTest() { AddDeviceFunctions(f_); }

  static void Expect(int32_t error) { EXPECT_EQ(error, 0); }
  // On a thread of its own, which has no device.
  template <typename Body>
  static void Elsewhere(const Body& body) {
    std::thread(body).join();
  }

  Handles Make(int32_t device) const {
    Handles made;
    Expect(f_.device_allocate(device, 64, &made.memory));
    Expect(f_.pinned_allocate(device, 64, &made.pinned));
    Expect(f_.stream_create(device, 1, &made.stream));
    Expect(f_.event_create(device, 0, &made.event));
    Expect(f_.capture_begin(made.stream));
    Expect(f_.capture_end(made.stream, &made.graph));
    return made;
  }
  void Use(const Handles& of) const {
    int32_t done = 0;
    float milliseconds = 0.0f;
    Expect(f_.event_record(of.event, of.stream));
    Expect(f_.event_done(of.event, &done));
    Expect(f_.event_synchronize(of.event));
    Expect(f_.event_elapsed(of.event, of.event, &milliseconds));
    Expect(f_.stream_wait(of.stream, of.event));
    Expect(f_.stream_done(of.stream, &done));
    Expect(f_.stream_synchronize(of.stream));
    Expect(f_.copy(of.stream, of.memory, of.pinned, 64));
    Expect(f_.fill(of.stream, of.memory, 0, 64));
    int calls = 0;
    const RavelCudaHostWork work = {.run = [](void* count) { ++*static_cast<int*>(count); },
                                    .argument = &calls,
                                    .accesses = nullptr,
                                    .access_count = 0,
                                    .reserved = 0};
    Expect(f_.host_work(of.stream, &work));
    EXPECT_EQ(calls, 1);
    Expect(f_.graph_launch(of.graph, of.stream));
  }
  void Destroy(int32_t device, const Handles& of) const {
    Expect(f_.graph_destroy(of.graph));
    Expect(f_.event_destroy(of.event));
    Expect(f_.stream_destroy(of.stream));
    Expect(f_.pinned_free(device, of.pinned));
    Expect(f_.device_free(device, of.memory));
  }

  RavelCudaFunctions f_ = {};
};

TEST_F(DeviceFunctionsTest, HandlesAreUsedAndGoOnThreadsWithoutADevice) {
  for (const int32_t device : {0, 1}) {
    Handles made;
    Elsewhere([&] { made = Make(device); });
    Elsewhere([&] { Use(made); });
    Elsewhere([&] { f_.graph_destroy(made.graph); });
    Elsewhere([&] { f_.event_destroy(made.event); });
    Elsewhere([&] { f_.stream_destroy(made.stream); });
    Elsewhere([&] { f_.pinned_free(device, made.pinned); });
    Elsewhere([&] { f_.device_free(device, made.memory); });
  }
  EXPECT_THAT(fake_runtime::Faults(), IsEmpty());
  EXPECT_THAT(fake_runtime::Calls(), Contains("cudaFree").Times(2));
  EXPECT_THAT(fake_runtime::Calls(), Contains("cudaFreeHost").Times(2));
  EXPECT_THAT(fake_runtime::Calls(), Contains("cudaGraphInstantiate").Times(2));
}

TEST_F(DeviceFunctionsTest, HandlesOfTwoDevicesAreUsedInTurnsOnOneThread) {
  const Handles first = Make(0);
  const Handles second = Make(1);
  Use(first);
  Use(second);
  void* graph = nullptr;
  Expect(f_.capture_begin(first.stream));
  Expect(f_.fill(second.stream, second.memory, 0, 64));
  Expect(f_.capture_end(first.stream, &graph));
  Expect(f_.graph_destroy(graph));
  Destroy(0, first);
  Destroy(1, second);
  EXPECT_THAT(fake_runtime::Faults(), IsEmpty());
}

}  // namespace
}  // namespace ravel::kernels::cuda
