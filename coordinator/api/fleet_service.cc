// The gRPC end of the fleet streams. Each message is decoded on gRPC's thread, stamped with its
// arrival time and posted to the strand. Credit bounds memory: with kCredit messages of one node
// unhandled, its stream is not read until the strand has caught up, and flow control slows the node
// down; meanwhile it counts as heard. A stream object lives until gRPC's OnDone and is found by id,
// so a message to a stream that ended is dropped.

#include "coordinator/api/fleet_service.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <functional>
#include <string>
#include <utility>

#include <absl/strings/str_cat.h>

#include "common/ckpt/step_layout.h"
#include "common/clock.h"
#include "common/job_token.h"
#include "common/logging.h"
#include "common/plain_text.h"
#include "common/store/ravel_url.h"
#include "coordinator/access/access_registry.h"
#include "coordinator/api/access_gate_service.h"
#include "coordinator/api/fleet_messages_proto.h"
#include "coordinator/api/request_checks_service.h"
#include "coordinator/jobs/job_controller.h"

namespace ravel::coordinator {
namespace {

constexpr size_t kChunkBytes = 1 << 20;
constexpr int kCredit = 256;  // messages of one node that may wait for the strand
constexpr size_t kMaxToldName = 128;
constexpr size_t kMaxQueued = 100'000;  // messages to one node that does not read

// The token for saves of the job in a ravel-store; empty where it saves elsewhere.
std::string TokenFor(const StoreTokens& tokens,
                     const v1::StartTrainer& start,
                     const std::string& node) {
  const absl::StatusOr<store::RavelUrl> root = store::ParseRavelUrl(start.checkpoint_root());
  if (!root.ok()) {
    return "";
  }
  const absl::StatusOr<std::string> token = tokens.Sign({.folder = JobFolderHash(root->path),
                                                         .job_tag = ckpt::JobTag(start.job_uid()),
                                                         .epoch = start.epoch(),
                                                         .node = node});
  if (!token.ok()) {
    log::Warning(absl::StrCat("no token for a store: ", std::string(token.status().message())));
  }
  return token.value_or("");
}

// Streams one plan in chunks, then deletes itself.
class PlanStream : public grpc::ServerWriteReactor<v1::PlanChunk> {
 public:
  explicit PlanStream(std::shared_ptr<const PlannedWorld> world) : world_(std::move(world)) {
    if (world_ == nullptr) {
      Finish(grpc::Status(grpc::StatusCode::NOT_FOUND, "no plan with this digest is in use"));
    } else {
      Next();
    }
  }
  void OnWriteDone(bool ok) override {
    if (ok) {
      Next();
    } else {
      Finish(grpc::Status::CANCELLED);
    }
  }
  void OnDone() override { delete this; }

 private:
  void Next() {
    if (offset_ >= world_->bytes.size()) {
      Finish(grpc::Status::OK);
      return;
    }
    chunk_.set_data(world_->bytes.substr(offset_, kChunkBytes));
    offset_ += kChunkBytes;
    StartWrite(&chunk_);
  }

  std::shared_ptr<const PlannedWorld> world_;  // shared with the plan cache
  size_t offset_ = 0;
  v1::PlanChunk chunk_;
};

class RefusedStream : public grpc::ServerBidiReactor<v1::Up, v1::Down> {
 public:
  explicit RefusedStream(const grpc::Status& status) { Finish(status); }
  void OnDone() override { delete this; }
};

}  // namespace

// One node's stream. Lives until gRPC says OnDone.
class FleetStream : public grpc::ServerBidiReactor<v1::Up, v1::Down> {
 public:
  // `node`: whom the certificate names; it may speak for nobody else. Empty: plaintext.
  FleetStream(FleetService* service, StreamId id, std::string node, std::string peer)
      : service_(service), id_(id), node_(std::move(node)), peer_(std::move(peer)) {}
  const std::string& node() const { return node_; }
  // After the service knows the stream.
  void Begin() { StartRead(&read_); }

