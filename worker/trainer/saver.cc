#include "worker/trainer/saver.h"

#include <span>
#include <utility>

#include <absl/strings/str_cat.h>

#include "common/check.h"
#include "common/ckpt/step_layout.h"
#include "common/json.h"
#include "common/logging.h"
#include "worker/optim/stored_state.h"

namespace ravel::trainer {
namespace {

// A step is saved at most once in an epoch, so the save attempt within it is always the first.
constexpr int64_t kFirstSaveAttempt = 1;
constexpr int64_t kMaxTokenizerBytes = int64_t{256} << 20;
constexpr int64_t kMaxSmallFileBytes = int64_t{1} << 20;

// The file at an absolute path; NotFound when there is none.
absl::StatusOr<std::string> ReadPath(const std::string& path, int64_t max_bytes) {
  const store::FileStore root("/");
  return store::ReadFile(root, path.substr(path.find_first_not_of('/')), max_bytes);
}

// config.json, and what a tokenizer needs: from the job's tokenizer, or from the directory that the
// model came from.
absl::StatusOr<std::vector<checkpoint::HuggingFaceFile>> SmallFiles(const plan::JobSpec& spec) {
  std::vector<checkpoint::HuggingFaceFile> files;
  files.push_back({"config.json", plan::WriteHuggingFaceConfig(*spec.model)});
  const auto add = [&](const std::string& path, const std::string& name, int64_t max_bytes) {
    const absl::StatusOr<std::string> content = ReadPath(path, max_bytes);
    if (absl::IsNotFound(content.status())) {
      return absl::OkStatus();
    }
    RETURN_IF_ERROR(content.status());
    files.push_back({name, *content});
    return absl::OkStatus();
  };
  if (!spec.data.tokenizer.empty()) {
    RETURN_IF_ERROR(add(spec.data.tokenizer, "tokenizer.json", kMaxTokenizerBytes));
  }
  if (!spec.model_from.empty()) {
    if (spec.data.tokenizer.empty()) {
      RETURN_IF_ERROR(
          add(spec.model_from + "/tokenizer.json", "tokenizer.json", kMaxTokenizerBytes));
    }
    for (const char* name :
         {"tokenizer_config.json", "special_tokens_map.json", "generation_config.json"}) {
      RETURN_IF_ERROR(add(absl::StrCat(spec.model_from, "/", name), name, kMaxSmallFileBytes));
    }
  }
  return files;
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

}  // namespace

absl::StatusOr<std::unique_ptr<Saver>> Saver::Create(const Assignment& assignment,
                                                     Reporter& reporter,
                                                     RankEngine& engine) {
  std::unique_ptr<Saver> saver(new Saver(assignment, reporter, engine));
  auto plan = plan::BuildSavePlan(assignment.plan);
  if (!plan.ok()) {
    return WithCode(plan.status(), ExitCode::kPlanMismatch);
  }
  saver->plan_ = *std::move(plan);
  auto store = store::FileStore::FromUrl(assignment.checkpoint_root);
  if (!store.ok()) {
    return WithCode(store.status(), ExitCode::kPlanMismatch);
  }
  saver->store_ = *std::move(store);
  RETURN_IF_ERROR(WithCode(CheckFolder(*saver->store_), ExitCode::kStore));
  checkpoint::WriterOptions options = {.rank = static_cast<int>(assignment.rank),
                                       .job_tag = ckpt::JobTag(assignment.job_uid),
                                       .hugging_face_files = {}};
  if (assignment.rank == 0) {
    auto files = SmallFiles(assignment.spec);
    if (!files.ok()) {
      return WithCode(files.status(), ExitCode::kStore);
    }
    options.hugging_face_files = *std::move(files);
  }
  saver->writer_ = std::make_unique<checkpoint::CheckpointWriter>(
      saver->store_.get(), &saver->plan_, std::move(options));
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
  const bool narrow = spec.optimizer.state_type == plan::StateType::kBF16;
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
            // Of moments, which are saved as they live; main weights are saved as fp32.
            {"state_dtype", json::Value(narrow ? "bf16" : "fp32")}}),
      blob("rng", {{"seed", json::Value(spec.seed)}}),
      blob("schedule",
           {{"kind", json::Value(static_cast<int64_t>(spec.schedule.kind))},
            {"warmup_steps", json::Value(spec.schedule.warmup_steps)},
            {"min_ratio", json::Value(spec.schedule.min_ratio)},
            {"steps", json::Value(spec.steps)}})};
  const std::string& table = engine_.product_choices().table;
  if (static_cast<int64_t>(table.size()) > ckpt::kMaxBlobBytes) {
    log::Warning(absl::StrCat("the choices of products are not saved: ", table.size(), " bytes"));
  } else if (!table.empty()) {
    blobs.push_back({.name = kProductsBlob, .content = table});
  }
  return blobs;
}

absl::Status Saver::Take(absl::StatusOr<ckpt::Seal> result, bool must_succeed) {
  if (result.ok()) {
    return reporter_.Sealed(*result);
  }
  log::Error(absl::StrCat("save failed: ", result.status().message()));
  return must_succeed ? WithCode(result.status(), ExitCode::kStore) : absl::OkStatus();
}

absl::Status Saver::Start(int64_t step, const optim::ControlWord& agreed) {
  if (writer_->busy()) {
    RETURN_IF_ERROR(Take(writer_->Wait(), false));
  }
  served_sequence_ = std::max(served_sequence_, agreed.save_sequence);
  const auto read = [&](int group,
                        plan::StateRole role,
                        int64_t offset,
                        std::span<std::byte> to) -> absl::Status {
    const shard::ParameterGroup& owner = engine_.groups()[static_cast<size_t>(group)];
    const int64_t element_bytes = DTypeBytes(plan::SavedType(assignment_.plan, role));
    CHECK_EQ(offset % element_bytes, 0);
    return optim::ReadSaved(engine_.memory(), owner, role, offset / element_bytes, to);
  };
  RETURN_IF_ERROR(WithCode(writer_->Snapshot({.step = step,
                                              .epoch = assignment_.epoch,
                                              .attempt = kFirstSaveAttempt,
                                              .sequence = served_sequence_,
                                              .optimizer_step = engine_.updates(),
                                              .blobs = Blobs(step)},
                                             read),
                           ExitCode::kStore));
  return reporter_.SaveStarted(step, served_sequence_);
}

absl::Status Saver::Poll() {
  auto result = writer_->Poll();
  return result.has_value() ? Take(*std::move(result), false) : absl::OkStatus();
}

absl::Status Saver::Finish() {
  return writer_->busy() ? Take(writer_->Wait(), true) : absl::OkStatus();
}

}  // namespace ravel::trainer
