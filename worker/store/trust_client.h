#pragma once

// Asks the coordinator, again and again, whom the store is to refuse and which authorities it is to
// trust.

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include <absl/base/thread_annotations.h>
#include <grpcpp/grpcpp.h>

#include "common/mutex.h"
#include "common/status.h"
#include "proto/access.grpc.pb.h"
#include "worker/store/trust_book.h"

namespace ravel::store_server {

struct TrustSource {
  std::string coordinator;      // HOST:PORT
  std::string identity_folder;  // of the store: authority.pem, certificate.pem, key.pem
  std::chrono::milliseconds interval{2000};
  std::chrono::milliseconds deadline{2000};  // of one call
};

// Fail-static: while the coordinator does not answer, the last answer holds. The authorities go to
// authority.pem, which the gate and this client read again. Thread-safe.
class TrustClient {
 public:
  // Asks once, for at most a deadline, then on a thread of its own. FailedPrecondition for a
  // certificate that cannot be shown to a server. The book outlives it.
  static absl::StatusOr<std::unique_ptr<TrustClient>> Start(TrustSource source, TrustBook* book);
  ~TrustClient();
  TrustClient(const TrustClient&) = delete;
  TrustClient& operator=(const TrustClient&) = delete;

 private:
  TrustClient(TrustSource source, TrustBook* book) : source_(std::move(source)), book_(book) {}
  void Run();
  // One call, and what follows from its answer.
  absl::Status Ask();
  absl::Status Take(const v1::GetTrustResponse& response);
  void TakeAuthority(const std::string& authority);
  // A channel by the identity that lies in the folder now.
  absl::Status Connect();
  void Tell(const absl::Status& status);

  const TrustSource source_;
  TrustBook* const book_;
  // These are the thread's alone.
  std::string identity_;
  std::unique_ptr<v1::Access::Stub> stub_;
  std::string version_;  // of the last answer that was taken; empty: it is to be told all
  int failures_ = 0;     // since the last answer

  Mutex mutex_;
  CondVar changed_;
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;
  grpc::ClientContext* call_ ABSL_GUARDED_BY(mutex_) = nullptr;  // under way
  std::thread thread_;
};

}  // namespace ravel::store_server
