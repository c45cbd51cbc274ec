#include "kernels/cuda/gemm_algorithms.h"

#include <cstdio>
#include <fstream>
#include <sstream>
#include <vector>

#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>
#include <absl/strings/str_split.h>

#include "common/dtype.h"

namespace ravel::kernels::cuda {
namespace {

constexpr char kTitle[] = "ravel-gemm-algorithms-1";  // on disk: a change is a new number

std::string TypeName(int32_t dtype) {
  return dtype == static_cast<int32_t>(DType::kBF16) ? "bf16" : "f32";
}

// key, eight words, workspace, microseconds.
bool ParseLine(const std::string& line, std::string* key, GemmChoice* choice) {
  const std::vector<std::string> words = absl::StrSplit(line, ' ');
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
                         TypeName(gemm.input_type),
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

size_t GemmAlgorithms::size() const {
  const MutexLock lock(mutex_);
  return choices_.size();
}

std::string GemmAlgorithms::ToText() const {
  const MutexLock lock(mutex_);
  std::string text = absl::StrCat(kTitle, " ", identity_, "\n");
  for (const auto& [key, choice] : choices_) {
    absl::StrAppend(&text, key);
    for (const uint64_t word : choice.algorithm.words) {
      absl::StrAppend(&text, absl::StrFormat(" %016x", word));
    }
    absl::StrAppend(
        &text,
        absl::StrFormat(" %d %.3f\n", choice.algorithm.workspace_bytes, choice.microseconds));
  }
  return text;
}

absl::Status GemmAlgorithms::AddText(const std::string& text, const std::string& source) {
  std::istringstream lines(text);
  std::string line;
  std::getline(lines, line);
  const std::string expected = absl::StrCat(kTitle, " ", identity_);
  if (line != expected) {
    return absl::FailedPreconditionError(
        absl::StrCat(source, ": algorithms of '", line, "', this process needs '", expected, "'"));
  }
  std::map<std::string, GemmChoice> read;
  for (int number = 2; std::getline(lines, line); ++number) {
    std::string key;
    GemmChoice choice;
    if (!ParseLine(line, &key, &choice)) {
      return absl::InvalidArgumentError(absl::StrCat(
          source,
          ":",
          number,
          ": expected a product, eight words of 16 hexadecimal digits, workspace bytes and "
          "microseconds"));
    }
    read.insert_or_assign(key, choice);
  }
  for (const auto& [key, choice] : read) {
    Set(key, choice);
  }
  return absl::OkStatus();
}

absl::Status GemmAlgorithms::Load(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    return absl::NotFoundError(absl::StrCat("no table of algorithms at ", path));
  }
  std::ostringstream text;
  text << file.rdbuf();
  return AddText(text.str(), path);
}

absl::Status GemmAlgorithms::Save(const std::string& path) const {
  const std::string beside = absl::StrCat(path, ".new");
  {
    std::ofstream file(beside, std::ios::binary | std::ios::trunc);
    file << ToText();
    file.flush();
    if (!file) {
      return absl::UnavailableError(absl::StrCat("cannot write ", beside));
    }
  }
  if (std::rename(beside.c_str(), path.c_str()) != 0) {
    return absl::UnavailableError(absl::StrCat("cannot rename ", beside, " to ", path));
  }
  return absl::OkStatus();
}

}  // namespace ravel::kernels::cuda
