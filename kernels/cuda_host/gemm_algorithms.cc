// The table of measured cuBLASLt algorithms and its file. The file is text: a line with the
// identity of device and library, a line per gemm, and an FNV-1a sum over all of it. Loading checks
// everything before it takes anything, so a damaged file changes nothing; saving writes beside the
// file and renames, so readers never see half a file. A measured choice is never replaced by a mere
// proposal: all ranks must use equal algorithms to get equal bits.

#include "kernels/cuda_host/gemm_algorithms.h"

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <vector>

#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>
#include <absl/strings/str_split.h>
#include <errno.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/dtype.h"
#include "common/status.h"

namespace ravel::kernels::cuda {
namespace {

constexpr char kTitle[] = "ravel-gemm-algorithms-2";  // on disk: a change is a new number
constexpr char kSum[] = "sum ";
constexpr int64_t kMostFileBytes = int64_t{16} << 20;

// FNV-1a: against damage, not against malice.
std::string SumOf(const std::string& text) {
  uint64_t hash = 0xCBF29CE484222325;
  for (const char character : text) {
    hash = (hash ^ static_cast<uint8_t>(character)) * 0x100000001B3;
  }
  return absl::StrFormat("%016x", hash);
}

std::string TypeName(int32_t dtype) {
  switch (static_cast<DType>(dtype)) {
    case DType::kF16:
      return "fp16";
    case DType::kBF16:
      return "bf16";
    case DType::kF8E4M3:
      return "e4m3";
    case DType::kF8E5M2:
      return "e5m2";
    case DType::kU8:
      return "e2m1";
    default:
      return "f32";
  }
}

// "bf16", or of codes "e5m2*e4m3", with "+scales4,5" where those of blocks have these forms and
// "+fast" where sums may be.
std::string InputName(const RavelCudaGemm& gemm) {
  const std::string a = TypeName(gemm.input_type);
  return gemm.b_type == 0
             ? a
             : absl::StrCat(
                   a,
                   "*",
                   TypeName(gemm.b_type),
                   gemm.a_form != 0 ? absl::StrCat("+scales", gemm.a_form, ",", gemm.b_form) : "",
                   gemm.fast_accumulation != 0 ? "+fast" : "");
}

// key, eight words, workspace, microseconds; or key, none.
bool ParseLine(const std::string& line, std::string* key, GemmChoice* choice) {
  const std::vector<std::string> words = absl::StrSplit(line, ' ');
  if (words.size() == 2 && !words[0].empty() && words[1] == "none") {
    *key = words[0];
    choice->none = true;
    return true;
  }
  if (words.size() != 11 || words[0].empty()) {
    return false;
  }
  *key = words[0];
  for (size_t i = 0; i < 8; ++i) {
    if (words[1 + i].size() != 16 ||
        !absl::SimpleHexAtoi(words[1 + i], &choice->algorithm.words[i])) {
      return false;
    }
  }
  return absl::SimpleAtoi(words[9], &choice->algorithm.workspace_bytes) &&
         absl::SimpleAtod(words[10], &choice->microseconds) && choice->microseconds >= 0.0;
}

}  // namespace

std::string GemmKey(const RavelCudaGemm& gemm) {
  return absl::StrFormat("%dx%dx%d-%c%c-%s-%s-b%d-s%d,%d,%d-a%d,%d,%d-m%d",
                         gemm.m,
                         gemm.n,
                         gemm.k,
                         gemm.transpose_a != 0 ? 't' : 'n',
                         gemm.transpose_b != 0 ? 't' : 'n',
                         InputName(gemm),
                         TypeName(gemm.output_type),
                         gemm.accumulate,
                         gemm.a_stride,
                         gemm.b_stride,
                         gemm.c_stride,
                         gemm.a_align,
                         gemm.b_align,
                         gemm.c_align,
                         gemm.multiprocessors);
}

RavelCudaGemm GemmOfPart(const RavelCudaGemm& gemm, const GemmPart& part) {
  if (!part.present()) {
    return gemm;
  }
  RavelCudaGemm cut = gemm;
  cut.m = part.rows;
  cut.n = part.columns;
  cut.a_stride = gemm.transpose_a != 0 ? cut.m : cut.k;
  cut.b_stride = gemm.transpose_b != 0 ? cut.k : cut.n;
  cut.c_stride = cut.n;
  constexpr int64_t kMost = 16;
  const auto align = [](int64_t stride, int32_t dtype, int32_t known) {
    const int64_t bytes = DTypeBytes(static_cast<DType>(dtype));
    return static_cast<int32_t>(stride * bytes % kMost == 0 && known >= kMost ? kMost : bytes);
  };
  const int32_t b_type = gemm.b_type != 0 ? gemm.b_type : gemm.input_type;
  cut.a_align = align(cut.a_stride, gemm.input_type, gemm.a_align);
  cut.b_align = align(cut.b_stride, b_type, gemm.b_align);
  cut.c_align = align(cut.c_stride, gemm.output_type, gemm.c_align);
  return cut;
}

std::optional<GemmChoice> GemmAlgorithms::Find(const std::string& key) const {
  const MutexLock lock(mutex_);
  const auto found = choices_.find(key);
  return found == choices_.end() ? std::nullopt : std::optional<GemmChoice>(found->second);
}

void GemmAlgorithms::Set(const std::string& key, const GemmChoice& choice) {
  const MutexLock lock(mutex_);
  if (choice.microseconds > 0.0) {
    choices_.insert_or_assign(key, choice);
  } else {
    choices_.emplace(key, choice);
  }
}

void GemmAlgorithms::Put(const std::string& key, const GemmChoice& choice) {
  const MutexLock lock(mutex_);
  choices_.insert_or_assign(key, choice);
}

void GemmAlgorithms::ComputeInParts(const std::string& whole_key) {
  const MutexLock lock(mutex_);
  in_parts_.insert(whole_key);
}

bool GemmAlgorithms::ComputesInParts(const std::string& whole_key) const {
  const MutexLock lock(mutex_);
  return in_parts_.contains(whole_key);
}

std::map<std::string, GemmChoice> GemmAlgorithms::choices() const {
  const MutexLock lock(mutex_);
  return choices_;
}

size_t GemmAlgorithms::size() const {
  const MutexLock lock(mutex_);
  return choices_.size();
}

std::string GemmAlgorithms::FileName() const {
  return absl::StrCat("gemm-", SumOf(absl::StrCat(kTitle, " ", identity_)), ".txt");
}

std::string GemmAlgorithms::ToText() const {
  std::string text = absl::StrCat(kTitle, " ", identity_, "\n");
  for (const auto& [key, choice] : choices()) {
    absl::StrAppend(&text, key);
    if (choice.none) {
      absl::StrAppend(&text, " none\n");
      continue;
    }
    for (const uint64_t word : choice.algorithm.words) {
      absl::StrAppend(&text, absl::StrFormat(" %016x", word));
    }
    absl::StrAppend(
        &text,
        absl::StrFormat(" %d %.3f\n", choice.algorithm.workspace_bytes, choice.microseconds));
  }
  return absl::StrCat(text, kSum, SumOf(text), "\n");
}

absl::Status GemmAlgorithms::AddText(const std::string& text, const std::string& source) {
  const std::string expected = absl::StrCat(kTitle, " ", identity_);
  const std::vector<std::string> lines = absl::StrSplit(text, '\n');
  if (lines.front() != expected) {
    constexpr size_t kShown = 200;
    return absl::FailedPreconditionError(absl::StrCat(source,
                                                      ": algorithms of '",
                                                      lines.front().substr(0, kShown),
                                                      "', this process needs '",
                                                      expected,
                                                      "'"));
  }
  const auto wrong = [&](size_t line, const char* what) {
    return absl::InvalidArgumentError(absl::StrCat(source, ":", line + 1, ": expected ", what));
  };
  std::map<std::string, GemmChoice> read;
  size_t index = 1;
  size_t summed = lines.front().size() + 1;
  for (; index < lines.size() && !lines[index].starts_with(kSum); ++index) {
    std::string key;
    GemmChoice choice;
    if (!ParseLine(lines[index], &key, &choice)) {
      return wrong(index,
                   "a gemm and either eight words of 16 hexadecimal digits, workspace bytes "
                   "and microseconds, or none");
    }
    read.insert_or_assign(key, choice);
    summed += lines[index].size() + 1;
  }
  if (index >= lines.size() ||
      text.substr(summed) != absl::StrCat(kSum, SumOf(text.substr(0, summed)), "\n")) {
    return wrong(index, "the sum of all lines before, and no more");
  }
  for (const auto& [key, choice] : read) {
    Set(key, choice);
  }
  return absl::OkStatus();
}

absl::Status GemmAlgorithms::Load(const std::string& path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file) {
    return absl::NotFoundError(absl::StrCat("no table of algorithms at ", path));
  }
  const auto bytes = static_cast<int64_t>(file.tellg());
  if (bytes < 0 || bytes > kMostFileBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": expected a file of at most ", kMostFileBytes, " bytes"));
  }
  std::string text(static_cast<size_t>(bytes), '\0');
  file.seekg(0);
  file.read(text.data(), static_cast<std::streamsize>(bytes));
  if (!file) {
    return absl::UnavailableError(absl::StrCat("cannot read ", path));
  }
  return AddText(text, path);
}

absl::Status GemmAlgorithms::Save(const std::string& path) const {
  const std::string text = ToText();
  std::string beside = absl::StrCat(path, ".new-XXXXXX");
  const int fd = mkstemp(beside.data());
  if (fd < 0) {
    return Annotate(ErrnoStatus(errno, beside), "cannot write");
  }
  size_t written = 0;
  absl::Status status;
  while (status.ok() && written < text.size()) {
    const ssize_t now = write(fd, text.data() + written, text.size() - written);
    if (now >= 0) {
      written += static_cast<size_t>(now);
    } else if (errno != EINTR) {
      status = Annotate(ErrnoStatus(errno, beside), "cannot write");
    }
  }
  constexpr mode_t kReadable = 0644;
  if (status.ok() && (fchmod(fd, kReadable) != 0 || fsync(fd) != 0)) {
    status = Annotate(ErrnoStatus(errno, beside), "cannot write");
  }
  close(fd);
  if (status.ok() && std::rename(beside.c_str(), path.c_str()) != 0) {
    status = Annotate(ErrnoStatus(errno, path), "cannot rename over it");
  }
  if (!status.ok()) {
    unlink(beside.c_str());
  }
  return status;
}

}  // namespace ravel::kernels::cuda
