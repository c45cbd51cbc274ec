#pragma once

// ravel-worker without its command line: joins supervisor and fleet client.

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "common/http/http_server.h"
#include "common/http/page_access.h"
#include "common/net_address.h"
#include "common/path_roots.h"
#include "worker/daemon/certificate_renewal.h"
#include "worker/daemon/daemon_pages.h"
#include "worker/daemon/data_cache.h"
#include "worker/daemon/device_probe.h"
#include "worker/daemon/fleet_client.h"
#include "worker/daemon/launch_data_proto.h"
#include "worker/daemon/launch_settings_proto.h"
#include "worker/daemon/launch_settings_reader.h"
#include "worker/daemon/log_sweeper.h"
#include "worker/daemon/node_identity.h"
#include "worker/daemon/notice_file.h"
#include "worker/daemon/path_looks.h"
#include "worker/daemon/preflight.h"
#include "worker/daemon/supervisor.h"
#include "worker/daemon/trainer_certificates.h"

namespace ravel::daemon {

struct DaemonOptions {
  std::string coordinator;  // host:port
  // Of a node that has joined; none: plaintext on loopback.
  std::optional<NodeIdentity> identity = {};
  std::string node_id;
  std::string data_address;
  PortRange data_ports = {};  // of trainers' sockets that wait for peers of other hosts
  std::string work_dir;
  std::string gemm_cache = {};  // empty: none
  std::string trainer_program;
  std::string version;
  LogRules logs = {};
  NodeFacts facts;  // each GPU trainers_per_gpu times
  int64_t trainers_per_gpu = 1;
  // Identity of the locked work folder (Hello.work_lock).
  std::string work_lock = {};
  // True where this process's supervisor restarts it whatever its exit code: a daemon that is
  // refused then stays, not ready, and asks again now and then.
  bool park_when_refused = false;
  std::chrono::milliseconds park_time{30000};
  // For a look at a job's paths before its launch.
  std::chrono::milliseconds preflight_limit{5000};
  // Keeps data sets that jobs name by URL, shared with the threads that fetch; null: such jobs are
  // refused here.
  std::shared_ptr<DataCache> data_cache = nullptr;
  // Limit for a store from which no byte comes.
  std::chrono::milliseconds data_stall_limit{180000};
  // For one path of a job that is not accepted yet.
  std::chrono::milliseconds look_limit{5000};
  // After a drain notice the coordinator has so long to let trainers save and stop.
  std::chrono::milliseconds drain_limit{30000};
  PathRoots roots = {};  // of the paths of jobs
  LaunchRules launch_rules = {};
  std::optional<TrainerUser> trainer_user = {};  // none: trainers run as this daemon does
  // The file whose presence says that this host goes away; empty: none is looked for.
  std::string notice_file = {};
  std::chrono::milliseconds notice_look{500};
};

// Exit codes of the daemon, for its service manager.
inline constexpr int kExitClean = 0;
inline constexpr int kExitRestartMe = 1;
inline constexpr int kExitUsage = 2;
inline constexpr int kExitDoNotRestart = 93;

// Used only from the thread that calls Run.
class Daemon {
 public:
  explicit Daemon(DaemonOptions options);
  ~Daemon();

  // Before Run: /livez, /readyz and /metrics on `listen`, answered by Run's event loop. Writes the
  // port to `port_file`, if that is not empty.
  absl::Status ServeHttp(const http::PageFlags& flags, const std::string& port_file);
  // Until SIGTERM, SIGINT, Stop or a coordinator that rejects this node for good; the exit code.
  int Run();
  // Thread-safe. Stops the trainers, tells the coordinator, and lets Run return.
  void Stop(const std::string& reason);

 private:
  using RankKey = std::tuple<std::string, int64_t, int64_t>;  // job, epoch, rank
  struct Loop;

  // A seal that must be told again after its trainer has ended.
  struct KeptSeal {
    TrainerIdentity identity;
    v1::Seal seal;
  };

  FleetClient::Callbacks FleetCallbacks();
  TrainerProcess::Callbacks TrainerCallbacks();
  TrainerCertificates::Callbacks CertificateCallbacks();

