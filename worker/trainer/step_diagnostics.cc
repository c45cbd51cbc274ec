// Writes what a rank tells beside its metrics: a Chrome trace of chosen steps, a memory report,
// norms of all tensors, the names of tensors that were not finite. A file that cannot be written
// costs a line in the log, not the job. The trace is written again after every traced step, so a
// job that is killed leaves what it had. Where a value that is not finite came from is found by
// running the step again with checks, if the job asks for it.

#include "worker/trainer/step_diagnostics.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>
#include <absl/strings/str_join.h>
#include <absl/strings/strip.h>

#include "common/file_writer.h"
#include "common/logging.h"
#include "common/plan/report/plan_printer.h"
#include "worker/trainer/memory_report.h"

namespace ravel::trainer {
namespace {

constexpr size_t kMostTensorsNamed = 8;
constexpr char kFileScheme[] = "file://";

int64_t Nanoseconds(auto time) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}

absl::Status MakeDirectory(const std::string& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  return error ? absl::UnavailableError(absl::StrCat(path, ": ", error.message()))
               : absl::OkStatus();
}

}  // namespace

StepDiagnostics::StepDiagnostics(const Assignment& assignment, RankEngine& engine)
    : assignment_(assignment), engine_(engine) {
  if (!assignment.spec.trace_directory.empty()) {
    recorder_ = std::make_unique<trace::Recorder>();
  }
}

std::string StepDiagnostics::FileOf(const Assignment& assignment, const char* kind) {
  return absl::StrFormat("%s/epoch-%05d-rank-%05d.%s.json",
                         assignment.spec.trace_directory,
                         assignment.epoch,
                         assignment.rank,
                         kind);
}

bool StepDiagnostics::Traced(int64_t finished_steps) const {
  const plan::JobSpec& spec = assignment_.spec;
  return recorder_ != nullptr && finished_steps >= spec.trace_first_step &&
         finished_steps <= spec.trace_last_step;
}

void StepDiagnostics::UseRecorder(trace::Recorder* recorder) {
  engine_.executor().set_recorder(recorder);
  if (engine_.host_updater() != nullptr) {
    engine_.host_updater()->set_recorder(recorder);
  }
  if (engine_.offload() != nullptr) {
    engine_.offload()->set_recorder(recorder);
  }
}

void StepDiagnostics::ReportStart(const Saver& saver) {
  if (assignment_.rank == 0) {
    for (const std::string& line : plan::GroupTableLines(assignment_.plan)) {
      log::Info(line);
    }
  }
  ReportMemory("start", saver);
}

void StepDiagnostics::ReportEnd(const Saver& saver) {
  ReportMemory("end", saver);
  if (engine_.host_updater() != nullptr) {
    const optim::HostUpdateCounts counts = engine_.host_updater()->TakeCounts();
    log::Info(absl::StrFormat(
        "offload: %s in memory of the host, and %s pinned; %d chunks updated in %.3f s, %d of them "
        "before their step was decided and %d once more after it",
        plan::BytesText(assignment_.plan.memory.offload_bytes),
        plan::BytesText(engine_.host_updater()->pinned_bytes()),
        counts.chunks,
        counts.update_seconds,
        counts.early,
        counts.redone));
  }
  if (engine_.offload() == nullptr) {
    return;
  }
  engine_.offload()->Drain().IgnoreError();  // steps have told it
  const optim::OffloadTimes times = engine_.offload()->TakeTimes();
  log::Info(absl::StrFormat(
      "offload: %s in %s, updated in %d chunks: %.3f s of arithmetic, %.3f s of reading and "
      "writing, of which the update waited for %.3f s (%.0f %% hidden)",
      plan::BytesText(assignment_.plan.memory.offload_bytes),
      assignment_.spec.optimizer.offload.path,
      engine_.offload()->chunk_count(),
      times.updating,
      times.moving,
      times.waiting,
      times.moving > 0 ? 100 * std::max(0.0, 1 - times.waiting / times.moving) : 100.0));
}

void StepDiagnostics::ReportMemory(const char* when, const Saver& saver) {
  const plan::DataSpec& data = assignment_.spec.data;
  MappedPlaces places = {.arena_planned_bytes = engine_.planned_bytes(),
                         .arenas = engine_.arenas(),
                         .data_files = {},
                         .save_staging = saver.staging(),
                         .offloaded = engine_.offloaded()};
  for (const auto* sources : {&data.train, &data.validation}) {
    for (const plan::DataSource& source : *sources) {
      places.data_files.push_back(source.path);
    }
  }
  const auto uses = MemoryByUse(assignment_.plan);
  const auto process = MemoryOfProcess(places);
  if (!uses.ok() || !process.ok()) {
    log::Warning(
        absl::StrCat("memory: ", (uses.ok() ? process.status() : uses.status()).message()));
    return;
  }
  const MemoryReport report = {.uses = *uses, .process = *process};
  log::Info(absl::StrCat("memory at the ", when, ": ", MemoryText(report)));
  memory_.Set(when, MemoryJson(report));
  if (assignment_.spec.trace_directory.empty()) {
    return;
  }
  absl::Status written = MakeDirectory(assignment_.spec.trace_directory);
  if (written.ok()) {
    memory_.Set("rank", assignment_.rank).Set("epoch", assignment_.epoch);
    written = WriteFileAtomically(FileOf(assignment_, "memory"), json::Serialize(memory_) + "\n");
  }
  if (!written.ok()) {
    log::Warning(absl::StrCat("memory: ", written.message()));
  }
}

