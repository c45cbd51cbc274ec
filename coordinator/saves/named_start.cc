#include "coordinator/saves/named_start.h"

#include <cstdint>
#include <utility>

#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>

#include "common/ckpt/step_layout.h"
#include "common/plan/numerics.h"
#include "common/store/committed_step.h"
#include "coordinator/saves/step_inspection.h"

namespace ravel::coordinator {

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
