#pragma once

// Pins: marks that keep a step from being deleted while somebody needs it. A job pins the step that
// it resumes from, a reader the step that it reads, a person what should stay.

#include <cstdint>
#include <string>
#include <string_view>

#include "common/ckpt/step_layout.h"
#include "common/clock.h"
#include "common/status.h"
#include "common/store/object_store.h"

namespace ravel::coordinator {

// A reader that was killed does not pin for longer than this.
inline constexpr int64_t kReaderPinSeconds = 24 * 3600;

// "job-3f2a9c01"
std::string JobPinHolder(std::string_view job_uid);

// Writes the mark with `why` for people, and only then looks whether the step is still committed:
// FailedPrecondition, and no mark stays, when it is not. May be repeated.
absl::Status PinStep(store::ObjectStore& store, const ckpt::PinName& pin, std::string_view why);
// Removes every mark of `holder` on `step`; none is fine.
absl::Status UnpinStep(store::ObjectStore& store, int64_t step, std::string_view holder);

// Pins a step for the life of this object. A folder that cannot be written is read without a pin,
// with a warning: whoever may only read must still be able to.
class ReaderPin {
 public:
  ReaderPin(store::ObjectStore* store,
            std::string_view directory,
            const Clock& clock = SystemClock::Get());
  ~ReaderPin();
  ReaderPin(const ReaderPin&) = delete;
  ReaderPin& operator=(const ReaderPin&) = delete;

 private:
  store::ObjectStore* store_;
  ckpt::PinName pin_;
  bool held_ = false;
};

}  // namespace ravel::coordinator
