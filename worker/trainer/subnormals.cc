#include "worker/trainer/subnormals.h"

#include <bit>
#include <cstdint>
#include <limits>
#include <string>
#include <thread>

#include <absl/strings/str_cat.h>

namespace ravel::trainer {
namespace {

// Names what is wrong with this thread's arithmetic; "" if nothing. Volatile: the compiler would
// compute the answer itself. Results are compared as bits, since comparisons read subnormals as
// zero, too.
std::string Objection() {
  const volatile float smallest_normal = std::numeric_limits<float>::min();
  const volatile float smallest = std::numeric_limits<float>::denorm_min();
  const volatile float half = 0.5f;
  const volatile float large = 0x1p100f;
  const float written = smallest_normal * half;
  const float read = smallest * large;
  std::string modes;
  if (std::bit_cast<uint32_t>(written) == 0) {
    modes = "writes zero in their place (FTZ)";
  }
  if (std::bit_cast<uint32_t>(read) == 0) {
    absl::StrAppend(&modes, modes.empty() ? "" : ", and ", "reads them as zero (DAZ)");
  }
  return modes;
}

}  // namespace

absl::Status CheckSubnormals() {
  std::string objection = Objection();
  const char* place = "this process";
  if (objection.empty()) {
    place = "a new thread of this process";
    std::thread([&objection] { objection = Objection(); }).join();
  }
  return objection.empty()
             ? absl::OkStatus()
             : absl::FailedPreconditionError(absl::StrCat(
                   "subnormal numbers: ",
                   place,
                   " ",
                   objection,
                   ", so that results would have other bits; a library that was linked with "
                   "-ffast-math and is loaded at the start (LD_PRELOAD) sets such a mode"));
}

}  // namespace ravel::trainer
