// Handlers block: each runs on a thread of gRPC, or of its own, whose number is bounded with the
// number of streams. An upload has one writer: a newer stream for it ends the older one, whose
// client is gone, and waits until its thread has let go of the file.

#include "worker/store/store_service.h"

#include <algorithm>
#include <chrono>
#include <span>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>

#include "common/crc32c.h"
#include "common/logging.h"
#include "common/signed_size.h"
#include "common/store/block_message_client.h"

namespace ravel::store_server {
namespace {

constexpr int64_t kMaxBlockBytes = store::kStoreBlockBytes;
static_assert(kMaxBlockBytes == kUploadBlockBytes);
constexpr int64_t kMaxReadBytes = int64_t{1} << 30;
constexpr int64_t kMaxFileBytes = int64_t{1} << 44;
constexpr int kMostListed = 1000;
constexpr size_t kUploadDigits = 16;
constexpr auto kTakeOverTime = std::chrono::seconds(5);

absl::Status CheckUpload(std::string_view upload) {
  const bool good = upload.size() == kUploadDigits &&
                    upload.find_first_not_of("0123456789abcdef") == std::string_view::npos;
  return good ? absl::OkStatus()
              : absl::InvalidArgumentError("upload: expected 16 hexadecimal digits");
}

absl::Status CheckFilePath(std::string_view path) {
  RETURN_IF_ERROR(CheckPath("path", path));
  return path.empty() ? absl::InvalidArgumentError("path: expected the name of a file")
                      : absl::OkStatus();
}

absl::Status CheckOpen(const v1::StoreWriteRequest& first) {
  if (!first.has_open()) {
    return absl::InvalidArgumentError("open: expected in the first message");
  }
  const v1::StoreWriteRequest::Open& open = first.open();
  RETURN_IF_ERROR(CheckFilePath(open.path()));
  RETURN_IF_ERROR(CheckUpload(open.upload()));
  if (open.offset() < 0 || open.offset() > kMaxFileBytes || open.expected_bytes() < 0 ||
      open.expected_bytes() > kMaxFileBytes) {
    return absl::InvalidArgumentError("offset, expected_bytes: expected 0 to 2^44");
  }
  return absl::OkStatus();
}

}  // namespace

// One of the streams that may run at once.
class StoreService::StreamTurn {
 public:
  explicit StreamTurn(StoreService* service) : service_(service) {
    {
      const MutexLock lock(service_->mutex_);
      ++service_->turns_;
    }
    held_ = service_->counts_.streams.fetch_add(1) < service_->max_streams_;
  }
  ~StreamTurn() {
    service_->counts_.streams.fetch_sub(1);
    const MutexLock lock(service_->mutex_);
    --service_->turns_;
    service_->changed_.NotifyAll();
  }
  StreamTurn(const StreamTurn&) = delete;
  StreamTurn& operator=(const StreamTurn&) = delete;
  absl::Status status() const {
    return held_ ? absl::OkStatus()
                 : absl::UnavailableError("the store has as many streams as it takes");
  }

 private:
  StoreService* const service_;
  bool held_ = false;
};

// The only writer of an upload.
class StoreService::UploadTurn {
 public:
  UploadTurn(StoreService* service, std::string key, grpc::ServerContextBase* context)
      : service_(service), key_(std::move(key)), context_(context) {}
  ~UploadTurn() {
    const MutexLock lock(service_->mutex_);
    if (held_) {
      service_->writing_.erase(key_);
      service_->changed_.NotifyAll();
    }
  }
  UploadTurn(const UploadTurn&) = delete;
  UploadTurn& operator=(const UploadTurn&) = delete;

  absl::Status Take() {
    const auto end = std::chrono::steady_clock::now() + kTakeOverTime;
    const MutexLock lock(service_->mutex_);
    for (;;) {
      const auto [at, added] = service_->writing_.emplace(key_, context_);
      if (added) {
        held_ = true;
        return absl::OkStatus();
      }
      at->second->TryCancel();
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
          end - std::chrono::steady_clock::now());
      if (left.count() <= 0) {
        return absl::UnavailableError("another stream writes this upload");
      }
      service_->changed_.WaitFor(service_->mutex_, left);
    }
  }

 private:
  StoreService* const service_;
  const std::string key_;
  grpc::ServerContextBase* const context_;
  bool held_ = false;
};

