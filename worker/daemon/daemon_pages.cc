#include "worker/daemon/daemon_pages.h"

#include <utility>

#include <absl/strings/str_cat.h>

#include "common/http/prometheus_text.h"
#include "worker/daemon/daemon.h"

namespace ravel::daemon {
namespace {

http::Answer Readiness(const DaemonMetrics& metrics) {
  if (metrics.stopping) {
    return {503, "this daemon stops\n"};
  }
  if (!metrics.registered) {
    return {503, "no coordinator has this node registered\n"};
  }
  return {200, "ready\n"};
}

void AddTrainers(const DaemonMetrics& metrics, http::PrometheusText& out) {
  std::map<std::string, int64_t> by_state = {{"starting", 0}, {"ready", 0}, {"running", 0}};
  for (const TrainerMetrics& trainer : metrics.trainers) {
    ++by_state[trainer.state];
  }
  out.Gauge("ravel_worker_trainers", "Trainer processes by state.");
  for (const auto& [state, count] : by_state) {
    out.Add({{"state", state}}, static_cast<double>(count));
  }
  out.Gauge("ravel_worker_trainer_step", "Newest step of a rank of this node.");
  for (const TrainerMetrics& trainer : metrics.trainers) {
    out.Add({{"job_uid", trainer.job_uid}, {"rank", absl::StrCat(trainer.rank)}},
            static_cast<double>(trainer.step));
  }
  out.Gauge("ravel_worker_trainer_phase_age_seconds", "Time that a rank has been in its phase.");
  for (const TrainerMetrics& trainer : metrics.trainers) {
    out.Add({{"job_uid", trainer.job_uid},
             {"rank", absl::StrCat(trainer.rank)},
             {"phase", trainer.phase}},
            trainer.phase_age_seconds);
  }
  out.Counter("ravel_worker_trainer_exits_total", "Trainers that ended here, by reason.");
  for (const auto& [reason, count] : metrics.exits) {
    out.Add({{"reason", reason}}, static_cast<double>(count));
  }
}

}  // namespace

std::string DaemonMetricsPage(const DaemonMetrics& metrics) {
  http::PrometheusText out;
  out.Gauge("ravel_worker_build_info", "Release of this daemon, and its node.")
      .Add({{"version", metrics.version}, {"node", metrics.node_id}}, 1);
  out.Gauge("ravel_worker_registered", "1: a coordinator has this node registered.")
      .Add(metrics.registered ? 1 : 0);
  out.Gauge("ravel_worker_stopping", "1: this daemon drains, or ends.")
      .Add(metrics.stopping ? 1 : 0);
  out.Gauge("ravel_worker_devices", "Devices that this node offers, by kind.");
  for (const auto& [kind, count] : metrics.devices) {
    out.Add({{"kind", kind}}, static_cast<double>(count));
  }
  AddTrainers(metrics, out);
  out.Counter("ravel_worker_welcomes_total", "Streams that a coordinator has welcomed.")
      .Add(static_cast<double>(metrics.welcomes));
  out.Counter("ravel_worker_dropped_messages_total", "Log batches and progress that nobody took.")
      .Add(static_cast<double>(metrics.dropped));
  out.Histogram("ravel_worker_beat_latency_seconds", "From a beat to its acknowledgement.")
      .AddHistogram({}, metrics.beat_latency);
  return out.Take();
}

absl::StatusOr<std::unique_ptr<http::Server>> ServeDaemonPages(const http::PageFlags& flags,
                                                               DaemonPagesParts parts) {
  http::ServerOptions options = {.listen = flags.listen, .pages = {}};
  ASSIGN_OR_RETURN(options.security, http::SecurityOf(flags));
  options.pages["/livez"] = [parts](http::Respond respond) {
    parts.post([respond = std::move(respond)] { respond({200, "alive\n"}); });
  };
  options.pages["/readyz"] = [parts](http::Respond respond) {
    parts.post([parts, respond = std::move(respond)] { respond(Readiness(parts.measure())); });
  };
  options.pages["/metrics"] = [parts](http::Respond respond) {
    parts.post([parts, respond = std::move(respond)] {
      http::Answer answer = {.content_type = std::string(http::PrometheusText::kContentType)};
      answer.make_body = [metrics = parts.measure()] { return DaemonMetricsPage(metrics); };
      respond(std::move(answer));
    });
  };
  return http::Server::Start(std::move(options));
}

DaemonMetrics Daemon::Measure() const {
  DaemonMetrics metrics = {.node_id = options_.node_id,
                           .version = options_.version,
                           .registered = fleet_->connected(),
                           .stopping = stopping_,
                           .devices = {{"cpu", 0}, {"gpu", 0}},
                           .trainers = {},
                           .exits = exits_,
                           .dropped = fleet_->dropped(),
                           .welcomes = fleet_->welcomes(),
                           .beat_latency = fleet_->beat_latency()};
  for (const DeviceFacts& device : options_.facts.devices) {
    ++metrics.devices[device.kind];
  }
  for (const TrainerProcess* trainer : supervisor_->trainers()) {
    const TrainerProgressState& progress = trainer->progress();
    metrics.trainers.push_back(
        {.job_uid = trainer->identity().job_uid,
         .rank = trainer->identity().rank,
         .state = progress.state,
         .phase = progress.progress.phase(),
         .step = progress.step,
         .phase_age_seconds = static_cast<double>(progress.progress.phase_age_ms()) / 1000});
  }
  return metrics;
}

}  // namespace ravel::daemon
