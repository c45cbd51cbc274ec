#pragma once

// JSON values, a strict parser and a serializer. Objects keep the order of their members.
// Boost.JSON parses; no type of it shows here. Thread-compatible.

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "common/status.h"

namespace ravel::json {

class Value;
struct Member;
using Array = std::vector<Value>;
using Object = std::vector<Member>;  // in order; names are unique after Parse

class Value {
 public:
  // Out of line: the variant holds Members, which are complete only below.
  Value();  // null
  Value(const Value& other);
  Value(Value&& other) noexcept;
  Value& operator=(const Value& other);
  Value& operator=(Value&& other) noexcept;
  ~Value();
  Value(bool value);
  Value(int value);
  Value(int64_t value);
  Value(uint64_t value);
  Value(double value);
  Value(std::string value);
  Value(std::string_view value);
  Value(const char* value);
  Value(Array value);
  Value(Object value);
  // A float that prints with the fewest digits that give the same float back.
  static Value FromFloat(float value);

  bool is_null() const { return std::holds_alternative<std::monostate>(value_); }
  bool is_bool() const { return std::holds_alternative<bool>(value_); }
  bool is_string() const { return std::holds_alternative<std::string>(value_); }
  bool is_array() const { return std::holds_alternative<Array>(value_); }
  bool is_object() const { return std::holds_alternative<Object>(value_); }
  // A number without fraction or exponent that int64 holds.
  bool is_int() const { return std::holds_alternative<int64_t>(value_); }
  // A whole number above the largest int64.
  bool is_uint() const { return std::holds_alternative<uint64_t>(value_); }
  bool is_number() const { return is_int() || is_uint() || std::holds_alternative<double>(value_); }
  // "null", "a boolean", "a number", "a string", "an array", "an object": for messages.
  const char* KindName() const;

  // Each CHECKs the kind; ask first. AsDouble takes any number.
  bool AsBool() const;
  int64_t AsInt() const;
  double AsDouble() const;
  const std::string& AsString() const;
  const Array& AsArray() const;
  const Object& AsObject() const;

  // The member of that name; nullptr when there is none or this is no object. Linear in the
  // members.
  const Value* Find(std::string_view name) const;
  // Adds a member (null becomes an object first) or replaces the one of that name.
  Value& Set(std::string_view name, Value value);
  // Adds an element (null becomes an array first).
  Value& Append(Value value);

  bool operator==(const Value& other) const;

 private:
  friend void Write(const Value& value, int indent, int depth, std::string& out);
  std::variant<std::monostate, bool, int64_t, uint64_t, double, std::string, Array, Object> value_;
};

struct Member {
  std::string name;
  Value value;
  bool operator==(const Member& other) const;
};

// One JSON document. At most 64 levels deep; of equal names in an object the last counts. Errors
// say "line 3, column 14: ..." (from 1; bytes, not characters).
absl::StatusOr<Value> Parse(std::string_view text);

// OK for one JSON document, at most 64 levels deep, that is an object whose member of that name is
// an object, too. Keeps nothing of it, whatever its size. Errors as Parse's.
absl::Status CheckHasObject(std::string_view text, std::string_view member);

// On one line, without spaces. Doubles print with the fewest digits that give the same double back;
// what JSON cannot say (infinities, NaN) becomes null. Invalid UTF-8 is replaced by U+FFFD.
std::string Serialize(const Value& value);
// Over several lines, two spaces a level, arrays of scalars on one line.
std::string SerializePretty(const Value& value);

}  // namespace ravel::json
