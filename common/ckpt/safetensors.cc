// Writes and parses safetensors headers. The header is written by hand, since its length must
// depend only on the entries: the planner computes file offsets before any rank writes. It is
// padded to a page, so data can be written and mapped aligned. The parser accepts only headers
// whose entries cover the data exactly, without hole or overlap, and bounds every number, because
// these files are downloaded from anywhere.

#include "common/ckpt/safetensors.h"

#include <algorithm>
#include <optional>
#include <set>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>
#include <absl/strings/str_join.h>

#include "common/check.h"
#include "common/ckpt/header_scanner.h"
#include "common/signed_size.h"

namespace ravel::ckpt {
namespace {

constexpr size_t kMaxDimensions = 8;

void AppendJsonString(std::string_view text, std::string& out) {
  out.push_back('"');
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out.push_back('\\');
      out.push_back(c);
    } else if (static_cast<unsigned char>(c) < 0x20) {
      absl::StrAppendFormat(&out, "\\u%04x", static_cast<unsigned>(c));
    } else {
      out.push_back(c);
    }
  }
  out.push_back('"');
}

void AppendNumbers(const Shape& numbers, std::string& out) {
  absl::StrAppend(&out, "[", absl::StrJoin(numbers, ","), "]");
}

std::string ShardingInfo(const std::vector<SafetensorsEntry>& entries) {
  std::string info = "{";
  for (const SafetensorsEntry& entry : entries) {
    if (info.size() > 1) {
      info.push_back(',');
    }
    AppendJsonString(entry.key, info);
    info += ":{\"saved_offsets\":";
    AppendNumbers(entry.saved_offset, info);
    info.push_back('}');
  }
  info.push_back('}');
  return info;
}

std::string Finished(const std::vector<SafetensorsEntry>& entries, std::string_view metadata) {
  std::string json = "{";
  for (const SafetensorsEntry& entry : entries) {
    AppendJsonString(entry.key, json);
    absl::StrAppend(&json, ":{\"dtype\":\"", std::string(DTypeName(entry.dtype)), "\",\"shape\":");
    AppendNumbers(entry.shape, json);
    absl::StrAppend(&json, ",\"data_offsets\":[", entry.begin, ",", entry.end, "]},");
  }
  absl::StrAppend(&json, "\"__metadata__\":{", std::string(metadata), "}}");
  const int64_t total = RoundUp(8 + static_cast<int64_t>(json.size()), kSafetensorsHeaderAlignment);
  json.append(Size(total - 8) - json.size(), ' ');
  std::string header;
  header.reserve(Size(total));
  const uint64_t json_bytes = json.size();
  for (int byte = 0; byte < 8; ++byte) {
    header.push_back(static_cast<char>((json_bytes >> (8 * byte)) & 0xffu));
  }
  return header + json;
}

absl::Status KeyError(std::string_view key, std::string_view what) {
  return absl::InvalidArgumentError(
      absl::StrCat("safetensors header: key \"", std::string(key), "\": ", std::string(what)));
}

absl::StatusOr<Shape> ParseNumbers(HeaderScanner& scanner, size_t limit) {
  Shape numbers;
  RETURN_IF_ERROR(scanner.Expect('['));
  if (scanner.Take(']')) {
    return numbers;
  }
  do {
    if (numbers.size() == limit) {
      return scanner.Error(absl::StrCat("at most ", limit, " numbers"));
    }
    ASSIGN_OR_RETURN(const int64_t number, scanner.TakeCount());
    numbers.push_back(number);
  } while (scanner.Take(','));
  RETURN_IF_ERROR(scanner.Expect(']'));
  return numbers;
}

// Bytes of a tensor, or empty when they do not fit an int64.
std::optional<int64_t> TensorBytes(DType dtype, const Shape& shape) {
  int64_t bytes = DTypeBytes(dtype);
  bool overflow = false;
  bool empty = false;
  for (const int64_t size : shape) {
    empty = empty || size == 0;
    overflow = overflow || __builtin_mul_overflow(bytes, size, &bytes);
  }
  if (empty) {
    return 0;
  }
  return overflow ? std::nullopt : std::optional<int64_t>(bytes);
}

