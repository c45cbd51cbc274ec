#include "coordinator/saves/copy_marks.h"

#include <chrono>
#include <climits>
#include <fstream>
#include <optional>
#include <set>
#include <sstream>
#include <utility>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_split.h>
#include <unistd.h>

#include "common/crypto.h"
#include "common/logging.h"
#include "coordinator/saves/retention.h"
#include "coordinator/saves/saves.h"

namespace ravel::coordinator {
namespace {

using store::JoinPath;
using store::ObjectStore;

constexpr char kHolder[] = "copy-";
constexpr auto kRenewEvery = std::chrono::seconds(60);
constexpr int64_t kMaxMarkBytes = 4096;
constexpr int64_t kUnmarkedAgeMs = int64_t{24} * 3600 * 1000;

std::string FirstLine(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// Names a range of process ids: this boot of this host, and the namespace of processes. Empty:
// unknown.
std::string ProcessSpace() {
  char space[PATH_MAX];
  const ssize_t length = readlink("/proc/self/ns/pid", space, sizeof(space));
  const std::string boot = FirstLine("/proc/sys/kernel/random/boot_id");
  return length <= 0 || boot.empty()
             ? ""
             : absl::StrCat(boot, "/", std::string(space, static_cast<size_t>(length)));
}

// The start of a process of this space, in ticks; empty: there is none.
std::string StartOf(const std::string& pid) {
  const std::string line = FirstLine(absl::StrCat("/proc/", pid, "/stat"));
  const size_t name_end = line.rfind(')');
  constexpr size_t kStartField = 20;  // of those after the name, from 1
  const std::vector<std::string> fields = absl::StrSplit(
      name_end == std::string::npos ? "" : line.substr(name_end + 1), ' ', absl::SkipEmpty());
  return fields.size() < kStartField ? "" : fields[kStartField - 1];
}

// The text of a mark. Lines: attempt, space, process, its start.
struct MarkText {
  std::string attempt;
  std::string space;
  std::string process;
  std::string start;
};

std::string Encode(const MarkText& mark) {
  return absl::StrCat(mark.attempt, "\n", mark.space, "\n", mark.process, "\n", mark.start, "\n");
}

MarkText Decode(const std::string& text) {
  MarkText mark;
  std::istringstream lines(text);
  for (std::string* field : {&mark.attempt, &mark.space, &mark.process, &mark.start}) {
    std::getline(lines, *field);
  }
  return mark;
}

// True only for a process that this one would see.
bool IsGone(const MarkText& mark) {
  const bool digits =
      !mark.process.empty() && mark.process.find_first_not_of("0123456789") == std::string::npos;
  return digits && !mark.space.empty() && mark.space == ProcessSpace() &&
         StartOf(mark.process) != mark.start;
}

struct Mark {
  std::string path;
  std::string attempt;
  bool ended = false;
};

// NotFound when a mark goes between the listing and its reading.
absl::StatusOr<std::vector<Mark>> ReadListedMarks(const ObjectStore& store, int64_t now_ms) {
  std::vector<Mark> marks;
  const absl::StatusOr<std::vector<store::ListedEntry>> entries = store.List(ckpt::kPinsFolder);
  if (absl::IsNotFound(entries.status())) {
    return marks;
  }
  RETURN_IF_ERROR(entries.status());
  for (const store::ListedEntry& entry : *entries) {
    const std::optional<ckpt::PinName> pin = ckpt::ParsePinName(entry.name);
    if (pin && absl::StartsWith(pin->holder, kHolder)) {
      const std::string path = JoinPath(ckpt::kPinsFolder, entry.name);
      ASSIGN_OR_RETURN(const std::string text, store::ReadFile(store, path, kMaxMarkBytes));
      const MarkText mark = Decode(text);
      marks.push_back({path, mark.attempt, pin->Expired(now_ms / 1000) || IsGone(mark)});
    }
  }
  return marks;
}

// A mark that is renewed has another name: the marks are listed again then. To pass over one that
// went would leave a copy under way without a mark.
absl::StatusOr<std::vector<Mark>> ReadMarks(const ObjectStore& store, int64_t now_ms) {
  constexpr int kLooks = 16;
  absl::StatusOr<std::vector<Mark>> marks = ReadListedMarks(store, now_ms);
  for (int look = 1; look < kLooks && absl::IsNotFound(marks.status()); ++look) {
    marks = ReadListedMarks(store, now_ms);
  }
  return absl::IsNotFound(marks.status()) ? absl::UnavailableError(marks.status().message())
                                          : std::move(marks);
}

bool IsDead(const ObjectStore& store,
            const std::string& attempt,
            const std::vector<Mark>& marks,
            int64_t now_ms) {
  bool marked = false;
  for (const Mark& mark : marks) {
    if (mark.attempt == attempt && !mark.ended) {
      return false;
    }
    marked |= mark.attempt == attempt;
  }
  const absl::StatusOr<int64_t> changed = store.ChangedMs(attempt);
  return marked || (changed.ok() && *changed > 0 && *changed <= now_ms - kUnmarkedAgeMs);
}

}  // namespace

CopyMark::CopyMark(ObjectStore* store, const ckpt::AttemptKey& attempt, const Clock& clock)
    : store_(store),
      attempt_(attempt),
      clock_(&clock),
      holder_(absl::StrCat(kHolder, RandomHex(4))) {}

absl::StatusOr<std::unique_ptr<CopyMark>> CopyMark::Make(ObjectStore* store,
                                                         const ckpt::AttemptKey& attempt,
                                                         const Clock& clock) {
  std::unique_ptr<CopyMark> mark(new CopyMark(store, attempt, clock));
  RETURN_IF_ERROR(store::MakeDirectories(*store, ckpt::kPinsFolder));
  RETURN_IF_ERROR(mark->Renew());
  mark->thread_ = std::thread([made = mark.get()] { made->RenewUntilEnded(); });
  return mark;
}

CopyMark::~CopyMark() {
  {
    const MutexLock lock(mutex_);
    ended_ = true;
    changed_.NotifyAll();
  }
  if (thread_.joinable()) {
    thread_.join();
  }
  if (!path_.empty()) {
    store::WithdrawIfThere(*store_, path_).IgnoreError();  // it runs out by itself
  }
}

absl::Status CopyMark::Renew() {
  const std::string process = absl::StrCat(getpid());
  const std::string path =
      JoinPath(ckpt::kPinsFolder,
               ckpt::PinFileName({.step = attempt_.step,
                                  .holder = holder_,
                                  .until_s = clock_->WallMs() / 1000 + kCopyMarkSeconds}));
  if (path == path_) {
    return absl::OkStatus();
  }
  RETURN_IF_ERROR(store_->Put(path,
                              Encode({.attempt = ckpt::AttemptName(attempt_),
                                      .space = ProcessSpace(),
                                      .process = process,
                                      .start = StartOf(process)})));
  const std::string before = std::exchange(path_, path);
  return before.empty() ? absl::OkStatus() : store::WithdrawIfThere(*store_, before);
}

void CopyMark::RenewUntilEnded() {
  for (;;) {
    {
      const MutexLock lock(mutex_);
      if (!ended_) {
        changed_.WaitFor(mutex_, kRenewEvery);
      }
      if (ended_) {
        return;
      }
    }
    const absl::Status renewed = Renew();
    if (!renewed.ok()) {
      log::Warning(
          absl::StrCat("the mark of this copy is not renewed: ", std::string(renewed.message())));
    }
  }
}

absl::StatusOr<std::vector<std::string>> RemoveDeadCopies(ObjectStore& store,
                                                          int64_t now_ms,
                                                          const std::string& own) {
  // Attempts first: an attempt that is listed has its mark, or its copy has just ended.
  ASSIGN_OR_RETURN(const std::vector<ckpt::AttemptKey> attempts, ListAttempts(store));
  ASSIGN_OR_RETURN(const std::vector<Mark> marks, ReadMarks(store, now_ms));
  std::vector<std::string> removed;
  std::set<std::string> kept;
  for (const ckpt::AttemptKey& key : attempts) {
    const std::string name = ckpt::AttemptName(key);
    if (key.attempt < kCopyAttempt || name == own) {
      continue;
    }
    // The removal of one that is no copy any more was cut off.
    if (IsCopy(key) && !IsDead(store, name, marks, now_ms)) {
      kept.insert(name);
      continue;
    }
    RETURN_IF_ERROR(WithdrawAttempt(store, key));
    removed.push_back(name);
  }
  for (const Mark& mark : marks) {
    if (mark.ended && !kept.contains(mark.attempt)) {
      RETURN_IF_ERROR(store::WithdrawIfThere(store, mark.path));
    }
  }
  return removed;
}

}  // namespace ravel::coordinator