StoreService::~StoreService() {
  const MutexLock lock(mutex_);
  while (turns_ > 0) {
    changed_.Wait(mutex_);
  }
}

grpc::Status StoreService::Told(const absl::Status& status) {
  ++counts_.calls;
  if (status.ok()) {
    return grpc::Status::OK;
  }
  if (absl::IsPermissionDenied(status) || absl::IsUnauthenticated(status) ||
      absl::IsFailedPrecondition(status)) {
    ++counts_.refused;
    log::Warning(std::string(status.message()));
  } else if (!absl::IsNotFound(status) && !absl::IsAlreadyExists(status)) {
    ++counts_.failed;
    log::Warning(std::string(status.message()));
  }
  return {static_cast<grpc::StatusCode>(status.code()), std::string(status.message())};
}

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* StoreService::Write(
    grpc::CallbackServerContext* context) {
  const auto turn = std::make_shared<StreamTurn>(this);  // shared: functions can be copied
  if (!turn->status().ok()) {
    return WriteCall::Refuse(Told(turn->status()));
  }
  return WriteCall::Start(
      [this, context, turn](WriteCall& call) { return Told(WriteFile(*context, call)); });
}

absl::Status StoreService::WriteFile(grpc::ServerContextBase& context, WriteCall& call) {
  ASSIGN_OR_RETURN(const Caller caller, gate_->CallerOf(context));
  const grpc::ByteBuffer* const message = call.Read();
  if (message == nullptr) {
    return absl::CancelledError("the stream ended before its first message");
  }
  ASSIGN_OR_RETURN(const v1::StoreWriteRequest first, store::ReadFirstMessage(*message));
  RETURN_IF_ERROR(gate_->CheckStill(caller));
  RETURN_IF_ERROR(CheckOpen(first));
  const v1::StoreWriteRequest::Open& open = first.open();
  RETURN_IF_ERROR(CheckAct(caller, Act::kWrite, open.path(), *fences_));
  UploadTurn writer(this, absl::StrCat(open.path(), "\n", open.upload()), &context);
  RETURN_IF_ERROR(writer.Take());
  ASSIGN_OR_RETURN(
      const std::unique_ptr<Upload> upload,
      disks_->BeginUpload(open.path(), open.upload(), open.offset(), open.expected_bytes()));
  counts_.resumed_uploads += open.offset() > 0 ? 1 : 0;
  v1::StoreWriteReply reply;
  reply.set_written(upload->appended());
  if (!call.Write(reply)) {
    return absl::CancelledError("the stream ended");
  }
  return WriteBlocks(caller, open, *upload, call);
}

absl::Status StoreService::WriteBlocks(const Caller& caller,
                                       const v1::StoreWriteRequest::Open& open,
                                       Upload& upload,
                                       WriteCall& call) {
  v1::StoreWriteReply reply;
  int64_t acknowledged = upload.written();
  const auto room = [&upload](int64_t bytes) { return upload.Room(bytes); };
  while (const grpc::ByteBuffer* const message = call.Read()) {
    RETURN_IF_ERROR(gate_->CheckStill(caller));
    ASSIGN_OR_RETURN(const store::BlockMessage block,
                     store::ReadBlockMessage(*message, store::kWrittenBlock, room));
    if (block.finish) {
      RETURN_IF_ERROR(CheckAct(caller, Act::kWrite, open.path(), *fences_));
      RETURN_IF_ERROR(upload.Finish(block.offset, block.crc32c));
      ++counts_.finished_files;
      reply.set_finished(true);
    } else {
      if (block.offset != upload.appended() || block.data.empty()) {
        return absl::InvalidArgumentError(
            absl::StrCat("block: expected 1 byte to 2 MiB at byte ", upload.appended()));
      }
      if (block.sum != block.crc32c) {
        ++counts_.bad_blocks;
        return absl::AbortedError(
            absl::StrCat("block at byte ", block.offset, ": its checksum differs"));
      }
      upload.Take(std::ssize(block.data), block.crc32c);
      counts_.written_bytes += std::ssize(block.data);
      if (upload.MayTakeMore() && call.HasArrived()) {
        continue;  // several blocks in one write
      }
      RETURN_IF_ERROR(upload.Start());
      if (!call.HasArrived()) {
        RETURN_IF_ERROR(upload.Settle());
      }
    }
    if (!block.finish && upload.written() == acknowledged) {
      continue;
    }
    acknowledged = upload.written();
    reply.set_written(acknowledged);
    if (!call.Write(reply)) {
      return absl::CancelledError("the stream ended");
    }
    if (block.finish) {
      return absl::OkStatus();
    }
  }
  return absl::OkStatus();  // its part stays, to go on with
}

