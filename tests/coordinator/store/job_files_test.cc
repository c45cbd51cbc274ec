// A job's metrics and logs, written by one and read by range by others.

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include "coordinator/store/line_file.h"
#include "coordinator/store/log_reader.h"
#include "coordinator/store/log_store.h"
#include "coordinator/store/metrics_history.h"
#include "coordinator/store/metrics_log.h"
#include "tests/testing/cpu_time.h"

namespace ravel::coordinator {
namespace {

class JobFilesTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (std::filesystem::temp_directory_path() / "job-files-XXXXXX").string();
    folder_ = mkdtemp(pattern.data());
  }
  void TearDown() override {
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }
  static std::string Line(const StepRecord& record) {
    return json::Serialize(StepRecordJson(record));
  }
  static StepRecord Record(int64_t step, int64_t epoch) {
    StepRecord record;
    record.step = step;
    record.epoch = epoch;
    record.loss = static_cast<float>(step);
    return record;
  }
  // Epochs that each begin somewhere below where the one before ended.
  void WriteRestarts(MetricsLog& log) {
    int64_t epoch = 0;
    for (const auto& [first, last] : std::vector<std::pair<int64_t, int64_t>>{
             {1, 900}, {501, 1500}, {1401, 1450}, {1201, 3000}}) {
      ++epoch;
      for (int64_t step = first; step <= last; ++step) {
        ASSERT_TRUE(log.Append("job", Record(step, epoch)).ok());
      }
    }
  }
  std::vector<StepRecord> All(MetricsReader& reader) {
    std::vector<StepRecord> all;
    while (true) {
      const absl::StatusOr<std::vector<StepRecord>> next = reader.Next();
      EXPECT_TRUE(next.ok()) << next.status();
      if (!next.ok() || next->empty()) {
        return all;
      }
      EXPECT_LE(next->size(), 1000U) << "a block, not everything";
      all.insert(all.end(), next->begin(), next->end());
    }
  }
  std::vector<StepRecord> Read(StepRange range) {
    absl::StatusOr<std::unique_ptr<MetricsReader>> reader = history_->Open("job", range);
    EXPECT_TRUE(reader.ok()) << reader.status();
    return All(**reader);
  }
  std::vector<LogLine> All(LogReader& reader) {
    std::vector<LogLine> all;
    while (true) {
      const absl::StatusOr<std::vector<LogLine>> next = reader.Next();
      EXPECT_TRUE(next.ok()) << next.status();
      if (!next.ok() || next->empty()) {
        return all;
      }
      all.insert(all.end(), next->begin(), next->end());
    }
  }

  std::string folder_;
  std::unique_ptr<MetricsHistory> history_;
};

TEST_F(JobFilesTest, ALossScaleIsInTheRecordsThatHaveOne) {
  StepRecord record = Record(3, 1);
  EXPECT_EQ(Line(record).find("loss_scale"), std::string::npos);
  EXPECT_EQ(ParseStepRecord(Line(record))->loss_scale, 0);
  record.loss_scale = 16777216;
  EXPECT_EQ(ParseStepRecord(Line(record))->loss_scale, 16777216);
}

TEST_F(JobFilesTest, ARangeIsWhatTheWholeSurvivingHistoryHasThere) {
  MetricsLog log(folder_);
  WriteRestarts(log);
  history_ = std::make_unique<MetricsHistory>(folder_);
  const std::vector<StepRecord> whole = SurvivingHistory(*log.Read("job"));
  const auto expect = [&](StepRange range, const auto& wanted) {
    const std::vector<StepRecord> got = Read(range);
    std::vector<StepRecord> want;
    for (const StepRecord& record : whole) {
      if (wanted(record.step)) {
        want.push_back(record);
      }
    }
    ASSERT_EQ(got.size(), want.size());
    for (size_t i = 0; i < got.size(); ++i) {
      EXPECT_EQ(got[i].step, want[i].step);
      EXPECT_EQ(got[i].epoch, want[i].epoch);
    }
  };
  expect({}, [](int64_t) { return true; });
  expect({.from = 450, .to = 1250}, [](int64_t step) { return step >= 450 && step <= 1250; });
  expect({.from = 1201}, [](int64_t step) { return step >= 1201; });
  expect({.to = 1}, [](int64_t step) { return step <= 1; });
  expect({.every = 7}, [](int64_t step) { return step % 7 == 0; });
  expect({.last = 5}, [](int64_t step) { return step > 2995; });
  expect({.from = 4000}, [](int64_t) { return false; });
  EXPECT_EQ(Read({.all = true}).size(), 900U + 1000 + 50 + 1800);
  EXPECT_EQ(Read({.from = 1450, .to = 1450, .all = true}).size(), 3U);
}

