// The ravelctl program at a real terminal (a pty), in front of a coordinator whose every text is
// hostile: names, messages, log lines, errors. What reaches the terminal moves no cursor, sets no
// title and hides nothing. Into a pipe the texts go as they are.

#include <chrono>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_replace.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>

#include "common/utf8.h"
#include "tests/coordinator/ctl/every_text_proto.h"
#include "tests/coordinator/ctl/fake_jobs_service.h"
#include "tests/testing/mini_cluster.h"
#include "tests/testing/process.h"

namespace ravel::testing {
namespace {

using std::chrono::seconds;
using ::testing::HasSubstr;

// A title, a cleared screen, a line that is written over, CSI in both forms, DEL, text that turns.
constexpr char kHostile[] =
    "evil\x1b]0;owned\x07\x1b[2J\rgood\x7f\xc2\x9b"
    "31m\xe2\x80\xaetxt\xe2\x81\xa6 end";
constexpr char kEscaped[] =
    "evil\\x1b]0;owned\\x07\\x1b[2J\\x0dgood\\x7f\\x9b"
    "31m\\u202etxt\\u2066 end";

template <typename Proto>
Proto Poisoned() {
  Proto message;
  SetEveryText(message, kHostile);
  return message;
}

// The controlling end of a pty. It makes "\r\n" of each newline.
class Terminal {
 public:
  Terminal() : main_(posix_openpt(O_RDWR | O_NOCTTY | O_NONBLOCK | O_CLOEXEC)) {
    EXPECT_TRUE(main_ >= 0 && grantpt(main_) == 0 && unlockpt(main_) == 0);
    char name[64] = {};
    EXPECT_EQ(ptsname_r(main_, name, sizeof(name)), 0);
    name_ = name;
    held_ = open(name, O_RDWR | O_NOCTTY | O_CLOEXEC);
  }
  ~Terminal() {
    close(held_);
    close(main_);
  }
  Terminal(const Terminal&) = delete;
  Terminal& operator=(const Terminal&) = delete;

  const std::string& name() const { return name_; }
  // Reads what comes within the time; empty: nothing.
  std::string Read(int wait_ms) const {
    pollfd asked = {.fd = main_, .events = POLLIN, .revents = 0};
    char buffer[4096];
    const ssize_t count = poll(&asked, 1, wait_ms) == 1 ? read(main_, buffer, sizeof(buffer)) : -1;
    return count > 0 ? std::string(buffer, static_cast<size_t>(count)) : "";
  }

 private:
  const int main_;
  int held_ = -1;  // so that no end of a program hangs the terminal up
  std::string name_;
};

class TerminalTest : public ::testing::Test {
 protected:
  void SetUp() override {
    service_.states = {Poisoned<v1::Job>()};
    service_.states[0].set_state(v1::RUNNING);
    service_.events = {Poisoned<v1::JobEvent>()};
    service_.events[0].set_seq(1);
    service_.logs = {Poisoned<v1::LogLine>()};
    service_.metrics = {Poisoned<v1::StepRecord>()};
    service_.nodes = {Poisoned<v1::Node>()};
    service_.checkpoints = {Poisoned<v1::Checkpoint>()};
    service_.leftovers = {Poisoned<v1::Leftover>()};
    service_.operations = {Poisoned<v1::Operation>()};
  }
  ProcessOptions Command(std::vector<std::string> verb) const {
    verb.insert(verb.begin(), {BinaryPath("ravelctl"), "--coordinator", service_.address()});
    return {.arguments = std::move(verb), .environment = {{"HOME", scratch_.path()}}};
  }
  // All that a terminal gets of the command, from stdout and stderr.
  std::string AtTerminal(const std::vector<std::string>& verb) const {
    const Terminal terminal;
    ProcessOptions options = Command(verb);
    options.output_path = options.error_path = terminal.name();
    const auto child = ChildProcess::Start(options);
    EXPECT_TRUE(child.ok()) << child.status();
    std::string shown;
    const auto end = std::chrono::steady_clock::now() + seconds(60);
    bool running = true;
    while (running && std::chrono::steady_clock::now() < end) {
      running = (*child)->Running();  // before the last read
      for (std::string more = terminal.Read(running ? 50 : 0); !more.empty();
           more = terminal.Read(0)) {
        shown += more;
      }
    }
    EXPECT_FALSE(running) << verb[0];
    return shown;
  }

