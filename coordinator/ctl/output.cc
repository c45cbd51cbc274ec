// Formats results. YAML is written by hand for the subset that JSON values need; a string is quoted
// wherever another reading would be possible, so what is printed parses back to the same value.
// Text for a terminal is escaped, because names and log lines come from other people and could
// contain control sequences. Widths count characters, not bytes.

#include "coordinator/ctl/output.h"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstdlib>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_replace.h>
#include <unistd.h>

#include "common/check.h"
#include "common/plain_text.h"
#include "common/utf8.h"

namespace ravel::ctl {
namespace {

// Cells on a terminal: characters count, not bytes.
std::size_t Width(const std::string& text) {
  return static_cast<std::size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; }));
}

bool IsPlainYaml(const std::string& text) {
  static const char* const kWords[] = {"null", "true", "false", "yes", "no", "on", "off", "~"};
  if (text.empty() || text.front() == ' ' || text.back() == ' ' || text.back() == ':') {
    return false;
  }
  for (const char* word : kWords) {
    if (text.size() == std::string(word).size() &&
        std::equal(text.begin(), text.end(), word, [](char a, char b) { return (a | 32) == b; })) {
      return false;
    }
  }
  double number = 0;
  if (std::from_chars(text.data(), text.data() + text.size(), number).ec == std::errc() ||
      text.find(": ") != std::string::npos || text.find(" #") != std::string::npos) {
    return false;
  }
  static const std::string kFirst = "-?:,[]{}#&*!|>'\"%@`.+";
  return kFirst.find(text.front()) == std::string::npos &&
         std::all_of(text.begin(), text.end(), [](char c) {
           return static_cast<unsigned char>(c) >= 0x20 && c != 0x7F;
         });
}

std::string YamlScalar(const json::Value& value) {
  if (value.is_string() && IsPlainYaml(value.AsString())) {
    return value.AsString();
  }
  return json::Serialize(value);  // a JSON scalar is a YAML scalar
}

bool IsInline(const json::Value& value) {
  if (value.is_object()) {
    return value.AsObject().empty();
  }
  return !value.is_array() || value.AsArray().empty();
}

void WriteYaml(const json::Value& value, int depth, std::string& out) {
  const std::string indent(static_cast<std::size_t>(depth) * 2, ' ');
  const auto write_child = [&](const json::Value& child, bool in_list) {
    if (IsInline(child)) {
      absl::StrAppend(&out, " ", YamlScalar(child), "\n");
    } else if (in_list) {
      std::string text;
      WriteYaml(child, depth + 1, text);
      out += " " + text.substr(indent.size() + 2);
    } else {
      out += "\n";
      WriteYaml(child, depth + 1, out);
    }
  };
  if (value.is_object() && !value.AsObject().empty()) {
    for (const json::Member& member : value.AsObject()) {
      absl::StrAppend(&out, indent, YamlScalar(json::Value(member.name)), ":");
      write_child(member.value, false);
    }
  } else if (value.is_array() && !value.AsArray().empty()) {
    for (const json::Value& element : value.AsArray()) {
      absl::StrAppend(&out, indent, "-");
      write_child(element, true);
    }
  } else {
    absl::StrAppend(&out, indent, YamlScalar(value), "\n");
  }
}

}  // namespace

absl::StatusOr<Format> ParseFormat(const std::string& text) {
  static const std::pair<const char*, Format> kFormats[] = {{"table", Format::kTable},
                                                            {"json", Format::kJson},
                                                            {"yaml", Format::kYaml},
                                                            {"jsonl", Format::kJsonl},
                                                            {"name", Format::kName}};
  for (const auto& [name, format] : kFormats) {
    if (text == name) {
      return format;
    }
  }
  return absl::InvalidArgumentError(
      absl::StrCat("--output: expected table, wide, json, yaml, jsonl or name, got '", text, "'"));
}

void Table::AddRow(std::vector<std::string> cells) {
  CHECK(cells.size() == titles_.size());
  for (std::string& cell : cells) {
    cell = OneLine(std::move(cell));
  }
  rows_.push_back(std::move(cells));
}

std::string Table::Text(bool with_titles) const {
  std::vector<std::vector<std::string>> lines;
  if (with_titles) {
    lines.push_back(titles_);
  }
  lines.insert(lines.end(), rows_.begin(), rows_.end());
  std::vector<std::size_t> widths(titles_.size());
  for (const auto& line : lines) {
    for (std::size_t i = 0; i < line.size(); ++i) {
      widths[i] = std::max(widths[i], Width(line[i]));
    }
  }
  std::string out;
  for (const auto& line : lines) {
    std::string text;
    for (std::size_t i = 0; i < line.size(); ++i) {
      text += line[i];
      text.append(widths[i] + 2 - Width(line[i]), ' ');
    }
    text.erase(text.find_last_not_of(' ') + 1);
    out += text + "\n";
  }
  return out;
}

std::string OneLine(std::string text) {
  absl::StrReplaceAll({{"\n", "\\n"}}, &text);
  return text;
}

std::string ForStream(const std::string& text, int file) {
  return isatty(file) == 1 ? EscapeControlText(text) : text;
}

std::string ToYaml(const json::Value& value) {
  std::string out;
  WriteYaml(value, 0, out);
  return out;
}

std::string FormatDocument(const json::Value& document, Format format) {
  if (format == Format::kYaml) {
    return ToYaml(document);
  }
  if (format != Format::kJsonl) {
    return json::SerializePretty(document) + "\n";
  }
  const json::Value* const items = document.Find("items");
  if (items == nullptr || !items->is_array()) {
    return json::Serialize(document) + "\n";
  }
  std::string out;
  for (const json::Value& item : items->AsArray()) {
    out += json::Serialize(item) + "\n";
  }
  return out;
}

json::Value WithSchemaVersion(const json::Value& object) {
  json::Object out;
  out.push_back({"schemaVersion", "ravel/v1"});
  for (const json::Member& member : object.AsObject()) {
    out.push_back(member);
  }
  return json::Value(std::move(out));
}

json::Value ListDocument(json::Array items) {
  json::Value out;
  out.Set("schemaVersion", "ravel/v1");
  out.Set("items", json::Value(std::move(items)));
  return out;
}

void Print(const std::string& raw) {
  const std::string text = ForStream(raw, STDOUT_FILENO);
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0) {
    std::_Exit(1);  // whoever read us is gone
  }
}

void Say(const std::string& line) {
  std::fprintf(stderr, "%s\n", ForStream(line, STDERR_FILENO).c_str());
}

}  // namespace ravel::ctl
