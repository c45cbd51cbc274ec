// Byte-level BPE encoding, equal to Hugging Face's. Added tokens are split off first, then the text
// is cut by the pre-tokenizer's patterns, and each piece is merged by rank: the lowest-ranked
// neighbouring pair first, until none is left. Pieces repeat a lot, so their ids are cached, within
// bounds. Bytes that are not UTF-8 are encoded as themselves, and decoding gives the bytes back.

#include "coordinator/ctl/tokenizer.h"

#include <algorithm>
#include <array>
#include <unordered_map>

#include <absl/strings/str_cat.h>

#include "common/file_writer.h"
#include "common/utf8.h"
#include "coordinator/ctl/bpe_merger.h"
#include "coordinator/ctl/byte_alphabet.h"
#include "coordinator/ctl/split_pattern.h"
#include "coordinator/ctl/tokenizer_file.h"

namespace ravel::ctl {
namespace {

constexpr int64_t kMaxFileBytes = int64_t{256} << 20;
constexpr std::size_t kMaxCachedPieces = std::size_t{1} << 20;
constexpr std::size_t kMaxCachedBytes = 64;  // of one piece
constexpr const char* kEndTokens[] = {
    "<|endoftext|>", "<|end_of_text|>", "</s>", "<|eot_id|>", "<eos>"};

struct TextHash {
  using is_transparent = void;
  std::size_t operator()(std::string_view text) const {
    return std::hash<std::string_view>()(text);
  }
};
template <typename Value>
using TextMap = std::unordered_map<std::string, Value, TextHash, std::equal_to<>>;

class ByteLevelTokenizer : public Tokenizer {
 public:
  static absl::StatusOr<std::unique_ptr<ByteLevelTokenizer>> Make(const TokenizerFile& file) {
    auto made = std::make_unique<ByteLevelTokenizer>();
    made->add_prefix_space_ = file.add_prefix_space;
    made->ignore_merges_ = file.ignore_merges;
    made->may_cut_lines_ = MayCutLines(file);
    RETURN_IF_ERROR(made->AddVocabulary(file));
    RETURN_IF_ERROR(made->AddMerges(file));
    for (const std::string& text : file.split_patterns) {
      ASSIGN_OR_RETURN(std::unique_ptr<SplitPattern> pattern, SplitPattern::Compile(text));
      made->splits_.push_back(std::move(pattern));
    }
    if (!file.byte_level_pattern.empty()) {
      ASSIGN_OR_RETURN(made->byte_level_, SplitPattern::Compile(file.byte_level_pattern));
    }
    return made;
  }

  int64_t vocabulary() const override { return static_cast<int64_t>(bytes_of_.size()); }

  int32_t FindToken(std::string_view token) const override {
    for (const AddedToken& added : added_) {
      if (added.content == token) {
        return added.id;
      }
    }
    const absl::StatusOr<std::string> bytes = StandInsToBytes(token);
    const auto found = bytes.ok() ? id_of_.find(*bytes) : id_of_.end();
    return found == id_of_.end() ? -1 : found->second;
  }

  int32_t end_of_document() const override {
    for (const char* token : kEndTokens) {
      const int32_t id = FindToken(token);
      if (id >= 0) {
        return id;
      }
    }
    return -1;
  }

  bool may_cut_lines() const override { return may_cut_lines_; }

  absl::Status Encode(std::string_view text, std::vector<int32_t>& ids) override {
    while (!text.empty()) {
      const AddedToken* token = nullptr;
      const std::size_t at = FindAdded(text, token);
      RETURN_IF_ERROR(EncodePlain(text.substr(0, at), ids));
      if (token == nullptr) {
        break;
      }
      ids.push_back(token->id);
      text.remove_prefix(at + token->content.size());
    }
    return absl::OkStatus();
  }

  absl::StatusOr<std::string> Decode(std::span<const int32_t> ids) const override {
    std::string out;
    for (const int32_t id : ids) {
      if (id < 0 || id >= vocabulary()) {
        return absl::InvalidArgumentError(
            absl::StrCat("expected token ids below ", vocabulary(), ", got ", id));
      }
      out += bytes_of_[static_cast<std::size_t>(id)];
    }
    return out;
  }

