#include "tests/testing/emulated_cuda/emulated_stream.h"

#include <chrono>
#include <utility>

#include "tests/testing/emulated_cuda/emulated_errors.h"
#include "tests/testing/hold.h"

namespace ravel::kernels::cuda::emulated {
namespace {

int64_t NowNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// A seed slows one stream of four down, some of its items very much, and others by a little.
void RandomDelay(uint64_t seed, int stream, uint64_t item) {
  constexpr uint64_t kSlowMicroseconds = 40;
  const bool slow = seed % 4 == static_cast<uint64_t>(stream) % 4;
  const uint64_t draw =
      testing::ScatteredBits(seed * 1000003 + item * 101 + static_cast<uint64_t>(stream));
  const uint64_t most = slow && draw % 16 == 0 ? 20 * kSlowMicroseconds
                        : slow                 ? kSlowMicroseconds
                                               : kSlowMicroseconds / 8;
  const uint64_t microseconds = draw % 2 == 0 && !slow ? 0 : (draw >> 4) % most;
  testing::HoldFor(std::chrono::microseconds(microseconds));
}

std::shared_ptr<CpuEvent> ReachedOf(const std::shared_ptr<Recording>& recording) {
  return {recording, &recording->reached};
}

}  // namespace

EmulatedStream* EmulatedStreams::Find(void* stream) {
  const auto found = streams_.find(stream);
  return found == streams_.end() ? nullptr : found->second.get();
}

Event* EmulatedStreams::FindEvent(void* event) {
  const auto found = events_.find(event);
  return found == events_.end() ? nullptr : found->second.get();
}

void* EmulatedStreams::CreateStream(int32_t device) {
  auto stream = std::make_unique<EmulatedStream>();
  stream->device = device;
  stream->queue = std::make_unique<CpuQueue>();
  const MutexLock lock(mutex_);
  stream->number = ++last_number_;
  void* handle = stream.get();
  streams_[handle] = std::move(stream);
  return handle;
}

int32_t EmulatedStreams::DestroyStream(void* stream) {
  std::unique_ptr<EmulatedStream> dying;  // its queue ends, and so waits, without the lock
  StreamClock clock;
  int number = 0;
  {
    const MutexLock lock(mutex_);
    const EmulatedStream* found = Find(stream);
    if (found == nullptr) {
      return kInvalidHandle;
    }
    if (found->capture != nullptr) {
      found->capture->invalid = true;
      return kCaptureUnsupported;
    }
    number = found->number;
    clock = order_.ClockOf(number);
    dying = std::move(streams_[stream]);
    streams_.erase(stream);
  }
  dying.reset();
  Forget(clock);
  const MutexLock lock(mutex_);
  order_.Remove(number);
  return 0;
}

int32_t EmulatedStreams::DeviceOf(void* stream) {
  const MutexLock lock(mutex_);
  const EmulatedStream* found = Find(stream);
  return found == nullptr ? -1 : found->device;
}

int32_t EmulatedStreams::Check(const EmulatedStream& stream,
                               const WorkOrder& order,
                               const EmulatedWork& work) {
  for (const Access& access : work.accesses) {
    const std::string problem = memory_.Problem(access, work.any_device ? -1 : stream.device);
    if (!problem.empty()) {
      return Fail(work.name + ": " + problem);
    }
  }
  const std::string conflict = order.Conflict(stream.number, work);
  return conflict.empty() ? 0 : Fail(conflict);
}

void EmulatedStreams::Enqueue(EmulatedStream& stream,
                              std::function<void()> run,
                              std::shared_ptr<CpuEvent> done,
                              std::vector<std::shared_ptr<const CpuEvent>> waits) {
  const uint64_t item = ++stream.issued;
  const int number = stream.number;
  const uint64_t seed = delay_seed_;
  stream.last_done = done;
  stream.queue->Submit({.run =
                            [run = std::move(run), seed, number, item](int64_t) {
                              if (seed != 0) {
                                RandomDelay(seed, number, item);
                              }
                              run();
                            },
                        .waits = std::move(waits),
                        .done = std::move(done)});
}

void EmulatedStreams::EnqueueWork(EmulatedStream& stream, const EmulatedWork& work) {
  order_.Add(stream.number, work);
  if (work.of_peers) {
    of_peers_.push_back({.thread = std::this_thread::get_id(),
                         .stream = stream.number,
                         .number = order_.ClockOf(stream.number).At(stream.number),
                         .name = work.name});
  }
  std::function<void()> now = work.prepare != nullptr ? work.prepare() : work.run;
  const std::chrono::microseconds least = work.of_copies ? pace_.copies : pace_.kernels;
  if (least.count() == 0) {
    Enqueue(stream, std::move(now), std::make_shared<CpuEvent>());
    return;
  }
  const auto paced = [run = std::move(now), least] {
    const auto end = std::chrono::steady_clock::now() + least;
    run();
    testing::HoldUntil(end);
  };
  Enqueue(stream, paced, std::make_shared<CpuEvent>());
}

int32_t EmulatedStreams::Issue(void* stream, EmulatedWork work) {
  const MutexLock lock(mutex_);
  EmulatedStream* found = Find(stream);
  if (found == nullptr) {
    return kInvalidHandle;
  }
  Capture* capture = found->capture.get();
  const int32_t error = Check(*found, capture != nullptr ? capture->order : order_, work);
  if (error != 0) {
    return error;
  }
  if (capture == nullptr) {
    EnqueueWork(*found, work);
    return 0;
  }
  if (capture->invalid) {
    return kCaptureInvalidated;
  }
  capture->order.Add(found->number, work);
  capture->work.push_back(std::move(work));
  return 0;
}

int32_t EmulatedStreams::StreamDone(void* stream, int32_t* done) {
  StreamClock clock;
  {
    const MutexLock lock(mutex_);
    const EmulatedStream* found = Find(stream);
    if (found == nullptr) {
      return kInvalidHandle;
    }
    if (found->capture != nullptr) {
      found->capture->invalid = true;
      return kCaptureUnsupported;
    }
    *done = found->last_done == nullptr || found->last_done->done() ? 1 : 0;
    clock = order_.ClockOf(found->number);
  }
  if (*done != 0) {
    Forget(clock);
  }
  return 0;
}

int32_t EmulatedStreams::Synchronize(void* stream) {
  std::shared_ptr<const CpuEvent> last;  // shared with the queue
  StreamClock clock;
  {
    const MutexLock lock(mutex_);
    const EmulatedStream* found = Find(stream);
    if (found == nullptr) {
      return kInvalidHandle;
    }
    if (found->capture != nullptr) {
      found->capture->invalid = true;
      return kCaptureUnsupported;
    }
    last = found->last_done;
    clock = order_.ClockOf(found->number);
  }
  if (last != nullptr) {
    last->Wait();
  }
  Forget(clock);
  return 0;
}

int32_t EmulatedStreams::RefuseInCapture() {
  const MutexLock lock(mutex_);
  for (const std::shared_ptr<Capture>& capture : captures_) {
    if (capture->thread == std::this_thread::get_id()) {
      capture->invalid = true;
      return kCaptureUnsupported;
    }
  }
  return 0;
}

int32_t EmulatedStreams::SynchronizeDevice(int32_t device) {
  const int32_t error = RefuseInCapture();
  if (error != 0) {
    return error;
  }
  std::vector<std::pair<std::shared_ptr<const CpuEvent>, StreamClock>> points;
  {
    const MutexLock lock(mutex_);
    for (const auto& [handle, stream] : streams_) {
      if (stream->device == device && stream->last_done != nullptr) {
        points.emplace_back(stream->last_done, order_.ClockOf(stream->number));
      }
    }
  }
  for (const auto& [done, clock] : points) {
    done->Wait();
    Forget(clock);
  }
  return 0;
}

void EmulatedStreams::Forget(const StreamClock& clock) {
  const MutexLock lock(mutex_);
  order_.Forget(clock);
  std::erase_if(of_peers_,
                [&clock](const PeerWork& work) { return work.number <= clock.At(work.stream); });
}

std::string EmulatedStreams::WaitsForPeers() {
  const MutexLock lock(mutex_);
  for (const PeerWork& work : of_peers_) {
    if (work.thread == std::this_thread::get_id()) {
      return work.name + ", item " + std::to_string(work.number) + " of stream " +
             std::to_string(work.stream);
    }
  }
  return "";
}

void EmulatedStreams::ForgetPeers() {
  const MutexLock lock(mutex_);
  of_peers_.clear();
}

void* EmulatedStreams::CreateEvent(bool timed) {
  auto event = std::make_unique<Event>();
  event->timed = timed;
  const MutexLock lock(mutex_);
  void* handle = event.get();
  events_[handle] = std::move(event);
  return handle;
}

int32_t EmulatedStreams::DestroyEvent(void* event) {
  const MutexLock lock(mutex_);
  return events_.erase(event) == 1 ? 0 : kInvalidHandle;
}

int32_t EmulatedStreams::Record(void* event, void* stream) {
  const MutexLock lock(mutex_);
  EmulatedStream* on = Find(stream);
  Event* found = FindEvent(event);
  if (on == nullptr || found == nullptr) {
    return kInvalidHandle;
  }
  auto recording = std::make_shared<Recording>();
  recording->capture = on->capture;
  found->recording = recording;
  if (on->capture != nullptr) {
    recording->clock = on->capture->order.ClockOf(on->number);
    return 0;
  }
  recording->clock = order_.ClockOf(on->number);
  Recording* point = recording.get();  // lives as long as `done`, which the queue holds
  Enqueue(
      *on, [point] { point->time_ns = NowNs(); }, ReachedOf(recording));
  return 0;
}

int32_t EmulatedStreams::WaitInCapture(EmulatedStream& stream, const Recording& recording) {
  const bool under_way = captures_.count(recording.capture) == 1;
  if (recording.capture == nullptr) {
    return kCaptureIsolation;
  }
  if (!under_way) {
    return kCapturedEvent;
  }
  if (stream.capture != nullptr && stream.capture != recording.capture) {
    return kCaptureMerge;
  }
  stream.capture = recording.capture;
  stream.capture->order.After(stream.number, recording.clock);
  return 0;
}

int32_t EmulatedStreams::Wait(void* stream, void* event) {
  const MutexLock lock(mutex_);
  EmulatedStream* on = Find(stream);
  const Event* found = FindEvent(event);
  if (on == nullptr || found == nullptr) {
    return kInvalidHandle;
  }
  const std::shared_ptr<Recording> recording = found->recording;  // shared with the work that waits
  if (recording == nullptr) {
    return 0;  // as the runtime: an event never recorded is done
  }
  if (on->capture != nullptr || recording->capture != nullptr) {
    return WaitInCapture(*on, *recording);
  }
  order_.After(on->number, recording->clock);
  Enqueue(*on, [] {}, std::make_shared<CpuEvent>(), {ReachedOf(recording)});
  return 0;
}

int32_t EmulatedStreams::EventDone(void* event, int32_t* done) {
  std::shared_ptr<Recording> recording;  // shared with the event
  {
    const MutexLock lock(mutex_);
    const Event* found = FindEvent(event);
    if (found == nullptr) {
      return kInvalidHandle;
    }
    recording = found->recording;
  }
  if (recording != nullptr && recording->capture != nullptr) {
    return kCapturedEvent;
  }
  *done = recording == nullptr || recording->reached.done() ? 1 : 0;
  if (*done != 0 && recording != nullptr) {
    Forget(recording->clock);
  }
  return 0;
}

int32_t EmulatedStreams::EventSynchronize(void* event) {
  std::shared_ptr<Recording> recording;  // shared with the event
  {
    const MutexLock lock(mutex_);
    const Event* found = FindEvent(event);
    if (found == nullptr) {
      return kInvalidHandle;
    }
    recording = found->recording;
  }
  if (recording == nullptr) {
    return 0;
  }
  if (recording->capture != nullptr) {
    return kCapturedEvent;
  }
  recording->reached.Wait();
  Forget(recording->clock);
  return 0;
}

int32_t EmulatedStreams::Elapsed(void* begin, void* end, float* milliseconds) {
  const MutexLock lock(mutex_);
  const Event* first = FindEvent(begin);
  const Event* second = FindEvent(end);
  if (first == nullptr || second == nullptr || !first->timed || !second->timed ||
      first->recording == nullptr || second->recording == nullptr) {
    return kInvalidHandle;
  }
  if (!first->recording->reached.done() || !second->recording->reached.done()) {
    return kNotReady;
  }
  const int64_t nanoseconds = second->recording->time_ns - first->recording->time_ns;
  *milliseconds = static_cast<float>(static_cast<double>(nanoseconds) * 1e-6);
  return 0;
}

int32_t EmulatedStreams::BeginCapture(void* stream) {
  const MutexLock lock(mutex_);
  EmulatedStream* found = Find(stream);
  if (found == nullptr) {
    return kInvalidHandle;
  }
  if (found->capture != nullptr) {
    return kInvalidValue;
  }
  found->capture = std::make_shared<Capture>();
  found->capture->origin = found->number;
  found->capture->thread = std::this_thread::get_id();
  captures_.insert(found->capture);
  return 0;
}

int32_t EmulatedStreams::EndCapture(void* stream, void** graph) {
  const MutexLock lock(mutex_);
  EmulatedStream* found = Find(stream);
  if (found == nullptr) {
    return kInvalidHandle;
  }
  const std::shared_ptr<Capture> capture = found->capture;  // shared by its streams until here
  if (capture == nullptr || capture->origin != found->number) {
    return kInvalidValue;
  }
  if (capture->thread != std::this_thread::get_id()) {
    return kCaptureWrongThread;
  }
  for (const auto& [handle, member] : streams_) {
    if (member->capture == capture) {
      member->capture = nullptr;
    }
  }
  captures_.erase(capture);
  if (capture->invalid) {
    return kCaptureInvalidated;
  }
  if (!capture->order.IsLast(capture->origin)) {
    return kCaptureUnjoined;
  }
  auto made = std::make_unique<Graph>();
  made->work = std::move(capture->work);
  *graph = made.get();
  graphs_[*graph] = std::move(made);
  return 0;
}

int32_t EmulatedStreams::LaunchGraph(void* graph, void* stream) {
  const MutexLock lock(mutex_);
  EmulatedStream* on = Find(stream);
  const auto found = graphs_.find(graph);
  if (on == nullptr || found == graphs_.end()) {
    return kInvalidHandle;
  }
  if (on->capture != nullptr) {
    on->capture->invalid = true;
    return kCaptureUnsupported;
  }
  for (const EmulatedWork& work : found->second->work) {
    const int32_t error = Check(*on, order_, work);
    if (error != 0) {
      return error;
    }
  }
  for (const EmulatedWork& work : found->second->work) {
    EnqueueWork(*on, work);
  }
  return 0;
}

int32_t EmulatedStreams::DestroyGraph(void* graph) {
  std::unique_ptr<Graph> dying;  // without the lock: what its work refers to hears of it
  const MutexLock lock(mutex_);
  const auto found = graphs_.find(graph);
  if (found == graphs_.end()) {
    return kInvalidHandle;
  }
  dying = std::move(found->second);
  graphs_.erase(found);
  return 0;
}

bool EmulatedStreams::IsCapturing(void* stream) {
  const MutexLock lock(mutex_);
  const EmulatedStream* found = Find(stream);
  return found != nullptr && found->capture != nullptr;
}

}  // namespace ravel::kernels::cuda::emulated
