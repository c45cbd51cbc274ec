#include "coordinator/jobs/memory_fit.h"

#include <absl/strings/str_cat.h>

#include "common/plan/report/plan_fit.h"
#include "common/plan/report/plan_report.h"
#include "common/time_text.h"

namespace ravel::coordinator {

int64_t UsableBytes(int64_t memory_bytes) {
  return memory_bytes - memory_bytes / 100 * 6;
}

MemoryFit CheckMemory(Planner& planner,
                      const plan::JobSpec& spec,
                      const DeviceInventory& inventory,
                      const std::function<absl::Status()>& give_up) {
  MemoryFit fit;
  const int64_t memory = spec.cpu_devices ? inventory.cpu_bytes : inventory.gpu_bytes;
  const std::string& name = spec.cpu_devices ? inventory.cpu_name : inventory.gpu_name;
  const int64_t usable = UsableBytes(memory);
  int64_t fitting = 0;
  int64_t largest = 0;  // of the sizes that do not fit
  for (const int64_t size : spec.elastic.sizes) {
    if (size > spec.device_count) {
      fit.peak_bytes.push_back(0);
      continue;
    }
    fit.status = give_up();
    if (!fit.status.ok()) {
      return fit;
    }
    const absl::StatusOr<int64_t> checked = planner.Check(spec, size, true);
    if (!checked.ok()) {
      fit.status = Annotate(checked.status(), absl::StrCat("at size ", size));
      return fit;
    }
    const int64_t peak = *checked;
    fit.peak_bytes.push_back(peak);
    if (memory == 0 || peak <= usable) {
      fitting += 1;
    } else {
      largest = size;
      fit.warnings.push_back(absl::StrCat("spec.elastic.sizes: size ",
                                          size,
                                          " needs ",
                                          FormatBytes(peak),
                                          " on a device, and no device here has more than ",
                                          FormatBytes(usable),
                                          " to use"));
    }
  }
  if (memory == 0) {
    fit.warnings.push_back(absl::StrCat("spec.devices: no node with a ",
                                        spec.cpu_devices ? "cpu" : "gpu",
                                        " is here, so it is not known whether the job fits"));
  } else if (fitting == 0 && largest > 0) {
    const plan::PlanRequest request{spec, largest, true};
    const auto world = planner.Plan(spec, largest, true);
    fit.status =
        Annotate(plan::DoesNotFit((*world)->plan, usable, plan::TryRemedies(request, usable)),
                 absl::StrCat("spec.devices.count: on ", name.empty() ? "any device" : name));
    fit.warnings.clear();
  }
  return fit;
}

}  // namespace ravel::coordinator
