// Collectives over TCP through gloo's point-to-point messages. Before payloads are trusted, each
// pair of ranks exchanges a header with its issue record: headers are matched by sequence number,
// payloads by the hash of what was issued, so payloads of different collectives can never meet, and
// ranks that disagree are named. A rank that finds a mismatch waits up to 2 s until its own headers
// have left, so that its peers find it, too. Bytes per rank of n, for a shard of s bytes:
// all-gather and exchange send and receive (n - 1) s, plus n - 1 headers each way. Pieces are in
// `receive` when ExchangePieces returns, so ReleasePieces sends nothing.

#include "worker/comm/gloo_communicator.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <exception>
#include <memory>
#include <set>
#include <stdexcept>
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
#include <netinet/in.h>

#include "common/check.h"
#include "common/mutex.h"
#include "common/signed_size.h"
#include "worker/comm/collective_ledger.h"
#include "worker/comm/issue_log.h"
#include "worker/comm/peer_waits.h"
#include "worker/comm/shared_segment.h"
#include "worker/comm/split_groups.h"

namespace ravel::comm {
namespace {

using gloo::transport::UnboundBuffer;

constexpr char kRecordPrefix[] = "gloo1:";
// A message that is taken within this time was there already.
constexpr int64_t kArrivedNs = 20'000;
// Time that a rank which found a mismatch waits for its peers to learn of it.
constexpr std::chrono::seconds kTellPeers{2};

// A device whose address changes its port. A pair listens at the device's address when it is made,
// and the library has no other way to choose the port.
class PortedDevice : public gloo::transport::tcp::Device {
 public:
  explicit PortedDevice(const gloo::transport::tcp::attr& attr) : Device(attr) {}

  // For the pairs that are made from now on.
  void SetPort(int port) {
    gloo::transport::tcp::attr next = attr_;
    if (next.ai_addr.ss_family == AF_INET6) {
      reinterpret_cast<sockaddr_in6*>(&next.ai_addr)->sin6_port = htons(Narrow(port));
    } else {
      reinterpret_cast<sockaddr_in*>(&next.ai_addr)->sin_port = htons(Narrow(port));
    }
    std::destroy_at(&attr_);
    std::construct_at(const_cast<gloo::transport::tcp::attr*>(&attr_), next);
  }

 private:
  static uint16_t Narrow(int port) { return static_cast<uint16_t>(port); }
};

// A full mesh whose addresses travel in one record per rank.
class Mesh : public gloo::Context {
 public:
  Mesh(int mesh_rank, int mesh_size) : gloo::Context(mesh_rank, mesh_size) {}

  std::string Listen(const std::string& host,
                     const PortRange& ports,
                     std::chrono::milliseconds timeout) {
    setTimeout(timeout);
    const auto device = std::make_shared<PortedDevice>(
        gloo::transport::tcp::CreateDeviceAttr(gloo::transport::tcp::attr(host.c_str())));
    device_ = device;
    transportContext_ = device_->createContext(rank, size);
    transportContext_->setTimeout(timeout);
    std::vector<std::string> addresses;
    for (int peer = 0; peer < size; ++peer) {
      if (peer == rank) {
        addresses.emplace_back("-");
        continue;
      }
      const std::vector<char> bytes = MakePair(*device, ports, peer).address().bytes();
      addresses.push_back(absl::BytesToHexString(std::string(bytes.begin(), bytes.end())));
    }
    return absl::StrCat(kRecordPrefix, absl::StrJoin(addresses, ","));
  }

  absl::Status Connect(const std::vector<std::string>& records) {
    for (int peer = 0; peer < size; ++peer) {
      if (peer == rank) {
        continue;
      }
      absl::string_view text = At(records, peer);
      const std::vector<std::string> addresses =
          absl::StrSplit(absl::StripPrefix(text, kRecordPrefix), ',');
      if (!absl::StartsWith(text, kRecordPrefix) || addresses.size() != Size(size)) {
        return absl::InvalidArgumentError(absl::StrCat(
            "gloo record of rank ", peer, ": expected gloo1: and ", size, " addresses"));
      }
      const std::string bytes = absl::HexStringToBytes(At(addresses, rank));
      getPair(peer)->connect(std::vector<char>(bytes.begin(), bytes.end()));
    }
    return absl::OkStatus();
  }

