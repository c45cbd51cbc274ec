// Names follow the conventions of Prometheus: base units, `_total` on counters, `_info` with
// value 1. A job has at most some 90 series: its gauges below, the buckets of its step times, one
// per entry of its ledger of device time, and one per class of gemms.

#include "coordinator/http/metrics_page.h"

#include <functional>
#include <limits>
#include <map>
#include <string_view>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_split.h>

#include "common/failure_reason.h"
#include "common/http/prometheus_text.h"

namespace ravel::coordinator {
namespace {

using http::Labels;
using http::PrometheusText;

Labels JobLabels(const JobMetrics& job, Labels more = {}) {
  Labels labels = {{"namespace", job.namespace_name}, {"job", job.name}};
  labels.insert(labels.end(), more.begin(), more.end());
  return labels;
}

// The value of an entry of a job's numerics; empty: it has none.
std::string NumericOf(const JobMetrics& job, std::string_view name) {
  const std::string head = absl::StrCat(absl::string_view(name.data(), name.size()), "=");
  for (const absl::string_view entry : absl::StrSplit(job.numerics, ' ')) {
    if (absl::StartsWith(entry, head)) {
      return std::string(entry.substr(head.size()));
    }
  }
  return "";
}

void AddProcess(const ProcessMetrics& process,
                const ControllerMetrics& metrics,
                PrometheusText& out) {
  out.Gauge("ravel_build_info", "Release of this program.").Add({{"version", process.version}}, 1);
  out.Gauge("ravel_cluster_info", "Identity of the cluster.")
      .Add({{"cluster", metrics.cluster_id}}, 1);
  out.Gauge("ravel_start_time_seconds", "Start of this process, in seconds since 1970.")
      .Add(process.start_seconds);
  out.Gauge("ravel_insecure", "1: plaintext on loopback, without identities.")
      .Add(process.insecure ? 1 : 0);
  PrometheusText& ends = out.Gauge("ravel_certificate_end_time_seconds",
                                   "End of a certificate, in seconds since 1970.");
  for (const auto& [of, end] :
       {std::pair<const char*, int64_t>{"server", process.server_certificate_end},
        {"authority", process.authority_end}}) {
    if (end != 0) {
      ends.Add({{"of", of}}, static_cast<double>(end));
    }
  }
  out.Gauge("ravel_term", "Number of this coordinator process in the life of its database.")
      .Add(static_cast<double>(metrics.term));
  out.Gauge("ravel_controller_lag_seconds",
            "Wait of work for the controller's strand, last minute.")
      .Add({{"stat", "p50"}}, process.lag.p50_ms / 1000)
      .Add({{"stat", "p99"}}, process.lag.p99_ms / 1000)
      .Add({{"stat", "max"}}, process.lag.max_ms / 1000);
  out.Gauge("ravel_controller_longest_turn_seconds", "Longest turn on the strand, last minute.")
      .Add(process.lag.longest_turn_ms / 1000);
  out.Counter("ravel_controller_turns_total", "Turns on the controller's strand.")
      .Add(static_cast<double>(process.turns));
  out.Counter("ravel_controller_lag_alarms_total", "Times when the strand did not keep up.")
      .Add(static_cast<double>(process.lag_alarms));
  out.Histogram("ravel_persist_seconds", "Time of a commit of the database, with its disk.")
      .AddHistogram({}, process.persist);
  out.Counter("ravel_persist_failures_total", "Changes that the database did not take.")
      .Add(static_cast<double>(process.failed_writes));
  out.Gauge("ravel_store_writable", "0: the disk is full, or the newest commit failed.")
      .Add(process.store_writable ? 1 : 0);
  out.Counter("ravel_http_answers_total", "Answers of this HTTP server.")
      .Add(static_cast<double>(process.http.answered));
  out.Counter("ravel_http_refused_connections_total", "Connections above the HTTP server's limit.")
      .Add(static_cast<double>(process.http.refused_connections));
  out.Counter("ravel_rpc_handled_total", "Calls of the gRPC API that ended, by status.");
  for (const RpcLook& rpc : process.rpcs) {
    for (const auto& [code, count] : rpc.by_code) {
      out.Add({{"method", rpc.method}, {"code", code}}, static_cast<double>(count));
    }
  }
  out.Counter("ravel_rpc_over_rate_total", "Calls that were refused for their caller's rate.")
      .Add(static_cast<double>(process.calls_over_rate));
  out.Histogram("ravel_rpc_handling_seconds", "Time of gRPC calls with one answer.");
  for (const RpcLook& rpc : process.rpcs) {
    if (rpc.seconds.Count() > 0) {  // not of streams
      out.AddHistogram({{"method", rpc.method}}, rpc.seconds);
    }
  }
}

void AddCluster(const ControllerMetrics& metrics, PrometheusText& out) {
  out.Gauge("ravel_jobs", "Jobs by state.");
  for (const auto& [state, count] : metrics.jobs) {
    out.Add({{"state", state}}, static_cast<double>(count));
  }
  out.Gauge("ravel_nodes", "Nodes by state.");
  for (const auto& [state, count] : metrics.nodes) {
    out.Add({{"state", state}}, static_cast<double>(count));
  }
  out.Gauge("ravel_devices", "Devices by kind; away: on nodes that take no work now.");
  for (const auto& [key, count] : metrics.devices) {
    out.Add({{"kind", key.first}, {"use", key.second}}, static_cast<double>(count));
  }
  out.Gauge("ravel_beat_age_seconds", "Silence of the connected node that was silent for longest.")
      .Add(metrics.beat_age_seconds);
  out.Gauge("ravel_queue_wait_seconds", "Wait of the queued job that waits for longest.")
      .Add(metrics.queue_wait_seconds);
  out.Counter("ravel_stale_refused_total", "Messages of older epochs that were refused.")
      .Add(static_cast<double>(metrics.stale_refused));
  out.Gauge("ravel_operations", "Saves that were asked for and have no result yet.")
      .Add(static_cast<double>(metrics.open_operations));
  out.Counter("ravel_restarts_total", "Epochs of all jobs that ended early, by cause.");
  // Every reason is exported from the start, as 0: Prometheus sees no increase in a series whose
  // first sample is 1.
  std::map<std::string, int64_t> restarts = metrics.counts.restarts.counts();
  for (const FailureReason& reason : FailureReasons()) {
    if (reason.answer != FailureAnswer::kStayQueued) {
      restarts.try_emplace(std::string(reason.name), 0);
    }
  }
  for (const auto& [reason, count] : restarts) {
    out.Add({{"reason", reason},
             {"class", std::string(FailureClassName(FindFailureReason(reason).kind))}},
            static_cast<double>(count));
  }
  out.Counter("ravel_nodes_lost_total", "Nodes that were declared lost.")
      .Add(static_cast<double>(metrics.counts.nodes_lost));
  out.Counter("ravel_checkpoint_commits_total", "Checkpoints of all jobs that were committed.")
      .Add(static_cast<double>(metrics.counts.commits));
  out.Counter("ravel_checkpoint_failures_total", "Saves of all jobs that failed, by reason.");
  for (const auto& [reason, count] : metrics.counts.save_failures.counts()) {
    out.Add({{"reason", reason}}, static_cast<double>(count));
  }
  out.Gauge("ravel_jobs_without_series", "Jobs beyond the limit of those with series of their own.")
      .Add(static_cast<double>(metrics.jobs_without_series));
}

// A family with at most one sample for each job; NaN leaves it out.
void AddOfJobs(const ControllerMetrics& metrics,
               const std::function<double(const JobMetrics&)>& value,
               PrometheusText& out) {
  for (const JobMetrics& job : metrics.by_job) {
    if (const double number = value(job); number == number) {
      out.Add(JobLabels(job), number);
    }
  }
}

constexpr double kAbsent = std::numeric_limits<double>::quiet_NaN();
double Number(int64_t value) {
  return static_cast<double>(value);
}
double KnownAge(double seconds) {
  return seconds < 0 ? kAbsent : seconds;
}

// Returns tokens per second and device of the newest step that this coordinator has seen.
double DeviceSpeed(const JobMetrics& job) {
  return job.meter.devices > 0 ? job.tokens_per_second / Number(job.meter.devices) : kAbsent;
}

// Returns model FLOP/s per device of that step.
double DeviceFlops(const JobMetrics& job) {
  const double flops = job.meter.scale.flops_per_token;
  return flops > 0 ? DeviceSpeed(job) * flops : kAbsent;
}

// The values of steps are those of the newest; before a job's first step they are absent.
using Value = double (*)(const JobMetrics&);
struct JobGauge {
  const char* name;
  const char* help;
  Value value;
};
constexpr JobGauge kGauges[] = {
    {"ravel_job_epoch", "Epoch of the job's members.", [](auto& j) { return Number(j.epoch); }},
    {"ravel_job_attempt",
     "Generation of its processes.",
     [](auto& j) { return Number(j.attempt); }},
    {"ravel_job_step", "Newest step of its history.", [](auto& j) { return Number(j.step); }},
    {"ravel_job_target_steps",
     "Steps that it is to make.",
     [](auto& j) { return Number(j.target_steps); }},
    {"ravel_job_tokens_per_second",
     "Tokens of its newest step per second.",
     [](auto& j) { return j.any_step ? j.tokens_per_second : kAbsent; }},
    {"ravel_job_tokens_per_second_per_device",
     "Tokens per second of its newest step, divided by the devices that ran it.",
     DeviceSpeed},
    {"ravel_job_tflops",
     "Model TFLOP/s per device in its newest step: 6 FLOPs per matrix-product weight and token, "
     "causal attention at half; recomputation counts zero. Absent while tensors are frozen.",
     [](auto& j) { return DeviceFlops(j) / 1e12; }},
    {"ravel_job_mfu_ratio",
     "Model FLOP/s (causal attention at half) divided by the device's dense bf16 peak. Absent "
     "where "
     "that peak is not known, such as on CPUs.",
     [](auto& j) {
       const double peak = j.meter.scale.peak_flops;
       return peak > 0 ? DeviceFlops(j) / peak : kAbsent;
     }},
    {"ravel_job_eta_seconds",
     "Time to its last step at this pace.",
     [](auto& j) { return KnownAge(j.eta_seconds); }},
    {"ravel_job_grad_norm",
     "Gradient norm of its newest step.",
     [](auto& j) { return j.meter.steps > 0 ? j.meter.grad_norm : kAbsent; }},
    {"ravel_job_learning_rate",
     "Learning rate of its newest step.",
     [](auto& j) { return j.meter.steps > 0 ? j.meter.learning_rate : kAbsent; }},
    {"ravel_job_progress_age_seconds",
     "Time since its trainers moved at all, while it holds devices.",
     [](auto& j) { return KnownAge(j.progress_age_seconds); }},
    {"ravel_job_queue_wait_seconds",
     "Time since its submission, while it waits for devices.",
     [](auto& j) { return KnownAge(j.queue_wait_seconds); }},
    {"ravel_job_checkpoint_step",
     "Step of its newest commit; -1: none.",
     [](auto& j) { return Number(j.committed_step); }},
    {"ravel_job_checkpoint_age_seconds",
     "Time since its newest commit, or since it began to train if that is later.",
     [](auto& j) { return KnownAge(j.checkpoint_age_seconds); }},
    {"ravel_job_checkpoint_fresh",
     "The condition CheckpointFresh: 0 when its saves fail or are late.",
     [](auto& j) { return j.checkpoint_fresh ? 1.0 : 0.0; }},
    {"ravel_goodput_ratio",
     "Part of the job's device time that went into its surviving steps.",
     [](auto& j) { return KnownAge(j.goodput_ratio); }},
};
constexpr JobGauge kCounters[] = {
    {"ravel_job_restarts_total",
     "Epochs of the job that ended early.",
     [](auto& j) { return Number(j.restarts); }},
    {"ravel_job_steps_total",
     "Steps that it made since this coordinator started, replays too.",
     [](auto& j) { return Number(j.meter.steps); }},
    {"ravel_job_tokens_total",
     "Target tokens of these steps.",
     [](auto& j) { return Number(j.meter.tokens); }},
    {"ravel_job_skipped_steps_total",
     "Steps of these whose update was left out.",
     [](auto& j) { return Number(j.meter.skipped_steps); }},
    {"ravel_job_checkpoint_failures_total",
     "Saves of the job that failed.",
     [](auto& j) { return Number(j.failed_saves); }},
    {"ravel_job_checkpoint_skips_total",
     "Saves that found the one before unfinished.",
     [](auto& j) { return Number(j.skipped_saves); }},
    {"ravel_held_device_seconds_total",
     "Device time of the job that is accounted for.",
     [](auto& j) { return j.accounted_device_seconds; }},
};

void AddInfos(const ControllerMetrics& metrics, PrometheusText& out) {
  out.Gauge("ravel_job_info", "How the job computes.");
  for (const JobMetrics& job : metrics.by_job) {
    out.Add(JobLabels(job,
                      {{"device", NumericOf(job, "device")},
                       {"compute", NumericOf(job, "compute")},
                       {"recipe", NumericOf(job, "recipe")},
                       {"determinism", NumericOf(job, "determinism")}}),
            1);
  }
  out.Gauge(
      "ravel_job_gemm_info",
      "How the job's gemms are computed, by class; path: of codes, or the type of plain gemms.");
  for (const JobMetrics& job : metrics.by_job) {
    const std::string plain = NumericOf(job, "compute");
    for (const char* of : {"forward", "input_gradient", "weight_gradient"}) {
      out.Add(
          JobLabels(job,
                    {{"class", of}, {"path", job.quantized ? NumericOf(job, "gemmPath") : plain}}),
          1);
    }
    if (job.quantized) {  // matrices that the recipe leaves alone, attention and the head
      out.Add(JobLabels(job, {{"class", "unquantized"}, {"path", plain}}), 1);
    }
  }
  out.Gauge("ravel_job_state", "1: the state that the job is in.");
  for (const JobMetrics& job : metrics.by_job) {
    out.Add(JobLabels(job, {{"state", std::string(StateName(job.state))}}), 1);
  }
  out.Gauge("ravel_job_devices", "Devices of the job: wanted, and held now.");
  for (const JobMetrics& job : metrics.by_job) {
    out.Add(JobLabels(job, {{"kind", "wanted"}}), Number(job.wanted_devices));
    out.Add(JobLabels(job, {{"kind", "held"}}), Number(job.devices));
  }
  out.Gauge("ravel_job_loss", "Mean loss of the job's newest step.");
  AddOfJobs(
      metrics, [](const JobMetrics& job) { return job.any_step ? job.loss : kAbsent; }, out);
  out.Gauge("ravel_job_memory_bytes", "Memory of rank 0: planned peak, and measured.");
  for (const JobMetrics& job : metrics.by_job) {
    if (job.meter.planned_bytes > 0) {
      out.Add(JobLabels(job, {{"kind", "planned"}}), Number(job.meter.planned_bytes));
      out.Add(JobLabels(job, {{"kind", "measured"}}), Number(job.meter.measured_bytes));
    }
  }
}

void AddStepSeconds(const ControllerMetrics& metrics, PrometheusText& out) {
  out.Histogram("ravel_job_step_seconds",
                "Step times that the job reported since this coordinator started, replays "
                "included: every step, or every logEvery-th.");
  for (const JobMetrics& job : metrics.by_job) {
    if (job.meter.steps > 0) {
      const StepSeconds& times = job.meter.step_seconds;
      out.AddHistogram(JobLabels(job), StepSeconds::kBounds, times.counts, times.sum);
    }
  }
}

void AddGoodput(const ControllerMetrics& metrics, PrometheusText& out) {
  out.Gauge("ravel_productive_device_seconds",
            "Device time of steps that are in the surviving history; falls when some are lost.");
  const std::string productive(DeviceTimeName(DeviceTime::kProductive));
  for (const JobMetrics& job : metrics.by_job) {
    for (const auto& [cause, seconds] : job.device_seconds) {
      if (cause == productive) {
        out.Add(JobLabels(job), seconds);
      }
    }
  }
  out.Counter(
      "ravel_lost_device_seconds_total",
      "Device time that went elsewhere, by cause; with the productive it sums to the held.");
  for (const JobMetrics& job : metrics.by_job) {
    for (const auto& [cause, seconds] : job.device_seconds) {
      if (cause != productive) {
        out.Add(JobLabels(job, {{"cause", cause}}), seconds);
      }
    }
  }
}

}  // namespace

std::string MetricsPage(const ControllerMetrics& metrics, const ProcessMetrics& process) {
  PrometheusText out;
  AddProcess(process, metrics, out);
  AddCluster(metrics, out);
  AddInfos(metrics, out);
  for (const JobGauge& gauge : kGauges) {
    AddOfJobs(metrics, gauge.value, out.Gauge(gauge.name, gauge.help));
  }
  for (const JobGauge& counter : kCounters) {
    AddOfJobs(metrics, counter.value, out.Counter(counter.name, counter.help));
  }
  AddStepSeconds(metrics, out);
  AddGoodput(metrics, out);
  return out.Take();
}

}  // namespace ravel::coordinator
