#include "coordinator/ctl/document_proto.h"

#include <cstdint>
#include <string>
#include <utility>

#include <absl/strings/numbers.h>
#include <google/protobuf/descriptor.h>
#include <google/protobuf/util/json_util.h>

#include "common/check.h"

namespace ravel::ctl {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;

constexpr int64_t kExactInDouble = int64_t{1} << 53;

json::Value Numbers(const json::Value& value, const Descriptor& type);

json::Value NumberOf(const json::Value& value, const FieldDescriptor& field) {
  const bool wide = field.cpp_type() == FieldDescriptor::CPPTYPE_INT64 ||
                    field.cpp_type() == FieldDescriptor::CPPTYPE_UINT64;
  int64_t number = 0;
  if (wide && value.is_string() && absl::SimpleAtoi(value.AsString(), &number) &&
      number >= -kExactInDouble && number <= kExactInDouble) {
    return json::Value(number);
  }
  return field.message_type() != nullptr && !field.is_map() ? Numbers(value, *field.message_type())
                                                            : value;
}

json::Value Numbers(const json::Value& value, const Descriptor& type) {
  if (!value.is_object()) {
    return value;
  }
  json::Object out;
  for (const json::Member& member : value.AsObject()) {
    const FieldDescriptor* field = nullptr;
    for (int i = 0; i < type.field_count() && field == nullptr; ++i) {
      field = type.field(i)->json_name() == member.name ? type.field(i) : nullptr;
    }
    CHECK(field != nullptr);
    if (!field->is_repeated() || !member.value.is_array()) {
      out.push_back({member.name, NumberOf(member.value, *field)});
      continue;
    }
    json::Array elements;
    for (const json::Value& element : member.value.AsArray()) {
      elements.push_back(NumberOf(element, *field));
    }
    out.push_back({member.name, json::Value(std::move(elements))});
  }
  return json::Value(std::move(out));
}

}  // namespace

json::Value ToDocument(const google::protobuf::Message& message) {
  google::protobuf::util::JsonPrintOptions options;
  options.always_print_primitive_fields = true;
  std::string text;
  CHECK(google::protobuf::util::MessageToJsonString(message, &text, options).ok());
  const absl::StatusOr<json::Value> value = json::Parse(text);
  CHECK(value.ok());
  return Numbers(*value, *message.GetDescriptor());
}

json::Value JobDocument(const v1::Job& job) {
  json::Object out;
  out.push_back({"apiVersion", "ravel/v1"});
  out.push_back({"kind", "TrainingJob"});
  const json::Value document = ToDocument(job);
  for (const json::Member& member : document.AsObject()) {
    out.push_back(member);
  }
  return json::Value(std::move(out));
}

}  // namespace ravel::ctl
