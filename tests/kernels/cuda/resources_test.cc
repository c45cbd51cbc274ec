// What the compiler makes of the kernels: none but those of start.cu, which run once per job, may
// spill registers or use local memory. The compiler is told to warn of either, and warnings are
// errors; this checks that it was told so for every file, and that it then does refuse. Needs the
// toolkit, no device.

#include <cstdio>
#include <fstream>
#include <regex>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/kernels/cuda_host/library_path.h"
#include "tests/testing/required.h"

namespace ravel::kernels::cuda::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kFlags[] = "-Xptxas=--warn-on-spills,--warn-on-local-memory-usage";
constexpr char kErrors[] = "-Werror=all-warnings";

struct ShellRun {
  int status;
  std::string output;
};

ShellRun RunShell(const std::string& command) {
  ShellRun run = {-1, ""};
  FILE* pipe = popen((command + " 2>&1").c_str(), "r");
  char buffer[4096];
  while (pipe != nullptr && std::fgets(buffer, sizeof(buffer), pipe) != nullptr) {
    run.output += buffer;
  }
  run.status = pipe != nullptr ? pclose(pipe) : -1;
  return run;
}

class CudaResources : public ::testing::Test {
 protected:
  void SetUp() override {
    if (BuiltCudaLibrary().empty()) {
      ravel::testing::SkipWithout("cuda", "built without RAVEL_CUDA: no device code was compiled");
    }
  }
};

TEST_F(CudaResources, EveryHotFileIsCompiledWithoutLeaveToSpill) {
  std::ifstream commands(std::string(RAVEL_BUILD_FOLDER) + "/compile_commands.json");
  const std::regex file(R"re("command": "(.*-c /.*/kernels/cuda/(\w+)\.cu .*)",)re");
  int files = 0;
  for (std::string line; std::getline(commands, line);) {
    std::smatch match;
    if (!std::regex_search(line, match, file)) {
      continue;
    }
    ++files;
    EXPECT_THAT(match.str(1), HasSubstr(kErrors)) << match[2];
    if (match[2] == "start") {
      EXPECT_THAT(match.str(1), Not(HasSubstr(kFlags)));
    } else {
      EXPECT_THAT(match.str(1), HasSubstr(kFlags)) << match[2];
    }
  }
  EXPECT_GE(files, 15);
}

TEST_F(CudaResources, TheCompilerRefusesLocalMemoryWithTheseFlags) {
  const ShellRun run =
      RunShell(std::string(RAVEL_NVCC) + " -std=c++20 -O2 -arch=sm_90a " + kFlags + " " + kErrors +
               " --expt-relaxed-constexpr -I" RAVEL_SOURCE_FOLDER " -c " +
               RAVEL_SOURCE_FOLDER "/kernels/cuda/start.cu -o /dev/null");
  EXPECT_NE(run.status, 0);
  EXPECT_THAT(run.output, HasSubstr("Local memory used for function"));
}

}  // namespace
}  // namespace ravel::kernels::cuda::testing
