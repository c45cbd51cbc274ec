#pragma once

// The .idx half of a Megatron token file. Little-endian: magic "MMIDIDX\0\0", u64 version 1, u8
// dtype code, u64 sequences, u64 entries of the document index, i32 lengths[sequences], i64 byte
// pointers[sequences], i64 document index (first sequence of each document, and the end).

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "common/status.h"

namespace ravel {

struct MegatronIndex {
  int64_t id_bytes = 0;                   // 2 (uint16, code 8) or 4 (int32, code 4)
  std::vector<int64_t> document_offsets;  // in ids: starts of documents (first is 0), and the end
};

inline constexpr int64_t kMegatronHeaderBytes = 9 + 8 + 1 + 8 + 8;

struct MegatronHeader {
  int64_t id_bytes = 0;
  uint64_t sequences = 0;
  uint64_t document_entries = 0;
};

// Reads the header from the index's first bytes (kMegatronHeaderBytes of them, or all that there
// are) and holds it against the size of the whole file.
absl::StatusOr<MegatronHeader> ReadMegatronHeader(std::span<const uint8_t> beginning,
                                                  int64_t file_bytes);

// Checks the tables behind the header as they come, in parts of any size: first all sequences, then
// all document entries. Keeps sums only. Thread-compatible.
class MegatronIndexCheck {
 public:
  explicit MegatronIndexCheck(const MegatronHeader& header) : header_(header) {}

  // `count` lengths of 4 bytes and as many pointers of 8.
  absl::Status AddSequences(const uint8_t* lengths, const uint8_t* pointers, uint64_t count);
  // `count` entries of 8 bytes.
  absl::Status AddDocuments(const uint8_t* entries, uint64_t count);
  absl::Status Finish() const;
  int64_t tokens() const { return tokens_; }

 private:
  const MegatronHeader header_;
  uint64_t sequence_ = 0;  // the next one
  int64_t tokens_ = 0;     // of the sequences so far
  uint64_t document_ = 0;  // the next entry
  int64_t previous_ = 0;   // the sequence of the last entry
};

// Checks everything that the index alone can tell: magic, version, dtype, its own size, lengths >=
// 0, pointers without gap or overlap, a rising document index that ends at the last sequence.
absl::StatusOr<MegatronIndex> ReadMegatronIndex(std::span<const uint8_t> bytes);

// The index of documents of one sequence each.
std::string MakeMegatronIndex(int64_t id_bytes, std::span<const int32_t> document_ids);

}  // namespace ravel
