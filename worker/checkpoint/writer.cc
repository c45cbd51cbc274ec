// CheckpointWriter is what the step thread holds; Worker is what the writer's thread uses. The
// thread shares the Worker, so that it can be left behind in a store that hangs.

#include "worker/checkpoint/writer.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <utility>

#include <absl/base/thread_annotations.h>
#include <absl/strings/str_cat.h>
#include <pthread.h>

#include "common/check.h"
#include "common/ckpt/digest.h"
#include "common/ckpt/manifest_proto.h"
#include "common/ckpt/safetensors.h"
#include "common/ckpt/step_layout.h"
#include "common/crc32c.h"
#include "common/fault_point.h"
#include "common/logging.h"
#include "common/mutex.h"
#include "common/plan/save/save_headers.h"
#include "common/signed_size.h"
#include "worker/checkpoint/unacknowledged.h"

namespace ravel::checkpoint {
namespace {

constexpr int64_t kWriteBytes = 8 << 20;
constexpr int64_t kImageAlignment = 4096;
// Files whose space is reserved before the first byte is written; those beyond are opened in turn,
// within the process's limit of descriptors.
constexpr size_t kMostOpenFiles = 256;

// crc32c of blocks and of the whole chunk.
void SumBlocks(const std::byte* data, ckpt::ChunkRecord& chunk) {
  for (int64_t offset = 0; offset < chunk.bytes; offset += ckpt::kBlockBytes) {
    const size_t bytes = Size(std::min(ckpt::kBlockBytes, chunk.bytes - offset));
    const uint32_t crc = Crc32c(0, data + offset, bytes);
    chunk.block_crc32c.push_back(crc);
    chunk.crc32c = Crc32cCombine(chunk.crc32c, crc, bytes);
  }
}

std::atomic<int> left_behind = 0;

}  // namespace

int WritersLeftBehind() {
  return left_behind.load();
}

// Thread-safe where it says so; else the step thread uses it while no save is in flight, and the
// writer's thread while one is.
class CheckpointWriter::Worker {
 public:
  Worker(store::ObjectStore* store, const plan::SavePlan* plan, WriterOptions options);

  void Run();
  absl::Status CopyState(const SaveRequest& request, const ReadShard& read);
  void Begin(SaveRequest request);
  std::optional<absl::StatusOr<ckpt::Seal>> TakeResult();
  absl::StatusOr<ckpt::Seal> WaitForResult();
  // Thread-safe. Ends the thread; false when it has not ended after `wait` (none: for ever). From
  // then on nothing of the options is called.
  bool Stop(std::optional<std::chrono::milliseconds> wait);
  std::span<const std::byte> arena() const { return {arena_.get(), Size(arena_bytes_)}; }

 private:
  struct FileImage {
    const plan::SaveFile* file = nullptr;
    std::byte* data = nullptr;  // in the arena
  };
  // A file of the save under way.
  struct OpenFile {
    std::unique_ptr<store::FileWriter> writer;  // null when it was not opened yet
    std::string path;                           // its final one
    bool finished = false;
  };
  // Files and folders that a save has made so far.
  struct Written {
    std::vector<OpenFile> files;  // by image
    bool seal = false;            // perhaps: its operation was begun
  };
  absl::StatusOr<ckpt::Seal> Write(const SaveRequest& request);
  absl::StatusOr<ckpt::Seal> WriteAndSeal(const SaveRequest& request,
                                          const std::string& attempt,
                                          Written& written);
  // Why the save must not go on.
  absl::Status CheckWanted(int64_t step);
  absl::Status MakeFolders(const std::string& attempt);
  absl::Status Open(OpenFile& file, int64_t bytes);
  // Space for everything before the first byte: a full store is told at once.
  absl::Status Reserve(const std::string& attempt, std::vector<OpenFile>& files);
  absl::Status WriteImage(int64_t step, const FileImage& image, OpenFile& open, ckpt::Seal& seal);
  absl::Status WriteSmallFile(const std::string& attempt,
                              const HuggingFaceFile& file,
                              ckpt::Seal& seal);
  void DigestImages(ckpt::Seal& seal) const;
  // Removes all that this save has created, as far as the store lets it.
  void RemoveFiles(const std::string& attempt, Written& written);
  void TellResult(const SaveRequest& request, const absl::StatusOr<ckpt::Seal>& seal);
  void TrimUnanswered(const ckpt::Seal& seal);

