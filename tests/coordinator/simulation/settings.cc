#include "tests/coordinator/simulation/settings.h"

#include <absl/strings/str_cat.h>

namespace ravel::coordinator::simulation {

std::string FaultName(Fault fault) {
  static const char* const kNames[kFaults] = {"stream break",
                                              "half-open stream",
                                              "black hole",
                                              "partition",
                                              "frozen node",
                                              "frozen coordinator",
                                              "killed trainer",
                                              "hung trainer",
                                              "killed daemon",
                                              "power loss",
                                              "drain",
                                              "killed coordinator",
                                              "crash at a write",
                                              "disk full",
                                              "disk error",
                                              "store down",
                                              "store slow",
                                              "corrupt step",
                                              "wall clock steps"};
  return kNames[static_cast<int>(fault)];
}

std::string BugName(Bug bug) {
  static const char* const kNames[kBugs] = {"none",
                                            "AnswerBeforeDurable",
                                            "SwallowedRun",
                                            "LostShard",
                                            "StaleEpochLaunched",
                                            "PlanOfAnotherSize",
                                            "RetentionTooEager",
                                            "GhostTrainer",
                                            "ForgottenGroup"};
  return kNames[static_cast<int>(bug)];
}

Settings SettingsOf(uint64_t seed) {
  Random random(seed);
  Settings settings;
  settings.seed = seed;
  const int64_t size = random.Between(0, 99);
  if (size < 60) {
    settings.nodes = random.Between(1, 4);
    settings.devices = random.Between(1, 4);
    settings.jobs = random.Between(1, 4);
  } else if (size < 95) {
    settings.nodes = random.Between(3, 12);
    settings.devices = random.Between(1, 8);
    settings.jobs = random.Between(3, 15);
  } else {
    settings.nodes = random.Between(20, 60);
    settings.devices = random.Between(2, 8);
    settings.jobs = random.Between(20, 80);
  }
  settings.detection_ms = random.Chance(0.5) ? 1000 : 5000;
  settings.tick_ms = settings.detection_ms / 20;
  settings.faults_for_ms = random.Between(20'000, 120'000);
  settings.fault_every_ms = random.Between(500, 10'000);
  settings.messages_repeat = random.Chance(0.3);
  // A few kinds at a time: faults that hide each other would never be seen alone.
  for (int fault = 0; fault < kFaults; ++fault) {
    if (random.Chance(0.3)) {
      settings.faults.push_back(static_cast<Fault>(fault));
    }
  }
  return settings;
}

std::string Describe(const Settings& settings) {
  std::string text = absl::StrCat("seed ",
                                  settings.seed,
                                  ": ",
                                  settings.nodes,
                                  " nodes of ",
                                  settings.devices,
                                  ", ",
                                  settings.jobs,
                                  " jobs, T ",
                                  settings.detection_ms,
                                  " ms, a fault each ",
                                  settings.fault_every_ms,
                                  " ms for ",
                                  settings.faults_for_ms / 1000,
                                  " s:");
  for (const Fault fault : settings.faults) {
    absl::StrAppend(&text, " ", FaultName(fault), ";");
  }
  return text;
}

}  // namespace ravel::coordinator::simulation