grpc::Status StoreService::StatWrite(grpc::ServerContext* context,
                                     const v1::StoreStatWriteRequest* request,
                                     v1::StoreStatWriteReply* reply) {
  const auto look = [&]() -> absl::Status {
    ASSIGN_OR_RETURN(const Caller caller, gate_->CallerOf(*context));
    RETURN_IF_ERROR(CheckFilePath(request->path()));
    RETURN_IF_ERROR(CheckUpload(request->upload()));
    // A stream that was cut off may still be at its last block, or at the rename.
    UploadTurn writer(this, absl::StrCat(request->path(), "\n", request->upload()), context);
    RETURN_IF_ERROR(writer.Take());
    const absl::StatusOr<FileFacts> facts = disks_->Stat(request->path());
    if (facts.ok() && !facts->is_folder) {
      reply->set_there(true);
      reply->set_size(facts->size);
      ASSIGN_OR_RETURN(const uint32_t crc, disks_->ChecksumOf(request->path()));
      reply->set_crc32c(crc);
      return absl::OkStatus();
    }
    ASSIGN_OR_RETURN(const int64_t written, disks_->WrittenOf(request->path(), request->upload()));
    reply->set_written(written);
    return absl::OkStatus();
  };
  return Told(look());
}

grpc::Status StoreService::Read(grpc::ServerContext* context,
                                const v1::StoreReadRequest* request,
                                grpc::ServerWriter<v1::StoreReadReply>* stream) {
  const auto read = [&]() -> absl::Status {
    const StreamTurn turn(this);
    RETURN_IF_ERROR(turn.status());
    ASSIGN_OR_RETURN(const Caller caller, gate_->CallerOf(*context));
    return ReadFile(caller, *request, *stream);
  };
  return Told(read());
}

absl::Status StoreService::ReadFile(const Caller& caller,
                                    const v1::StoreReadRequest& request,
                                    grpc::ServerWriter<v1::StoreReadReply>& stream) {
  RETURN_IF_ERROR(CheckFilePath(request.path()));
  if (request.offset() < 0 || request.length() < 0 || request.length() > kMaxReadBytes) {
    return absl::InvalidArgumentError("offset, length: expected 0 and more, length at most 2^30");
  }
  ASSIGN_OR_RETURN(const std::unique_ptr<store::FileReader> file, disks_->OpenFile(request.path()));
  if (request.offset() > file->size() || request.length() > file->size() - request.offset()) {
    return absl::OutOfRangeError(absl::StrCat(request.path(), ": ends at byte ", file->size()));
  }
  v1::StoreReadReply reply;
  const int64_t end = request.offset() + request.length();
  for (int64_t at = request.offset(); at < end; at += kMaxBlockBytes) {
    RETURN_IF_ERROR(gate_->CheckStill(caller));
    std::string& data = *reply.mutable_data();
    data.resize(Size(std::min(kMaxBlockBytes, end - at)));
    RETURN_IF_ERROR(file->ReadAt(at, std::as_writable_bytes(std::span(data.data(), data.size()))));
    reply.set_offset(at);
    reply.set_crc32c(Crc32c(0, data.data(), data.size()));
    if (!stream.Write(reply)) {
      return absl::CancelledError("the stream ended");
    }
    counts_.read_bytes += std::ssize(data);
  }
  return absl::OkStatus();
}

grpc::Status StoreService::Stat(grpc::ServerContext* context,
                                const v1::StoreStatRequest* request,
                                v1::StoreStatReply* reply) {
  const auto stat = [&]() -> absl::Status {
    RETURN_IF_ERROR(gate_->CallerOf(*context).status());
    RETURN_IF_ERROR(CheckPath("path", request->path()));
    ASSIGN_OR_RETURN(const FileFacts facts, disks_->Stat(request->path()));
    reply->set_is_folder(facts.is_folder);
    reply->set_size(facts.size);
    reply->set_changed_ms(facts.changed_ms);
    return absl::OkStatus();
  };
  return Told(stat());
}

