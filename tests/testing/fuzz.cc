#include "tests/testing/fuzz.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <exception>
#include <memory>

#include <absl/strings/str_cat.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/time.h>
#include <unistd.h>

#include "tests/testing/fuzz_proto.h"
#include "tests/testing/process.h"
#include "tests/testing/sanitizer.h"

#if defined(__SANITIZE_ADDRESS__)
// These are of the sanitizer's library; g++ of the distribution comes without its headers.
extern "C" {
size_t __sanitizer_get_allocated_size(const volatile void* at);
int __sanitizer_install_malloc_and_free_hooks(void (*allocated)(const volatile void*, size_t),
                                              void (*freed)(const volatile void*));
void __sanitizer_set_death_callback(void (*callback)());
// The other sanitizer's library has no such callback: it is to abort.
const char* __ubsan_default_options() {
  return "abort_on_error=1:print_stacktrace=1";
}
}
#endif

namespace ravel::testing {
namespace {

constexpr int64_t kDefaultRuns = 300;
constexpr int kMostFaults = 3;
constexpr int kHangFactor = 10;  // of the time for an input, until it is not waited for any more

// The input that is being parsed, for signal handlers: plain data alone.
struct Current {
  const char* data = nullptr;
  size_t bytes = 0;
  char path[512] = {};
  char text[512] = {};  // how to repeat it
};
Current current;

void Say(const char* text) {
  [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, text, std::strlen(text));
}

// Only calls that are safe in signal handlers.
void KeepCurrent() {
  if (current.data == nullptr) {
    return;
  }
  const int fd = open(current.path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  if (fd >= 0) {
    [[maybe_unused]] const ssize_t written = write(fd, current.data, current.bytes);
    close(fd);
  }
  current.data = nullptr;
  Say("\nfuzz: the program died of the input in ");
  Say(current.path);
  Say("\nfuzz: again with ");
  Say(current.text);
  Say("\n");
}

void OnDeath(int number) {
  if (number == SIGPROF) {
    Say("\nfuzz: the input takes too long");
  }
  KeepCurrent();
  signal(number, SIG_DFL);
  raise(number);
}

#if defined(__SANITIZE_ADDRESS__)
int64_t live_bytes = 0;  // of the thread that parses, since the input began
int64_t most_bytes = 0;
thread_local bool watched = false;

void OnAllocation(const volatile void*, size_t bytes) {
  if (watched) {
    live_bytes += static_cast<int64_t>(bytes);
    most_bytes = std::max(most_bytes, live_bytes);
  }
}
void OnFree(const volatile void* at) {
  if (watched && at != nullptr) {
    live_bytes -= static_cast<int64_t>(__sanitizer_get_allocated_size(at));
  }
}
#endif

// Counts from construction to Bytes(), on this thread.
class HeapWatch {
 public:
  HeapWatch() {
#if defined(__SANITIZE_ADDRESS__)
    live_bytes = 0;
    most_bytes = 0;
    watched = true;
#endif
  }
  ~HeapWatch() {
    Bytes();
  }
  HeapWatch(const HeapWatch&) = delete;
  HeapWatch& operator=(const HeapWatch&) = delete;
  // The most that was held at one time; 0 where nobody counts.
  static int64_t Bytes() {
#if defined(__SANITIZE_ADDRESS__)
    watched = false;
    return most_bytes;
#else
    return 0;
#endif
  }
};

void WatchDeaths() {
  static const bool once = [] {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_set_death_callback(KeepCurrent);
    __sanitizer_install_malloc_and_free_hooks(OnAllocation, OnFree);
#else
    signal(SIGSEGV, OnDeath);
    signal(SIGBUS, OnDeath);
    signal(SIGFPE, OnDeath);
#endif
    signal(SIGABRT, OnDeath);
    signal(SIGPROF, OnDeath);
    return true;
  }();
  (void)once;
}

void SetHangTimer(std::chrono::milliseconds time) {
  itimerval timer = {};
  timer.it_value.tv_sec = time.count() / 1000;
  timer.it_value.tv_usec = time.count() % 1000 * 1000;
  setitimer(ITIMER_PROF, &timer, nullptr);
}

double CpuSeconds() {
  timespec now = {};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

int64_t Number(const char* name, int64_t otherwise) {
  const char* const text = std::getenv(name);
  return text == nullptr ? otherwise : std::atoll(text);
}

uint64_t SeedOf(const std::string& name, int64_t base, int64_t input) {
  uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a
  for (const char c : name) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  }
  return hash + static_cast<uint64_t>(base) * 0x9E3779B97F4A7C15u +
         static_cast<uint64_t>(input) * 0xD1342543DE82EF95u;
}

// Runs of one target. Used from one thread.
class Runs {
 public:
  Runs(const FuzzTarget& target, const std::function<FuzzAnswer(std::string_view)>& parse)
      : target_(target),
        parse_(parse),
        seed_(Number("RAVEL_FUZZ_SEED", 1)),
        limit_(target.cpu_time * (kSanitized ? 5 : 1)) {}

  // Input `number`; -1 - i: seed i.
  FuzzAnswer One(int64_t number, const std::string& input) {
    // It has exactly that size on the heap: a read beyond its end is seen.
    const auto bytes = std::make_unique<char[]>(input.size());
    std::copy(input.begin(), input.end(), bytes.get());
    current.bytes = input.size();
    std::snprintf(current.path,
                  sizeof(current.path),
                  "%s/fuzz-%s-%lld-%lld.input",
                  Folder(),
                  target_.name.c_str(),
                  static_cast<long long>(seed_),
                  static_cast<long long>(number));
    std::snprintf(current.text,
                  sizeof(current.text),
                  "RAVEL_FUZZ_SEED=%lld RAVEL_FUZZ_INPUT=%lld (%s)",
                  static_cast<long long>(seed_),
                  static_cast<long long>(number),
                  target_.name.c_str());
    current.data = bytes.get();
    const FuzzAnswer answer = Watched({bytes.get(), input.size()});
    current.data = nullptr;
    ++counts_.runs;
    counts_.accepted += answer.accepted ? 1 : 0;
    if (!answer.fault.empty()) {
      ++faults_;
      WriteText(current.path, input);
      ADD_FAILURE() << target_.name << ": " << answer.fault << "\ninput: " << current.path
                    << "\nagain with " << current.text;
    }
    return answer;
  }

  std::string Make(int64_t number) const {
    FuzzRandom random(SeedOf(target_.name, seed_, number));
    std::string input =
        target_.mutate ? target_.mutate(random) : MutateInput(target_.form, target_.seeds, random);
    if (target_.repair && !random.OneIn(3)) {
      target_.repair(input);
    }
    return input;
  }

  const FuzzCounts& counts() const { return counts_; }
  int faults() const { return faults_; }

 private:
  static const char* Folder() {
    const char* const folder = std::getenv("TMPDIR");
    return folder == nullptr ? "/tmp" : folder;
  }

  FuzzAnswer Watched(std::string_view input) {
    SetHangTimer(limit_ * kHangFactor);
    const double begin = CpuSeconds();
    FuzzAnswer answer;
    int64_t heap = 0;
    try {
      const HeapWatch watch;
      answer = parse_(input);
      heap = HeapWatch::Bytes();
    } catch (const std::exception& error) {
      answer.fault = absl::StrCat("throws ", error.what());
    }
    const double seconds = CpuSeconds() - begin;
    SetHangTimer({});
    const int64_t most = target_.heap_bytes + 64 * static_cast<int64_t>(input.size());
    if (answer.fault.empty() && heap > most) {
      answer.fault = absl::StrCat("takes ", heap, " bytes of memory, more than ", most);
    }
    if (answer.fault.empty() && seconds * 1000 > static_cast<double>(limit_.count())) {
      answer.fault = absl::StrCat("takes ", seconds, " s of processor time");
    }
    return answer;
  }

  const FuzzTarget& target_;
  const std::function<FuzzAnswer(std::string_view)>& parse_;
  const int64_t seed_;
  const std::chrono::milliseconds limit_;
  FuzzCounts counts_;
  int faults_ = 0;
};

}  // namespace

FuzzCounts Fuzz(const FuzzTarget& target,
                const std::function<FuzzAnswer(std::string_view input)>& parse) {
  WatchDeaths();
  SilenceProtobuf();
  Runs runs(target, parse);
  if (const char* const path = std::getenv("RAVEL_FUZZ_FILE")) {
    runs.One(0, ReadText(path));
    return runs.counts();
  }
  const int64_t only = Number("RAVEL_FUZZ_INPUT", -1);
  if (only >= 0) {
    runs.One(only, runs.Make(only));
    return runs.counts();
  }
  for (size_t i = 0; i < target.seeds.size(); ++i) {
    if (!runs.One(-1 - static_cast<int64_t>(i), target.seeds[i]).accepted) {
      ADD_FAILURE() << target.name << ": seed " << i << " is refused";
    }
  }
  const double begin = CpuSeconds();
  const int64_t count =
      std::max<int64_t>(Number("RAVEL_FUZZ_RUNS", kDefaultRuns) / target.part, 20);
  for (int64_t i = 0; i < count && runs.faults() < kMostFaults; ++i) {
    runs.One(i, runs.Make(i));
  }
  std::printf("fuzz %s: %lld inputs, %lld accepted, %.1f s\n",
              target.name.c_str(),
              static_cast<long long>(runs.counts().runs),
              static_cast<long long>(runs.counts().accepted),
              CpuSeconds() - begin);
  return runs.counts();
}

}  // namespace ravel::testing
