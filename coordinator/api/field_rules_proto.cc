// Applies the rules that stand in jobs.proto as field options, by reflection: fill in the default,
// check bounds or choices, make durations canonical, for each field of each nested message. A rule
// is thus written once, beside its field, and the check, the default, the error text and `ravelctl
// explain` all come from it.

#include "coordinator/api/field_rules_proto.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <vector>

#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <absl/strings/str_split.h>
#include <google/protobuf/descriptor.pb.h>

#include "common/check.h"
#include "common/name_suggestion.h"
#include "common/time_text.h"

namespace ravel {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

bool IsText(const FieldDescriptor& field) {
  return field.cpp_type() == FieldDescriptor::CPPTYPE_STRING;
}
bool IsWhole(const FieldDescriptor& field) {
  return field.cpp_type() != FieldDescriptor::CPPTYPE_DOUBLE &&
         field.cpp_type() != FieldDescriptor::CPPTYPE_FLOAT;
}

double NumberIn(const Message& message, const FieldDescriptor& field, int index) {
  const Reflection& access = *message.GetReflection();
  const bool list = field.is_repeated();
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return list ? access.GetRepeatedDouble(message, &field, index)
                  : access.GetDouble(message, &field);
    case FieldDescriptor::CPPTYPE_INT64:
      return static_cast<double>(list ? access.GetRepeatedInt64(message, &field, index)
                                      : access.GetInt64(message, &field));
    case FieldDescriptor::CPPTYPE_INT32:
      return list ? access.GetRepeatedInt32(message, &field, index)
                  : access.GetInt32(message, &field);
    default:
      CHECK(false);  // no other type of number has rules
      return 0;
  }
}

// Numbers of a list are separated by commas.
void SetPreset(Message& message, const FieldDescriptor& field, const std::string& preset) {
  const Reflection& access = *message.GetReflection();
  if (field.is_repeated()) {
    for (const absl::string_view part : absl::StrSplit(preset, ',')) {
      double number = 0;
      CHECK(absl::SimpleAtod(part, &number));
      access.AddDouble(&message, &field, number);
    }
    return;
  }
  double number = 0;
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_STRING:
      access.SetString(&message, &field, preset);
      return;
    case FieldDescriptor::CPPTYPE_DOUBLE:
      CHECK(absl::SimpleAtod(preset, &number));
      access.SetDouble(&message, &field, number);
      return;
    case FieldDescriptor::CPPTYPE_INT64:
      CHECK(absl::SimpleAtod(preset, &number));
      access.SetInt64(&message, &field, static_cast<int64_t>(number));
      return;
    case FieldDescriptor::CPPTYPE_BOOL:
      access.SetBool(&message, &field, preset == "true");
      return;
    default:
      CHECK(false);  // no other type has a default
  }
}

bool IsAbsent(const Message& message, const FieldDescriptor& field) {
  const Reflection& access = *message.GetReflection();
  if (field.is_repeated()) {
    return access.FieldSize(message, &field) == 0;
  }
  return !access.HasField(message, &field);  // without presence: has its type's zero
}

// "from 1 to 64", ">= 1", "above 0", "from 0 to below 1".
std::string Bounds(const v1::FieldRules& rules) {
  const bool low = rules.has_least() || rules.has_above();
  const bool high = rules.has_most() || rules.has_below();
  if (low && high) {
    return absl::StrCat("from ",
                        rules.has_above() ? "above " : "",
                        ShortestDigits(rules.has_above() ? rules.above() : rules.least()),
                        " to ",
                        rules.has_below() ? "below " : "",
                        ShortestDigits(rules.has_below() ? rules.below() : rules.most()));
  }
  if (low) {
    return rules.has_above() ? absl::StrCat("above ", ShortestDigits(rules.above()))
                             : absl::StrCat(">= ", ShortestDigits(rules.least()));
  }
  if (high) {
    return rules.has_below() ? absl::StrCat("below ", ShortestDigits(rules.below()))
                             : absl::StrCat("<= ", ShortestDigits(rules.most()));
  }
  return "";
}

