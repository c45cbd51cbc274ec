// Explains fields of the job file from the comments of jobs.proto. Compiled descriptors carry no
// comments, so the build embeds a descriptor set that does, and a pool of its own is made from it.
// Default and bounds come from the same field options that check a job, so the help cannot disagree
// with the check.

#include "coordinator/ctl/explain_proto.h"

#include <memory>
#include <vector>

#include <absl/strings/ascii.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_split.h>
#include <google/protobuf/descriptor.h>
#include <google/protobuf/descriptor.pb.h>

#include "common/check.h"
#include "common/name_suggestion.h"
#include "coordinator/api/field_rules_proto.h"
#include "coordinator/ctl/embedded_descriptors.h"

namespace ravel::ctl {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::DescriptorPool;
using google::protobuf::FieldDescriptor;

// jobs.proto with its comments; the descriptors compiled into the messages have none.
const DescriptorPool& Pool() {
  static const DescriptorPool* const pool = [] {
    google::protobuf::FileDescriptorSet files;
    CHECK(files.ParseFromArray(kEmbeddedDescriptors, static_cast<int>(kEmbeddedDescriptorsBytes)));
    auto* const made = new DescriptorPool;
    for (const auto& file : files.file()) {
      CHECK(made->BuildFile(file) != nullptr);
    }
    return made;
  }();
  return *pool;
}

template <typename Described>
std::string CommentOf(const Described& described) {
  google::protobuf::SourceLocation location;
  if (!described.GetSourceLocation(&location)) {
    return "";
  }
  std::vector<std::string> lines =
      absl::StrSplit(absl::StripAsciiWhitespace(location.leading_comments), '\n');
  std::string out;
  for (const std::string& line : lines) {
    absl::StrAppend(&out, out.empty() ? "" : " ", std::string(absl::StripAsciiWhitespace(line)));
  }
  return out;
}

std::string TypeOf(const FieldDescriptor& field) {
  if (field.is_map()) {
    return "mapping of text to text";
  }
  std::string type;
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_STRING:
      type = "text";
      break;
    case FieldDescriptor::CPPTYPE_BOOL:
      type = "true or false";
      break;
    case FieldDescriptor::CPPTYPE_DOUBLE:
    case FieldDescriptor::CPPTYPE_FLOAT:
      type = "number";
      break;
    case FieldDescriptor::CPPTYPE_MESSAGE:
      type = "group";
      break;
    default:
      type = "whole number";
  }
  return field.is_repeated() ? absl::StrCat("list of ", type) : type;
}

const FieldDescriptor* FindField(const Descriptor& type, const std::string& name) {
  for (int i = 0; i < type.field_count(); ++i) {
    if (type.field(i)->json_name() == name) {
      return type.field(i);
    }
  }
  return nullptr;
}

absl::Status Unknown(const Descriptor& type, const std::string& place, const std::string& name) {
  std::vector<std::string> names;
  for (int i = 0; i < type.field_count(); ++i) {
    names.push_back(type.field(i)->json_name());
  }
  const std::string near = SuggestName(name, names);
  return absl::NotFoundError(
      absl::StrCat("no field '",
                   name,
                   "' in ",
                   place.empty() ? "the job file" : place,
                   near.empty() ? "" : absl::StrCat("; did you mean '", near, "'?")));
}

std::string FieldsOf(const Descriptor& type) {
  std::string out = "\nFIELDS\n";
  for (int i = 0; i < type.field_count(); ++i) {
    const FieldDescriptor& field = *type.field(i);
    absl::StrAppend(&out, "  ", field.json_name(), "  <", TypeOf(field), ">\n");
    const std::string comment = CommentOf(field);
    if (!comment.empty()) {
      absl::StrAppend(&out, "      ", comment, "\n");
    }
    const std::string rules = DescribeRules(field);
    if (!rules.empty()) {
      absl::StrAppend(&out, "      (", rules, ")\n");
    }
  }
  return out;
}

}  // namespace

absl::StatusOr<std::string> ExplainField(const std::string& path) {
  const Descriptor* type = Pool().FindMessageTypeByName("ravel.v1.TrainingJob");
  CHECK(type != nullptr);
  std::vector<std::string> names = absl::StrSplit(path, '.', absl::SkipEmpty());
  const Descriptor* const spec = FindField(*type, "spec")->message_type();
  if (!names.empty() && FindField(*type, names[0]) == nullptr &&
      FindField(*spec, names[0]) != nullptr) {
    names.insert(names.begin(), "spec");
  }
  const FieldDescriptor* field = nullptr;
  std::string place;
  for (std::string name : names) {
    name = name.substr(0, name.find('['));
    const FieldDescriptor* const next = type == nullptr ? nullptr : FindField(*type, name);
    if (next == nullptr) {
      return type == nullptr
                 ? absl::NotFoundError(absl::StrCat(place, " has no fields, so no '", name, "'"))
                 : Unknown(*type, place, name);
    }
    field = next;
    type = field->is_map() ? nullptr : field->message_type();
    absl::StrAppend(&place, place.empty() ? "" : ".", name);
  }
  std::string out = absl::StrCat("FIELD  ",
                                 field == nullptr ? "(the job file)" : place,
                                 "  <",
                                 field == nullptr ? "group" : TypeOf(*field),
                                 ">\n");
  std::string comment = field == nullptr ? CommentOf(*type) : CommentOf(*field);
  if (comment.empty() && type != nullptr) {
    comment = CommentOf(*type);
  }
  if (!comment.empty()) {
    absl::StrAppend(&out, "  ", comment, "\n");
  }
  const std::string rules = field == nullptr ? "" : DescribeRules(*field);
  if (!rules.empty()) {
    absl::StrAppend(&out, "  (", rules, ")\n");
  }
  return type == nullptr ? out : out + FieldsOf(*type);
}

}  // namespace ravel::ctl
