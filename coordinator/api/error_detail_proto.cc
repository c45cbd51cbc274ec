#include "coordinator/api/error_detail_proto.h"

#include <utility>

#include <absl/strings/str_cat.h>

namespace ravel::coordinator {
namespace {

constexpr size_t kMaxTextBytes = 512;  // of one part of one violation

}  // namespace

std::string CutMessage(std::string text, size_t max_bytes) {
  size_t cost = 0;
  size_t keep = 0;  // what leaves room for the dots
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    const bool starts = (byte & 0xC0) != 0x80;
    if (starts && cost + 3 <= max_bytes) {
      keep = i;
    }
    cost += byte < 0x20 || byte > 0x7E || byte == '%' ? 3 : 1;
    if (cost > max_bytes) {
      return text.substr(0, keep) + "...";
    }
  }
  return text;
}

v1::ErrorDetail MakeErrorDetail(const std::string& job,
                                const std::vector<JobViolation>& violations) {
  v1::ErrorDetail detail;
  detail.set_reason("InvalidJob");
  detail.set_job(CutMessage(job, 253));
  detail.set_more(static_cast<int64_t>(violations.size()));
  for (const JobViolation& violation : violations) {
    v1::Violation cut = ToProto(violation);
    cut.set_path(CutMessage(cut.path(), kMaxTextBytes));
    cut.set_expected(CutMessage(cut.expected(), kMaxTextBytes));
    cut.set_got(CutMessage(cut.got(), kMaxTextBytes));
    // A little more than its bytes: tag, length and the counter.
    if (detail.ByteSizeLong() + cut.ByteSizeLong() + 16 > kMaxDetailBytes) {
      break;
    }
    *detail.add_violations() = std::move(cut);
    detail.set_more(detail.more() - 1);
  }
  return detail;
}

std::string ViolationText(const std::vector<JobViolation>& violations) {
  std::string text;
  for (size_t i = 0; i < violations.size(); ++i) {
    const std::string one = CutMessage(FormatViolation(violations[i], ""), kMaxTextBytes);
    if (text.size() + one.size() + 32 > kMaxMessageBytes) {
      absl::StrAppend(&text, "; and ", violations.size() - i, " more");
      break;
    }
    absl::StrAppend(&text, text.empty() ? "" : "; ", one);
  }
  return text;
}

}  // namespace ravel::coordinator
