// The life of one rank: open the device, connect, build the engine, restore, then the step loop. On
// a device, results lag behind issued steps: IssueStep(n) returns before step n is done, and
// ReadSteps reads the results of earlier steps. What ranks agreed on (save, stop) therefore takes
// effect a fixed number of steps later, the same on every rank, whenever each rank happens to read.
// Before a save, an evaluation or a wait for permission all results are read. Every error that
// leaves this file carries the exit code that the coordinator acts on.

#include "worker/trainer/trainer.h"

#include <chrono>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>

#include "common/fault_point.h"
#include "common/logging.h"
#include "common/model/compute_type.h"
#include "common/plan/report/plan_printer.h"
#include "common/version.h"
#include "kernels/cuda_host/nccl_group.h"
#include "worker/comm/collective_ledger.h"
#include "worker/comm/communicator_factory.h"
#include "worker/comm/device_local_communicator.h"
#include "worker/trainer/initial_state.h"

namespace ravel::trainer {
namespace {

// A transfer waits for a peer that still computes; that a peer is gone is told by the coordinator
// long before this.
constexpr std::chrono::milliseconds kTransferTimeout = std::chrono::minutes(10);

// Set where ranks share a GPU (worker/daemon/shared_gpu.h): every tensor collective over nccl is
// preceded by one that compares what ranks issue.
constexpr char kCheckSetting[] = "RAVEL_NCCL_CHECK";

// "0" leaves every call of a step to the host, for comparisons; "exchange" makes graphs of ranks
// that exchange, too, each on a device of its own, which has not run on a GPU.
constexpr char kGraphsSetting[] = "RAVEL_CUDA_GRAPHS";

// Algorithms of gemms are numerics that only devices know: an exact job does not go on with
// others than its checkpoint's unasked.
absl::Status CheckGemms(const plan::JobSpec& spec, const std::string& chosen_again) {
  if (chosen_again.empty() || spec.determinism != plan::DeterminismMode::kExact ||
      spec.checkpoint.allow_numerics_change) {
    return absl::OkStatus();
  }
  return WithCode(
      absl::FailedPreconditionError(absl::StrCat(
          "the checkpoint was computed with other algorithms: ",
          chosen_again,
          "; use devices of its kind, or set checkpoint.allowNumericsChange: true, or use ravelctl "
          "retry --allow-numerics-change")),
      ExitCode::kPlanMismatch);
}

EngineOptions WithGraphs() {
  const char* setting = std::getenv(kGraphsSetting);
  const std::string_view text = setting == nullptr ? "" : setting;
  return {.graphs = text != "0", .exchanging_graphs = text == "exchange"};
}

// Folder of what was measured of gemms, from the daemon; absent: nothing is kept.
constexpr char kGemmsSetting[] = "RAVEL_GEMM_CACHE";

double SecondsSince(const Clock& clock, int64_t start_ms) {
  return static_cast<double>(clock.MonotonicMs() - start_ms) / 1000.0;
}

// Refuses to train in bf16 or fp16 through kernels without tensor cores unless the job allows it.
// Our own gemm also serves fp32, where the library's is not as far ahead.
absl::Status CheckFastKernels(const kernels::CudaGpu& gpu, const plan::JobSpec& spec) {
  if (spec.compute == plan::ComputeType::kF32 || spec.allow_slow_kernels) {
    return absl::OkStatus();
  }
  std::string missing = gpu.no_cublas();
  if (!gpu.no_cudnn().empty()) {
    absl::StrAppend(&missing, missing.empty() ? "" : "; ", gpu.no_cudnn());
  }
  if (missing.empty()) {
    return absl::OkStatus();
  }
  return WithCode(
      absl::FailedPreconditionError(absl::StrCat(
          missing,
          ": ",
          plan::ComputeName(spec.compute),
          " would run without tensor cores, some 50 times as slow. Put the folders of "
          "libcublasLt.so.13 and libcudnn.so.9 into the daemon's LD_LIBRARY_PATH, or set "
          "spec.devices.allowSlowKernels")),
      ExitCode::kDevice);
}

// Logs device, free memory, driver and NCCL version at start. `nccl`: its version, 0 where it is
// not used.
void LogDevice(const kernels::CudaGpu& gpu, int nccl) {
  const auto free_bytes = gpu.FreeBytes();
  const auto versions = gpu.library().Versions();
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  log::Info(
      absl::StrCat("device ",
                   gpu.index(),
                   visible == nullptr ? "" : absl::StrCat(" of CUDA_VISIBLE_DEVICES ", visible),
                   ": ",
                   gpu.properties().name,
                   ", free ",
                   free_bytes.ok() ? plan::BytesText(*free_bytes) : "unknown",
                   " of ",
                   plan::BytesText(static_cast<int64_t>(gpu.properties().memory_bytes)),
                   ", driver of CUDA ",
                   versions.ok() ? versions->driver : 0,
                   nccl == 0 ? "" : absl::StrCat(", NCCL ", nccl)));
}

// The communicator is told to nobody any more when this goes.
class CommunicatorScope {
 public:
  CommunicatorScope(const std::function<void(comm::Communicator*)>& changed,
                    comm::Communicator* communicator)
      : changed_(changed) {
    changed_(communicator);
  }
  ~CommunicatorScope() { changed_(nullptr); }
  CommunicatorScope(const CommunicatorScope&) = delete;
  CommunicatorScope& operator=(const CommunicatorScope&) = delete;

