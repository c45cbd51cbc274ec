#include "tests/testing/fuzz_proto.h"

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

#include <google/protobuf/descriptor.h>
#include <google/protobuf/stubs/logging.h>

#include "common/utf8.h"

namespace ravel::testing {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

constexpr int kMostDepth = 8;

double HostileReal(FuzzRandom& random) {
  constexpr std::array kReals = {0.0,
                                 -0.0,
                                 1.0,
                                 -1.0,
                                 0.5,
                                 1e-320,
                                 1e300,
                                 -1e300,
                                 9.3e18,
                                 std::numeric_limits<double>::infinity(),
                                 -std::numeric_limits<double>::infinity(),
                                 std::numeric_limits<double>::quiet_NaN()};
  return kReals[random.Below(kReals.size())];
}

// One draw of messages over a tree of fields.
class MessageChanger {
 public:
  MessageChanger(const std::vector<std::string>& words, FuzzRandom& random)
      : words_(words), random_(random) {}

  void Change(Message& message, int depth) {
    const auto* descriptor = message.GetDescriptor();
    if (descriptor->field_count() == 0) {
      return;
    }
    const size_t changes = 1 + random_.Below(depth == 0 ? 4 : 2);
    for (size_t i = 0; i < changes; ++i) {
      const FieldDescriptor* const field =
          descriptor->field(static_cast<int>(random_.Below(descriptor->field_count())));
      if (random_.OneIn(8)) {
        message.GetReflection()->ClearField(&message, field);
      } else if (field->is_repeated()) {
        ChangeRepeated(message, *field, depth);
      } else {
        SetOne(message, *field, depth);
      }
    }
  }

 private:
  void ChangeRepeated(Message& message, const FieldDescriptor& field, int depth) {
    const Reflection& reflection = *message.GetReflection();
    const int size = reflection.FieldSize(message, &field);
    if (size > 0 && random_.OneIn(4)) {
      return reflection.RemoveLast(&message, &field);
    }
    if (size > 1 && random_.OneIn(4)) {
      return reflection.SwapElements(&message, &field, 0, size - 1);
    }
    const bool is_message = field.cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE;
    if (is_message && size > 0 && random_.OneIn(2)) {
      Message* const element = reflection.MutableRepeatedMessage(
          &message, &field, static_cast<int>(random_.Below(static_cast<size_t>(size))));
      return Deeper(*element, depth);
    }
    const size_t more = random_.OneIn(32) ? 1 + random_.Below(3000) : 1 + random_.Below(2);
    for (size_t i = 0; i < more; ++i) {
      AddOne(message, field, depth);
    }
  }

  void Deeper(Message& message, int depth) {
    if (depth < kMostDepth) {
      Change(message, depth + 1);
    }
  }

  std::string Text(const FieldDescriptor& field, const std::string& before) {
    if (!words_.empty() && random_.OneIn(3)) {
      return words_[random_.Below(words_.size())];
    }
    std::string text = !before.empty() && random_.OneIn(2)
                           ? MutateInput(FuzzForm::kBytes, {before}, random_)
                           : HostileText(random_);
    // A message with other text is not parsed at all.
    if (field.type() == FieldDescriptor::TYPE_STRING && !random_.OneIn(16)) {
      return ReplaceInvalidUtf8(text);
    }
    if (field.type() == FieldDescriptor::TYPE_BYTES && random_.OneIn(2)) {
      text.push_back(static_cast<char>(random_.Next()));
    }
    return text;
  }

  int EnumNumber(const FieldDescriptor& field) {
    const auto& type = *field.enum_type();
    return random_.OneIn(2)
               ? static_cast<int>(HostileNumber(random_))
               : type.value(static_cast<int>(random_.Below(type.value_count())))->number();
  }

