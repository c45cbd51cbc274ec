#include "tests/testing/mini_cluster.h"

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <utility>

#include <absl/strings/ascii.h>
#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_split.h>
#include <unistd.h>

#include "tests/testing/eventually.h"

namespace ravel::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// Proto JSON writes 64-bit numbers as strings.
int64_t IntOf(const json::Value& object, std::string_view name, int64_t otherwise = 0) {
  const json::Value* value = object.Find(name);
  if (value == nullptr) {
    return otherwise;
  }
  int64_t number = otherwise;
  if (value->is_string()) {
    return absl::SimpleAtoi(value->AsString(), &number) ? number : otherwise;
  }
  return value->is_number() ? static_cast<int64_t>(value->AsDouble()) : otherwise;
}

double NumberOf(const json::Value& object, std::string_view name) {
  const json::Value* value = object.Find(name);
  return value != nullptr && value->is_number() ? value->AsDouble() : 0;
}

std::string TextOf(const json::Value& object, std::string_view name) {
  const json::Value* value = object.Find(name);
  return value != nullptr && value->is_string() ? value->AsString() : "";
}

// For programs to start on a machine that has other work.
constexpr seconds kStartTime{60};

std::string LastLines(const std::string& text, size_t bytes) {
  return text.size() <= bytes ? text : "..." + text.substr(text.size() - bytes);
}

}  // namespace

bool JobView::Terminal() const {
  return state == "SUCCEEDED" || state == "FAILED" || state == "CANCELLED";
}

std::string BinaryFolder() {
  if (const char* folder = std::getenv("RAVEL_BIN_DIR"); folder != nullptr) {
    return folder;
  }
  std::error_code error;
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", error);
  for (std::filesystem::path up = self.parent_path(); up != up.root_path(); up = up.parent_path()) {
    if (std::filesystem::exists(up / "bin" / "ravelctl", error)) {
      return (up / "bin").string();
    }
  }
  return "bin";
}

std::string BinaryPath(std::string_view name) {
  return BinaryFolder() + "/" + std::string(name);
}

absl::StatusOr<std::unique_ptr<MiniCluster>> MiniCluster::Start(
    std::map<std::string, std::string> environment, const std::string& detection) {
  std::unique_ptr<MiniCluster> cluster(new MiniCluster());
  cluster->environment_ = std::move(environment);
  cluster->detection_ = detection;
  RETURN_IF_ERROR(cluster->StartCoordinator("127.0.0.1:0"));
  return cluster;
}

absl::StatusOr<std::unique_ptr<MiniCluster>> MiniCluster::StartCopyOf(const MiniCluster& other) {
  std::unique_ptr<MiniCluster> cluster(new MiniCluster());
  cluster->environment_ = other.environment_;
  cluster->detection_ = other.detection_;
  std::error_code error;
  std::filesystem::copy(other.folder() + "/state",
                        cluster->folder() + "/state",
                        std::filesystem::copy_options::recursive,
                        error);
  if (error) {
    return absl::InternalError(absl::StrCat("copy of the state: ", error.message()));
  }
  RETURN_IF_ERROR(cluster->StartCoordinator("127.0.0.1:0"));
  return cluster;
}

MiniCluster::~MiniCluster() {
  workers_.clear();
  coordinator_.reset();
}

std::string MiniCluster::HoldPath() const {
  return folder() + "/hold";
}

absl::Status MiniCluster::StartCoordinator(const std::string& listen) {
  const std::string port_file = folder() + "/port";
  std::error_code error;
  std::filesystem::remove(port_file, error);
  std::filesystem::remove(folder() + "/http-port", error);
  ProcessOptions options;
  options.arguments = {BinaryPath("ravel-coordinator"),
                       "--dev-loopback",
                       "--listen",
                       listen,
                       "--state-dir",
                       folder() + "/state",
                       "--port-file",
                       port_file,
                       "--detection",
                       detection_,
                       "--http-listen",
                       "127.0.0.1:0",
                       "--http-port-file",
                       folder() + "/http-port",
                       "--enable-faults"};
  options.arguments.insert(
      options.arguments.end(), coordinator_flags_.begin(), coordinator_flags_.end());
  if (!hidden_.empty()) {
    const std::vector<std::string> wrap = {"/usr/bin/unshare",
                                           "--mount",
                                           "/bin/sh",
                                           "-c",
                                           "mount -t tmpfs tmpfs \"$0\" && exec \"$@\"",
                                           hidden_};
    options.arguments.insert(options.arguments.begin(), wrap.begin(), wrap.end());
  }
  options.environment = environment_;
  options.output_path = options.error_path = folder() + "/coordinator.log";
  ASSIGN_OR_RETURN(coordinator_, ChildProcess::Start(options));
  int port = 0;
  const bool up = Eventually(kStartTime, [&] {
    return absl::SimpleAtoi(absl::StripAsciiWhitespace(ReadText(port_file)), &port) ||
           !coordinator_->Running();
  });
  if (!up || port == 0) {
    return absl::UnavailableError(
        absl::StrCat("no coordinator: ", LastLines(ReadText(options.output_path), 2000)));
  }
  address_ = absl::StrCat("127.0.0.1:", port);
  return absl::OkStatus();
}

