#include "coordinator/jobs/memory_fit.h"

#include <algorithm>

#include <absl/strings/str_cat.h>

#include "common/plan/report/plan_fit.h"
#include "common/plan/report/plan_report.h"
#include "common/time_text.h"

namespace ravel::coordinator {
namespace {

constexpr char kFractionField[] = "spec.training.optimizer.offload.fraction";

// Why the hosts that are here cannot hold what so many ranks offload to them; "" where they can.
std::string HostObjection(int64_t size,
                          const RankMemory& memory,
                          const DeviceInventory& inventory) {
  const int64_t one = UsableBytes(inventory.host_bytes);
  const int64_t all = UsableBytes(inventory.all_hosts_bytes);
  if (memory.host_bytes == 0 || one == 0) {
    return "";
  }
  const std::string needed = absl::StrCat("size ",
                                          size,
                                          " needs ",
                                          FormatBytes(memory.host_bytes),
                                          " of each device's host for what it offloads, and ");
  if (memory.host_bytes > one) {
    return absl::StrCat(needed,
                        "no host here has more than ",
                        FormatBytes(one),
                        " to use (",
                        inventory.host_name,
                        ")");
  }
  if (memory.host_bytes > all / size) {
    return absl::StrCat(needed, "all hosts here have ", FormatBytes(all), " to use together");
  }
  return "";
}

std::string DeviceObjection(int64_t size, const RankMemory& memory, int64_t usable) {
  return memory.peak_bytes <= usable
             ? ""
             : absl::StrCat("size ",
                            size,
                            " needs ",
                            FormatBytes(memory.peak_bytes),
                            " on a device, and no device here has more than ",
                            FormatBytes(usable),
                            " to use");
}

// Why no host that is here has the devices of a tensor group.
std::string GroupObjection(const plan::JobSpec& spec, const DeviceInventory& inventory) {
  const int64_t most = spec.cpu_devices ? inventory.cpus_of_host : inventory.gpus_of_host;
  return spec.tensor == 1 || spec.tensor_across_nodes || spec.tensor <= most
             ? ""
             : absl::StrCat("spec.parallelism.tensor: no host that is here has ",
                            spec.tensor,
                            spec.cpu_devices ? " cpu" : " gpu",
                            " devices, which share a layer: the job waits for one");
}

}  // namespace

int64_t UsableBytes(int64_t memory_bytes) {
  return memory_bytes - memory_bytes / 100 * 6;
}

void SetOffloadMemory(const DeviceInventory& inventory, plan::JobSpec& spec) {
  const int64_t per_cpu = inventory.cpu_bytes / std::max<int64_t>(1, inventory.cpu_count);
  spec.optimizer.offload.device_bytes =
      spec.optimizer.offload.automatic
          ? UsableBytes(spec.cpu_devices ? per_cpu : inventory.gpu_bytes)
          : 0;
}

MemoryFit CheckMemory(Planner& planner,
                      const plan::JobSpec& spec,
                      const DeviceInventory& inventory,
                      const std::function<absl::Status()>& give_up) {
  MemoryFit fit;
  const int64_t memory = spec.cpu_devices ? inventory.cpu_bytes : inventory.gpu_bytes;
  const char* const kind = spec.cpu_devices ? "cpu" : "gpu";
  const int64_t usable = UsableBytes(memory);
  const plan::OffloadSpec& offload = spec.optimizer.offload;
  if (memory == 0 && offload.automatic && offload.device_bytes == 0) {
    fit.status =
        absl::FailedPreconditionError(absl::StrCat(kFractionField,
                                                   ": expected a number, since no node with a ",
                                                   kind,
                                                   " is here, whose memory auto goes by"));
    return fit;
  }
  int64_t fitting = 0;
  int64_t largest = 0;  // of the sizes that no device can hold
  std::string host;     // why hosts cannot hold the largest of the others
  for (const int64_t size : spec.elastic.sizes) {
    if (size > spec.device_count) {
      fit.peak_bytes.push_back(0);
      continue;
    }
    fit.status = give_up();
    if (!fit.status.ok()) {
      return fit;
    }
    const absl::StatusOr<RankMemory> checked = planner.Check(spec, size, true);
    if (!checked.ok()) {
      fit.status = Annotate(checked.status(), absl::StrCat("at size ", size));
      return fit;
    }
    fit.peak_bytes.push_back(checked->peak_bytes);
    const std::string device = memory == 0 ? "" : DeviceObjection(size, *checked, usable);
    const std::string of_host = device.empty() ? HostObjection(size, *checked, inventory) : "";
    if (!device.empty()) {
      largest = size;
      fit.warnings.push_back(absl::StrCat("spec.elastic.sizes: ", device));
    } else if (!of_host.empty()) {
      host = of_host;
      fit.warnings.push_back(absl::StrCat(kFractionField, ": ", of_host));
    } else {
      fitting += 1;
    }
  }
  if (memory == 0) {
    fit.warnings.push_back(absl::StrCat("spec.devices: no node with a ",
                                        kind,
                                        " is here, so it is not known whether the job fits"));
  }
  if (const std::string groups = GroupObjection(spec, inventory); memory > 0 && !groups.empty()) {
    fit.warnings.push_back(groups);
  }
  if (fitting == 0 && !host.empty()) {
    fit.status = absl::FailedPreconditionError(absl::StrCat(kFractionField, ": ", host));
    fit.warnings.clear();
  } else if (fitting == 0 && largest > 0) {
    const std::string& name = spec.cpu_devices ? inventory.cpu_name : inventory.gpu_name;
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
