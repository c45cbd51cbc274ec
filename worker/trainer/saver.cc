// Decides when this rank saves and prepares each save. The decision uses only the plan, the step
// and what ranks agreed on in an earlier step, so all ranks decide alike without another
// collective. Copying the state blocks training; writing happens on the writer's thread. A save
// that would begin before the last one is written is skipped, except the last of a run or if the
// job says to wait. Rank 0 adds the blobs: position in the data, hyperparameters, seed; nothing
// else is needed to resume, since data order and randomness are functions of seed and step.

#include "worker/trainer/saver.h"

#include <span>
#include <utility>

#include <absl/strings/str_cat.h>

#include "common/check.h"
#include "common/ckpt/step_layout.h"
#include "common/json.h"
#include "common/logging.h"
#include "common/plan/save/save_headers.h"
#include "common/store/file_store.h"
#include "common/store/open_store.h"
#include "common/version.h"
#include "worker/optim/loss_scale.h"
#include "worker/optim/stored_state.h"
#include "worker/trainer/code_evidence.h"

namespace ravel::trainer {
namespace {

// Complete saves that stay in the store while no coordinator answers.
constexpr int64_t kMostUnanswered = 4;
constexpr char kTokenizerFile[] = "tokenizer.json";
constexpr int64_t kMaxTokenizerBytes = int64_t{256} << 20;
constexpr int64_t kMaxSmallFileBytes = int64_t{1} << 20;

// The file at an absolute path; NotFound when there is none.
absl::StatusOr<std::string> ReadPath(const std::string& path, int64_t max_bytes) {
  const store::FileStore root("/");
  return store::ReadFile(root, path.substr(path.find_first_not_of('/')), max_bytes);
}

// Reads the files that checkpoints carry to whoever opens them: config.json, and what a tokenizer
// needs, from the job's tokenizer or from the directory that the model came from. A file that is
// named as a tokenizer must be one.
absl::StatusOr<std::vector<checkpoint::HuggingFaceFile>> SmallFiles(const plan::JobSpec& spec) {
  std::vector<checkpoint::HuggingFaceFile> files;
  files.push_back({"config.json", plan::WriteHuggingFaceConfig(*spec.model)});
  const auto add = [&](const std::string& path, const std::string& name, int64_t max_bytes) {
    const absl::StatusOr<std::string> content = ReadPath(path, max_bytes);
    if (absl::IsNotFound(content.status())) {
      return absl::OkStatus();
    }
    RETURN_IF_ERROR(content.status());
    if (name == kTokenizerFile) {
      RETURN_IF_ERROR(Annotate(json::CheckHasObject(*content, "model"),
                               absl::StrCat(path, ": expected a tokenizer.json")));
    }
    files.push_back({name, *content});
    return absl::OkStatus();
  };
  if (!spec.data.tokenizer.empty()) {
    RETURN_IF_ERROR(add(spec.data.tokenizer, kTokenizerFile, kMaxTokenizerBytes));
  }
  if (!spec.model_from.empty()) {
    if (spec.data.tokenizer.empty()) {
      RETURN_IF_ERROR(add(
          absl::StrCat(spec.model_from, "/", kTokenizerFile), kTokenizerFile, kMaxTokenizerBytes));
    }
    for (const char* name :
         {"tokenizer_config.json", "special_tokens_map.json", "generation_config.json"}) {
      RETURN_IF_ERROR(add(absl::StrCat(spec.model_from, "/", name), name, kMaxSmallFileBytes));
    }
  }
  return files;
}

// True for errors that another try would meet again; others are a mount's, which is waited for.
bool IsOfTheFile(const absl::Status& status) {
  return absl::IsInvalidArgument(status) || absl::IsDataLoss(status) ||
         absl::IsFailedPrecondition(status) || absl::IsPermissionDenied(status) ||
         absl::IsResourceExhausted(status);  // larger than any tokenizer
}

// The coordinator makes the folder and writes OWNER before it launches anybody: a node that does
// not see it looks at another folder, and what it would save there nobody would ever commit.
absl::Status CheckFolder(const store::ObjectStore& store) {
  ASSIGN_OR_RETURN(const bool owned, store::Exists(store, ckpt::kOwnerFile));
  return owned ? absl::OkStatus()
               : absl::UnavailableError(
                     absl::StrCat(store.Locate(ckpt::kOwnerFile),
                                  " is missing on this node: is the store mounted here?"));
}

// Before the first step, not with the first seal: what this build would write nobody could commit.
absl::Status CheckSavePlan(const Assignment& assignment, const plan::SavePlan& plan) {
  const Sha256Digest hash = plan::SavePlanHash(plan);
  const std::string_view own(reinterpret_cast<const char*>(hash.data()), hash.size());
  if (assignment.save_plan_hash.empty() || assignment.save_plan_hash == own) {
    return absl::OkStatus();
  }
  return WithCode(
      absl::FailedPreconditionError(absl::StrCat(
          "StartTrainer.save_plan_hash: this trainer (release ",
          kVersion,
          ") would write another checkpoint layout of this plan than the coordinator expects; "
          "bring both to one release")),
      ExitCode::kRelease);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Saver>> Saver::Create(const Assignment& assignment,
                                                     Reporter& reporter,
                                                     CommandBox& box,
                                                     RankEngine& engine) {
  std::unique_ptr<Saver> saver(new Saver(assignment, reporter, box, engine));
  auto plan = plan::BuildSavePlan(assignment.plan);
  if (!plan.ok()) {
    return WithCode(plan.status(), ExitCode::kPlanMismatch);
  }
  RETURN_IF_ERROR(CheckSavePlan(assignment, *plan));
  auto store = store::OpenStore(assignment.checkpoint_root);
  if (!store.ok()) {
    return WithCode(store.status(), ExitCode::kPlanMismatch);
  }
  RETURN_IF_ERROR(WithCode(CheckFolder(**store), ExitCode::kStore));
  const auto target = std::make_shared<Target>(*std::move(plan), *std::move(store));
  checkpoint::WriterOptions options = {.rank = static_cast<int>(assignment.rank),
                                       .job_tag = ckpt::JobTag(assignment.job_uid),
                                       .hugging_face_files = {}};
  if (assignment.rank == 0) {
    auto files = SmallFiles(assignment.spec);
    if (!files.ok()) {
      return WithCode(files.status(),
                      IsOfTheFile(files.status()) ? ExitCode::kData : ExitCode::kStore);
    }
    options.hugging_face_files = *std::move(files);
    options.most_unanswered = kMostUnanswered;
  }
  options.ranks = assignment.world_size;
  options.owner = target;
  Saver* const self = saver.get();  // the writer goes with it, and calls nothing afterwards
  options.on_result = [self](const checkpoint::SaveRequest& request,
                             const absl::StatusOr<ckpt::Seal>& result) {
    self->Tell(request, result);
  };
  options.on_removed = [&reporter](const ckpt::AttemptKey& key, const std::string& message) {
    const SaveFailed gone = {.step = key.step,
                             .attempt = key.attempt,
                             .reason = "SaveRemoved",
                             .message = message,
                             .skipped = true};
    reporter.SaveFailed(gone).IgnoreError();  // as in Tell
  };
  options.on_idle = [&box] { box.SetSaving(false); };
  options.abandoned = [&box](int64_t step) { return box.IsRefused(step); };
  options.answered_step = [&box] { return box.answered_step(); };
  saver->writer_ = std::make_unique<checkpoint::CheckpointWriter>(
      target->store.get(), &target->plan, std::move(options));
  return saver;
}

bool Saver::IsDue(int64_t step, const optim::ControlWord& agreed) const {
  const int64_t every = assignment_.spec.checkpoint.every_steps;
  return agreed.save_sequence > served_sequence_ || (every > 0 && step % every == 0) ||
         (assignment_.save_at_end && step == assignment_.spec.steps);
}

std::vector<ckpt::Blob> Saver::Blobs(int64_t step) const {
  if (assignment_.rank != 0) {
    return {};
  }
  const plan::JobSpec& spec = assignment_.spec;
  const auto blob = [](const char* name, json::Object fields) {
    return ckpt::Blob{.name = name, .content = json::Serialize(json::Value(std::move(fields)))};
  };
  // Everything random or ordered is a function of the seed and the step: nothing here has a
  // position of its own.
  std::vector<ckpt::Blob> blobs = {
      blob("data", {{"next_step", json::Value(step)}, {"seed", json::Value(spec.seed)}}),
      blob("hyper",
           {{"lr", json::Value(spec.optimizer.lr)},
            {"beta1", json::Value(spec.optimizer.beta1)},
            {"beta2", json::Value(spec.optimizer.beta2)},
            {"eps", json::Value(spec.optimizer.eps)},
            {"weight_decay", json::Value(spec.optimizer.weight_decay)},
            // The type of moments, which are saved in the type they have; main weights are saved as
            // fp32.
            {"state_dtype",
             json::Value(plan::StateTypesText(assignment_.plan.options.state_types))}}),
      blob("rng", {{"seed", json::Value(spec.seed)}}),
      blob("schedule",
           {{"kind", json::Value(static_cast<int64_t>(spec.schedule.kind))},
            {"warmup_steps", json::Value(spec.schedule.warmup_steps)},
            {"min_ratio", json::Value(spec.schedule.min_ratio)},
            {"steps", json::Value(spec.steps)}})};
  if (engine_.optimizer().scales_loss()) {
    blobs.push_back({.name = optim::kLossScaleBlob,
                     .content = optim::LossScaleText(engine_.optimizer().loss_scale())});
  }
  const std::string& table = engine_.gemm_choices().table;
  if (static_cast<int64_t>(table.size()) > ckpt::kMaxBlobBytes) {
    log::Warning(absl::StrCat("the choices of gemms are not saved: ", table.size(), " bytes"));
  } else if (!table.empty()) {
    blobs.push_back({.name = kGemmsBlob, .content = table});
  }
  return blobs;
}

std::vector<ckpt::SealedTensor> Saver::Quantized(const std::vector<uint64_t>& digests) const {
  std::vector<ckpt::SealedTensor> quantized;
  if (digests.empty()) {
    return quantized;
  }
  const plan::QuantLayout& layout = engine_.quant()->layout();
  CHECK_EQ(digests.size(), layout.tensors.size());
  for (size_t i = 0; i < digests.size(); ++i) {
    quantized.push_back({engine_.tensor(layout.tensors[i].tensor).name, digests[i]});
  }
  return quantized;
}

void Saver::Tell(const checkpoint::SaveRequest& request, const absl::StatusOr<ckpt::Seal>& result) {
  if (result.ok()) {
    // That nobody listens is noticed by the watchdog.
    reporter_.Sealed(*result).IgnoreError();
    return;
  }
  log::Error(
      absl::StrCat("the save of step ", request.step, " failed: ", result.status().message()));
  const bool abandoned = absl::IsCancelled(result.status());
  reporter_
      .SaveFailed(
          {.step = request.step,
           .sequence = request.sequence,
           .attempt = request.attempt,
           .reason = abandoned ? "SaveAbandoned"
                               : std::string(ReasonOf(WithCode(result.status(), ExitCode::kStore))),
           .message = std::string(result.status().message())})
      .IgnoreError();
}

bool Saver::MayStart(int64_t step, const optim::ControlWord& agreed, int64_t lag) const {
  if (assignment_.spec.checkpoint.wait_when_busy) {
    return true;
  }
  // A save that began after what was agreed on is not in it.
  return agreed.saving == 0 && (!started_step_ || *started_step_ < step - lag);
}

absl::Status Saver::Skip(int64_t step, const optim::ControlWord& agreed) {
  const std::string message = absl::StrCat("the save of step ",
                                           started_step_.value_or(0),
                                           " is still being written",
                                           writer_->busy() ? "" : " by another rank");
  if (agreed.save_sequence > served_sequence_) {
    if (agreed.save_sequence > deferred_sequence_) {
      log::Info(absl::StrCat("request ", agreed.save_sequence, " for a save waits: ", message));
    }
    deferred_sequence_ = agreed.save_sequence;
    return absl::OkStatus();
  }
  log::Warning(absl::StrCat("step ", step, " is not saved: ", message));
  if (assignment_.rank != 0 && !writer_->busy()) {
    return absl::OkStatus();
  }
  return reporter_.SaveFailed({.step = step,
                               .sequence = served_sequence_,
                               .attempt = assignment_.save_attempt,
                               .reason = "SaveSkipped",
                               .message = message,
                               .skipped = true});
}

absl::StatusOr<ckpt::Seal> Saver::WaitForWriter(const char* why) {
  if (auto result = writer_->Poll(); result.has_value()) {
    return *std::move(result);
  }
  log::Info(
      absl::StrCat(why, " waits for the save of step ", writer_->in_flight_step().value_or(-1)));
  return writer_->Wait();
}

absl::Status Saver::Start(int64_t step, const optim::ControlWord& agreed) {
  if (writer_->busy()) {
    // It was told; what counts is the save that follows.
    WaitForWriter(absl::StrCat("the save of step ", step).c_str()).status().IgnoreError();
  }
  served_sequence_ = std::max(served_sequence_, agreed.save_sequence);
  const auto read = [&](plan::GroupId group,
                        plan::StateRole role,
                        int64_t offset,
                        std::span<std::byte> to) -> absl::Status {
    if (plan::IsOfScales(role)) {
      return optim::ReadScales(engine_.memory(),
                               *engine_.quant(),
                               role,
                               offset / static_cast<int64_t>(sizeof(float)),
                               {reinterpret_cast<float*>(to.data()), to.size() / sizeof(float)});
    }
    const shard::ParameterGroup& owner = engine_.groups()[group];
    const int64_t element_bytes = DTypeBytes(plan::SavedType(assignment_.plan, role));
    CHECK_EQ(offset % element_bytes, 0);
    return optim::ReadSaved(engine_.memory(), owner, role, offset / element_bytes, to);
  };
  auto digests = CodeDigests(assignment_.plan, assignment_.rank, engine_);
  if (!digests.ok()) {
    return WithCode(digests.status(), ExitCode::kDevice);
  }
  // Told first: the result may be there before this thread goes on.
  RETURN_IF_ERROR(reporter_.SaveStarted(step, served_sequence_, assignment_.save_attempt));
  box_.SetSaving(true);
  started_step_ = step;
  return WithCode(writer_->Snapshot({.step = step,
                                     .epoch = assignment_.epoch,
                                     .attempt = assignment_.save_attempt,
                                     .sequence = served_sequence_,
                                     .optimizer_step = engine_.updates(),
                                     .blobs = Blobs(step),
                                     .quantized = Quantized(*digests)},
                                    read),
                  ExitCode::kStore);
}

absl::Status Saver::Poll() {
  writer_->Poll();
  return absl::OkStatus();
}

absl::Status Saver::Finish() {
  if (!writer_->busy()) {
    return absl::OkStatus();
  }
  return WithCode(WaitForWriter("the end of the run").status(), ExitCode::kStore);
}

}  // namespace ravel::trainer
