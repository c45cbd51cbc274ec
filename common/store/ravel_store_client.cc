// The client of ravel-store. Channels are shared by all stores of a process. Small calls are tried
// again until their time is over; those that change names are made idempotent by looking: a
// publication whose answer was lost shows as `from` gone and `to` there. A file is written in
// blocks that are kept until the store has acknowledged them, so another stream can go on with the
// same upload after a cut or a restart; a stream carries a limited part of a file, so that it can
// have a deadline. What a store that lost power has forgotten of an upload cannot be sent again:
// that file fails, and nobody has seen it.

#include "common/store/ravel_store_client.h"

#include <algorithm>
#include <deque>
#include <random>
#include <utility>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>
#include <grpcpp/grpcpp.h>

#include "common/crc32c.h"
#include "common/net_address.h"
#include "common/signed_size.h"
#include "common/store/block_message_client.h"
#include "common/store/ravel_store_call_client.h"
#include "proto/store.grpc.pb.h"

namespace ravel::store {
namespace {

using std::chrono::milliseconds;
using SteadyClock = std::chrono::steady_clock;

constexpr size_t kWindowBlocks = 16;                // sent and not acknowledged
constexpr int64_t kStreamBytes = int64_t{1} << 30;  // of a file on one stream
constexpr milliseconds kStreamTime = std::chrono::minutes(20);
constexpr int64_t kSlowestBytesPerMs = 1 << 10;  // a read below 1 MB/s is cut off

absl::StatusOr<v1::StoreStatReply> StatOnce(const StoreAddress& address, std::string_view path) {
  v1::StoreStatRequest request;
  request.set_path(address.Path(path));
  v1::StoreStatReply reply;
  RETURN_IF_ERROR(Persist(address, [&](v1::Store::Stub& stub, grpc::ClientContext& context) {
    return FromGrpc(stub.Stat(&context, request, &reply), absl::StrCat("stat ", address.Url(path)));
  }));
  return reply;
}

class RemoteReader : public FileReader {
 public:
  RemoteReader(std::shared_ptr<const StoreAddress> address, std::string path, int64_t size)
      : address_(std::move(address)), path_(std::move(path)), size_(size) {}

  int64_t size() const override { return size_; }

  absl::Status ReadAt(int64_t offset, std::span<std::byte> out) const override {
    if (offset < 0 || offset > size_ || Size(size_ - offset) < out.size()) {
      return absl::DataLossError(absl::StrCat(
          address_->Url(path_), ": truncated: ends at byte ", size_, ", expected more"));
    }
    auto moved = SteadyClock::now();
    Backoff backoff;
    while (!out.empty()) {
      const size_t before = out.size();
      const absl::Status status = ReadSome(offset, out);
      if (out.size() < before) {
        moved = SteadyClock::now();
        backoff = Backoff();
      }
      if (status.ok()) {
        continue;
      }
      if (!MayPass(status) || SteadyClock::now() - moved > address_->options.stall_time) {
        return status;
      }
      address_->Pause(backoff);
    }
    return absl::OkStatus();
  }

 private:
  // One stream; advances what it has read.
  absl::Status ReadSome(int64_t& offset, std::span<std::byte>& out) const {
    const std::string what = absl::StrCat("read ", address_->Url(path_));
    ASSIGN_OR_RETURN(const std::shared_ptr<grpc::Channel> channel, address_->Channel());
    v1::StoreReadRequest request;
    request.set_path(address_->Path(path_));
    request.set_offset(offset);
    request.set_length(std::min<int64_t>(static_cast<int64_t>(out.size()), kStreamBytes));
    StoreCall context;
    context.set_deadline(std::chrono::system_clock::now() + kStoreTryTime +
                         milliseconds(request.length() / kSlowestBytesPerMs));
    const auto room = [&out](int64_t bytes) -> absl::StatusOr<std::span<char>> {
      return Size(bytes) <= out.size()
                 ? std::span<char>(reinterpret_cast<char*>(out.data()), Size(bytes))
                 : absl::StatusOr<std::span<char>>(absl::OutOfRangeError("more than was asked"));
    };
    const auto stream = BeginRead(*channel, context, request);
    grpc::ByteBuffer message;
    while (stream->Read(&message)) {
      const absl::StatusOr<BlockMessage> block = ReadBlockMessage(message, kReadBlock, room);
      if (!block.ok() || block->offset != offset || block->sum != block->crc32c) {
        context.TryCancel();
        while (stream->Read(&message)) {
        }
        stream->Finish();
        return absl::UnavailableError(
            absl::StrCat(what, ": block at byte ", offset, ": its checksum differs"));
      }
      out = out.subspan(block->data.size());
      offset += std::ssize(block->data);
      message.Clear();  // its slices go back before more arrive
    }
    return FromGrpc(stream->Finish(), what);
  }

