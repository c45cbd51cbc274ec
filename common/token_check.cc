// Checks token files by reading them in blocks of fixed size. It exists beside TokenFile because
// mapped files are dangerous to check: a file that another process truncates raises SIGBUS, and one
// on a dead mount blocks the process; here both are errors. Files are opened without blocking, so a
// pipe is refused instead of waited for. Before each block the caller may give up.

#include "common/token_check.h"

#include <algorithm>
#include <cerrno>
#include <span>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/megatron_index.h"
#include "common/token_sample.h"

namespace ravel {
namespace {

constexpr int64_t kBlockEntries = int64_t{1} << 16;

// A regular file that is read where it is asked for.
class BlockReader {
 public:
  static absl::StatusOr<BlockReader> Open(const std::string& path) {
    // Without waiting for the other end of a pipe: it is refused below.
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) {
      return ErrnoStatus(errno, path);
    }
    BlockReader reader(fd);
    struct stat info {};
    if (fstat(fd, &info) != 0) {
      return ErrnoStatus(errno, path);
    }
    if (!S_ISREG(info.st_mode)) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": expected a regular file"));
    }
    reader.size_ = info.st_size;
    return reader;
  }
  BlockReader(BlockReader&& other) noexcept
      : fd_(std::exchange(other.fd_, -1)), size_(other.size_) {}
  BlockReader(const BlockReader&) = delete;
  BlockReader& operator=(const BlockReader&) = delete;
  BlockReader& operator=(BlockReader&&) = delete;
  ~BlockReader() {
    if (fd_ >= 0) {
      close(fd_);
    }
  }

  int64_t size() const { return size_; }

  // Fills `out` from `offset` on. Errors do not name the file.
  absl::Status Read(int64_t offset, std::span<uint8_t> out) const {
    std::size_t done = 0;
    while (done < out.size()) {
      const ssize_t count =
          pread(fd_, out.data() + done, out.size() - done, offset + static_cast<int64_t>(done));
      if (count < 0 && errno == EINTR) {
        continue;
      }
      if (count < 0) {
        return ErrnoStatus(errno, "read");
      }
      if (count == 0) {
        return absl::InvalidArgumentError(absl::StrCat("expected ",
                                                       size_,
                                                       " bytes, found its end after ",
                                                       offset + static_cast<int64_t>(done),
                                                       " (truncated while it was read?)"));
      }
      done += static_cast<std::size_t>(count);
    }
    return absl::OkStatus();
  }

 private:
  explicit BlockReader(int fd) : fd_(fd) {}

  int fd_ = -1;
  int64_t size_ = 0;
};

absl::Status StillWanted(const TokenCheckOptions& options) {
  return options.abandoned && options.abandoned()
             ? absl::CancelledError("nobody waits for the answer")
             : absl::OkStatus();
}

// Calls `visit(first, count)` for one block of entries after another.
template <typename Visit>
absl::Status ForEachBlock(uint64_t entries, const TokenCheckOptions& options, const Visit& visit) {
  for (int64_t first = 0; first < static_cast<int64_t>(entries); first += kBlockEntries) {
    RETURN_IF_ERROR(StillWanted(options));
    RETURN_IF_ERROR(visit(first, std::min(kBlockEntries, static_cast<int64_t>(entries) - first)));
  }
  return absl::OkStatus();
}

std::span<uint8_t> First(std::vector<uint8_t>& block, int64_t bytes) {
  return {block.data(), static_cast<std::size_t>(bytes)};
}

struct IndexFacts {
  int64_t id_bytes = 0;
  int64_t tokens = 0;
};

absl::StatusOr<IndexFacts> ReadIndex(const BlockReader& file, const TokenCheckOptions& options) {
  std::vector<uint8_t> lengths(kBlockEntries * 4);
  std::vector<uint8_t> wide(kBlockEntries * 8);  // pointers, then document entries
  const int64_t header_bytes = std::min<int64_t>(file.size(), kMegatronHeaderBytes);
  RETURN_IF_ERROR(file.Read(0, First(wide, header_bytes)));
  ASSIGN_OR_RETURN(const MegatronHeader header,
                   ReadMegatronHeader(First(wide, header_bytes), file.size()));
  MegatronIndexCheck check(header);
  const auto sequences = static_cast<int64_t>(header.sequences);
  const int64_t pointers_at = kMegatronHeaderBytes + sequences * 4;
  const auto add_sequences = [&](int64_t first, int64_t count) {
    RETURN_IF_ERROR(file.Read(kMegatronHeaderBytes + first * 4, First(lengths, count * 4)));
    RETURN_IF_ERROR(file.Read(pointers_at + first * 8, First(wide, count * 8)));
    return check.AddSequences(lengths.data(), wide.data(), static_cast<uint64_t>(count));
  };
  RETURN_IF_ERROR(ForEachBlock(header.sequences, options, add_sequences));
  const int64_t entries_at = pointers_at + sequences * 8;
  const auto add_documents = [&](int64_t first, int64_t count) {
    RETURN_IF_ERROR(file.Read(entries_at + first * 8, First(wide, count * 8)));
    return check.AddDocuments(wide.data(), static_cast<uint64_t>(count));
  };
  RETURN_IF_ERROR(ForEachBlock(header.document_entries, options, add_documents));
  RETURN_IF_ERROR(check.Finish());
  return IndexFacts{header.id_bytes, check.tokens()};
}