 private:
  const std::function<void(comm::Communicator*)>& changed_;
};

}  // namespace

absl::Status Trainer::Run() {
  const std::string& release = parts_.assignment.release;
  if (!release.empty() && release != kVersion) {
    return WithCode(absl::FailedPreconditionError(absl::StrCat(
                        "this trainer is of release ",
                        kVersion,
                        ", its daemon of release ",
                        release,
                        ": start the daemon anew when the programs of a node were replaced")),
                    ExitCode::kRelease);
  }
  ASSIGN_OR_RETURN(const std::unique_ptr<kernels::CudaGpu> gpu, OpenGpu());
  ASSIGN_OR_RETURN(const std::unique_ptr<comm::Communicator> communicator, Connect(gpu.get()));
  std::vector<std::string> units;
  for (const plan::UnitSpec& unit : parts_.assignment.plan.inventory.units) {
    units.push_back(unit.name);
  }
  communicator->ledger().SetUnitNames(std::move(units));
  const CommunicatorScope scope(parts_.communicator_changed, communicator.get());
  return RunWith(*communicator, gpu.get());
}

absl::StatusOr<std::unique_ptr<kernels::CudaGpu>> Trainer::OpenGpu() {
  const Assignment& assignment = parts_.assignment;
  if (assignment.spec.cpu_devices) {
    return nullptr;
  }
  const auto library = kernels::CudaLibrary::Open(kernels::DefaultCudaLibraryPath());
  if (!library.ok()) {
    return WithCode(library.status(), ExitCode::kDevice);
  }
  auto gpu = kernels::CudaGpu::Open(*library, static_cast<int>(assignment.gpu));
  if (!gpu.ok()) {
    return WithCode(gpu.status(), ExitCode::kDevice);
  }
  RETURN_IF_ERROR(CheckFastKernels(**gpu, assignment.spec));
  (*gpu)->set_on_failure(parts_.device_failed);
  absl::StatusOr<int> nccl = 0;
  if (assignment.transport == "nccl") {
    nccl = kernels::NcclVersion(*library);
  }
  if (!nccl.ok()) {
    return WithCode(
        Annotate(nccl.status(), absl::StrCat(assignment.world_size, " ranks on GPUs need NCCL")),
        ExitCode::kDevice);
  }
  LogDevice(**gpu, *nccl);
  return gpu;
}

absl::StatusOr<std::unique_ptr<comm::Communicator>> Trainer::Connect(kernels::CudaGpu* gpu) {
  const Assignment& assignment = parts_.assignment;
  if (gpu != nullptr && assignment.transport == "local") {
    ASSIGN_OR_RETURN(auto group,
                     comm::CreateDeviceLocalGroup(*gpu, static_cast<int>(assignment.world_size)));
    if (group.size() != 1) {
      return WithCode(absl::FailedPreconditionError(
                          absl::StrCat("transport local is for one rank, not ", group.size())),
                      ExitCode::kPlanMismatch);
    }
    return std::move(group.front());
  }
  const auto rendezvous = [this](std::string_view group,
                                 std::string record) -> absl::StatusOr<std::vector<std::string>> {
    RETURN_IF_ERROR(parts_.reporter.Publish(std::string(group), record));
    return parts_.box.WaitForRecords(group);
  };
  return comm::CreateCommunicator(
      {.transport = assignment.transport,
       .rank = static_cast<int>(assignment.rank),
       .size = static_cast<int>(assignment.world_size),
       .rendezvous = rendezvous,
       .host_address = assignment.host_address,
       .ports = assignment.data_ports,
       .timeout = kTransferTimeout,
       .gpu = gpu,
       .keep_going = [this] { return parts_.box.closed(); },
       .max_ctas = static_cast<int>(assignment.plan.options.communication_blocks),
       .check_collectives = std::getenv(kCheckSetting) != nullptr});
}

absl::StatusOr<std::optional<GemmOptions>> Trainer::Gemms() const {
  if (parts_.assignment.spec.cpu_devices) {
    return std::nullopt;
  }
  const char* folder = std::getenv(kGemmsSetting);
  ASSIGN_OR_RETURN(std::string saved, SavedGemms(parts_.assignment));
  return GemmOptions{
      .measure = parts_.assignment.spec.algorithms == plan::AlgorithmChoice::kMeasured,
      .saved = std::move(saved),
      .cache_folder = folder == nullptr ? "" : folder};
}

absl::Status Trainer::RunWith(comm::Communicator& communicator, kernels::CudaGpu* gpu) {
  const Assignment& assignment = parts_.assignment;
  ASSIGN_OR_RETURN(std::optional<GemmOptions> gemms, Gemms());
  ASSIGN_OR_RETURN(const std::unique_ptr<RankEngine> engine,
                   RankEngine::Create({.plan = assignment.plan,
                                       .settings = SettingsOf(assignment.spec),
                                       .communicator = communicator,
                                       .control = [this] { return parts_.box.control(); },
                                       .options = WithGraphs(),
                                       .gpu = gpu,
                                       .gemms = std::move(gemms)}));
  const std::string& chosen_again = engine->gemm_choices().chosen_again;
  RETURN_IF_ERROR(CheckGemms(assignment.spec, chosen_again));
  parts_.position.Enter(TrainerPhase::kRestoring);
  const int64_t start_ms = parts_.clock.MonotonicMs();
  RETURN_IF_ERROR(PrepareState(assignment, communicator, *engine, parts_.position));
  ASSIGN_OR_RETURN(const std::unique_ptr<Saver> saver,
                   Saver::Create(assignment, parts_.reporter, parts_.box, *engine));
  StepDiagnostics diagnostics(assignment, *engine);
  diagnostics.ReportStart(*saver);
  parts_.position.FinishStep(assignment.first_step);
  parts_.position.Enter(TrainerPhase::kWaiting);
  const double restore_seconds = SecondsSince(parts_.clock, start_ms);
  log::Info(absl::StrFormat(
      "state of step %d is there after %.3f s", assignment.first_step, restore_seconds));
  TrainerReady ready = {.step = assignment.first_step,
                        .planned_bytes = engine->planned_bytes(),
                        .measured_bytes = engine->measured_bytes(),
                        .restore_seconds = restore_seconds};
  if (!chosen_again.empty()) {
    ready.remarks.push_back({.reason = "GemmsChosenAgain", .message = chosen_again});
  }
  RETURN_IF_ERROR(parts_.reporter.Ready(ready));
  return TrainAll(*engine, *saver, diagnostics);
}

absl::Status Trainer::TrainAll(RankEngine& engine, Saver& saver, StepDiagnostics& diagnostics) {
  const Assignment& assignment = parts_.assignment;
  if (assignment.save_at_start && assignment.first_step == 0) {
    RETURN_IF_ERROR(parts_.box.WaitForStep(0));
    RETURN_IF_ERROR(saver.Start(0, {}));
  }
  for (int64_t step = assignment.first_step; step < assignment.spec.steps; ++step) {
    const int64_t done = step + 1;  // when it is
    std::vector<Finished> finished;
    parts_.position.Enter(TrainerPhase::kWaiting);
    if (!parts_.box.Allows(done)) {
      RETURN_IF_ERROR(ReadSteps(engine, diagnostics, 0, finished));  // what is known is told
    }
    RETURN_IF_ERROR(parts_.box.WaitForStep(done));
    RETURN_IF_ERROR(FaultPoint("trainer.step"));
    parts_.position.Enter(TrainerPhase::kTraining);
    diagnostics.BeforeStep(step);
    if (engine.unread_steps() == 0) {
      step_began_ = std::chrono::steady_clock::now();
    }
    RETURN_IF_ERROR(engine.IssueStep(step));
    const bool at_once = EvaluationDue(engine, done) || done == assignment.spec.steps;
    RETURN_IF_ERROR(ReadSteps(engine, diagnostics, at_once ? 0 : engine.lag(), finished));
    RETURN_IF_ERROR(saver.Poll());
    const optim::ControlWord agreed = AgreedFor(engine, done);
    const bool due = saver.IsDue(done, agreed);
    // The last save of a run must be; any other is skipped while one is being written.
    const bool must = agreed.stop != 0 || done == assignment.spec.steps;
    const bool save = due && (must || saver.MayStart(done, agreed, engine.lag()));
    if (due && !save) {
      RETURN_IF_ERROR(saver.Skip(done, agreed));
    }
    if (save || agreed.stop != 0) {
      RETURN_IF_ERROR(ReadSteps(engine, diagnostics, 0, finished));
    }
    if (save) {
      parts_.position.Enter(TrainerPhase::kSaving);
      RETURN_IF_ERROR(saver.Start(done, agreed));
    }
    if (agreed.stop != 0) {
      return Stop(saver, diagnostics);
    }
    for (const Finished& one : finished) {
      RETURN_IF_ERROR(CountSkips(one.result, one.skip_reason));
    }
  }
  parts_.position.Enter(TrainerPhase::kEnding);
  RETURN_IF_ERROR(diagnostics.Finish());
  RETURN_IF_ERROR(saver.Finish());
  diagnostics.ReportEnd(saver);
  return parts_.reporter.Done(assignment.spec.steps);
}

absl::Status Trainer::Stop(Saver& saver, StepDiagnostics& diagnostics) {
  parts_.position.Enter(TrainerPhase::kEnding);
  RETURN_IF_ERROR(diagnostics.Finish());
  RETURN_IF_ERROR(saver.Finish());
  diagnostics.ReportEnd(saver);
  return WithCode(absl::CancelledError("stopped after a save, as told"), ExitCode::kStopped);
}

optim::ControlWord Trainer::AgreedFor(const RankEngine& engine, int64_t finished_steps) {
  const bool last = finished_steps == parts_.assignment.spec.steps;
  const int64_t step = last ? finished_steps : finished_steps - engine.lag();
  agreed_.erase(agreed_.begin(), agreed_.lower_bound(step));
  const auto found = agreed_.find(step);
  return found == agreed_.end() ? optim::ControlWord{} : found->second;
}

bool Trainer::EvaluationDue(const RankEngine& engine, int64_t finished_steps) const {
  const plan::JobSpec& spec = parts_.assignment.spec;
  return spec.evaluation_every > 0 && engine.has_validation() &&
         (finished_steps % spec.evaluation_every == 0 || finished_steps == spec.steps);
}

absl::Status Trainer::ReadSteps(RankEngine& engine,
                                StepDiagnostics& diagnostics,
                                int64_t unread,
                                std::vector<Finished>& finished) {
  while (engine.unread_steps() > unread) {
    ASSIGN_OR_RETURN(const StepResult result, engine.ReadStep());
    const auto now = std::chrono::steady_clock::now();
    const std::chrono::duration<double> seconds = now - step_began_;
    step_began_ = now;
    agreed_[result.step] = result.control;
    RETURN_IF_ERROR(diagnostics.AfterStep(result));
    RETURN_IF_ERROR(FinishStep(engine, result, seconds.count()));
    finished.push_back({.result = result, .skip_reason = diagnostics.skip_reason()});
  }
  return absl::OkStatus();
}

absl::Status Trainer::FinishStep(RankEngine& engine, const StepResult& result, double seconds) {
  const plan::JobSpec& spec = parts_.assignment.spec;
  parts_.position.FinishStep(result.step);
  parts_.beat();
  StepReport record = {.step = result.step,
                       .loss = result.loss,
                       .grad_norm = result.grad_norm,
                       .lr = result.learning_rate,
                       .tokens = result.target_tokens,
                       .step_seconds = seconds,
                       .skipped = result.skipped,
                       .loss_scale = result.loss_scale};
  if (EvaluationDue(engine, result.step)) {
    parts_.position.Enter(TrainerPhase::kEvaluating);
    ASSIGN_OR_RETURN(record.validation_loss, engine.Evaluate());
    record.has_validation_loss = true;
  }
  const bool last = result.step == spec.steps;
  if (parts_.assignment.rank == 0 && (result.step % std::max<int64_t>(1, spec.log_every) == 0 ||
                                      last || record.has_validation_loss)) {
    RETURN_IF_ERROR(Report(engine, record));
  }
  return absl::OkStatus();
}

absl::Status Trainer::Report(const RankEngine& engine, StepReport record) {
  record.time_ms = parts_.clock.WallMs();
  record.planned_bytes = engine.planned_bytes();
  record.measured_bytes = engine.measured_bytes();
  return parts_.reporter.Step(record);
}

absl::Status Trainer::CountSkips(const StepResult& result, const std::string& reason) {
  if (!result.skipped) {
    skipped_in_a_row_ = 0;
    return absl::OkStatus();
  }
  if (result.lowers_scale) {
    // Expected of fp16 now and then; a run that diverges comes to the least scale first.
    log::Info(absl::StrFormat("step %d is skipped and lowers its loss scale %.0f; %s",
                              result.step,
                              result.loss_scale,
                              reason));
    return absl::OkStatus();
  }
  ++skipped_in_a_row_;
  log::Warning(absl::StrCat("step ",
                            result.step,
                            " is skipped: ",
                            result.non_finite,
                            " gradient elements are not finite; ",
                            reason));
  if (skipped_in_a_row_ <= kMostSkippedInARow) {
    return absl::OkStatus();
  }
  return WithCode(absl::OutOfRangeError(absl::StrCat(skipped_in_a_row_,
                                                     " steps in a row, up to step ",
                                                     result.step,
                                                     ", had gradients that are not finite; ",
                                                     reason)),
                  ExitCode::kNumeric);
}

}  // namespace ravel::trainer