  store::ObjectStore* store_;
  const plan::SavePlan* plan_;
  WriterOptions options_;
  Sha256Digest plan_hash_;
  std::vector<FileImage> images_;
  std::unique_ptr<std::byte[]> arena_;
  int64_t arena_bytes_ = 0;
  UnacknowledgedAttempts unanswered_;
  std::atomic<bool> stop_ = false;

  Mutex callbacks_;  // held while one runs
  bool detached_ ABSL_GUARDED_BY(callbacks_) = false;

  Mutex mutex_;
  CondVar changed_;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<SaveRequest> pending_ ABSL_GUARDED_BY(mutex_);
  std::optional<absl::StatusOr<ckpt::Seal>> result_ ABSL_GUARDED_BY(mutex_);
};

CheckpointWriter::Worker::Worker(store::ObjectStore* store,
                                 const plan::SavePlan* plan,
                                 WriterOptions options)
    : store_(store),
      plan_(plan),
      options_(std::move(options)),
      plan_hash_(plan::SavePlanHash(*plan)),
      arena_bytes_(ArenaBytes(*plan, options_.rank)),
      unanswered_(options_.ranks, options_.most_unanswered) {
  // Not initialised: CopyState writes every byte of every image.
  arena_.reset(new std::byte[Size(arena_bytes_)]);
  std::byte* data = arena_.get();
  for (const plan::SaveFile& file : plan_->files) {
    if (file.writer != options_.rank) {
      continue;
    }
    const std::string header = ckpt::SafetensorsHeader(plan::FileEntries(*plan_, file));
    CHECK_EQ(static_cast<int64_t>(header.size()), file.header_bytes);
    std::memcpy(data, header.data(), header.size());
    images_.push_back({&file, data});
    data += RoundUp(file.size, kImageAlignment);
  }
}

absl::Status CheckpointWriter::Worker::CopyState(const SaveRequest& request,
                                                 const ReadShard& read) {
  const auto optimizer_step = static_cast<float>(request.optimizer_step);
  for (const FileImage& image : images_) {
    for (const plan::SaveChunk& chunk : image.file->chunks) {
      std::byte* target = image.data + chunk.file_offset;
      const size_t bytes = Size(chunk.bytes);
      const plan::StateTensor& tensor = plan_->tensors[chunk.tensor];
      if (tensor.role == plan::StateRole::kStep) {
        CHECK_EQ(bytes, sizeof(optimizer_step));
        std::memcpy(target, &optimizer_step, bytes);
        continue;
      }
      RETURN_IF_ERROR(read(chunk.group,
                           tensor.role,
                           chunk.shard_offset * DTypeBytes(tensor.dtype),
                           {target, bytes}));
    }
  }
  return absl::OkStatus();
}

void CheckpointWriter::Worker::Begin(SaveRequest request) {
  const MutexLock lock(mutex_);
  pending_ = std::move(request);
  changed_.NotifyAll();
}

std::optional<absl::StatusOr<ckpt::Seal>> CheckpointWriter::Worker::TakeResult() {
  const MutexLock lock(mutex_);
  return std::exchange(result_, std::nullopt);
}

absl::StatusOr<ckpt::Seal> CheckpointWriter::Worker::WaitForResult() {
  const MutexLock lock(mutex_);
  while (!result_) {
    changed_.Wait(mutex_);  // the thread answers every request
  }
  return *std::exchange(result_, std::nullopt);
}

bool CheckpointWriter::Worker::Stop(std::optional<std::chrono::milliseconds> wait) {
  stop_ = true;
  {
    const MutexLock lock(mutex_);
    changed_.NotifyAll();
    const auto deadline =
        std::chrono::steady_clock::now() + wait.value_or(std::chrono::milliseconds(0));
    while (!ended_) {
      if (!wait) {
        changed_.Wait(mutex_);
        continue;
      }
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
          deadline - std::chrono::steady_clock::now());
      if (left.count() <= 0) {
        break;
      }
      changed_.WaitFor(mutex_, left);
    }
    if (ended_) {
      return true;
    }
  }
  const MutexLock lock(callbacks_);
  detached_ = true;
  return false;
}