 private:
  // Listens on the first port from the last one on that is free. Ranks begin apart: several of one
  // host share the range.
  gloo::transport::Pair& MakePair(PortedDevice& device, const PortRange& ports, int peer) {
    if (ports.first == 0) {
      return *transportContext_->createPair(peer);
    }
    const int count = ports.last - ports.first + 1;
    next_port_ = next_port_ < 0 ? rank * (size - 1) % count : next_port_;
    for (int tried = 0; tried < count; ++tried) {
      device.SetPort(ports.first + next_port_);
      next_port_ = (next_port_ + 1) % count;
      try {
        return *transportContext_->createPair(peer);
      } catch (const std::exception& error) {
        if (!absl::StrContains(error.what(), std::strerror(EADDRINUSE))) {
          throw;
        }
      }
    }
    throw std::runtime_error(absl::StrCat("no port of ",
                                          ports.first,
                                          "-",
                                          ports.last,
                                          " (--data-ports of ravel-worker) is free for peer ",
                                          peer,
                                          " of ",
                                          size));
  }

  int next_port_ = -1;  // within the range; negative: not chosen yet
};

struct Message {
  int peer = 0;
  void* data = nullptr;
  int64_t bytes = 0;
};

// State that a rank's communicators share: one mesh of connections, in which each communicator uses
// message numbers of its own.
struct GlooRoot {
  GlooRoot(std::unique_ptr<Mesh> its_mesh, std::chrono::milliseconds its_timeout)
      : mesh(std::move(its_mesh)), timeout(its_timeout) {}

  const std::unique_ptr<Mesh> mesh;
  const std::chrono::milliseconds timeout;
  CollectiveLedger ledger;
  StickyFailure failure;
  bool allocated = false;
  PrivateMapping private_part, symmetric, common;
  std::atomic<uint64_t> splits = 0;

  mutable Mutex mutex;
  std::set<UnboundBuffer*> waiting ABSL_GUARDED_BY(mutex);
  absl::Status abort ABSL_GUARDED_BY(mutex);

  absl::Status aborted() const {
    MutexLock lock(mutex);
    return abort;
  }
  // Every wait of this rank ends, on any communicator.
  void Abort(const absl::Status& reason) {
    MutexLock lock(mutex);
    if (abort.ok()) {
      abort = reason;
    }
    for (UnboundBuffer* buffer : waiting) {
      buffer->abortWaitRecv();
      buffer->abortWaitSend();
    }
  }
};

class GlooCommunicator final : public Communicator {
 public:
  struct Member {
    IssueLog::Group group;
    int rank = 0;
    uint64_t key = 0;  // of its messages; 0 is the whole group
  };
  GlooCommunicator(std::shared_ptr<GlooRoot> root, Member member)
      : root_(std::move(root)),
        rank_(member.rank),
        size_(static_cast<int>(member.group.members.size())),
        key_(member.key),
        log_(root_->ledger.Open(std::move(member.group))),
        headers_(Size(size_)),
        waits_(size_) {}

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  const char* transport() const override { return "gloo"; }
  bool shared_memory() const override { return false; }

  absl::Status AllocateArena(const ArenaSizes& sizes) override;
  std::byte* arena(plan::MemoryKind kind) override;
  absl::StatusOr<std::unique_ptr<Communicator>> Split(const SplitOptions& options) override;
  absl::Status Barrier(const CollectiveTag& tag) override {
    return Transfer(log_->Issue(CollectiveKind::kBarrier, tag, {}), {}, {});
  }
  absl::Status AllGather(const AllGatherOptions& options) override;
  absl::StatusOr<PieceViews> ExchangePieces(const ExchangeOptions& options) override;
  absl::Status ReleasePieces(const CollectiveTag& tag) override;
  absl::Status AllGatherBytes(const CollectiveTag& tag,
                              std::span<const std::byte> mine,
                              std::span<std::byte> all) override;
  void Abort(std::string_view reason) override {
    root_->Abort(absl::AbortedError(std::string(reason)));
  }
  IssueState issued() const override { return log_->state(); }
  PeerWait TakePeerWait() override { return waits_.Take(log_->group().members); }
  CollectiveLedger& ledger() override { return root_->ledger; }

