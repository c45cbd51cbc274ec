#pragma once

// The service of proto/store.proto over a set of disks.

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include <absl/base/thread_annotations.h>
#include <grpcpp/grpcpp.h>

#include "common/mutex.h"
#include "proto/store.grpc.pb.h"
#include "worker/store/disk_set.h"
#include "worker/store/fence_book.h"
#include "worker/store/store_gate_service.h"
#include "worker/store/write_call_service.h"

namespace ravel::store_server {

struct StoreCounts {
  std::atomic<int64_t> calls = 0;
  std::atomic<int64_t> refused = 0;  // permission, identity, fence
  std::atomic<int64_t> failed = 0;   // all other errors but NotFound and AlreadyExists
  std::atomic<int64_t> written_bytes = 0;
  std::atomic<int64_t> read_bytes = 0;
  std::atomic<int64_t> finished_files = 0;
  std::atomic<int64_t> resumed_uploads = 0;
  std::atomic<int64_t> bad_blocks = 0;  // whose checksum differs
  std::atomic<int64_t> streams = 0;     // now
};

// Blocking handlers on threads of gRPC, but for Write, which has a thread for each stream.
// Thread-safe; disks, fences and gate outlive it.
class StoreService final : public v1::Store::WithRawCallbackMethod_Write<v1::Store::Service> {
 public:
  // `max_streams`: reads and writes at once; one more is UNAVAILABLE.
  StoreService(DiskSet* disks, FenceBook* fences, const StoreGate* gate, int64_t max_streams)
      : disks_(disks), fences_(fences), gate_(gate), max_streams_(max_streams) {}

  // Waits for the threads of streams.
  ~StoreService() override;

  const StoreCounts& counts() const { return counts_; }

  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Write(
      grpc::CallbackServerContext* context) override;
  grpc::Status StatWrite(grpc::ServerContext* context,
                         const v1::StoreStatWriteRequest* request,
                         v1::StoreStatWriteReply* reply) override;
  grpc::Status Read(grpc::ServerContext* context,
                    const v1::StoreReadRequest* request,
                    grpc::ServerWriter<v1::StoreReadReply>* stream) override;
  grpc::Status Stat(grpc::ServerContext* context,
                    const v1::StoreStatRequest* request,
                    v1::StoreStatReply* reply) override;
  grpc::Status List(grpc::ServerContext* context,
                    const v1::StoreListRequest* request,
                    grpc::ServerWriter<v1::StoreListReply>* stream) override;
  grpc::Status MakeFolder(grpc::ServerContext* context,
                          const v1::StoreMakeFolderRequest* request,
                          v1::StoreMakeFolderReply* reply) override;
  grpc::Status Publish(grpc::ServerContext* context,
                       const v1::StorePublishRequest* request,
                       v1::StorePublishReply* reply) override;
  grpc::Status Withdraw(grpc::ServerContext* context,
                        const v1::StoreWithdrawRequest* request,
                        v1::StoreWithdrawReply* reply) override;
  grpc::Status Fence(grpc::ServerContext* context,
                     const v1::StoreFenceRequest* request,
                     v1::StoreFenceReply* reply) override;
  grpc::Status Space(grpc::ServerContext* context,
                     const v1::StoreSpaceRequest* request,
                     v1::StoreSpaceReply* reply) override;

 private:
  class StreamTurn;
  class UploadTurn;
  absl::Status WriteFile(grpc::ServerContextBase& context, WriteCall& call);
  absl::Status WriteBlocks(const Caller& caller,
                           const v1::StoreWriteRequest::Open& open,
                           Upload& upload,
                           WriteCall& call);
  absl::Status ReadFile(const Caller& caller,
                        const v1::StoreReadRequest& request,
                        grpc::ServerWriter<v1::StoreReadReply>& stream);
  // Counts a call's result.
  grpc::Status Told(const absl::Status& status);

  DiskSet* const disks_;
  FenceBook* const fences_;
  const StoreGate* const gate_;
  const int64_t max_streams_;
  StoreCounts counts_;

  Mutex mutex_;
  CondVar changed_;
  int turns_ ABSL_GUARDED_BY(mutex_) = 0;  // streams that may still use this
  // Streams that write now, by path and upload.
  std::map<std::string, grpc::ServerContextBase*> writing_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ravel::store_server