void CheckpointWriter::Worker::Run() {
  for (;;) {
    SaveRequest request;
    {
      const MutexLock lock(mutex_);
      while (!pending_ && !stop_) {
        changed_.Wait(mutex_);
      }
      if (stop_) {
        ended_ = true;
        changed_.NotifyAll();
        return;
      }
      request = *std::exchange(pending_, std::nullopt);
    }
    absl::StatusOr<ckpt::Seal> seal = Write(request);
    TellResult(request, seal);
    if (seal.ok()) {
      TrimUnanswered(*seal);
    }
    {
      const MutexLock lock(mutex_);
      result_ = std::move(seal);
      changed_.NotifyAll();
    }
    const MutexLock lock(callbacks_);
    if (!detached_ && options_.on_idle) {
      options_.on_idle();
    }
  }
}

void CheckpointWriter::Worker::TellResult(const SaveRequest& request,
                                          const absl::StatusOr<ckpt::Seal>& seal) {
  const MutexLock lock(callbacks_);
  if (!detached_ && options_.on_result) {
    options_.on_result(request, seal);
  }
}

void CheckpointWriter::Worker::TrimUnanswered(const ckpt::Seal& seal) {
  if (options_.most_unanswered <= 0) {
    return;
  }
  int64_t answered = -1;
  {
    const MutexLock lock(callbacks_);
    if (!detached_ && options_.answered_step) {
      answered = options_.answered_step();
    }
  }
  unanswered_.Sealed({.step = seal.step,
                      .epoch = seal.epoch,
                      .attempt = seal.attempt,
                      .job_tag = options_.job_tag});
  const auto removed = unanswered_.Trim(*store_, answered);
  if (!removed.ok()) {
    log::Warning(absl::StrCat("saves that nobody answers are not removed: ",
                              std::string(removed.status().message())));
    return;
  }
  for (const ckpt::AttemptKey& key : *removed) {
    const std::string message = absl::StrCat("the save of step ",
                                             key.step,
                                             " is removed: nobody has committed it, and ",
                                             options_.most_unanswered,
                                             " newer ones are complete");
    log::Warning(message);
    const MutexLock lock(callbacks_);
    if (!detached_ && options_.on_removed) {
      options_.on_removed(key, message);
    }
  }
}

absl::Status CheckpointWriter::Worker::CheckWanted(int64_t step) {
  if (stop_) {
    return absl::CancelledError("the trainer stops; the save is abandoned");
  }
  const MutexLock lock(callbacks_);
  return !detached_ && options_.abandoned && options_.abandoned(step)
             ? absl::CancelledError("the save was ended by the coordinator")
             : absl::OkStatus();
}

absl::StatusOr<ckpt::Seal> CheckpointWriter::Worker::Write(const SaveRequest& request) {
  const std::string attempt = ckpt::AttemptName({.step = request.step,
                                                 .epoch = request.epoch,
                                                 .attempt = request.attempt,
                                                 .job_tag = options_.job_tag});
  Written written = {.files = std::vector<OpenFile>(images_.size())};
  absl::StatusOr<ckpt::Seal> seal = WriteAndSeal(request, attempt, written);
  if (!seal.ok()) {
    RemoveFiles(attempt, written);
  }
  return seal;
}

absl::StatusOr<ckpt::Seal> CheckpointWriter::Worker::WriteAndSeal(const SaveRequest& request,
                                                                  const std::string& attempt,
                                                                  Written& written) {
  const auto start = std::chrono::steady_clock::now();
  ckpt::Seal seal;
  seal.step = request.step;
  seal.epoch = request.epoch;
  seal.attempt = request.attempt;
  seal.writer = options_.rank;
  seal.sequence = request.sequence;
  seal.save_plan_hash = plan_hash_;
  seal.blobs = request.blobs;
  seal.quantized = request.quantized;
  RETURN_IF_ERROR(CheckWanted(request.step));
  RETURN_IF_ERROR(MakeFolders(attempt));
  RETURN_IF_ERROR(Reserve(attempt, written.files));
  for (size_t i = 0; i < images_.size(); ++i) {
    RETURN_IF_ERROR(WriteImage(request.step, images_[i], written.files[i], seal));
  }
  for (const HuggingFaceFile& file : options_.hugging_face_files) {
    RETURN_IF_ERROR(WriteSmallFile(attempt, file, seal));
  }
  DigestImages(seal);
  seal.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  RETURN_IF_ERROR(CheckWanted(request.step));
  const absl::Status sealed = store_->Put(
      store::JoinPath(attempt, ckpt::SealFileName(options_.rank)), ckpt::EncodeSeal(seal));
  written.seal = !absl::IsAlreadyExists(sealed);  // else it is another save's
  RETURN_IF_ERROR(sealed);
  return seal;
}