absl::Status MiniCluster::StartWorkers(int count,
                                       const std::map<std::string, std::string>& environment) {
  while (static_cast<int>(workers_.size()) < count) {
    RETURN_IF_ERROR(StartWorker(absl::StrCat("w", next_worker_++), environment));
  }
  return WaitForReadyNodes(count);
}

std::string MiniCluster::NoticeFile(const std::string& worker) const {
  return absl::StrCat(folder(), "/", worker, "/notice");
}

absl::Status MiniCluster::StartWorker(const std::string& name,
                                      const std::map<std::string, std::string>& environment,
                                      const std::string& coordinator) {
  ProcessOptions options;
  options.arguments = {BinaryPath("ravel-worker"),
                       "--dev-loopback",
                       "--coordinator",
                       coordinator.empty() ? address_ : coordinator,
                       "--node-id",
                       name,
                       "--cpu-devices",
                       "1",
                       "--work-dir",
                       absl::StrCat(folder(), "/", name),
                       "--http-listen",
                       "127.0.0.1:0",
                       "--http-port-file",
                       absl::StrCat(folder(), "/", name, "/http-port"),
                       "--notice-file",
                       NoticeFile(name),
                       "--enable-faults"};
  options.arguments.insert(options.arguments.end(), worker_flags_.begin(), worker_flags_.end());
  options.environment = environment;
  options.output_path = options.error_path = absl::StrCat(folder(), "/", name, ".log");
  std::filesystem::create_directories(absl::StrCat(folder(), "/", name));
  ASSIGN_OR_RETURN(workers_[name], ChildProcess::Start(options));
  return absl::OkStatus();
}

absl::Status MiniCluster::WaitForReadyNodes(int count) {
  std::string last;
  const bool ready = Eventually(kStartTime, [&] {
    const RunResult result = Ctl({"nodes", "list", "-o", "json"});
    last = result.out + result.err;
    const absl::StatusOr<json::Value> parsed = json::Parse(result.out);
    const json::Value* nodes = parsed.ok() ? parsed->Find("items") : nullptr;
    if (nodes == nullptr || !nodes->is_array()) {
      return false;
    }
    int ready_nodes = 0;
    int ready_workers = 0;
    for (const json::Value& node : nodes->AsArray()) {
      if (TextOf(node, "state") == "READY") {
        ++ready_nodes;
        ready_workers += workers_.contains(TextOf(node, "id")) ? 1 : 0;
      }
    }
    return ready_nodes == count && ready_workers == static_cast<int>(workers_.size());
  });
  return ready ? absl::OkStatus()
               : absl::DeadlineExceededError(absl::StrCat("not ", count, " READY nodes: ", last));
}

void MiniCluster::KillWorker(const std::string& name) {
  workers_.erase(name);
}

std::vector<std::string> MiniCluster::worker_names() const {
  std::vector<std::string> names;
  for (const auto& [name, worker] : workers_) {
    names.push_back(name);
  }
  return names;
}

std::vector<pid_t> MiniCluster::Trainers(const std::string& worker) const {
  const auto found = workers_.find(worker);
  return found == workers_.end() ? std::vector<pid_t>() : ChildrenOf(found->second->pid());
}

std::vector<pid_t> MiniCluster::AllTrainers() const {
  std::vector<pid_t> all;
  for (const auto& [name, worker] : workers_) {
    const std::vector<pid_t> some = ChildrenOf(worker->pid());
    all.insert(all.end(), some.begin(), some.end());
  }
  return all;
}

std::map<std::string, std::string> MiniCluster::HoldFaults(const std::string& faults) const {
  return {{"RAVEL_FAULTS",
           absl::StrCat(faults, faults.empty() ? "" : ",", "trainer.step@*:hold=", HoldPath())}};
}

void MiniCluster::HoldTrainersAt(int64_t step) const {
  WriteText(absl::StrCat(HoldPath(), ".", step), "");
}

void MiniCluster::LetTrainersGoAt(int64_t step) const {
  std::filesystem::remove(absl::StrCat(HoldPath(), ".", step));
}