bool Within(const v1::FieldRules& rules, double number) {
  return std::isfinite(number) && !(rules.has_least() && number < rules.least()) &&
         !(rules.has_most() && number > rules.most()) &&
         !(rules.has_above() && number <= rules.above()) &&
         !(rules.has_below() && number >= rules.below());
}

// Describes the values that this field accepts; "" when it accepts any.
std::string Expected(const FieldDescriptor& field, const v1::FieldRules& rules) {
  if (!rules.choices().empty()) {
    return absl::StrCat(rules.choices_size() > 1 ? "one of " : "",
                        absl::StrJoin(rules.choices(), ", "));
  }
  if (rules.text() == v1::FieldRules::DURATION) {
    return absl::StrCat(
        "a duration such as 90s, 20m or 14d, ",
        rules.longest().empty()
            ? absl::StrCat("of at least ", rules.shortest().empty() ? "0s" : rules.shortest())
            : absl::StrCat("from ", rules.shortest(), " to ", rules.longest()));
  }
  if (rules.text() == v1::FieldRules::SIZE) {
    return "a size such as 512MiB or 1GiB";
  }
  const std::string bounds = Bounds(rules);
  if (rules.entries() > 0) {
    return absl::StrCat(rules.entries(), " numbers ", bounds);
  }
  if (bounds.empty()) {
    return "";
  }
  return absl::StrCat(IsWhole(field) ? "a whole number " : "a number ", bounds);
}

// One message, its path, and who is told.
class Applier {
 public:
  Applier(Message& message, const std::string& path, const FieldFailure& fail)
      : message_(message), access_(*message.GetReflection()), path_(path), fail_(fail) {}
  void Run() {
    for (int i = 0; i < message_.GetDescriptor()->field_count(); ++i) {
      const FieldDescriptor& field = *message_.GetDescriptor()->field(i);
      if (field.is_map()) {
        continue;
      }
      if (field.cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
        Descend(field);
      } else {
        Check(field, RulesOf(field));
      }
    }
  }

 private:
  std::string At(const FieldDescriptor& field) const {
    return absl::StrCat(path_, path_.empty() ? "" : ".", field.json_name());
  }
  void Descend(const FieldDescriptor& field) {
    if (field.is_repeated()) {
      for (int i = 0; i < access_.FieldSize(message_, &field); ++i) {
        Message& entry = *access_.MutableRepeatedMessage(&message_, &field, i);
        ApplyFieldRules(entry, absl::StrCat(At(field), "[", i, "]"), fail_);
      }
    } else if (access_.HasField(message_, &field) || !RulesOf(field).may_be_absent()) {
      ApplyFieldRules(*access_.MutableMessage(&message_, &field), At(field), fail_);
    }
  }
  void Check(const FieldDescriptor& field, const v1::FieldRules& rules) {
    if (!rules.preset().empty() && IsAbsent(message_, field)) {
      SetPreset(message_, field, rules.preset());
    }
    if (IsText(field) && !field.is_repeated()) {
      CheckText(field, rules);
    } else if (!Bounds(rules).empty() || rules.entries() > 0) {
      CheckNumbers(field, rules);
    }
  }
  void CheckText(const FieldDescriptor& field, const v1::FieldRules& rules) {
    std::string text = access_.GetString(message_, &field);
    if (!rules.choices().empty()) {
      const std::vector<std::string> names(rules.choices().begin(), rules.choices().end());
      if (!text.empty() && std::find(names.begin(), names.end(), text) == names.end()) {
        const std::string near = SuggestName(text, names);
        fail_(At(field),
              absl::StrCat(Expected(field, rules),
                           near.empty() ? "" : absl::StrCat(" (did you mean '", near, "'?)")),
              QuotedOrNothing(text));
      }
    } else if (rules.text() == v1::FieldRules::DURATION && !text.empty()) {
      const absl::StatusOr<int64_t> duration = ParseDurationMs(text);
      const int64_t longest = DurationOf(rules.longest());
      if (!duration.ok() || *duration < DurationOf(rules.shortest()) ||
          *duration > (longest > 0 ? longest : kLongestMs)) {
        fail_(At(field), Expected(field, rules), QuotedOrNothing(text));
      } else {
        access_.SetString(&message_, &field, FormatDurationExact(*duration));
      }
    } else if (text == "auto" && rules.text() == v1::FieldRules::SIZE) {
      access_.SetString(&message_, &field, "");  // what the planner chooses
    } else if (rules.text() == v1::FieldRules::SIZE && !text.empty()) {
      const absl::StatusOr<int64_t> bytes = ParseBytes(text);
      if (!bytes.ok() || *bytes < 1) {
        fail_(At(field), Expected(field, rules), QuotedOrNothing(text));
      }
    }
  }
  void CheckNumbers(const FieldDescriptor& field, const v1::FieldRules& rules) {
    const int count = field.is_repeated() ? access_.FieldSize(message_, &field) : 1;
    bool good = rules.entries() == 0 || count == rules.entries();
    std::vector<std::string> got;
    for (int i = 0; i < count; ++i) {
      const double number = NumberIn(message_, field, i);
      good = good && Within(rules, number);
      got.push_back(ShortestDigits(number));
    }
    if (!good) {
      const std::string joined = absl::StrJoin(got, ", ");
      fail_(At(field),
            Expected(field, rules),
            field.is_repeated()         ? absl::StrCat("[", joined, "]")
            : IsAbsent(message_, field) ? "nothing"
                                        : joined);
    }
  }

