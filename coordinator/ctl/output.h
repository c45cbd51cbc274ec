#pragma once

// Prints results: tables for people; JSON, YAML and JSON lines for programs. Data goes to stdout,
// talk to stderr.

#include <string>
#include <vector>

#include "common/json.h"
#include "common/status.h"

namespace ravel::ctl {

enum class Format { kTable, kJson, kYaml, kJsonl, kName };

// "table", "json", "yaml", "jsonl" or "name".
absl::StatusOr<Format> ParseFormat(const std::string& text);

// Columns as wide as their widest cell, two spaces apart, titles first, no trailing spaces. Empty
// without rows. A cell is OneLine.
class Table {
 public:
  explicit Table(std::vector<std::string> titles) : titles_(std::move(titles)) {}
  void AddRow(std::vector<std::string> cells);
  bool empty() const { return rows_.empty(); }
  std::string Text(bool with_titles) const;

 private:
  std::vector<std::string> titles_;
  std::vector<std::vector<std::string>> rows_;
};

// YAML of a JSON value: block style, strings quoted where another reading would be possible.
std::string ToYaml(const json::Value& value);

// A document: JSON indented, YAML, or JSON lines (an array gives one line per element). Ends with a
// newline.
std::string FormatDocument(const json::Value& document, Format format);
// {"schemaVersion": "ravel/v1", ...the object's members}.
json::Value WithSchemaVersion(const json::Value& object);
// {"schemaVersion": "ravel/v1", "items": [...]}.
json::Value ListDocument(json::Array items);

// Newlines as `\n`: in a place of one line a text that others wrote could pass for the next one.
std::string OneLine(std::string text);
// The text as a stream gets it: on a terminal control characters but tab and newline are escaped,
// because most of what is shown was written by other people; elsewhere nothing changes.
std::string ForStream(const std::string& text, int file);
// Writes to stdout, as ForStream has it; a closed pipe ends the process quietly.
void Print(const std::string& text);
// Writes a line to stderr, as ForStream has it.
void Say(const std::string& line);

}  // namespace ravel::ctl