absl::StatusOr<SafetensorsEntry> ParseEntry(HeaderScanner& scanner, std::string key) {
  SafetensorsEntry entry;
  std::set<std::string> seen;
  Shape offsets;
  RETURN_IF_ERROR(scanner.Expect('{'));
  do {
    ASSIGN_OR_RETURN(const std::string field, scanner.TakeString());
    RETURN_IF_ERROR(scanner.Expect(':'));
    if (!seen.insert(field).second) {
      return KeyError(key, absl::StrCat("field \"", field, "\" appears twice"));
    }
    if (field == "dtype") {
      ASSIGN_OR_RETURN(const std::string name, scanner.TakeString());
      const std::optional<DType> dtype = ParseDType(name);
      if (!dtype) {
        return KeyError(key, absl::StrCat("dtype \"", name, "\" is not supported"));
      }
      entry.dtype = *dtype;
    } else if (field == "shape") {
      ASSIGN_OR_RETURN(entry.shape, ParseNumbers(scanner, kMaxDimensions));
    } else if (field == "data_offsets") {
      ASSIGN_OR_RETURN(offsets, ParseNumbers(scanner, 2));
    } else {
      return KeyError(
          key, absl::StrCat("unknown field \"", field, "\"; expected dtype, shape, data_offsets"));
    }
  } while (scanner.Take(','));
  RETURN_IF_ERROR(scanner.Expect('}'));
  if (seen.size() != 3 || offsets.size() != 2) {
    return KeyError(key, "expected dtype, shape and two data_offsets");
  }
  entry.begin = offsets[0];
  entry.end = offsets[1];
  const std::optional<int64_t> bytes = TensorBytes(entry.dtype, entry.shape);
  if (!bytes || entry.end < entry.begin || entry.end - entry.begin != *bytes) {
    return KeyError(key,
                    absl::StrCat("data_offsets [",
                                 entry.begin,
                                 ", ",
                                 entry.end,
                                 "] do not fit ",
                                 std::string(DTypeName(entry.dtype)),
                                 " ",
                                 ShapeText(entry.shape)));
  }
  entry.saved_offset.assign(entry.shape.size(), 0);
  entry.key = std::move(key);
  return entry;
}

absl::Status ParseMetadata(HeaderScanner& scanner, SafetensorsFile& file) {
  RETURN_IF_ERROR(scanner.Expect('{'));
  if (scanner.Take('}')) {
    return absl::OkStatus();
  }
  std::set<std::string> seen;
  do {
    ASSIGN_OR_RETURN(std::string name, scanner.TakeString());
    RETURN_IF_ERROR(scanner.Expect(':'));
    ASSIGN_OR_RETURN(std::string value, scanner.TakeString());
    if (!seen.insert(name).second) {
      return KeyError("__metadata__", absl::StrCat("\"", name, "\" appears twice"));
    }
    file.metadata.emplace_back(std::move(name), std::move(value));
  } while (scanner.Take(','));
  return scanner.Expect('}');
}

absl::Status CheckCover(const std::vector<SafetensorsEntry>& entries, int64_t data_bytes) {
  int64_t position = 0;
  for (const SafetensorsEntry& entry : entries) {
    if (entry.begin != position) {
      return KeyError(entry.key,
                      absl::StrCat("data begin at ",
                                   entry.begin,
                                   ", expected ",
                                   position,
                                   entry.begin > position ? " (a hole)" : " (an overlap)"));
    }
    position = entry.end;
  }
  if (position != data_bytes) {
    return absl::InvalidArgumentError(absl::StrCat("safetensors header: entries end at ",
                                                   position,
                                                   " but the file has ",
                                                   data_bytes,
                                                   " data bytes"));
  }
  return absl::OkStatus();
}

// The offsets of chunks in their tensors, as torch's writer states them.
absl::Status ApplyShardingInfo(std::string_view text, std::vector<SafetensorsEntry>& entries) {
  std::vector<SafetensorsEntry*> by_key;
  for (SafetensorsEntry& entry : entries) {
    by_key.push_back(&entry);
  }
  std::sort(
      by_key.begin(), by_key.end(), [](const auto* a, const auto* b) { return a->key < b->key; });
  HeaderScanner scanner(text);
  std::set<std::string> seen;
  RETURN_IF_ERROR(scanner.Expect('{'));
  if (!scanner.Take('}')) {
    do {
      ASSIGN_OR_RETURN(const std::string key, scanner.TakeString());
      RETURN_IF_ERROR(scanner.Expect(':'));
      RETURN_IF_ERROR(scanner.Expect('{'));
      ASSIGN_OR_RETURN(const std::string field, scanner.TakeString());
      RETURN_IF_ERROR(scanner.Expect(':'));
      ASSIGN_OR_RETURN(const Shape offset, ParseNumbers(scanner, kMaxDimensions));
      RETURN_IF_ERROR(scanner.Expect('}'));
      const auto found = std::lower_bound(
          by_key.begin(), by_key.end(), key, [](const auto* entry, const std::string& name) {
            return entry->key < name;
          });
      const bool known = found != by_key.end() && (*found)->key == key;
      if (!known || field != "saved_offsets" || !seen.insert(key).second ||
          offset.size() != (*found)->shape.size()) {
        return KeyError(key, "DCP_SHARDING_INFO does not fit the header");
      }
      (*found)->saved_offset = offset;
    } while (scanner.Take(','));
    RETURN_IF_ERROR(scanner.Expect('}'));
  }
  if (!scanner.AtEnd() || seen.size() != entries.size()) {
    return absl::InvalidArgumentError(
        "safetensors header: DCP_SHARDING_INFO does not list every key");
  }
  return absl::OkStatus();
}

