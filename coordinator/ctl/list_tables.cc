#include "coordinator/ctl/list_tables.h"

#include <string>
#include <utility>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>
#include <absl/strings/str_join.h>

#include "common/clock.h"
#include "common/time_text.h"
#include "coordinator/ctl/progress.h"

namespace ravel::ctl {
namespace {

std::string Age(int64_t time_ms) {
  return time_ms == 0 ? "-" : FormatDuration(SystemClock::Get().WallMs() - time_ms);
}

std::string Loss(const JobView& job) {
  return job.step > 0 ? absl::StrFormat("%.4g", job.loss) : "-";
}

std::string Steps(const JobView& job) {
  return absl::StrCat(job.step, "/", job.total_steps);
}

std::string StoreOf(const JobView& job) {
  const json::Value* value = &job.document;
  for (const char* name : {"spec", "checkpoint", "store"}) {
    value = value == nullptr ? nullptr : value->Find(name);
  }
  return value != nullptr && value->is_string() ? value->AsString() : "-";
}

std::vector<std::string> WideCells(const JobView& job) {
  return {absl::StrCat(job.attempt),
          absl::StrCat(job.restarts),
          job.eta_seconds < 0 ? "-" : FormatDuration(static_cast<int64_t>(job.eta_seconds * 1000)),
          StoreOf(job),
          absl::StrCat(
              job.reason.empty() ? "-" : job.reason, job.message.empty() ? "" : ": ", job.message)};
}

}  // namespace

Table JobTable(const std::vector<JobView>& jobs, bool with_namespace, Columns columns) {
  std::vector<std::string> titles = {
      "NAME", "STATE", "STEP", "LOSS", "TOK/S", "WORKERS", "EPOCH", "CHECKPOINT", "AGE"};
  if (with_namespace) {
    titles.insert(titles.begin(), "NAMESPACE");
  }
  if (columns == Columns::kWide) {
    titles.insert(titles.end(), {"ATTEMPT", "RESTARTS", "ETA", "STORE", "REASON"});
  }
  Table table(std::move(titles));
  for (const JobView& job : jobs) {
    const bool waiting = job.state == "QUEUED" && !job.reason.empty();
    std::vector<std::string> cells = {
        job.name,
        waiting ? absl::StrCat(job.state, " (", job.reason, ")") : job.state,
        Steps(job),
        Loss(job),
        job.state == "RUNNING" ? ShortNumber(job.tokens_per_second) : "-",
        absl::StrCat(job.world_size),
        absl::StrCat(job.epoch),
        job.committed_step >= 0 ? absl::StrCat(job.committed_step) : "-",
        Age(job.created_ms)};
    if (with_namespace) {
      cells.insert(cells.begin(), job.namespace_name);
    }
    if (columns == Columns::kWide) {
      const std::vector<std::string> wide = WideCells(job);
      cells.insert(cells.end(), wide.begin(), wide.end());
    }
    table.AddRow(std::move(cells));
  }
  return table;
}

Table NodeTable(const std::vector<NodeView>& nodes, Columns columns) {
  std::vector<std::string> titles = {
      "NODE", "STATE", "DEVICES", "FREE", "KIND", "ADDRESS", "BEAT", "FAILED"};
  if (columns == Columns::kWide) {
    titles.insert(titles.end(), {"NETWORKS", "VERSION"});
  }
  titles.push_back("NOTE");
  Table table(std::move(titles));
  for (const NodeView& node : nodes) {
    std::vector<std::string> cells = {
        node.id,
        node.state,
        absl::StrCat(node.devices),
        absl::StrCat(node.devices_free),
        node.device_model.empty() ? node.device_kind
                                  : absl::StrCat(node.device_kind, " ", node.device_model),
        node.address,
        node.last_beat_ms == 0 ? "-" : Age(node.last_beat_ms) + " ago",
        absl::StrCat(node.penalties)};
    if (columns == Columns::kWide) {
      cells.push_back(node.networks.empty() ? "-" : absl::StrJoin(node.networks, ","));
      cells.push_back(node.version.empty() ? "-" : node.version);
    }
    cells.push_back(node.message);
    table.AddRow(std::move(cells));
  }
  return table;
}

Table StepTable(const std::vector<CheckpointView>& checkpoints, Columns columns) {
  std::vector<std::string> titles = {"STEP", "STATE", "SIZE", "FILES", "MESH", "EPOCH", "AGE"};
  if (columns == Columns::kWide) {
    titles.insert(titles.end(), {"RANKS", "SAVE"});
  }
  titles.push_back("PATH");
  Table table(std::move(titles));
  for (const CheckpointView& checkpoint : checkpoints) {
    std::vector<std::string> cells = {
        absl::StrCat(checkpoint.step),
        absl::StrCat(checkpoint.state, checkpoint.pinned ? " pinned" : ""),
        FormatBytes(checkpoint.bytes),
        absl::StrCat(checkpoint.files),
        checkpoint.mesh,
        absl::StrCat(checkpoint.epoch),
        FormatDuration(SystemClock::Get().WallMs() - checkpoint.created_ms)};
    if (columns == Columns::kWide) {
      cells.push_back(absl::StrCat(checkpoint.world_size));
      cells.push_back(checkpoint.save_id.empty() ? "-" : checkpoint.save_id);
    }
    cells.push_back(checkpoint.path);
    table.AddRow(std::move(cells));
  }
  return table;
}

}  // namespace ravel::ctl
