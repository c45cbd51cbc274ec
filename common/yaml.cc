// Builds a tree with positions from yaml-cpp's events; the library appears in this file only.
// Working on events instead of the library's own nodes gives the position and quoting of every
// scalar and lets limits act while reading: depth, number of nodes, and alias expansion, which
// could otherwise make a short file huge. Exceptions of the library and of the builder end in
// Parse.

#include "common/yaml.h"

#include <algorithm>
#include <map>
#include <memory>
#include <sstream>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>
#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/yaml.h>

#include "common/check.h"
#include "common/utf8.h"

namespace ravel::yaml {
namespace {

constexpr int kMaxNodes = 100000;

// Thrown by the builder to stop the parser; caught in Parse, like the library's own exceptions.
struct Refused {
  ParseError error;
};

Position PositionOf(const YAML::Mark& mark) {
  return mark.is_null() ? Position{} : Position{mark.line + 1, mark.column + 1};
}

[[noreturn]] void Refuse(const YAML::Mark& mark, std::string message) {
  throw Refused{{PositionOf(mark), std::move(message)}};
}

int CountNodes(const Node& node) {
  int count = 1;
  for (const Node& element : node.elements) {
    count += CountNodes(element);
  }
  for (const Entry& entry : node.entries) {
    count += CountNodes(entry.value);
  }
  return count;
}

int DepthOf(const Node& node) {
  int deepest = 0;
  for (const Node& element : node.elements) {
    deepest = std::max(deepest, DepthOf(element));
  }
  for (const Entry& entry : node.entries) {
    deepest = std::max(deepest, DepthOf(entry.value));
  }
  return deepest + (node.kind == NodeKind::kSequence || node.kind == NodeKind::kMapping ? 1 : 0);
}

// Builds the tree from the parser's events.
class TreeBuilder : public YAML::EventHandler {
 public:
  void OnDocumentStart(const YAML::Mark&) override {}
  void OnDocumentEnd() override {}

  void OnNull(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    Node node;
    node.position = PositionOf(mark);
    Finish(std::move(node), anchor, mark);
  }

  void OnAlias(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    const auto found = anchors_.find(anchor);
    if (found == anchors_.end()) {
      Refuse(mark, "an alias may not refer to the node that it is part of");
    }
    if (++aliases_ > kMaxAliases) {
      Refuse(mark, absl::StrCat("expected at most ", kMaxAliases, " aliases"));
    }
    nodes_ += CountNodes(found->second);
    const int depth = static_cast<int>(open_.size()) + DepthOf(found->second);
    if (nodes_ > kMaxNodes || depth > kMaxDepth) {
      Refuse(mark, "the aliases make the document too large");
    }
    Node copy = found->second;
    copy.position = PositionOf(mark);
    Finish(std::move(copy), 0, mark);
  }

  void OnScalar(const YAML::Mark& mark,
                const std::string& tag,
                YAML::anchor_t anchor,
                const std::string& value) override {
    CheckTag(mark, tag);
    Node node;
    node.kind = NodeKind::kScalar;
    node.position = PositionOf(mark);
    node.text = value;
    node.quoted = tag == "!";
    if (!node.quoted && (value == "null" || value == "~" || value.empty())) {
      node.kind = NodeKind::kNull;
    }
    Finish(std::move(node), anchor, mark);
  }

  void OnSequenceStart(const YAML::Mark& mark,
                       const std::string& tag,
                       YAML::anchor_t anchor,
                       YAML::EmitterStyle::value) override {
    Open(NodeKind::kSequence, mark, tag, anchor);
  }
  void OnSequenceEnd() override { Close(); }

  void OnMapStart(const YAML::Mark& mark,
                  const std::string& tag,
                  YAML::anchor_t anchor,
                  YAML::EmitterStyle::value) override {
    Open(NodeKind::kMapping, mark, tag, anchor);
  }
  void OnMapEnd() override { Close(); }

  Node TakeRoot() { return std::move(root_); }

 private:
  struct Level {
    Node node;
    YAML::anchor_t anchor = 0;
    YAML::Mark mark;
    bool has_key = false;
    Entry entry;
  };

  void CheckTag(const YAML::Mark& mark, const std::string& tag) {
    if (!tag.empty() && tag != "?" && tag != "!") {
      Refuse(mark, absl::StrCat("tags are not allowed: ", tag));
    }
  }

