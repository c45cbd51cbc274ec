#include "coordinator/saves/checkpoint_pins.h"

#include <optional>
#include <vector>

#include <absl/strings/str_cat.h>

#include "common/crypto.h"
#include "common/logging.h"

namespace ravel::coordinator {

using store::JoinPath;

std::string JobPinHolder(std::string_view job_uid) {
  return absl::StrCat("job-", ckpt::JobTagText(job_uid));
}

absl::Status PinStep(store::ObjectStore& store, const ckpt::PinName& pin, std::string_view why) {
  const std::string mark = JoinPath(ckpt::kPinsFolder, ckpt::PinFileName(pin));
  RETURN_IF_ERROR(store::MakeDirectories(store, ckpt::kPinsFolder));
  const absl::Status put = store.Put(mark, why);
  if (!put.ok() && !absl::IsAlreadyExists(put)) {
    return put;
  }
  // Retention looks at pins after it has written DELETED: one of the two sees the other.
  ASSIGN_OR_RETURN(const bool committed,
                   store::Exists(store, JoinPath(ckpt::StepName(pin.step), ckpt::kCommitFile)));
  ASSIGN_OR_RETURN(const bool withdrawn,
                   store::Exists(store, JoinPath(ckpt::StepName(pin.step), ckpt::kDeletedFile)));
  if (committed && !withdrawn) {
    return absl::OkStatus();
  }
  RETURN_IF_ERROR(store::WithdrawIfThere(store, mark));
  return absl::FailedPreconditionError(
      absl::StrCat(store.Locate(ckpt::StepName(pin.step)), ": not a committed step"));
}

absl::Status UnpinStep(store::ObjectStore& store, int64_t step, std::string_view holder) {
  const absl::StatusOr<std::vector<store::ListedEntry>> marks = store.List(ckpt::kPinsFolder);
  if (absl::IsNotFound(marks.status())) {
    return absl::OkStatus();
  }
  RETURN_IF_ERROR(marks.status());
  for (const store::ListedEntry& mark : *marks) {
    const std::optional<ckpt::PinName> pin = ckpt::ParsePinName(mark.name);
    if (pin && pin->step == step && pin->holder == holder) {
      RETURN_IF_ERROR(store::WithdrawIfThere(store, JoinPath(ckpt::kPinsFolder, mark.name)));
    }
  }
  return absl::OkStatus();
}

ReaderPin::ReaderPin(store::ObjectStore* store, std::string_view directory, const Clock& clock)
    : store_(store) {
  const std::optional<int64_t> step = ckpt::ParseStepName(directory);
  if (!step) {
    return;  // an export or another folder that no retention knows
  }
  pin_ = {.step = *step,
          .holder = absl::StrCat("reader-", RandomHex(4)),
          .until_s = clock.WallMs() / 1000 + kReaderPinSeconds};
  const absl::Status pinned = PinStep(*store_, pin_, "being read");
  held_ = pinned.ok();
  if (!held_) {
    log::Warning(absl::StrCat("read without a pin, so that retention may delete it meanwhile: ",
                              std::string(pinned.message())));
  }
}

ReaderPin::~ReaderPin() {
  if (held_) {
    UnpinStep(*store_, pin_.step, pin_.holder).IgnoreError();  // expires by itself
  }
}

}  // namespace ravel::coordinator
