// Runs the trainer's binary to generate text, since ravelctl itself links no kernels. The child
// reads one JSON request from stdin and answers with one line. It is killed if the caller drops it,
// and its exit code and stderr explain a failure.

#include "coordinator/ctl/generate.h"

#include <array>
#include <cerrno>
#include <csignal>

#include <absl/strings/str_cat.h>
#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/json.h"

extern char** environ;

namespace ravel::ctl {
namespace {

constexpr std::size_t kMaxAnswerBytes = std::size_t{64} << 20;

// A child with a pipe to its stdin and one from its stdout; killed if it is dropped before Wait.
class Child {
 public:
  static absl::StatusOr<Child> Start(const std::string& program,
                                     const std::vector<std::string>& arguments) {
    int in[2];
    int out[2];
    if (pipe2(in, O_CLOEXEC) != 0 || pipe2(out, O_CLOEXEC) != 0) {
      return ErrnoStatus(errno, "pipe");
    }
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, in[0], STDIN_FILENO);
    posix_spawn_file_actions_adddup2(&actions, out[1], STDOUT_FILENO);
    std::vector<char*> argv = {const_cast<char*>(program.c_str())};
    for (const std::string& argument : arguments) {
      argv.push_back(const_cast<char*>(argument.c_str()));
    }
    argv.push_back(nullptr);
    pid_t pid = -1;
    const int error = posix_spawn(&pid, program.c_str(), &actions, nullptr, argv.data(), environ);
    posix_spawn_file_actions_destroy(&actions);
    close(in[0]);
    close(out[1]);
    if (error != 0) {
      close(in[1]);
      close(out[0]);
      return ErrnoStatus(error, program);
    }
    return Child(pid, in[1], out[0]);
  }
  Child(Child&& other) noexcept : pid_(other.pid_), in_(other.in_), out_(other.out_) {
    other.pid_ = -1;
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  ~Child() {
    if (pid_ > 0) {
      kill(pid_, SIGKILL);
      (void)Wait();
    }
  }

  // Sends everything and ends the child's input. A child that has gone away is told by its exit.
  void Send(const std::string& text) const {
    std::size_t sent = 0;
    while (sent < text.size()) {
      const ssize_t count = write(in_, text.data() + sent, text.size() - sent);
      if (count < 0 && errno != EINTR) {
        break;
      }
      sent += count > 0 ? static_cast<std::size_t>(count) : 0;
    }
    close(in_);
  }

  std::string ReadAll() const {
    std::string text;
    std::array<char, 65536> block;
    while (text.size() < kMaxAnswerBytes) {
      const ssize_t count = read(out_, block.data(), block.size());
      if (count < 0 && errno == EINTR) {
        continue;
      }
      if (count <= 0) {
        break;
      }
      text.append(block.data(), static_cast<std::size_t>(count));
    }
    return text;
  }

  // The status of waitpid.
  int Wait() {
    int status = 0;
    while (waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
    }
    pid_ = -1;
    close(out_);
    return status;
  }

 private:
  Child(pid_t pid, int in, int out) : pid_(pid), in_(in), out_(out) {}
  pid_t pid_;
  int in_;
  int out_;
};

absl::StatusOr<GeneratedText> ParseAnswer(const std::string& text) {
  ASSIGN_OR_RETURN(const json::Value answer, json::Parse(text));
  if (const json::Value* const error = answer.Find("error");
      error != nullptr && error->is_string()) {
    return absl::InternalError(error->AsString());
  }
  const json::Value* const tokens = answer.Find("tokens");
  if (tokens == nullptr || !tokens->is_array()) {
    return absl::InternalError("expected {\"tokens\": [...]}");
  }
  GeneratedText generated;
  for (const json::Value& token : tokens->AsArray()) {
    if (!token.is_int()) {
      return absl::InternalError("expected token ids");
    }
    generated.tokens.push_back(static_cast<int32_t>(token.AsInt()));
  }
  const json::Value* const ended_by = answer.Find("endedBy");
  const json::Value* const positions = answer.Find("positions");
  if (ended_by == nullptr || !ended_by->is_string() || positions == nullptr ||
      !positions->is_int()) {
    return absl::InternalError("expected {\"endedBy\": ..., \"positions\": ...}");
  }
  generated.ended_by = ended_by->AsString();
  generated.positions = positions->AsInt();
  return generated;
}

}  // namespace

absl::StatusOr<GeneratedText> GenerateTokens(const std::string& trainer,
                                             const GenerateRequest& request) {
  json::Array tokens;
  for (const int32_t id : request.tokens) {
    tokens.push_back(static_cast<int64_t>(id));
  }
  json::Value line;
  line.Set("tokens", json::Value(std::move(tokens)));
  line.Set("maxNewTokens", request.max_new_tokens);
  line.Set("temperature", request.temperature);
  line.Set("topK", request.top_k);
  line.Set("seed", request.seed);
  if (request.stop_token >= 0) {
    line.Set("stopToken", static_cast<int64_t>(request.stop_token));
  }
  ASSIGN_OR_RETURN(Child child,
                   Child::Start(trainer, {"--generate", "--checkpoint", request.checkpoint}));
  child.Send(json::Serialize(line) + "\n");
  const std::string answer = child.ReadAll();
  const int status = child.Wait();
  if (WIFSIGNALED(status)) {
    return absl::InternalError(absl::StrCat(trainer, ": ended by signal ", WTERMSIG(status)));
  }
  if (WEXITSTATUS(status) != 0) {
    return absl::InternalError(
        absl::StrCat(trainer, ": ended with exit code ", WEXITSTATUS(status)));
  }
  absl::StatusOr<GeneratedText> text = ParseAnswer(answer);
  if (!text.ok()) {
    return absl::InternalError(absl::StrCat(trainer, ": ", std::string(text.status().message())));
  }
  return text;
}

std::string EarlyEndText(const GenerateRequest& request, const GeneratedText& text) {
  return text.ended_by != "positions" ? ""
                                      : absl::StrCat("ended after ",
                                                     text.tokens.size(),
                                                     " of ",
                                                     request.max_new_tokens,
                                                     " new tokens: prompt and text have all ",
                                                     text.positions,
                                                     " positions (the model's, at most 8192)");
}

absl::StatusOr<std::string> SiblingBinary(const std::string& name) {
  std::array<char, 4096> path;
  const ssize_t length = readlink("/proc/self/exe", path.data(), path.size());
  if (length <= 0) {
    return ErrnoStatus(errno, "/proc/self/exe");
  }
  std::string self(path.data(), static_cast<std::size_t>(length));
  std::string sibling = self.substr(0, self.rfind('/') + 1) + name;
  if (access(sibling.c_str(), X_OK) != 0) {
    return absl::NotFoundError(
        absl::StrCat(sibling, ": not found; it is installed beside ravelctl"));
  }
  return sibling;
}

}  // namespace ravel::ctl
