#pragma once

// A server stream fed from the controller's strand: a bounded queue in front of gRPC's one write at
// a time.

#include <deque>
#include <memory>
#include <utility>

#include <absl/base/thread_annotations.h>
#include <grpcpp/grpcpp.h>

#include "common/mutex.h"
#include "coordinator/executor.h"
#include "coordinator/job_controller.h"

namespace ravel::coordinator {

// kKeepAll: every item arrives, and a reader that is too slow is cut off. kNewestOnly: items that
// were not sent yet are replaced by newer ones.
enum class StreamBacklog { kKeepAll, kNewestOnly };

// Thread-safe. Owns itself until gRPC is done with it.
template <typename Message>
class StreamWriter : public grpc::ServerWriteReactor<Message> {
 public:
  static std::shared_ptr<StreamWriter> Create(Executor* strand,
                                              JobController* controller,
                                              StreamBacklog backlog) {
    std::shared_ptr<StreamWriter> writer(new StreamWriter(strand, controller, backlog));
    writer->self_ = writer;
    return writer;
  }

  // On the strand. The subscription ends with the stream.
  void Follow(const std::string& job_uid, FeedSink sink) {
    subscription_ = controller_->feed().Subscribe(job_uid, std::move(sink));
    MutexLock lock(mutex_);
    if (done_) {
      controller_->feed().Unsubscribe(subscription_);
    }
  }

  void Push(Message message) {
    MutexLock lock(mutex_);
    if (finished_ || ending_) {
      return;
    }
    if (backlog_ == StreamBacklog::kNewestOnly && queue_.size() > 1) {
      queue_.back() = std::move(message);
      return;
    }
    if (queue_.size() >= kMaxQueued) {
      FinishOnce(
          grpc::Status(grpc::StatusCode::RESOURCE_EXHAUSTED, "the stream is not read fast enough"));
      return;
    }
    queue_.push_back(std::move(message));
    if (queue_.size() == 1) {
      this->StartWrite(&queue_.front());
    }
  }
  // After what is queued.
  void End(const grpc::Status& status) {
    MutexLock lock(mutex_);
    ending_ = true;
    end_status_ = status;
    if (queue_.empty()) {
      FinishOnce(status);
    }
  }

  void OnWriteDone(bool ok) override {
    MutexLock lock(mutex_);
    queue_.pop_front();
    if (!ok) {
      FinishOnce(grpc::Status::CANCELLED);
    } else if (finished_) {
      return;
    } else if (!queue_.empty()) {
      this->StartWrite(&queue_.front());
    } else if (ending_) {
      FinishOnce(end_status_);
    }
  }
  void OnCancel() override {
    MutexLock lock(mutex_);
    FinishOnce(grpc::Status::CANCELLED);
  }
  void OnDone() override {
    {
      MutexLock lock(mutex_);
      done_ = true;
    }
    std::shared_ptr<StreamWriter> self = std::move(self_);
    strand_->Post([self] {
      if (self->subscription_ != 0) {
        self->controller_->feed().Unsubscribe(self->subscription_);
      }
    });
  }

 private:
  static constexpr size_t kMaxQueued = 1000;

  StreamWriter(Executor* strand, JobController* controller, StreamBacklog backlog)
      : strand_(strand), controller_(controller), backlog_(backlog) {}
  void FinishOnce(const grpc::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (!finished_) {
      finished_ = true;
      this->Finish(status);
    }
  }

  Executor* strand_;
  JobController* controller_;
  const StreamBacklog backlog_;
  WatchId subscription_ = 0;  // strand only
  std::shared_ptr<StreamWriter>
      self_;  // shared with the feed's sink; gRPC's own claim ends in OnDone
  Mutex mutex_;
  std::deque<Message> queue_ ABSL_GUARDED_BY(mutex_);  // the first one is being written
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  bool done_ ABSL_GUARDED_BY(mutex_) = false;
  grpc::Status end_status_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ravel::coordinator
