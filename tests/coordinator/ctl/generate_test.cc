#include "coordinator/ctl/generate.h"

#include <filesystem>
#include <fstream>
#include <limits>
#include <string>
#include <utility>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "coordinator/ctl/data_verbs.h"
#include "coordinator/ctl/exit_code.h"

namespace ravel::ctl {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// A program that answers any request with one line.
class GenerateTest : public ::testing::Test {
 protected:
  GenerateTest() {
    std::string pattern = ::testing::TempDir() + "generate_XXXXXX";
    folder_ = mkdtemp(pattern.data());
  }
  ~GenerateTest() override { std::filesystem::remove_all(folder_); }
  absl::StatusOr<GeneratedText> Answer(const std::string& line) {
    const std::string trainer = folder_ + "/trainer.sh";
    std::ofstream(trainer) << "#!/bin/sh\ncat > /dev/null\necho '" << line << "'\n";
    std::filesystem::permissions(trainer, std::filesystem::perms::owner_all);
    return GenerateTokens(trainer, request_);
  }
  GenerateRequest request_ = {.checkpoint = "", .tokens = {1, 2}, .max_new_tokens = 9};
  std::string folder_;
};

TEST_F(GenerateTest, ATextThatThePositionsEndedIsSaidToBeShort) {
  const auto text = Answer(R"({"tokens":[3,4,5],"endedBy":"positions","positions":4})");
  ASSERT_TRUE(text.ok()) << text.status();
  EXPECT_THAT(text->tokens, ElementsAre(3, 4, 5));
  EXPECT_THAT(EarlyEndText(request_, *text),
              HasSubstr("ended after 3 of 9 new tokens: prompt and text have all 4 positions"));
}

TEST_F(GenerateTest, ATextThatEndedByItselfNeedsNoWord) {
  for (const char* line : {R"({"tokens":[3],"endedBy":"stopToken","positions":4})",
                           R"({"tokens":[3],"endedBy":"maxNewTokens","positions":4})"}) {
    const auto text = Answer(line);
    ASSERT_TRUE(text.ok()) << text.status();
    EXPECT_EQ(EarlyEndText(request_, *text), "");
  }
}

TEST_F(GenerateTest, AnAnswerThatIsNoneIsRefused) {
  EXPECT_THAT(std::string(Answer("{}").status().message()), HasSubstr("expected {\"tokens\""));
  EXPECT_THAT(std::string(Answer(R"({"error":"no memory"})").status().message()),
              HasSubstr("no memory"));
}

TEST(GenerateVerb, AnOptionOutOfRangeIsNamed) {
  const std::pair<GenerateOptions, const char*> cases[] = {
      {{.checkpoint = "/nowhere", .prompt = "a", .tokenizer = "", .seed = -1}, "--seed: "},
      {{.checkpoint = "/nowhere",
        .prompt = "a",
        .tokenizer = "",
        .temperature = std::numeric_limits<double>::infinity()},
       "--temperature: expected a finite number"},
      {{.checkpoint = "/nowhere", .prompt = "a", .tokenizer = "", .temperature = -1},
       "--temperature: "},
      {{.checkpoint = "/nowhere", .prompt = "a", .tokenizer = "", .max_new_tokens = 0},
       "--max-new-tokens: "},
      {{.checkpoint = "/nowhere", .prompt = "a", .tokenizer = "", .top_k = -1}, "--top-k: "}};
  for (const auto& [options, flag] : cases) {
    ::testing::internal::CaptureStderr();
    EXPECT_EQ(RunGenerate({}, options), kExitUsage) << flag;
    EXPECT_THAT(::testing::internal::GetCapturedStderr(), HasSubstr(flag));
  }
}

}  // namespace
}  // namespace ravel::ctl
