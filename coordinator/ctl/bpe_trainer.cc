// Trains a byte-level BPE. Text is reduced to distinct pieces with counts, and merging works on
// those. For each pair of neighbours the learner keeps its count and the words it occurs in, so a
// merge costs only those words. The queue holds stale entries: an entry is compared with the
// present count when it is taken, and put back if the count has fallen. Ties are broken by ids,
// which makes the result a function of the text alone.

#include "coordinator/ctl/bpe_trainer.h"

#include <algorithm>
#include <memory>
#include <queue>
#include <tuple>
#include <unordered_set>

#include "common/utf8.h"
#include "coordinator/ctl/byte_alphabet.h"
#include "coordinator/ctl/split_pattern.h"
#include "coordinator/ctl/tokenizer_file.h"

namespace ravel::ctl {
namespace {

constexpr std::size_t kMaxPieceBytes = 1024;  // longer pieces are cut: they are no words
constexpr int64_t kLeastCount = 2;

struct Word {
  std::vector<int32_t> ids;
  int64_t count = 0;
};

uint64_t KeyOf(int32_t left, int32_t right) {
  return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
}
int32_t LeftOf(uint64_t key) {
  return static_cast<int32_t>(key >> 32);
}
int32_t RightOf(uint64_t key) {
  return static_cast<int32_t>(key & 0xFFFFFFFFu);
}

// Pair counts that follow each merge, so that a merge costs only the words that it touches.
class MergeLearner {
 public:
  explicit MergeLearner(std::vector<Word> words) : words_(std::move(words)) {
    for (std::size_t i = 0; i < words_.size(); ++i) {
      for (std::size_t j = 0; j + 1 < words_[i].ids.size(); ++j) {
        const uint64_t key = KeyOf(words_[i].ids[j], words_[i].ids[j + 1]);
        counts_[key] += words_[i].count;
        AddPlace(key, i);
      }
    }
    for (const auto& [key, count] : counts_) {
      queue_.push({count, key});
    }
  }

  // The most frequent pair becomes `id`; false when none occurs twice.
  bool Next(int32_t id, uint64_t& merged) {
    while (!queue_.empty()) {
      const Candidate best = queue_.top();
      queue_.pop();
      const int64_t count = counts_[best.key];
      if (count != best.count) {
        if (count >= kLeastCount) {
          queue_.push({count, best.key});
        }
        continue;
      }
      if (count < kLeastCount) {
        continue;
      }
      Merge(best.key, id);
      merged = best.key;
      return true;
    }
    return false;
  }

 private:
  struct Candidate {
    int64_t count;
    uint64_t key;
    // The top of the queue: the highest count, then the smallest ids.
    bool operator<(const Candidate& other) const {
      return count != other.count ? count < other.count : key > other.key;
    }
  };

  void AddPlace(uint64_t key, std::size_t word) {
    std::vector<uint32_t>& places = places_[key];
    if (places.empty() || places.back() != word) {
      places.push_back(static_cast<uint32_t>(word));
    }
  }

  void Merge(uint64_t key, int32_t id) {
    std::vector<uint32_t> places = std::move(places_[key]);
    places_.erase(key);
    std::sort(places.begin(), places.end());
    places.erase(std::unique(places.begin(), places.end()), places.end());
    std::unordered_set<uint64_t> grown;
    for (const uint32_t place : places) {
      MergeWord(place, key, id, grown);
    }
    counts_.erase(key);
    for (const uint64_t changed : grown) {
      queue_.push({counts_[changed], changed});
    }
  }

  void MergeWord(uint32_t place, uint64_t key, int32_t id, std::unordered_set<uint64_t>& grown) {
    Word& word = words_[place];
    std::vector<int32_t>& ids = word.ids;
    std::size_t out = 0;
    bool after_merge = false;  // the pair between two merges in a row was taken off by the first
    for (std::size_t i = 0; i < ids.size(); ++i) {
      if (i + 1 < ids.size() && KeyOf(ids[i], ids[i + 1]) == key) {
        if (out > 0) {
          if (!after_merge) {
            counts_[KeyOf(ids[out - 1], ids[i])] -= word.count;
          }
          Grow(KeyOf(ids[out - 1], id), place, word.count, grown);
        }
        if (i + 2 < ids.size()) {
          counts_[KeyOf(ids[i + 1], ids[i + 2])] -= word.count;
          // If two merges follow each other, the second one adds the pair between them.
          const bool again = i + 3 < ids.size() && KeyOf(ids[i + 2], ids[i + 3]) == key;
          if (!again) {
            Grow(KeyOf(id, ids[i + 2]), place, word.count, grown);
          }
        }
        ids[out++] = id;
        ++i;
        after_merge = true;
      } else {
        ids[out++] = ids[i];
        after_merge = false;
      }
    }
    ids.resize(out);
  }

  void Grow(uint64_t key, uint32_t place, int64_t count, std::unordered_set<uint64_t>& grown) {
    counts_[key] += count;
    AddPlace(key, place);
    grown.insert(key);
  }

  std::vector<Word> words_;
  std::unordered_map<uint64_t, int64_t> counts_;
  std::unordered_map<uint64_t, std::vector<uint32_t>> places_;  // words that may hold the pair
  std::priority_queue<Candidate> queue_;
};

}  // namespace

absl::Status BpeTrainer::AddText(std::string_view text) {
  ASSIGN_OR_RETURN(const std::unique_ptr<SplitPattern> pattern,
                   SplitPattern::Compile(kGpt2Pattern));
  while (!text.empty()) {
    const std::size_t bad = FindInvalidUtf8(text);
    RETURN_IF_ERROR(pattern->Split(text.substr(0, bad), [&](std::string_view piece) {
      for (; piece.size() > kMaxPieceBytes; piece.remove_prefix(kMaxPieceBytes)) {
        ++counts_[std::string(piece.substr(0, kMaxPieceBytes))];
      }
      ++counts_[std::string(piece)];
    }));
    if (bad == std::string_view::npos) {
      break;
    }
    text.remove_prefix(bad + 1);
  }
  return absl::OkStatus();
}

std::string BpeTrainer::Train() const {
  std::vector<std::pair<std::string, int64_t>> sorted(counts_.begin(), counts_.end());
  std::sort(sorted.begin(), sorted.end());
  std::vector<Word> words;
  words.reserve(sorted.size());
  for (const auto& [piece, count] : sorted) {
    Word word;
    word.count = count;
    for (const char c : piece) {
      word.ids.push_back(static_cast<uint8_t>(c));
    }
    words.push_back(std::move(word));
  }
  TokenizerFile file;
  std::vector<std::string> tokens(ByteStandIns().begin(), ByteStandIns().end());
  MergeLearner learner(std::move(words));
  uint64_t merged = 0;
  while (static_cast<int64_t>(tokens.size()) + 1 < vocabulary_ &&
         learner.Next(static_cast<int32_t>(tokens.size()), merged)) {
    const std::string& left = tokens[static_cast<std::size_t>(LeftOf(merged))];
    const std::string& right = tokens[static_cast<std::size_t>(RightOf(merged))];
    file.merges.push_back({left, right});
    tokens.push_back(left + right);
  }
  for (std::size_t id = 0; id < tokens.size(); ++id) {
    file.vocabulary.emplace_back(tokens[id], static_cast<int32_t>(id));
  }
  file.added.push_back({static_cast<int32_t>(tokens.size()), "<|endoftext|>", true});
  return WriteTokenizerFile(file, true);
}

}  // namespace ravel::ctl