  void OnReadDone(bool ok) override {
    if (!ok) {
      Shut(grpc::Status::OK);
      return;
    }
    JobController* controller = service_->controller_;
    const StreamId id = id_;
    const int64_t now_ms = SystemClock::Get().MonotonicMs();
    arrived_ms_ = now_ms;  // before the strand gets to it
    if (read_.kind_case() == v1::Up::kHello) {
      absl::StatusOr<HelloMessage> hello = FromProto(read_.hello());
      if (!hello.ok()) {
        Shut(grpc::Status(grpc::StatusCode::INVALID_ARGUMENT,
                          std::string(hello.status().message())));
        return;
      }
      if (!node_.empty() && hello->node_id != node_) {
        RefuseName(hello->node_id);
        return;
      }
      Handle("Hello", [controller, id, now_ms, hello = *std::move(hello)] {
        controller->OnHello(id, hello, now_ms);
      });
    } else {
      absl::StatusOr<UpMessage> message = FromProto(read_);
      if (message.ok()) {
        Handle("Up", [controller, id, now_ms, message = *std::move(message)] {
          controller->OnUp(id, message, now_ms);
        });
      } else {
        log::Warning(absl::StrCat("a message of a daemon was dropped: ",
                                  std::string(message.status().message())));
      }
    }
    MutexLock lock(mutex_);
    paused_ = handling_ >= kCredit;
    if (!finished_ && !paused_) {
      StartRead(&read_);
    }
  }

  // The strand is through with a message: a node that was ahead of it may send on.
  void Worked() {
    MutexLock lock(mutex_);
    --handling_;
    if (std::exchange(paused_, false) && !finished_) {
      arrived_ms_ = SystemClock::Get().MonotonicMs();
      StartRead(&read_);
    }
  }

  void OnWriteDone(bool ok) override {
    if (!ok) {
      Shut(grpc::Status::OK);
      return;
    }
    MutexLock lock(mutex_);
    queue_.pop_front();
    WriteNext();
  }

  void OnCancel() override { Shut(grpc::Status::CANCELLED); }

  void OnDone() override {
    JobController* controller = service_->controller_;
    const StreamId id = id_;
    const int64_t now_ms = SystemClock::Get().MonotonicMs();
    service_->strand_->Post([controller, id, now_ms] { controller->OnStreamClosed(id, now_ms); });
    service_->Forget(id_);  // may delete this
  }

  // A node whose stream is not read because the strand is behind does not count as silent.
  int64_t arrived_ms() {
    MutexLock lock(mutex_);
    return paused_ ? SystemClock::Get().MonotonicMs() : arrived_ms_.load();
  }

  void Push(v1::Down message) {
    {
      MutexLock lock(mutex_);
      if (closing_ || finished_) {
        return;
      }
      if (queue_.size() < kMaxQueued) {
        queue_.push_back(std::move(message));
        if (queue_.size() == 1) {
          WriteNext();
        }
        return;
      }
    }
    Shut(grpc::Status(grpc::StatusCode::RESOURCE_EXHAUSTED, "the node does not read its stream"));
  }

  // After what is queued.
  void CloseWhenWritten() {
    MutexLock lock(mutex_);
    closing_ = true;
    if (queue_.empty()) {
      FinishOnce(grpc::Status::OK);
    }
  }

 private:
  void RefuseName(const std::string& said) {
    const std::string why = absl::StrCat("the certificate is of the node ",
                                         node_,
                                         ", which may not speak for the node ",
                                         CutText(EscapeControlText(said), kMaxToldName));
    AuditRow row;
    row.who = absl::StrCat("node/", node_);
    row.peer = peer_;
    row.verb = "Fleet.Connect";
    row.object = absl::StrCat("node/", CutText(EscapeControlText(said), kMaxToldName));
    row.result = "PERMISSION_DENIED";
    row.message = why;
    service_->access_->audit().Record(std::move(row));
    Shut(grpc::Status(grpc::StatusCode::PERMISSION_DENIED, why));
  }
  void Handle(const char* name, std::function<void()> work) {
    {
      MutexLock lock(mutex_);
      ++handling_;
    }
    service_->strand_->PostNamed(name, [service = service_, id = id_, work = std::move(work)] {
      work();
      service->Worked(id);
    });
  }
  void Shut(const grpc::Status& status) {
    MutexLock lock(mutex_);
    FinishOnce(status);
  }
  void WriteNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (!queue_.empty() && !finished_) {
      StartWrite(&queue_.front());
    } else if (closing_) {
      FinishOnce(grpc::Status::OK);
    }
  }
  void FinishOnce(const grpc::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (!finished_) {
      finished_ = true;
      Finish(status);
    }
  }

