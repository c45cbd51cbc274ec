#include "tests/worker/daemon/fake_fleet_service.h"

#include <atomic>
#include <deque>
#include <set>
#include <utility>

#include <absl/strings/str_cat.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <grpcpp/server_context.h>
#include <gtest/gtest.h>

#include "common/mutex.h"
#include "proto/fleet.grpc.pb.h"
#include "tests/testing/eventually.h"

namespace ravel::daemon {
namespace {

// Processes start and threads run late on a machine that has other work.
constexpr std::chrono::seconds kPatience{30};

class Service;

// One daemon's stream; deletes itself in OnDone.
class Stream final : public grpc::ServerBidiReactor<v1::Up, v1::Down> {
 public:
  explicit Stream(Service& service) : service_(service) { StartRead(&message_); }

  void Push(v1::Down message) {
    const MutexLock lock(mutex_);
    queue_.push_back(std::move(message));
    if (queue_.size() == 1 && !finished_) {
      StartWrite(&queue_.front());
    }
  }
  void End() {
    const MutexLock lock(mutex_);
    if (!finished_) {
      finished_ = true;
      Finish(grpc::Status::OK);
    }
  }
  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override {
    const MutexLock lock(mutex_);
    queue_.pop_front();
    if (ok && !queue_.empty() && !finished_) {
      StartWrite(&queue_.front());
    }
  }
  void OnCancel() override { End(); }
  void OnDone() override;

 private:
  Service& service_;
  v1::Up message_;
  Mutex mutex_;
  std::deque<v1::Down> queue_ ABSL_GUARDED_BY(mutex_);
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
};

class PlanStream final : public grpc::ServerWriteReactor<v1::PlanChunk> {
 public:
  PlanStream(std::string plan, bool comes, std::atomic<int>& held)
      : plan_(std::move(plan)), comes_(comes), held_(held) {
    ++held_;
    if (comes) {
      Next();
    }
  }
  ~PlanStream() override { --held_; }
  void OnWriteDone(bool) override { Next(); }
  void OnCancel() override {
    if (!comes_) {
      Finish(grpc::Status::CANCELLED);
    }
  }
  void OnDone() override { delete this; }

 private:
  void Next() {
    constexpr size_t kChunk = 3;  // several chunks even of a tiny plan
    if (sent_ >= plan_.size()) {
      Finish(grpc::Status::OK);
      return;
    }
    chunk_.set_data(plan_.substr(sent_, kChunk));
    sent_ += kChunk;
    StartWrite(&chunk_);
  }
  const std::string plan_;
  const bool comes_;
  std::atomic<int>& held_;
  size_t sent_ = 0;
  v1::PlanChunk chunk_;
};

class Service final : public v1::Fleet::CallbackService, public FakeFleet {
 public:
  explicit Service(Options options)
      : options_(std::move(options)), acknowledge_(options_.acknowledge) {
    grpc::ServerBuilder builder;
    builder.AddListeningPort(
        absl::StrCat("127.0.0.1:", options_.port), grpc::InsecureServerCredentials(), &port_);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
  }
  ~Service() override {
    server_->Shutdown(std::chrono::system_clock::now());
    server_->Wait();
  }

  std::string address() const override { return absl::StrCat("127.0.0.1:", port_); }
  int port() const override { return port_; }

  int64_t Send(v1::Down message) override {
    const MutexLock lock(mutex_);
    if (message.term() == 0) {
      message.set_term(options_.term);
    }
    if (message.command_id() == 0) {
      message.set_command_id(++command_id_);
    }
    const int64_t id = message.command_id();
    EXPECT_NE(newest_, nullptr) << "no daemon is connected";
    if (newest_ != nullptr) {
      newest_->Push(std::move(message));
    }
    return id;
  }
  void Disconnect() override {
    const MutexLock lock(mutex_);
    if (newest_ != nullptr) {
      newest_->End();
    }
  }
  void SetAcknowledge(bool acknowledge) override {
    const MutexLock lock(mutex_);
    acknowledge_ = acknowledge;
  }
  void SetPlansCome(bool come) override {
    const MutexLock lock(mutex_);
    plans_come_ = come;
  }
  int plans_held() const override { return plans_held_; }
  std::vector<v1::Up> received() const override {
    const MutexLock lock(mutex_);
    return received_;
  }

