// A trainer for the daemon's tests. What it does is the job's name in its first frame.
//   echo            ready (step = bytes of the plan), then answers: run -> step report, save ->
//   seal, commit -> save_started deaf            the same, but it ignores stop silent ready, then
//   nothing chatty          ready, 1000 lines on stdout, one with a broken character on stderr,
//   then done and exit 0 fail            failed{code 13}, exit 13 crash           a line on stderr,
//   then SIGABRT garbage         sends what is no frame

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>
#include <thread>

#include <unistd.h>

#include "worker/child_link.h"

namespace {

using ravel::v1::TrainerDown;
using ravel::v1::TrainerUp;

class FakeTrainer {
 public:
  explicit FakeTrainer(ravel::TrainerLink& link) : link_(link) {}

  int Run() {
    const auto first = link_.Receive();
    if (!first.ok() || !first->has_start()) {
      return 16;
    }
    name_ = first->start().job_name();
    if (name_ == "fail") {
      TrainerUp up;
      up.mutable_failed()->set_code(13);
      up.mutable_failed()->set_reason("DataError");
      up.mutable_failed()->set_message("train.bin is truncated");
      Send(up);
      return 13;
    }
    if (name_ == "crash") {
      std::fprintf(stderr, "about to crash\n");
      std::abort();
    }
    if (name_ == "garbage") {
      const char bytes[] = "\xff\xff\xff\xff no frame";
      return write(ravel::kTrainerSocketFd, bytes, sizeof(bytes)) > 0 ? pause() : 1;
    }
    TrainerUp ready;
    ready.mutable_ready()->set_step(static_cast<int64_t>(first->start().plan().size()));
    Send(ready);
    if (name_ == "chatty") {
      return Chat();
    }
    std::thread progress([this] { SendProgress(); });
    const int code = Listen();
    Finish();
    progress.join();
    return code;
  }

 private:
  void Send(const TrainerUp& up) { link_.Send(up).IgnoreError(); }

  int Chat() {
    for (int i = 0; i < 1000; ++i) {
      std::printf("line %d\n", i);
    }
    std::fprintf(stderr, "broken \xff character\n");
    std::printf("no end of line");
    std::fflush(stdout);
    TrainerUp done;
    done.mutable_done()->set_step(7);
    Send(done);
    return 0;
  }

  int Listen() {
    while (true) {
      const auto frame = link_.Receive();
      if (!frame.ok()) {
        return 10;
      }
      TrainerUp up;
      switch (frame->kind_case()) {
        case TrainerDown::kRun:
          up.mutable_step()->set_step(frame->run().until_step());
          Send(up);
          break;
        case TrainerDown::kSave:
          up.mutable_seal()->set_step(frame->save().sequence());
          Send(up);
          break;
        case TrainerDown::kCommit:
          up.mutable_save_started()->set_step(frame->commit().step());
          Send(up);
          break;
        case TrainerDown::kStop:
          if (name_ != "deaf") {
            return 10;
          }
          break;
        case TrainerDown::kPeerLost:
          return 11;
        default:
          break;
      }
    }
  }

  void SendProgress() {
    TrainerUp up;
    up.mutable_progress()->set_step(3);
    up.mutable_progress()->set_phase("fake");
    std::unique_lock<std::mutex> lock(mutex_);
    while (!finished_) {
      if (name_ != "silent") {
        Send(up);
      }
      over_.wait_for(lock, std::chrono::milliseconds(100));
    }
  }

  void Finish() {
    const std::lock_guard<std::mutex> lock(mutex_);
    finished_ = true;
    over_.notify_all();
  }

  ravel::TrainerLink& link_;
  std::string name_;
  std::mutex mutex_;
  std::condition_variable over_;
  bool finished_ = false;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2 || std::string(argv[1]) != "--socket-fd=3") {
    std::fprintf(stderr, "fake trainer: expected --socket-fd=3\n");
    return 2;
  }
  const auto link = ravel::TrainerLink::Open(ravel::kTrainerSocketFd);
  return link.ok() ? FakeTrainer(**link).Run() : 1;
}