absl::Status CheckpointWriter::Worker::MakeFolders(const std::string& attempt) {
  RETURN_IF_ERROR(store_->MakeDirectory(attempt));
  for (const std::string_view folder :
       {ckpt::kModelFolder, ckpt::kOptimizerFolder, ckpt::kHuggingFaceFolder, ckpt::kSealsFolder}) {
    RETURN_IF_ERROR(store_->MakeDirectory(store::JoinPath(attempt, folder)));
  }
  return absl::OkStatus();
}

absl::Status CheckpointWriter::Worker::Open(OpenFile& file, int64_t bytes) {
  ASSIGN_OR_RETURN(file.writer, store_->Create(file.path, bytes));
  return absl::OkStatus();
}

absl::Status CheckpointWriter::Worker::Reserve(const std::string& attempt,
                                               std::vector<OpenFile>& files) {
  int64_t bytes = 0;
  for (const FileImage& image : images_) {
    bytes += image.file->size;
  }
  RETURN_IF_ERROR(store_->CheckSpace(bytes));
  for (size_t i = 0; i < images_.size(); ++i) {
    files[i].path = store::JoinPath(attempt, images_[i].file->path);
    if (i < kMostOpenFiles) {
      RETURN_IF_ERROR(Open(files[i], images_[i].file->size));
    }
  }
  return absl::OkStatus();
}

void CheckpointWriter::Worker::RemoveFiles(const std::string& attempt, Written& written) {
  const auto remove = [this](const std::string& path) {
    const absl::Status removed = store_->Withdraw(path);
    if (removed.ok() || absl::IsNotFound(removed)) {
      return true;
    }
    log::Warning(absl::StrCat("a file of a failed save stays: ", std::string(removed.message())));
    return false;
  };
  // The seal first: one that is there says that the files are.
  if (written.seal) {
    const std::string seal = store::JoinPath(attempt, ckpt::SealFileName(options_.rank));
    if (!remove(seal)) {
      return;
    }
  }
  for (OpenFile& file : written.files) {
    file.writer.reset();
    if (file.finished) {
      remove(file.path);
    }
  }
}

absl::Status CheckpointWriter::Worker::WriteImage(int64_t step,
                                                  const FileImage& image,
                                                  OpenFile& open,
                                                  ckpt::Seal& seal) {
  const plan::SaveFile& file = *image.file;
  if (open.writer == nullptr) {
    RETURN_IF_ERROR(Open(open, file.size));
  }
  for (int64_t at = 0; at < file.size; at += kWriteBytes) {
    RETURN_IF_ERROR(CheckWanted(step));
    RETURN_IF_ERROR(FaultPoint("save.write"));
    const size_t bytes = Size(std::min(kWriteBytes, file.size - at));
    RETURN_IF_ERROR(open.writer->Append({image.data + at, bytes}));
  }
  const absl::Status finished = open.writer->Finish();
  open.finished = !absl::IsAlreadyExists(finished);  // perhaps: else it is another save's
  RETURN_IF_ERROR(finished);
  open.writer.reset();

  ckpt::FileRecord record = {.path = file.path,
                             .size = file.size,
                             .header_bytes = file.header_bytes,
                             .crc32c = 0,
                             .writer = options_.rank};
  record.crc32c = Crc32c(0, image.data, Size(file.header_bytes));
  for (const plan::SaveChunk& chunk : file.chunks) {
    ckpt::ChunkRecord sums = {.file = static_cast<int>(seal.files.size()),
                              .data_offset = chunk.file_offset,
                              .bytes = chunk.bytes,
                              .box = chunk.box,
                              .crc32c = 0,
                              .block_crc32c = {}};
    SumBlocks(image.data + chunk.file_offset, sums);
    record.crc32c = Crc32cCombine(record.crc32c, sums.crc32c, static_cast<uint64_t>(chunk.bytes));
    seal.chunks.push_back({plan_->tensors[chunk.tensor].key, std::move(sums)});
  }
  seal.files.push_back(std::move(record));
  seal.bytes += file.size;
  return absl::OkStatus();
}

