#include "coordinator/ctl/output.h"

#include <algorithm>

#include <gtest/gtest.h>

#include "coordinator/ctl/completion.h"
#include "coordinator/ctl/explain_proto.h"
#include "coordinator/ctl/progress.h"

namespace ravel::ctl {
namespace {

TEST(Output, TablesAlignByCharacters) {
  Table table({"NAME", "X"});
  table.AddRow({"ü", "1"});
  table.AddRow({"longer", ""});
  EXPECT_EQ(table.Text(true), "NAME    X\nü       1\nlonger\n");
  EXPECT_EQ(table.Text(false), "ü       1\nlonger\n");
}

TEST(Output, ATextOfOthersIsNoRowOfItsOwn) {
  Table table({"NAME", "STATE"});
  table.AddRow({"a", "FAILED"});
  table.AddRow({"b", "x\nc     DONE"});
  EXPECT_EQ(table.Text(false), "a  FAILED\nb  x\\nc     DONE\n");
  EventView event;
  event.message = "disk\n09:00:00 Completed";
  EXPECT_EQ(EventLine(event).find('\n'), std::string::npos);
}

TEST(Output, YamlQuotesWhatWouldReadDifferently) {
  const json::Value value = *json::Parse(
      R"({"a": "plain text", "b": "no", "c": "1.0", "d": "", "e": "x: y", "f": ["-", {"k": 1, "l": [2]}], "g": {},
          "h": "- x", "i": true, "j": "two\nlines"})");
  EXPECT_EQ(ToYaml(value),
            "a: plain text\nb: \"no\"\nc: \"1.0\"\nd: \"\"\ne: \"x: y\"\nf:\n  - \"-\"\n  - k: 1\n "
            "   l:\n      - 2\n"
            "g: {}\nh: \"- x\"\ni: true\nj: \"two\\nlines\"\n");
}

TEST(Output, ListsAreLinesInJsonl) {
  const json::Value document = ListDocument({json::Value(1), json::Value("x")});
  EXPECT_EQ(FormatDocument(document, Format::kJsonl), "1\n\"x\"\n");
  EXPECT_EQ(FormatDocument(document, Format::kJson),
            "{\n  \"schemaVersion\": \"ravel/v1\",\n  \"items\": [1, \"x\"]\n}\n");
  EXPECT_FALSE(ParseFormat("xml").ok());
}

JobView RunningJob() {
  JobView job;
  job.state = "RUNNING";
  job.step = 120;
  job.total_steps = 2000;
  job.tokens_per_second = 7912;
  job.loss = 2.3127;
  job.eta_seconds = 185;
  job.epoch = 2;
  job.world_size = 3;
  return job;
}

TEST(Progress, OneLineTellsHowTheJobGoes) {
  EXPECT_EQ(ProgressLine(RunningJob()),
            "step 120/2000 ▕▌         ▏ 6% 7.9k tok/s loss 2.31 ETA 3m5s | epoch 2, 3 workers");
  JobView queued;
  queued.state = "QUEUED";
  queued.reason = "WaitingForDevices";
  EXPECT_EQ(ProgressLine(queued),
            "step 0/0 ▕          ▏ 0% QUEUED (WaitingForDevices) | epoch 0, 0 workers");
}

TEST(Progress, BarsFillInEighths) {
  EXPECT_EQ(Bar(0), "▕          ▏");
  EXPECT_EQ(Bar(1), "▕██████████▏");
  EXPECT_EQ(Bar(0.5), "▕█████     ▏");
  EXPECT_EQ(Bar(7), Bar(1));
}

TEST(Progress, NumbersAreShort) {
  EXPECT_EQ(ShortNumber(850), "850");
  EXPECT_EQ(ShortNumber(7912), "7.9k");
  EXPECT_EQ(ShortNumber(999.6), "1.0k");
  EXPECT_EQ(ShortNumber(1234567), "1.2M");
  EXPECT_EQ(ShortNumber(123456), "123k");
}

TEST(Progress, OffATerminalThereAreOnlyPlainLines) {
  ::testing::internal::CaptureStderr();
  ProgressView view(false);
  JobView job = RunningJob();
  for (job.step = 1; job.step <= 2000; ++job.step) {
    view.ShowJob(job);
  }
  EventView event;
  event.type = "WorkerLost";
  event.message = "gone";
  view.ShowEvent(event);
  view.Finish();
  const std::string text = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(text.find('\r'), std::string::npos);
  EXPECT_EQ(text.find('\033'), std::string::npos);
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'),
            12);  // every tenth of the way, and the event
  EXPECT_NE(text.find("00:00:00 WorkerLost: gone (step 0, epoch 0)\n"), std::string::npos) << text;
}

TEST(Explain, FieldsSpeakWithTheCommentsOfTheApi) {
  const auto text = ExplainField("spec.training.optimizer.lr");
  ASSERT_TRUE(text.ok()) << text.status();
  EXPECT_EQ(
      *text,
      "FIELD  spec.training.optimizer.lr  <number>\n  Peak learning rate; required.\n  (a number "
      "above 0)\n");
  EXPECT_EQ(ExplainField("training.optimizer.lr").value(), *text);
  EXPECT_NE(ExplainField("").value().find("apiVersion  <text>"), std::string::npos);
  EXPECT_NE(ExplainField("elastic").value().find("growDelay  <text>"), std::string::npos);
  EXPECT_NE(ExplainField("metadata.labels").value().find("<mapping of text to text>"),
            std::string::npos);
  EXPECT_EQ(ExplainField("data.train[0].weight").status(), absl::OkStatus());
  EXPECT_EQ(ExplainField("training.lrr").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(ExplainField("training.stepz").status().message(),
            "no field 'stepz' in spec.training; did you mean 'steps'?");
  EXPECT_FALSE(ExplainField("training.steps.more").ok());
}

TEST(Completion, OffersVerbsOptionsAndJobs) {
  const std::vector<CompletionEntry> entries = {{"", {"get", "list"}, false},
                                                {"get", {"--output"}, true}};
  const std::string bash = CompletionScript("bash", entries).value();
  EXPECT_NE(bash.find("complete -F _ravelctl ravelctl"), std::string::npos);
  EXPECT_NE(bash.find("timeout 0.3 ravelctl list -o name"), std::string::npos);
  EXPECT_NE(CompletionScript("zsh", entries).value().find("bashcompinit"), std::string::npos);
  EXPECT_NE(CompletionScript("fish", entries).value().find("__fish_use_subcommand"),
            std::string::npos);
  EXPECT_FALSE(CompletionScript("csh", entries).ok());
}

}  // namespace
}  // namespace ravel::ctl