  std::shared_ptr<const StoreAddress> address_;
  std::string path_;
  int64_t size_;
};

class RemoteWriter : public FileWriter {
 public:
  RemoteWriter(std::shared_ptr<const StoreAddress> address,
               std::string path,
               int64_t expected_bytes)
      : address_(std::move(address)),
        path_(std::move(path)),
        what_(absl::StrCat("write ", address_->Url(path_))),
        expected_bytes_(expected_bytes) {
    std::random_device random;
    upload_ = absl::StrFormat("%08x%08x", random(), random());
  }
  ~RemoteWriter() override { Hang(); }

  // Connects, so that a name that is taken and a full store show before the first byte.
  absl::Status Begin() {
    for (moved_ = SteadyClock::now();;) {
      absl::Status status = OpenStream(0);
      if (status.ok() && ReadReply()) {
        return absl::OkStatus();
      }
      status = status.ok() ? EndOfStream() : status;
      RETURN_IF_ERROR(MayGoOn(status));
      address_->Pause(backoff_);
    }
  }

  absl::Status Append(std::span<const std::byte> bytes) override {
    while (!bytes.empty()) {
      const auto part = bytes.first(std::min(bytes.size(), Size(kStoreBlockBytes)));
      const OutgoingBlock block = memory_.BlockOf(part, size_);
      crc_ = Crc32cCombine(crc_, block.crc32c, part.size());
      size_ += block.bytes;
      RETURN_IF_ERROR(Send(block));
      RETURN_IF_ERROR(Settle(kWindowBlocks - 1));
      if (size_ - stream_begin_ >= kStreamBytes) {
        RETURN_IF_ERROR(Settle(0));
        Hang();  // all is written: the next block opens a stream with a time of its own
      }
      bytes = bytes.subspan(part.size());
    }
    return absl::OkStatus();
  }

  absl::Status Finish() override {
    RETURN_IF_ERROR(Send(LastBlock(size_, crc_)));
    while (!finished_) {
      RETURN_IF_ERROR(Settle(0));
    }
    Hang();  // what counts is acknowledged
    return absl::OkStatus();
  }

 private:
  absl::Status OpenStream(int64_t offset) {
    ASSIGN_OR_RETURN(channel_, address_->Channel());
    context_ = std::make_unique<StoreCall>();
    context_->set_deadline(std::chrono::system_clock::now() + kStreamTime);
    stream_ = BeginWrite(*channel_, *context_);
    reads_over_ = false;
    stream_begin_ = offset;
    v1::StoreWriteRequest first;
    v1::StoreWriteRequest::Open& open = *first.mutable_open();
    open.set_path(address_->Path(path_));
    open.set_upload(upload_);
    open.set_offset(offset);
    open.set_expected_bytes(expected_bytes_);
    if (!stream_->Write(ToBytes(first))) {
      return EndOfStream();
    }
    return absl::OkStatus();
  }

  // One acknowledgement; false: the stream is over.
  bool ReadReply() {
    v1::StoreWriteReply reply;
    if (reads_over_ || !stream_->Read(&reply)) {
      reads_over_ = true;
      return false;
    }
    moved_ = SteadyClock::now();
    backoff_ = Backoff();
    finished_ = finished_ || reply.finished();
    acknowledged_ = std::max(acknowledged_, reply.written());
    while (!kept_.empty() &&
           (kept_.front().finish ? finished_ : EndOf(kept_.front()) <= acknowledged_)) {
      kept_.pop_front();
    }
    return true;
  }

  static int64_t EndOf(const OutgoingBlock& block) { return block.offset + block.bytes; }

  // The status of a stream that the store or the network has ended. gRPC tells it only when all
  // that has arrived is read.
  absl::Status EndOfStream() {
    while (ReadReply()) {
    }
    const grpc::Status status = stream_->Finish();
    stream_.reset();
    context_.reset();
    return status.ok() ? absl::UnavailableError(absl::StrCat(what_, ": the stream ended early"))
                       : FromGrpc(status, what_);
  }

  void Hang() {
    if (stream_ != nullptr) {
      context_->TryCancel();
      while (ReadReply()) {
      }
      stream_->Finish();
      stream_.reset();
      context_.reset();
    }
  }

  // Sends, and keeps it until it is acknowledged.
  absl::Status Send(const OutgoingBlock& block) {
    if (kept_.empty()) {
      moved_ = SteadyClock::now();  // the store owes nothing so far
    }
    kept_.push_back(block);
    if (stream_ != nullptr && stream_->Write(kept_.back().message)) {
      return absl::OkStatus();
    }
    return Resume(stream_ == nullptr ? absl::UnavailableError(absl::StrCat(what_, ": a new stream"))
                                     : EndOfStream());
  }

