// A copy is an unfinished save in TO, named by the step's save and the number that sets copies
// apart from what trainers write, so that an interrupted one is found and goes on: files that are
// there with the right size and checksum stay. A file gets its name only when all its bytes have
// the checksum that the manifest says; the manifest is read back against COMMIT before the step
// appears.

#include "coordinator/ctl/checkpoints_copy.h"

#include <algorithm>
#include <filesystem>
#include <memory>
#include <ostream>
#include <set>
#include <span>
#include <system_error>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>
#include <absl/strings/strip.h>

#include "common/ckpt/step_layout.h"
#include "common/clock.h"
#include "common/crc32c.h"
#include "common/store/committed_step.h"
#include "common/store/open_store.h"
#include "common/time_text.h"
#include "coordinator/ctl/checkpoints.h"
#include "coordinator/ctl/path_text.h"
#include "coordinator/saves/checkpoint_pins.h"
#include "coordinator/saves/copy_marks.h"
#include "coordinator/saves/saves.h"

namespace ravel::ctl {
namespace {

using store::JoinPath;
using store::ObjectStore;

constexpr int64_t kPieceBytes = 4 << 20;
constexpr int64_t kMaxSmallBytes = int64_t{1} << 30;

// The checksum of a file as it lies there; NotFound without it.
absl::StatusOr<uint32_t> Checksum(const ObjectStore& store, const std::string& path, int64_t size) {
  ASSIGN_OR_RETURN(const std::unique_ptr<store::FileReader> reader, store.Open(path));
  if (reader->size() != size) {
    return absl::DataLossError(
        absl::StrCat(store.Locate(path), ": ", reader->size(), " bytes, expected ", size));
  }
  uint32_t crc = 0;
  std::vector<std::byte> buffer;
  for (int64_t at = 0; at < size; at += kPieceBytes) {
    buffer.resize(static_cast<size_t>(std::min(kPieceBytes, size - at)));
    RETURN_IF_ERROR(reader->ReadAt(at, buffer));
    crc = Crc32c(crc, buffer.data(), buffer.size());
  }
  return crc;
}

// One step on its way into another folder.
class Copy {
 public:
  Copy(const ObjectStore& source,
       const store::CommittedStep& step,
       ObjectStore& target,
       const std::function<bool()>& cancelled)
      : source_(source), step_(step), target_(target), cancelled_(cancelled) {
    key_ = {.step = step.commit().step,
            .epoch = step.commit().epoch,
            .attempt = step.commit().attempt + coordinator::kCopyAttempt,
            .job_tag = ckpt::JobTag(step.commit().job)};
    attempt_ = ckpt::AttemptName(key_);
  }

  absl::Status Run() {
    ASSIGN_OR_RETURN(const std::unique_ptr<coordinator::CopyMark> mark,
                     coordinator::CopyMark::Make(&target_, key_));
    RETURN_IF_ERROR(MakeFolders());
    for (const ckpt::FileRecord& file : step_.manifest().files) {
      RETURN_IF_ERROR(CheckGoesOn());
      RETURN_IF_ERROR(CopyFile(file));
    }
    RETURN_IF_ERROR(CopySmall(ckpt::kManifestFile));
    RETURN_IF_ERROR(CopySmall(ckpt::kCommitFile));
    // Checks length, checksum and SHA-256 of the manifest against COMMIT, as they lie there.
    ASSIGN_OR_RETURN(const store::CommittedStep written,
                     store::CommittedStep::OpenAttempt(&target_, attempt_));
    if (written.commit() != step_.commit()) {
      return absl::DataLossError(absl::StrCat(target_.Locate(attempt_), ": is of another step"));
    }
    RETURN_IF_ERROR(target_.PublishIfAbsent(attempt_, ckpt::StepName(step_.commit().step)));
    // Another copy may have been removing the leftover with which this one went on.
    return coordinator::CheckPublished(target_, step_.commit().step);
  }

  const std::string& attempt() const { return attempt_; }
  int64_t copied_files() const { return copied_files_; }
  int64_t copied_bytes() const { return copied_bytes_; }

 private:
  absl::Status CheckGoesOn() const {
    return cancelled_ && cancelled_()
               ? absl::CancelledError(
                     "interrupted; the same command goes on with the files that are whole")
               : absl::OkStatus();
  }

