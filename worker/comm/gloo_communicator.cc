#include "worker/comm/gloo_communicator.h"

#include <algorithm>
#include <csignal>
#include <cstring>
#include <exception>
#include <utility>
#include <vector>

#include <absl/strings/escaping.h>
#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <absl/strings/str_split.h>
#include <absl/strings/strip.h>
#include <gloo/context.h>
#include <gloo/transport/address.h>
#include <gloo/transport/context.h>
#include <gloo/transport/pair.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/unbound_buffer.h>

#include "common/check.h"
#include "common/mutex.h"
#include "worker/comm/issue_log.h"
#include "worker/comm/shared_segment.h"

namespace ravel::comm {
namespace {

using gloo::transport::UnboundBuffer;

constexpr char kRecordPrefix[] = "gloo1:";
// How long a rank that found a mismatch waits for its peers to learn of it.
constexpr std::chrono::seconds kTellPeers{2};

// A full mesh whose addresses travel in one record per rank.
class Mesh : public gloo::Context {
 public:
  Mesh(int mesh_rank, int mesh_size) : gloo::Context(mesh_rank, mesh_size) {}

  std::string Listen(const std::string& host, std::chrono::milliseconds timeout) {
    setTimeout(timeout);
    device_ = gloo::transport::tcp::CreateDevice(gloo::transport::tcp::attr(host.c_str()));
    transportContext_ = device_->createContext(rank, size);
    transportContext_->setTimeout(timeout);
    std::vector<std::string> addresses;
    for (int peer = 0; peer < size; ++peer) {
      if (peer == rank) {
        addresses.emplace_back("-");
        continue;
      }
      const std::vector<char> bytes = transportContext_->createPair(peer)->address().bytes();
      addresses.push_back(absl::BytesToHexString(std::string(bytes.begin(), bytes.end())));
    }
    return absl::StrCat(kRecordPrefix, absl::StrJoin(addresses, ","));
  }

  absl::Status Connect(const std::vector<std::string>& records) {
    for (int peer = 0; peer < size; ++peer) {
      if (peer == rank) {
        continue;
      }
      absl::string_view text = records[static_cast<size_t>(peer)];
      const std::vector<std::string> addresses =
          absl::StrSplit(absl::StripPrefix(text, kRecordPrefix), ',');
      if (!absl::StartsWith(text, kRecordPrefix) || addresses.size() != static_cast<size_t>(size)) {
        return absl::InvalidArgumentError(absl::StrCat(
            "gloo record of rank ", peer, ": expected gloo1: and ", size, " addresses"));
      }
      const std::string bytes = absl::HexStringToBytes(addresses[static_cast<size_t>(rank)]);
      getPair(peer)->connect(std::vector<char>(bytes.begin(), bytes.end()));
    }
    return absl::OkStatus();
  }
};

struct Message {
  int peer = 0;
  void* data = nullptr;
  int64_t bytes = 0;
};

class GlooCommunicator final : public Communicator {
 public:
  GlooCommunicator(std::unique_ptr<Mesh> mesh, std::chrono::milliseconds timeout)
      : mesh_(std::move(mesh)),
        rank_(mesh_->rank),
        size_(mesh_->size),
        timeout_(timeout),
        headers_(static_cast<size_t>(size_)) {}

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  const char* transport() const override { return "gloo"; }
  bool shared_memory() const override { return false; }

  absl::Status AllocateArena(const ArenaSizes& sizes) override;
  std::byte* arena(plan::MemoryKind kind) override;
  absl::Status Barrier(const CollectiveTag& tag) override {
    return Transfer(issues_.Issue(CollectiveKind::kBarrier, tag, 0), {}, {});
  }
  absl::Status AllGather(const AllGatherOptions& options) override;
  absl::StatusOr<PieceViews> ExchangePieces(const ExchangeOptions& options) override;
  absl::Status ReleasePieces(const CollectiveTag& tag) override;
  absl::Status AllGatherBytes(const CollectiveTag& tag,
                              std::span<const std::byte> mine,
                              std::span<std::byte> all) override;
  void Abort(std::string_view reason) override;
  IssueState issued() const override { return issues_.state(); }

