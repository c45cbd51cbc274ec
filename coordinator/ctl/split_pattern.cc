#include "coordinator/ctl/split_pattern.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <absl/strings/str_cat.h>
#include <pcre2.h>

#include "common/check.h"

namespace ravel::ctl {

const char kGpt2Pattern[] =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
const char kLlama3Pattern[] =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

namespace {

constexpr char kWhiteSpace[] =
    R"(\x09-\x0d\x20\x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000})";

// Writes \s and \S out: PCRE2 counts one character (U+180E) more than Unicode does.
std::string WithUnicodeSpaces(const std::string& pattern) {
  std::string out;
  int in_class = 0;
  for (std::size_t i = 0; i < pattern.size(); ++i) {
    const char c = pattern[i];
    if (c == '\\' && i + 1 < pattern.size()) {
      const char next = pattern[++i];
      if (next == 's') {
        absl::StrAppend(&out, in_class > 0 ? "" : "[", kWhiteSpace, in_class > 0 ? "" : "]");
      } else if (next == 'S' && in_class == 0) {
        absl::StrAppend(&out, "[^", kWhiteSpace, "]");
      } else {
        out += c;
        out += next;
      }
      continue;
    }
    if (c == '[' && in_class == 0) {
      in_class = 1;
    } else if (c == ']' && in_class > 0 && out.back() != '[' &&
               !(out.back() == '^' && out.size() > 1 && out[out.size() - 2] == '[')) {
      in_class = 0;
    }
    out += c;
  }
  return out;
}

// Known patterns have a few hundred bytes, and backtrack little. Others come with files from
// anywhere: one of 28 KB took minutes for a line of text.
constexpr std::size_t kMaxPatternBytes = 4096;
constexpr uint32_t kMatchLimit = 1'000'000;

std::string ErrorText(int code) {
  char text[256] = "";
  pcre2_get_error_message(code, reinterpret_cast<PCRE2_UCHAR*>(text), sizeof text);
  return text;
}

class Pcre2SplitPattern : public SplitPattern {
 public:
  explicit Pcre2SplitPattern(pcre2_code* code)
      : code_(code),
        match_(pcre2_match_data_create_from_pattern(code, nullptr)),
        context_(pcre2_match_context_create(nullptr)) {
    CHECK(match_ != nullptr && context_ != nullptr);
    pcre2_set_match_limit(context_, kMatchLimit);
  }
  ~Pcre2SplitPattern() override {
    pcre2_match_context_free(context_);
    pcre2_match_data_free(match_);
    pcre2_code_free(code_);
  }

  absl::Status Split(std::string_view text,
                     const std::function<void(std::string_view)>& piece) const override {
    const auto* const subject = reinterpret_cast<PCRE2_SPTR>(text.data());
    std::size_t done = 0;    // pieces were given up to here
    std::size_t search = 0;  // the next match is looked for from here
    while (search < text.size()) {
      const int result = pcre2_match(code_,
                                     subject,
                                     text.size(),
                                     search,
                                     PCRE2_NO_UTF_CHECK | PCRE2_NOTEMPTY,
                                     match_,
                                     context_);
      if (result == PCRE2_ERROR_NOMATCH) {
        break;
      }
      if (result < 0) {
        return absl::InvalidArgumentError(
            absl::StrCat("the pre-tokenizer's pattern failed: ", ErrorText(result)));
      }
      const PCRE2_SIZE* const range = pcre2_get_ovector_pointer(match_);
      if (range[0] > done) {
        piece(text.substr(done, range[0] - done));
      }
      piece(text.substr(range[0], range[1] - range[0]));
      done = range[1];
      search = range[1];
    }
    if (done < text.size()) {
      piece(text.substr(done));
    }
    return absl::OkStatus();
  }

 private:
  pcre2_code* const code_;
  pcre2_match_data* const match_;
  pcre2_match_context* const context_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<SplitPattern>> SplitPattern::Compile(const std::string& pattern) {
  if (pattern.size() > kMaxPatternBytes) {
    return absl::InvalidArgumentError(absl::StrCat("expected a regular expression of at most ",
                                                   kMaxPatternBytes,
                                                   " bytes, got ",
                                                   pattern.size()));
  }
  const std::string text = WithUnicodeSpaces(pattern);
  int error = 0;
  PCRE2_SIZE offset = 0;
  pcre2_code* const code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(text.data()),
                                         text.size(),
                                         PCRE2_UTF | PCRE2_UCP,
                                         &error,
                                         &offset,
                                         nullptr);
  if (code == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("expected a regular expression, got '", pattern, "': ", ErrorText(error)));
  }
  // Without the compiler (a machine that forbids it) matching is only slower.
  (void)pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);
  return std::make_unique<Pcre2SplitPattern>(code);
}

}  // namespace ravel::ctl
