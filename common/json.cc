// JSON values over Boost.JSON's parser, which appears in this file only. Our own value type keeps
// the order of members and the distinction between whole numbers and floats, which formats on disk
// rely on. The serialiser writes the fewest digits that read back as the same number, and replaces
// invalid UTF-8, so that output is always valid JSON.

#include "common/json.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <map>
#include <utility>

#include <absl/strings/str_cat.h>
#include <boost/json.hpp>
#include <boost/json/basic_parser_impl.hpp>

#include "common/check.h"
#include "common/utf8.h"

namespace ravel::json {
namespace {

constexpr std::size_t kMaxDepth = 64;

// Builds our values while Boost.JSON parses. Its own values would hold doubles that are up to some
// units in the last place beside the text: its parser is fast, not exact. Here the digits are kept
// and read again.
class Builder {
 public:
  static constexpr std::size_t max_object_size = std::size_t(-1);
  static constexpr std::size_t max_array_size = std::size_t(-1);
  static constexpr std::size_t max_key_size = std::size_t(-1);
  static constexpr std::size_t max_string_size = std::size_t(-1);
  using Error = boost::json::error_code;
  using Text = boost::json::string_view;

  bool on_document_begin(Error&) { return true; }
  bool on_document_end(Error&) { return true; }
  bool on_object_begin(Error&) { return Begin(Value(Object())); }
  bool on_object_end(std::size_t, Error&) {
    KeepLastOfEachName(open_.back().members);
    return End(Value(std::move(open_.back().members)));
  }
  bool on_array_begin(Error&) { return Begin(Value(Array())); }
  bool on_array_end(std::size_t, Error&) { return End(Value(std::move(open_.back().elements))); }
  bool on_key_part(Text part, std::size_t, Error&) { return AddText(part); }
  bool on_key(Text part, std::size_t, Error&) {
    AddText(part);
    open_.back().members.push_back({std::exchange(text_, ""), Value()});
    return true;
  }
  bool on_string_part(Text part, std::size_t, Error&) { return AddText(part); }
  bool on_string(Text part, std::size_t, Error&) {
    AddText(part);
    return Add(Value(std::exchange(text_, "")));
  }
  bool on_number_part(Text part, Error&) { return AddText(part); }
  bool on_int64(int64_t number, Text, Error&) { return AddNumber(Value(number)); }
  bool on_uint64(uint64_t number, Text, Error&) { return AddNumber(Value(number)); }
  bool on_double(double number, Text part, Error& error) {
    AddText(part);
    if (!std::isfinite(number)) {  // "1e999", which nobody could write down again
      error = boost::json::error::exponent_overflow;
      return false;
    }
    std::from_chars(text_.data(), text_.data() + text_.size(), number);
    return AddNumber(Value(number));
  }
  bool on_bool(bool truth, Error&) { return Add(Value(truth)); }
  bool on_null(Error&) { return Add(Value()); }
  bool on_comment_part(Text, Error&) { return true; }
  bool on_comment(Text, Error&) { return true; }

  Value Take() { return std::move(root_); }

 private:
  // An array or object that is not complete.
  struct Open {
    bool is_object = false;
    Array elements = {};
    Object members = {};
  };

  bool AddText(Text part) {
    text_.append(part.data(), part.size());
    return true;
  }
  bool Begin(const Value& kind) {
    open_.push_back({.is_object = kind.is_object()});
    return true;
  }
  bool End(Value value) {
    open_.pop_back();
    return Add(std::move(value));
  }
  bool AddNumber(Value number) {
    text_.clear();
    return Add(std::move(number));
  }
  bool Add(Value value) {
    if (open_.empty()) {
      root_ = std::move(value);
    } else if (open_.back().is_object) {
      open_.back().members.back().value = std::move(value);
    } else {
      open_.back().elements.push_back(std::move(value));
    }
    return true;
  }
  static bool HasEqualNames(const Object& members) {
    std::vector<std::string_view> names;
    names.reserve(members.size());
    for (const Member& member : members) {
      names.push_back(member.name);
    }
    std::sort(names.begin(), names.end());
    return std::adjacent_find(names.begin(), names.end()) != names.end();
  }
  // At the place of the first.
  static void KeepLastOfEachName(Object& members) {
    if (!HasEqualNames(members)) {
      return;
    }
    std::map<std::string, std::size_t> places;
    Object once;
    for (Member& member : members) {
      const auto [found, fresh] = places.try_emplace(member.name, once.size());
      if (fresh) {
        once.push_back(std::move(member));
      } else {
        once[found->second].value = std::move(member.value);
      }
    }
    members = std::move(once);
  }