 private:
  struct Flight {
    std::unique_ptr<UnboundBuffer> buffer;
    int peer = 0;
  };
  // Forgets the buffers in flight at its end.
  class WaitingScope {
   public:
    explicit WaitingScope(GlooCommunicator& owner) : owner_(owner) {}
    ~WaitingScope() {
      MutexLock lock(owner_.mutex_);
      owner_.waiting_.clear();
    }

   private:
    GlooCommunicator& owner_;
  };
  // One collective: headers to and from every peer, checked, and the given messages. Returns when
  // all are through.
  absl::Status Transfer(const IssueRecord& issue,
                        const std::vector<Message>& sends,
                        const std::vector<Message>& receives);
  absl::Status Run(const IssueRecord& issue,
                   const std::vector<Message>& sends,
                   const std::vector<Message>& receives);
  absl::Status WaitReceives(std::vector<Flight>& flights);
  absl::Status WaitSends(std::vector<Flight>& flights, std::chrono::milliseconds timeout);
  absl::Status CheckHeaders(const IssueRecord& issue) const;
  absl::Status Gather(const IssueRecord& issue,
                      const std::byte* mine,
                      std::byte* all,
                      int64_t bytes);
  Flight Post(const Message& message);
  absl::Status aborted() const;

  std::unique_ptr<Mesh> mesh_;
  const int rank_;
  const int size_;
  const std::chrono::milliseconds timeout_;
  IssueLog issues_;
  StickyFailure failure_;
  std::vector<IssueRecord> headers_;
  PrivateMapping private_, symmetric_, common_;