TEST_F(JobFilesTest, AReaderThatFollowsSeesEachRecordOnce) {
  MetricsLog log(folder_);
  history_ = std::make_unique<MetricsHistory>(folder_);
  ASSERT_TRUE(log.Append("job", Record(1, 1)).ok());
  absl::StatusOr<std::unique_ptr<MetricsReader>> reader = history_->Open("job", {});
  ASSERT_TRUE(reader.ok());
  EXPECT_EQ(All(**reader).size(), 1U);
  int64_t seen = 1;
  for (int64_t step = 2; step <= 500; ++step) {
    ASSERT_TRUE(log.Append("job", Record(step, 1)).ok());
    if (step % 7 == 0) {
      for (const StepRecord& record : All(**reader)) {
        EXPECT_EQ(record.step, ++seen);
      }
    }
  }
  // Half a line is not a record yet.
  std::ofstream half(folder_ + "/job.jsonl", std::ios::app);
  const std::string line = Line(Record(501, 1)) + "\n";
  half << line.substr(0, 20) << std::flush;
  All(**reader);
  half << line.substr(20) << std::flush;
  const std::vector<StepRecord> last = All(**reader);
  ASSERT_EQ(last.size(), 1U);
  EXPECT_EQ(last[0].step, 501);
}

TEST_F(JobFilesTest, EndsAreReadWithoutTheMiddle) {
  MetricsLog log(folder_);
  EXPECT_FALSE((*log.Ends("job")).has_value());
  WriteRestarts(log);
  std::ofstream(folder_ + "/job.jsonl", std::ios::app) << "{\"step\":3001,\"los";
  const auto ends = log.Ends("job");
  ASSERT_TRUE(ends.ok() && ends->has_value()) << ends.status();
  EXPECT_EQ((*ends)->first.step, 1);
  EXPECT_EQ((*ends)->last.step, 3000);
  // 287 MB would take seconds; a hole in the middle is never looked at.
  std::filesystem::resize_file(folder_ + "/job.jsonl", 4LL << 30);
  std::ofstream(folder_ + "/job.jsonl", std::ios::app) << "\n" << Line(Record(9, 9)) << "\n";
  const double start_ms = testing::ThreadCpuMs();
  EXPECT_EQ((*log.Ends("job"))->last.step, 9);
  EXPECT_LT(testing::ThreadCpuMs() - start_ms, 1000);
}

// The order of magnitude of a start with 10 M lines in 10,000 files.
TEST_F(JobFilesTest, EndsOfManyFilesTakeNoTime) {
  constexpr int kFiles = 200;
  std::string text;
  for (int64_t step = 1; step <= 1000; ++step) {
    text += Line(Record(step, 1)) + "\n";
  }
  for (int i = 0; i < kFiles; ++i) {
    std::ofstream(absl::StrCat(folder_, "/job-", i, ".jsonl")) << text;
  }
  MetricsLog log(folder_);
  const double start_ms = testing::ThreadCpuMs();
  for (int i = 0; i < kFiles; ++i) {
    EXPECT_EQ((*log.Ends(absl::StrCat("job-", i)))->last.step, 1000);
  }
  const double took_ms = testing::ThreadCpuMs() - start_ms;
  EXPECT_LT(took_ms, 300) << "10,000 files would take " << 50 * took_ms << " ms";
}

TEST_F(JobFilesTest, ManyJobsAreWrittenWithFewFilesOpen) {
  MetricsLog log(folder_);
  for (int round = 1; round <= 2; ++round) {
    for (int job = 0; job < 600; ++job) {
      ASSERT_TRUE(log.Append(absl::StrCat("job-", job), Record(round, 1)).ok());
    }
  }
  int64_t open_files = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code error;
    const std::string target = std::filesystem::read_symlink(entry.path(), error).string();
    open_files += target.starts_with(folder_) ? 1 : 0;
  }
  EXPECT_LE(open_files, 256);
  EXPECT_EQ(log.Read("job-0")->size(), 2U);
  EXPECT_EQ(log.Read("job-599")->size(), 2U);
}

