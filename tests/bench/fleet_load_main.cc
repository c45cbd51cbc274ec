// fleet_load: a thousand nodes, a thousand running jobs and ten thousand queued ones on the real
// coordinator, and what it takes of them. One JSON object on stdout; progress on stderr. Exit code
// 0: measured, and all --at-most and --at-least hold; 1: not. It ends by itself, with all it
// started.

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>
#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_split.h>
#include <absl/strings/strip.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include "common/json.h"
#include "coordinator/store/metrics_log.h"
#include "tests/bench/fake_fleet.h"
#include "tests/bench/load_client.h"
#include "tests/testing/eventually.h"
#include "tests/testing/process.h"
#include "tests/testing/tiny_job.h"

namespace ravel::bench {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::Eventually;

struct Flags {
  std::string coordinator = "ravel-coordinator";
  std::string detection = "5s";
  int nodes = 1000;
  int devices = 8;
  int64_t running = 990;
  int64_t queued = 10000;
  int submitters = 4;
  double submit_rate = 220;  // beside the steady load
  int steady_s = 30;
  int kills = 6;
  int fill_limit_s = 150;
  int64_t metric_lines = 0;  // above 0: also a cold start with so many
  bool hold = false;         // after filling: say where, and stay until stdin ends
  std::vector<std::string> at_most;
  std::vector<std::string> at_least;
};

void Say(const std::string& text) {
  std::fprintf(stderr, "fleet_load: %s\n", text.c_str());
}

double SecondsSince(SteadyClock::time_point start) {
  return std::chrono::duration<double>(SteadyClock::now() - start).count();
}

double CpuSeconds(pid_t pid) {
  const std::string stat = testing::ReadText(absl::StrCat("/proc/", pid, "/stat"));
  const std::vector<std::string> fields =
      absl::StrSplit(stat.substr(std::min(stat.size(), stat.rfind(')') + 2)), ' ');
  double user = 0;
  double system = 0;
  if (fields.size() < 13 || !absl::SimpleAtod(fields[11], &user) ||
      !absl::SimpleAtod(fields[12], &system)) {
    return 0;
  }
  return (user + system) / static_cast<double>(sysconf(_SC_CLK_TCK));
}

// VmHWM and its like, in MiB.
double MemoryMib(pid_t pid, const std::string& field) {
  for (const absl::string_view line :
       absl::StrSplit(testing::ReadText(absl::StrCat("/proc/", pid, "/status")), '\n')) {
    double kib = 0;
    if (absl::StartsWith(line, field + ":")) {
      const std::vector<std::string> words = absl::StrSplit(line, ' ', absl::SkipEmpty());
      return absl::SimpleAtod(words.size() > 1 ? words[1] : words[0].substr(field.size() + 2), &kib)
                 ? kib / 1024
                 : 0;
    }
  }
  return 0;
}

class Load {
 public:
  explicit Load(Flags flags) : flags_(std::move(flags)) {}

  // What was measured, or why nothing could be.
  absl::Status Run();
  const std::map<std::string, double>& numbers() const { return numbers_; }
  json::Value Report() const;

 private:
  absl::Status StartCoordinator(const std::string& listen);
  absl::Status StartFleet();
  absl::Status StartJobs();
  void Fill();
  void Steady();
  void Kills();
  void Kill(bool silently);
  void Hold();
  absl::Status ColdStart();
  void AddMetricLines(const std::string& uid, int64_t lines);
  void NoteAcks(const std::string& phase);
  void NoteRates(const Submitter& submitter, const std::string& phase);
  Submitter::Options SubmitOptions(const std::string& prefix, int64_t count) const;

