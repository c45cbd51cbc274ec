#pragma once

// The daemon's side of the fleet stream: hello, beats, reconnecting, and what must reach the
// coordinator.

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "common/latency_histogram.h"
#include "common/status.h"
#include "proto/fleet.pb.h"
#include "worker/daemon/backlog_proto.h"
#include "worker/daemon/fleet_stream_client.h"

namespace boost::asio {
class io_context;
}

namespace ravel::daemon {

// Control messages are kept until a beat that was sent after them is acknowledged, and are sent
// again on the next stream: the coordinator may see one twice. Used only from the thread of its
// io_context.
class FleetClient {
 public:
  struct Callbacks {
    // Returns this node's facts and trainers; called for each stream.
    std::function<v1::Hello()> hello;
    std::function<std::vector<v1::TrainerBeat>()> beat;
    std::function<void(const v1::Welcome&)> welcome;
    // Launch, trainer and stop. Answered by SendResult with its command id; one that was answered
    // before is not passed on again but gets the same answer. And forget_job_uid and look, which
    // have no such result.
    std::function<void(const v1::Down&)> command;
    // The coordinator wants this daemon gone for good: why.
    std::function<void(const std::string&)> rejected;
  };

  // `identity`: null for plaintext.
  FleetClient(boost::asio::io_context& context,
              std::string address,
              const TlsIdentity* identity,
              Callbacks callbacks);
  ~FleetClient();

  void Start();
  // Ends the stream and opens another one after that time.
  void ReconnectAfter(std::chrono::milliseconds pause);
  // Asks for a new certificate; `done` runs on this object's thread, while it is there.
  void RenewCertificate(const std::string& request, FleetChannel::CertificateCallback done);
  // Asks for a certificate of this job's trainers; as above.
  void CertifyTrainer(const std::string& job_uid,
                      const std::string& request,
                      FleetChannel::CertificateCallback done);
  // Opens the next stream with that certificate, at once: what was not acknowledged is sent again.
  void UseIdentity(const TlsIdentity& identity);
  // Kept until acknowledged, within the limits of Backlog.
  void SendControl(v1::Up message);
  // A trainer's progress frame, a log batch, the answer to a look: dropped while there is no
  // stream.
  void SendLossy(const v1::Up& message);
  // `reason` of a launch that failed: common/failure_reason.h; empty: StartFailed.
  void SendResult(int64_t command_id, const absl::Status& status, const std::string& reason = "");

  // From the present stream; Unavailable when there is none, or when it ends before the plan is
  // there.
  void FetchPlan(const v1::FetchPlanRequest& request, FleetStream::PlanCallback done);

  // Beats at once, and calls `done` when everything has been acknowledged, or after `limit`.
  void Flush(std::chrono::milliseconds limit, std::function<void()> done);

  bool connected() const { return welcomed_; }
  // Ends of trainers that the coordinator has not acknowledged: told again on the next stream.
  std::vector<v1::TrainerExited> UnacknowledgedExits() const;
  const std::string& cluster_id() const { return cluster_id_; }
  // Log batches and progress that nobody took.
  int64_t dropped() const { return dropped_lossy_; }
  // Streams that a coordinator has welcomed.
  int64_t welcomes() const { return welcomes_; }
  // From a beat to its acknowledgement.
  LatencyHistogram::Look beat_latency() const { return beat_latency_.Get(); }

 private:
  struct Timers;

  void Connect();
  // The present stream, if there is one, is over. Plans that it has not fetched are told so.
  void EndStream();
  void OnReceived(v1::Down down);
  void OnWelcome(const v1::Welcome& welcome);
  void OnBeatAck(const v1::BeatAck& ack);
  void OnClosed(const absl::Status& status);
  void Disconnect(const std::string& why);
  void ReconnectLater();
  void ConnectWhenDue();
  void SendBeat();
  int64_t NextPadding() const;
  std::string DoubtOfPath() const;
  void BeatLater();
  void FinishFlush();
  bool AnswerAgain(int64_t command_id);
  FleetChannel::CertificateCallback ToOwnThread(FleetChannel::CertificateCallback done);

  boost::asio::io_context& context_;
  const std::string address_;
  const std::unique_ptr<FleetChannel> channel_;
  Callbacks callbacks_;
  std::unique_ptr<Timers> timers_;
  std::unique_ptr<FleetStream> stream_;
  uint64_t stream_number_ = 0;
  bool welcomed_ = false;
  int failed_attempts_ = 0;
  int64_t term_ = 0;
  std::string cluster_id_;
  std::chrono::milliseconds beat_interval_{1000};
  std::chrono::steady_clock::time_point heard_;
  int64_t beats_sent_ = 0;
  int64_t heard_command_ = 0;  // the newest of this stream
  // A padded beat without an acknowledgement.
  struct PaddedBeat {
    int64_t seq = 0;
    std::chrono::steady_clock::time_point sent;
    int64_t bytes = 0;  // of the whole message
  };
  std::deque<PaddedBeat> padded_;  // of this stream
  int64_t answered_bytes_ = 0;     // of this stream: the most padding of an acknowledgement
  int64_t acknowledged_beat_ = 0;  // of this stream: the newest; at first the last one before it
  bool path_is_tried_ = false;     // of this stream: a padded beat has its acknowledgement
  Backlog unacknowledged_;
  int64_t dropped_lossy_ = 0;
  int64_t welcomes_ = 0;
  LatencyHistogram beat_latency_;
  std::chrono::steady_clock::time_point beat_sent_;  // the newest
  std::map<int64_t, v1::CommandResult> results_;     // of this term, newest kMaxResults
  // Callers whose plans are to come from this stream, which calls nobody once it is gone.
  std::map<uint64_t, FleetStream::PlanCallback> fetching_;
  uint64_t fetch_number_ = 0;
  std::function<void()> flushed_;
  // Handlers that are still queued when this object goes hold a weak reference to this.
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
};

}  // namespace ravel::daemon
