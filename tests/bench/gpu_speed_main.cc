// Speed of single operations on a GPU, one JSON line per measurement, each verified first.
//   gpu_speed G5|G6|CASE...   measures each once
//   gpu_speed --serve         reads a case a line, answers with a line: what the harness alternates
//   with its peer gpu_speed --list          the cases
// Exit code: 0; 1 a result was wrong or the device failed; 2 wrong use; 3 no usable device, with
// the reason on stderr.

#include <cstdio>
#include <iostream>
#include <map>
#include <string_view>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>

#include "tests/bench/gpu_cases.h"

namespace ravel::bench {
namespace {

constexpr int kUsage = 2;
constexpr int kNoDevice = 3;

std::vector<GpuCase> AllCases() {
  std::vector<GpuCase> cases = MemoryBoundCases();
  for (GpuCase& gemm : GemmCases()) {
    cases.push_back(std::move(gemm));
  }
  return cases;
}

// Keeps the memory of the last case, so that its repeats need no new verification.
class Session {
 public:
  explicit Session(GpuBench& bench) : bench_(bench) {}

  void Measure(const GpuCase& which) {
    if (name_ != which.name) {
      operation_ = {};
      bench_.Clear();
      operation_ = which.make(bench_);
      name_ = which.name;
    }
    const std::vector<double> samples = bench_.Time(operation_);
    const double seconds = Median(samples) * 1e-6;
    std::string line = absl::StrFormat(
        R"({"id":"%s","case":"%s","microseconds":%.2f,"repeats":%d,"verified":"%s")",
        which.id,
        which.name,
        seconds * 1e6,
        samples.size(),
        operation_.verified);
    if (operation_.bytes > 0) {
      absl::StrAppendFormat(
          &line,
          R"(,"gb_per_second":%.1f,"copy_gb_per_second":%.1f,"percent_of_copy":%.2f)",
          operation_.bytes / seconds * 1e-9,
          bench_.CopyRate() * 1e-9,
          100 * operation_.bytes / seconds / bench_.CopyRate());
    } else {
      absl::StrAppendFormat(&line, R"(,"tflops":%.1f)", operation_.flops / seconds * 1e-12);
    }
    std::printf("%s,\"small\":%s,\"device\":\"%s\"}\n",
                line.c_str(),
                bench_.sizes() == GpuBench::Sizes::kSmall ? "true" : "false",
                bench_.device().name.c_str());
    std::fflush(stdout);
  }

 private:
  GpuBench& bench_;
  std::string name_;
  Operation operation_;
};

bool MeasureAll(Session& session, const std::vector<GpuCase>& cases, std::string_view wanted) {
  bool any = false;
  for (const GpuCase& which : cases) {
    if (which.id == wanted || which.name == wanted) {
      session.Measure(which);
      any = true;
    }
  }
  if (!any) {
    std::fprintf(stderr,
                 "gpu_speed: no case '%.*s'; --list has them\n",
                 static_cast<int>(wanted.size()),
                 wanted.data());
  }
  return any;
}

int Main(std::vector<std::string> words) {
  const std::vector<GpuCase> cases = AllCases();
  GpuBench::Sizes sizes = GpuBench::Sizes::kFull;
  if (!words.empty() && words.front() == "--small") {
    sizes = GpuBench::Sizes::kSmall;
    words.erase(words.begin());
  }
  if (words.empty()) {
    std::fputs("usage: gpu_speed [--small] --list | --serve | G5|G6|CASE...\n", stderr);
    return kUsage;
  }
  if (words.front() == "--list") {
    for (const GpuCase& which : cases) {
      std::printf("%s %s\n", which.id.c_str(), which.name.c_str());
    }
    return 0;
  }
  absl::StatusOr<std::unique_ptr<GpuBench>> bench = GpuBench::Open(sizes);
  if (!bench.ok()) {
    std::fprintf(stderr, "no device: %s\n", std::string(bench.status().message()).c_str());
    return kNoDevice;
  }
  Session session(**bench);
  if (words.front() == "--serve") {
    for (std::string line; std::getline(std::cin, line);) {
      if (!MeasureAll(session, cases, line)) {
        return kUsage;
      }
    }
    return 0;
  }
  for (const std::string& word : words) {
    if (!MeasureAll(session, cases, word)) {
      return kUsage;
    }
  }
  return 0;
}

}  // namespace
}  // namespace ravel::bench

int main(int argc, char** argv) {
  return ravel::bench::Main({argv + 1, argv + argc});
}
