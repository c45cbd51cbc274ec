// `ravelctl plan`: plans a job for devices that need not exist, with the planner that the
// coordinator uses. The job is changed as if it asked for those devices and then checked and
// planned as usual. The timeline is a simulation of the last program on the device kind's rates;
// where rates are not known it says so. A plan that does not fit ends with an exit code of its own
// and names what would fit.

#include "coordinator/ctl/plan_verbs.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include <absl/strings/escaping.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>

#include "common/crypto.h"
#include "common/model/compute_type.h"
#include "common/plan/device_kind.h"
#include "common/plan/plan_proto.h"
#include "common/plan/report/plan_fit.h"
#include "common/plan/report/plan_printer.h"
#include "common/plan/report/plan_report.h"
#include "common/plan/report/step_timeline.h"
#include "common/trace.h"
#include "coordinator/ctl/exit_code.h"
#include "coordinator/ctl/job_verbs.h"
#include "coordinator/ctl/plan_json.h"

namespace ravel::ctl {
namespace {

constexpr int kGanttColumns = 100;

bool Allows(const v1::ElasticSpec& elastic, int64_t count) {
  if (elastic.max() > 0) {
    const int64_t step = std::max<int64_t>(1, elastic.step());
    return count >= elastic.min() && count <= elastic.max() && (count - elastic.min()) % step == 0;
  }
  return std::find(elastic.sizes().begin(), elastic.sizes().end(), count) != elastic.sizes().end();
}

// The job as if it asked for these devices: a count that it does not allow becomes its only size.
void AskFor(const plan::DeviceRequest& devices, bool named, v1::TrainingJob& job) {
  v1::DevicesSpec& spec = *job.mutable_spec()->mutable_devices();
  if (named) {
    spec.set_kind(devices.kind.cpu ? "cpu" : "gpu");
  }
  if (devices.count > 0) {
    spec.set_count(devices.count);
    if (!Allows(job.spec().elastic(), devices.count)) {
      job.mutable_spec()->mutable_elastic()->Clear();
    }
  }
}

std::string DigestOf(const plan::ShardingPlan& plan) {
  const Sha256Digest digest = Sha256(plan::SerializePlan(plan));
  return absl::BytesToHexString(
      absl::string_view(reinterpret_cast<const char*>(digest.data()), digest.size()));
}

// The program with the optimizer, drawn as DIAG's traces are.
std::string GanttOf(const plan::ShardingPlan& plan, const plan::DeviceKind& device) {
  const plan::StepSlot slot = plan::SlotOf(plan.lanes, plan.lanes.programs() - 1);
  const plan::StepProgram& program = plan.program(slot.phase, slot.part);
  const int64_t contributors = plan.lanes.Inner().LaneCount(plan.lanes.blocks ? 0 : slot.turn);
  std::vector<trace::Event> events;
  for (const plan::TimedInstruction& at :
       plan::SimulateProgram(plan, program, device, contributors)) {
    const plan::Instruction& instruction = program.instructions[at.index];
    trace::Event event;
    event.begin_ns = at.begin_ns;
    event.end_ns = at.end_ns;
    event.step = 1;
    event.turn = slot.turn;
    event.phase = plan::PhaseName(slot.phase);
    event.op = plan::OpName(plan::WorkLabelOf(plan.moves, instruction));
    event.stream = plan::StreamName(instruction.stream);
    if (at.end_ns > at.begin_ns) {
      events.push_back(event);
    }
  }
  const absl::StatusOr<std::string> text =
      trace::TextGantt(trace::ToChromeTrace({}, events), 1, kGanttColumns);
  return text.ok() ? *text : "";
}

std::string TimelineText(const plan::ShardingPlan& plan, const plan::DeviceKind& device) {
  const plan::StepTimes times = plan::PredictStep(plan, device);
  const plan::StepSlot slot = plan::SlotOf(plan.lanes, plan.lanes.programs() - 1);
  const auto tokens =
      static_cast<double>(plan.lanes.lanes * plan.lanes.micro_batches * plan.micro_batch.sequences *
                          plan.micro_batch.sequence_tokens);
  const double seconds = static_cast<double>(times.step_ns) / 1e9;
  std::string text = absl::StrFormat(
      "\ntimeline of one step, predicted with %.0f TFLOP/s and %.0f GB/s in a node, %.0f GB/s "
      "between nodes%s:\n%d program(s), %.3f s, of it %.3f s without compute; %.0f tokens/s\n",
      device.flops / 1e12,
      device.node_bytes_per_second / 1e9,
      device.network_bytes_per_second / 1e9,
      device.known
          ? ""
          : absl::StrCat(
                " (assumed: the device is not known; known are ", plan::KnownDeviceNames(), ")"),
      plan.lanes.programs(),
      seconds,
      static_cast<double>(times.exposed_ns()) / 1e9,
      tokens / std::max(seconds, 1e-9));
  absl::StrAppend(&text, "program ", plan::PhaseName(slot.phase), ":\n", GanttOf(plan, device));
  return text;
}

std::string TypesText(const plan::ShardingPlan& plan) {
  const plan::ProgramOptions& options = plan.options;
  const std::string head =
      absl::StrCat("the head works on ", options.logits_chunk_tokens, " tokens at a time\n");
  const std::string states = plan::StateTypesText(options.state_types);
  if (options.weight_type == DType::kF32) {
    return options.state_types == plan::kF32States
               ? "fp32 throughout\n" + head
               : absl::StrCat("fp32 throughout, but for ", states, " optimizer state\n", head);
  }
  const char* const compute = plan::ComputeName(options.weight_type);
  const std::string attention = options.attention_workspace_bytes == 0
                                    ? head
                                    : absl::StrCat("attention has ",
                                                   options.attention_workspace_bytes >> 20,
                                                   " MiB of each layer's workspace\n",
                                                   head);
  if (options.main_type == DType::kF32 && options.state_types == plan::kF32States) {
    return absl::StrCat(
        compute,
        " weights and activations; fp32 main weights, gradients and optimizer state\n",
        attention);
  }
  return absl::StrCat(compute,
                      " weights and activations; main weights ",
                      options.main_type == DType::kF32 ? "fp32" : "as bf16 and remainder",
                      ", fp32 gradients, ",
                      states,
                      " optimizer state\n",
                      attention);
}

struct Planned {
  plan::ShardingPlan plan;
  plan::UnitChoices strategies;  // where units have some of their own
  plan::DeviceKind device;
  std::string digest;
  bool fits = true;
  bool automatic_offload = false;
  std::vector<plan::Remedy> remedies;
};

// The fraction that was chosen where the job leaves it to the planner.
std::string OffloadText(const Planned& planned) {
  if (!planned.automatic_offload) {
    return "";
  }
  if (planned.device.usable_bytes() == 0) {
    return "training.optimizer.offload.fraction: auto, by devices whose memory is not known here: "
           "planned with 0\n";
  }
  return absl::StrFormat("training.optimizer.offload.fraction: auto, here %g%s\n",
                         planned.plan.options.offload_fraction,
                         planned.fits ? ", the least that fits" : "");
}

absl::StatusOr<Planned> MakePlan(const PlanOptions& options) {
  ASSIGN_OR_RETURN(plan::DeviceRequest devices, plan::ParseDevices(options.devices, false));
  const bool named = options.devices.find('x') != std::string::npos;
  const absl::StatusOr<CanonicalJob> loaded =
      LoadJobFile(options.file, PathScope::kModel, [&](v1::TrainingJob& from) {
        AskFor(devices, named, from);
      });
  if (!loaded.ok()) {
    // A job that is right by itself is refused for what the flag has changed of it.
    const bool by_flag =
        !options.devices.empty() && IsValidJobFile(options.file, PathScope::kModel);
    return by_flag ? Annotate(loaded.status(), absl::StrCat("--devices ", options.devices))
                   : loaded.status();
  }
  const CanonicalJob& job = *loaded;
  if (!named) {
    ASSIGN_OR_RETURN(devices, plan::ParseDevices(options.devices, job.spec.cpu_devices));
  }
  plan::PlanRequest request;
  request.spec = job.spec;
  request.ranks = job.spec.device_count;
  request.shared_memory = options.shared_memory.value_or(
      job.spec.cpu_devices && job.spec.transport != plan::Transport::kGloo);
  Planned planned;
  planned.device = devices.kind;
  RETURN_IF_ERROR(
      plan::CheckTensorNodes(planned.device, job.spec.tensor, job.spec.tensor_across_nodes));
  RETURN_IF_ERROR(plan::CheckRecipeOn(planned.device, job.spec.recipe));
  planned.automatic_offload = job.spec.optimizer.offload.automatic;
  request.spec.optimizer.offload.device_bytes = devices.kind.usable_bytes();
  ASSIGN_OR_RETURN(planned.plan, plan::BuildFittingPlan(request));
  if (!job.spec.units.empty()) {
    ASSIGN_OR_RETURN(planned.strategies, plan::ChoicesOf(job.spec, planned.plan.inventory));
  }
  planned.digest = DigestOf(planned.plan);
  const int64_t usable = planned.device.usable_bytes();
  planned.fits = usable == 0 || plan::PeakBytes(planned.plan) <= usable;
  if (!planned.fits) {
    planned.remedies = plan::TryRemedies(request, usable);
  }
  return planned;
}

std::string SavedText(int64_t bytes) {
  return absl::StrCat(plan::BytesText(std::abs(bytes)), bytes < 0 ? " more" : " less");
}

std::string FitText(const Planned& planned) {
  const int64_t usable = planned.device.usable_bytes();
  const int64_t peak = plan::PeakBytes(planned.plan);
  if (usable == 0) {
    return absl::StrCat("predicted peak ", plan::BytesText(peak), " per rank\n");
  }
  std::string text =
      absl::StrFormat("predicted peak %s of %s usable on %s (%.0f %%): %s\n",
                      plan::BytesText(peak),
                      plan::BytesText(usable),
                      planned.device.name,
                      100.0 * static_cast<double>(peak) / static_cast<double>(usable),
                      planned.fits ? "fits" : "does not fit");
  for (const plan::Remedy& remedy : planned.remedies) {
    absl::StrAppendFormat(&text,
                          "  %-8s %12s  %-18s %s\n",
                          remedy.fits ? "fits" : "no",
                          remedy.status.ok() ? plan::BytesText(remedy.peak_bytes) : "-",
                          remedy.status.ok() ? SavedText(remedy.saved_bytes) : "",
                          remedy.change);
  }
  return text;
}

}  // namespace

int RunPlan(const CommonOptions& common, const PlanOptions& options) {
  const absl::StatusOr<Planned> planned = MakePlan(options);
  if (!planned.ok()) {
    return Report(planned.status());
  }
  if (common.format == Format::kTable) {
    Print(absl::StrCat(
        plan::PlanSummary(planned->plan, {.verbose = options.verbose}),
        planned->strategies.empty() ? "" : plan::StrategiesText(planned->plan, planned->strategies),
        TimelineText(planned->plan, planned->device),
        "\n",
        TypesText(planned->plan),
        FitText(*planned),
        OffloadText(*planned),
        "plan ",
        planned->digest,
        "\n"));
  } else if (common.format == Format::kName) {
    Print(planned->digest + "\n");
  } else {
    Print(FormatDocument(PlanJson({.plan = planned->plan,
                                   .strategies = planned->strategies,
                                   .device = planned->device,
                                   .digest = planned->digest,
                                   .fits = planned->fits,
                                   .remedies = planned->remedies}),
                         common.format));
  }
  return planned->fits ? kExitOk
                       : Report(plan::DoesNotFit(
                             planned->plan, planned->device.usable_bytes(), planned->remedies));
}

}  // namespace ravel::ctl