  absl::Status MakeFolders() {
    std::set<std::string> folders = {attempt_};
    for (const ckpt::FileRecord& file : step_.manifest().files) {
      folders.insert(std::string(store::SplitLast(JoinPath(attempt_, file.path)).first));
    }
    for (const std::string& folder : folders) {
      RETURN_IF_ERROR(target_.MakeDirectory(folder));
    }
    return absl::OkStatus();
  }

  // A file that an earlier copy has finished stays if it is right.
  absl::StatusOr<bool> IsThere(const ckpt::FileRecord& file) {
    const std::string path = JoinPath(attempt_, file.path);
    const absl::StatusOr<uint32_t> crc = Checksum(target_, path, file.size);
    if (absl::IsNotFound(crc.status())) {
      return false;
    }
    if (crc.ok() && *crc == file.crc32c) {
      return true;
    }
    if (!crc.ok() && !absl::IsDataLoss(crc.status())) {
      return crc.status();
    }
    RETURN_IF_ERROR(store::WithdrawIfThere(target_, path));
    return false;
  }

  absl::Status CopyFile(const ckpt::FileRecord& file) {
    ASSIGN_OR_RETURN(const bool there, IsThere(file));
    if (there) {
      return absl::OkStatus();
    }
    ASSIGN_OR_RETURN(const std::unique_ptr<store::FileReader> reader,
                     source_.Open(JoinPath(step_.directory(), file.path)));
    if (reader->size() != file.size) {
      return absl::DataLossError(
          absl::StrCat(file.path, ": ", reader->size(), " bytes, the manifest says ", file.size));
    }
    ASSIGN_OR_RETURN(const std::unique_ptr<store::FileWriter> writer,
                     target_.Create(JoinPath(attempt_, file.path), file.size));
    uint32_t crc = 0;
    std::vector<std::byte> buffer;
    for (int64_t at = 0; at < file.size; at += kPieceBytes) {
      buffer.resize(static_cast<size_t>(std::min(kPieceBytes, file.size - at)));
      RETURN_IF_ERROR(reader->ReadAt(at, buffer));
      crc = Crc32c(crc, buffer.data(), buffer.size());
      if (at + std::ssize(buffer) == file.size && crc != file.crc32c) {
        return absl::DataLossError(absl::StrCat(source_.Locate(step_.directory()),
                                                ": ",
                                                file.path,
                                                ": its checksum is not the manifest's"));
      }
      RETURN_IF_ERROR(writer->Append(buffer));
      RETURN_IF_ERROR(CheckGoesOn());
    }
    RETURN_IF_ERROR(writer->Finish());
    ++copied_files_;
    copied_bytes_ += file.size;
    return absl::OkStatus();
  }

  absl::Status CopySmall(std::string_view name) {
    ASSIGN_OR_RETURN(const std::string content,
                     store::ReadFile(source_, JoinPath(step_.directory(), name), kMaxSmallBytes));
    const std::string path = JoinPath(attempt_, name);
    const absl::Status put = target_.Put(path, content);
    if (!absl::IsAlreadyExists(put)) {
      return put;
    }
    ASSIGN_OR_RETURN(const std::string found, store::ReadFile(target_, path, kMaxSmallBytes));
    return found == content
               ? absl::OkStatus()
               : absl::DataLossError(absl::StrCat(
                     target_.Locate(path), ": is there, and of another step; withdraw it first"));
  }