  void SetOne(Message& message, const FieldDescriptor& field, int depth) {
    const Reflection& reflection = *message.GetReflection();
    const int64_t number = HostileNumber(random_);
    switch (field.cpp_type()) {
      case FieldDescriptor::CPPTYPE_INT32:
        return reflection.SetInt32(&message, &field, static_cast<int32_t>(number));
      case FieldDescriptor::CPPTYPE_INT64:
        return reflection.SetInt64(&message, &field, number);
      case FieldDescriptor::CPPTYPE_UINT32:
        return reflection.SetUInt32(&message, &field, static_cast<uint32_t>(number));
      case FieldDescriptor::CPPTYPE_UINT64:
        return reflection.SetUInt64(&message, &field, static_cast<uint64_t>(number));
      case FieldDescriptor::CPPTYPE_DOUBLE:
        return reflection.SetDouble(&message, &field, HostileReal(random_));
      case FieldDescriptor::CPPTYPE_FLOAT:
        return reflection.SetFloat(
            &message, &field, static_cast<float>(std::clamp(HostileReal(random_), -3e38, 3e38)));
      case FieldDescriptor::CPPTYPE_BOOL:
        return reflection.SetBool(&message, &field, random_.OneIn(2));
      case FieldDescriptor::CPPTYPE_ENUM:
        return reflection.SetEnumValue(&message, &field, EnumNumber(field));
      case FieldDescriptor::CPPTYPE_STRING:
        return reflection.SetString(
            &message, &field, Text(field, reflection.GetString(message, &field)));
      case FieldDescriptor::CPPTYPE_MESSAGE:
        return Deeper(*reflection.MutableMessage(&message, &field), depth);
    }
  }

  void AddOne(Message& message, const FieldDescriptor& field, int depth) {
    const Reflection& reflection = *message.GetReflection();
    const int64_t number = HostileNumber(random_);
    switch (field.cpp_type()) {
      case FieldDescriptor::CPPTYPE_INT32:
        return reflection.AddInt32(&message, &field, static_cast<int32_t>(number));
      case FieldDescriptor::CPPTYPE_INT64:
        return reflection.AddInt64(&message, &field, number);
      case FieldDescriptor::CPPTYPE_UINT32:
        return reflection.AddUInt32(&message, &field, static_cast<uint32_t>(number));
      case FieldDescriptor::CPPTYPE_UINT64:
        return reflection.AddUInt64(&message, &field, static_cast<uint64_t>(number));
      case FieldDescriptor::CPPTYPE_DOUBLE:
        return reflection.AddDouble(&message, &field, HostileReal(random_));
      case FieldDescriptor::CPPTYPE_FLOAT:
        return reflection.AddFloat(&message, &field, static_cast<float>(random_.Below(100)));
      case FieldDescriptor::CPPTYPE_BOOL:
        return reflection.AddBool(&message, &field, random_.OneIn(2));
      case FieldDescriptor::CPPTYPE_ENUM:
        return reflection.AddEnumValue(&message, &field, EnumNumber(field));
      case FieldDescriptor::CPPTYPE_STRING:
        return reflection.AddString(&message, &field, Text(field, ""));
      case FieldDescriptor::CPPTYPE_MESSAGE:
        return Deeper(*reflection.AddMessage(&message, &field), depth);
    }
  }

  const std::vector<std::string>& words_;
  FuzzRandom& random_;
};

}  // namespace

void SilenceProtobuf() {
  static const google::protobuf::LogSilencer silencer;
}

void MutateMessage(Message& message, const std::vector<std::string>& words, FuzzRandom& random) {
  MessageChanger(words, random).Change(message, 0);
}

std::function<std::string(FuzzRandom&)> MessageMutation(const Message& prototype,
                                                        std::vector<std::string> seeds,
                                                        std::vector<std::string> words) {
  return [&prototype, seeds = std::move(seeds), words = std::move(words)](FuzzRandom& random) {
    if (random.OneIn(2)) {
      return MutateInput(FuzzForm::kBytes, seeds, random);
    }
    const std::unique_ptr<Message> message(prototype.New());
    message->ParsePartialFromString(seeds[random.Below(seeds.size())]);
    MutateMessage(*message, words, random);
    return message->SerializePartialAsString();
  };
}

}  // namespace ravel::testing
