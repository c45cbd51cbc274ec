// Turns seals into a committed step. Verify compares each writer's seal with the plan, chunk by
// chunk. Describe writes manifest.pb and then COMMIT into the attempt's folder, each created once
// and never changed. PublishIfAbsent gives the folder the name step-N: this is the
// commit. All three may be repeated, and of two coordinators that do them at once the first one's
// files stand, so a takeover in the middle is harmless. A bad step of the same number is moved to
// bad/ first; a good one is AlreadyExists.

#include "coordinator/saves/saves.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>

#include "common/check.h"
#include "common/ckpt/digest.h"
#include "common/ckpt/manifest_proto.h"
#include "common/crypto.h"
#include "common/plan/save/save_headers.h"
#include "common/store/committed_step.h"
#include "coordinator/saves/retention.h"
#include "coordinator/saves/taken_name.h"

namespace ravel::coordinator {
namespace {

using store::JoinPath;

absl::Status SealError(const ckpt::Seal& seal, std::string_view what) {
  return absl::InvalidArgumentError(
      absl::StrCat("seal of writer ", seal.writer, ": ", std::string(what)));
}

bool IsHuggingFaceFile(std::string_view path) {
  const std::string prefix = absl::StrCat(std::string(ckpt::kHuggingFaceFolder), "/");
  return absl::StartsWith(std::string(path), prefix) && path.size() > prefix.size() &&
         path.find('/', prefix.size()) == std::string_view::npos;
}

absl::Status VerifyChunk(const plan::SavePlan& plan,
                         const ckpt::Seal& seal,
                         const plan::SaveChunk& planned,
                         const ckpt::SealedChunk& sealed) {
  const plan::StateTensor& tensor = plan.tensors[planned.tensor];
  const ckpt::ChunkRecord& chunk = sealed.chunk;
  const bool same =
      sealed.tensor == tensor.key && chunk.data_offset == planned.file_offset &&
      chunk.bytes == planned.bytes && chunk.box == planned.box &&
      static_cast<int64_t>(chunk.block_crc32c.size()) == DivCeil(planned.bytes, ckpt::kBlockBytes);
  return same
             ? absl::OkStatus()
             : SealError(seal,
                         absl::StrCat(
                             "tensor ", sealed.tensor, " is not the plan's chunk of ", tensor.key));
}

// The seal's files and chunks against those of the plan, in the plan's order; then hf/*.
absl::Status VerifyFiles(const plan::SavePlan& plan, const ckpt::Seal& seal) {
  size_t file = 0;
  size_t chunk = 0;
  for (const plan::SaveFile& planned : plan.files) {
    if (planned.writer != seal.writer) {
      continue;
    }
    if (file == seal.files.size()) {
      return SealError(seal, absl::StrCat(planned.path, " is missing"));
    }
    const ckpt::FileRecord& sealed = seal.files[file];
    if (sealed.path != planned.path || sealed.size != planned.size ||
        sealed.header_bytes != planned.header_bytes) {
      return SealError(seal,
                       absl::StrCat(sealed.path,
                                    " with ",
                                    sealed.size,
                                    " bytes, the plan says ",
                                    planned.path,
                                    " with ",
                                    planned.size));
    }
    for (const plan::SaveChunk& part : planned.chunks) {
      if (chunk == seal.chunks.size() || seal.chunks[chunk].chunk.file != static_cast<int>(file)) {
        return SealError(seal, absl::StrCat(planned.path, ": a chunk is missing"));
      }
      RETURN_IF_ERROR(VerifyChunk(plan, seal, part, seal.chunks[chunk]));
      ++chunk;
    }
    ++file;
  }
  if (chunk != seal.chunks.size()) {
    return SealError(seal,
                     absl::StrCat("tensor ", seal.chunks[chunk].tensor, " is not in the plan"));
  }
  for (; file < seal.files.size(); ++file) {
    const ckpt::FileRecord& extra = seal.files[file];
    if (seal.writer != 0 || !IsHuggingFaceFile(extra.path) || extra.header_bytes != 0 ||
        extra.size < 0) {
      return SealError(seal, absl::StrCat(extra.path, " is not in the plan"));
    }
  }
  return absl::OkStatus();
}

// Digests of codes: one for each quantized weight of the plan.
absl::Status VerifyQuantized(const plan::SavePlan& plan, const ckpt::Seal& seal) {
  const bool fits = std::equal(
      seal.quantized.begin(),
      seal.quantized.end(),
      plan.quant.tensors.begin(),
      plan.quant.tensors.end(),
      [](const auto& sealed, const auto& planned) { return sealed.name == planned.name; });
  return fits ? absl::OkStatus()
              : SealError(seal, "its digests of codes are not of the plan's quantized weights");
}

absl::Status VerifySeal(const plan::SavePlan& plan,
                        const SaveContext& context,
                        const Sha256Digest& plan_hash,
                        const ckpt::Seal& seal) {
  const ckpt::AttemptKey sealed = {.step = seal.step, .epoch = seal.epoch, .attempt = seal.attempt};
  if (!sealed.SameSave(context.key)) {
    return SealError(
        seal,
        absl::StrCat(
            "is of ", ckpt::AttemptName(sealed), ", expected ", ckpt::AttemptName(context.key)));
  }
  if (seal.save_plan_hash != plan_hash) {
    return SealError(seal, "was made with another save plan");
  }
  RETURN_IF_ERROR(VerifyFiles(plan, seal));
  std::set<std::string> written;
  for (const ckpt::SealedChunk& chunk : seal.chunks) {
    written.insert(chunk.tensor);
  }
  for (const ckpt::SealedTensor& tensor : seal.tensors) {
    if (written.erase(tensor.name) == 0) {
      return SealError(seal, absl::StrCat("digest of ", tensor.name, ", which it did not write"));
    }
  }
  if (!written.empty()) {
    return SealError(seal, absl::StrCat("digest of ", *written.begin(), " is missing"));
  }
  RETURN_IF_ERROR(VerifyQuantized(plan, seal));
  for (const ckpt::Blob& blob : seal.blobs) {
    if (seal.writer != 0 || static_cast<int64_t>(blob.content.size()) > ckpt::kMaxBlobBytes) {
      return SealError(
          seal, absl::StrCat("blob \"", blob.name, "\" is not from writer 0, or above 64 KiB"));
    }
  }
  return absl::OkStatus();
}

// Every sealed file lies in the attempt with its size.
absl::Status CheckFilesExist(const store::ObjectStore& store,
                             const std::string& attempt,
                             const ckpt::Manifest& manifest) {
  std::map<std::string, int64_t> sizes;
  for (const std::string_view folder :
       {ckpt::kModelFolder, ckpt::kOptimizerFolder, ckpt::kHuggingFaceFolder}) {
    const absl::StatusOr<std::vector<store::ListedEntry>> entries =
        store.List(JoinPath(attempt, folder));
    if (absl::IsNotFound(entries.status())) {
      continue;  // a store without folders has none that is empty
    }
    RETURN_IF_ERROR(entries.status());
    for (const store::ListedEntry& entry : *entries) {
      sizes[JoinPath(folder, entry.name)] = entry.size;
    }
  }
  for (const ckpt::FileRecord& file : manifest.files) {
    const auto found = sizes.find(file.path);
    if (found == sizes.end() || found->second != file.size) {
      return absl::DataLossError(absl::StrCat(
          store.Locate(attempt),
          ": ",
          file.path,
          ": ",
          found == sizes.end() ? std::string("missing") : absl::StrCat(found->second, " bytes"),
          ", sealed with ",
          file.size));
    }
  }
  return absl::OkStatus();
}

// Creates a file or finds it as another coordinator, or this one before, left it: the bytes that
// are there.
absl::StatusOr<std::string> PutOrRead(store::ObjectStore& store,
                                      const std::string& path,
                                      const std::string& contents) {
  const absl::Status put = store.Put(path, contents);
  if (put.ok()) {
    return contents;
  }
  if (!absl::IsAlreadyExists(put)) {
    return put;
  }
  return store::ReadFile(store, path, int64_t{1} << 30);
}

// manifest.pb first, from its bytes COMMIT, each created once and never changed: two coordinators
// in the same attempt describe the same step.
absl::Status Describe(store::ObjectStore& store,
                      const std::string& attempt,
                      const ckpt::Manifest& manifest) {
  ASSIGN_OR_RETURN(
      const std::string encoded,
      PutOrRead(store, JoinPath(attempt, ckpt::kManifestFile), ckpt::EncodeManifest(manifest)));
  ASSIGN_OR_RETURN(ckpt::Manifest written, ckpt::DecodeManifest(encoded));
  const std::string commit = ckpt::EncodeCommit(ckpt::MakeCommitRecord(written, encoded));
  written.created_ns = manifest.created_ns;
  written.build = manifest.build;
  if (written != manifest) {
    return absl::FailedPreconditionError(
        absl::StrCat(store.Locate(attempt), ": manifest.pb is there and describes another save"));
  }
  ASSIGN_OR_RETURN(const std::string found,
                   PutOrRead(store, JoinPath(attempt, ckpt::kCommitFile), commit));
  if (found != commit) {
    return absl::FailedPreconditionError(
        absl::StrCat(store.Locate(attempt), ": COMMIT is there and describes another save"));
  }
  return absl::OkStatus();
}

// Only the attempt needed them.
absl::Status RemoveSeals(store::ObjectStore& store, const std::string& attempt) {
  return store::WithdrawIfThere(store, JoinPath(attempt, ckpt::kSealsFolder));
}

CommittedStepInfo InfoOf(const ckpt::CommitRecord& commit) {
  CommittedStepInfo info;
  info.step = commit.step;
  info.directory = ckpt::StepName(commit.step);
  info.commit = commit;
  return info;
}

// Publishes the described attempt as its step. Idempotent: OK when this save is what is published.
absl::StatusOr<CommittedStepInfo> Publish(store::ObjectStore& store,
                                          std::string_view job,
                                          const ckpt::AttemptKey& key) {
  const absl::Status done = store.PublishIfAbsent(ckpt::AttemptName(key), ckpt::StepName(key.step));
  if (!done.ok() && !absl::IsAlreadyExists(done) && !absl::IsNotFound(done)) {
    return done;
  }
  ASSIGN_OR_RETURN(const std::optional<ckpt::CommitRecord> published,
                   ReadPublished(store, key.step));
  if (!published && done.ok()) {
    RETURN_IF_ERROR(store.RenamesWhole() ? absl::OkStatus() : DeleteStep(store, key.step));
    return absl::DataLossError(
        absl::StrCat(store.Locate(ckpt::StepName(key.step)), ": COMMIT vanished"));
  }
  if (!published) {
    return done;
  }
  if (!IsSave(*published, job, key)) {
    return LostTo(*published);
  }
  RETURN_IF_ERROR(CheckPublished(store, key.step));
  return InfoOf(*published);
}

// The failure; or, where the attempt is gone, that it made room for a newer step, or NotFound.
absl::Status SayIfGone(const store::ObjectStore& store,
                       const ckpt::AttemptKey& key,
                       const absl::Status& failure) {
  const std::string attempt = ckpt::AttemptName(key);
  const absl::StatusOr<std::vector<store::ListedEntry>> entries = store.List("");
  if (!entries.ok() || !absl::IsNotFound(store.List(attempt).status())) {
    return failure;
  }
  int64_t newest = key.step;
  for (const store::ListedEntry& entry : *entries) {
    newest = std::max(newest, ckpt::ParseStepName(entry.name).value_or(newest));
  }
  return newest == key.step
             ? absl::NotFoundError(
                   absl::StrCat(store.Locate(attempt), ": it was removed before it was committed"))
             : absl::DataLossError(absl::StrCat(store.Locate(attempt),
                                                ": it was removed, because a newer checkpoint is "
                                                "kept: ",
                                                ckpt::StepName(newest)));
}

absl::Status DescribeAttempt(store::ObjectStore& store,
                             const plan::SavePlan& plan,
                             const SaveContext& context,
                             std::span<const ckpt::Seal> seals) {
  const std::string attempt = ckpt::AttemptName(context.key);
  const ckpt::Manifest manifest = BuildManifest(plan, context, seals);
  RETURN_IF_ERROR(
      Annotate(ckpt::ValidateManifest(manifest), "the seals do not make a whole state"));
  RETURN_IF_ERROR(CheckFilesExist(store, attempt, manifest));
  RETURN_IF_ERROR(Describe(store, attempt, manifest));
  return RemoveSeals(store, attempt);
}

}  // namespace

absl::Status CheckPublished(store::ObjectStore& store, int64_t step) {
  if (store.RenamesWhole()) {
    return absl::OkStatus();
  }
  const std::string directory = ckpt::StepName(step);
  const absl::StatusOr<store::CommittedStep> opened = store::CommittedStep::Open(&store, directory);
  const absl::Status whole =
      opened.ok() ? CheckFilesExist(store, directory, opened->manifest()) : opened.status();
  if (!absl::IsDataLoss(whole) && !absl::IsNotFound(whole)) {
    return whole;
  }
  RETURN_IF_ERROR(DeleteStep(store, step));
  return absl::DataLossError(
      absl::StrCat("it was removed while it was published: ", whole.message()));
}

absl::Status VerifySeals(const plan::SavePlan& plan,
                         const SaveContext& context,
                         std::span<const ckpt::Seal> seals) {
  const Sha256Digest plan_hash = plan::SavePlanHash(plan);
  std::vector<bool> present(static_cast<size_t>(context.ranks), false);
  for (const ckpt::Seal& seal : seals) {
    if (seal.writer < 0 || seal.writer >= context.ranks) {
      return SealError(seal, absl::StrCat("the save has writers 0 to ", context.ranks - 1));
    }
    if (present[static_cast<size_t>(seal.writer)]) {
      return SealError(seal, "appears twice");
    }
    present[static_cast<size_t>(seal.writer)] = true;
    RETURN_IF_ERROR(VerifySeal(plan, context, plan_hash, seal));
  }
  for (size_t writer = 0; writer < present.size(); ++writer) {
    if (!present[writer]) {
      return absl::FailedPreconditionError(absl::StrCat("seal of writer ", writer, " is missing"));
    }
  }
  return absl::OkStatus();
}

std::string MeshText(std::span<const ckpt::MeshAxisRecord> mesh) {
  std::vector<std::string> axes;
  for (const ckpt::MeshAxisRecord& axis : mesh) {
    axes.push_back(absl::StrCat(axis.name, " ", axis.size));
  }
  return absl::StrJoin(axes, ", ");
}

ckpt::Manifest BuildManifest(const plan::SavePlan& plan,
                             const SaveContext& context,
                             std::span<const ckpt::Seal> seals) {
  ckpt::Manifest manifest;
  manifest.job = context.job;
  manifest.step = context.key.step;
  manifest.save_id = ckpt::MakeSaveId(context.job, context.key);
  manifest.epoch = context.key.epoch;
  manifest.attempt = context.key.attempt;
  manifest.created_ns = context.created_ns;
  manifest.build = context.build;
  manifest.numerics = context.numerics;
  manifest.virtual_ranks = context.virtual_ranks;
  manifest.mesh = context.mesh;
  std::map<std::string, int> file_index;
  for (const ckpt::Seal& seal : seals) {
    manifest.files.insert(manifest.files.end(), seal.files.begin(), seal.files.end());
    manifest.blobs.insert(manifest.blobs.end(), seal.blobs.begin(), seal.blobs.end());
  }
  std::sort(manifest.files.begin(), manifest.files.end(), [](const auto& a, const auto& b) {
    return a.path < b.path;
  });
  std::sort(manifest.blobs.begin(), manifest.blobs.end(), [](const auto& a, const auto& b) {
    return a.name < b.name;
  });
  for (const ckpt::FileRecord& file : manifest.files) {
    file_index.emplace(file.path, static_cast<int>(file_index.size()));
  }
  std::map<std::string, size_t> tensor_index;
  for (const plan::StateTensor& tensor : plan.tensors) {
    tensor_index.emplace(tensor.key, manifest.tensors.size());
    manifest.tensors.push_back({.name = tensor.key,
                                .role = static_cast<ckpt::TensorRole>(tensor.role),
                                .of_param = tensor.of_param,
                                .dtype = tensor.dtype,
                                .stored_dtype = tensor.dtype,
                                .shape = tensor.shape,
                                .tied_to = {},
                                .digest64 = 0,
                                .chunks = {}});
  }
  for (const ckpt::Seal& seal : seals) {
    for (const ckpt::SealedChunk& sealed : seal.chunks) {
      ckpt::ChunkRecord chunk = sealed.chunk;
      chunk.file = file_index.at(seal.files[static_cast<size_t>(chunk.file)].path);
      manifest.tensors[tensor_index.at(sealed.tensor)].chunks.push_back(std::move(chunk));
    }
    for (const ckpt::SealedTensor& tensor : seal.tensors) {
      manifest.tensors[tensor_index.at(tensor.name)].digest64 += tensor.digest64;
    }
  }
  manifest.quant = plan.quant;
  for (const ckpt::Seal& seal : seals) {
    for (size_t i = 0; i < seal.quantized.size(); ++i) {
      manifest.quant.tensors[i].digest64 += seal.quantized[i].digest64;
    }
  }
  std::vector<ckpt::TensorDigest> digests;
  for (ckpt::TensorRecord& tensor : manifest.tensors) {
    std::sort(tensor.chunks.begin(), tensor.chunks.end(), [](const auto& a, const auto& b) {
      return a.box.offset < b.box.offset;
    });
    digests.push_back({tensor.name, tensor.dtype, tensor.shape, tensor.digest64});
  }
  manifest.state_digest = ckpt::StateDigest(std::move(digests));
  return manifest;
}

absl::StatusOr<CommittedStepInfo> CommitSave(store::ObjectStore& store,
                                             const plan::SavePlan& plan,
                                             const SaveContext& context,
                                             std::span<const ckpt::Seal> seals) {
  RETURN_IF_ERROR(VerifySeals(plan, context, seals));
  const auto published = [&] { return ReadPublished(store, context.key.step); };
  const absl::StatusOr<std::optional<ckpt::CommitRecord>> before = published();
  if (before.ok() && *before && IsSave(**before, context.job, context.key)) {
    return Publish(store, context.job, context.key);
  }
  RETURN_IF_ERROR(ClearTheWay(store, context.job, context.key));
  const absl::Status described = DescribeAttempt(store, plan, context, seals);
  if (!described.ok()) {
    // Another coordinator may have published this very attempt under our hands.
    const absl::StatusOr<std::optional<ckpt::CommitRecord>> now = published();
    if (!now.ok() || !*now) {
      return SayIfGone(store, context.key, described);
    }
  }
  absl::StatusOr<CommittedStepInfo> info = Publish(store, context.job, context.key);
  return absl::IsNotFound(info.status()) ? SayIfGone(store, context.key, info.status()) : info;
}

absl::StatusOr<SettleResult> SettleDescribedAttempt(store::ObjectStore& store,
                                                    std::string_view job,
                                                    const ckpt::AttemptKey& key) {
  SettleResult result;
  const absl::StatusOr<std::optional<ckpt::CommitRecord>> published =
      ReadPublished(store, key.step);
  const bool ours = published.ok() && *published && IsSave(**published, job, key);
  if (!ours) {
    const std::string attempt = ckpt::AttemptName(key);
    const absl::StatusOr<store::CommittedStep> described =
        store::CommittedStep::OpenAttempt(&store, attempt);
    if (!described.ok() || !IsSave(described->commit(), job, key)) {
      result.reason =
          described.ok() ? "COMMIT is of another save" : std::string(described.status().message());
      return result;
    }
    const absl::Status clear = ClearTheWay(store, job, key);
    if (absl::IsAlreadyExists(clear)) {
      result.state = SettledState::kLost;
      result.reason = std::string(clear.message());
      return result;
    }
    RETURN_IF_ERROR(clear);
    const absl::Status there = CheckFilesExist(store, attempt, described->manifest());
    if (absl::IsDataLoss(there)) {
      // Another coordinator publishes or removes it under our hands.
      const absl::StatusOr<std::optional<ckpt::CommitRecord>> now = ReadPublished(store, key.step);
      if (!now.ok() || !*now || !IsSave(**now, job, key)) {
        result.reason = std::string(SayIfGone(store, key, there).message());
        return result;
      }
    } else {
      RETURN_IF_ERROR(there);
      RETURN_IF_ERROR(RemoveSeals(store, attempt));
    }
  }
  absl::StatusOr<CommittedStepInfo> info = Publish(store, job, key);
  if (absl::IsDataLoss(info.status())) {
    result.reason = std::string(info.status().message());
    return result;
  }
  RETURN_IF_ERROR(info.status());
  result.committed = *std::move(info);
  result.state = SettledState::kCommitted;
  return result;
}

absl::StatusOr<SettleResult> SettleAttempt(store::ObjectStore& store,
                                           const plan::SavePlan& plan,
                                           const SaveContext& context) {
  ASSIGN_OR_RETURN(SettleResult result, SettleDescribedAttempt(store, context.job, context.key));
  if (result.state != SettledState::kIncomplete) {
    return result;
  }
  ASSIGN_OR_RETURN(const std::vector<ckpt::Seal> seals, ReadSeals(store, context.key));
  const absl::Status verified = VerifySeals(plan, context, seals);
  if (!verified.ok()) {
    // Another coordinator may have described the save since the first look, and removed its seals.
    ASSIGN_OR_RETURN(result, SettleDescribedAttempt(store, context.job, context.key));
    if (result.state == SettledState::kIncomplete) {
      result.reason = std::string(verified.message());
    }
    return result;
  }
  absl::StatusOr<CommittedStepInfo> info = CommitSave(store, plan, context, seals);
  if (info.ok()) {
    result.state = SettledState::kCommitted;
    result.committed = *std::move(info);
    return result;
  }
  if (!absl::IsAlreadyExists(info.status()) && !absl::IsDataLoss(info.status())) {
    return info.status();
  }
  result.state = absl::IsDataLoss(info.status()) ? SettledState::kIncomplete : SettledState::kLost;
  result.reason = std::string(info.status().message());
  return result;
}

absl::StatusOr<std::vector<ckpt::Seal>> ReadSeals(const store::ObjectStore& store,
                                                  const ckpt::AttemptKey& key) {
  const std::string folder = JoinPath(ckpt::AttemptName(key), ckpt::kSealsFolder);
  const absl::StatusOr<std::vector<store::ListedEntry>> entries = store.List(folder);
  std::vector<ckpt::Seal> seals;
  if (absl::IsNotFound(entries.status())) {
    return seals;
  }
  RETURN_IF_ERROR(entries.status());
  for (const store::ListedEntry& entry : *entries) {
    if (entry.is_directory) {
      continue;
    }
    const absl::StatusOr<std::string> bytes =
        store::ReadFile(store, JoinPath(folder, entry.name), int64_t{1} << 30);
    if (absl::IsNotFound(bytes.status())) {
      continue;  // the save was described, or removed, since the folder was listed
    }
    RETURN_IF_ERROR(bytes.status());
    absl::StatusOr<ckpt::Seal> seal = ckpt::DecodeSeal(*bytes);
    if (seal.ok()) {
      seals.push_back(*std::move(seal));
    }
  }
  return seals;
}

}  // namespace ravel::coordinator