void StepDiagnostics::BeforeStep(int64_t step) {
  UseRecorder(Traced(step + 1) ? recorder_.get() : nullptr);
}

// A job that ends or stops in between still has what was recorded: the file is written anew after
// each step.
absl::Status StepDiagnostics::WriteTrace() {
  for (const trace::Event& event : recorder_->Take()) {
    events_.push_back(event);
  }
  RETURN_IF_ERROR(MakeDirectory(assignment_.spec.trace_directory));
  const trace::Source source = {
      .job = assignment_.spec.name,
      .epoch = assignment_.epoch,
      .rank = assignment_.rank,
      .host = assignment_.host_address,
      .wall_minus_monotonic_ns = Nanoseconds(std::chrono::system_clock::now()) -
                                 Nanoseconds(std::chrono::steady_clock::now())};
  return trace::WriteChromeTrace(FileOf(assignment_, "trace"), source, events_);
}

std::string StepDiagnostics::NonFiniteTensors() const {
  const std::vector<int64_t>& counts = engine_.optimizer().tensor_non_finite();
  std::vector<std::pair<int64_t, std::string>> named;
  for (size_t tensor = 0; tensor < counts.size(); ++tensor) {
    if (counts[tensor] > 0) {
      named.emplace_back(-counts[tensor], assignment_.plan.inventory.tensors[tensor].name);
    }
  }
  std::sort(named.begin(), named.end());
  std::vector<std::string> texts;
  for (size_t i = 0; i < std::min(named.size(), kMostTensorsNamed); ++i) {
    texts.push_back(absl::StrCat(named[i].second, ": ", -named[i].first));
  }
  if (named.size() > kMostTensorsNamed) {
    texts.push_back(absl::StrCat("and ", named.size() - kMostTensorsNamed, " more tensors"));
  }
  return absl::StrJoin(texts, ", ");
}

absl::Status StepDiagnostics::WriteNorms(const optim::TensorNorms& norms) const {
  const plan::JobSpec& spec = assignment_.spec;
  const std::string folder =
      spec.trace_directory.empty()
          ? std::string(absl::StripPrefix(assignment_.checkpoint_root, kFileScheme))
          : spec.trace_directory;
  json::Value tensors;
  for (size_t i = 0; i < norms.gradient.size(); ++i) {
    if (!assignment_.plan.inventory.tensors[i].trainable) {
      continue;
    }
    json::Value tensor;
    tensor.Set("gradient", norms.gradient[i])
        .Set("weight", norms.weight[i])
        .Set("updateRatio", norms.weight[i] > 0 ? norms.update[i] / norms.weight[i] : 0.0);
    tensors.Set(assignment_.plan.inventory.tensors[i].name, std::move(tensor));
  }
  json::Value line;
  line.Set("step", norms.step).Set("tensors", std::move(tensors));
  RETURN_IF_ERROR(MakeDirectory(folder));
  std::ofstream file(folder + "/norms.jsonl", std::ios::app);
  file << json::Serialize(line) << "\n";
  file.flush();
  return file.good() ? absl::OkStatus()
                     : absl::UnavailableError(absl::StrCat(folder, "/norms.jsonl: cannot write"));
}

void StepDiagnostics::WriteKnownNorms() {
  const std::optional<optim::TensorNorms> norms = engine_.optimizer().TakeNorms();
  // A step that is replayed to look for what was not finite has the same norms again.
  if (norms.has_value() && assignment_.rank == 0 && norms->step > norms_written_) {
    norms_written_ = norms->step;
    const absl::Status written = WriteNorms(*norms);
    if (!written.ok()) {
      log::Warning(absl::StrCat("norms: ", written.message()));
    }
  }
}

absl::Status StepDiagnostics::Finish() {
  RETURN_IF_ERROR(engine_.ExchangeLastNorms());
  WriteKnownNorms();
  return absl::OkStatus();
}

absl::Status StepDiagnostics::AfterStep(const StepResult& result) {
  UseRecorder(nullptr);
  // A file that cannot be written costs a line in the log, not the job.
  if (Traced(result.step)) {
    RETURN_IF_ERROR(engine_.executor().CollectTrace(*recorder_));
    const absl::Status written = WriteTrace();
    if (!written.ok()) {
      log::Warning(absl::StrCat("trace: ", written.message()));
    }
  }
  WriteKnownNorms();
  skip_reason_.clear();
  if (!result.skipped) {
    return absl::OkStatus();
  }
  skip_reason_ = NonFiniteTensors();
  if (assignment_.spec.localise) {
    ASSIGN_OR_RETURN(const std::string first, engine_.Localise(result.step - 1));
    absl::StrAppend(&skip_reason_, skip_reason_.empty() ? "" : "; ", "first: ", first);
  }
  return absl::OkStatus();
}

}  // namespace ravel::trainer