  static constexpr int64_t kLongestMs = int64_t{10} * 365 * 24 * 3600 * 1000;

  Message& message_;
  const Reflection& access_;
  const std::string& path_;
  const FieldFailure& fail_;
};

}  // namespace

v1::FieldRules RulesOf(const FieldDescriptor& field) {
  // The options of a descriptor that was read from a file know no extensions: read them again.
  google::protobuf::FieldOptions options;
  CHECK(options.ParseFromString(field.options().SerializeAsString()));
  return options.GetExtension(v1::rules);
}

std::string DescribeRules(const FieldDescriptor& field) {
  const v1::FieldRules rules = RulesOf(field);
  const std::string expected = Expected(field, rules);
  return absl::StrCat(rules.preset().empty() ? "" : absl::StrCat("default ", rules.preset()),
                      rules.preset().empty() || expected.empty() ? "" : "; ",
                      expected);
}

void ApplyFieldRules(Message& message, const std::string& path, const FieldFailure& fail) {
  Applier(message, path, fail).Run();
}

int ChosenIndex(const Message& message, int field_number) {
  const FieldDescriptor& field = *message.GetDescriptor()->FindFieldByNumber(field_number);
  const v1::FieldRules rules = RulesOf(field);
  const std::string text = message.GetReflection()->GetString(message, &field);
  const auto found = std::find(rules.choices().begin(), rules.choices().end(), text);
  return found == rules.choices().end() ? 0 : static_cast<int>(found - rules.choices().begin());
}

int64_t DurationOf(const std::string& text) {
  return text.empty() ? 0 : ParseDurationMs(text).value_or(0);
}

int64_t SizeOf(const std::string& text) {
  return text.empty() ? 0 : ParseBytes(text).value_or(0);
}

std::string QuotedOrNothing(const std::string& text) {
  return text.empty() ? "nothing" : absl::StrCat("'", text, "'");
}

std::string ShortestDigits(double number) {
  char digits[40];
  if (number == std::floor(number) && std::abs(number) < 1e15) {
    return absl::StrCat(static_cast<int64_t>(number));
  }
  return std::string(digits, std::to_chars(digits, digits + sizeof digits, number).ptr);
}

}  // namespace ravel