void MiniCluster::LetTrainersGo() const {
  std::vector<std::filesystem::path> holds;
  for (const auto& entry : std::filesystem::directory_iterator(folder())) {
    if (entry.path().stem() == std::filesystem::path(HoldPath()).filename()) {
      holds.push_back(entry.path());
    }
  }
  for (const std::filesystem::path& hold : holds) {
    std::filesystem::remove(hold);
  }
}

void MiniCluster::KillCoordinator() {
  coordinator_->Kill();
}

absl::Status MiniCluster::RestartCoordinator() {
  return StartCoordinator(std::string(address_));
}

absl::Status MiniCluster::RestartCoordinatorWithout(const std::string& folder) {
  KillCoordinator();
  hidden_ = folder;
  return RestartCoordinator();
}

absl::Status MiniCluster::RestartCoordinator(std::map<std::string, std::string> environment) {
  environment_ = std::move(environment);
  return RestartCoordinator();
}

RunResult MiniCluster::Ctl(std::vector<std::string> arguments, milliseconds deadline) const {
  ProcessOptions options;
  options.arguments = {BinaryPath("ravelctl"), "--coordinator", address_};
  options.arguments.insert(options.arguments.end(), arguments.begin(), arguments.end());
  return RunProgram(options, folder(), deadline);
}

absl::StatusOr<json::Value> MiniCluster::CtlJson(std::vector<std::string> arguments) const {
  const RunResult result = Ctl(std::move(arguments));
  if (result.exit_code != 0) {
    return absl::InternalError(absl::StrCat("ravelctl exit ", result.exit_code, ": ", result.err));
  }
  return json::Parse(result.out);
}

absl::Status MiniCluster::Submit(const TinyJob& job) {
  const std::string path = absl::StrCat(folder(), "/", job.name, ".yaml");
  WriteText(path, ToYaml(job));
  const RunResult result = Ctl({"submit", "-f", path});
  return result.exit_code == 0 ? absl::OkStatus()
                               : absl::InternalError(absl::StrCat(
                                     "submit: exit ", result.exit_code, ": ", result.err));
}

absl::StatusOr<JobView> MiniCluster::Get(const std::string& job) const {
  ASSIGN_OR_RETURN(const json::Value object, CtlJson({"get", job, "-o", "json"}));
  JobView view;
  view.state = TextOf(object, "state");
  view.reason = TextOf(object, "reason");
  view.message = TextOf(object, "message");
  view.step = IntOf(object, "step");
  view.epoch = IntOf(object, "epoch");
  view.world_size = IntOf(object, "worldSize");
  view.committed_step = IntOf(object, "committedStep", -1);
  view.restarts = IntOf(object, "restarts");
  view.committed_path = TextOf(object, "committedPath");
  return view;
}

JobView MiniCluster::Watch(const std::string& job,
                           milliseconds deadline,
                           const std::function<bool(const JobView&)>& until) const {
  JobView view;
  int64_t furthest = -1;
  bool reached = false;
  do {
    furthest = std::max(furthest, view.step);
    reached = Eventually(deadline, [&] {
      const absl::StatusOr<JobView> now = Get(job);
      view = now.ok() ? *now : view;
      return until(view) || view.step > furthest;
    });
  } while (reached && !until(view));
  return view;
}

absl::Status MiniCluster::WaitForStep(const std::string& job, int64_t step, milliseconds deadline) {
  const JobView view = Watch(
      job, deadline, [step](const JobView& now) { return now.step >= step || now.Terminal(); });
  return view.step >= step
             ? absl::OkStatus()
             : absl::DeadlineExceededError(absl::StrCat(
                   "step ", view.step, " of ", step, ", ", view.state, "\n", Report(job)));
}

absl::StatusOr<JobView> MiniCluster::WaitForEnd(const std::string& job, milliseconds deadline) {
  JobView view = Watch(job, deadline, [](const JobView& now) { return now.Terminal(); });
  if (!view.Terminal()) {
    return absl::DeadlineExceededError(
        absl::StrCat(job, " did not end: ", view.state, " at step ", view.step, "\n", Report(job)));
  }
  return view;
}

absl::Status MiniCluster::WaitForSuccess(const std::string& job, milliseconds deadline) {
  ASSIGN_OR_RETURN(const JobView view, WaitForEnd(job, deadline));
  return view.state == "SUCCEEDED"
             ? absl::OkStatus()
             : absl::InternalError(absl::StrCat(
                   job, ": ", view.state, " ", view.reason, ": ", view.message, "\n", Report(job)));
}