 private:
  struct Flight {
    std::unique_ptr<UnboundBuffer> buffer;
    int peer = 0;
  };
  // The buffers in flight of one collective; Abort must not touch those that are gone.
  struct Flights {
    explicit Flights(GlooRoot& its_root) : root(its_root) {}
    ~Flights() {
      MutexLock lock(root.mutex);
      for (const std::vector<Flight>* flights : {&header_in, &header_out, &in, &out}) {
        for (const Flight& flight : *flights) {
          root.waiting.erase(flight.buffer.get());
        }
      }
    }
    GlooRoot& root;
    std::vector<Flight> header_in, header_out, in, out;
  };
  // One collective: headers to and from every peer, checked, and the given messages. Returns when
  // all are through.
  absl::Status Transfer(const IssueRecord& issue,
                        const std::vector<Message>& sends,
                        const std::vector<Message>& receives);
  absl::Status Run(const IssueRecord& issue,
                   const std::vector<Message>& sends,
                   const std::vector<Message>& receives);
  void PostAll(const IssueRecord& mine,
               const std::vector<Message>& sends,
               const std::vector<Message>& receives,
               Flights& flights);
  // Sets `late` to the member whose message was the last to be waited for, if any was.
  absl::Status WaitReceives(std::vector<Flight>& flights, int* late);
  absl::Status WaitSends(std::vector<Flight>& flights, std::chrono::milliseconds timeout);
  absl::Status CheckHeaders(const IssueRecord& issue) const;
  absl::Status Gather(const IssueRecord& issue,
                      const std::byte* mine,
                      std::byte* all,
                      int64_t bytes);
  Flight Post(const Message& message);
  // In the mesh, of a rank of this communicator.
  int WorldRank(int peer) const { return At(log_->group().members, peer); }