 private:
  // Known patterns never join what stands on both sides of such a line end.
  static bool MayCutLines(const TokenizerFile& file) {
    if (file.add_prefix_space) {
      return false;
    }
    for (const AddedToken& token : file.added) {
      if (token.content.find('\n') != std::string::npos) {
        return false;
      }
    }
    const std::string& own = file.byte_level_pattern;
    if (file.split_patterns.empty()) {
      return file.merges.empty() || own == kGpt2Pattern;
    }
    return file.split_patterns.size() == 1 && file.split_patterns[0] == kLlama3Pattern &&
           (own.empty() || own == kGpt2Pattern);
  }

  void SetBytes(int32_t id, std::string bytes) {
    const std::size_t index = static_cast<std::size_t>(id);
    if (index >= bytes_of_.size()) {
      bytes_of_.resize(index + 1);
    }
    bytes_of_[index] = std::move(bytes);
  }

  absl::Status AddVocabulary(const TokenizerFile& file) {
    byte_ids_.fill(-1);
    for (const auto& [token, id] : file.vocabulary) {
      absl::StatusOr<std::string> bytes = StandInsToBytes(token);
      // Special tokens may stand in the vocabulary too, in plain characters.
      if (!bytes.ok()) {
        SetBytes(id, "");
        continue;
      }
      if (bytes->size() == 1) {
        byte_ids_[static_cast<uint8_t>((*bytes)[0])] = id;
      }
      id_of_.emplace(*bytes, id);
      SetBytes(id, *std::move(bytes));
    }
    for (int byte = 0; byte < 256; ++byte) {
      if (byte_ids_[static_cast<std::size_t>(byte)] < 0) {
        return absl::InvalidArgumentError(
            absl::StrCat("model.vocab: expected a token for every byte, got none for byte ", byte));
      }
    }
    for (const AddedToken& token : file.added) {
      SetBytes(token.id, token.special ? "" : token.content);
      added_.push_back(token);
      starts_[static_cast<uint8_t>(token.content[0])] = true;
    }
    // The longest first, so that the first that fits is the longest.
    std::stable_sort(added_.begin(), added_.end(), [](const AddedToken& a, const AddedToken& b) {
      return a.content.size() > b.content.size();
    });
    return absl::OkStatus();
  }

  absl::Status AddMerges(const TokenizerFile& file) {
    for (std::size_t i = 0; i < file.merges.size(); ++i) {
      const MergeRule& merge = file.merges[i];
      const absl::StatusOr<std::string> left = StandInsToBytes(merge.left);
      const absl::StatusOr<std::string> right = StandInsToBytes(merge.right);
      const auto id = [&](const std::string& bytes) {
        const auto found = id_of_.find(bytes);
        return found == id_of_.end() ? -1 : found->second;
      };
      const bool readable = left.ok() && right.ok();
      const int32_t left_id = readable ? id(*left) : -1;
      const int32_t right_id = readable ? id(*right) : -1;
      const int32_t merged_id = readable ? id(*left + *right) : -1;
      if (left_id < 0 || right_id < 0 || merged_id < 0) {
        return absl::InvalidArgumentError(absl::StrCat("model.merges[",
                                                       i,
                                                       "]: expected tokens of model.vocab, got '",
                                                       merge.left,
                                                       "' and '",
                                                       merge.right,
                                                       "'"));
      }
      merger_.Add(left_id, right_id, merged_id);
    }
    return absl::OkStatus();
  }

  // Returns the start of the first added token (the longest one there), or npos.
  std::size_t FindAdded(std::string_view text, const AddedToken*& token) const {
    if (added_.empty()) {
      return std::string_view::npos;
    }
    for (std::size_t i = 0; i < text.size(); ++i) {
      if (!starts_[static_cast<uint8_t>(text[i])]) {
        continue;
      }
      for (const AddedToken& added : added_) {
        if (text.compare(i, added.content.size(), added.content) == 0) {
          token = &added;
          return i;
        }
      }
    }
    return std::string_view::npos;
  }