  const ScratchFolder scratch_;
  FakeJobsService service_;
};

// Control characters in what is shown, but for newlines, tabs, and what ravelctl itself writes to
// draw a line of progress anew.
std::string Controls(const std::string& shown) {
  std::string found;
  const std::string text = absl::StrReplaceAll(shown, {{"\r\x1b[K", ""}, {"\r\n", "\n"}});
  for (size_t at = 0; at < text.size();) {
    const DecodedCharacter character = DecodeUtf8(text, at);
    const uint32_t code = character.bytes == 0 ? 0x1B : character.code_point;
    const bool control = (code < 0x20 && code != '\n' && code != '\t') ||
                         (code >= 0x7F && code < 0xA0) || code == 0x202E || code == 0x2066;
    if (control) {
      absl::StrAppend(&found, absl::Hex(code), " at ", at, "; ");
    }
    at += character.bytes == 0 ? 1 : static_cast<size_t>(character.bytes);
  }
  return found;
}

TEST_F(TerminalTest, NamesMessagesAndLinesReachATerminalEscaped) {
  const std::vector<std::vector<std::string>> verbs = {{"list"},
                                                       {"list", "-o", "wide"},
                                                       {"nodes", "list", "-o", "wide"},
                                                       {"list", "-o", "name"},
                                                       {"describe", "job"},
                                                       {"get", "job", "-o", "yaml"},
                                                       {"get", "job", "-o", "json"},
                                                       {"logs", "job"},
                                                       {"logs", "job", "-o", "jsonl"},
                                                       {"events", "job"},
                                                       {"events", "job", "-o", "jsonl"},
                                                       {"top"},
                                                       {"nodes", "list"},
                                                       {"checkpoints", "list", "job"},
                                                       {"checkpoint", "job", "--wait"}};
  for (const std::vector<std::string>& verb : verbs) {
    const std::string shown = AtTerminal(verb);
    EXPECT_EQ(Controls(shown), "") << verb[0] << ":\n" << shown;
    EXPECT_THAT(shown, HasSubstr("evil\\")) << verb[0];
  }
  EXPECT_THAT(AtTerminal({"logs", "job"}), HasSubstr(kEscaped));
  EXPECT_THAT(AtTerminal({"describe", "job"}), HasSubstr(kEscaped));
  EXPECT_THAT(AtTerminal({"events", "job"}), HasSubstr(kEscaped));
}

TEST_F(TerminalTest, WideIsRefusedWhereNoTableIsWider) {
  const RunResult events =
      RunProgram(Command({"events", "job", "-o", "wide"}), scratch_.path(), seconds(60));
  EXPECT_EQ(events.exit_code, 2);
  EXPECT_EQ(events.out, "");
  EXPECT_NE(events.err.find("--output: wide: events has no wider table; these have: list, get, "
                            "nodes list, checkpoints list"),
            std::string::npos)
      << events.err;
  const RunResult nodes =
      RunProgram(Command({"nodes", "drain", "n1", "-o", "wide"}), scratch_.path(), seconds(60));
  EXPECT_NE(nodes.err.find("wide: nodes drain has"), std::string::npos) << nodes.err;
}

TEST_F(TerminalTest, ProgressAndErrorsReachATerminalEscaped) {
  service_.states[0].set_state(v1::FAILED);
  for (const std::vector<std::string>& verb :
       {std::vector<std::string>{"wait", "job", "--for=done"}, {"logs", "job", "--follow"}}) {
    EXPECT_EQ(Controls(AtTerminal(verb)), "") << verb[0];
  }
  service_.failure = {grpc::StatusCode::FAILED_PRECONDITION, absl::StrCat(kHostile, "\xff")};
  for (const std::vector<std::string>& verb : std::vector<std::vector<std::string>>{
           {"list"}, {"describe", "job"}, {"cancel", "job"}, {"nodes", "list"}}) {
    const std::string shown = AtTerminal(verb);
    EXPECT_EQ(Controls(shown), "") << verb[0] << ":\n" << shown;
    EXPECT_THAT(shown, HasSubstr("evil\\")) << verb[0];
  }
  // A text that a person was made to paste.
  EXPECT_EQ(Controls(AtTerminal({kHostile})), "");
  EXPECT_EQ(Controls(AtTerminal({"describe", kHostile})), "");
  EXPECT_EQ(Controls(AtTerminal({"submit", "-f", absl::StrCat("/", kHostile)})), "");
}

TEST_F(TerminalTest, APipeGetsTheTextsAsTheyAre) {
  const RunResult logs = RunProgram(Command({"logs", "job"}), scratch_.path(), seconds(60));
  EXPECT_EQ(logs.exit_code, 0) << logs.err;
  EXPECT_THAT(logs.out, HasSubstr(kHostile));
}

}  // namespace
}  // namespace ravel::testing
