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

// Checks everything that the index alone can tell: magic, version, dtype, its own size, lengths >=
// 0, pointers without gap or overlap, a rising document index that ends at the last sequence.
absl::StatusOr<MegatronIndex> ReadMegatronIndex(std::span<const uint8_t> bytes);

// The index of documents of one sequence each.
std::string MakeMegatronIndex(int64_t id_bytes, std::span<const int32_t> document_ids);

}  // namespace ravel
