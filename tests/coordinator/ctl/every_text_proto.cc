#include "tests/coordinator/ctl/every_text_proto.h"

namespace ravel::testing {

using google::protobuf::FieldDescriptor;
using google::protobuf::Reflection;

void SetEveryText(google::protobuf::Message& message, const std::string& text, int depth) {
  constexpr int kDeepest = 4;
  const Reflection& reflection = *message.GetReflection();
  for (int i = 0; i < message.GetDescriptor()->field_count(); ++i) {
    const FieldDescriptor* const field = message.GetDescriptor()->field(i);
    const bool inner = field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE && depth < kDeepest;
    if (field->type() == FieldDescriptor::TYPE_STRING && field->is_repeated()) {
      reflection.AddString(&message, field, text);
    } else if (field->type() == FieldDescriptor::TYPE_STRING) {
      reflection.SetString(&message, field, text);
    } else if (inner && field->is_repeated()) {
      SetEveryText(*reflection.AddMessage(&message, field), text, depth + 1);
    } else if (inner) {
      SetEveryText(*reflection.MutableMessage(&message, field), text, depth + 1);
    }
  }
}

}  // namespace ravel::testing
