// The protocol of the fleet stream: hello, welcome, beats, reconnecting with jittered back-off.
// Delivery is at least once: a control message is kept with the number of beats sent so far, and
// dropped when a later beat is acknowledged, because the stream keeps its order. On the next stream
// all kept messages are sent again, and commands answered before get the same answer. A coordinator
// of an older term is disconnected; it was replaced. Everything runs on the loop's thread;
// callbacks of older streams are recognised by their number and ignored.
//
// Some beats are padded to more than a full frame of the network. A path whose MTU is smaller than
// the hosts believe, and that does not say so, passes short messages and drops such frames: without
// padding the node would look alive while plans and step reports hang. TCP delivers in order, so
// one dropped frame holds up all that follows, and both ends hear silence.

#include "worker/daemon/fleet_client.h"

#include <algorithm>
#include <random>
#include <utility>

#include <absl/strings/str_cat.h>
#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>

#include "common/clock.h"
#include "common/logging.h"
#include "common/version.h"

namespace ravel::daemon {
namespace {

namespace asio = boost::asio;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr milliseconds kFirstBackoff{200};
constexpr milliseconds kLastBackoff{5000};
constexpr milliseconds kLeastPatience{5000};
constexpr milliseconds kWelcomeDeadline{10000};
constexpr size_t kMaxUnacknowledgedBytes = size_t{64} << 20;
constexpr size_t kMaxResults = 1000;
// More than the payload of an Ethernet frame, and of a jumbo frame. Beats of the first size come
// once in a detection time, 0.3 KB/s for a node; one of the second size opens each stream.
constexpr int64_t kFrameBytes = 1600;
constexpr int64_t kJumboFrameBytes = 9200;
constexpr int64_t kBeatsForOneFrame = 5;
constexpr int kBeatsOfDoubt = 2;  // a healthy coordinator answers within one

// Random: a tunnel that compresses would make a short packet of zeros.
const std::string& Noise() {
  static const std::string noise = [] {
    std::mt19937 random(1);
    std::string bytes(kJumboFrameBytes, ' ');
    for (char& byte : bytes) {
      byte = static_cast<char>(random());
    }
    return bytes;
  }();
  return noise;
}

// Between half of and the whole doubled delay, so that a fleet does not return in one moment.
milliseconds Backoff(int failed_attempts) {
  const int doublings = std::min(failed_attempts, 10);
  const milliseconds whole = std::min(kLastBackoff, kFirstBackoff * (1 << doublings));
  static std::mt19937 random{std::random_device{}()};
  const std::uniform_int_distribution<int64_t> jitter(whole.count() / 2, whole.count());
  return milliseconds(std::uniform_int_distribution<int64_t>(jitter.param())(random));
}

}  // namespace

struct FleetClient::Timers {
  explicit Timers(asio::io_context& context) : reconnect(context), beat(context), flush(context) {}
  asio::steady_timer reconnect;
  asio::steady_timer beat;
  asio::steady_timer flush;
};

FleetClient::FleetClient(asio::io_context& context,
                         std::string address,
                         const TlsIdentity* identity,
                         Callbacks callbacks)
    : context_(context),
      address_(std::move(address)),
      channel_(FleetChannel::Create(address_, identity)),
      callbacks_(std::move(callbacks)),
      timers_(std::make_unique<Timers>(context)),
      unacknowledged_(kMaxUnacknowledgedBytes) {}

FleetClient::~FleetClient() = default;

void FleetClient::Start() {
  Connect();
}

void FleetClient::EndStream() {
  ++stream_number_;
  stream_.reset();
  welcomed_ = false;
  timers_->beat.cancel();
  for (const auto& [number, done] : std::exchange(fetching_, {})) {
    done(absl::UnavailableError("the stream to the coordinator ended before the plan was there"));
  }
}

void FleetClient::Connect() {
  EndStream();
  const uint64_t number = stream_number_;
  // From threads of gRPC to ours; what belongs to an older stream is ignored there.
  const auto to_own_thread = [this, number, alive = std::weak_ptr<bool>(alive_)](auto work) {
    asio::post(context_, [this, number, alive, work = std::move(work)]() mutable {
      if (!alive.expired() && number == stream_number_) {
        work();
      }
    });
  };
  heard_command_ = 0;
  padded_.clear();
  answered_bytes_ = 0;
  acknowledged_beat_ = beats_sent_;
  path_is_tried_ = false;
  heard_ = steady_clock::now();
  stream_ = channel_->Open({.received =
                                [this, to_own_thread](v1::Down down) {
                                  to_own_thread([this, down = std::move(down)]() mutable {
                                    OnReceived(std::move(down));
                                  });
                                },
                            .closed =
                                [this, to_own_thread](absl::Status status) {
                                  to_own_thread([this, status] { OnClosed(status); });
                                }});
  v1::Up up;
  *up.mutable_hello() = callbacks_.hello();
  up.mutable_hello()->set_cluster_id(cluster_id_);
  up.mutable_hello()->set_term(term_);
  up.mutable_hello()->set_path_bytes(kJumboFrameBytes);
  stream_->Send(up, FleetStream::Kind::kControl);
  BeatLater();  // also judges a coordinator that does not answer
}

void FleetClient::OnReceived(v1::Down down) {
  heard_ = steady_clock::now();
  if (down.term() < term_) {
    Disconnect(absl::StrCat("a coordinator of term ", down.term(), " spoke, newest is ", term_));
    return;
  }
  if (down.term() > term_) {
    term_ = down.term();
    results_.clear();
  }
  switch (down.kind_case()) {
    case v1::Down::kWelcome:
      OnWelcome(down.welcome());
      return;
    case v1::Down::kBeatAck:
      OnBeatAck(down.beat_ack());
      return;
    case v1::Down::kRejected:
      callbacks_.rejected(down.rejected());
      return;
    case v1::Down::kLaunch:
    case v1::Down::kTrainer:
    case v1::Down::kStop:
      heard_command_ = std::max(heard_command_, down.command_id());
      if (!AnswerAgain(down.command_id())) {
        callbacks_.command(down);
      }
      return;
    case v1::Down::kForgetJobUid:
    case v1::Down::kLook:
      callbacks_.command(down);
      return;
    case v1::Down::KIND_NOT_SET:
      log::Warning("the coordinator sent a message that this version does not know");
      return;
  }
}

void FleetClient::OnWelcome(const v1::Welcome& welcome) {
  if (!cluster_id_.empty() && welcome.cluster_id() != cluster_id_) {
    callbacks_.rejected(absl::StrCat("this node belongs to cluster ",
                                     cluster_id_,
                                     ", the coordinator is of cluster ",
                                     welcome.cluster_id()));
    return;
  }
  const ProtocolRange chosen{welcome.protocol(), welcome.protocol()};
  if (welcome.protocol() != 0 && AgreedProtocol(kFleetProtocols, chosen) == 0) {
    callbacks_.rejected(absl::StrCat("the coordinator speaks protocol ",
                                     welcome.protocol(),
                                     ", this daemon (release ",
                                     kVersion,
                                     ") ",
                                     kFleetProtocols.oldest,
                                     " to ",
                                     kFleetProtocols.newest));
    return;
  }
  cluster_id_ = welcome.cluster_id();
  beat_interval_ = milliseconds(std::clamp<int64_t>(welcome.beat_interval_ms(), 20, 60000));
  if (welcomed_) {  // on the same stream: only the beats change, at once
    callbacks_.welcome(welcome);
    SendBeat();
    return;
  }
  welcomed_ = true;
  ++welcomes_;
  failed_attempts_ = 0;
  log::Info(absl::StrCat("connected to the coordinator at ", address_, ", term ", term_));
  callbacks_.welcome(welcome);
  SendBeat();  // padded; not behind what may take long on a slow link
  unacknowledged_.Resend(beats_sent_, [this](const v1::Up& message) {
    stream_->Send(message, FleetStream::Kind::kControl);
  });
  if (const int64_t dropped = unacknowledged_.TakeDropped(); dropped > 0) {
    log::Warning(absl::StrCat(dropped, " messages were dropped: no coordinator took them"));
  }
  SendBeat();
}

void FleetClient::OnClosed(const absl::Status& status) {
  if (absl::IsUnauthenticated(status) || absl::IsPermissionDenied(status)) {
    Disconnect(std::string(status.message()));
    callbacks_.rejected(std::string(status.message()));
    return;
  }
  Disconnect(
      absl::StrCat(status.ok() ? "the coordinator ended the stream" : std::string(status.message()),
                   DoubtOfPath()));
}

void FleetClient::Disconnect(const std::string& why) {
  if (welcomed_ || failed_attempts_ == 0) {  // the first failure only: an outage may last for hours
    log::Warning(absl::StrCat("no coordinator at ", address_, ": ", why));
  }
  EndStream();
  ReconnectLater();
}

void FleetClient::ReconnectAfter(milliseconds pause) {
  EndStream();
  timers_->reconnect.expires_after(pause);
  ConnectWhenDue();
}

FleetChannel::CertificateCallback FleetClient::ToOwnThread(FleetChannel::CertificateCallback done) {
  return [this, alive = std::weak_ptr<bool>(alive_), done = std::move(done)](
             absl::StatusOr<FleetChannel::Certificate> certificate) {
    asio::post(context_, [alive, done, certificate = std::move(certificate)] {
      if (!alive.expired()) {
        done(certificate);
      }
    });
  };
}

void FleetClient::RenewCertificate(const std::string& request,
                                   FleetChannel::CertificateCallback done) {
  channel_->Renew(request, ToOwnThread(std::move(done)));
}

void FleetClient::CertifyTrainer(const std::string& job_uid,
                                 const std::string& request,
                                 FleetChannel::CertificateCallback done) {
  channel_->CertifyTrainer(job_uid, request, ToOwnThread(std::move(done)));
}

void FleetClient::UseIdentity(const TlsIdentity& identity) {
  channel_->UseIdentity(identity);
  ReconnectAfter(milliseconds(0));
}

void FleetClient::ReconnectLater() {
  timers_->reconnect.expires_after(Backoff(failed_attempts_++));
  ConnectWhenDue();
}

void FleetClient::ConnectWhenDue() {
  timers_->reconnect.async_wait([this](boost::system::error_code error) {
    if (!error) {
      Connect();
    }
  });
}

// -- beats

void FleetClient::BeatLater() {
  timers_->beat.expires_after(beat_interval_);
  timers_->beat.async_wait([this](boost::system::error_code error) {
    if (error || stream_ == nullptr) {
      return;
    }
    const auto limit = welcomed_ ? std::max(kLeastPatience, 10 * beat_interval_) : kWelcomeDeadline;
    if (steady_clock::now() - heard_ > limit) {
      Disconnect(absl::StrCat("no answer for ", limit.count(), " ms", DoubtOfPath()));
    } else if (welcomed_) {
      SendBeat();
    } else {
      BeatLater();
    }
  });
}

// The first beats of a stream until one is acknowledged, then each fifth.
int64_t FleetClient::NextPadding() const {
  if (!path_is_tried_) {
    return kJumboFrameBytes;
  }
  return (beats_sent_ + 1) % kBeatsForOneFrame == 0 ? kFrameBytes : 0;
}

// Not empty: what the coordinator has not answered for long begins with a padded beat.
std::string FleetClient::DoubtOfPath() const {
  if (!welcomed_ || padded_.empty() || padded_.front().seq != acknowledged_beat_ + 1 ||
      steady_clock::now() - padded_.front().sent < kBeatsOfDoubt * beat_interval_) {
    return "";
  }
  return absl::StrCat(", since a beat of ",
                      padded_.front().bytes,
                      " bytes that has no answer; shorter messages were answered: the MTU of the "
                      "path to the coordinator, or back, may be smaller than its hosts believe");
}

void FleetClient::SendBeat() {
  v1::Up up;
  v1::Beat& beat = *up.mutable_beat();
  const auto now = steady_clock::now();
  const int64_t padding = NextPadding();
  beat.set_seq(++beats_sent_);
  beat.set_padding(Noise().substr(0, static_cast<size_t>(padding)));
  beat.set_next_bytes(NextPadding());
  beat.set_answered_bytes(answered_bytes_);
  if (!padded_.empty()) {
    const auto age = std::chrono::duration_cast<milliseconds>(now - padded_.front().sent);
    beat.set_unanswered_ms(std::max<int64_t>(age.count(), 1));
  }
  beat.set_heard_command(heard_command_);
  beat.set_send_time_ms(SystemClock::Get().WallMs());
  for (v1::TrainerBeat& trainer : callbacks_.beat()) {
    *beat.add_trainers() = std::move(trainer);
  }
  beat_sent_ = now;
  if (padding > 0) {
    padded_.push_back({beats_sent_, now, static_cast<int64_t>(up.ByteSizeLong())});
  }
  stream_->Send(up, FleetStream::Kind::kControl);
  BeatLater();
}

void FleetClient::OnBeatAck(const v1::BeatAck& ack) {
  // The stream keeps its order: what was sent before this beat has arrived.
  unacknowledged_.Acknowledge(ack.seq());
  if (ack.seq() == beats_sent_) {
    beat_latency_.Record(std::chrono::duration<double>(steady_clock::now() - beat_sent_).count());
  }
  if (ack.resend_full()) {
    Disconnect("the coordinator asks for a new hello");
    return;
  }
  acknowledged_beat_ = ack.seq();
  answered_bytes_ = std::max(answered_bytes_, static_cast<int64_t>(ack.padding().size()));
  const bool answers_padded = !padded_.empty() && padded_.front().seq <= ack.seq();
  while (!padded_.empty() && padded_.front().seq <= ack.seq()) {
    padded_.pop_front();
  }
  if (answers_padded && !std::exchange(path_is_tried_, true)) {
    SendBeat();  // says so: the coordinator waits for it
  }
  if (unacknowledged_.empty()) {
    FinishFlush();
  }
}

// -- messages up

void FleetClient::SendControl(v1::Up message) {
  if (welcomed_) {
    stream_->Send(message, FleetStream::Kind::kControl);
  }
  const bool dropped = unacknowledged_.dropped() > 0;
  unacknowledged_.Add(std::move(message), beats_sent_);
  if (!dropped && unacknowledged_.dropped() > 0) {  // once; how many is said at the end
    log::Warning("step reports are dropped: no coordinator takes them");
  }
}

std::vector<v1::TrainerExited> FleetClient::UnacknowledgedExits() const {
  std::vector<v1::TrainerExited> exits;
  unacknowledged_.ForEach([&exits](const v1::Up& message) {
    if (message.has_exited()) {
      exits.push_back(message.exited());
    }
  });
  return exits;
}

void FleetClient::SendLossy(const v1::Up& message) {
  const auto kind = message.has_log() ? FleetStream::Kind::kLog : FleetStream::Kind::kControl;
  if (!welcomed_ || !stream_->Send(message, kind)) {
    ++dropped_lossy_;
  }
}

void FleetClient::SendResult(int64_t command_id,
                             const absl::Status& status,
                             const std::string& reason) {
  v1::Up up;
  v1::CommandResult& result = *up.mutable_result();
  result.set_command_id(command_id);
  result.set_ok(status.ok());
  result.set_message(std::string(status.message()));
  result.set_reason(reason);
  results_[command_id] = result;
  if (results_.size() > kMaxResults) {
    results_.erase(results_.begin());
  }
  SendControl(std::move(up));
}

bool FleetClient::AnswerAgain(int64_t command_id) {
  const auto known = results_.find(command_id);
  if (command_id == 0 || known == results_.end()) {
    return false;
  }
  v1::Up up;
  *up.mutable_result() = known->second;
  SendControl(std::move(up));
  return true;
}

void FleetClient::FetchPlan(const v1::FetchPlanRequest& request, FleetStream::PlanCallback done) {
  if (!welcomed_) {
    done(absl::UnavailableError("no coordinator"));
    return;
  }
  const uint64_t number = ++fetch_number_;
  fetching_[number] = std::move(done);
  stream_->FetchPlan(
      request,
      [this, number, alive = std::weak_ptr<bool>(alive_)](absl::StatusOr<std::string> plan) {
        asio::post(context_, [this, number, alive, plan = std::move(plan)]() mutable {
          if (alive.expired()) {
            return;
          }
          if (const auto fetch = fetching_.extract(number); !fetch.empty()) {
            fetch.mapped()(std::move(plan));
          }
        });
      });
}

void FleetClient::Flush(milliseconds limit, std::function<void()> done) {
  flushed_ = std::move(done);
  timers_->flush.expires_after(limit);
  timers_->flush.async_wait([this](boost::system::error_code error) {
    if (!error) {
      FinishFlush();
    }
  });
  if (unacknowledged_.empty()) {
    asio::post(context_, [this, alive = std::weak_ptr<bool>(alive_)] {
      if (!alive.expired()) {
        FinishFlush();
      }
    });
  } else if (welcomed_) {
    SendBeat();
  }
}

void FleetClient::FinishFlush() {
  timers_->flush.cancel();
  if (const auto done = std::exchange(flushed_, {})) {
    done();
  }
}

}  // namespace ravel::daemon