  const std::shared_ptr<GlooRoot> root_;
  const int rank_;
  const int size_;
  const uint64_t key_;
  const std::shared_ptr<IssueLog> log_;
  std::vector<IssueRecord> headers_;
  PeerWaits waits_;
};

uint64_t Spread(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

absl::Status GlooError(const std::exception& error, int peer) {
  const std::string text = absl::StrCat("rank ", peer, " (gloo): ", error.what());
  const bool late = absl::StrContains(text, "imed out") || absl::StrContains(text, "imeout");
  return late ? absl::DeadlineExceededError(text) : absl::UnavailableError(text);
}

// -- transfers

GlooCommunicator::Flight GlooCommunicator::Post(const Message& message) {
  Flight flight{.buffer = root_->mesh->createUnboundBuffer(message.data, Size(message.bytes)),
                .peer = WorldRank(message.peer)};
  MutexLock lock(root_->mutex);
  root_->waiting.insert(flight.buffer.get());
  return flight;
}

absl::Status GlooCommunicator::WaitReceives(std::vector<Flight>& flights, int* late) {
  for (Flight& flight : flights) {
    RETURN_IF_ERROR(root_->aborted());
    const int64_t begin_ns = SteadyNs();
    try {
      if (!flight.buffer->waitRecv(nullptr, root_->timeout)) {
        return root_->aborted();
      }
    } catch (const std::exception& error) {
      return GlooError(error, flight.peer);
    }
    if (SteadyNs() - begin_ns > kArrivedNs) {
      *late = PositionIn(log_->group().members, flight.peer);
    }
  }
  return absl::OkStatus();
}

absl::Status GlooCommunicator::WaitSends(std::vector<Flight>& flights,
                                         std::chrono::milliseconds timeout) {
  for (Flight& flight : flights) {
    RETURN_IF_ERROR(root_->aborted());
    try {
      if (!flight.buffer->waitSend(nullptr, timeout)) {
        return root_->aborted();
      }
    } catch (const std::exception& error) {
      return GlooError(error, flight.peer);
    }
  }
  return absl::OkStatus();
}

absl::Status GlooCommunicator::CheckHeaders(const IssueRecord& issue) const {
  for (int peer = 0; peer < size_; ++peer) {
    const IssueRecord& other = At(headers_, peer);
    if (peer != rank_ && (other.hash != issue.hash || other.sequence != issue.sequence)) {
      return peer < rank_ ? log_->Mismatch(peer, other, rank_, issue)
                          : log_->Mismatch(rank_, issue, peer, other);
    }
  }
  return absl::OkStatus();
}

void GlooCommunicator::PostAll(const IssueRecord& mine,
                               const std::vector<Message>& sends,
                               const std::vector<Message>& receives,
                               Flights& flights) {
  // Headers meet by their number, payloads by the hash: payloads of different collectives never
  // meet.
  const uint64_t header_slot = Spread(key_ + mine.sequence) & ~uint64_t{1};
  const uint64_t payload_slot = Spread(key_ + mine.hash) | 1;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) {
      continue;
    }
    flights.header_in.push_back(Post({peer, &At(headers_, peer), sizeof(IssueRecord)}));
    flights.header_in.back().buffer->recv(WorldRank(peer), header_slot);
    // The library takes one type of buffer for both directions; it does not write to this one.
    flights.header_out.push_back(
        Post({peer, const_cast<IssueRecord*>(&mine), sizeof(IssueRecord)}));
    flights.header_out.back().buffer->send(WorldRank(peer), header_slot);
  }
  for (const Message& message : receives) {
    flights.in.push_back(Post(message));
    flights.in.back().buffer->recv(WorldRank(message.peer), payload_slot);
  }
  for (const Message& message : sends) {
    flights.out.push_back(Post(message));
    flights.out.back().buffer->send(WorldRank(message.peer), payload_slot);
  }
}

absl::Status GlooCommunicator::Run(const IssueRecord& issue,
                                   const std::vector<Message>& sends,
                                   const std::vector<Message>& receives) {
  Flights flights(*root_);
  try {
    PostAll(issue, sends, receives, flights);
  } catch (const std::exception& error) {
    return absl::UnavailableError(absl::StrCat("gloo: ", error.what()));
  }
  const int64_t begin_ns = SteadyNs();
  int late = -1;
  RETURN_IF_ERROR(WaitReceives(flights.header_in, &late));
  if (absl::Status equal = CheckHeaders(issue); !equal.ok()) {
    WaitSends(flights.header_out, kTellPeers).IgnoreError();  // the mismatch is the news, not this
    return equal;
  }
  RETURN_IF_ERROR(WaitReceives(flights.in, &late));
  if (late >= 0) {
    waits_.Add(late, begin_ns);
  }
  RETURN_IF_ERROR(WaitSends(flights.out, root_->timeout));
  return WaitSends(flights.header_out, root_->timeout);
}

absl::Status GlooCommunicator::Transfer(const IssueRecord& issue,
                                        const std::vector<Message>& sends,
                                        const std::vector<Message>& receives) {
  RETURN_IF_ERROR(root_->failure.Get());
  absl::Status done = root_->aborted();
  if (done.ok()) {
    done = Run(issue, sends, receives);
  }
  if (done.ok()) {
    log_->Complete();
    return done;
  }
  done = root_->failure.Set(std::move(done));
  root_->Abort(done);  // the other communicators of this rank
  return done;
}

// -- collectives

absl::Status GlooCommunicator::AllocateArena(const ArenaSizes& sizes) {
  CHECK_MSG(key_ == 0 && !root_->allocated, "the arena is allocated once, and not for a split");
  root_->allocated = true;
  const int64_t mine[] = {sizes.private_bytes, sizes.symmetric_bytes, sizes.common_bytes};
  const int64_t total = mine[0] + mine[1] + mine[2];
  // The sum is part of the issue hash: ranks that want different arenas are told so by name.
  RETURN_IF_ERROR(
      Transfer(log_->Issue(CollectiveKind::kAllocateArena, {}, {.elements = total}), {}, {}));
  ASSIGN_OR_RETURN(root_->private_part, PrivateMapping::Create(mine[0]));
  ASSIGN_OR_RETURN(root_->symmetric, PrivateMapping::Create(mine[1]));
  ASSIGN_OR_RETURN(root_->common, PrivateMapping::Create(mine[2]));
  return absl::OkStatus();
}

std::byte* GlooCommunicator::arena(plan::MemoryKind kind) {
  switch (kind) {
    case plan::MemoryKind::kPrivate:
      return root_->private_part.data();
    case plan::MemoryKind::kSymmetric:
      return root_->symmetric.data();
    case plan::MemoryKind::kCommon:
      return root_->common.data();
    case plan::MemoryKind::kOffload:
      break;
  }
  return nullptr;
}

absl::StatusOr<std::unique_ptr<Communicator>> GlooCommunicator::Split(const SplitOptions& options) {
  CHECK_MSG(key_ == 0, "the whole group is split, not its parts");
  const std::vector<int32_t> mine = SplitRow(options, size_);
  std::vector<int32_t> all(mine.size() * Size(size_));
  RETURN_IF_ERROR(Gather(log_->Issue(CollectiveKind::kSplit, {}, SplitAmount(options)),
                         reinterpret_cast<const std::byte*>(mine.data()),
                         reinterpret_cast<std::byte*>(all.data()),
                         static_cast<int64_t>(mine.size() * sizeof(int32_t))));
  if (auto leaders = SplitLeaders(all, size_); !leaders.ok()) {
    return root_->failure.Set(leaders.status());  // the same on every rank
  }
  // Groups of one split have no rank in common, so they may have the same key.
  const uint64_t key = Spread(++root_->splits);
  return std::make_unique<GlooCommunicator>(
      root_,
      Member{.group = {.name = options.name, .members = options.members},
             .rank = PositionIn(options.members, rank_),
             .key = key});
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
    std::memmove(all + rank_ * bytes, mine, Size(bytes));
  }
  return Transfer(issue, sends, receives);
}

