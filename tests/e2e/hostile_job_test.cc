// Jobs that mean harm: each is refused in words that name the field or file, or ends by its own
// fault, nothing is held by them, and what others look at goes on.

#include <chrono>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_replace.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include "tests/testing/eventually.h"
#include "tests/testing/mini_cluster.h"

namespace ravel::testing {
namespace {

using std::chrono::seconds;
using std::chrono::steady_clock;

class HostileJobTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    absl::StatusOr<std::unique_ptr<MiniCluster>> started = MiniCluster::Start();
    ASSERT_TRUE(started.ok()) << started.status();
    cluster_ = std::move(*started).release();
    ASSERT_EQ(cluster_->StartWorkers(2), absl::OkStatus());
    WriteTokens(Path("tokens.bin"), 5000, TinyJob().vocabulary);
  }
  static void TearDownTestSuite() {
    delete cluster_;
    cluster_ = nullptr;
  }
  static std::string Path(const std::string& name) { return cluster_->folder() + "/" + name; }
  static TinyJob Job(const std::string& name) {
    return {.name = name, .tokens_path = Path("tokens.bin"), .store = Path("store"), .steps = 3};
  }
  static RunResult Submit(const std::string& text) {
    WriteText(Path("job.yaml"), text);
    return cluster_->Ctl({"submit", "--follow", "-f", Path("job.yaml")}, seconds(60));
  }
  // Refused (2), or failed through its user's fault (7); and nothing repeats what was hostile.
  static void ExpectRefused(const RunResult& result, const std::string& word) {
    EXPECT_TRUE(result.exit_code == 2 || result.exit_code == 7)
        << result.exit_code << ": " << result.out.substr(0, 500) << result.err.substr(0, 500);
    EXPECT_TRUE(absl::StrContains(result.out + result.err, word))
        << "no '" << word << "' in " << (result.out + result.err).substr(0, 2000);
    EXPECT_LT(result.out.size() + result.err.size(), 64u << 10);
    EXPECT_FALSE(absl::StrContains(result.out + result.err, "\x1b"));
  }
  // Whatever was tried: no device is held, lists come at once, and a good job runs.
  static void ExpectUnharmed() {
    const bool free = Eventually(seconds(60), [] {
      const RunResult nodes = cluster_->Ctl({"nodes", "list", "-o", "json"});
      const absl::StatusOr<json::Value> parsed = json::Parse(nodes.out);
      const json::Value* items = parsed.ok() ? parsed->Find("items") : nullptr;
      if (items == nullptr || items->AsArray().size() != 2) {
        return false;
      }
      for (const json::Value& node : items->AsArray()) {
        if (node.Find("devicesFree")->AsDouble() != 1) {
          return false;
        }
      }
      return true;
    });
    EXPECT_TRUE(free) << cluster_->Ctl({"nodes", "list"}).out;
    EXPECT_TRUE(cluster_->AllTrainers().empty());
    const steady_clock::time_point start = steady_clock::now();
    for (const char* verb : {"list", "top"}) {
      const RunResult shown = cluster_->Ctl({verb});
      EXPECT_EQ(shown.exit_code, 0) << verb << ": " << shown.err;
      EXPECT_FALSE(absl::StrContains(shown.out + shown.err, "\x1b")) << verb;
    }
    EXPECT_LT(steady_clock::now() - start, seconds(10));
  }

  static MiniCluster* cluster_;
};

MiniCluster* HostileJobTest::cluster_ = nullptr;

TEST_F(HostileJobTest, HugeFieldsAreRefused) {
  for (const size_t bytes : {size_t{5000}, size_t{64} << 20}) {
    TinyJob job = Job("huge");
    job.more_spec =
        absl::StrCat("  observability: {trace: {directory: /", std::string(bytes, 'x'), "}}\n");
    ExpectRefused(Submit(ToYaml(job)),
                  bytes == 5000 ? "spec.observability.trace.directory" : "MiB");
  }
  ExpectUnharmed();
}

TEST_F(HostileJobTest, TextsThatCommandATerminalAreRefused) {
  for (const char* text : {"\\e]0;owned\\a", "\\u009b2J", "\\u202egpj", "a\\r b"}) {
    const std::string hostile = absl::StrCat("\"", text, "\"");
    const std::string good = ToYaml(Job("escape"));
    ExpectRefused(Submit(absl::StrReplaceAll(good, {{"name: escape", "name: " + hostile}})),
                  "metadata.name");
    TinyJob job = Job("escape");
    job.more_spec = absl::StrCat("  observability: {trace: {directory: ", hostile, "}}\n");
    ExpectRefused(Submit(ToYaml(job)), "spec.observability.trace.directory");
  }
  ExpectUnharmed();
}

TEST_F(HostileJobTest, PathsThatAreNoFilesAreRefused) {
  ASSERT_EQ(mkfifo(Path("pipe.bin").c_str(), 0600), 0);
  std::filesystem::create_symlink("/dev/zero", Path("zero.bin"));
  std::filesystem::create_symlink(Path("loop.bin"), Path("loop.bin"));
  std::filesystem::create_symlink("/proc/self/environ", Path("environ.bin"));
  WriteText(Path("secret.json"), "TOKEN=secret\n");
  WriteText(Path("keys.json"), R"({"token": "secret", "model": "none"})");
  for (const std::string& path : {Path("pipe.bin"),
                                  Path("zero.bin"),
                                  Path("loop.bin"),
                                  Path("environ.bin"),
                                  std::string("/proc/self/mem"),
                                  std::string("/proc/self/environ")}) {
    TinyJob job = Job("paths");
    job.tokens_path = path;
    ExpectRefused(Submit(ToYaml(job)), "data");
    cluster_->Ctl({"delete", "paths", "--force"});
  }
  for (const std::string& path : {Path("pipe.bin"),
                                  std::string("/proc/self/environ"),
                                  Path("secret.json"),
                                  Path("keys.json")}) {
    const std::string text = ToYaml(Job("tokenizer"));
    ASSERT_TRUE(absl::StrContains(text, "  data:\n")) << text;
    ExpectRefused(Submit(absl::StrReplaceAll(
                      text, {{"  data:\n", "  data:\n    tokenizer: " + path + "\n"}})),
                  "tokenizer");
    cluster_->Ctl({"delete", "tokenizer", "--force"});
  }
  ExpectUnharmed();
  ASSERT_EQ(cluster_->Submit(Job("good")), absl::OkStatus());
  EXPECT_EQ(cluster_->WaitForSuccess("good", seconds(60)), absl::OkStatus());
}

}  // namespace
}  // namespace ravel::testing
