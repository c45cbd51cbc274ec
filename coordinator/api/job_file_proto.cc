// Parses a job file against the descriptor of TrainingJob. The reader walks the YAML tree and the
// descriptor together, collects every violation with its position instead of stopping at the first,
// and suggests the nearest field name for an unknown one. Scalars are read by the field's type, not
// by YAML's guess: `no` in a text field is text. What ravelctl printed may be submitted again:
// fields that only a coordinator sets are passed over.

#include "coordinator/api/job_file_proto.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <deque>
#include <map>
#include <optional>
#include <set>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <google/protobuf/descriptor.h>
#include <google/protobuf/util/json_util.h>

#include "common/check.h"
#include "common/json.h"
#include "common/name_suggestion.h"
#include "common/plain_text.h"
#include "common/yaml.h"

namespace ravel {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

std::string Join(const std::string& path, const std::string& name) {
  return path.empty() ? name : absl::StrCat(path, ".", name);
}

// Names an unexpected node in an error message.
std::string Describe(const yaml::Node& node) {
  return node.kind == yaml::NodeKind::kScalar ? absl::StrCat("'", node.text, "'") : node.KindName();
}

template <typename Number>
std::optional<Number> ParseNumber(const std::string& text) {
  Number number{};
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  if (error != std::errc() || stop != end) {
    return std::nullopt;
  }
  return number;
}

// The dotted place of the nearest field called `name` below `root`, or "".
std::string PlaceOf(const Descriptor* root, const std::string& name) {
  std::deque<std::pair<const Descriptor*, std::string>> todo = {{root, ""}};
  while (!todo.empty()) {
    const auto [type, path] = todo.front();
    todo.pop_front();
    for (int i = 0; i < type->field_count(); ++i) {
      const FieldDescriptor* const field = type->field(i);
      if (field->is_map()) {
        continue;
      }
      if (field->json_name() == name) {
        return path;
      }
      if (field->message_type() != nullptr) {
        todo.emplace_back(field->message_type(), Join(path, field->json_name()));
      }
    }
  }
  return "";
}

// Fills messages from the YAML tree and collects everything that is wrong on the way.
class TreeReader {
 public:
  explicit TreeReader(ParsedJobFile& result) : result_(result) {}

  void ReadMessage(const yaml::Node& node, const std::string& path, Message& message) {
    if (node.kind == yaml::NodeKind::kNull && !path.empty()) {
      return;  // `optimizer:` with nothing below: all defaults
    }
    if (node.kind != yaml::NodeKind::kMapping) {
      Fail(path, node.position, "a mapping", Describe(node));
      return;
    }
    if (path.empty()) {
      printed_ = std::any_of(node.entries.begin(), node.entries.end(), [](const auto& entry) {
        return entry.name == kSchemaVersion;
      });
    }
    std::map<std::string, int> seen;  // name -> line
    for (const yaml::Entry& entry : node.entries) {
      const auto [first, is_new] = seen.emplace(entry.name, entry.position.line);
      const std::string field_path = Join(path, entry.name);
      if (!is_new) {
        Fail(field_path,
             entry.position,
             "each field once",
             absl::StrCat("it again (first on line ", first->second, ")"));
        continue;
      }
      const FieldDescriptor* const field = FindField(message.GetDescriptor(), entry.name);
      if (field == nullptr && path.empty() && printed_ && IsKnownToServerOnly(entry.name)) {
        continue;
      }
      if (field == nullptr) {
        FailUnknown(entry, field_path, message.GetDescriptor());
        continue;
      }
      result_.positions.push_back({field_path, entry.position.line, entry.position.column});
      ReadField(entry.value, field_path, field, message);
    }
  }

 private:
  void Fail(const std::string& path, yaml::Position at, std::string expected, std::string got) {
    result_.violations.push_back({path, at.line, at.column, std::move(expected), std::move(got)});
  }

  static const FieldDescriptor* FindField(const Descriptor* type, const std::string& name) {
    for (int i = 0; i < type->field_count(); ++i) {
      if (type->field(i)->json_name() == name) {
        return type->field(i);
      }
    }
    return nullptr;
  }

  void FailUnknown(const yaml::Entry& entry, const std::string& path, const Descriptor* type) {
    std::vector<std::string> names;
    for (int i = 0; i < type->field_count(); ++i) {
      names.push_back(type->field(i)->json_name());
    }
    std::string hint;
    const std::string near = SuggestName(entry.name, names);
    const std::string place = PlaceOf(v1::TrainingJob::descriptor(), entry.name);
    if (!near.empty()) {
      hint = absl::StrCat("a known field (did you mean '", near, "'?)");
    } else if (!place.empty()) {
      hint = absl::StrCat("a known field ('", entry.name, "' belongs in ", place, ")");
    } else {
      hint = absl::StrCat("one of ", absl::StrJoin(names, ", "));
    }
    Fail(path, entry.position, hint, absl::StrCat("'", entry.name, "'"));
  }

