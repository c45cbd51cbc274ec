#include "common/plan/save/save_headers.h"

#include <string>

#include "common/check.h"

namespace ravel::plan {
namespace {

class Record {
 public:
  void Add(int64_t value) {
    for (int byte = 0; byte < 8; ++byte) {
      bytes_.push_back(static_cast<char>((static_cast<uint64_t>(value) >> (8 * byte)) & 0xffu));
    }
  }
  void Add(const std::string& text) {
    Add(static_cast<int64_t>(text.size()));
    bytes_ += text;
  }
  void Add(const Shape& sizes) {
    Add(static_cast<int64_t>(sizes.size()));
    for (const int64_t size : sizes) {
      Add(size);
    }
  }
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

}  // namespace

std::vector<ckpt::SafetensorsEntry> FileEntries(const SavePlan& plan, const SaveFile& file) {
  std::vector<ckpt::SafetensorsEntry> entries;
  entries.reserve(file.chunks.size());
  for (const SaveChunk& chunk : file.chunks) {
    CHECK(plan.tensors.Has(chunk.tensor));
    const StateTensor& tensor = plan.tensors[chunk.tensor];
    entries.push_back({.key = tensor.key,
                       .dtype = tensor.dtype,
                       .shape = chunk.box.length,
                       .saved_offset = chunk.box.offset});
  }
  ckpt::PlaceSafetensorsEntries(entries);
  return entries;
}

Sha256Digest SavePlanHash(const SavePlan& plan) {
  Record record;
  record.Add(static_cast<int64_t>(plan.tensors.size()));
  for (const StateTensor& tensor : plan.tensors) {
    record.Add(tensor.key);
    record.Add(tensor.of_param);
    record.Add(static_cast<int64_t>(tensor.role));
    record.Add(static_cast<int64_t>(tensor.dtype));
    record.Add(tensor.shape);
  }
  record.Add(static_cast<int64_t>(plan.files.size()));
  for (const SaveFile& file : plan.files) {
    record.Add(file.path);
    record.Add(file.writer);
    record.Add(file.header_bytes);
    record.Add(file.size);
    record.Add(static_cast<int64_t>(file.chunks.size()));
    for (const SaveChunk& chunk : file.chunks) {
      record.Add(chunk.tensor.value());
      record.Add(chunk.box.offset);
      record.Add(chunk.box.length);
      record.Add(chunk.group.value());
      record.Add(chunk.shard_offset);
      record.Add(chunk.file_offset);
      record.Add(chunk.bytes);
    }
  }
  return Sha256(record.bytes());
}

}  // namespace ravel::plan
