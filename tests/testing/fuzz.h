#pragma once

// Mutated inputs for parsers of what comes from outside. A target is a function and some valid
// documents; each run changes a document and expects an answer: no crash, no exception, no report
// of a sanitizer, bounded memory and time. Input N of a seed is always the same.
//
//   RAVEL_FUZZ_RUNS   inputs for each target; default 300
//   RAVEL_FUZZ_SEED   other inputs; default 1
//   RAVEL_FUZZ_INPUT  only the input of this number
//   RAVEL_FUZZ_FILE   only the bytes of this file
//
// An input that fails is kept in a file of TMPDIR, also when the program dies of it; its name and
// number are printed.

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace ravel::testing {

// SplitMix64. Value semantics.
class FuzzRandom {
 public:
  explicit FuzzRandom(uint64_t seed) : state_(seed) {}
  uint64_t Next();
  // 0 to count - 1; count is above 0.
  size_t Below(size_t count) { return static_cast<size_t>(Next() % count); }
  bool OneIn(size_t count) { return Below(count) == 0; }

 private:
  uint64_t state_;
};

// kBytes: bits, bytes, lengths at aligned places, cuts, splices and repeated blocks. kText: tokens
// of JSON, YAML and the like, too.
enum class FuzzForm { kBytes, kText };

// A seed with one to eight changes; at least one seed.
std::string MutateInput(FuzzForm form, const std::vector<std::string>& seeds, FuzzRandom& random);
// Numbers that parsers trip over: limits of types and the values beside them.
int64_t HostileNumber(FuzzRandom& random);
// Text of that kind: empty, long, controls, broken UTF-8, paths that lead elsewhere.
std::string HostileText(FuzzRandom& random);

struct FuzzAnswer {
  bool accepted = false;
  std::string fault = {};  // a property that did not hold; empty: none
};
inline FuzzAnswer Refused() {
  return {};
}
inline FuzzAnswer Accepted() {
  return {.accepted = true};
}
// Accepted, and a fault if the value does not come back from its own encoding.
inline FuzzAnswer AcceptedIf(bool same, std::string fault = "does not come back as it was") {
  return {.accepted = true, .fault = same ? "" : std::move(fault)};
}

struct FuzzTarget {
  std::string name;  // also of files
  FuzzForm form = FuzzForm::kBytes;
  std::vector<std::string> seeds = {};
  // This replaces MutateInput over the seeds.
  std::function<std::string(FuzzRandom& random)> mutate = nullptr;
  // It makes checksums right again in two inputs of three, so that what is behind them is reached.
  std::function<void(std::string& input)> repair = nullptr;
  int64_t part = 1;  // runs are divided by this, for targets that take long
  // On top of 64 times the input. Watched under the address sanitizer alone.
  int64_t heap_bytes = int64_t{64} << 20;
  std::chrono::milliseconds cpu_time{1000};  // for one input; five times that under a sanitizer
};

struct FuzzCounts {
  int64_t runs = 0;
  int64_t accepted = 0;
};

// Every seed as it is, which must be accepted, then the mutated inputs. Reports faults as failures
// of the current test; stops after the third. From the test's main thread.
FuzzCounts Fuzz(const FuzzTarget& target,
                const std::function<FuzzAnswer(std::string_view input)>& parse);

}  // namespace ravel::testing
