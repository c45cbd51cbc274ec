// The users of a simulation: they submit, cancel and save, and ask again until they are answered.

#include <utility>

#include "tests/coordinator/simulation/world.h"

namespace ravel::coordinator::simulation {
namespace {

constexpr double kLostAnswer = 0.1;
constexpr int64_t kAgainUs = 500'000;

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
    if (random_.Chance(0.3)) {
      client.save_at_us = client.submit_at_us + random_.Between(0, horizon_us / 4);
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
  }
}

void World::Ask(size_t client, int64_t at_us, void (World::*verb)(size_t)) {
  events_.At(at_us - events_.now_us(), [this, client, verb] {
    if (controller_ == nullptr) {
      Ask(client, events_.now_us() + kAgainUs, verb);
      return;
    }
    const uint64_t process = process_;
    strand_.Post([this, client, verb] { (this->*verb)(client); });
    // A crash before the answer: the client asks again.
    events_.At(kAgainUs, [this, client, verb, process] {
      if (process != process_) {
        Ask(client, events_.now_us(), verb);
      }
    });
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

void World::Submit(size_t at) {
  Client& client = clients_[at];
  const std::string request = absl::StrCat("submit-", at);
  const absl::StatusOr<JobView> view = controller_->Submit(DraftOf(client, request));
  if (!view.ok()) {
    checks_.Expect(!absl::IsAlreadyExists(view.status()), std::string(view.status().message()));
    Ask(at, events_.now_us() + kAgainUs, &World::Submit);
    return;
  }
  if (client.uid.empty() && random_.Chance(kLostAnswer)) {
    Ask(at, events_.now_us() + kAgainUs, &World::Submit);  // the answer did not arrive
    return;
  }
  checks_.OnSubmitted(request, view->record.uid);
  client.uid = view->record.uid;
  Trace("CLIENT ", client.spec.name, " is submitted as ", client.uid);
}

bool World::CancelWasAsked(const std::string& uid) const {
  for (const Client& client : clients_) {
    if (client.uid == uid && client.cancel_asked) {
      return true;
    }
  }
  return false;
}

void World::Cancel(size_t at) {
  Client& client = clients_[at];
  if (client.uid.empty()) {
    Ask(at, events_.now_us() + kAgainUs, &World::Cancel);
    return;
  }
  client.cancel_asked = true;
  const absl::StatusOr<JobView> view =
      controller_->Cancel({"default", client.spec.name}, "not wanted");
  if (view.ok()) {
    checks_.OnCancelled(client.uid);
    Trace("CLIENT ", client.spec.name, " is cancelled");
  } else if (!absl::IsFailedPrecondition(view.status())) {
    Ask(at, events_.now_us() + kAgainUs, &World::Cancel);
  }
}

void World::SaveNow(size_t at) {
  Client& client = clients_[at];
  const std::string request = absl::StrCat("save-", at);
  const absl::StatusOr<OperationRecord> operation =
      controller_->CheckpointNow({"default", client.spec.name}, request);
  if (operation.ok()) {
    checks_.OnOperation(request, operation->id);
    Trace("CLIENT ", client.spec.name, " asked for a save: ", operation->id);
  } else if (absl::IsResourceExhausted(operation.status()) ||
             absl::IsUnavailable(operation.status()) || absl::IsNotFound(operation.status())) {
    Ask(at, events_.now_us() + kAgainUs, &World::SaveNow);
  }
}

}  // namespace ravel::coordinator::simulation
