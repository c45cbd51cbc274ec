// Daemon: a launch, from the order to the start of its trainers. The plan is fetched, variables and
// paths are held against what the node allows, data sets are fetched, and only then a trainer
// starts. Secrets and paths may lie on mounts that hang: they are looked at on threads with a time
// limit, and the launch goes on when these have posted to the loop. Meanwhile its ranks are told in
// beats as `launching`, and a stop may come: the supervisor refuses what is over.

#include <algorithm>
#include <set>
#include <string>
#include <utility>

#include <absl/strings/str_cat.h>

#include "common/logging.h"
#include "worker/daemon/daemon.h"
#include "worker/daemon/preflight_paths_proto.h"

namespace ravel::daemon {
namespace {

constexpr size_t kMaxPlans = 4;
constexpr size_t kMaxCheckedJobs = 10000;

}  // namespace

void Daemon::OnLaunch(int64_t command_id, const v1::Launch& launch) {
  for (const v1::StartTrainer& start : launch.trainers()) {
    launching_[{launch.job_uid(), launch.epoch(), start.rank()}] = {
        launch.job_uid(), launch.epoch(), launch.attempt(), start.rank()};
  }
  const auto known = plans_.find(launch.plan_digest());
  if (known != plans_.end()) {
    LaunchFetched(command_id, launch, known->second);
    return;
  }
  v1::FetchPlanRequest request;
  request.set_job_uid(launch.job_uid());
  request.set_epoch(launch.epoch());
  request.set_digest(launch.plan_digest());
  fleet_->FetchPlan(request, [this, command_id, launch](absl::StatusOr<std::string> plan) {
    if (!plan.ok()) {
      ForgetLaunching(launch);
    }
    if (absl::IsUnavailable(plan.status()) || absl::IsCancelled(plan.status())) {
      // The stream broke: the coordinator sees that nothing was launched, and says it again.
      log::Warning(plan.status().ToString());
      return;
    }
    if (!plan.ok()) {
      log::Warning(plan.status().ToString());
      fleet_->SendResult(command_id, plan.status());
      return;
    }
    if (plans_.size() >= kMaxPlans) {
      plans_.erase(plans_.begin());
    }
    const std::string& kept = plans_[launch.plan_digest()] = *std::move(plan);
    LaunchFetched(command_id, launch, kept);
  });
}

void Daemon::ForgetLaunching(const v1::Launch& launch) {
  for (const v1::StartTrainer& start : launch.trainers()) {
    launching_.erase({launch.job_uid(), launch.epoch(), start.rank()});
  }
}

void Daemon::LaunchFetched(int64_t command_id, const v1::Launch& launch, const std::string& plan) {
  if (stopping_ || supervisor_->IsOver(launch.job_uid(), launch.epoch())) {
    LaunchWithPlan(command_id, launch, plan);  // which says so
    return;
  }
  // Before anything is fetched; read again when trainers start.
  settings_->Start(launch, [this, command_id, launch, plan](const ReadSettings& read) {
    if (read.status.ok()) {
      LaunchAllowed(command_id, launch, plan);
    } else {
      RefuseLaunch(command_id, launch, {read.status, read.reason});
    }
  });
}

void Daemon::LaunchAllowed(int64_t command_id, const v1::Launch& launch, const std::string& plan) {
  if (!options_.roots.any() || launch.trainers().empty() ||
      checked_jobs_.contains(launch.job_uid())) {
    FetchData(command_id, launch, plan);
    return;
  }
  // Nothing is fetched for a job that names what it may not.
  preflight_->Start({.named = PathsOf(launch.trainers(0)).named},
                    [this, command_id, launch, plan](const PreflightResult& found) {
                      if (found.status.ok()) {
                        FetchData(command_id, launch, plan);
                      } else {
                        RefuseLaunch(command_id, launch, found);
                      }
                    });
}

void Daemon::RefuseLaunch(int64_t command_id,
                          const v1::Launch& launch,
                          const PreflightResult& found) {
  ForgetLaunching(launch);
  KeepUsed();
  log::Warning(absl::StrCat("job ", launch.job_uid(), ": ", found.status.message()));
  fleet_->SendResult(command_id, found.status, found.reason);
}

void Daemon::FetchData(int64_t command_id, const v1::Launch& launch, const std::string& plan) {
  data_->Start(launch, [this, command_id, launch, plan](const LaunchDataResult& got) {
    if (got.status.ok()) {
      LaunchChecked(command_id, got.launch, plan);
      return;
    }
    ForgetLaunching(launch);
    KeepUsed();
    log::Warning(absl::StrCat("job ", launch.job_uid(), ": ", got.status.message()));
    if (!got.reason.empty()) {  // else the coordinator has ended it
      fleet_->SendResult(command_id, got.status, got.reason);
    }
  });
}

void Daemon::KeepUsed() {
  std::set<std::string> jobs;
  std::set<JobEpoch> epochs;
  for (const TrainerProcess* trainer : supervisor_->trainers()) {
    jobs.insert(trainer->identity().job_uid);
    epochs.insert({trainer->identity().job_uid, trainer->identity().epoch});
  }
  for (const auto& [key, identity] : launching_) {
    jobs.insert(identity.job_uid);
    epochs.insert({identity.job_uid, identity.epoch});
  }
  data_->Keep(jobs);
  if (certificates_ != nullptr) {
    certificates_->Keep(epochs);
  }
}

// Opens what this node has of what the job names, which was held against the roots before.
void Daemon::LaunchChecked(int64_t command_id, const v1::Launch& launch, const std::string& plan) {
  if (launch.trainers().empty() || checked_jobs_.contains(launch.job_uid())) {
    LaunchWithPlan(command_id, launch, plan);
    return;
  }
  PreflightPaths paths = PathsOf(launch.trainers(0));
  paths.named.clear();
  preflight_->Start(std::move(paths),
                    [this, command_id, launch, plan](const PreflightResult& found) {
                      if (!found.status.ok()) {
                        RefuseLaunch(command_id, launch, found);
                        return;
                      }
                      if (checked_jobs_.size() >= kMaxCheckedJobs) {
                        checked_jobs_.clear();
                      }
                      checked_jobs_.insert(launch.job_uid());
                      LaunchWithPlan(command_id, launch, plan);
                    });
}

void Daemon::LaunchWithPlan(int64_t command_id, const v1::Launch& launch, const std::string& plan) {
  if (stopping_ || supervisor_->IsOver(launch.job_uid(), launch.epoch())) {
    StartTrainers(command_id, launch, plan, {}, nullptr);  // which says so
    return;
  }
  settings_->Start(launch, [this, command_id, launch, plan](const ReadSettings& read) {
    if (!read.status.ok()) {  // a secret has gone since the job's paths were looked at
      RefuseLaunch(command_id, launch, {read.status, read.reason});
    } else if (read.settings.certify_trainers && certificates_ != nullptr) {
      CertifyTrainers(command_id, launch, plan, read.settings);
    } else {
      StartTrainers(command_id, launch, plan, read.settings, nullptr);
    }
  });
}

void Daemon::CertifyTrainers(int64_t command_id,
                             const v1::Launch& launch,
                             const std::string& plan,
                             const LaunchSettings& settings) {
  certificates_->Get(
      {launch.job_uid(), launch.epoch()},
      [this, command_id, launch, plan, settings](const absl::StatusOr<TlsIdentity>& identity) {
        if (identity.ok()) {
          StartTrainers(command_id, launch, plan, settings, &*identity);
          return;
        }
        const absl::Status why =
            Annotate(identity.status(), "a certificate of trainers for their store");
        if (fleet_->connected()) {
          RefuseLaunch(command_id, launch, {why, ""});
          return;
        }
        // The coordinator sees that nothing was launched, and says it again.
        ForgetLaunching(launch);
        KeepUsed();
        log::Warning(std::string(why.message()));
      });
}

void Daemon::StartTrainers(int64_t command_id,
                           const v1::Launch& launch,
                           const std::string& plan,
                           const LaunchSettings& settings,
                           const TlsIdentity* identity) {
  ForgetLaunching(launch);
  LaunchOrder order{.job_uid = launch.job_uid(),
                    .epoch = launch.epoch(),
                    .attempt = launch.attempt(),
                    .trainers = {},
                    .variables = settings.variables};
  for (const v1::StartTrainer& start : launch.trainers()) {
    v1::StartTrainer& complete = order.trainers.emplace_back(start);
    complete.set_job_uid(launch.job_uid());
    complete.set_epoch(launch.epoch());
    complete.set_attempt(launch.attempt());
    complete.set_plan(plan);
    complete.set_release(options_.version);
    if (identity != nullptr) {
      Fill(*identity, *complete.mutable_store_identity());
    }
    if (!settings.host_address.empty()) {
      complete.set_host_address(settings.host_address);
    } else if (complete.host_address().empty()) {
      complete.set_host_address(options_.data_address);
    }
    complete.set_first_data_port(options_.data_ports.first);
    complete.set_last_data_port(options_.data_ports.last);
  }
  absl::Status done = stopping_ ? absl::FailedPreconditionError("this node is going away")
                                : supervisor_->Launch(order);
  if (!done.ok()) {
    log::Warning(absl::StrCat("refused: ", done.message()));
    KeepUsed();
  }
  fleet_->SendResult(command_id, done);
}

}  // namespace ravel::daemon
