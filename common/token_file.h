#pragma once

// Token files: Megatron .bin/.idx pairs and flat uint16/uint32 arrays, memory-mapped.

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "common/status.h"

namespace ravel {

enum class TokenFormat { kAuto, kMegatron, kFlatU16, kFlatU32 };

// One token file as one stream of ids (documents one after another, as stored). Thread-safe after
// Open.
class TokenFile {
 public:
  // Opens PREFIX.bin + PREFIX.idx (kMegatron; kAuto when PREFIX.idx exists), or the flat file at
  // `path`. Checks magic, version, dtype, sizes of both files and every document extent; errors
  // name the file and what was expected.
  static absl::StatusOr<std::unique_ptr<TokenFile>> Open(const std::string& path,
                                                         TokenFormat format);
  virtual ~TokenFile() = default;

  virtual int64_t tokens() const = 0;
  // Starts of documents (first is 0), and the end; empty for flat files.
  virtual std::span<const int64_t> document_offsets() const = 0;
  // ids[i] = token (begin + i). Range must lie inside [0, tokens()).
  virtual void Read(int64_t begin, std::span<int32_t> ids) const = 0;
  // Asks the kernel to bring a range in.
  virtual void Prefetch(int64_t begin, int64_t count) const = 0;
  // Largest id in [begin, begin + count); a negative id of a damaged file counts as a huge one.
  virtual int64_t MaxToken(int64_t begin, int64_t count) const = 0;
};

// Writes a Megatron pair: document by document, then Finish. The files appear under their names
// only after Finish.
class MegatronWriter {
 public:
  // uint16 ids if vocabulary <= 65535, else int32 (Megatron's codes 8 and 4).
  static absl::StatusOr<std::unique_ptr<MegatronWriter>> Create(const std::string& prefix,
                                                                int64_t vocabulary);
  virtual ~MegatronWriter() = default;
  virtual absl::Status AddDocument(std::span<const int32_t> ids) = 0;
  virtual absl::Status Finish() = 0;
};

}  // namespace ravel
