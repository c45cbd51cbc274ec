#pragma once

// The header of a safetensors file: what we write, and a strict parser of what anybody writes.
// Pure.

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/dtype.h"
#include "common/shape.h"
#include "common/status.h"

namespace ravel::ckpt {

// A header of ours is a multiple of this, so that the data begin on a page.
inline constexpr int64_t kSafetensorsHeaderAlignment = 4096;
inline constexpr int64_t kMaxSafetensorsHeaderBytes = 64 << 20;

// A chunk in a file. `begin` and `end` are bytes from the first data byte (file offset: header
// bytes + begin).
struct SafetensorsEntry {
  std::string key;
  DType dtype = DType::kF32;
  Shape shape;         // of the chunk
  Shape saved_offset;  // of the chunk in the whole tensor; as long as `shape`
  int64_t begin = 0;
  int64_t end = 0;
};

// The order of chunks in a file: larger elements first, then by key. So every chunk is aligned to
// its elements.
bool SafetensorsOrder(const SafetensorsEntry& a, const SafetensorsEntry& b);
// Sets begin and end, one entry after another in the given order.
void PlaceSafetensorsEntries(std::vector<SafetensorsEntry>& entries);

// Bytes of the header, 8 + N, a multiple of 4096. Depends only on the entries.
int64_t SafetensorsHeaderBytes(const std::vector<SafetensorsEntry>& entries);
// The header itself: u64 N, then compact JSON with keys in the given order and __metadata__
// (format, DCP_VERSION, DCP_SHARDING_INFO) last, padded with spaces. The entries must be placed.
std::string SafetensorsHeader(const std::vector<SafetensorsEntry>& entries);
// The same without sharding information: for exports, whose tensors are whole.
std::string SafetensorsExportHeader(const std::vector<SafetensorsEntry>& entries);

struct SafetensorsFile {
  int64_t header_bytes = 0;  // 8 + N
  std::vector<SafetensorsEntry>
      entries;  // by ascending begin; saved_offset is zeros where the file does not say
  std::vector<std::pair<std::string, std::string>> metadata;  // __metadata__ in file order
};

// N of the first 8 bytes of a file; refuses headers above the limit or beyond the end of the file.
absl::StatusOr<int64_t> SafetensorsJsonBytes(std::string_view first_8_bytes, int64_t file_bytes);
// Parses the first 8 + N bytes of a file of `file_bytes` bytes. The entries must cover the data
// exactly: no hole, overlap or trailing byte; sizes equal shape x dtype; keys unique; every product
// checked. Errors name the key and what was expected.
absl::StatusOr<SafetensorsFile> ParseSafetensorsHeader(std::string_view header, int64_t file_bytes);

}  // namespace ravel::ckpt