  const ObjectStore& source_;
  const store::CommittedStep& step_;
  ObjectStore& target_;
  const std::function<bool()>& cancelled_;
  ckpt::AttemptKey key_;
  std::string attempt_;
  int64_t copied_files_ = 0;
  int64_t copied_bytes_ = 0;
};

absl::StatusOr<std::unique_ptr<ObjectStore>> OpenTarget(const std::string& text) {
  std::string url = text;
  if (!store::IsRemoteStore(text)) {
    RETURN_IF_ERROR(CheckIsPath("TO", text));
    std::error_code error;
    const std::string path(absl::StripPrefix(text, "file://"));
    url = std::filesystem::absolute(path, error).lexically_normal().string();
    if (path.empty() || error) {
      return absl::InvalidArgumentError(
          absl::StrCat("TO: \"", text, "\": expected a folder's path or URL"));
    }
  }
  absl::StatusOr<std::unique_ptr<ObjectStore>> target = store::OpenStore(url);
  RETURN_IF_ERROR(Annotate(target.status(), "TO"));
  RETURN_IF_ERROR(Annotate((*target)->MakeRoot(), "TO"));
  return target;
}

// True when the same step is there already; AlreadyExists when it is another one.
absl::StatusOr<bool> IsCopied(const ObjectStore& target, const ckpt::CommitRecord& commit) {
  const std::string name = ckpt::StepName(commit.step);
  ASSIGN_OR_RETURN(const bool there, store::Exists(target, name));
  if (!there) {
    return false;
  }
  ASSIGN_OR_RETURN(const store::CommittedStep step, store::CommittedStep::Open(&target, name));
  return step.commit() == commit ? absl::StatusOr<bool>(true)
                                 : absl::AlreadyExistsError(absl::StrCat(
                                       target.Locate(name), ": is there, and is another step"));
}

// Removes what killed copies of other steps have left, and returns what there is to tell of it.
// Whoever may not remove it copies all the same.
std::string RemoveOthersThatDied(ObjectStore& target, const std::string& own) {
  const auto removed = coordinator::RemoveDeadCopies(target, SystemClock::Get().WallMs(), own);
  if (!removed.ok()) {
    return absl::StrCat(
        "what killed copies left stays: ", std::string(removed.status().message()), "\n");
  }
  std::string told;
  for (const std::string& name : *removed) {
    absl::StrAppend(&told, "removed ", target.Locate(name), ", which a killed copy left\n");
  }
  return told;
}

// A name that comes or goes while this copy works on it is the work of another one.
absl::Status TellOfOthers(const absl::Status& status, const std::string& to) {
  if (!absl::IsNotFound(status) && !absl::IsAlreadyExists(status)) {
    return status;
  }
  return absl::AbortedError(
      absl::StrCat(to,
                   ": another copy of this step is under way there, or has just ended; when none "
                   "is, the same command goes on with the files that are whole (",
                   std::string(status.message()),
                   ")"));
}

}  // namespace

absl::Status CopyCheckpoint(const CheckpointCopyOptions& options, std::ostream& out) {
  ASSIGN_OR_RETURN(const StepLocation from, LocateStep(options.from));
  const coordinator::ReaderPin pin(from.store.get(), from.directory);
  ASSIGN_OR_RETURN(const store::CommittedStep step,
                   store::CommittedStep::Open(from.store.get(), from.directory));
  ASSIGN_OR_RETURN(const std::unique_ptr<ObjectStore> target, OpenTarget(options.to));
  const std::string to = target->Locate(ckpt::StepName(step.commit().step));
  Copy copy(*from.store, step, *target, options.cancelled);
  const auto tell = [&] {
    json::Value document;
    document.Set("step", step.commit().step).Set("to", to);
    document.Set("files", static_cast<int64_t>(step.manifest().files.size()));
    document.Set("bytes", step.manifest().total_bytes());
    document.Set("copiedFiles", static_cast<int64_t>(copy.copied_files()));
    document.Set("copiedBytes", copy.copied_bytes());
    out << FormatDocument(WithSchemaVersion(document), options.print);
    return absl::OkStatus();
  };
  const bool document = options.print != Format::kTable && options.print != Format::kName;
  ASSIGN_OR_RETURN(const bool before, IsCopied(*target, step.commit()));
  if (before && document) {
    return tell();
  }
  if (before) {
    out << to << " is there already\n";
    return absl::OkStatus();
  }
  const std::string others = RemoveOthersThatDied(*target, copy.attempt());
  out << (document ? "" : others);
  const absl::Status copied = copy.Run();
  if (!copied.ok()) {
    // Another copy of the same step may have come first.
    const absl::StatusOr<bool> now = IsCopied(*target, step.commit());
    if (!now.ok() || !*now) {
      return TellOfOthers(copied, to);
    }
  }
  if (document) {
    return tell();
  }
  out << step.manifest().files.size() << " files, " << FormatBytes(step.manifest().total_bytes())
      << " (" << copy.copied_files() << " copied now, " << FormatBytes(copy.copied_bytes())
      << ") -> " << to << "\n";
  return absl::OkStatus();
}

}  // namespace ravel::ctl