  v1::Hello MakeHello() const;
  std::vector<v1::TrainerBeat> MakeBeat() const;
  void OnRejected(const std::string& reason);
  void OnWelcome(const v1::Welcome& welcome);
  void OnCommand(const v1::Down& down);
  void OnLaunch(int64_t command_id, const v1::Launch& launch);
  void OnLook(const v1::Look& look);
  void ForgetLaunching(const v1::Launch& launch);
  // Looks at what the job asks for, fetches the data sets that it names by URL, and goes on with
  // their local paths.
  void LaunchFetched(int64_t command_id, const v1::Launch& launch, const std::string& plan);
  void LaunchAllowed(int64_t command_id, const v1::Launch& launch, const std::string& plan);
  // Lets data sets and keys of trainers go that no job here uses any more.
  void KeepUsed();
  // Looks at the job's paths, once for each job, before its trainers start.
  void FetchData(int64_t command_id, const v1::Launch& launch, const std::string& plan);
  void RefuseLaunch(int64_t command_id, const v1::Launch& launch, const PreflightResult& found);
  void LaunchChecked(int64_t command_id, const v1::Launch& launch, const std::string& plan);
  void LaunchWithPlan(int64_t command_id, const v1::Launch& launch, const std::string& plan);
  void CertifyTrainers(int64_t command_id,
                       const v1::Launch& launch,
                       const std::string& plan,
                       const LaunchSettings& settings);
  // `identity`: for a ravel-store; null: none of their own.
  void StartTrainers(int64_t command_id,
                     const v1::Launch& launch,
                     const std::string& plan,
                     const LaunchSettings& settings,
                     const TlsIdentity* identity);
  absl::Status OnTrainerCommand(const v1::TrainerCommand& command);
  // Communicator records of trainers that have not been told to train are told again: a coordinator
  // that was started anew knows of none, and another node may lack the set.
  void RepeatRecords();
  // While there is no coordinator, saves by time go on: rank 0 asks, its peers agree.
  void SaveUnattended();
  void OnFrame(const TrainerIdentity& identity, v1::TrainerUp frame);
  void OnExited(const ExitReport& report);
  void OnLog(const TrainerIdentity& identity, LogLines lines);
  void KeepSeal(const TrainerIdentity& identity, const v1::Seal& seal);
  void DropSeals(const std::string& job_uid, int64_t up_to_step);
  AttemptSet Running() const;
  DaemonMetrics Measure() const;
  void SweepLogsLater(std::chrono::milliseconds delay);
  void BeginStop(const std::string& reason);
  void AwaitDrain(std::chrono::steady_clock::time_point deadline);
  void StopTrainers();
  void FinishStop();
  void Exit(int code);

  const DaemonOptions options_;
  const std::string incarnation_;
  std::unique_ptr<Loop> loop_;
  LogSweeper logs_;
  std::unique_ptr<FleetClient> fleet_;
  std::unique_ptr<CertificateRenewal> renewal_;  // null: plaintext
  // Null: plaintext, or trainers that read the node's own identity.
  std::unique_ptr<TrainerCertificates> certificates_;
  std::unique_ptr<NoticeWatch> notice_;  // null: no file is named
  std::unique_ptr<Supervisor> supervisor_;
  std::unique_ptr<Preflight> preflight_;
  std::unique_ptr<LaunchSettingsReader> settings_;
  std::unique_ptr<PathLooks> looks_;
  std::unique_ptr<LaunchData> data_;
  std::set<std::string> checked_jobs_;              // whose paths are here; at most kMaxCheckedJobs
  std::map<std::string, std::string> plans_;        // by digest; at most kMaxPlans
  std::map<RankKey, TrainerIdentity> launching_;    // plan and data fetched, paths looked at
  std::map<RankKey, std::vector<v1::Up>> records_;  // until told to train
  std::vector<KeptSeal> seals_;
  std::map<std::string, int64_t> exits_;  // of trainers, by reason of common/failure_reason.h
  bool stopping_ = false;
  bool flushing_ = false;
  int exit_code_ = kExitClean;
  std::unique_ptr<http::Server> http_;  // asks the loop: goes first
};

}  // namespace ravel::daemon