  // Waits until at most `most` blocks are kept.
  absl::Status Settle(size_t most) {
    while (kept_.size() > most) {
      if (stream_ == nullptr || !ReadReply()) {
        RETURN_IF_ERROR(Resume(stream_ == nullptr
                                   ? absl::UnavailableError(absl::StrCat(what_, ": a new stream"))
                                   : EndOfStream()));
      }
    }
    return absl::OkStatus();
  }

  absl::Status MayGoOn(const absl::Status& status) const {
    return MayPass(status) && SteadyClock::now() - moved_ <= address_->options.stall_time
               ? absl::OkStatus()
               : status;
  }

  // Goes on with the upload on another stream; OK when what was kept is sent, or is not needed.
  absl::Status Resume(absl::Status why) {
    for (bool first = true;; first = false) {
      RETURN_IF_ERROR(MayGoOn(why));
      if (!first) {
        address_->Pause(backoff_);
      }
      RETURN_IF_ERROR(Look());
      if (finished_) {
        return absl::OkStatus();
      }
      why = Resend();
      if (why.ok()) {
        return why;
      }
    }
  }

  // Asks how much of the upload the store has.
  absl::Status Look() {
    v1::StoreStatWriteRequest request;
    request.set_path(address_->Path(path_));
    request.set_upload(upload_);
    v1::StoreStatWriteReply reply;
    RETURN_IF_ERROR(Persist(*address_, [&](v1::Store::Stub& stub, grpc::ClientContext& context) {
      return FromGrpc(stub.StatWrite(&context, request, &reply), what_);
    }));
    if (reply.there()) {
      const bool ours =
          !kept_.empty() && kept_.back().finish && reply.size() == size_ && reply.crc32c() == crc_;
      if (!ours) {
        return absl::AlreadyExistsError(absl::StrCat(what_, ": File exists"));
      }
      finished_ = true;
      kept_.clear();
      return absl::OkStatus();
    }
    acknowledged_ = std::max(acknowledged_, reply.written());
    while (!kept_.empty() && !kept_.front().finish && EndOf(kept_.front()) <= reply.written()) {
      kept_.pop_front();
    }
    const int64_t next = kept_.empty() ? size_ : kept_.front().offset;
    return reply.written() >= next
               ? absl::OkStatus()
               : absl::DataLossError(absl::StrCat(what_,
                                                  ": the store has ",
                                                  reply.written(),
                                                  " bytes of it, and had acknowledged ",
                                                  next));
  }

  absl::Status Resend() {
    RETURN_IF_ERROR(OpenStream(kept_.empty() ? size_ : kept_.front().offset));
    if (!ReadReply()) {
      return EndOfStream();
    }
    for (const OutgoingBlock& block : kept_) {
      if (!stream_->Write(block.message)) {
        return EndOfStream();
      }
    }
    return absl::OkStatus();
  }

  std::shared_ptr<const StoreAddress> address_;
  const std::string path_;
  const std::string what_;
  const int64_t expected_bytes_;
  std::string upload_;
  int64_t size_ = 0;  // appended so far
  uint32_t crc_ = 0;
  int64_t acknowledged_ = 0;
  bool finished_ = false;
  BlockMemory memory_;
  std::deque<OutgoingBlock> kept_;
  SteadyClock::time_point moved_ = SteadyClock::now();
  Backoff backoff_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<StoreCall> context_;
  std::unique_ptr<WriteStream> stream_;
  bool reads_over_ = false;
  int64_t stream_begin_ = 0;
};

class RavelStore : public ObjectStore {
 public:
  explicit RavelStore(StoreAddress address)
      : address_(std::make_shared<const StoreAddress>(std::move(address))) {}

  std::string Locate(std::string_view path) const override { return address_->Url(path); }

  absl::Status MakeRoot() override { return MakeFolder("", true); }

  absl::Status ProbeWritable() const override { return CheckSpace(1); }

  absl::StatusOr<std::unique_ptr<FileWriter>> Create(std::string_view path,
                                                     int64_t expected_bytes) override {
    auto writer = std::make_unique<RemoteWriter>(address_, std::string(path), expected_bytes);
    RETURN_IF_ERROR(writer->Begin());
    return writer;
  }

  absl::Status CheckSpace(int64_t bytes) const override {
    v1::StoreSpaceReply reply;
    RETURN_IF_ERROR(Persist(*address_, [&](v1::Store::Stub& stub, grpc::ClientContext& context) {
      return FromGrpc(stub.Space(&context, {}, &reply), address_->Url(""));
    }));
    return reply.free_bytes() >= bytes
               ? absl::OkStatus()
               : absl::ResourceExhaustedError(absl::StrCat(address_->Url(""),
                                                           ": No space left in the store: ",
                                                           bytes,
                                                           " bytes are needed, ",
                                                           reply.free_bytes(),
                                                           " are free"));
  }