// The largest of the file's first ids; a negative one of a damaged file counts as a huge one.
template <typename Unsigned>
absl::StatusOr<int64_t> LargestId(const BlockReader& file,
                                  int64_t tokens,
                                  const TokenCheckOptions& options) {
  std::vector<Unsigned> ids(kBlockEntries);
  Unsigned largest = 0;
  const auto add = [&](int64_t first, int64_t count) {
    constexpr auto kIdBytes = static_cast<int64_t>(sizeof(Unsigned));
    RETURN_IF_ERROR(file.Read(
        first * kIdBytes,
        {reinterpret_cast<uint8_t*>(ids.data()), static_cast<std::size_t>(count * kIdBytes)}));
    largest = std::max(largest, *std::max_element(ids.begin(), ids.begin() + count));
    return absl::OkStatus();
  };
  RETURN_IF_ERROR(ForEachBlock(static_cast<uint64_t>(tokens), options, add));
  return static_cast<int64_t>(largest);
}

template <typename Unsigned>
absl::StatusOr<std::string> SampleDigest(const BlockReader& file,
                                         int64_t tokens,
                                         const TokenCheckOptions& options) {
  return TokenSampleDigest(tokens, [&](int64_t begin, std::span<int32_t> ids) -> absl::Status {
    RETURN_IF_ERROR(StillWanted(options));
    std::vector<Unsigned> stored(ids.size());
    RETURN_IF_ERROR(
        file.Read(begin * static_cast<int64_t>(sizeof(Unsigned)),
                  {reinterpret_cast<uint8_t*>(stored.data()), stored.size() * sizeof(Unsigned)}));
    std::transform(stored.begin(), stored.end(), ids.begin(), [](Unsigned id) {
      return static_cast<int32_t>(id);
    });
    return absl::OkStatus();
  });
}

absl::StatusOr<TokenFileFacts> ReadIds(const BlockReader& data,
                                       int64_t id_bytes,
                                       const TokenCheckOptions& options) {
  TokenFileFacts facts{.tokens = data.size() / id_bytes};
  const int64_t scanned = std::min(facts.tokens, options.scanned_tokens);
  ASSIGN_OR_RETURN(facts.largest_id,
                   id_bytes == 2 ? LargestId<uint16_t>(data, scanned, options)
                                 : LargestId<uint32_t>(data, scanned, options));
  if (options.sample) {
    ASSIGN_OR_RETURN(facts.sample_digest,
                     id_bytes == 2 ? SampleDigest<uint16_t>(data, facts.tokens, options)
                                   : SampleDigest<uint32_t>(data, facts.tokens, options));
  }
  return facts;
}

absl::StatusOr<TokenFileFacts> CheckMegatron(const std::string& prefix,
                                             const TokenCheckOptions& options) {
  ASSIGN_OR_RETURN(const BlockReader index_file, BlockReader::Open(prefix + ".idx"));
  absl::StatusOr<IndexFacts> index = ReadIndex(index_file, options);
  RETURN_IF_ERROR(Annotate(index.status(), prefix + ".idx"));
  ASSIGN_OR_RETURN(const BlockReader data, BlockReader::Open(prefix + ".bin"));
  RETURN_IF_ERROR(CheckPairBytes(prefix, data.size(), index->tokens * index->id_bytes));
  absl::StatusOr<TokenFileFacts> facts = ReadIds(data, index->id_bytes, options);
  RETURN_IF_ERROR(Annotate(facts.status(), prefix + ".bin"));
  return facts;
}

absl::StatusOr<TokenFileFacts> CheckFlat(const std::string& path,
                                         int64_t id_bytes,
                                         const TokenCheckOptions& options) {
  ASSIGN_OR_RETURN(const BlockReader data, BlockReader::Open(path));
  RETURN_IF_ERROR(CheckFlatBytes(path, data.size(), id_bytes));
  absl::StatusOr<TokenFileFacts> facts = ReadIds(data, id_bytes, options);
  RETURN_IF_ERROR(Annotate(facts.status(), path));
  return facts;
}

}  // namespace

absl::Status MissingIndex(const std::string& prefix) {
  return absl::NotFoundError(
      absl::StrCat(prefix,
                   ".idx: not found; expected the prefix of a Megatron .bin/.idx pair (flat "
                   "files need data.format: flat_u16 or flat_u32)"));
}

absl::Status CheckFlatBytes(const std::string& path, int64_t bytes, int64_t id_bytes) {
  return bytes % id_bytes == 0
             ? absl::OkStatus()
             : absl::InvalidArgumentError(absl::StrCat(path,
                                                       ": expected a multiple of ",
                                                       id_bytes,
                                                       " bytes, found ",
                                                       bytes,
                                                       " (truncated?)"));
}

absl::Status CheckPairBytes(const std::string& prefix, int64_t bytes, int64_t expected) {
  return bytes == expected
             ? absl::OkStatus()
             : absl::InvalidArgumentError(absl::StrCat(prefix,
                                                       ".bin: expected ",
                                                       expected,
                                                       " bytes, as ",
                                                       prefix,
                                                       ".idx says, found ",
                                                       bytes,
                                                       " (truncated, or of another index?)"));
}

absl::StatusOr<TokenFileFacts> CheckTokenFile(const std::string& path,
                                              TokenFormat format,
                                              const TokenCheckOptions& options) {
  switch (format) {
    case TokenFormat::kAuto:
      if (access((path + ".idx").c_str(), F_OK) != 0) {
        return MissingIndex(path);
      }
      return CheckMegatron(path, options);
    case TokenFormat::kMegatron:
      return CheckMegatron(path, options);
    case TokenFormat::kFlatU16:
      return CheckFlat(path, 2, options);
    case TokenFormat::kFlatU32:
      return CheckFlat(path, 4, options);
  }
  return absl::InvalidArgumentError("unknown token format");
}

}  // namespace ravel