  void ReadField(const yaml::Node& node,
                 const std::string& path,
                 const FieldDescriptor* field,
                 Message& message) {
    if (field->is_map()) {
      ReadMap(node, path, field, message);
    } else if (field->is_repeated()) {
      ReadList(node, path, field, message);
    } else if (field->message_type() != nullptr) {
      ReadMessage(node, path, *message.GetReflection()->MutableMessage(&message, field));
    } else {
      ReadScalar(node, path, field, message);
    }
  }

  void ReadMap(const yaml::Node& node,
               const std::string& path,
               const FieldDescriptor* field,
               Message& message) {
    if (node.kind == yaml::NodeKind::kNull) {
      return;
    }
    if (node.kind != yaml::NodeKind::kMapping) {
      Fail(path, node.position, "a mapping of names to text", Describe(node));
      return;
    }
    const FieldDescriptor* const key = field->message_type()->FindFieldByNumber(1);
    const FieldDescriptor* const value = field->message_type()->FindFieldByNumber(2);
    std::set<std::string> seen;
    for (const yaml::Entry& entry : node.entries) {
      const std::string entry_path = Join(path, entry.name);
      result_.positions.push_back({entry_path, entry.position.line, entry.position.column});
      if (!seen.insert(entry.name).second) {
        Fail(entry_path, entry.position, "each key once", "it again");
        continue;
      }
      Message* const made = message.GetReflection()->AddMessage(&message, field);
      made->GetReflection()->SetString(made, key, entry.name);
      ReadScalar(entry.value, entry_path, value, *made);
    }
  }

  void ReadList(const yaml::Node& node,
                const std::string& path,
                const FieldDescriptor* field,
                Message& message) {
    if (node.kind != yaml::NodeKind::kSequence) {
      Fail(path, node.position, "a list", Describe(node));
      return;
    }
    for (std::size_t i = 0; i < node.elements.size(); ++i) {
      const yaml::Node& element = node.elements[i];
      const std::string element_path = absl::StrCat(path, "[", i, "]");
      result_.positions.push_back({element_path, element.position.line, element.position.column});
      if (field->message_type() != nullptr) {
        ReadMessage(element, element_path, *message.GetReflection()->AddMessage(&message, field));
      } else {
        ReadScalar(element, element_path, field, message);
      }
    }
  }

  // A scalar by the field's type: `no` in a string field is text, "120" in a number field is a
  // number (as in proto JSON).
  void ReadScalar(const yaml::Node& node,
                  const std::string& path,
                  const FieldDescriptor* field,
                  Message& message) {
    if (node.kind != yaml::NodeKind::kScalar) {
      Fail(path, node.position, ExpectedOf(field), Describe(node));
      return;
    }
    if (!StoreScalar(node, field, message)) {
      Fail(path, node.position, ExpectedOf(field), Describe(node));
    }
  }

  static std::string ExpectedOf(const FieldDescriptor* field) {
    switch (field->cpp_type()) {
      case FieldDescriptor::CPPTYPE_STRING:
        return "text";
      case FieldDescriptor::CPPTYPE_BOOL:
        return "true or false";
      case FieldDescriptor::CPPTYPE_DOUBLE:
      case FieldDescriptor::CPPTYPE_FLOAT:
        return "a number";
      case FieldDescriptor::CPPTYPE_INT32:
        return "a whole number of 32 bits";
      case FieldDescriptor::CPPTYPE_UINT32:
      case FieldDescriptor::CPPTYPE_UINT64:
        return "a whole number >= 0";
      default:
        return "a whole number";
    }
  }

  template <typename Number, typename Set, typename Add>
  static bool StoreNumber(const std::string& text,
                          const FieldDescriptor* field,
                          const Set& set,
                          const Add& add) {
    const std::optional<Number> number = ParseNumber<Number>(text);
    if (!number.has_value()) {
      return false;
    }
    field->is_repeated() ? add(*number) : set(*number);
    return true;
  }

  static bool StoreScalar(const yaml::Node& node, const FieldDescriptor* field, Message& message) {
    const Reflection& reflection = *message.GetReflection();
    Message* const to = &message;
    switch (field->cpp_type()) {
      case FieldDescriptor::CPPTYPE_STRING:
        field->is_repeated() ? reflection.AddString(to, field, node.text)
                             : reflection.SetString(to, field, node.text);
        return true;
      case FieldDescriptor::CPPTYPE_BOOL:
        if (node.text != "true" && node.text != "false") {
          return false;
        }
        reflection.SetBool(to, field, node.text == "true");
        return true;
      case FieldDescriptor::CPPTYPE_INT32:
        return StoreNumber<int32_t>(
            node.text,
            field,
            [&](int32_t number) { reflection.SetInt32(to, field, number); },
            [&](int32_t number) { reflection.AddInt32(to, field, number); });
      case FieldDescriptor::CPPTYPE_INT64:
        return StoreNumber<int64_t>(
            node.text,
            field,
            [&](int64_t number) { reflection.SetInt64(to, field, number); },
            [&](int64_t number) { reflection.AddInt64(to, field, number); });
      case FieldDescriptor::CPPTYPE_UINT64:
        return StoreNumber<uint64_t>(
            node.text,
            field,
            [&](uint64_t number) { reflection.SetUInt64(to, field, number); },
            [&](uint64_t number) { reflection.AddUInt64(to, field, number); });
      case FieldDescriptor::CPPTYPE_DOUBLE: {
        const std::optional<double> number = ParseNumber<double>(node.text);
        if (!number.has_value() || !std::isfinite(*number)) {
          return false;
        }
        field->is_repeated() ? reflection.AddDouble(to, field, *number)
                             : reflection.SetDouble(to, field, *number);
        return true;
      }
      default:
        CHECK_MSG(false, "jobs.proto gained a field type that job files cannot hold yet");
    }
    return false;
  }