  const Flags flags_;
  testing::ScratchFolder scratch_;
  std::unique_ptr<testing::ChildProcess> coordinator_;
  std::string address_;
  std::unique_ptr<FakeFleet> fleet_;
  std::unique_ptr<JobsConnection> jobs_;
  std::unique_ptr<Reader> reader_;
  std::map<std::string, std::string> names_;  // running uid -> name
  std::map<std::string, double> numbers_;
  std::map<std::string, std::vector<double>> lists_;
  std::string server_;
  std::string first_error_;
};

absl::Status Load::StartCoordinator(const std::string& listen) {
  const std::string port_file = scratch_.path() + "/port";
  std::error_code error;
  std::filesystem::remove(port_file, error);
  testing::ProcessOptions options;
  options.arguments = {flags_.coordinator,
                       "--dev-loopback",
                       "--listen",
                       listen,
                       "--state-dir",
                       scratch_.path() + "/state",
                       "--port-file",
                       port_file,
                       "--detection",
                       flags_.detection};
  options.output_path = options.error_path = scratch_.path() + "/coordinator.log";
  ASSIGN_OR_RETURN(coordinator_, testing::ChildProcess::Start(options));
  int port = 0;
  Eventually(seconds(120), [&] {
    return absl::SimpleAtoi(absl::StripAsciiWhitespace(testing::ReadText(port_file)), &port) ||
           !coordinator_->Running();
  });
  if (port == 0) {
    return absl::UnavailableError("no coordinator: " + testing::ReadText(options.output_path));
  }
  address_ = absl::StrCat("127.0.0.1:", port);
  return absl::OkStatus();
}

absl::Status Load::StartFleet() {
  const SteadyClock::time_point start = SteadyClock::now();
  fleet_ = std::make_unique<FakeFleet>(
      FleetOptions{.address = address_, .nodes = flags_.nodes, .devices = flags_.devices});
  fleet_->Start();
  const bool all = Eventually(seconds(60), [&] { return fleet_->welcomed() == flags_.nodes; });
  numbers_["registration_s"] = SecondsSince(start);
  Say(absl::StrCat(fleet_->welcomed(), " nodes after ", numbers_["registration_s"], " s"));
  return all ? absl::OkStatus()
             : absl::DeadlineExceededError(
                   absl::StrCat("only ", fleet_->welcomed(), " nodes were welcomed"));
}

Submitter::Options Load::SubmitOptions(const std::string& prefix, int64_t count) const {
  return {.address = address_,
          .prefix = prefix,
          .devices = {flags_.devices},
          .tokens_path = scratch_.path() + "/tokens.bin",
          .store = scratch_.path() + "/store",
          .count = count,
          .connections = flags_.submitters,
          .rate = 0,
          .limit = seconds(flags_.fill_limit_s)};
}

absl::Status Load::StartJobs() {
  testing::WriteTokens(scratch_.path() + "/tokens.bin", 100000, 97);
  const SteadyClock::time_point start = SteadyClock::now();
  Submitter submitter(SubmitOptions("run-", flags_.running));
  submitter.Wait();
  if (submitter.accepted() != flags_.running) {
    return absl::InternalError(absl::StrCat("only ",
                                            submitter.accepted(),
                                            " of ",
                                            flags_.running,
                                            " jobs accepted: ",
                                            submitter.first_error()));
  }
  names_ = submitter.names();
  const bool all =
      Eventually(seconds(90), [&] { return fleet_->running_jobs() >= flags_.running; });
  numbers_["all_running_s"] = SecondsSince(start);
  Say(absl::StrCat(fleet_->running_jobs(), " jobs run after ", numbers_["all_running_s"], " s"));
  return all ? absl::OkStatus()
             : absl::DeadlineExceededError(
                   absl::StrCat("only ", fleet_->running_jobs(), " jobs run"));
}

void Load::NoteAcks(const std::string& phase) {
  const Samples acks = fleet_->TakeAcks(1000);
  numbers_[phase + "_acks"] = static_cast<double>(acks.size());
  numbers_[phase + "_ack_p50_ms"] = Percentile(acks, 50);
  numbers_[phase + "_ack_p99_ms"] = Percentile(acks, 99);
  numbers_[phase + "_ack_max_ms"] = Percentile(acks, 100);
}

void Load::NoteRates(const Submitter& submitter, const std::string& phase) {
  const size_t window = std::clamp<size_t>(static_cast<size_t>(flags_.queued) / 10, 20, 1000);
  std::vector<double> rates = submitter.RatesBy(window);
  numbers_[phase + "_submitted"] = static_cast<double>(submitter.accepted());
  numbers_[phase + "_submit_refused"] = static_cast<double>(submitter.refused());
  numbers_[phase + "_submits_per_s_least"] =
      rates.empty() ? 0 : *std::min_element(rates.begin(), rates.end());
  numbers_[phase + "_submit_p50_ms"] = Percentile(submitter.latencies(), 50);
  numbers_[phase + "_submit_p99_ms"] = Percentile(submitter.latencies(), 99);
  lists_[phase + "_submits_per_s_by_window"] = std::move(rates);
  if (first_error_.empty()) {
    first_error_ = submitter.first_error();
  }
}

// Queued jobs want more devices than are ever free, in several sizes.
void Load::Fill() {
  NoteAcks("idle");
  reader_ = std::make_unique<Reader>(address_, "run-0");
  const SteadyClock::time_point start = SteadyClock::now();
  Submitter::Options options = SubmitOptions("wait-", flags_.queued);
  options.devices.clear();
  const int64_t spare = (flags_.nodes * flags_.devices) - (flags_.running * flags_.devices);
  for (int64_t more = 1; more <= 5; ++more) {
    options.devices.push_back(spare + more * flags_.devices);
  }
  Submitter submitter(options);
  submitter.Wait();
  numbers_["fill_s"] = SecondsSince(start);
  NoteRates(submitter, "fill");
  NoteAcks("fill");
  Say(absl::StrCat(submitter.accepted(),
                   " jobs queued after ",
                   numbers_["fill_s"],
                   " s, ack p99 ",
                   numbers_["fill_ack_p99_ms"],
                   " ms"));
}

void Load::Steady() {
  const pid_t pid = coordinator_->pid();
  reader_ = std::make_unique<Reader>(address_, "run-0");
  const double cpu = CpuSeconds(pid);
  const int64_t steps = fleet_->step_reports();
  const SteadyClock::time_point start = SteadyClock::now();
  fleet_->TakeAcks(1000);
  Submitter::Options options =
      SubmitOptions("late-", static_cast<int64_t>(flags_.submit_rate * flags_.steady_s));
  options.devices = {(flags_.nodes + 1) * flags_.devices - flags_.running * flags_.devices};
  options.rate = flags_.submit_rate;
  options.limit = seconds(flags_.steady_s);
  std::vector<double> lags;
  Submitter submitter(options);
  while (SecondsSince(start) < flags_.steady_s) {
    testing::PauseBetweenLooks(seconds(1));
    const absl::StatusOr<ServerState> server = jobs_->Server();
    if (server.ok()) {
      server_ = server->text;
      lags.push_back(server->strand_lag_p99);
    }
  }
  submitter.Stop();
  submitter.Wait();
  const double took = SecondsSince(start);
  NoteRates(submitter, "steady");
  numbers_["steady_submits_per_s"] = static_cast<double>(submitter.accepted()) / took;
  NoteAcks("steady");
  numbers_["strand_lag_p99_ms"] = Percentile(lags, 100);
  numbers_["step_reports_per_s"] = static_cast<double>(fleet_->step_reports() - steps) / took;
  numbers_["cpu_cores"] = (CpuSeconds(pid) - cpu) / took;
  numbers_["list_p99_ms"] = Percentile(reader_->lists(), 99);
  numbers_["list_p50_ms"] = Percentile(reader_->lists(), 50);
  numbers_["get_p99_ms"] = Percentile(reader_->gets(), 99);
  numbers_["get_p50_ms"] = Percentile(reader_->gets(), 50);
  numbers_["reads_failed"] = static_cast<double>(reader_->failed());
  Say(absl::StrCat("steady: ack p99 ",
                   numbers_["steady_ack_p99_ms"],
                   " ms, ",
                   numbers_["steady_submits_per_s"],
                   " submits/s, ",
                   numbers_["cpu_cores"],
                   " cores"));
}

void Load::Kill(bool silently) {
  const absl::StatusOr<FakeFleet::Victim> victim = fleet_->Kill(silently);
  if (!victim.ok()) {
    first_error_ = std::string(victim.status().message());
    return;
  }
  const std::string name = names_[victim->job_uid];
  const std::string kind = silently ? "frozen" : "closed";
  double declared = -1;
  const bool relaunched = Eventually(seconds(30), [&] {
    if (declared < 0) {
      const absl::StatusOr<JobState> job = jobs_->Get(name);
      if (job.ok() && (job->epoch > victim->epoch || job->state != "RUNNING")) {
        declared = SecondsSince(victim->when);
      }
    }
    return fleet_->Relaunched(victim->job_uid, victim->epoch) != SteadyClock::time_point();
  });
  const double next = relaunched
                          ? std::chrono::duration<double>(
                                fleet_->Relaunched(victim->job_uid, victim->epoch) - victim->when)
                                .count()
                          : 1e9;
  lists_[kind + "_declared_s"].push_back(declared < 0 ? 1e9 : declared);
  lists_[kind + "_next_epoch_s"].push_back(next);
  Say(absl::StrCat(
      victim->node, " ", kind, ": declared after ", declared, " s, next epoch after ", next, " s"));
}

// Nodes of which nothing more is heard, one after the other.
void Load::Kills() {
  for (int i = 0; i < flags_.kills; ++i) {
    Kill(i % 2 == 1);
  }
  for (const char* kind : {"closed", "frozen"}) {
    for (const char* what : {"_declared_s", "_next_epoch_s"}) {
      const std::vector<double>& all = lists_[absl::StrCat(kind, what)];
      if (!all.empty()) {
        numbers_[absl::StrCat(kind, what, "_most")] = *std::max_element(all.begin(), all.end());
      }
    }
  }
}

// The load stays, with submits, for somebody who measures beside it.
void Load::Hold() {
  std::printf("%s\n", address_.c_str());
  std::fflush(stdout);
  Submitter::Options options = SubmitOptions("held-", 1'000'000);
  options.devices = {(flags_.nodes + 1) * flags_.devices - flags_.running * flags_.devices};
  options.rate = flags_.submit_rate;
  options.limit = seconds(1800);
  std::optional<Submitter> submitter;
  if (flags_.submit_rate > 0) {
    submitter.emplace(options);
  }
  while (std::getchar() != EOF) {
  }
}

// Lines of one job that ran for long, through the code that writes them.
void Load::AddMetricLines(const std::string& uid, int64_t lines) {
  coordinator::MetricsLog log(scratch_.path() + "/more");
  std::filesystem::create_directories(scratch_.path() + "/more");
  for (int64_t step = 1; step <= lines; ++step) {
    StepRecord record;
    record.step = step;
    record.loss = 4.0f + 1.0f / static_cast<float>(step);
    record.grad_norm = 1.2345678901;
    record.lr = 3e-4;
    record.tokens = 4096;
    record.tokens_per_second = 4096.25;
    record.step_seconds = 0.99987;
    record.world_size = flags_.devices;
    record.epoch = record.attempt = 1;
    record.time_ms = 1'790'000'000'000 + step;
    (void)log.Append(uid, record);
  }
}

absl::Status Load::ColdStart() {
  SteadyClock::time_point start = SteadyClock::now();
  coordinator_->Signal(SIGTERM);
  if (!coordinator_->Wait(seconds(60))) {
    return absl::DeadlineExceededError("the coordinator does not stop");
  }
  numbers_["sigterm_s"] = SecondsSince(start);
  const int64_t each = flags_.metric_lines / static_cast<int64_t>(names_.size());
  const std::string sample = "sample";
  AddMetricLines(sample, each);
  const std::string text = testing::ReadText(scratch_.path() + "/more/" + sample + ".jsonl");
  int64_t lines = 0;
  for (const auto& [uid, name] : names_) {
    std::ofstream file(scratch_.path() + "/state/metrics/" + uid + ".jsonl",
                       std::ios::app | std::ios::binary);
    file << text;
    lines += file.good() ? each : 0;
  }
  numbers_["metric_lines"] = static_cast<double>(lines);
  const int64_t jobs_before = static_cast<int64_t>(numbers_["fill_submitted"]) + flags_.running;
  Say(absl::StrCat(lines, " metric lines in ", names_.size(), " files"));
  start = SteadyClock::now();
  RETURN_IF_ERROR(StartCoordinator(address_));
  RETURN_IF_ERROR(jobs_->Get("run-0").status());
  numbers_["cold_start_s"] = SecondsSince(start);
  numbers_["cold_start_jobs"] = static_cast<double>(jobs_before);
  numbers_["cold_start_rss_mib"] = MemoryMib(coordinator_->pid(), "VmHWM");
  Eventually(seconds(30), [&] { return fleet_->welcomed() >= flags_.nodes - flags_.kills; });
  numbers_["fleet_back_s"] = SecondsSince(start);
  numbers_["fleet_back_nodes"] = fleet_->welcomed();
  Say(absl::StrCat("cold start in ",
                   numbers_["cold_start_s"],
                   " s, ",
                   fleet_->welcomed(),
                   " nodes back after ",
                   numbers_["fleet_back_s"],
                   " s"));
  return absl::OkStatus();
}

absl::Status Load::Run() {
  rlimit files{};
  getrlimit(RLIMIT_NOFILE, &files);
  files.rlim_cur = files.rlim_max;
  setrlimit(RLIMIT_NOFILE, &files);
  RETURN_IF_ERROR(StartCoordinator("127.0.0.1:0"));
  jobs_ = JobsConnection::Open(address_);
  RETURN_IF_ERROR(StartFleet());
  RETURN_IF_ERROR(StartJobs());
  Fill();
  if (flags_.hold) {
    reader_.reset();
    Hold();
    return absl::OkStatus();
  }
  if (flags_.steady_s > 0) {
    Steady();
  }
  Kills();
  reader_.reset();
  numbers_["rss_mib"] = MemoryMib(coordinator_->pid(), "VmRSS");
  numbers_["rss_most_mib"] = MemoryMib(coordinator_->pid(), "VmHWM");
  numbers_["streams_lost"] = static_cast<double>(fleet_->streams_lost());
  return flags_.metric_lines > 0 ? ColdStart() : absl::OkStatus();
}

json::Value Load::Report() const {
  json::Object report;
  for (const auto& [name, number] : numbers_) {
    report.push_back({name, number});
  }
  for (const auto& [name, values] : lists_) {
    json::Array array;
    for (const double value : values) {
      array.emplace_back(value);
    }
    report.push_back({name, std::move(array)});
  }
  report.push_back({"server_info", server_});
  report.push_back({"first_error", first_error_});
  return report;
}

// "NAME=NUMBER": false, and why on stderr, when it does not hold.
bool Holds(const std::map<std::string, double>& numbers, const std::string& bound, bool at_most) {
  const std::vector<std::string> parts = absl::StrSplit(bound, '=');
  double limit = 0;
  const auto found = numbers.find(parts[0]);
  if (parts.size() != 2 || !absl::SimpleAtod(parts[1], &limit) || found == numbers.end()) {
    Say(absl::StrCat(bound, ": nothing of this name was measured"));
    return false;
  }
  if (at_most ? found->second <= limit && found->second >= 0 : found->second >= limit) {
    return true;
  }
  Say(absl::StrCat(
      parts[0], " is ", found->second, ", not ", at_most ? "at most " : "at least ", limit));
  return false;
}

int Main(const Flags& flags) {
  Load load(flags);
  const absl::Status status = load.Run();
  if (flags.hold) {
    return status.ok() ? 0 : 1;
  }
  std::printf("%s\n", json::Serialize(load.Report()).c_str());
  if (!status.ok()) {
    Say(status.ToString());
    return 1;
  }
  bool held = true;
  for (const std::string& bound : flags.at_most) {
    held = Holds(load.numbers(), bound, true) && held;
  }
  for (const std::string& bound : flags.at_least) {
    held = Holds(load.numbers(), bound, false) && held;
  }
  return held ? 0 : 1;
}

}  // namespace
}  // namespace ravel::bench

