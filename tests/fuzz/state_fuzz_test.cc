// Files of the coordinator's state folder, which a crash may tear and a disk may damage.

#include <filesystem>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gtest/gtest.h>

#include "common/json.h"
#include "common/step_record.h"
#include "coordinator/jobs/goodput.h"
#include "coordinator/store/log_reader.h"
#include "coordinator/store/log_store.h"
#include "coordinator/store/metrics_history.h"
#include "coordinator/store/metrics_log.h"
#include "coordinator/store/sqlite_access_store.h"
#include "coordinator/store/sqlite_job_store.h"
#include "tests/testing/fuzz.h"
#include "tests/testing/process.h"

namespace ravel::testing {
namespace {

TEST(FuzzState, LogLines) {
  const ScratchFolder scratch;
  std::filesystem::create_directories(scratch.path() + "/uid/attempt-1");
  const std::string path = scratch.path() + "/uid/attempt-1/rank-0.log";
  Fuzz({.name = "log_file",
        .form = FuzzForm::kText,
        .seeds = {"1\t1700000000000\tw0\tfirst\n2\t1700000000001\tw0\tsecond\\n\n"}},
       [&](std::string_view input) {
         WriteText(path, std::string(input));
         coordinator::LogLine line;
         const bool known = coordinator::ParseLogLine(input.substr(0, input.find('\n')), line);
         for (const int64_t tail : {0, 2}) {
           coordinator::LogReader reader(scratch.path(), "uid", {.tail = tail});
           for (int i = 0; i < 100; ++i) {
             const auto lines = reader.Next();
             if (!lines.ok() || lines->empty()) {
               break;
             }
           }
         }
         coordinator::LogStore store(scratch.path());
         (void)store.Append("uid", {{.seq = 9, .attempt = 1, .node = "w0", .text = "x"}});
         return known ? Accepted() : Refused();
       });
}

TEST(FuzzState, MetricsFiles) {
  const ScratchFolder scratch;
  const std::string path = scratch.path() + "/uid.jsonl";
  std::string lines;
  for (int64_t step = 1; step <= 5; ++step) {
    StepRecord record;
    record.step = step;
    record.loss = 1.5f;
    absl::StrAppend(&lines, json::Serialize(StepRecordJson(record)), "\n");
  }
  Fuzz({.name = "metrics_file", .form = FuzzForm::kText, .seeds = {lines}},
       [&](std::string_view input) {
         WriteText(path, std::string(input));
         const coordinator::MetricsLog log(scratch.path());
         const auto all = log.Read("uid");
         (void)log.Ends("uid");
         (void)coordinator::StepOfLine(input.substr(0, input.find('\n')));
         coordinator::MetricsHistory history(scratch.path());
         for (const int64_t last : {0, 2}) {
           auto reader = history.Open("uid", {.every = 2, .last = last});
           for (int i = 0; reader.ok() && i < 100; ++i) {
             const auto records = (*reader)->Next();
             if (!records.ok() || records->empty()) {
               break;
             }
           }
         }
         if (!all.ok()) {
           return Refused();
         }
         (void)coordinator::SurvivingHistory(*all);
         return Accepted();
       });
}

TEST(FuzzState, GoodputRows) {
  Fuzz({.name = "goodput_row",
        .form = FuzzForm::kText,
        .seeds = {"productive:12 replay:3 newer:4", "5:100 10:200"}},
       [](std::string_view input) {
         const std::string text(input);
         coordinator::Goodput goodput;
         goodput.Load({.job_uid = "uid", .times = text, .curve = text, .devices = 2},
                      1000,
                      2000,
                      coordinator::DeviceUse::kNone);
         (void)goodput.Ratio();
         (void)goodput.Row("uid", 3000);
         return Accepted();
       });
}

// Rows as another release, or a damaged disk, might have them; SQLite's own checks see most of it.
TEST(FuzzState, Databases) {
  const ScratchFolder scratch;
  const std::string folder = scratch.path() + "/state";
  std::filesystem::create_directories(folder);
  {
    auto store = coordinator::SqliteJobStore::Create(folder);
    ASSERT_TRUE(store.ok()) << store.status();
    ASSERT_TRUE((*store)->Open().ok());
    coordinator::JobRecord job;
    job.uid = "uid-1";
    job.namespace_name = "default";
    job.name = "tiny";
    job.reason = "ProcessCrash";
    job.message = "signal 9";
    job.peak_bytes = {100, 200, 300};
    coordinator::StoreChange change;
    change.jobs = {job};
    ASSERT_EQ((*store)->Apply(change), absl::OkStatus());
  }
  const std::string seed = ReadText(folder + "/ravel.db");
  ASSERT_FALSE(seed.empty());
  Fuzz({.name = "state_database", .seeds = {seed}, .part = 6}, [&](std::string_view input) {
    std::filesystem::remove_all(folder);
    std::filesystem::create_directories(folder);
    WriteText(folder + "/ravel.db", std::string(input));
    auto store = coordinator::SqliteJobStore::Create(folder);
    if (!store.ok()) {
      return Refused();
    }
    const auto state = (*store)->Open();
    (void)(*store)->Events("uid-1", 0, 10);
    return state.ok() ? Accepted() : Refused();
  });
}

}  // namespace
}  // namespace ravel::testing