  FleetService* service_;
  const StreamId id_;
  const std::string node_;
  const std::string peer_;
  std::atomic<int64_t> arrived_ms_ = 0;  // monotonic: newest message
  v1::Up read_;
  Mutex mutex_;
  std::deque<v1::Down> queue_ ABSL_GUARDED_BY(mutex_);  // the first one is being written
  int handling_ ABSL_GUARDED_BY(mutex_) = 0;            // messages that wait for the strand
  bool paused_ ABSL_GUARDED_BY(mutex_) = false;  // nothing is read until the strand has worked
  bool closing_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
};

grpc::ServerBidiReactor<v1::Up, v1::Down>* FleetService::Connect(
    grpc::CallbackServerContext* context) {
  std::string node;
  if (access_ != nullptr) {
    const absl::StatusOr<Identity> caller = CallerOf(*access_, *context);
    if (!caller.ok()) {  // revoked since the gate
      return new RefusedStream(ToGrpc(caller.status()));
    }
    node = caller->name;
  }
  std::shared_ptr<FleetStream> stream;
  {
    MutexLock lock(mutex_);
    if (closed_) {  // a node that came back at once would hold up the end
      return new RefusedStream(
          grpc::Status(grpc::StatusCode::UNAVAILABLE, "this coordinator is going down"));
    }
    const StreamId id = ++last_stream_;
    stream = std::make_shared<FleetStream>(this, id, node, context->peer());
    streams_[id] = stream;
  }
  stream->Begin();
  return stream.get();
}

grpc::ServerWriteReactor<v1::PlanChunk>* FleetService::FetchPlan(
    grpc::CallbackServerContext* /*context*/, const v1::FetchPlanRequest* request) {
  return new PlanStream(planner_->Find(request->digest()));
}

void FleetService::Send(StreamId stream, DownMessage message) {
  std::shared_ptr<FleetStream> target;
  {
    MutexLock lock(mutex_);
    const auto found = streams_.find(stream);
    if (found == streams_.end()) {
      return;
    }
    target = found->second;
  }
  v1::Down down = ToProto(message);
  if (access_ != nullptr && down.has_launch()) {
    for (v1::StartTrainer& start : *down.mutable_launch()->mutable_trainers()) {
      start.set_store_token(TokenFor(access_->store_tokens(), start, target->node()));
    }
  }
  target->Push(std::move(down));
}

void FleetService::Close(StreamId stream) {
  std::shared_ptr<FleetStream> target;
  {
    MutexLock lock(mutex_);
    const auto found = streams_.find(stream);
    if (found == streams_.end()) {
      return;
    }
    target = found->second;
  }
  target->CloseWhenWritten();
}

void FleetService::Worked(StreamId stream) {
  std::shared_ptr<FleetStream> target;
  {
    MutexLock lock(mutex_);
    const auto found = streams_.find(stream);
    if (found == streams_.end()) {
      return;
    }
    target = found->second;
  }
  target->Worked();
}

int64_t FleetService::ArrivalMs(StreamId stream) {
  MutexLock lock(mutex_);
  const auto found = streams_.find(stream);
  return found == streams_.end() ? 0 : found->second->arrived_ms();
}

void FleetService::CloseAll() {
  std::map<StreamId, std::shared_ptr<FleetStream>> streams;
  {
    MutexLock lock(mutex_);
    closed_ = true;
    streams = streams_;
  }
  for (const auto& [id, stream] : streams) {
    stream->CloseWhenWritten();
  }
}

void FleetService::Forget(StreamId stream) {
  std::shared_ptr<FleetStream> last;  // destroyed after the lock is released
  MutexLock lock(mutex_);
  const auto found = streams_.find(stream);
  if (found != streams_.end()) {
    last = std::move(found->second);
    streams_.erase(found);
  }
}

}  // namespace ravel::coordinator