  mutable Mutex mutex_;
  std::vector<UnboundBuffer*> waiting_ ABSL_GUARDED_BY(mutex_);
  absl::Status abort_ ABSL_GUARDED_BY(mutex_);
};

absl::Status GlooError(const std::exception& error, int peer) {
  const std::string text = absl::StrCat("rank ", peer, " (gloo): ", error.what());
  const bool late = absl::StrContains(text, "imed out") || absl::StrContains(text, "imeout");
  return late ? absl::DeadlineExceededError(text) : absl::UnavailableError(text);
}

absl::Status GlooCommunicator::aborted() const {
  MutexLock lock(mutex_);
  return abort_;
}

void GlooCommunicator::Abort(std::string_view reason) {
  MutexLock lock(mutex_);
  if (abort_.ok()) {
    abort_ = absl::AbortedError(std::string(reason));
  }
  for (UnboundBuffer* buffer : waiting_) {
    buffer->abortWaitRecv();
    buffer->abortWaitSend();
  }
}

// -- transfers

GlooCommunicator::Flight GlooCommunicator::Post(const Message& message) {
  Flight flight{
      .buffer = mesh_->createUnboundBuffer(message.data, static_cast<size_t>(message.bytes)),
      .peer = message.peer};
  MutexLock lock(mutex_);
  waiting_.push_back(flight.buffer.get());
  return flight;
}

absl::Status GlooCommunicator::WaitReceives(std::vector<Flight>& flights) {
  for (Flight& flight : flights) {
    RETURN_IF_ERROR(aborted());
    try {
      if (!flight.buffer->waitRecv(nullptr, timeout_)) {
        return aborted();
      }
    } catch (const std::exception& error) {
      return GlooError(error, flight.peer);
    }
  }
  return absl::OkStatus();
}

absl::Status GlooCommunicator::WaitSends(std::vector<Flight>& flights,
                                         std::chrono::milliseconds timeout) {
  for (Flight& flight : flights) {
    RETURN_IF_ERROR(aborted());
    try {
      if (!flight.buffer->waitSend(nullptr, timeout)) {
        return aborted();
      }
    } catch (const std::exception& error) {
      return GlooError(error, flight.peer);
    }
  }
  return absl::OkStatus();
}

absl::Status GlooCommunicator::CheckHeaders(const IssueRecord& issue) const {
  for (int peer = 0; peer < size_; ++peer) {
    const IssueRecord& other = headers_[static_cast<size_t>(peer)];
    if (peer != rank_ && (other.hash != issue.hash || other.sequence != issue.sequence)) {
      return peer < rank_ ? IssueMismatch(peer, other, rank_, issue)
                          : IssueMismatch(rank_, issue, peer, other);
    }
  }
  return absl::OkStatus();
}

absl::Status GlooCommunicator::Run(const IssueRecord& issue,
                                   const std::vector<Message>& sends,
                                   const std::vector<Message>& receives) {
  // Headers meet by their number, payloads by the hash: payloads of different collectives never
  // meet.
  const uint64_t header_slot = issue.sequence * 2;
  const uint64_t payload_slot = issue.hash | 1;
  IssueRecord mine = issue;
  std::vector<Flight> header_in, header_out, in, out;
  const WaitingScope scope(*this);  // goes first: Abort must not touch buffers that are gone
  try {
    for (int peer = 0; peer < size_; ++peer) {
      if (peer == rank_) {
        continue;
      }
      header_in.push_back(Post({peer, &headers_[static_cast<size_t>(peer)], sizeof(IssueRecord)}));
      header_in.back().buffer->recv(peer, header_slot);
      header_out.push_back(Post({peer, &mine, sizeof(IssueRecord)}));
      header_out.back().buffer->send(peer, header_slot);
    }
    for (const Message& message : receives) {
      in.push_back(Post(message));
      in.back().buffer->recv(message.peer, payload_slot);
    }
    for (const Message& message : sends) {
      out.push_back(Post(message));
      out.back().buffer->send(message.peer, payload_slot);
    }
  } catch (const std::exception& error) {
    return absl::UnavailableError(absl::StrCat("gloo: ", error.what()));
  }
  RETURN_IF_ERROR(WaitReceives(header_in));
  if (absl::Status equal = CheckHeaders(issue); !equal.ok()) {
    WaitSends(header_out, kTellPeers).IgnoreError();  // the mismatch is the news, not this
    return equal;
  }
  RETURN_IF_ERROR(WaitReceives(in));
  RETURN_IF_ERROR(WaitSends(out, timeout_));
  return WaitSends(header_out, timeout_);
}

absl::Status GlooCommunicator::Transfer(const IssueRecord& issue,
                                        const std::vector<Message>& sends,
                                        const std::vector<Message>& receives) {
  RETURN_IF_ERROR(failure_.Get());
  if (absl::Status stopped = aborted(); !stopped.ok()) {
    return failure_.Set(stopped);
  }
  absl::Status done = Run(issue, sends, receives);
  return done.ok() ? done : failure_.Set(std::move(done));
}

// -- collectives

absl::Status GlooCommunicator::AllocateArena(const ArenaSizes& sizes) {
  const int64_t mine[] = {sizes.private_bytes, sizes.symmetric_bytes, sizes.common_bytes};
  const int64_t total = mine[0] + mine[1] + mine[2];
  // The sum is part of the issue hash: ranks that want different arenas are told so by name.
  RETURN_IF_ERROR(Transfer(issues_.Issue(CollectiveKind::kAllocateArena, {}, total), {}, {}));
  ASSIGN_OR_RETURN(private_, PrivateMapping::Create(mine[0]));
  ASSIGN_OR_RETURN(symmetric_, PrivateMapping::Create(mine[1]));
  ASSIGN_OR_RETURN(common_, PrivateMapping::Create(mine[2]));
  return absl::OkStatus();
}

std::byte* GlooCommunicator::arena(plan::MemoryKind kind) {
  switch (kind) {
    case plan::MemoryKind::kPrivate:
      return private_.data();
    case plan::MemoryKind::kSymmetric:
      return symmetric_.data();
    case plan::MemoryKind::kCommon:
      return common_.data();
  }
  return nullptr;
}

absl::Status GlooCommunicator::Gather(const IssueRecord& issue,
                                      const std::byte* mine,
                                      std::byte* all,
                                      int64_t bytes) {
  std::vector<Message> sends, receives;
  for (int peer = 0; peer < size_ && bytes > 0; ++peer) {
    if (peer != rank_) {
      // The library takes one type of buffer for both directions; it does not write to this one.
      sends.push_back({peer, const_cast<std::byte*>(mine), bytes});
      receives.push_back({peer, all + peer * bytes, bytes});
    }
  }
  if (bytes > 0 && mine != all + rank_ * bytes) {
    std::memmove(all + rank_ * bytes, mine, static_cast<size_t>(bytes));
  }
  return Transfer(issue, sends, receives);
}

absl::Status GlooCommunicator::AllGather(const AllGatherOptions& options) {
  CHECK_GE(options.shard_elements, 0);
  return Gather(issues_.Issue(CollectiveKind::kAllGather, options.tag, options.shard_elements),
                reinterpret_cast<const std::byte*>(options.shard),
                reinterpret_cast<std::byte*>(options.gathered),
                options.shard_elements * kElementBytes);
}

absl::Status GlooCommunicator::AllGatherBytes(const CollectiveTag& tag,
                                              std::span<const std::byte> mine,
                                              std::span<std::byte> all) {
  CHECK(all.size() == mine.size() * static_cast<size_t>(size_));
  const auto bytes = static_cast<int64_t>(mine.size());
  CHECK_LE(bytes, kMaxGatherBytes);
  return Gather(
      issues_.Issue(CollectiveKind::kAllGatherBytes, tag, bytes), mine.data(), all.data(), bytes);
}

absl::StatusOr<PieceViews> GlooCommunicator::ExchangePieces(const ExchangeOptions& options) {
  const int64_t elements = options.shard_elements;
  CHECK(elements >= 0 && options.contributors >= 0 && options.contributors <= size_);
  const IssueRecord issue = issues_.Issue(CollectiveKind::kExchange, options.tag, elements);
  const bool contributes = rank_ < options.contributors && elements > 0;
  CHECK_MSG(!contributes || options.staging != nullptr, "a contributor needs staging");
  std::vector<Message> sends, receives;
  PieceViews views;
  for (int peer = 0; peer < size_ && contributes; ++peer) {
    if (peer != rank_) {
      auto* piece = const_cast<float*>(options.staging + peer * elements);
      sends.push_back({peer, piece, elements * kElementBytes});
    }
  }
  for (int peer = 0; peer < options.contributors; ++peer) {
    if (elements == 0) {
      views.pieces.push_back(nullptr);
    } else if (peer == rank_) {
      views.pieces.push_back(options.staging + rank_ * elements);
    } else {
      receives.push_back({peer, options.receive + peer * elements, elements * kElementBytes});
      views.pieces.push_back(options.receive + peer * elements);
    }
  }
  RETURN_IF_ERROR(Transfer(issue, sends, receives));
  return views;
}

// All pieces have left when ExchangePieces returns, so nothing is sent; the next collective's hash
// covers the call.
absl::Status GlooCommunicator::ReleasePieces(const CollectiveTag& tag) {
  issues_.Issue(CollectiveKind::kRelease, tag, 0);
  return failure_.Get();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Communicator>> CreateGlooCommunicator(const GlooOptions& options) {
  if (options.host_address.empty()) {
    return absl::InvalidArgumentError("transport gloo: the address of this host is missing");
  }
  std::signal(SIGPIPE, SIG_IGN);  // the library writes without MSG_NOSIGNAL
  try {
    auto mesh = std::make_unique<Mesh>(options.rank, options.size);
    std::string mine = mesh->Listen(options.host_address, options.timeout);
    ASSIGN_OR_RETURN(const std::vector<std::string> records,
                     options.rendezvous("gloo", std::move(mine)));
    if (records.size() != static_cast<size_t>(options.size)) {
      return absl::InternalError(absl::StrCat(
          "rendezvous of group gloo: ", records.size(), " records, expected ", options.size));
    }
    RETURN_IF_ERROR(mesh->Connect(records));
    return std::make_unique<GlooCommunicator>(std::move(mesh), options.timeout);
  } catch (const std::exception& error) {
    return absl::UnavailableError(
        absl::StrCat("gloo on ", options.host_address, ": ", error.what()));
  }
}

}  // namespace ravel::comm