  std::vector<Open> open_;
  std::string text_;  // of a string, a key or a number that comes in parts
  Value root_;
};

// Looks for a member of the outermost object, and keeps only what its value is.
class MemberKind {
 public:
  static constexpr std::size_t max_object_size = std::size_t(-1);
  static constexpr std::size_t max_array_size = std::size_t(-1);
  static constexpr std::size_t max_key_size = std::size_t(-1);
  static constexpr std::size_t max_string_size = std::size_t(-1);
  using Error = boost::json::error_code;
  using Text = boost::json::string_view;

  explicit MemberKind(std::string_view name) : name_(name) {}
  bool is_object() const { return is_object_; }  // of equal names the last counts

  bool on_document_begin(Error&) { return true; }
  bool on_document_end(Error&) { return true; }
  bool on_object_begin(Error&) { return Meet(true, 1); }
  bool on_object_end(std::size_t, Error&) { return Leave(); }
  bool on_array_begin(Error&) { return Meet(false, 1); }
  bool on_array_end(std::size_t, Error&) { return Leave(); }
  bool on_key_part(Text part, std::size_t, Error&) {
    if (depth_ == 1 && key_.size() <= name_.size()) {
      key_.append(part.data(), part.size());
    }
    return true;
  }
  bool on_key(Text part, std::size_t size, Error& error) {
    on_key_part(part, size, error);
    is_named_ = depth_ == 1 && in_object_ && key_ == name_;
    key_.clear();
    return true;
  }
  bool on_string_part(Text, std::size_t, Error&) { return true; }
  bool on_string(Text, std::size_t, Error&) { return Meet(false, 0); }
  bool on_number_part(Text, Error&) { return true; }
  bool on_int64(int64_t, Text, Error&) { return Meet(false, 0); }
  bool on_uint64(uint64_t, Text, Error&) { return Meet(false, 0); }
  bool on_double(double, Text, Error&) { return Meet(false, 0); }
  bool on_bool(bool, Error&) { return Meet(false, 0); }
  bool on_null(Error&) { return Meet(false, 0); }
  bool on_comment_part(Text, Error&) { return true; }
  bool on_comment(Text, Error&) { return true; }

 private:
  bool Meet(bool is_object, int deeper) {
    in_object_ = depth_ == 0 ? is_object : in_object_;
    if (depth_ == 1 && std::exchange(is_named_, false)) {
      is_object_ = is_object;
    }
    depth_ += deeper;
    return true;
  }
  bool Leave() {
    --depth_;
    return true;
  }

