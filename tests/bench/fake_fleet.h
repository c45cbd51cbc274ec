#pragma once

// Nodes that exist only as streams: they register, start "trainers" that finish a step each second,
// beat and report as daemons do. What they measure is the coordinator.

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/mutex.h"
#include "common/status.h"
#include "proto/fleet.pb.h"
#include "worker/daemon/fleet_stream_client.h"

namespace ravel::bench {

using SteadyClock = std::chrono::steady_clock;

struct FleetOptions {
  std::string address;
  int nodes = 1000;
  int devices = 8;
  // Names are PREFIX00000, PREFIX00001, ...
  std::string prefix = "fake-";
};

// Milliseconds of what was timed, in no order.
using Samples = std::vector<double>;

// Thread-safe. One thread of its own sends what is due; answers come on threads of gRPC.
class FakeFleet {
 public:
  explicit FakeFleet(FleetOptions options);
  ~FakeFleet();

  // Opens all streams; welcomed() tells how far they are.
  void Start();
  int welcomed() const;
  // Jobs whose trainers have all been told to run.
  int running_jobs() const;

  // The beats' answers since the last call, in milliseconds; beats that are still without an answer
  // count with their age when that is above `pending_ms`.
  Samples TakeAcks(double pending_ms);
  int64_t step_reports() const;
  int64_t streams_lost() const;

  struct Victim {
    std::string node;
    std::string job_uid;
    int64_t epoch = 0;
    SteadyClock::time_point when;
  };
  // Takes away a node whose job runs on it alone: its stream is closed, or it falls silent.
  absl::StatusOr<Victim> Kill(bool silently);
  // When a job was launched with an epoch above `epoch`; epoch 0 of time when it was not yet.
  SteadyClock::time_point Relaunched(const std::string& job_uid, int64_t epoch) const;

 private:
  struct Trainer {
    int64_t epoch = 0;
    int64_t attempt = 0;
    int64_t world_size = 1;
    int64_t step = 0;
    int64_t until_step = -1;  // -1: not told to run
    int64_t total_issued = 0;
    int64_t save_sequence = 0;
    bool has_records = false;
    SteadyClock::time_point next_step;
  };
  struct Node;
  using TrainerKey = std::pair<std::string, int64_t>;  // job, rank

  void Open(Node& node);
  void SendHello(Node& node);
  void OnReceived(Node& node, v1::Down down);
  // These are called with the node's lock, which the analysis cannot see: Node is complete only
  // below.
  void OnLaunch(Node& node,
                int64_t command_id,
                const v1::Launch& launch) ABSL_NO_THREAD_SAFETY_ANALYSIS;
  void OnCommand(Node& node, const v1::TrainerCommand& command) ABSL_NO_THREAD_SAFETY_ANALYSIS;
  void OnStop(Node& node, const v1::StopTrainers& stop) ABSL_NO_THREAD_SAFETY_ANALYSIS;
  void Answer(Node& node, int64_t command_id) ABSL_NO_THREAD_SAFETY_ANALYSIS;
  void SendFrame(Node& node, const TrainerKey& key, const Trainer& trainer, v1::TrainerUp frame)
      ABSL_NO_THREAD_SAFETY_ANALYSIS;
  void SendExit(Node& node,
                const TrainerKey& key,
                const Trainer& trainer) ABSL_NO_THREAD_SAFETY_ANALYSIS;
  void SendBeat(Node& node, SteadyClock::time_point now) ABSL_NO_THREAD_SAFETY_ANALYSIS;
  void Step(Node& node, const TrainerKey& key, Trainer& trainer, SteadyClock::time_point now)
      ABSL_NO_THREAD_SAFETY_ANALYSIS;
  void Serve(Node& node, SteadyClock::time_point now);
  void Run();

  const FleetOptions options_;
  std::vector<std::unique_ptr<Node>> nodes_;
  mutable Mutex mutex_;
  Samples acks_ ABSL_GUARDED_BY(mutex_);
  int64_t step_reports_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t streams_lost_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<std::string, std::pair<int64_t, SteadyClock::time_point>> launched_
      ABSL_GUARDED_BY(mutex_);
  std::set<std::string> running_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace ravel::bench
