#include "worker/checkpoint/writer.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <set>
#include <utility>

#include <absl/strings/str_cat.h>
#include <pthread.h>

#include "common/check.h"
#include "common/ckpt/digest.h"
#include "common/ckpt/manifest_proto.h"
#include "common/ckpt/safetensors.h"
#include "common/ckpt/step_layout.h"
#include "common/crc32c.h"
#include "common/plan/save_headers.h"

namespace ravel::checkpoint {
namespace {

constexpr int64_t kWriteBytes = 8 << 20;
constexpr int64_t kImageAlignment = 4096;

// crc32c of blocks and of the whole chunk.
void SumBlocks(const std::byte* data, ckpt::ChunkRecord& chunk) {
  for (int64_t offset = 0; offset < chunk.bytes; offset += ckpt::kBlockBytes) {
    const auto bytes = static_cast<size_t>(std::min(ckpt::kBlockBytes, chunk.bytes - offset));
    const uint32_t crc = Crc32c(0, data + offset, bytes);
    chunk.block_crc32c.push_back(crc);
    chunk.crc32c = Crc32cCombine(chunk.crc32c, crc, bytes);
  }
}

}  // namespace

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
    : store_(store),
      plan_(plan),
      options_(std::move(options)),
      plan_hash_(plan::SavePlanHash(*plan)),
      arena_bytes_(ArenaBytes(*plan, options_.rank)) {
  // Not initialised: Snapshot writes every byte of every image.
  arena_.reset(new std::byte[static_cast<size_t>(arena_bytes_)]);
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
  thread_ = std::thread([this] {
    pthread_setname_np(pthread_self(), "ckpt-writer");
    Run();
  });
}

CheckpointWriter::~CheckpointWriter() {
  stop_ = true;
  {
    const MutexLock lock(mutex_);
    changed_.NotifyAll();
  }
  thread_.join();
}

absl::Status CheckpointWriter::Snapshot(SaveRequest request, const ShardBytes& shard_bytes) {
  return Snapshot(std::move(request),
                  [&](int group, plan::StateRole role, int64_t offset, std::span<std::byte> to) {
                    const std::span<const std::byte> shard = shard_bytes(group, role);
                    const auto begin = static_cast<size_t>(offset);
                    CHECK(begin <= shard.size() && to.size() <= shard.size() - begin);
                    std::memcpy(to.data(), shard.data() + begin, to.size());
                    return absl::OkStatus();
                  });
}

absl::Status CheckpointWriter::Snapshot(SaveRequest request, const ReadShard& read) {
  if (in_flight_) {
    return absl::FailedPreconditionError(
        absl::StrCat("a save is in flight; step ", request.step, " is not saved"));
  }
  const auto optimizer_step = static_cast<float>(request.optimizer_step);
  for (const FileImage& image : images_) {
    for (const plan::SaveChunk& chunk : image.file->chunks) {
      std::byte* target = image.data + chunk.file_offset;
      const auto bytes = static_cast<size_t>(chunk.bytes);
      const plan::StateTensor& tensor = plan_->tensors[static_cast<size_t>(chunk.tensor)];
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
  in_flight_ = true;
  const MutexLock lock(mutex_);
  pending_ = std::move(request);
  changed_.NotifyAll();
  return absl::OkStatus();
}

std::optional<absl::StatusOr<ckpt::Seal>> CheckpointWriter::Poll() {
  const MutexLock lock(mutex_);
  if (result_) {
    in_flight_ = false;
  }
  return std::exchange(result_, std::nullopt);
}

absl::StatusOr<ckpt::Seal> CheckpointWriter::Wait() {
  if (!in_flight_) {
    return absl::FailedPreconditionError("no save is in flight");
  }
  const MutexLock lock(mutex_);
  while (!result_) {
    changed_.Wait(mutex_);  // ends: the thread answers every request, and each store operation ends
  }
  in_flight_ = false;
  return *std::exchange(result_, std::nullopt);
}

void CheckpointWriter::Run() {
  for (;;) {
    SaveRequest request;
    {
      const MutexLock lock(mutex_);
      while (!pending_ && !stop_) {
        changed_.Wait(mutex_);
      }
      if (stop_) {
        return;
      }
      request = *std::exchange(pending_, std::nullopt);
    }
    absl::StatusOr<ckpt::Seal> seal = Write(request);
    const MutexLock lock(mutex_);
    result_ = std::move(seal);
    changed_.NotifyAll();
  }
}

absl::StatusOr<ckpt::Seal> CheckpointWriter::Write(const SaveRequest& request) {
  const auto start = std::chrono::steady_clock::now();
  const std::string attempt = ckpt::AttemptName({.step = request.step,
                                                 .epoch = request.epoch,
                                                 .attempt = request.attempt,
                                                 .job_tag = options_.job_tag});
  ckpt::Seal seal;
  seal.step = request.step;
  seal.epoch = request.epoch;
  seal.attempt = request.attempt;
  seal.writer = options_.rank;
  seal.sequence = request.sequence;
  seal.save_plan_hash = plan_hash_;
  seal.blobs = request.blobs;
  RETURN_IF_ERROR(MakeFolders(attempt));
  for (const FileImage& image : images_) {
    RETURN_IF_ERROR(WriteImage(attempt, image, seal));
  }
  for (const HuggingFaceFile& file : options_.hugging_face_files) {
    RETURN_IF_ERROR(WriteSmallFile(attempt, file, seal));
  }
  std::set<std::string> written;
  for (const ckpt::FileRecord& file : seal.files) {
    written.insert(file.path.substr(0, file.path.find('/')));
  }
  for (const std::string& folder : written) {
    RETURN_IF_ERROR(store_->SyncDirectory(store::JoinPath(attempt, folder)));
  }
  DigestImages(seal);
  seal.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  RETURN_IF_ERROR(store::PutNew(*store_,
                                store::JoinPath(attempt, ckpt::SealFileName(options_.rank)),
                                ckpt::EncodeSeal(seal),
                                "new"));
  return seal;
}

absl::Status CheckpointWriter::MakeFolders(const std::string& attempt) {
  RETURN_IF_ERROR(store_->MakeDirectory(attempt));
  for (const std::string_view folder :
       {ckpt::kModelFolder, ckpt::kOptimizerFolder, ckpt::kHuggingFaceFolder, ckpt::kSealsFolder}) {
    RETURN_IF_ERROR(store_->MakeDirectory(store::JoinPath(attempt, folder)));
  }
  RETURN_IF_ERROR(store_->SyncDirectory(attempt));
  return store_->SyncDirectory("");
}

absl::Status CheckpointWriter::WriteImage(const std::string& attempt,
                                          const FileImage& image,
                                          ckpt::Seal& seal) {
  const plan::SaveFile& file = *image.file;
  const std::string path = store::JoinPath(attempt, file.path);
  const std::string part = path + ".part";
  ASSIGN_OR_RETURN(const std::unique_ptr<store::FileWriter> writer,
                   store_->Create(part, file.size));
  for (int64_t at = 0; at < file.size; at += kWriteBytes) {
    if (stop_) {
      return absl::CancelledError("the trainer stops; the save is abandoned");
    }
    const auto bytes = static_cast<size_t>(std::min(kWriteBytes, file.size - at));
    RETURN_IF_ERROR(writer->Append({image.data + at, bytes}));
  }
  RETURN_IF_ERROR(writer->Finish());
  RETURN_IF_ERROR(store_->RenameNoReplace(part, path));

  ckpt::FileRecord record = {.path = file.path,
                             .size = file.size,
                             .header_bytes = file.header_bytes,
                             .crc32c = 0,
                             .writer = options_.rank};
  record.crc32c = Crc32c(0, image.data, static_cast<size_t>(file.header_bytes));
  for (const plan::SaveChunk& chunk : file.chunks) {
    ckpt::ChunkRecord sums = {.file = static_cast<int>(seal.files.size()),
                              .data_offset = chunk.file_offset,
                              .bytes = chunk.bytes,
                              .box = chunk.box,
                              .crc32c = 0,
                              .block_crc32c = {}};
    SumBlocks(image.data + chunk.file_offset, sums);
    record.crc32c = Crc32cCombine(record.crc32c, sums.crc32c, static_cast<uint64_t>(chunk.bytes));
    seal.chunks.push_back({plan_->tensors[static_cast<size_t>(chunk.tensor)].key, std::move(sums)});
  }
  seal.files.push_back(std::move(record));
  seal.bytes += file.size;
  return absl::OkStatus();
}

absl::Status CheckpointWriter::WriteSmallFile(const std::string& attempt,
                                              const HuggingFaceFile& file,
                                              ckpt::Seal& seal) {
  const std::string path = store::JoinPath(ckpt::kHuggingFaceFolder, file.name);
  RETURN_IF_ERROR(store::PutNew(*store_, store::JoinPath(attempt, path), file.content, "new"));
  const auto size = static_cast<int64_t>(file.content.size());
  seal.files.push_back({.path = path,
                        .size = size,
                        .header_bytes = 0,
                        .crc32c = Crc32c(0, file.content.data(), file.content.size()),
                        .writer = options_.rank});
  seal.bytes += size;
  return absl::OkStatus();
}

void CheckpointWriter::DigestImages(ckpt::Seal& seal) const {
  std::map<int, uint64_t> sums;  // by tensor
  for (const FileImage& image : images_) {
    for (const plan::SaveChunk& chunk : image.file->chunks) {
      const plan::StateTensor& tensor = plan_->tensors[static_cast<size_t>(chunk.tensor)];
      sums[chunk.tensor] +=
          ckpt::DigestBox(tensor.dtype,
                          tensor.shape,
                          chunk.box,
                          {image.data + chunk.file_offset, static_cast<size_t>(chunk.bytes)});
    }
  }
  for (const auto& [tensor, digest] : sums) {
    seal.tensors.push_back({plan_->tensors[static_cast<size_t>(tensor)].key, digest});
  }
}

}  // namespace ravel::checkpoint
