#include "coordinator/saves/named_start.h"

#include <cstdint>
#include <utility>
#include <vector>

#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>

#include "common/ckpt/step_layout.h"
#include "common/logging.h"
#include "common/plan/numerics.h"
#include "common/store/committed_step.h"
#include "coordinator/saves/checkpoint_pins.h"
#include "coordinator/saves/retention.h"
#include "coordinator/saves/step_inspection.h"

namespace ravel::coordinator {
namespace {

// Later steps of other jobs go out of the way of a job that was told where to begin.
absl::Status SetOthersAside(store::ObjectStore& files,
                            const CheckpointJob& job,
                            const RestorePoint& start) {
  // If the start is in another folder, or there is none, no step that lies here is part of this
  // history.
  const bool here = start.path.starts_with(files.Locate("") + "/");
  ASSIGN_OR_RETURN(const std::vector<std::string> moved,
                   SetAside(files, job.uid, here ? start.step : -1));
  if (!moved.empty()) {
    log::Info(absl::StrCat("job ",
                           job.spec.name,
                           ": ",
                           moved.size(),
                           " earlier steps were moved to ",
                           files.Locate(absl::StrCat("old-", job.uid))));
  }
  return absl::OkStatus();
}

}  // namespace

bool NamesStart(const plan::JobSpec& spec) {
  return spec.checkpoint.resume_from != "auto" && spec.checkpoint.resume_from != "none";
}

absl::StatusOr<std::optional<store::StorePlace>> StartElsewhere(const plan::JobSpec& spec) {
  const std::string& wanted = spec.checkpoint.resume_from;
  if (!wanted.starts_with("/") && !store::IsRemoteStore(wanted)) {
    return std::optional<store::StorePlace>();
  }
  ASSIGN_OR_RETURN(store::StorePlace place, store::OpenParent(wanted));
  return std::optional<store::StorePlace>(std::move(place));
}

absl::StatusOr<std::string> NumericsChangeSince(const std::string& path,
                                                const plan::JobSpec& spec) {
  ASSIGN_OR_RETURN(const store::StorePlace place, store::OpenParent(path));
  const absl::StatusOr<store::CommittedStep> step =
      store::CommittedStep::Open(place.parent.get(), place.name);
  if (!step.ok()) {
    // It was just found good: this proves no damage.
    return absl::UnavailableError(absl::StrCat(path, ": ", std::string(step.status().message())));
  }
  return plan::NumericsChange(step->manifest().numerics, plan::NumericsOf(spec));
}

absl::StatusOr<RestorePoint> NamedStart(const store::ObjectStore& files,
                                        const plan::JobSpec& spec) {
  const std::string& wanted = spec.checkpoint.resume_from;
  ASSIGN_OR_RETURN(const std::optional<store::StorePlace> start, StartElsewhere(spec));
  if (start) {
    ASSIGN_OR_RETURN(const store::CommittedStep step,
                     store::CommittedStep::Open(start->parent.get(), start->name));
    return RestorePoint{.step = step.commit().step, .path = wanted, .own = false};
  }
  int64_t step = -1;
  if (!absl::SimpleAtoi(wanted, &step) || step < 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "expected auto, none, a step number, an absolute path or a URL, got ", wanted));
  }
  const StepInspection inspected = InspectStep(files, step);
  if (inspected.condition != StepCondition::kGood) {
    return absl::FailedPreconditionError(
        absl::StrCat(files.Locate(ckpt::StepName(step)), ": ", inspected.reason));
  }
  return RestorePoint{.step = step, .path = files.Locate(ckpt::StepName(step)), .own = true};
}

absl::StatusOr<RestorePoint> BeginHistory(store::ObjectStore& files, const CheckpointJob& job) {
  RestorePoint start;
  if (NamesStart(job.spec)) {
    ASSIGN_OR_RETURN(start, NamedStart(files, job.spec));
  }
  RETURN_IF_ERROR(SetOthersAside(files, job, start));
  return start;
}

absl::Status UnpinStart(const CheckpointJob& job) {
  const absl::StatusOr<std::optional<store::StorePlace>> start = StartElsewhere(job.spec);
  const std::optional<int64_t> step =
      start.ok() && *start ? ckpt::ParseStepName((*start)->name) : std::optional<int64_t>();
  const absl::Status unpinned =
      step ? UnpinStep(*(*start)->parent, *step, JobPinHolder(job.uid)) : start.status();
  return unpinned.ok() ? unpinned
                       : absl::UnavailableError(absl::StrCat("its pin on ",
                                                             job.spec.checkpoint.resume_from,
                                                             " stays: ",
                                                             std::string(unpinned.message())));
}

absl::Status CheckNamedStart(const store::ObjectStore& files, const plan::JobSpec& spec) {
  constexpr const char* kField = "spec.checkpoint.resumeFrom";
  const absl::StatusOr<RestorePoint> start = NamedStart(files, spec);
  RETURN_IF_ERROR(Annotate(start.status(), kField));
  const absl::StatusOr<std::string> change = NumericsChangeSince(start->path, spec);
  RETURN_IF_ERROR(Annotate(change.status(), kField));
  if (!change->empty() && !spec.checkpoint.allow_numerics_change) {
    return absl::InvalidArgumentError(
        absl::StrCat(kField, ": ", plan::NumericsRefusal(start->path, *change)));
  }
  return absl::OkStatus();
}

}  // namespace ravel::coordinator
