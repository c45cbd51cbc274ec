// Whole clusters on virtual time, each from a seed. RAVEL_SEEDS says how many there are (default
// 500), RAVEL_SEED runs a single one and tells what happened.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_split.h>
#include <gtest/gtest.h>

#include "common/logging.h"
#include "tests/coordinator/simulation/world.h"
#include "tests/testing/sanitizer.h"

namespace ravel::coordinator::simulation {
namespace {

uint64_t Number(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  uint64_t value = 0;
  return text != nullptr && absl::SimpleAtoi(text, &value) ? value : otherwise;
}

std::string Simulate(const Settings& settings) {
  World world(settings);
  std::string broken = world.Run();
  if (settings.trace) {
    for (const std::string& line : world.trace()) {
      std::fprintf(stderr, "%s\n", line.c_str());
    }
  }
  return broken;
}

// A smaller world with fewer kinds of faults in which something still breaks.
Settings Shrink(Settings settings) {
  const auto breaks = [](const Settings& smaller) { return !Simulate(smaller).empty(); };
  for (size_t at = 0; at < settings.faults.size();) {
    Settings smaller = settings;
    smaller.faults.erase(smaller.faults.begin() + static_cast<std::ptrdiff_t>(at));
    if (breaks(smaller)) {
      settings = std::move(smaller);
    } else {
      ++at;
    }
  }
  for (int64_t Settings::*size : {&Settings::jobs, &Settings::nodes, &Settings::devices}) {
    while (settings.*size > 1) {
      Settings smaller = settings;
      smaller.*size = settings.*size / 2;
      if (!breaks(smaller)) {
        smaller.*size = settings.*size - 1;
        if (settings.*size > 8 || !breaks(smaller)) {
          break;
        }
      }
      settings = std::move(smaller);
    }
  }
  return settings;
}

// What broke, told so that it can be seen again.
void Report(const Settings& settings, const std::string& broken) {
  const Settings small = Shrink(settings);
  std::string faults;
  for (const Fault fault : small.faults) {
    absl::StrAppend(&faults, faults.empty() ? "" : ",", static_cast<int>(fault));
  }
  ADD_FAILURE() << Describe(settings) << "\n  " << broken << "\n  smaller: " << Describe(small)
                << "\n  " << Simulate(small) << "\n  again: RAVEL_SEED=" << settings.seed
                << " RAVEL_NODES=" << small.nodes << " RAVEL_DEVICES=" << small.devices
                << " RAVEL_JOBS=" << small.jobs << " RAVEL_FAULTS=" << faults
                << " build/dev/tests/coordinator/simulation/simulation_test"
                << " --gtest_filter='*NothingIsLost*'";
}

// Numbers of kinds, between commas.
std::vector<Fault> FaultsOf(const char* name) {
  std::vector<Fault> faults;
  const char* list = std::getenv(name);
  for (const auto& text : absl::StrSplit(list == nullptr ? "" : list, ',', absl::SkipEmpty())) {
    int fault = 0;
    if (absl::SimpleAtoi(text, &fault) && fault >= 0 && fault < kFaults) {
      faults.push_back(static_cast<Fault>(fault));
    }
  }
  return faults;
}

// The settings of a seed, as a report asks for them again.
Settings FromEnvironment(uint64_t seed) {
  Settings settings = SettingsOf(seed);
  settings.trace = true;
  settings.trace_lines = Number("RAVEL_TRACE_LINES", settings.trace_lines);
  settings.nodes =
      static_cast<int64_t>(Number("RAVEL_NODES", static_cast<uint64_t>(settings.nodes)));
  settings.devices =
      static_cast<int64_t>(Number("RAVEL_DEVICES", static_cast<uint64_t>(settings.devices)));
  settings.jobs = static_cast<int64_t>(Number("RAVEL_JOBS", static_cast<uint64_t>(settings.jobs)));
  if (std::getenv("RAVEL_FAULTS") != nullptr) {
    settings.faults = FaultsOf("RAVEL_FAULTS");
  }
  return settings;
}

class SimulationTest : public ::testing::Test {
 protected:
  void SetUp() override {
    // Errors are what is simulated: without the wish of a reader nothing is written.
    const auto nothing = static_cast<log::Level>(static_cast<int>(log::Level::kError) + 1);
    log::Init("simulation",
              log::Format::kConsole,
              std::getenv("RAVEL_LOG") != nullptr ? log::Level::kInfo : nothing);
  }
};

TEST_F(SimulationTest, NothingIsLostWhateverHappens) {
  const uint64_t one = Number("RAVEL_SEED", 0);
  if (one != 0) {
    const Settings settings = FromEnvironment(one);
    std::fprintf(stderr, "%s\n", Describe(settings).c_str());
    const std::string broken = Simulate(settings);
    EXPECT_EQ(broken, "");
    return;
  }
  const uint64_t seeds = Number("RAVEL_SEEDS", testing::Fewer<uint64_t>(500, 5));
  const uint64_t first = Number("RAVEL_FIRST_SEED", 1);
  const std::vector<Fault> without = FaultsOf("RAVEL_WITHOUT");
  int failures = 0;
  for (uint64_t seed = first;
       seed < first + seeds && failures < static_cast<int>(Number("RAVEL_FAILURES", 5));
       ++seed) {
    Settings settings = SettingsOf(seed);
    std::erase_if(settings.faults, [&without](Fault fault) {
      return std::find(without.begin(), without.end(), fault) != without.end();
    });
    const std::string broken = Simulate(settings);
    if (!broken.empty()) {
      ++failures;
      Report(settings, broken);
    }
  }
}

TEST_F(SimulationTest, ACoordinatorThatDiesCostsNoStep) {
  const uint64_t one = Number("RAVEL_SEED", 0);
  for (uint64_t seed = one == 0 ? 1 : one;
       seed <= (one == 0 ? testing::Fewer<uint64_t>(60, 4) : one);
       ++seed) {
    Settings settings = SettingsOf(seed);
    settings.faults.assign(1, Fault::kKillCoordinator);
    settings.users_go_back = false;
    settings.trace = one != 0;
    World world(settings);
    EXPECT_EQ(world.Run(), "") << Describe(settings);
    EXPECT_EQ(world.repeated_steps(), 0)
        << Describe(settings) << "\n  again: RAVEL_SEED=" << seed << " with this test's name";
    for (const std::string& line : world.trace()) {
      std::fprintf(stderr, "%s\n", line.c_str());
    }
    if (HasFailure()) {
      break;
    }
  }
}

// The faults of a seed, in a fleet of a size that others run.
constexpr int64_t kPart = testing::kSanitized ? 10 : 1;

TEST_F(SimulationTest, HundredsOfNodesAndThousandsOfJobs) {
  const uint64_t one = Number("RAVEL_SEED", 0);
  const uint64_t last = one == 0 ? Number("RAVEL_LARGE_SEEDS", 1) : one;
  for (uint64_t seed = one == 0 ? 1 : one; seed <= last && !HasFailure(); ++seed) {
    Settings settings = SettingsOf(seed);
    Random random(seed + 4242);
    settings.nodes = random.Between(200, 400) / kPart;
    settings.devices = random.Between(4, 8);
    settings.jobs = random.Between(1000, 2500) / kPart;
    settings.fault_every_ms = random.Between(50, 500);
    settings.trace = one != 0;
    World world(settings);
    EXPECT_EQ(world.Run(), "") << Describe(settings) << "\n  again: RAVEL_SEED=" << seed
                               << " with this test's name";
    for (const std::string& line : world.trace()) {
      std::fprintf(stderr, "%s\n", line.c_str());
    }
  }
}

// Each planted bug is seen by some check, within few seeds.
class PlantedBugTest : public SimulationTest, public ::testing::WithParamInterface<int> {};

TEST_P(PlantedBugTest, IsFound) {
  const Bug bug = static_cast<Bug>(GetParam());
  constexpr uint64_t kSeeds = 300;
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    Settings settings = SettingsOf(seed);
    settings.bug = bug;
    const std::string broken = Simulate(settings);
    if (!broken.empty() && Simulate(SettingsOf(seed)).empty()) {
      std::printf("%s: found by seed %d: %s\n",
                  BugName(bug).c_str(),
                  static_cast<int>(seed),
                  broken.c_str());
      return;
    }
  }
  ADD_FAILURE() << BugName(bug) << " was not found in " << kSeeds << " seeds";
}

INSTANTIATE_TEST_SUITE_P(Simulation,
                         PlantedBugTest,
                         ::testing::Range(1, kBugs),
                         [](const auto& bug) { return BugName(static_cast<Bug>(bug.param)); });

}  // namespace
}  // namespace ravel::coordinator::simulation