  // Text without added tokens: UTF-8 goes through the pre-tokenizer, other bytes become their own
  // ids.
  absl::Status EncodePlain(std::string_view text, std::vector<int32_t>& ids) {
    while (!text.empty()) {
      const std::size_t bad = FindInvalidUtf8(text);
      RETURN_IF_ERROR(EncodeUtf8(text.substr(0, bad), ids));
      if (bad == std::string_view::npos) {
        break;
      }
      ids.push_back(byte_ids_[static_cast<uint8_t>(text[bad])]);
      text.remove_prefix(bad + 1);
    }
    return absl::OkStatus();
  }

  absl::Status EncodeUtf8(std::string_view text, std::vector<int32_t>& ids) {
    if (text.empty()) {
      return absl::OkStatus();
    }
    return SplitFrom(0, text, ids);
  }

  // Pieces of split step `step` go on to the next one, in the end to ByteLevel.
  absl::Status SplitFrom(std::size_t step, std::string_view text, std::vector<int32_t>& ids) {
    if (step == splits_.size()) {
      return ByteLevel(text, ids);
    }
    absl::Status status;
    const absl::Status split = splits_[step]->Split(text, [&](std::string_view piece) {
      if (status.ok()) {
        status = SplitFrom(step + 1, piece, ids);
      }
    });
    RETURN_IF_ERROR(status);
    return split;
  }

  absl::Status ByteLevel(std::string_view text, std::vector<int32_t>& ids) {
    std::string with_space;
    if (add_prefix_space_ && text.front() != ' ') {
      with_space = absl::StrCat(" ", std::string(text));
      text = with_space;
    }
    if (byte_level_ == nullptr) {
      EncodePiece(text, ids);
      return absl::OkStatus();
    }
    return byte_level_->Split(text, [&](std::string_view piece) { EncodePiece(piece, ids); });
  }

  void EncodePiece(std::string_view piece, std::vector<int32_t>& ids) {
    const auto cached = cache_.find(piece);
    if (cached != cache_.end()) {
      ids.insert(ids.end(), cached->second.begin(), cached->second.end());
      return;
    }
    std::vector<int32_t> merged;
    const auto whole = ignore_merges_ ? id_of_.find(piece) : id_of_.end();
    if (whole != id_of_.end()) {
      merged.push_back(whole->second);
    } else {
      for (const char c : piece) {
        merged.push_back(byte_ids_[static_cast<uint8_t>(c)]);
      }
      merger_.Merge(merged);
    }
    ids.insert(ids.end(), merged.begin(), merged.end());
    if (piece.size() <= kMaxCachedBytes && cache_.size() < kMaxCachedPieces) {
      cache_.emplace(std::string(piece), std::move(merged));
    }
  }

  bool add_prefix_space_ = false;
  bool ignore_merges_ = false;
  bool may_cut_lines_ = false;
  std::array<int32_t, 256> byte_ids_{};
  TextMap<int32_t> id_of_;             // bytes -> id
  std::vector<std::string> bytes_of_;  // id -> bytes
  std::vector<AddedToken> added_;
  std::array<bool, 256> starts_{};  // first bytes of added tokens
  BpeMerger merger_;
  std::vector<std::unique_ptr<SplitPattern>> splits_;
  std::unique_ptr<SplitPattern> byte_level_;
  TextMap<std::vector<int32_t>> cache_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Tokenizer>> Tokenizer::FromJson(std::string_view text) {
  ASSIGN_OR_RETURN(const TokenizerFile file, ReadTokenizerFile(text));
  ASSIGN_OR_RETURN(std::unique_ptr<Tokenizer> made, ByteLevelTokenizer::Make(file));
  return made;
}

absl::StatusOr<std::unique_ptr<Tokenizer>> Tokenizer::FromFile(const std::string& path) {
  ASSIGN_OR_RETURN(const std::string text, ReadWholeFile(path, kMaxFileBytes));
  absl::StatusOr<std::unique_ptr<Tokenizer>> made = FromJson(text);
  if (!made.ok()) {
    return Annotate(made.status(), path);
  }
  return made;
}

std::string BytesTokenizerJson() {
  TokenizerFile file;
  for (int32_t byte = 0; byte < 256; ++byte) {
    file.vocabulary.emplace_back(ByteStandIns()[static_cast<std::size_t>(byte)], byte);
  }
  file.added.push_back({256, "<|endoftext|>", true});
  return WriteTokenizerFile(file, false);
}

}  // namespace ravel::ctl
