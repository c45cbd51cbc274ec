#pragma once

// The rules that stand beside the fields of a job file (proto/field_rules.proto): filled in,
// checked, and told. Rules between fields are code (job_rules_proto.h).

#include <functional>
#include <string>

#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>

#include "proto/field_rules.pb.h"

namespace ravel {

// Rules of a field, empty ones when it has none. The field may come from any descriptor pool.
v1::FieldRules RulesOf(const google::protobuf::FieldDescriptor& field);

// "default 5s; a duration from 500ms to 1m", "default cosine; one of cosine, linear"; "" without
// rules.
std::string DescribeRules(const google::protobuf::FieldDescriptor& field);

// Told of each value that a rule forbids: its path, what was expected, what was got.
using FieldFailure = std::function<void(std::string path, std::string expected, std::string got)>;

// Fills in the defaults of `message` and of the groups in it, makes durations canonical, and tells
// `fail` of each value outside its rules. A second call changes nothing and tells the same.
void ApplyFieldRules(google::protobuf::Message& message,
                     const std::string& path,
                     const FieldFailure& fail);

// Position of the text of a field among its choices; 0 when it is none of them.
int ChosenIndex(const google::protobuf::Message& message, int field_number);
// Milliseconds of a duration's text; 0 when it is empty or none.
int64_t DurationOf(const std::string& text);
// Bytes of a size's text; 0 when it is empty or none.
int64_t SizeOf(const std::string& text);

// "nothing", or the text in quotation marks.
std::string QuotedOrNothing(const std::string& text);
// The shortest digits that read back as the same number.
std::string ShortestDigits(double number);

}  // namespace ravel