  void Open(NodeKind kind, const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor) {
    CheckTag(mark, tag);
    if (static_cast<int>(open_.size()) >= kMaxDepth) {
      Refuse(mark, absl::StrCat("expected at most ", kMaxDepth, " levels"));
    }
    Level level;
    level.node.kind = kind;
    level.node.position = PositionOf(mark);
    level.anchor = anchor;
    level.mark = mark;
    open_.push_back(std::move(level));
  }

  void Close() {
    Level level = std::move(open_.back());
    open_.pop_back();
    Finish(std::move(level.node), level.anchor, level.mark);
  }

  void Finish(Node node, YAML::anchor_t anchor, const YAML::Mark& mark) {
    if (++nodes_ > kMaxNodes) {
      Refuse(mark, absl::StrCat("expected at most ", kMaxNodes, " values"));
    }
    if (anchor != 0) {
      anchors_[anchor] = node;
    }
    if (open_.empty()) {
      root_ = std::move(node);
      return;
    }
    Level& parent = open_.back();
    if (parent.node.kind == NodeKind::kSequence) {
      parent.node.elements.push_back(std::move(node));
    } else if (!parent.has_key) {
      if (node.kind != NodeKind::kScalar) {
        Refuse(mark, "expected a name as key of a mapping");
      }
      if (node.text == "<<" && !node.quoted) {
        Refuse(mark, "merge keys (<<) are not supported; write the fields out");
      }
      parent.entry = {node.text, node.position, Node()};
      parent.has_key = true;
    } else {
      parent.entry.value = std::move(node);
      parent.node.entries.push_back(std::move(parent.entry));
      parent.has_key = false;
    }
  }

  std::vector<Level> open_;
  std::map<YAML::anchor_t, Node> anchors_;
  Node root_;
  int aliases_ = 0;
  int nodes_ = 0;
};

// Position of the character that follows UTF-8 text.
Position PositionAfter(std::string_view text) {
  const std::string_view line = text.substr(text.rfind('\n') + 1);  // npos + 1 is 0
  const auto characters = std::count_if(line.begin(), line.end(), [](char byte) {
    return (static_cast<unsigned char>(byte) & 0xC0) != 0x80;
  });
  return {static_cast<int>(std::count(text.begin(), text.end(), '\n')) + 1,
          static_cast<int>(characters) + 1};
}

absl::Status Fail(ParseError error, ParseError* out) {
  const absl::Status status = absl::InvalidArgumentError(absl::StrCat(
      "line ", error.position.line, ", column ", error.position.column, ": ", error.message));
  if (out != nullptr) {
    *out = std::move(error);
  }
  return status;
}

}  // namespace

const char* Node::KindName() const {
  switch (kind) {
    case NodeKind::kNull:
      return "nothing";
    case NodeKind::kScalar:
      return "text";
    case NodeKind::kSequence:
      return "a list";
    case NodeKind::kMapping:
      return "a mapping";
  }
  return "nothing";
}

absl::StatusOr<Node> Parse(std::string_view text, ParseError* error) {
  if (text.size() > kMaxBytes) {
    return Fail({{}, absl::StrCat("expected at most ", kMaxBytes, " bytes, got ", text.size())},
                error);
  }
  if (text.find('\0') != std::string_view::npos) {
    return Fail({{}, "expected text, got a binary file"}, error);
  }
  if (const size_t invalid = FindInvalidUtf8(text); invalid != std::string_view::npos) {
    return Fail({PositionAfter(text.substr(0, invalid)),
                 absl::StrFormat("expected UTF-8, got the byte 0x%02x",
                                 static_cast<unsigned char>(text[invalid]))},
                error);
  }
  std::istringstream stream{std::string(text)};
  TreeBuilder builder;
  try {
    YAML::Parser parser(stream);
    if (!parser.HandleNextDocument(builder)) {
      return Fail({{1, 1}, "expected a document, got an empty file"}, error);
    }
    TreeBuilder second;
    if (parser.HandleNextDocument(second)) {
      return Fail({second.TakeRoot().position, "expected one document, got several"}, error);
    }
  } catch (const Refused& refused) {
    return Fail(refused.error, error);
  } catch (const YAML::Exception& exception) {
    return Fail({PositionOf(exception.mark), exception.msg}, error);
  }
  return builder.TakeRoot();
}

}  // namespace ravel::yaml