absl::Status ParseEntries(HeaderScanner& scanner, SafetensorsFile& file) {
  std::set<std::string> keys;
  RETURN_IF_ERROR(scanner.Expect('{'));
  if (!scanner.Take('}')) {
    do {
      ASSIGN_OR_RETURN(std::string key, scanner.TakeString());
      RETURN_IF_ERROR(scanner.Expect(':'));
      if (!keys.insert(key).second) {
        return KeyError(key, "appears twice");
      }
      if (key == "__metadata__") {
        RETURN_IF_ERROR(ParseMetadata(scanner, file));
        continue;
      }
      ASSIGN_OR_RETURN(SafetensorsEntry entry, ParseEntry(scanner, std::move(key)));
      file.entries.push_back(std::move(entry));
    } while (scanner.Take(','));
    RETURN_IF_ERROR(scanner.Expect('}'));
  }
  return scanner.AtEnd() ? absl::OkStatus() : scanner.Error("only spaces after the closing brace");
}

}  // namespace

bool SafetensorsOrder(const SafetensorsEntry& a, const SafetensorsEntry& b) {
  const int64_t bytes_a = DTypeBytes(a.dtype);
  const int64_t bytes_b = DTypeBytes(b.dtype);
  return bytes_a != bytes_b ? bytes_a > bytes_b : a.key < b.key;
}

void PlaceSafetensorsEntries(std::vector<SafetensorsEntry>& entries) {
  int64_t position = 0;
  for (SafetensorsEntry& entry : entries) {
    entry.begin = position;
    position += ElementCount(entry.shape) * DTypeBytes(entry.dtype);
    entry.end = position;
  }
}

std::string SafetensorsHeader(const std::vector<SafetensorsEntry>& entries) {
  std::string metadata = "\"format\":\"pt\",\"DCP_VERSION\":\"1.0\",\"DCP_SHARDING_INFO\":";
  AppendJsonString(ShardingInfo(entries), metadata);
  return Finished(entries, metadata);
}

std::string SafetensorsExportHeader(const std::vector<SafetensorsEntry>& entries) {
  return Finished(entries, "\"format\":\"pt\"");
}

int64_t SafetensorsHeaderBytes(const std::vector<SafetensorsEntry>& entries) {
  return static_cast<int64_t>(SafetensorsHeader(entries).size());
}

absl::StatusOr<int64_t> SafetensorsJsonBytes(std::string_view first_8_bytes, int64_t file_bytes) {
  if (file_bytes < 8 || first_8_bytes.size() < 8) {
    return absl::InvalidArgumentError(absl::StrCat(
        "safetensors header: the file has ", file_bytes, " bytes, expected at least 8"));
  }
  uint64_t bytes = 0;
  for (size_t byte = 0; byte < 8; ++byte) {
    bytes |= static_cast<uint64_t>(static_cast<unsigned char>(first_8_bytes[byte])) << (8 * byte);
  }
  if (bytes < 2 || bytes > static_cast<uint64_t>(kMaxSafetensorsHeaderBytes)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "safetensors header: ", bytes, " bytes, expected 2 to ", kMaxSafetensorsHeaderBytes));
  }
  if (static_cast<int64_t>(bytes) > file_bytes - 8) {
    return absl::InvalidArgumentError(absl::StrCat(
        "safetensors header: ", bytes, " bytes, but the file ends after ", file_bytes - 8));
  }
  return static_cast<int64_t>(bytes);
}

absl::StatusOr<SafetensorsFile> ParseSafetensorsHeader(std::string_view header,
                                                       int64_t file_bytes) {
  ASSIGN_OR_RETURN(const int64_t json_bytes, SafetensorsJsonBytes(header.substr(0, 8), file_bytes));
  SafetensorsFile file;
  file.header_bytes = 8 + json_bytes;
  if (static_cast<int64_t>(header.size()) < file.header_bytes) {
    return absl::InvalidArgumentError("safetensors header: truncated");
  }
  const std::string_view json = header.substr(8, Size(json_bytes));
  if (json.front() != '{') {
    return absl::InvalidArgumentError("safetensors header: must begin with '{'");
  }
  HeaderScanner scanner(json);
  RETURN_IF_ERROR(Annotate(ParseEntries(scanner, file), "safetensors header"));
  std::sort(file.entries.begin(), file.entries.end(), [](const auto& a, const auto& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.end < b.end;
  });
  RETURN_IF_ERROR(CheckCover(file.entries, file_bytes - file.header_bytes));
  for (const auto& [name, value] : file.metadata) {
    if (name == "DCP_SHARDING_INFO") {
      RETURN_IF_ERROR(Annotate(ApplyShardingInfo(value, file.entries),
                               "safetensors header: DCP_SHARDING_INFO"));
    }
  }
  return file;
}

}  // namespace ravel::ckpt
