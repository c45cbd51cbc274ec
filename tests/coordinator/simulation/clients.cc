// The users of a simulation: they submit, cancel, try again, roll back, delete and save, and ask
// again until they are answered.

#include <algorithm>
#include <utility>

#include "tests/coordinator/simulation/world.h"

namespace ravel::coordinator::simulation {
namespace {

constexpr double kLostAnswer = 0.1;
constexpr int64_t kAgainUs = 500'000;
constexpr int64_t kLookAgainUs = 5'000'000;

}  // namespace

plan::JobSpec World::MakeSpec(int64_t number) {
  static const std::vector<std::vector<int64_t>> kSizes = {
      {1}, {1, 2}, {2}, {1, 2, 4}, {4}, {2, 4, 8}, {3}};
  plan::JobSpec spec;
  spec.name =
      absl::StrCat("job-", std::string(static_cast<size_t>(random_.Between(0, 6)), 'x'), number);
  std::vector<int64_t> sizes = random_.Pick(kSizes);
  while (sizes.size() > 1 && sizes.back() > settings_.nodes * settings_.devices) {
    sizes.pop_back();
  }
  if (sizes.back() > settings_.nodes * settings_.devices) {
    sizes = {1};
  }
  spec.steps = random_.Between(3, 80);
  spec.device_count = sizes.back();
  spec.elastic.sizes = std::move(sizes);
  spec.elastic.grow_delay_ms = random_.Between(0, 5000);
  spec.elastic.grow_every_ms = random_.Between(0, 20'000);
  spec.checkpoint.every_steps = random_.Chance(0.8) ? random_.Between(1, 20) : 0;
  spec.checkpoint.every_ms = random_.Chance(0.5) ? random_.Between(500, 10'000) : 0;
  spec.checkpoint.at_start = random_.Chance(0.2);
  spec.checkpoint.keep_last = random_.Between(1, 3);
  spec.detection_ms = settings_.detection_ms;
  // The budget is the default one: a fault of the world must not end a job.
  spec.restart.backoff_ms = 500;
  spec.restart.max_backoff_ms = 10'000;
  return spec;
}

void World::PlanJobs() {
  for (int64_t number = 0; number < settings_.jobs; ++number) {
    Client client;
    client.spec = MakeSpec(number);
    const int64_t horizon_us = settings_.faults_for_ms * 1000;
    client.submit_at_us = random_.Between(0, horizon_us / 2);
    if (random_.Chance(0.1)) {
      client.cancel_at_us = client.submit_at_us + random_.Between(0, horizon_us / 2);
    }
    client.retries = settings_.users_go_back && random_.Chance(0.5);
    if (random_.Chance(0.3)) {
      client.save_at_us = client.submit_at_us + random_.Between(0, horizon_us / 4);
    }
    if (settings_.users_go_back && random_.Chance(0.2)) {
      client.rollback_at_us = client.submit_at_us + random_.Between(0, horizon_us);
    }
    if (random_.Chance(0.15)) {
      client.delete_at_us = client.submit_at_us + random_.Between(0, horizon_us);
      client.delete_by_force = random_.Chance(0.4);
      client.delete_checkpoints = random_.Chance(0.5);
    }
    clients_.push_back(client);
    const size_t at = clients_.size() - 1;
    Ask(at, client.submit_at_us, &World::Submit);
    if (client.cancel_at_us >= 0) {
      Ask(at, client.cancel_at_us, &World::Cancel);
    }
    if (client.save_at_us >= 0) {
      Ask(at, client.save_at_us, &World::SaveNow);
    }
    if (client.delete_at_us >= 0) {
      Ask(at, client.delete_at_us, &World::Delete);
    }
    if (client.rollback_at_us >= 0) {
      Ask(at, client.rollback_at_us, &World::Rollback);
    }
  }
}

void World::Ask(size_t client, int64_t at_us, Verb verb) {
  events_.At(at_us - events_.now_us(), [this, client, verb] {
    if (controller_ == nullptr) {
      Ask(client, events_.now_us() + kAgainUs, verb);
      return;
    }
    const auto asked = std::make_shared<Question>(Question{process_, false});
    strand_.Post([this, client, verb, asked] { (this->*verb)(client, asked); });
    AskAgainAfterCrash(client, verb, asked);
  });
}

void World::AskAgainAfterCrash(size_t client, Verb verb, const Asked& asked) {
  events_.At(kAgainUs, [this, client, verb, asked] {
    if (asked->answered) {
      return;
    }
    if (asked->process != process_ || controller_ == nullptr) {
      Ask(client, events_.now_us(), verb);
    } else {
      AskAgainAfterCrash(client, verb, asked);
    }
  });
}

SubmitDraft World::DraftOf(const Client& client, const std::string& request) {
  SubmitDraft draft;
  draft.request_id = request;
  draft.hash = "hash of " + client.spec.name;
  draft.record.namespace_name = "default";
  draft.record.name = client.spec.name;
  draft.record.planned = planner_.EncodeSpec(client.spec);
  draft.record.spec = client.spec;
  return draft;
}

void World::Submit(size_t at, const Asked& asked) {
  controller_->Submit(DraftOf(clients_[at], absl::StrCat("submit-", at)),
                      [this, at, asked](const absl::StatusOr<JobView>& view) {
                        asked->answered = true;
                        OnSubmitted(at, view);
                      });
}

void World::OnSubmitted(size_t at, const absl::StatusOr<JobView>& view) {
  Client& client = clients_[at];
  if (!view.ok()) {
    checks_.Expect(!absl::IsAlreadyExists(view.status()), std::string(view.status().message()));
    Ask(at, events_.now_us() + kAgainUs, &World::Submit);
    return;
  }
  if (client.uid.empty() && random_.Chance(kLostAnswer)) {
    Ask(at, events_.now_us() + kAgainUs, &World::Submit);  // the answer did not arrive
    return;
  }
  checks_.OnSubmitted(absl::StrCat("submit-", at), view->record.uid);
  client.uid = view->record.uid;
  Trace("CLIENT ", client.spec.name, " is submitted as ", client.uid);
}

bool World::CancelWasAsked(const std::string& uid) const {
  return std::any_of(clients_.begin(), clients_.end(), [&uid](const Client& client) {
    return client.uid == uid && client.cancel_asked;
  });
}

bool World::DeleteWasAsked(const std::string& uid) const {
  return std::any_of(clients_.begin(), clients_.end(), [&uid](const Client& client) {
    return client.uid == uid && client.delete_asked;
  });
}

void World::Cancel(size_t at, const Asked& asked) {
  Client& client = clients_[at];
  if (client.uid.empty()) {
    asked->answered = true;
    Ask(at, events_.now_us() + kAgainUs, &World::Cancel);
    return;
  }
  client.cancel_asked = true;
  controller_->Cancel({"default", client.spec.name},
                      "not wanted",
                      [this, at, asked](const absl::StatusOr<JobView>& view) {
                        asked->answered = true;
                        OnCancelled(at, view);
                      });
}

void World::OnCancelled(size_t at, const absl::StatusOr<JobView>& view) {
  Client& client = clients_[at];
  if (view.ok()) {
    client.cancelled = true;
    checks_.OnCancelled(client.uid);
    Trace("CLIENT ", client.spec.name, " is cancelled");
    if (client.retries) {
      Ask(at, events_.now_us() + random_.Between(0, 4 * kAgainUs), &World::Retry);
    }
  } else if (!absl::IsFailedPrecondition(view.status()) && !absl::IsNotFound(view.status())) {
    Ask(at, events_.now_us() + kAgainUs, &World::Cancel);
  }
}

void World::Retry(size_t at, const Asked& asked) {
  const Client& client = clients_[at];
  checks_.OnRetryAsked(client.uid);  // from now on it may go on
  controller_->Retry({"default", client.spec.name},
                     {.request_id = absl::StrCat("retry-", at)},
                     [this, at, asked](const absl::StatusOr<JobView>& view) {
                       asked->answered = true;
                       OnRetried(at, view.status());
                     });
}

void World::OnRetried(size_t at, const absl::Status& status) {
  Client& client = clients_[at];
  if (status.ok()) {
    client.cancelled = false;
    client.cancel_asked = false;
    Trace("CLIENT ", client.spec.name, " is tried again");
  } else if (client.delete_asked) {
    client.cancelled = false;  // it stays cancelled, or is gone
  } else {
    // It is being wound up, or was done before it heard of the cancel.
    const auto job = disk_.jobs.find(client.uid);
    if (job != disk_.jobs.end() && job->second.state == JobState::kSucceeded) {
      client.cancelled = false;
      return;
    }
    Ask(at, events_.now_us() + kAgainUs, &World::Retry);
  }
}

void World::Delete(size_t at, const Asked& asked) {
  Client& client = clients_[at];
  if (client.uid.empty()) {
    asked->answered = true;
    Ask(at, events_.now_us() + kAgainUs, &World::Delete);
    return;
  }
  client.delete_asked = true;
  controller_->Delete({"default", client.spec.name},
                      {.request_id = absl::StrCat("delete-", at),
                       .force = client.delete_by_force,
                       .with_checkpoints = client.delete_checkpoints},
                      [this, at, asked](const absl::StatusOr<JobView>& view) {
                        asked->answered = true;
                        OnDeleted(at, view.status());
                      });
}

void World::OnDeleted(size_t at, const absl::Status& status) {
  const Client& client = clients_[at];
  if (status.ok() || absl::IsNotFound(status)) {
    checks_.OnDeleted(client.uid);
    Trace("CLIENT ", client.spec.name, " is deleted");
  } else {
    // Not over yet, without force.
    const bool waits = absl::IsFailedPrecondition(status);
    Ask(at, events_.now_us() + (waits ? kLookAgainUs : kAgainUs), &World::Delete);
  }
}

// As the service does it: the store is asked off the strand, and nobody is asked twice.
void World::Rollback(size_t at, const Asked& asked) {
  Client& client = clients_[at];
  const JobKey key{"default", client.spec.name};
  const absl::StatusOr<JobView> view = controller_->Get(key);
  if (client.uid.empty() || !view.ok()) {
    asked->answered = true;
    if (!client.delete_asked) {
      Ask(at, events_.now_us() + kLookAgainUs, &World::Rollback);
    }
    return;
  }
  const auto known = store_->FindRequest(absl::StrCat("rollback-", at));
  if (known.ok() && known->has_value()) {
    AskController(at, "", asked);
    return;
  }
  const std::vector<int64_t> steps =
      checkpoints_.GoodBelow("/ckpt/" + client.spec.name, view->record.committed_step);
  if (IsTerminal(view->record.state) || steps.empty()) {
    asked->answered = true;
    if (!IsTerminal(view->record.state)) {
      Ask(at, events_.now_us() + kLookAgainUs, &World::Rollback);
    }
    return;
  }
  client.rollback_step = random_.Pick(steps);
  const CheckpointJob job = controller_->CheckpointsOf(view->record);
  pool_.Post([this, at, asked, job, step = client.rollback_step] {
    const absl::StatusOr<std::string> path = checkpoints_.CheckRollback(job, step);
    strand_.Post([this, at, asked, path] {
      if (path.ok()) {
        AskController(at, *path, asked);
      } else {
        asked->answered = true;
        OnRolledBack(at, path.status());
      }
    });
  });
}

void World::AskController(size_t at, const std::string& path, const Asked& asked) {
  const Client& client = clients_[at];
  controller_->Rollback({"default", client.spec.name},
                        absl::StrCat("rollback-", at),
                        client.rollback_step,
                        path,
                        "diverged",
                        [this, at, asked](const absl::StatusOr<JobView>& view) {
                          asked->answered = true;
                          OnRolledBack(at, view.status());
                        });
}

void World::OnRolledBack(size_t at, const absl::Status& status) {
  if (status.ok()) {
    Trace("CLIENT ", clients_[at].spec.name, " is rolled back to ", clients_[at].rollback_step);
  } else if (!absl::IsFailedPrecondition(status) && !absl::IsNotFound(status)) {
    Ask(at, events_.now_us() + kAgainUs, &World::Rollback);
  }
}

void World::SaveNow(size_t at, const Asked& asked) {
  controller_->CheckpointNow({"default", clients_[at].spec.name},
                             absl::StrCat("save-", at),
                             0,
                             [this, at, asked](const absl::StatusOr<OperationRecord>& operation) {
                               asked->answered = true;
                               OnSaveNow(at, operation);
                             });
}

void World::OnSaveNow(size_t at, const absl::StatusOr<OperationRecord>& operation) {
  if (operation.ok()) {
    checks_.OnOperation(absl::StrCat("save-", at), *operation);
    Trace("CLIENT ", clients_[at].spec.name, " asked for a save: ", operation->id);
  } else if (absl::IsResourceExhausted(operation.status()) ||
             absl::IsUnavailable(operation.status()) ||
             (absl::IsNotFound(operation.status()) && !clients_[at].delete_asked)) {
    Ask(at, events_.now_us() + kAgainUs, &World::SaveNow);
  }
}

}  // namespace ravel::coordinator::simulation