grpc::Status StoreService::List(grpc::ServerContext* context,
                                const v1::StoreListRequest* request,
                                grpc::ServerWriter<v1::StoreListReply>* stream) {
  const auto list = [&]() -> absl::Status {
    RETURN_IF_ERROR(gate_->CallerOf(*context).status());
    RETURN_IF_ERROR(CheckPath("path", request->path()));
    ASSIGN_OR_RETURN(const std::vector<store::ListedEntry> entries, disks_->List(request->path()));
    v1::StoreListReply reply;
    for (const store::ListedEntry& entry : entries) {
      v1::StoreListReply::Entry& added = *reply.add_entries();
      added.set_name(entry.name);
      added.set_is_folder(entry.is_directory);
      added.set_size(entry.size);
      if (reply.entries_size() == kMostListed) {
        if (!stream->Write(reply)) {
          return absl::CancelledError("the stream ended");
        }
        reply.clear_entries();
      }
    }
    return reply.entries_size() == 0 || stream->Write(reply)
               ? absl::OkStatus()
               : absl::CancelledError("the stream ended");
  };
  return Told(list());
}

grpc::Status StoreService::MakeFolder(grpc::ServerContext* context,
                                      const v1::StoreMakeFolderRequest* request,
                                      v1::StoreMakeFolderReply* /*reply*/) {
  const auto make = [&]() -> absl::Status {
    ASSIGN_OR_RETURN(const Caller caller, gate_->CallerOf(*context));
    RETURN_IF_ERROR(CheckPath("path", request->path()));
    const Act act = request->parents() ? Act::kMakeFolders : Act::kMakeFolder;
    RETURN_IF_ERROR(CheckAct(caller, act, request->path(), *fences_));
    return disks_->MakeFolder(request->path(), request->parents());
  };
  return Told(make());
}

grpc::Status StoreService::Publish(grpc::ServerContext* context,
                                   const v1::StorePublishRequest* request,
                                   v1::StorePublishReply* /*reply*/) {
  const auto publish = [&]() -> absl::Status {
    ASSIGN_OR_RETURN(const Caller caller, gate_->CallerOf(*context));
    RETURN_IF_ERROR(CheckPath("from", request->from()));
    RETURN_IF_ERROR(CheckPath("to", request->to()));
    RETURN_IF_ERROR(CheckPublish(caller, request->from(), request->to()));
    return disks_->Publish(request->from(), request->to());
  };
  return Told(publish());
}

grpc::Status StoreService::Withdraw(grpc::ServerContext* context,
                                    const v1::StoreWithdrawRequest* request,
                                    v1::StoreWithdrawReply* /*reply*/) {
  const auto withdraw = [&]() -> absl::Status {
    ASSIGN_OR_RETURN(const Caller caller, gate_->CallerOf(*context));
    RETURN_IF_ERROR(CheckPath("path", request->path()));
    RETURN_IF_ERROR(CheckAct(caller, Act::kWithdraw, request->path(), *fences_));
    return disks_->Withdraw(request->path());
  };
  return Told(withdraw());
}

grpc::Status StoreService::Fence(grpc::ServerContext* context,
                                 const v1::StoreFenceRequest* request,
                                 v1::StoreFenceReply* /*reply*/) {
  const auto fence = [&]() -> absl::Status {
    ASSIGN_OR_RETURN(const Caller caller, gate_->CallerOf(*context));
    RETURN_IF_ERROR(CheckPath("path", request->path()));
    RETURN_IF_ERROR(CheckFence(caller));
    return fences_->Raise(request->path(), request->job_tag(), request->min_epoch());
  };
  return Told(fence());
}

grpc::Status StoreService::Space(grpc::ServerContext* context,
                                 const v1::StoreSpaceRequest* /*request*/,
                                 v1::StoreSpaceReply* reply) {
  const auto space = [&]() -> absl::Status {
    RETURN_IF_ERROR(gate_->CallerOf(*context).status());
    reply->set_free_bytes(disks_->FreeBytes());
    reply->set_used_bytes(disks_->used_bytes());
    reply->set_quota_bytes(disks_->quota_bytes());
    return absl::OkStatus();
  };
  return Told(space());
}

}  // namespace ravel::store_server
