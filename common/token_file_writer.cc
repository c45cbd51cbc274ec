// MegatronWriter of common/token_file.h.

#include <limits>

#include <absl/strings/str_cat.h>

#include "common/file_writer.h"
#include "common/megatron_index.h"
#include "common/token_file.h"

namespace ravel {
namespace {

class PairWriter : public MegatronWriter {
 public:
  PairWriter(std::string prefix, int64_t vocabulary, std::unique_ptr<FileWriter> data)
      : prefix_(std::move(prefix)),
        vocabulary_(vocabulary),
        id_bytes_(vocabulary <= 65535 ? 2 : 4),
        data_(std::move(data)) {}

  absl::Status AddDocument(std::span<const int32_t> ids) override {
    if (ids.size() > std::numeric_limits<int32_t>::max()) {
      return absl::InvalidArgumentError(
          absl::StrCat(prefix_, ".bin: expected a document of at most 2147483647 tokens"));
    }
    for (const int32_t id : ids) {
      if (id < 0 || id >= vocabulary_) {
        return absl::InvalidArgumentError(
            absl::StrCat(prefix_, ".bin: expected ids below ", vocabulary_, ", got ", id));
      }
    }
    if (id_bytes_ == 2) {
      narrow_.assign(ids.begin(), ids.end());
      RETURN_IF_ERROR(data_->Write(
          {reinterpret_cast<const char*>(narrow_.data()), narrow_.size() * sizeof(uint16_t)}));
    } else {
      RETURN_IF_ERROR(
          data_->Write({reinterpret_cast<const char*>(ids.data()), ids.size() * sizeof(int32_t)}));
    }
    lengths_.push_back(static_cast<int32_t>(ids.size()));
    return absl::OkStatus();
  }

  absl::Status Finish() override {
    ASSIGN_OR_RETURN(const std::unique_ptr<FileWriter> index, FileWriter::Create(prefix_ + ".idx"));
    RETURN_IF_ERROR(index->Write(MakeMegatronIndex(id_bytes_, lengths_)));
    // Both are complete on disk before either gets its name; the index, which makes them a pair,
    // comes last.
    RETURN_IF_ERROR(data_->Sync());
    RETURN_IF_ERROR(index->Sync());
    RETURN_IF_ERROR(data_->Publish());
    return index->Publish();
  }

 private:
  const std::string prefix_;
  const int64_t vocabulary_;
  const int64_t id_bytes_;
  std::unique_ptr<FileWriter> data_;
  std::vector<uint16_t> narrow_;
  std::vector<int32_t> lengths_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<MegatronWriter>> MegatronWriter::Create(const std::string& prefix,
                                                                       int64_t vocabulary) {
  if (vocabulary < 1) {
    return absl::InvalidArgumentError(absl::StrCat("expected a vocabulary >= 1, got ", vocabulary));
  }
  ASSIGN_OR_RETURN(std::unique_ptr<FileWriter> data, FileWriter::Create(prefix + ".bin"));
  return std::make_unique<PairWriter>(prefix, vocabulary, std::move(data));
}

}  // namespace ravel
