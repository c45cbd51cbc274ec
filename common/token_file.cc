// Token files as memory maps, and their writer. Ids of 2 or 4 bytes are read through one template;
// Read converts to int32. The map is shared and read-only, so ranks of one host share pages. The
// writer streams ids and publishes data before index: a reader that finds an index finds its data.

#include "common/token_file.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/check.h"
#include "common/megatron_index.h"
#include "common/token_check.h"

namespace ravel {
namespace {

// A whole file mapped read-only.
class Mapping {
 public:
  static absl::StatusOr<Mapping> Open(const std::string& path) {
    // Without waiting for the other end of a pipe: it is refused below.
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) {
      return ErrnoStatus(errno, path);
    }
    struct stat info {};
    Mapping mapping;
    absl::Status status;
    if (fstat(fd, &info) != 0) {
      status = ErrnoStatus(errno, path);
    } else if (!S_ISREG(info.st_mode)) {
      status = absl::InvalidArgumentError(absl::StrCat(path, ": expected a regular file"));
    } else if (info.st_size > 0) {
      mapping.size_ = static_cast<std::size_t>(info.st_size);
      void* const data = mmap(nullptr, mapping.size_, PROT_READ, MAP_SHARED, fd, 0);
      if (data == MAP_FAILED) {
        mapping.size_ = 0;
        status = ErrnoStatus(errno, absl::StrCat(path, ": mmap"));
      } else {
        mapping.data_ = static_cast<const uint8_t*>(data);
      }
    }
    close(fd);
    RETURN_IF_ERROR(status);
    return mapping;
  }
  Mapping() = default;
  Mapping(Mapping&& other) noexcept { *this = std::move(other); }
  Mapping& operator=(Mapping&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() {
    if (data_ != nullptr) {
      munmap(const_cast<uint8_t*>(data_), size_);
    }
  }
  std::span<const uint8_t> bytes() const { return {data_, size_}; }

 private:
  const uint8_t* data_ = nullptr;
  std::size_t size_ = 0;
};

template <typename Id>
class MappedTokenFile : public TokenFile {
 public:
  MappedTokenFile(Mapping mapping, std::vector<int64_t> document_offsets)
      : mapping_(std::move(mapping)),
        ids_(reinterpret_cast<const Id*>(mapping_.bytes().data())),
        tokens_(static_cast<int64_t>(mapping_.bytes().size() / sizeof(Id))),
        document_offsets_(std::move(document_offsets)) {}

  int64_t tokens() const override { return tokens_; }
  std::span<const int64_t> document_offsets() const override { return document_offsets_; }

  void Read(int64_t begin, std::span<int32_t> ids) const override {
    const int64_t count = static_cast<int64_t>(ids.size());
    CHECK(begin >= 0 && begin <= tokens_ && count <= tokens_ - begin);
    std::copy_n(ids_ + begin, count, ids.begin());
  }

  void Prefetch(int64_t begin, int64_t count) const override {
    CHECK(begin >= 0 && count >= 0 && begin <= tokens_ && count <= tokens_ - begin);
    if (count == 0) {
      return;
    }
    const std::size_t page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    const std::size_t first = static_cast<std::size_t>(begin) * sizeof(Id) / page * page;
    const std::size_t last = static_cast<std::size_t>(begin + count) * sizeof(Id);
    uint8_t* const data = const_cast<uint8_t*>(mapping_.bytes().data());
    (void)madvise(data + first, last - first, MADV_WILLNEED);  // only advice
  }

  int64_t MaxToken(int64_t begin, int64_t count) const override {
    CHECK(begin >= 0 && count >= 0 && begin <= tokens_ && count <= tokens_ - begin);
    using Unsigned = std::make_unsigned_t<Id>;  // a negative id counts as a huge one
    Unsigned largest = 0;
    for (int64_t i = begin; i < begin + count; ++i) {
      largest = std::max(largest, static_cast<Unsigned>(ids_[i]));
    }
    return static_cast<int64_t>(largest);
  }

 private:
  Mapping mapping_;
  const Id* ids_;
  int64_t tokens_;
  std::vector<int64_t> document_offsets_;
};

absl::StatusOr<std::unique_ptr<TokenFile>> OpenMegatron(const std::string& prefix) {
  const std::string index_path = prefix + ".idx";
  ASSIGN_OR_RETURN(const Mapping index_mapping, Mapping::Open(index_path));
  absl::StatusOr<MegatronIndex> index = ReadMegatronIndex(index_mapping.bytes());
  RETURN_IF_ERROR(Annotate(index.status(), index_path));
  ASSIGN_OR_RETURN(Mapping data, Mapping::Open(prefix + ".bin"));
  RETURN_IF_ERROR(CheckPairBytes(prefix,
                                 static_cast<int64_t>(data.bytes().size()),
                                 index->document_offsets.back() * index->id_bytes));
  if (index->id_bytes == 2) {
    return std::make_unique<MappedTokenFile<uint16_t>>(std::move(data),
                                                       std::move(index->document_offsets));
  }
  return std::make_unique<MappedTokenFile<int32_t>>(std::move(data),
                                                    std::move(index->document_offsets));
}

template <typename Id>
absl::StatusOr<std::unique_ptr<TokenFile>> OpenFlat(const std::string& path) {
  ASSIGN_OR_RETURN(Mapping mapping, Mapping::Open(path));
  RETURN_IF_ERROR(CheckFlatBytes(path, static_cast<int64_t>(mapping.bytes().size()), sizeof(Id)));
  return std::make_unique<MappedTokenFile<Id>>(std::move(mapping), std::vector<int64_t>());
}

}  // namespace

absl::StatusOr<std::unique_ptr<TokenFile>> TokenFile::Open(const std::string& path,
                                                           TokenFormat format) {
  switch (format) {
    case TokenFormat::kAuto:
      if (access((path + ".idx").c_str(), F_OK) != 0) {
        return MissingIndex(path);
      }
      return OpenMegatron(path);
    case TokenFormat::kMegatron:
      return OpenMegatron(path);
    case TokenFormat::kFlatU16:
      return OpenFlat<uint16_t>(path);
    case TokenFormat::kFlatU32:
      return OpenFlat<int32_t>(path);
  }
  return absl::InvalidArgumentError("unknown token format");
}

}  // namespace ravel
