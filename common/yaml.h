#pragma once

// One YAML (or JSON) document as a tree that remembers where everything stood and how it was
// written; no interpretation of scalars, because their meaning is that of the field they fill.
// Thread-compatible.

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/status.h"

namespace ravel::yaml {

struct Position {
  int line = 0;    // from 1; 0: unknown
  int column = 0;  // from 1, in characters
};

enum class NodeKind { kNull, kScalar, kSequence, kMapping };

struct Entry;

struct Node {
  NodeKind kind = NodeKind::kNull;
  Position position;
  std::string text;     // kScalar: without quotes
  bool quoted = false;  // kScalar: written in quotes or as a block
  std::vector<Node> elements;
  std::vector<Entry> entries;  // in the order of the file; duplicate names stay

  // "nothing", "text", "a list", "a mapping": for messages.
  const char* KindName() const;
};

struct Entry {
  std::string name;
  Position position;
  Node value;
};

inline constexpr std::size_t kMaxBytes = std::size_t{1} << 20;
inline constexpr int kMaxDepth = 32;
inline constexpr int kMaxAliases = 1000;

struct ParseError {
  Position position;
  std::string message;
};

// Exactly one document of at most kMaxBytes, kMaxDepth levels and kMaxAliases alias expansions
// (which together may not make the tree larger than 100,000 nodes). On failure `error` says where
// and why, and the returned status repeats it.
absl::StatusOr<Node> Parse(std::string_view text, ParseError* error);

}  // namespace ravel::yaml
