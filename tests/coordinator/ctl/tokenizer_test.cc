#include "coordinator/ctl/tokenizer.h"

#include <map>
#include <random>

#include <absl/strings/str_replace.h>
#include <gtest/gtest.h>

#include "common/file_writer.h"
#include "common/json.h"
#include "coordinator/ctl/bpe_merger.h"
#include "coordinator/ctl/bpe_trainer.h"
#include "coordinator/ctl/byte_alphabet.h"
#include "coordinator/ctl/split_pattern.h"

namespace ravel::ctl {
namespace {

std::string Golden(const std::string& name) {
  return *ReadWholeFile(std::string(RAVEL_TOKENIZER_GOLDEN) + "/" + name, 1 << 24);
}

class GoldenIds : public ::testing::TestWithParam<const char*> {};

// The ids were made by the tokenizers package (golden/make_tokenizers.py).
TEST_P(GoldenIds, AreThoseOfTheTokenizersPackage) {
  const auto tokenizer = Tokenizer::FromJson(Golden(std::string(GetParam()) + ".tokenizer.json"));
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  const std::string cases = Golden(std::string(GetParam()) + ".cases.jsonl");
  int count = 0;
  for (std::size_t begin = 0; begin < cases.size();) {
    const std::size_t end = cases.find('\n', begin);
    const json::Value golden = *json::Parse(cases.substr(begin, end - begin));
    begin = end + 1;
    const std::string& text = golden.Find("text")->AsString();
    std::vector<int32_t> expected;
    for (const json::Value& id : golden.Find("ids")->AsArray()) {
      expected.push_back(static_cast<int32_t>(id.AsInt()));
    }
    for (int pass = 0; pass < 2; ++pass) {  // the second one from the cache
      std::vector<int32_t> ids;
      ASSERT_TRUE((*tokenizer)->Encode(text, ids).ok());
      EXPECT_EQ(ids, expected) << "'" << text << "'";
    }
    EXPECT_EQ((*tokenizer)->Decode(expected).value(), golden.Find("decoded")->AsString());
    ++count;
  }
  EXPECT_GT(count, 140);
}

INSTANTIATE_TEST_SUITE_P(Styles,
                         GoldenIds,
                         ::testing::Values("gpt2_style", "llama3_style", "prefix_space"));

TEST(SplitPatterns, OneThatBacktracksWithoutEndFails) {
  EXPECT_FALSE(SplitPattern::Compile(std::string(5000, 'a')).ok());
  const auto pattern = SplitPattern::Compile("(a+)+(b+)+(a+)+c|(a*)*d");
  ASSERT_TRUE(pattern.ok()) << pattern.status();
  EXPECT_FALSE(
      (*pattern)
          ->Split(std::string(40, 'a') + "bb" + std::string(40, 'a'), [](std::string_view) {})
          .ok());
}

TEST(Tokenizer, AnIdThatWouldTakeGigabytesIsRefused) {
  const std::string text = absl::StrReplaceAll(BytesTokenizerJson(), {{"256", "2147483646"}});
  const auto tokenizer = Tokenizer::FromJson(text);
  EXPECT_EQ(tokenizer.status().code(), absl::StatusCode::kInvalidArgument) << tokenizer.status();
}

TEST(Tokenizer, BytesAreTheirOwnIds) {
  const auto tokenizer = Tokenizer::FromJson(BytesTokenizerJson());
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_EQ((*tokenizer)->vocabulary(), 257);
  EXPECT_EQ((*tokenizer)->end_of_document(), 256);
  std::string all;
  std::vector<int32_t> expected;
  for (int byte = 0; byte < 256; ++byte) {
    all += static_cast<char>(byte);
    expected.push_back(byte);
  }
  std::vector<int32_t> ids;
  ASSERT_TRUE((*tokenizer)->Encode(all, ids).ok());
  EXPECT_EQ(ids, expected);
  EXPECT_EQ((*tokenizer)->Decode(ids).value(), all);
  EXPECT_FALSE((*tokenizer)->Decode(std::vector<int32_t>{257}).ok());
}

TEST(Tokenizer, BytesThatAreNotUtf8SurviveTheRoundTrip) {
  const auto tokenizer = Tokenizer::FromJson(Golden("gpt2_style.tokenizer.json"));
  ASSERT_TRUE(tokenizer.ok());
  std::mt19937 random(3);
  for (int round = 0; round < 200; ++round) {
    std::string text;
    for (int i = 0; i < 50; ++i) {
      text += random() % 3 == 0 ? static_cast<char>(random()) : "the and \n"[random() % 9];
    }
    std::vector<int32_t> ids;
    ASSERT_TRUE((*tokenizer)->Encode(text, ids).ok());
    EXPECT_EQ((*tokenizer)->Decode(ids).value(), text);
  }
}

TEST(Tokenizer, WhatIsNotSupportedIsNamed) {
  const std::string good = Golden("gpt2_style.tokenizer.json");
  const auto error = [&](const std::string& from, const std::string& to) {
    const std::string text = absl::StrReplaceAll(good, {{from, to}});
    EXPECT_NE(text, good) << from;
    return std::string(Tokenizer::FromJson(text).status().message());
  };
  EXPECT_EQ(error("\"normalizer\": null", "\"normalizer\": {\"type\": \"NFC\"}"),
            "normalizer: expected null, got {\"type\":\"NFC\"}");
  EXPECT_EQ(error("\"type\": \"BPE\"", "\"type\": \"Unigram\""),
            "model.type: expected \"BPE\", got \"Unigram\"");
  EXPECT_EQ(error("\"byte_fallback\": false", "\"byte_fallback\": true"),
            "model.byte_fallback: expected false (byte-level BPE), got true");
  EXPECT_EQ(error("\"lstrip\": false", "\"lstrip\": true"),
            "added_tokens[0].lstrip: expected false, got true");
  EXPECT_EQ(error("\"merges\": [", "\"merges\": [\"zz qq\","),
            "model.merges[0]: expected tokens of model.vocab, got 'zz' and 'qq'");
  EXPECT_NE(error("\"!\":", "\"!!!!\":").find("got none for byte 33"), std::string::npos);
  EXPECT_FALSE(Tokenizer::FromJson("{}").ok());
  EXPECT_FALSE(Tokenizer::FromJson("[1]").ok());
  EXPECT_FALSE(Tokenizer::FromJson("").ok());
  EXPECT_EQ(Tokenizer::FromFile("/no/such/tokenizer.json").status().code(),
            absl::StatusCode::kNotFound);
}

TEST(BpeMerger, LongAndShortPiecesMergeAlike) {
  BpeMerger merger;
  std::mt19937 random(5);
  int32_t next = 4;
  for (int rule = 0; rule < 60; ++rule) {
    const auto left = static_cast<int32_t>(random() % static_cast<uint32_t>(next));
    const auto right = static_cast<int32_t>(random() % static_cast<uint32_t>(next));
    merger.Add(left, right, next++);
  }
  // A rule by rule reference: the lowest rank, of equal ranks the leftmost, one merge at a time.
  // Short pieces do just that, so a long piece is compared with itself cut where no rule joins:
  // between two ids that no rule knows.
  for (int round = 0; round < 300; ++round) {
    std::vector<int32_t> whole;
    std::vector<int32_t> parts;
    for (int part = 0; part < 6; ++part) {
      std::vector<int32_t> piece;
      for (int i = 0; i < 20; ++i) {
        piece.push_back(static_cast<int32_t>(random() % 4));
      }
      piece.push_back(1000);  // in no rule
      whole.insert(whole.end(), piece.begin(), piece.end());
      merger.Merge(piece);
      parts.insert(parts.end(), piece.begin(), piece.end());
    }
    merger.Merge(whole);
    ASSERT_EQ(whole, parts);
  }
}

TEST(BpeTrainer, LearnsTheMostFrequentPairsInAFixedOrder) {
  BpeTrainer trainer(260);
  ASSERT_TRUE(trainer.AddText("ab ab ab cd cd ababab").ok());
  const std::string text = trainer.Train();
  const auto tokenizer = Tokenizer::FromJson(text);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_EQ((*tokenizer)->FindToken("ab"), 256);  // six times
  EXPECT_EQ((*tokenizer)->FindToken("Ġab"),
            257);  // three times: " ab" twice, and " ab" of " ababab"
  EXPECT_EQ((*tokenizer)->vocabulary(), 260);
  EXPECT_EQ((*tokenizer)->end_of_document(), 259);
}

// Counts pairs anew before every merge: slow, and surely right.
std::vector<std::pair<int32_t, int32_t>> NaiveMerges(std::vector<std::vector<int32_t>> words,
                                                     int count) {
  std::vector<std::pair<int32_t, int32_t>> merges;
  for (int32_t id = 256; id < 256 + count; ++id) {
    std::map<std::pair<int32_t, int32_t>, int> pairs;
    for (const auto& word : words) {
      for (std::size_t i = 0; i + 1 < word.size(); ++i) {
        ++pairs[{word[i], word[i + 1]}];
      }
    }
    auto best = pairs.end();
    for (auto pair = pairs.begin(); pair != pairs.end(); ++pair) {
      if (pair->second >= 2 && (best == pairs.end() || pair->second > best->second)) {
        best = pair;
      }
    }
    if (best == pairs.end()) {
      break;
    }
    merges.push_back(best->first);
    for (auto& word : words) {
      for (std::size_t i = 0; i + 1 < word.size(); ++i) {
        if (word[i] == best->first.first && word[i + 1] == best->first.second) {
          word[i] = id;
          word.erase(word.begin() + static_cast<std::ptrdiff_t>(i) + 1);
        }
      }
    }
  }
  return merges;
}

TEST(BpeTrainer, EqualsCountingAnewBeforeEveryMerge) {
  std::mt19937 random(11);
  for (int round = 0; round < 20; ++round) {
    std::vector<std::vector<int32_t>> words;
    std::string text;
    for (int i = 0; i < 60; ++i) {
      std::vector<int32_t> word;
      const std::size_t length = 1 + random() % 9;
      for (std::size_t j = 0; j < length; ++j) {
        word.push_back("abc"[random() % 3]);
      }
      words.push_back(word);
      text.append(word.begin(), word.end());
      text += '\n';
      words.push_back({'\n'});
    }
    const auto merges = NaiveMerges(words, 40);
    BpeTrainer trainer(256 + 40 + 1);
    ASSERT_TRUE(trainer.AddText(text).ok());
    const json::Value model = *json::Parse(trainer.Train())->Find("model");
    std::map<std::string, int32_t> vocabulary;
    for (const json::Member& member : model.Find("vocab")->AsObject()) {
      vocabulary[member.name] = static_cast<int32_t>(member.value.AsInt());
    }
    std::vector<std::pair<int32_t, int32_t>> learned;
    for (const json::Value& merge : model.Find("merges")->AsArray()) {
      const std::string& pair = merge.AsString();
      learned.emplace_back(vocabulary.at(pair.substr(0, pair.find(' '))),
                           vocabulary.at(pair.substr(pair.find(' ') + 1)));
    }
    ASSERT_EQ(learned, merges) << "round " << round;
  }
}

TEST(ByteAlphabet, EveryByteHasItsStandIn) {
  std::string all;
  for (int byte = 0; byte < 256; ++byte) {
    all += static_cast<char>(byte);
  }
  EXPECT_EQ(StandInsToBytes(BytesToStandIns(all)).value(), all);
  EXPECT_EQ(BytesToStandIns(" a\n"), "ĠaĊ");
  EXPECT_FALSE(StandInsToBytes("a b").ok());
  EXPECT_FALSE(StandInsToBytes("你").ok());
}

}  // namespace
}  // namespace ravel::ctl