int main(int argc, char** argv) {
  ravel::bench::Flags flags;
  CLI::App app("fleet_load: a fake fleet and its users on a real coordinator");
  app.add_option("--coordinator", flags.coordinator, "the program")->capture_default_str();
  app.add_option("--detection", flags.detection)->capture_default_str();
  app.add_option("--nodes", flags.nodes)->capture_default_str();
  app.add_option("--devices", flags.devices, "of each node, and of each running job")
      ->capture_default_str();
  app.add_option("--running", flags.running, "jobs that train")->capture_default_str();
  app.add_option("--queued", flags.queued, "jobs that wait")->capture_default_str();
  app.add_option("--submitters", flags.submitters, "connections that submit")
      ->capture_default_str();
  app.add_option("--submit-rate", flags.submit_rate, "a second, beside the steady load")
      ->capture_default_str();
  app.add_option("--steady", flags.steady_s, "seconds of steady load")->capture_default_str();
  app.add_option("--kills", flags.kills, "nodes that are taken away")->capture_default_str();
  app.add_option("--fill-limit", flags.fill_limit_s, "seconds in which jobs are queued")
      ->capture_default_str();
  app.add_option("--metric-lines", flags.metric_lines, "then a cold start with so many lines");
  app.add_flag("--hold", flags.hold, "print the address under load; stay until stdin ends");
  app.add_option("--at-most", flags.at_most, "NAME=NUMBER");
  app.add_option("--at-least", flags.at_least, "NAME=NUMBER");
  CLI11_PARSE(app, argc, argv);
  setenv("GRPC_VERBOSITY", "NONE", 0);
  signal(SIGPIPE, SIG_IGN);
  return ravel::bench::Main(flags);
}