absl::Status GlooCommunicator::AllGather(const AllGatherOptions& options) {
  CHECK_GE(options.shard_elements, 0);
  return Gather(
      log_->Issue(CollectiveKind::kAllGather,
                  options.tag,
                  {.elements = options.shard_elements, .element_bytes = options.element_bytes}),
      reinterpret_cast<const std::byte*>(options.shard),
      reinterpret_cast<std::byte*>(options.gathered),
      options.shard_elements * options.element_bytes);
}

absl::Status GlooCommunicator::AllGatherBytes(const CollectiveTag& tag,
                                              std::span<const std::byte> mine,
                                              std::span<std::byte> all) {
  CHECK(all.size() == mine.size() * Size(size_));
  const auto bytes = static_cast<int64_t>(mine.size());
  CHECK_LE(bytes, kMaxGatherBytes);
  return Gather(
      log_->Issue(CollectiveKind::kAllGatherBytes, tag, {.elements = bytes, .element_bytes = 1}),
      mine.data(),
      all.data(),
      bytes);
}

absl::StatusOr<PieceViews> GlooCommunicator::ExchangePieces(const ExchangeOptions& options) {
  const int64_t bytes = options.shard_elements * options.element_bytes;
  CHECK(bytes >= 0 && options.contributors >= 0 && options.contributors <= size_);
  const IssueRecord issue = log_->Issue(CollectiveKind::kExchange,
                                        options.tag,
                                        {.elements = options.shard_elements,
                                         .element_bytes = options.element_bytes,
                                         .contributors = options.contributors});
  const bool contributes = rank_ < options.contributors && bytes > 0;
  CHECK_MSG(!contributes || options.staging != nullptr, "a contributor needs staging");
  auto* staging = reinterpret_cast<std::byte*>(const_cast<float*>(options.staging));
  auto* receive = reinterpret_cast<std::byte*>(options.receive);
  std::vector<Message> sends, receives;
  PieceViews views;
  for (int peer = 0; peer < size_ && contributes; ++peer) {
    if (peer != rank_) {
      sends.push_back({peer, staging + peer * bytes, bytes});
    }
  }
  for (int peer = 0; peer < options.contributors; ++peer) {
    std::byte* piece = nullptr;
    if (bytes > 0 && peer == rank_) {
      piece = staging + rank_ * bytes;
    } else if (bytes > 0) {
      piece = receive + peer * bytes;
      receives.push_back({peer, piece, bytes});
    }
    views.pieces.push_back(reinterpret_cast<const float*>(piece));
  }
  RETURN_IF_ERROR(Transfer(issue, sends, receives));
  return views;
}

// All pieces have left when ExchangePieces returns, so nothing is sent; the next collective's hash
// covers the call.
absl::Status GlooCommunicator::ReleasePieces(const CollectiveTag& tag) {
  log_->Issue(CollectiveKind::kRelease, tag, {});
  RETURN_IF_ERROR(root_->failure.Get());
  log_->Complete();
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Communicator>> CreateGlooCommunicator(const GlooOptions& options) {
  if (options.host_address.empty()) {
    return absl::InvalidArgumentError("transport gloo: the address of this host is missing");
  }
  std::signal(SIGPIPE, SIG_IGN);  // the library writes without MSG_NOSIGNAL
  try {
    auto mesh = std::make_unique<Mesh>(options.rank, options.size);
    std::string mine = mesh->Listen(options.host_address, options.ports, options.timeout);
    ASSIGN_OR_RETURN(const std::vector<std::string> records,
                     options.rendezvous("gloo", std::move(mine)));
    if (records.size() != Size(options.size)) {
      return absl::InternalError(absl::StrCat(
          "rendezvous of group gloo: ", records.size(), " records, expected ", options.size));
    }
    RETURN_IF_ERROR(mesh->Connect(records));
    return std::make_unique<GlooCommunicator>(
        std::make_shared<GlooRoot>(std::move(mesh), options.timeout),
        GlooCommunicator::Member{
            .group = WholeGroup(options.size), .rank = options.rank, .key = 0});
  } catch (const std::exception& error) {
    return absl::UnavailableError(
        absl::StrCat("gloo on ", options.host_address, ": ", error.what()));
  }
}

}  // namespace ravel::comm