absl::StatusOr<std::vector<StepRow>> MiniCluster::Metrics(const std::string& job,
                                                          bool replaced) const {
  std::vector<std::string> arguments = {"metrics", job, "-o", "jsonl"};
  if (replaced) {
    arguments.emplace_back("--all");
  }
  const RunResult result = Ctl(arguments);
  if (result.exit_code != 0) {
    return absl::InternalError(absl::StrCat("metrics: exit ", result.exit_code, ": ", result.err));
  }
  std::vector<StepRow> rows;
  const std::vector<std::string> lines = absl::StrSplit(result.out, '\n', absl::SkipWhitespace());
  for (const std::string& line : lines) {
    ASSIGN_OR_RETURN(const json::Value object, json::Parse(line));
    rows.push_back({.step = IntOf(object, "step"),
                    .loss_bits = TextOf(object, "loss_bits"),
                    .loss = NumberOf(object, "loss"),
                    .grad_norm = NumberOf(object, "grad_norm"),
                    .tokens_per_second = NumberOf(object, "tokens_per_second"),
                    .step_seconds = NumberOf(object, "step_seconds"),
                    .time_ms = IntOf(object, "time_ms"),
                    .world_size = IntOf(object, "world_size"),
                    .epoch = IntOf(object, "epoch"),
                    .attempt = IntOf(object, "attempt")});
  }
  return rows;
}

absl::StatusOr<std::vector<EventRow>> MiniCluster::Events(const std::string& job) const {
  const RunResult result = Ctl({"events", job, "-o", "jsonl"});
  if (result.exit_code != 0) {
    return absl::InternalError(absl::StrCat("events: exit ", result.exit_code, ": ", result.err));
  }
  std::vector<EventRow> rows;
  const std::vector<std::string> lines = absl::StrSplit(result.out, '\n', absl::SkipWhitespace());
  for (const std::string& line : lines) {
    ASSIGN_OR_RETURN(const json::Value object, json::Parse(line));
    rows.push_back({.type = TextOf(object, "type"),
                    .reason = TextOf(object, "reason"),
                    .message = TextOf(object, "message"),
                    .step = IntOf(object, "step"),
                    .epoch = IntOf(object, "epoch"),
                    .time_ms = IntOf(object, "timeMs")});
  }
  return rows;
}

absl::StatusOr<std::map<int64_t, std::string>> MiniCluster::Checkpoints(
    const std::string& job) const {
  ASSIGN_OR_RETURN(const json::Value object, CtlJson({"checkpoints", "list", job, "-o", "json"}));
  const json::Value* list = object.Find("items");
  std::map<int64_t, std::string> found;
  if (list != nullptr && list->is_array()) {
    for (const json::Value& checkpoint : list->AsArray()) {
      if (TextOf(checkpoint, "state") == "COMMITTED") {
        found[IntOf(checkpoint, "step")] = TextOf(checkpoint, "path");
      }
    }
  }
  return found;
}

absl::StatusOr<std::string> MiniCluster::StateDigest(const std::string& step_directory) const {
  ASSIGN_OR_RETURN(const json::Value object,
                   CtlJson({"checkpoints", "show", step_directory, "-o", "json"}));
  for (const char* name : {"stateDigest", "state_digest"}) {
    const std::string digest = TextOf(object, name);
    if (!digest.empty()) {
      return digest;
    }
  }
  return absl::NotFoundError("no stateDigest in: " + json::Serialize(object).substr(0, 500));
}

std::string MiniCluster::Report(const std::string& job) const {
  std::string text = "--- events\n" + LastLines(Ctl({"events", job}).out, 4000);
  absl::StrAppend(&text, "--- logs\n", LastLines(Ctl({"logs", job}).out, 4000));
  absl::StrAppend(
      &text, "--- coordinator\n", LastLines(ReadText(folder() + "/coordinator.log"), 2000));
  for (const auto& [name, worker] : workers_) {
    absl::StrAppend(&text,
                    "--- ",
                    name,
                    "\n",
                    LastLines(ReadText(absl::StrCat(folder(), "/", name, ".log")), 2000));
  }
  return text;
}

std::string FirstDifference(const std::vector<StepRow>& a, const std::vector<StepRow>& b) {
  for (size_t i = 0; i < std::max(a.size(), b.size()); ++i) {
    if (i >= a.size() || i >= b.size()) {
      return absl::StrCat("histories of ", a.size(), " and ", b.size(), " steps");
    }
    if (a[i].step != b[i].step) {
      return absl::StrCat("row ", i, ": step ", a[i].step, " here, step ", b[i].step, " there");
    }
    if (a[i].loss_bits != b[i].loss_bits || a[i].loss_bits.size() != 8) {
      return absl::StrCat(
          "step ", a[i].step, ": ", a[i].loss_bits, " here, ", b[i].loss_bits, " there");
    }
  }
  return a.empty() ? "histories are empty" : "";
}

int64_t EnvironmentNumber(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  int64_t number = 0;
  return text != nullptr && absl::SimpleAtoi(text, &number) ? number : otherwise;
}

}  // namespace ravel::testing
