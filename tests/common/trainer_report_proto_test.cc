#include "common/trainer_report_proto.h"

#include <string>

#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>
#include <gtest/gtest.h>

namespace ravel {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

void FillOne(Message& message, const FieldDescriptor& field, int& next);

// Gives every field below `message` a value of its own; lists get two entries.
void Fill(Message& message, int& next) {
  for (int i = 0; i < message.GetDescriptor()->field_count(); ++i) {
    FillOne(message, *message.GetDescriptor()->field(i), next);
  }
}

void FillNumber(Message& message, const FieldDescriptor& field, int value) {
  const Reflection& to = *message.GetReflection();
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT64:
      to.SetInt64(&message, &field, value);
      break;
    case FieldDescriptor::CPPTYPE_UINT64:
      to.SetUInt64(&message, &field, static_cast<uint64_t>(value));
      break;
    case FieldDescriptor::CPPTYPE_DOUBLE:
      to.SetDouble(&message, &field, value + 0.25);
      break;
    case FieldDescriptor::CPPTYPE_FLOAT:
      to.SetFloat(&message, &field, static_cast<float>(value) + 0.5f);
      break;
    case FieldDescriptor::CPPTYPE_BOOL:
      to.SetBool(&message, &field, true);
      break;
    case FieldDescriptor::CPPTYPE_STRING:
      to.SetString(&message, &field, "text " + std::to_string(value));
      break;
    default:
      FAIL() << field.full_name() << ": no value of this type is known here";
  }
}

void FillOne(Message& message, const FieldDescriptor& field, int& next) {
  const Reflection& to = *message.GetReflection();
  if (!field.is_repeated()) {
    FillNumber(message, field, ++next);
  } else if (field.cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
    Fill(*to.AddMessage(&message, &field), next);
    Fill(*to.AddMessage(&message, &field), next);
  } else {
    ASSERT_EQ(field.cpp_type(), FieldDescriptor::CPPTYPE_INT64) << field.full_name();
    to.AddInt64(&message, &field, ++next);
    to.AddInt64(&message, &field, ++next);
  }
}

// A field that one direction forgets comes back empty.
template <typename M>
void ExpectRoundTrip() {
  M message;
  int next = 0;
  Fill(message, next);
  EXPECT_EQ(ToProto(FromProto(message)).DebugString(), message.DebugString());
  EXPECT_GT(next, 3);
}

TEST(TrainerReportProto, EveryFieldComesBack) {
  ExpectRoundTrip<v1::TrainerReady>();
  ExpectRoundTrip<v1::StepReport>();
  ExpectRoundTrip<v1::SaveFailed>();
  ExpectRoundTrip<v1::LedgerReport>();
}

TEST(TrainerReportProto, CollectivesComeBack) {
  v1::TrainerProgress message;
  int next = 0;
  Fill(*message.add_collectives(), next);
  Fill(*message.add_collectives(), next);
  v1::TrainerProgress again;
  AddCollectives(CollectivesOf(message), again);
  EXPECT_EQ(again.DebugString(), message.DebugString());
}

TEST(TrainerReportProto, ASaveWithoutAnAttemptIsTheFirst) {
  EXPECT_EQ(FromProto(v1::SaveFailed()).attempt, 1);
}

}  // namespace
}  // namespace ravel