  grpc::ServerBidiReactor<v1::Up, v1::Down>* Connect(grpc::CallbackServerContext*) override {
    auto* stream = new Stream(*this);
    const MutexLock lock(mutex_);
    newest_ = stream;
    return stream;
  }
  grpc::ServerWriteReactor<v1::PlanChunk>* FetchPlan(grpc::CallbackServerContext*,
                                                     const v1::FetchPlanRequest*) override {
    const MutexLock lock(mutex_);
    return new PlanStream(options_.plan, plans_come_, plans_held_);
  }

  void OnUp(Stream* stream, const v1::Up& up) {
    v1::Down answer;
    answer.set_term(options_.term);
    bool answers = false;
    {
      const MutexLock lock(mutex_);
      answers = up.has_hello() || (up.has_beat() && acknowledge_);
    }
    if (up.has_hello() && !options_.reject.empty()) {
      answer.set_rejected(options_.reject);
    } else if (up.has_hello()) {
      answer.mutable_welcome()->set_term(options_.term);
      answer.mutable_welcome()->set_cluster_id(options_.cluster_id);
      answer.mutable_welcome()->set_beat_interval_ms(options_.beat_interval_ms);
      answer.mutable_welcome()->set_protocol(options_.protocol);
      for (const v1::HeldTrainer& held : options_.stop) {
        *answer.mutable_welcome()->add_stop() = held;
      }
    } else if (up.has_beat()) {
      answer.mutable_beat_ack()->set_seq(up.beat().seq());
    }
    if (answers) {
      stream->Push(std::move(answer));
    }
    // Last: what a test says after it has seen a message comes after the answer to that message.
    const MutexLock lock(mutex_);
    if (!up.has_beat() || up.beat().trainers_size() > 0) {
      received_.push_back(up);
    }
  }
  void OnGone(Stream* stream) {
    const MutexLock lock(mutex_);
    newest_ = newest_ == stream ? nullptr : newest_;
  }

 private:
  const Options options_;
  int port_ = 0;
  mutable Mutex mutex_;
  bool acknowledge_ ABSL_GUARDED_BY(mutex_);
  std::atomic<int> plans_held_{0};
  bool plans_come_ ABSL_GUARDED_BY(mutex_) = true;
  int64_t command_id_ ABSL_GUARDED_BY(mutex_) = 0;
  Stream* newest_ ABSL_GUARDED_BY(mutex_) = nullptr;
  std::vector<v1::Up> received_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<grpc::Server> server_;
};

void Stream::OnReadDone(bool ok) {
  if (!ok) {
    End();
    return;
  }
  service_.OnUp(this, message_);
  StartRead(&message_);
}

void Stream::OnDone() {
  service_.OnGone(this);
  delete this;
}

}  // namespace

std::unique_ptr<FakeFleet> FakeFleet::Start(Options options) {
  return std::make_unique<Service>(std::move(options));
}

int FakeFleet::Count(const std::function<bool(const v1::Up&)>& matches) const {
  int count = 0;
  for (const v1::Up& up : received()) {
    count += matches(up) ? 1 : 0;
  }
  return count;
}

v1::Up FakeFleet::WaitFor(const std::function<bool(const v1::Up&)>& matches, int index) const {
  v1::Up found;
  const bool there = testing::Eventually(kPatience, [&] {
    int seen = 0;
    for (const v1::Up& up : received()) {
      if (matches(up) && seen++ == index) {
        found = up;
        return true;
      }
    }
    return false;
  });
  if (!there) {
    ADD_FAILURE() << "the message did not come; there came:";
    for (const v1::Up& up : received()) {
      ADD_FAILURE() << up.ShortDebugString();
    }
  }
  return found;
}

}  // namespace ravel::daemon