std::vector<LogLine> Lines(int64_t first, int64_t count, int64_t attempt, int64_t rank) {
  std::vector<LogLine> made;
  for (int64_t i = first; i < first + count; ++i) {
    made.push_back({i, 1000 * attempt + i, attempt, rank, "node", absl::StrCat("line ", i)});
  }
  return made;
}

TEST_F(JobFilesTest, LogsAreMergedInBlocksCutToTheirTailAndFollowed) {
  LogStore logs(folder_);
  for (int64_t attempt = 1; attempt <= 3; ++attempt) {
    for (int64_t rank = 0; rank < 5; ++rank) {
      ASSERT_TRUE(logs.Append("job", Lines(0, 700, attempt, rank)).ok());
    }
  }
  const std::vector<LogLine> whole = logs.Read("job", 0, -1);
  ASSERT_EQ(whole.size(), 3U * 5 * 700);
  const auto same = [](const std::vector<LogLine>& got, std::vector<LogLine> want) {
    ASSERT_EQ(got.size(), want.size());
    for (size_t i = 0; i < got.size(); ++i) {
      EXPECT_EQ(got[i].attempt, want[i].attempt);
      EXPECT_EQ(got[i].rank, want[i].rank);
      EXPECT_EQ(got[i].seq, want[i].seq);
    }
  };
  LogReader all(folder_, "job", {});
  same(All(all), whole);
  LogReader tail(folder_, "job", {.tail = 4000});
  same(All(tail), {whole.end() - 4000, whole.end()});
  LogReader one(folder_, "job", {.attempt = 2, .rank = 3, .tail = 2});
  const std::vector<LogLine> two = All(one);
  ASSERT_EQ(two.size(), 2U);
  EXPECT_EQ(two[1].seq, 699);
  LogReader since(folder_, "job", {.since_ms = 3000 + 690});
  EXPECT_EQ(All(since).size(), 50U);
  // New lines, also of a rank and an attempt that were not there.
  ASSERT_TRUE(logs.Append("job", Lines(700, 2, 3, 0)).ok());
  ASSERT_TRUE(logs.Append("job", Lines(0, 3, 4, 7)).ok());
  EXPECT_EQ(All(tail).size(), 5U);
  EXPECT_TRUE(All(tail).empty());
}

TEST_F(JobFilesTest, LogsOfAJobAreBoundedAcrossRestartsAndSayWhatWasDropped) {
  const LogLimits limits{.job_bytes = 100'000, .part_bytes = 10'000};
  int64_t seq = 0;
  for (int coordinator = 0; coordinator < 4; ++coordinator) {
    LogStore logs(folder_, limits);
    for (int batch = 0; batch < 40; ++batch) {
      ASSERT_TRUE(logs.Append("job", Lines(seq, 50, 1, 0)).ok());
      seq += 50;
    }
    // Sent again after a restart: known by its number.
    EXPECT_TRUE(logs.Append("job", Lines(seq - 50, 50, 1, 0))->empty());
  }
  {
    LogStore logs(folder_, limits);
    EXPECT_TRUE(logs.Append("job", Lines(seq - 50, 50, 1, 0))->empty());
  }
  int64_t bytes = 0;
  for (const LogFile& file : ListLogFiles(folder_, "job", 0, -1)) {
    bytes += file.bytes;
  }
  EXPECT_LE(bytes, 120'000);
  EXPECT_GE(bytes, 80'000);
  LogReader reader(folder_, "job", {});
  const std::vector<LogLine> kept = All(reader);
  EXPECT_EQ(kept.back().seq, seq - 1) << "the newest lines stay";
  int told = 0;
  for (const LogLine& line : kept) {
    told += line.text.find("oldest lines were dropped") != std::string::npos ? 1 : 0;
  }
  EXPECT_GT(told, 0);
}

TEST_F(JobFilesTest, NothingThatIsNoFileIsWaitedFor) {
  ASSERT_EQ(mkfifo((folder_ + "/job.jsonl").c_str(), 0600), 0);
  history_ = std::make_unique<MetricsHistory>(folder_);
  EXPECT_TRUE(Read({}).empty());
}

}  // namespace
}  // namespace ravel::coordinator
