#include "coordinator/api/job_limits_proto.h"

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>

#include "common/plain_text.h"
#include "common/time_text.h"

namespace ravel {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

constexpr int kMaxSizes = 4096;  // elastic.sizes: one per size that a range may give

// Walks a job and collects what is over a limit.
class LimitWalk {
 public:
  explicit LimitWalk(std::vector<JobViolation>& out) : out_(out) {}

  void Walk(const Message& message, const std::string& path) {
    const Reflection& reflection = *message.GetReflection();
    std::vector<const FieldDescriptor*> fields;
    reflection.ListFields(message, &fields);
    for (const FieldDescriptor* field : fields) {
      const std::string at = absl::StrCat(path, path.empty() ? "" : ".", field->json_name());
      if (field->is_map()) {
        WalkMap(message, *field, at);
      } else if (field->is_repeated()) {
        WalkList(message, *field, at);
      } else if (field->message_type() != nullptr) {
        Walk(reflection.GetMessage(message, field), at);
      } else if (field->cpp_type() == FieldDescriptor::CPPTYPE_STRING) {
        CheckText(reflection.GetString(message, field), at);
      }
    }
  }

 private:
  void WalkMap(const Message& message, const FieldDescriptor& field, const std::string& path) {
    const bool notes = field.name() == "annotations";  // have a limit for all together, and lines
    const Reflection& reflection = *message.GetReflection();
    for (int i = 0; i < reflection.FieldSize(message, &field); ++i) {
      const Message& pair = reflection.GetRepeatedMessage(message, &field, i);
      const auto text = [&pair](int number) {
        return pair.GetReflection()->GetString(pair,
                                               pair.GetDescriptor()->FindFieldByNumber(number));
      };
      CheckText(text(1), path + " (a key)", kMaxKeyBytes);
      if (!notes) {
        CheckText(text(2), path + " (a value)");
      }
    }
  }

  void WalkList(const Message& message, const FieldDescriptor& field, const std::string& path) {
    const Reflection& reflection = *message.GetReflection();
    const int count = reflection.FieldSize(message, &field);
    const int most = field.name() == "sizes" ? kMaxSizes : kMaxListEntries;
    if (count > most) {
      Fail(path, absl::StrCat("at most ", most, " entries"), absl::StrCat(count));
      return;
    }
    for (int i = 0; i < count; ++i) {
      const std::string at = absl::StrCat(path, "[", i, "]");
      if (field.message_type() != nullptr) {
        Walk(reflection.GetRepeatedMessage(message, &field, i), at);
      } else if (field.cpp_type() == FieldDescriptor::CPPTYPE_STRING) {
        CheckText(reflection.GetRepeatedString(message, &field, i), at);
      }
    }
  }

  void CheckText(const std::string& text,
                 const std::string& path,
                 int64_t most_bytes = kMaxFieldBytes) {
    if (static_cast<int64_t>(text.size()) > most_bytes) {
      Fail(path,
           absl::StrCat("at most ", FormatBytes(most_bytes)),
           FormatBytes(static_cast<int64_t>(text.size())));
    } else {
      CheckCharacters(text, path);
    }
  }

  void CheckCharacters(const std::string& text, const std::string& path) {
    if (HasControlText(text)) {
      Fail(path, "UTF-8 text without control characters", "a text with some");
    }
  }

  void Fail(const std::string& path, std::string expected, std::string got) {
    out_.push_back({path, 0, 0, std::move(expected), std::move(got)});
  }

  std::vector<JobViolation>& out_;
};

}  // namespace

std::vector<JobViolation> CheckJobLimits(const v1::TrainingJob& job) {
  std::vector<JobViolation> violations;
  LimitWalk(violations).Walk(job, "");
  const auto bytes = static_cast<int64_t>(job.ByteSizeLong());
  if (bytes > kMaxJobBytes) {
    violations.push_back({"spec",
                          0,
                          0,
                          absl::StrCat("a job of at most ", FormatBytes(kMaxJobBytes)),
                          FormatBytes(bytes)});
  }
  return violations;
}

absl::Status CheckPlainText(std::string_view field, std::string_view text, int64_t max_bytes) {
  const absl::string_view name(field.data(), field.size());
  if (static_cast<int64_t>(text.size()) > max_bytes) {
    return absl::InvalidArgumentError(absl::StrCat(name,
                                                   ": expected at most ",
                                                   FormatBytes(max_bytes),
                                                   ", got ",
                                                   FormatBytes(static_cast<int64_t>(text.size()))));
  }
  if (HasControlText(text)) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, ": expected UTF-8 text without control characters"));
  }
  return absl::OkStatus();
}

}  // namespace ravel