  const std::string name_;
  std::string key_;
  int depth_ = 0;
  bool in_object_ = false;  // the outermost value is one
  bool is_named_ = false;   // the next value is that of `name_`
  bool is_object_ = false;
};

absl::Status ErrorAt(std::string_view text, std::size_t offset, const std::string& message) {
  int line = 1;
  int column = 1;
  for (std::size_t i = 0; i < offset && i < text.size(); ++i) {
    column = text[i] == '\n' ? 1 : column + 1;
    line += text[i] == '\n' ? 1 : 0;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("line ", line, ", column ", column, ": ", message));
}

void WriteString(std::string_view raw, std::string& out) {
  const std::string text = ReplaceInvalidUtf8(raw);
  out += '"';
  for (const char c : text) {
    switch (c) {
      case '"':
        out += "\\\"";
        break;
      case '\\':
        out += "\\\\";
        break;
      case '\n':
        out += "\\n";
        break;
      case '\r':
        out += "\\r";
        break;
      case '\t':
        out += "\\t";
        break;
      default:
        if (static_cast<unsigned char>(c) < 0x20) {
          char escape[8];
          std::snprintf(escape, sizeof escape, "\\u%04x", static_cast<unsigned>(c));
          out += escape;
        } else {
          out += c;
        }
    }
  }
  out += '"';
}

template <typename Number>
void WriteNumber(Number number, std::string& out) {
  char digits[40];
  const auto result = std::to_chars(digits, digits + sizeof digits, number);
  out.append(digits, result.ptr);
}

void WriteDouble(double number, std::string& out) {
  if (!std::isfinite(number)) {
    out += "null";
    return;
  }
  const std::size_t begin = out.size();
  WriteNumber(number, out);
  if (out.find_first_of(".e", begin) == std::string::npos) {
    out += ".0";  // stays a floating-point number for typed readers
  }
}

void NewLine(int indent, int depth, std::string& out) {
  if (indent > 0) {
    out += '\n';
    out.append(static_cast<std::size_t>(indent * depth), ' ');
  }
}

bool IsFlat(const Array& array) {
  for (const Value& element : array) {
    if (element.is_array() || element.is_object()) {
      return false;
    }
  }
  return true;
}

}  // namespace

void Write(const Value& value, int indent, int depth, std::string& out);

namespace {

void WriteArray(const Array& array, int indent, int depth, std::string& out) {
  const bool flat = IsFlat(array);
  out += '[';
  for (std::size_t i = 0; i < array.size(); ++i) {
    if (i > 0) {
      out += flat && indent > 0 ? ", " : ",";
    }
    if (!flat) {
      NewLine(indent, depth + 1, out);
    }
    Write(array[i], indent, depth + 1, out);
  }
  if (!flat) {
    NewLine(indent, depth, out);
  }
  out += ']';
}

void WriteObject(const Object& object, int indent, int depth, std::string& out) {
  out += '{';
  for (std::size_t i = 0; i < object.size(); ++i) {
    if (i > 0) {
      out += ',';
    }
    NewLine(indent, depth + 1, out);
    WriteString(object[i].name, out);
    out += indent > 0 ? ": " : ":";
    Write(object[i].value, indent, depth + 1, out);
  }
  if (!object.empty()) {
    NewLine(indent, depth, out);
  }
  out += '}';
}

}  // namespace

void Write(const Value& value, int indent, int depth, std::string& out) {
  if (value.is_null()) {
    out += "null";
  } else if (value.is_bool()) {
    out += value.AsBool() ? "true" : "false";
  } else if (value.is_int()) {
    WriteNumber(value.AsInt(), out);
  } else if (value.is_uint()) {
    WriteNumber(std::get<uint64_t>(value.value_), out);
  } else if (value.is_string()) {
    WriteString(value.AsString(), out);
  } else if (value.is_array()) {
    WriteArray(value.AsArray(), indent, depth, out);
  } else if (value.is_object()) {
    WriteObject(value.AsObject(), indent, depth, out);
  } else {
    WriteDouble(value.AsDouble(), out);
  }
}

Value::Value() = default;
Value::Value(const Value& other) = default;
Value::Value(Value&& other) noexcept = default;
Value& Value::operator=(const Value& other) = default;
Value& Value::operator=(Value&& other) noexcept = default;
Value::~Value() = default;
Value::Value(bool value) : value_(value) {}
Value::Value(int value) : value_(static_cast<int64_t>(value)) {}
Value::Value(int64_t value) : value_(value) {}
Value::Value(uint64_t value) : value_(value) {}
Value::Value(double value) : value_(value) {}
Value::Value(std::string value) : value_(std::move(value)) {}
Value::Value(std::string_view value) : value_(std::string(value)) {}
Value::Value(const char* value) : value_(std::string(value)) {}
Value::Value(Array value) : value_(std::move(value)) {}
Value::Value(Object value) : value_(std::move(value)) {}

Value Value::FromFloat(float value) {
  if (!std::isfinite(value)) {
    return Value(static_cast<double>(value));
  }
  char digits[40];
  const auto end = std::to_chars(digits, digits + sizeof digits, value).ptr;
  double wide = 0;
  std::from_chars(digits, end, wide);
  return Value(wide);
}

const char* Value::KindName() const {
  static constexpr const char* kNames[] = {
      "null", "a boolean", "a number", "a number", "a number", "a string", "an array", "an object"};
  return kNames[value_.index()];
}

bool Value::AsBool() const {
  CHECK(is_bool());
  return std::get<bool>(value_);
}

int64_t Value::AsInt() const {
  CHECK(is_int());
  return std::get<int64_t>(value_);
}

double Value::AsDouble() const {
  CHECK(is_number());
  if (is_int()) {
    return static_cast<double>(std::get<int64_t>(value_));
  }
  return is_uint() ? static_cast<double>(std::get<uint64_t>(value_)) : std::get<double>(value_);
}

const std::string& Value::AsString() const {
  CHECK(is_string());
  return std::get<std::string>(value_);
}

const Array& Value::AsArray() const {
  CHECK(is_array());
  return std::get<Array>(value_);
}

const Object& Value::AsObject() const {
  CHECK(is_object());
  return std::get<Object>(value_);
}

const Value* Value::Find(std::string_view name) const {
  if (const Object* object = std::get_if<Object>(&value_)) {
    for (const Member& member : *object) {
      if (member.name == name) {
        return &member.value;
      }
    }
  }
  return nullptr;
}

Value& Value::Set(std::string_view name, Value value) {
  if (is_null()) {
    value_ = Object();
  }
  CHECK(is_object());
  Object& object = std::get<Object>(value_);
  for (Member& member : object) {
    if (member.name == name) {
      member.value = std::move(value);
      return *this;
    }
  }
  object.push_back({std::string(name), std::move(value)});
  return *this;
}

Value& Value::Append(Value value) {
  if (is_null()) {
    value_ = Array();
  }
  CHECK(is_array());
  std::get<Array>(value_).push_back(std::move(value));
  return *this;
}

bool Value::operator==(const Value& other) const {
  return value_ == other.value_;
}

bool Member::operator==(const Member& other) const {
  return name == other.name && value == other.value;
}

namespace {

boost::json::parse_options ParseOptions() {
  boost::json::parse_options options;
  options.max_depth = kMaxDepth;
  return options;
}

// Gives the parser all of the text; its handler has heard a whole document then.
template <typename Parser>
absl::Status Feed(std::string_view text, Parser& parser) {
  boost::json::error_code error;
  const std::size_t used = parser.write_some(true, text.data(), text.size(), error);
  if (error) {
    return ErrorAt(text, used, error.message());
  }
  if (used < text.size()) {
    return ErrorAt(text, used, "text after the end of the JSON document");
  }
  parser.write_some(false, nullptr, 0, error);  // a number at the end is complete now
  if (error) {
    return ErrorAt(text, text.size(), "the JSON document is incomplete");
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Value> Parse(std::string_view text) {
  boost::json::basic_parser<Builder> parser(ParseOptions());
  RETURN_IF_ERROR(Feed(text, parser));
  return parser.handler().Take();
}

absl::Status CheckHasObject(std::string_view text, std::string_view member) {
  boost::json::basic_parser<MemberKind> parser(ParseOptions(), member);
  RETURN_IF_ERROR(Feed(text, parser));
  return parser.handler().is_object()
             ? absl::OkStatus()
             : absl::InvalidArgumentError(absl::StrCat(
                   "expected an object whose member \"", std::string(member), "\" is an object"));
}

std::string Serialize(const Value& value) {
  std::string out;
  Write(value, 0, 0, out);
  return out;
}

std::string SerializePretty(const Value& value) {
  std::string out;
  Write(value, 2, 0, out);
  return out;
}

}  // namespace ravel::json