  // True for names that `ravelctl get|describe -o yaml` prints but no job file sets: state, step,
  // uid, mesh, events...
  static bool IsKnownToServerOnly(const std::string& name) {
    return name == kSchemaVersion || name == "events" || name == "olderEvents" || name == "mesh" ||
           FindField(v1::Job::descriptor(), name) != nullptr;
  }

  static constexpr const char* kSchemaVersion = "schemaVersion";
  ParsedJobFile& result_;
  bool printed_ = false;  // the document was printed by ravelctl
};

json::Value Sorted(const json::Value& value) {
  if (value.is_array()) {
    json::Array sorted;
    for (const json::Value& element : value.AsArray()) {
      sorted.push_back(Sorted(element));
    }
    return json::Value(std::move(sorted));
  }
  if (!value.is_object()) {
    return value;
  }
  json::Object sorted;
  for (const json::Member& member : value.AsObject()) {
    sorted.push_back({member.name, Sorted(member.value)});
  }
  std::sort(sorted.begin(), sorted.end(), [](const json::Member& a, const json::Member& b) {
    return a.name < b.name;
  });
  return json::Value(std::move(sorted));
}

// "a.b[2].c" -> "a.b[2]" -> "a.b" -> "a" -> "".
std::string ParentPath(const std::string& path) {
  const std::size_t cut = path.find_last_of(".[");
  return cut == std::string::npos ? "" : path.substr(0, cut);
}

}  // namespace

std::string FormatViolation(const JobViolation& violation, std::string_view origin) {
  std::string out(origin);
  if (violation.line > 0) {
    absl::StrAppend(&out, out.empty() ? "line " : ":", violation.line, ":", violation.column);
  }
  if (!out.empty()) {
    out += ": ";
  }
  if (!violation.path.empty()) {
    absl::StrAppend(&out, violation.path, ": ");
  }
  if (!violation.expected.empty()) {
    absl::StrAppend(&out, "expected ", violation.expected);
  }
  if (!violation.got.empty()) {
    absl::StrAppend(&out, violation.expected.empty() ? "" : ", got ", violation.got);
  }
  return EscapeControlText(out);
}

v1::Violation ToProto(const JobViolation& violation) {
  v1::Violation out;
  out.set_path(violation.path);
  out.set_line(violation.line);
  out.set_column(violation.column);
  out.set_expected(violation.expected);
  out.set_got(violation.got);
  return out;
}

JobViolation FromProto(const v1::Violation& violation) {
  return {violation.path(),
          violation.line(),
          violation.column(),
          violation.expected(),
          violation.got()};
}

ParsedJobFile ParseJobFile(std::string_view text) {
  ParsedJobFile result;
  yaml::ParseError error;
  const absl::StatusOr<yaml::Node> root = yaml::Parse(text, &error);
  if (!root.ok()) {
    result.violations.push_back({"",
                                 error.position.line,
                                 error.position.column,
                                 "a YAML or JSON job file",
                                 absl::StrCat("an error: ", error.message)});
    return result;
  }
  TreeReader(result).ReadMessage(*root, "", result.job);
  return result;
}

void LocateViolations(const std::vector<FieldPosition>& positions,
                      std::vector<JobViolation>& violations) {
  std::map<std::string, const FieldPosition*> by_path;
  for (const FieldPosition& position : positions) {
    by_path.emplace(position.path, &position);
  }
  for (JobViolation& violation : violations) {
    std::string path = violation.path;
    while (violation.line == 0 && !path.empty()) {
      const auto found = by_path.find(path);
      if (found != by_path.end()) {
        violation.line = found->second->line;
        violation.column = found->second->column;
      }
      path = ParentPath(path);
    }
  }
  std::stable_sort(
      violations.begin(), violations.end(), [](const JobViolation& a, const JobViolation& b) {
        return std::pair(a.line, a.column) < std::pair(b.line, b.column);
      });
}

std::string CanonicalJson(const v1::TrainingJob& job) {
  std::string text;
  CHECK(google::protobuf::util::MessageToJsonString(job, &text).ok());
  const absl::StatusOr<json::Value> value = json::Parse(text);
  CHECK(value.ok());
  return json::Serialize(Sorted(*value));
}

}  // namespace ravel
