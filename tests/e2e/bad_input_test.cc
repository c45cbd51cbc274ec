// Bad input gives a message that names the field or file, and the documented exit code (README of
// coordinator/ctl): 2 usage or invalid file, 3 not found, 6 coordinator unreachable, 7 job failed
// through its user's fault, 8 through ours.

#include <chrono>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_replace.h>
#include <gtest/gtest.h>
#include <sys/mount.h>

#include "tests/testing/mini_cluster.h"
#include "tests/testing/required.h"

namespace ravel::testing {
namespace {

using std::chrono::seconds;

class BadInputTest : public ::testing::Test {
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
    return {.name = name,
            .tokens_path = Path("tokens.bin"),
            .store = Path("store"),
            .steps = 3,
            .detection = "1s"};
  }
  // `verb -f FILE` of a job file with this text.
  static RunResult WithFile(const std::string& verb, const std::string& text) {
    WriteText(Path("job.yaml"), text);
    std::vector<std::string> arguments = {verb, "-f", Path("job.yaml")};
    if (verb == "submit") {
      arguments.push_back("--follow");
    }
    return cluster_->Ctl(arguments, seconds(60));
  }
  static void ExpectNames(const RunResult& result,
                          int exit_code,
                          const std::vector<std::string>& words) {
    EXPECT_EQ(result.exit_code, exit_code) << result.out << result.err;
    for (const std::string& word : words) {
      EXPECT_TRUE(absl::StrContains(result.out + result.err, word))
          << "no '" << word << "' in: " << result.out << result.err;
    }
  }

