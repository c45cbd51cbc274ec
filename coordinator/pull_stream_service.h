#pragma once

// A server stream that reads its next block when the client has taken the one before: a reader that
// does not read costs one block, however much there is to send.

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <absl/base/thread_annotations.h>
#include <grpcpp/grpcpp.h>

#include "common/mutex.h"
#include "common/status.h"
#include "coordinator/executor.h"

namespace ravel::coordinator {

template <typename Message>
struct StreamBlock {
  std::vector<Message> messages;  // none: nothing more at present
  bool end = false;               // and nothing will come
};

// Thread-safe. Owns itself until gRPC is done with it.
template <typename Message>
class PullStream : public grpc::ServerWriteReactor<Message> {
 public:
  using Next = std::function<absl::StatusOr<StreamBlock<Message>>()>;

  // Blocks are read on `io`.
  static std::shared_ptr<PullStream> Create(Executor* io) {
    std::shared_ptr<PullStream> stream(new PullStream(io));
    stream->self_ = stream;
    return stream;
  }

  // Once. `next` is called for one block after another, never twice at a time.
  void Start(Next next) {
    MutexLock lock(mutex_);
    next_ = std::move(next);
    ReadBlock();
  }
  void Fail(const absl::Status& status) {
    MutexLock lock(mutex_);
    FinishOnce(
        grpc::Status(static_cast<grpc::StatusCode>(status.code()), std::string(status.message())));
  }
  // There may be more than there was when the last block was read.
  void Notify() {
    MutexLock lock(mutex_);
    more_ = true;
    if (!reading_ && !writing_ && next_ != nullptr) {
      ReadBlock();
    }
  }
  // `work` runs when the stream is over, or now if it is.
  void AtEnd(std::function<void()> work) {
    {
      MutexLock lock(mutex_);
      if (!done_) {
        at_end_.push_back(std::move(work));
        return;
      }
    }
    work();
  }

  void OnWriteDone(bool ok) override {
    MutexLock lock(mutex_);
    writing_ = false;
    if (!ok) {
      FinishOnce(grpc::Status::CANCELLED);
    }
    block_.pop_front();
    WriteOrRead();
  }
  void OnCancel() override {
    MutexLock lock(mutex_);
    FinishOnce(grpc::Status::CANCELLED);
  }
  void OnDone() override {
    std::vector<std::function<void()>> work;
    std::shared_ptr<PullStream> self;
    {
      MutexLock lock(mutex_);
      self = std::move(self_);
      done_ = true;
      work.swap(at_end_);
    }
    for (const std::function<void()>& each : work) {
      each();
    }
  }

 private:
  explicit PullStream(Executor* io) : io_(io) {}

  void ReadBlock() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (finished_) {
      return;
    }
    reading_ = true;
    more_ = false;
    io_->Post([self = self_] {
      if (self != nullptr) {
        self->TakeBlock(self->next_());
      }
    });
  }
  void TakeBlock(absl::StatusOr<StreamBlock<Message>> block) {
    MutexLock lock(mutex_);
    reading_ = false;
    if (!block.ok()) {
      FinishOnce(grpc::Status(static_cast<grpc::StatusCode>(block.status().code()),
                              std::string(block.status().message())));
      return;
    }
    end_ = block->end;
    for (Message& message : block->messages) {
      block_.push_back(std::move(message));
    }
    idle_ = block_.empty();
    WriteOrRead();
  }
  void WriteOrRead() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (finished_) {
      return;
    }
    if (!block_.empty()) {
      writing_ = true;
      this->StartWrite(&block_.front());
    } else if (end_) {
      FinishOnce(grpc::Status::OK);
    } else if (!idle_ || more_) {
      ReadBlock();
    }
  }
  void FinishOnce(const grpc::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (!finished_) {
      finished_ = true;
      this->Finish(status);
    }
  }

  Executor* const io_;
  std::shared_ptr<PullStream> self_;  // shared with blocks being read; gRPC's claim ends in OnDone
  Next next_;                         // set once, before the first block
  Mutex mutex_;
  std::deque<Message> block_ ABSL_GUARDED_BY(mutex_);  // the first one is being written
  bool reading_ ABSL_GUARDED_BY(mutex_) = false;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool idle_ ABSL_GUARDED_BY(mutex_) = false;  // the last block was empty
  bool more_ ABSL_GUARDED_BY(mutex_) = false;
  bool end_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  bool done_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::function<void()>> at_end_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ravel::coordinator