absl::Status CheckpointWriter::Worker::WriteSmallFile(const std::string& attempt,
                                                      const HuggingFaceFile& file,
                                                      ckpt::Seal& seal) {
  const std::string path = store::JoinPath(ckpt::kHuggingFaceFolder, file.name);
  RETURN_IF_ERROR(store_->Put(store::JoinPath(attempt, path), file.content));
  const auto size = static_cast<int64_t>(file.content.size());
  seal.files.push_back({.path = path,
                        .size = size,
                        .header_bytes = 0,
                        .crc32c = Crc32c(0, file.content.data(), file.content.size()),
                        .writer = options_.rank});
  seal.bytes += size;
  return absl::OkStatus();
}

void CheckpointWriter::Worker::DigestImages(ckpt::Seal& seal) const {
  std::map<plan::StateId, uint64_t> sums;
  for (const FileImage& image : images_) {
    for (const plan::SaveChunk& chunk : image.file->chunks) {
      const plan::StateTensor& tensor = plan_->tensors[chunk.tensor];
      sums[chunk.tensor] += ckpt::DigestBox(tensor.dtype,
                                            tensor.shape,
                                            chunk.box,
                                            {image.data + chunk.file_offset, Size(chunk.bytes)});
    }
  }
  for (const auto& [tensor, digest] : sums) {
    seal.tensors.push_back({plan_->tensors[tensor].key, digest});
  }
}

int64_t CheckpointWriter::ArenaBytes(const plan::SavePlan& plan, int rank) {
  int64_t bytes = 0;
  for (const plan::SaveFile& file : plan.files) {
    if (file.writer == rank) {
      bytes += RoundUp(file.size, kImageAlignment);
    }
  }
  return bytes;
}

CheckpointWriter::CheckpointWriter(store::ObjectStore* store,
                                   const plan::SavePlan* plan,
                                   WriterOptions options)
    : owned_(options.owner != nullptr),
      exit_wait_(options.exit_wait),
      worker_(std::make_shared<Worker>(store, plan, std::move(options))) {
  thread_ = std::thread([worker = worker_] {
    pthread_setname_np(pthread_self(), "ckpt-writer");
    worker->Run();
  });
}

CheckpointWriter::~CheckpointWriter() {
  const bool ended =
      worker_->Stop(owned_ ? std::optional<std::chrono::milliseconds>(exit_wait_) : std::nullopt);
  if (ended) {
    thread_.join();
    return;
  }
  ++left_behind;
  log::Warning(absl::StrCat("the store does not answer for ",
                            exit_wait_.count(),
                            " ms; the thread that writes step ",
                            in_flight_step_.value_or(-1),
                            " is left behind"));
  thread_.detach();
}

int64_t CheckpointWriter::arena_bytes() const {
  return static_cast<int64_t>(worker_->arena().size());
}

std::span<const std::byte> CheckpointWriter::arena() const {
  return worker_->arena();
}

absl::Status CheckpointWriter::Snapshot(SaveRequest request, const ShardBytes& shard_bytes) {
  return Snapshot(
      std::move(request),
      [&](plan::GroupId group, plan::StateRole role, int64_t offset, std::span<std::byte> to) {
        const std::span<const std::byte> shard = shard_bytes(group, role);
        const size_t begin = Size(offset);
        CHECK(begin <= shard.size() && to.size() <= shard.size() - begin);
        std::memcpy(to.data(), shard.data() + begin, to.size());
        return absl::OkStatus();
      });
}

absl::Status CheckpointWriter::Snapshot(SaveRequest request, const ReadShard& read) {
  if (busy()) {
    return absl::FailedPreconditionError(
        absl::StrCat("a save is in flight; step ", request.step, " is not saved"));
  }
  RETURN_IF_ERROR(worker_->CopyState(request, read));
  in_flight_step_ = request.step;
  worker_->Begin(std::move(request));
  return absl::OkStatus();
}

std::optional<absl::StatusOr<ckpt::Seal>> CheckpointWriter::Poll() {
  auto result = worker_->TakeResult();
  if (result) {
    in_flight_step_.reset();
  }
  return result;
}

absl::StatusOr<ckpt::Seal> CheckpointWriter::Wait() {
  if (!busy()) {
    return absl::FailedPreconditionError("no save is in flight");
  }
  absl::StatusOr<ckpt::Seal> result = worker_->WaitForResult();
  in_flight_step_.reset();
  return result;
}

}  // namespace ravel::checkpoint