  static MiniCluster* cluster_;
};

MiniCluster* BadInputTest::cluster_ = nullptr;

struct FileCase {
  std::string what;
  std::string from;  // text of a good file, replaced by `to`
  std::string to;
  std::vector<std::string> names;  // what the message must name
};

TEST_F(BadInputTest, JobFileFaultsAreNamedWithLineAndField) {
  const std::string good = ToYaml(Job("named"));
  const std::vector<FileCase> cases = {
      {"unknown key", "    steps: 3\n", "    steps: 3\n    stepz: 4\n", {"stepz", ":22:5"}},
      {"duplicate key", "    steps: 3\n", "    steps: 3\n    steps: 4\n", {"steps"}},
      {"word for a number", "steps: 3\n", "steps: many\n", {"steps", "many"}},
      {"list for a number", "steps: 3\n", "steps: [3]\n", {"steps"}},
      {"fraction for a whole number", "globalBatch: 8", "globalBatch: 8.5", {"globalBatch", "8.5"}},
      {"no steps", "    steps: 3\n", "", {"steps"}},
      {"steps below one", "steps: 3\n", "steps: 0\n", {"steps"}},
      {"negative learning rate", "lr: 3e-3", "lr: -1", {"lr"}},
      {"batch that lanes do not divide", "globalBatch: 8", "globalBatch: 9", {"globalBatch"}},
      {"lanes not a power of two", "virtualRanks: 8", "virtualRanks: 6", {"virtualRanks"}},
      {"more workers than lanes", "count: 2}", "count: 16}", {"16"}},
      {"heads that do not divide",
       "numKeyValueHeads: 2",
       "numKeyValueHeads: 4",
       {"numKeyValueHeads"}},
      {"odd head size", "hiddenSize: 36", "hiddenSize: 42", {"headDim", "7"}},
      {"absurd width", "hiddenSize: 36", "hiddenSize: 1000000000000", {"hiddenSize"}},
      {"unknown model", "modelType: llama", "modelType: mamba", {"modelType", "mamba"}},
      {"unknown transport",
       "  determinism:",
       "  parallelism: {transport: pigeon}\n  determinism:",
       {"transport", "pigeon"}},
      {"store of an unknown kind", "file://", "ftp://", {"store"}},
      {"bad duration", "time: 1s", "time: soon", {"time", "soon"}},
      {"not YAML", "spec:\n", "spec: {\n", {":6:"}},
      {"another kind", "kind: TrainingJob", "kind: Pod", {"kind", "Pod"}},
      {"bad name", "name: named", "name: Not_A_Label", {"name"}},
      {"model twice", "    config:\n", "    from: /nowhere\n    config:\n", {"model"}},
  };
  for (const FileCase& one : cases) {
    SCOPED_TRACE(one.what);
    const std::string bad = absl::StrReplaceAll(good, {{one.from, one.to}});
    ASSERT_NE(bad, good) << "the case no longer fits the file";
    ExpectNames(WithFile("validate", bad), 2, one.names);
    ExpectNames(WithFile("submit", bad), 2, one.names);
  }
  EXPECT_EQ(WithFile("validate", good).exit_code, 0);
  // Nothing was left behind.
  EXPECT_EQ(cluster_->Ctl({"get", "named"}).exit_code, 3);
  ExpectNames(cluster_->Ctl({"validate", "-f", Path("absent.yaml")}), 3, {"absent.yaml"});
}

TEST_F(BadInputTest, SeveralFaultsAreReportedAtOnce) {
  const std::string bad = absl::StrReplaceAll(
      ToYaml(Job("several")),
      {{"steps: 3\n", "steps: 0\n"}, {"lr: 3e-3", "lr: -1"}, {"seed: 7", "sead: 7"}});
  ExpectNames(WithFile("validate", bad), 2, {"steps", "lr", "sead"});
}

TEST_F(BadInputTest, BadTokenFilesAreNamed) {
  TinyJob missing = Job("missing-tokens");
  missing.tokens_path = Path("absent.bin");
  ExpectNames(WithFile("submit", ToYaml(missing)), 2, {"absent.bin"});

  TinyJob truncated = Job("truncated-tokens");
  WriteText(Path("odd.bin"), std::string(4001, '\1'));
  truncated.tokens_path = Path("odd.bin");
  ExpectNames(WithFile("submit", ToYaml(truncated)), 2, {"odd.bin"});

  TinyJob empty = Job("short-tokens");
  WriteText(Path("short.bin"), std::string(8, '\0'));
  empty.tokens_path = Path("short.bin");
  ExpectNames(WithFile("submit", ToYaml(empty)), 2, {"short.bin"});

  TinyJob beyond = Job("ids-beyond");
  WriteTokens(Path("wide.bin"), 5000, 5000);
  beyond.tokens_path = Path("wide.bin");
  ExpectNames(WithFile("submit", ToYaml(beyond)), 2, {"wide.bin", "97"});
}

TEST_F(BadInputTest, CheckpointOfAnotherModelIsRefused) {
  const RunResult first = WithFile("submit", ToYaml(Job("narrow")));
  ASSERT_EQ(first.exit_code, 0) << first.err;
  absl::StatusOr<std::map<int64_t, std::string>> saved = cluster_->Checkpoints("narrow");
  ASSERT_TRUE(saved.ok()) << saved.status();
  TinyJob wide = Job("wide");
  wide.hidden = 48;
  wide.steps = 6;
  wide.resume_from = (*saved)[3];
  ASSERT_NE(wide.resume_from, "");
  const RunResult other = WithFile("submit", ToYaml(wide));
  EXPECT_TRUE(other.exit_code == 7 || other.exit_code == 8) << other.exit_code;
  ExpectNames(other, other.exit_code, {"another model", "model.embed_tokens.weight", "[97, 48]"});
  ExpectNames(cluster_->Ctl({"checkpoints", "verify", Path("tokens.bin")}), 3, {"tokens.bin"});
}

TEST_F(BadInputTest, FullDiskFailsTheJobAndLeavesNothingHalfDone) {
  const std::string disk = Path("disk");
  std::filesystem::create_directories(disk);
  if (::mount("tmpfs", disk.c_str(), "tmpfs", 0, "size=64k") != 0) {
    SkipWithout("mounts", "a small file system needs root");
    return;
  }
  TinyJob job = Job("full-disk");
  job.store = disk;
  job.more_spec = "";
  // Without a limit it would wait for space.
  const std::string text = absl::StrReplaceAll(
      ToYaml(job), {{"  checkpoint:\n", "  checkpoint:\n    maxFailedSaves: 1\n"}});
  const RunResult result = WithFile("submit", text);
  EXPECT_TRUE(result.exit_code == 7 || result.exit_code == 8) << result.exit_code << result.err;
  EXPECT_TRUE(absl::StrContains(result.out + result.err, "No space left") ||
              absl::StrContains(result.out + result.err, "disk"))
      << result.err;
  const absl::StatusOr<std::map<int64_t, std::string>> saved = cluster_->Checkpoints("full-disk");
  EXPECT_TRUE(saved.ok() && saved->empty());
  ::umount2(disk.c_str(), MNT_DETACH);
}

TEST_F(BadInputTest, ProgramsSayWhatIsWrongWithTheirArguments) {
  const auto run = [](std::vector<std::string> arguments) {
    arguments.front() = BinaryPath(arguments.front());
    return RunProgram({.arguments = std::move(arguments)}, cluster_->folder(), seconds(20));
  };
  const std::string port = cluster_->address().substr(cluster_->address().find(':') + 1);
  const RunResult used = run({"ravel-coordinator",
                              "--dev-loopback",
                              "--listen",
                              cluster_->address(),
                              "--state-dir",
                              Path("state2")});
  EXPECT_NE(used.exit_code, 0);
  EXPECT_TRUE(absl::StrContains(used.err + used.out, port)) << used.err;

  const RunResult locked = run({"ravel-coordinator",
                                "--dev-loopback",
                                "--listen",
                                "127.0.0.1:0",
                                "--state-dir",
                                Path("state")});
  EXPECT_NE(locked.exit_code, 0) << "two coordinators on one state folder";
  EXPECT_TRUE(absl::StrContains(locked.err + locked.out, Path("state"))) << locked.err;

  const RunResult open = run({"ravel-coordinator",
                              "--dev-loopback",
                              "--listen",
                              "0.0.0.0:0",
                              "--state-dir",
                              Path("state3")});
  EXPECT_NE(open.exit_code, 0) << "plaintext on an open address";
  EXPECT_TRUE(absl::StrContains(open.err + open.out, "0.0.0.0")) << open.err;

  ExpectNames(run({"ravelctl", "--coordinator", "127.0.0.1:1", "list"}), 6, {"127.0.0.1:1"});
  ExpectNames(cluster_->Ctl({"get", "nobody"}), 3, {"nobody"});
  ExpectNames(cluster_->Ctl({"frobnicate"}), 2, {"ravelctl"});
}

}  // namespace
}  // namespace ravel::testing
