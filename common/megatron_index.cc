// Reads and checks Megatron .idx files. The header is first held against the file's size in
// arithmetic that cannot overflow; then the tables are checked in one pass that keeps only sums
// (MegatronIndexCheck), so the same code serves a mapped file and a file read in blocks. Each
// pointer must equal the bytes before it: gaps and overlaps are faults.

#include "common/megatron_index.h"

#include <cstring>

#include <absl/strings/str_cat.h>

#include "common/check.h"

namespace ravel {
namespace {

constexpr char kMagic[9] = {'M', 'M', 'I', 'D', 'I', 'D', 'X', '\0', '\0'};
constexpr uint64_t kVersion = 1;
constexpr uint8_t kInt32Code = 4;
constexpr uint8_t kUint16Code = 8;
static_assert(kMegatronHeaderBytes == sizeof kMagic + 8 + 1 + 8 + 8);

template <typename Integer>
Integer Load(const uint8_t* from) {
  Integer value;
  std::memcpy(&value, from, sizeof value);  // the machines we run on are little-endian
  return value;
}

template <typename Integer>
void Append(Integer value, std::string& out) {
  out.append(reinterpret_cast<const char*>(&value), sizeof value);
}

}  // namespace

absl::StatusOr<MegatronHeader> ReadMegatronHeader(std::span<const uint8_t> bytes,
                                                  int64_t file_bytes) {
  if (bytes.size() < std::size_t{kMegatronHeaderBytes} ||
      std::memcmp(bytes.data(), kMagic, sizeof kMagic) != 0) {
    return absl::InvalidArgumentError(
        "expected a Megatron index (magic MMIDIDX), found another file");
  }
  const uint64_t version = Load<uint64_t>(&bytes[9]);
  if (version != kVersion) {
    return absl::InvalidArgumentError(absl::StrCat("expected version 1, found ", version));
  }
  const uint8_t code = bytes[17];
  if (code != kInt32Code && code != kUint16Code) {
    return absl::InvalidArgumentError(
        absl::StrCat("expected dtype code 4 (int32) or 8 (uint16), found ", int{code}));
  }
  MegatronHeader header;
  header.id_bytes = code == kUint16Code ? 2 : 4;
  header.sequences = Load<uint64_t>(&bytes[18]);
  header.document_entries = Load<uint64_t>(&bytes[26]);
  // First in numbers that cannot overflow: each sequence takes 12 bytes, each entry 8.
  const auto body = static_cast<uint64_t>(file_bytes - kMegatronHeaderBytes);
  if (header.sequences > body / 12 || header.document_entries > body / 8 ||
      header.sequences * 12 + header.document_entries * 8 != body) {
    return absl::InvalidArgumentError(absl::StrCat("expected a table of ",
                                                   header.sequences,
                                                   " sequences and ",
                                                   header.document_entries,
                                                   " document entries, found ",
                                                   body,
                                                   " bytes of it (truncated?)"));
  }
  if (header.document_entries == 0) {
    return absl::InvalidArgumentError("expected at least one document entry, found none");
  }
  return header;
}

absl::Status MegatronIndexCheck::AddSequences(const uint8_t* lengths,
                                              const uint8_t* pointers,
                                              uint64_t count) {
  for (uint64_t i = 0; i < count; ++i, ++sequence_) {
    const int32_t length = Load<int32_t>(lengths + i * 4);
    const int64_t pointer = Load<int64_t>(pointers + i * 8);
    if (length < 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("sequence ", sequence_, ": expected a length >= 0, found ", length));
    }
    if (pointer != tokens_ * header_.id_bytes) {
      return absl::InvalidArgumentError(absl::StrCat("sequence ",
                                                     sequence_,
                                                     ": expected it at byte ",
                                                     tokens_ * header_.id_bytes,
                                                     ", right after the one before, found ",
                                                     pointer));
    }
    tokens_ += length;
  }
  return absl::OkStatus();
}

absl::Status MegatronIndexCheck::AddDocuments(const uint8_t* entries, uint64_t count) {
  for (uint64_t i = 0; i < count; ++i, ++document_) {
    const int64_t sequence = Load<int64_t>(entries + i * 8);
    const bool last = document_ + 1 == header_.document_entries;
    const auto all = static_cast<int64_t>(header_.sequences);
    const int64_t low = document_ == 0 || !last ? previous_ : all;
    const int64_t high = document_ == 0 && !last ? 0 : all;
    if (sequence < low || sequence > high) {
      return absl::InvalidArgumentError(absl::StrCat("document entry ",
                                                     document_,
                                                     ": expected a sequence from ",
                                                     low,
                                                     " to ",
                                                     high,
                                                     ", found ",
                                                     sequence));
    }
    previous_ = sequence;
  }
  return absl::OkStatus();
}

absl::Status MegatronIndexCheck::Finish() const {
  return previous_ == static_cast<int64_t>(header_.sequences)
             ? absl::OkStatus()
             : absl::InvalidArgumentError("the document index does not reach the last sequence");
}

absl::StatusOr<MegatronIndex> ReadMegatronIndex(std::span<const uint8_t> bytes) {
  ASSIGN_OR_RETURN(const MegatronHeader header,
                   ReadMegatronHeader(bytes, static_cast<int64_t>(bytes.size())));
  const uint8_t* const lengths = bytes.data() + kMegatronHeaderBytes;
  const uint8_t* const pointers = lengths + header.sequences * 4;
  const uint8_t* const entries = pointers + header.sequences * 8;
  MegatronIndexCheck check(header);
  RETURN_IF_ERROR(check.AddSequences(lengths, pointers, header.sequences));
  RETURN_IF_ERROR(check.AddDocuments(entries, header.document_entries));
  RETURN_IF_ERROR(check.Finish());
  std::vector<int64_t> starts(1, 0);  // of sequences, in ids
  starts.reserve(header.sequences + 1);
  for (uint64_t i = 0; i < header.sequences; ++i) {
    starts.push_back(starts.back() + Load<int32_t>(lengths + i * 4));
  }
  MegatronIndex index;
  index.id_bytes = header.id_bytes;
  index.document_offsets.reserve(header.document_entries);
  for (uint64_t i = 0; i < header.document_entries; ++i) {
    index.document_offsets.push_back(
        starts[static_cast<std::size_t>(Load<int64_t>(entries + i * 8))]);
  }
  return index;
}

std::string MakeMegatronIndex(int64_t id_bytes, std::span<const int32_t> document_ids) {
  CHECK(id_bytes == 2 || id_bytes == 4);
  std::string out(kMagic, sizeof kMagic);
  out.reserve(std::size_t{kMegatronHeaderBytes} + document_ids.size() * 20 + 8);
  Append(kVersion, out);
  Append(id_bytes == 2 ? kUint16Code : kInt32Code, out);
  Append(static_cast<uint64_t>(document_ids.size()), out);
  Append(static_cast<uint64_t>(document_ids.size() + 1), out);
  for (const int32_t ids : document_ids) {
    Append(ids, out);
  }
  int64_t pointer = 0;
  for (const int32_t ids : document_ids) {
    Append(pointer, out);
    pointer += ids * id_bytes;
  }
  for (int64_t document = 0; document <= static_cast<int64_t>(document_ids.size()); ++document) {
    Append(document, out);
  }
  return out;
}

}  // namespace ravel
