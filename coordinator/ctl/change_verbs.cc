// Verbs that change something or wait: wait, cancel, retry, delete, checkpoint, nodes. Each parses
// its options, makes one call and prints the result in the chosen format; waiting goes through
// WatchUntil, which survives a restart of the coordinator. Exit codes come from Report, so scripts
// can tell a refusal from a lost connection.

#include "coordinator/ctl/change_verbs.h"

#include <chrono>
#include <thread>

#include <absl/strings/match.h>
#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>

#include "common/clock.h"
#include "common/json.h"
#include "common/time_text.h"
#include "coordinator/ctl/exit_code.h"
#include "coordinator/ctl/follow.h"

namespace ravel::ctl {
namespace {

absl::StatusOr<int64_t> ParseTimeout(const std::string& text) {
  if (text.empty()) {
    return 0;
  }
  const absl::StatusOr<int64_t> timeout = ParseDurationMs(text);
  RETURN_IF_ERROR(Annotate(timeout.status(), "--timeout"));
  return std::max<int64_t>(*timeout, 1);
}

void PrintJob(const CommonOptions& common, const JobView& job) {
  if (common.format == Format::kName) {
    Print(job.name + "\n");
  } else if (common.format != Format::kTable) {
    Print(FormatDocument(WithSchemaVersion(job.document), common.format));
  }
}

int PrintOperation(const CommonOptions& common, const OperationView& operation) {
  if (common.format == Format::kTable) {
    Print(absl::StrCat("checkpoint of step ",
                       operation.step,
                       ": ",
                       operation.state,
                       operation.reason.empty() ? "" : absl::StrCat(" (", operation.reason, ")"),
                       "\n"));
  } else {
    Print(FormatDocument(WithSchemaVersion(operation.document), common.format));
  }
  return operation.state == "OPERATION_FAILED" ? kExitGeneric : kExitOk;
}

}  // namespace

absl::StatusOr<WaitCondition> ParseWaitCondition(const std::string& text) {
  WaitCondition condition;
  const std::size_t equals = text.find('=');
  const std::string name = text.substr(0, equals);
  const bool has_number = equals != std::string::npos;
  const bool number_ok = has_number && absl::SimpleAtoi(text.substr(equals + 1), &condition.step) &&
                         condition.step >= 0;
  if (name == "step" && number_ok) {
    condition.kind = WaitCondition::Kind::kStep;
  } else if (name == "checkpoint" && (number_ok || !has_number)) {
    condition.kind = WaitCondition::Kind::kCheckpoint;
  } else if (text == "running") {
    condition.kind = WaitCondition::Kind::kRunning;
  } else if (text == "done") {
    condition.kind = WaitCondition::Kind::kDone;
  } else {
    return absl::InvalidArgumentError(absl::StrCat(
        "--for: expected running, step=N, checkpoint, checkpoint=N or done, got '", text, "'"));
  }
  return condition;
}

bool Holds(const WaitCondition& condition, const JobView& job) {
  switch (condition.kind) {
    case WaitCondition::Kind::kRunning:
      return job.state == "RUNNING" || job.state == "FINISHING";
    case WaitCondition::Kind::kDone:
      return job.terminal();
    case WaitCondition::Kind::kCheckpoint:
      return job.committed_step >= condition.step;
    case WaitCondition::Kind::kStep:
      return job.step >= condition.step;
  }
  return false;
}

int RunWait(const CommonOptions& common, const WaitOptions& options) {
  const absl::StatusOr<WaitCondition> condition = ParseWaitCondition(options.condition);
  if (!condition.ok()) {
    return Report(condition.status());
  }
  const absl::StatusOr<int64_t> timeout_ms = ParseTimeout(options.timeout);
  if (!timeout_ms.ok()) {
    return Report(timeout_ms.status());
  }
  const absl::StatusOr<std::unique_ptr<JobsClient>> client =
      JobsClient::Connect(common.coordinator);
  if (!client.ok()) {
    return Report(client.status());
  }
  if (options.follow) {
    return FollowJob(**client, NameOf(common, options.job), FollowMode::kProgress);
  }
  const absl::StatusOr<JobView> job =
      WatchUntil(**client, NameOf(common, options.job), *timeout_ms, [&](const JobView& view) {
        return Holds(*condition, view);
      });
  if (absl::IsDeadlineExceeded(job.status())) {
    Say(absl::StrCat("ravelctl: job ",
                     options.job,
                     " did not reach ",
                     options.condition,
                     " within ",
                     options.timeout));
    return kExitTimeout;
  }
  if (!job.ok()) {
    return Report(job.status());
  }
  PrintJob(common, *job);
  if (job->terminal()) {
    Say(Outcome(*job));
  }
  if (condition->kind == WaitCondition::Kind::kDone) {
    return ExitCodeOfJob(job->state, job->failure_class);
  }
  if (Holds(*condition, *job)) {
    return kExitOk;
  }
  // The job ended first.
  return job->state == "SUCCEEDED" ? kExitConflict : ExitCodeOfJob(job->state, job->failure_class);
}

int RunCancel(const CommonOptions& common, const CancelOptions& options) {
  const absl::StatusOr<std::unique_ptr<JobsClient>> client =
      JobsClient::Connect(common.coordinator);
  if (!client.ok()) {
    return Report(client.status());
  }
  absl::StatusOr<JobView> job = (*client)->Cancel(NameOf(common, options.job), options.reason);
  if (job.ok() && options.wait) {
    job =
        WatchUntil(**client, NameOf(common, options.job), 0, [](const JobView&) { return false; });
  }
  if (!job.ok()) {
    return Report(job.status());
  }
  if (common.format == Format::kTable) {
    Print(absl::StrCat("job ", job->namespace_name, "/", job->name, ": ", job->state, "\n"));
  } else {
    PrintJob(common, *job);
  }
  return kExitOk;
}

int RunRetry(const CommonOptions& common, const RetryOptions& options) {
  const absl::StatusOr<std::unique_ptr<JobsClient>> client =
      JobsClient::Connect(common.coordinator);
  if (!client.ok()) {
    return Report(client.status());
  }
  const absl::StatusOr<JobView> job =
      (*client)->Retry(NameOf(common, options.job), options.allow_numerics_change, options.tensor);
  if (!job.ok()) {
    return Report(job.status());
  }
  if (common.format == Format::kTable) {
    Print(absl::StrCat("job ",
                       job->namespace_name,
                       "/",
                       job->name,
                       ": ",
                       job->state,
                       job->message.empty() ? "" : ", ",
                       job->message,
                       "\n"));
  } else {
    PrintJob(common, *job);
  }
  return kExitOk;
}

int RunNodesHold(const CommonOptions& common,
                 const NodeOptions& options,
                 NodeHold hold,
                 bool lift) {
  const absl::StatusOr<std::unique_ptr<JobsClient>> client =
      JobsClient::Connect(common.coordinator);
  if (!client.ok()) {
    return Report(client.status());
  }
  const absl::StatusOr<NodeView> node =
      (*client)->HoldNode(options.node, hold, lift, options.reason);
  if (!node.ok()) {
    return Report(node.status());
  }
  if (common.format == Format::kName) {
    Print(node->id + "\n");
  } else if (common.format == Format::kTable) {
    Print(absl::StrCat("node ", node->id, ": ", node->state, "\n"));
  } else {
    Print(FormatDocument(WithSchemaVersion(node->document), common.format));
  }
  return kExitOk;
}

int RunNodesForget(const CommonOptions& common, const std::vector<std::string>& nodes) {
  const absl::StatusOr<std::unique_ptr<JobsClient>> client =
      JobsClient::Connect(common.coordinator);
  if (!client.ok()) {
    return Report(client.status());
  }
  int exit_code = kExitOk;
  for (const std::string& node : nodes) {
    const absl::Status status = (*client)->ForgetNode(node);
    if (!status.ok()) {
      exit_code = Report(status);
    } else {
      Print(common.format == Format::kName ? node + "\n"
                                           : absl::StrCat("node ", node, " forgotten\n"));
    }
  }
  return exit_code;
}

int RunDelete(const CommonOptions& common, const DeleteOptions& options) {
  const absl::StatusOr<int64_t> timeout_ms = ParseTimeout(options.timeout);
  if (!timeout_ms.ok()) {
    return Report(timeout_ms.status());
  }
  const absl::StatusOr<std::unique_ptr<JobsClient>> client =
      JobsClient::Connect(common.coordinator);
  if (!client.ok()) {
    return Report(client.status());
  }
  int exit_code = kExitOk;
  const bool documents = common.format != Format::kTable && common.format != Format::kName;
  json::Array ends;
  for (const std::string& name : options.jobs) {
    absl::StatusOr<JobView> job =
        (*client)->Delete(NameOf(common, name), options.force, options.checkpoints, options.reason);
    const std::string uid = job.ok() ? job->uid : "";
    absl::Status status = job.status();
    const int64_t end_ms = SystemClock::Get().MonotonicMs() + *timeout_ms;
    while (job.ok() && job->uid == uid) {
      job = (*client)->Get(NameOf(common, name));
      if (job.ok() && job->uid == uid && SystemClock::Get().MonotonicMs() >= end_ms) {
        status = absl::DeadlineExceededError(
            absl::StrCat("is not gone after ", options.timeout, "; it goes when it can"));
        break;
      }
      if (job.ok() && job->uid == uid) {
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
      }
    }
    if (status.ok() && !job.ok() && !absl::IsNotFound(job.status())) {
      status = job.status();
    }
    if (documents) {
      json::Value& end = ends.emplace_back();
      end.Set("job", name).Set("accepted", !uid.empty()).Set("deleted", status.ok());
      end.Set("message", std::string(status.message()));
    }
    if (absl::IsDeadlineExceeded(status) && !uid.empty()) {
      Say(absl::StrCat("ravelctl: job ", name, " ", std::string(status.message())));
      exit_code = kExitTimeout;
    } else if (!status.ok()) {
      exit_code = Report(Annotate(status, name));
    } else if (!documents) {
      Print(common.format == Format::kName ? name + "\n"
                                           : absl::StrCat("job ", name, " deleted\n"));
    }
  }
  if (documents) {
    Print(FormatDocument(ListDocument(std::move(ends)), common.format));
  }
  return exit_code;
}

int RunCheckpoint(const CommonOptions& common, const CheckpointOptions& options) {
  const absl::StatusOr<int64_t> timeout_ms = ParseTimeout(options.timeout);
  if (!timeout_ms.ok()) {
    return Report(timeout_ms.status());
  }
  const absl::StatusOr<int64_t> deadline_ms = ParseDurationMs(options.deadline);
  if (!deadline_ms.ok()) {
    return Report(Annotate(deadline_ms.status(), "--deadline"));
  }
  const absl::StatusOr<std::unique_ptr<JobsClient>> client =
      JobsClient::Connect(common.coordinator);
  if (!client.ok()) {
    return Report(client.status());
  }
  absl::StatusOr<OperationView> operation =
      (*client)->CheckpointNow(NameOf(common, options.job), *deadline_ms);
  if (!operation.ok()) {
    return Report(operation.status());
  }
  if (options.wait && !operation->done()) {
    const absl::Status status =
        (*client)->WatchOperation(operation->id, *timeout_ms, [&](const OperationView& now) {
          operation = now;
          return !now.done();
        });
    if (absl::IsDeadlineExceeded(status)) {
      Say(absl::StrCat("ravelctl: the checkpoint was not committed within ",
                       options.timeout,
                       "; it is ",
                       operation->state));
      return kExitTimeout;
    }
    if (!status.ok()) {
      return Report(status);
    }
  }
  return PrintOperation(common, *operation);
}

}  // namespace ravel::ctl