  absl::StatusOr<std::unique_ptr<FileReader>> Open(std::string_view path) const override {
    ASSIGN_OR_RETURN(const v1::StoreStatReply facts, StatOnce(*address_, path));
    if (facts.is_folder()) {
      return absl::FailedPreconditionError(absl::StrCat(Locate(path), ": not a regular file"));
    }
    return std::make_unique<RemoteReader>(address_, std::string(path), facts.size());
  }

  absl::StatusOr<std::vector<ListedEntry>> List(std::string_view directory) const override {
    v1::StoreListRequest request;
    request.set_path(address_->Path(directory));
    std::vector<ListedEntry> entries;
    RETURN_IF_ERROR(Persist(*address_, [&](v1::Store::Stub& stub, grpc::ClientContext& context) {
      entries.clear();
      const auto stream = stub.List(&context, request);
      v1::StoreListReply reply;
      while (stream->Read(&reply)) {
        for (const v1::StoreListReply::Entry& entry : reply.entries()) {
          entries.push_back({entry.name(), entry.is_folder(), entry.size()});
        }
      }
      return FromGrpc(stream->Finish(), absl::StrCat("list ", Locate(directory)));
    }));
    return entries;
  }

  absl::Status MakeDirectory(std::string_view path) override { return MakeFolder(path, false); }

  absl::Status PublishIfAbsent(std::string_view from, std::string_view to) override {
    v1::StorePublishRequest request;
    request.set_from(address_->Path(from));
    request.set_to(address_->Path(to));
    int tries = 0;
    const absl::Status done =
        Persist(*address_, tries, [&](v1::Store::Stub& stub, grpc::ClientContext& context) {
          v1::StorePublishReply reply;
          return FromGrpc(stub.Publish(&context, request, &reply),
                          absl::StrCat("publish ", Locate(from), " as ", Locate(to)));
        });
    if (tries == 1 || (!absl::IsNotFound(done) && !absl::IsAlreadyExists(done))) {
      return done;
    }
    // An answer was lost. Only this publication makes `from` go and `to` appear.
    const absl::Status source = StatOnce(*address_, from).status();
    return absl::IsNotFound(source) && StatOnce(*address_, to).ok() ? absl::OkStatus() : done;
  }

  absl::Status Withdraw(std::string_view path) override {
    v1::StoreWithdrawRequest request;
    request.set_path(address_->Path(path));
    int tries = 0;
    const absl::Status done =
        Persist(*address_, tries, [&](v1::Store::Stub& stub, grpc::ClientContext& context) {
          v1::StoreWithdrawReply reply;
          return FromGrpc(stub.Withdraw(&context, request, &reply),
                          absl::StrCat("withdraw ", Locate(path)));
        });
    return tries > 1 && absl::IsNotFound(done) ? absl::OkStatus() : done;
  }

  absl::Status Fence(std::string_view directory, uint32_t job_tag, int64_t min_epoch) override {
    v1::StoreFenceRequest request;
    request.set_path(address_->Path(directory));
    request.set_job_tag(job_tag);
    request.set_min_epoch(min_epoch);
    return Persist(*address_, [&](v1::Store::Stub& stub, grpc::ClientContext& context) {
      v1::StoreFenceReply reply;
      return FromGrpc(stub.Fence(&context, request, &reply),
                      absl::StrCat("fence ", Locate(directory)));
    });
  }

  absl::StatusOr<int64_t> ChangedMs(std::string_view path) const override {
    ASSIGN_OR_RETURN(const v1::StoreStatReply facts, StatOnce(*address_, path));
    return facts.changed_ms();
  }

 private:
  absl::Status MakeFolder(std::string_view path, bool parents) {
    v1::StoreMakeFolderRequest request;
    request.set_path(address_->Path(path));
    request.set_parents(parents);
    if (request.path().empty()) {
      return absl::OkStatus();  // the store itself
    }
    return Persist(*address_, [&](v1::Store::Stub& stub, grpc::ClientContext& context) {
      v1::StoreMakeFolderReply reply;
      return FromGrpc(stub.MakeFolder(&context, request, &reply),
                      absl::StrCat("mkdir ", Locate(path)));
    });
  }

  std::shared_ptr<const StoreAddress> address_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<ObjectStore>> OpenRavelStore(std::string_view url,
                                                            const RavelStoreOptions& options) {
  ASSIGN_OR_RETURN(RavelUrl parsed, ParseRavelUrl(url));
  StoreAddress address;
  address.host = parsed.host;
  address.target = std::move(parsed.target);
  address.prefix = std::move(parsed.path);
  address.options = options;
  return std::make_unique<RavelStore>(std::move(address));
}

}  // namespace ravel::store
