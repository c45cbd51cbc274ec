#pragma once

// What one seed simulates: how large, with which faults, and with which planted bug.

#include <cstdint>
#include <string>
#include <vector>

#include "tests/coordinator/simulation/events.h"

namespace ravel::coordinator::simulation {

enum class Fault {
  kStreamBreak,  // both ends notice soon; what is on its way may be lost
  kHalfOpen,     // the daemon loses its stream, the coordinator notices much later
  kBlackHole,    // a stream swallows what is sent, one way or both, until an end gives it up
  kPartition,    // a node's network stands still, one way or both, and then delivers
  kFreezeNode,   // daemon and trainers stand still
  kFreezeCoordinator,
  kKillTrainer,
  kHangTrainer,  // silent, until its daemon kills it
  kKillDaemon,   // the trainers go with it; a new incarnation returns
  kPowerLoss,    // the host is gone without a word
  kDrain,
  kKillCoordinator,
  kCrashAtWrite,  // before or after the commit of a transaction, or of a checkpoint
  kDiskFull,      // the coordinator's own
  kDiskError,
  kStoreDown,  // the checkpoint store answers with errors
  kStoreSlow,
  kCorruptStep,
  kWallClock,  // steps forth and back
};
inline constexpr int kFaults = 19;

// Planted: each must be found by some check.
enum class Bug {
  kNone,
  kAnswerBeforeDurable,  // the job store answers before the change is on disk
  kSwallowedRun,         // the link loses every order to train
  kLostShard,            // the keeper commits though a shard is missing
  kStaleEpochLaunched,   // a daemon starts trainers of an epoch that is over there
  kPlanOfAnotherSize,    // the planner gives the plan of another size under the right name
  kRetentionTooEager,    // the keeper deletes the newest step too
  kGhostTrainer,         // a daemon goes on naming trainers that have ended
  kForgottenGroup,       // the writer calls a group durable whose commit has failed
};
inline constexpr int kBugs = 9;

struct Settings {
  uint64_t seed = 1;
  int64_t nodes = 2;
  int64_t devices = 1;  // of each node
  int64_t jobs = 1;
  int64_t detection_ms = 1000;
  int64_t tick_ms = 50;
  int64_t faults_for_ms = 60'000;      // then everything heals
  int64_t fault_every_ms = 3'000;      // on average, over the whole world
  std::vector<Fault> faults;           // kinds that happen
  bool messages_repeat = false;        // the network delivers some messages twice
  int64_t finish_within_ms = 900'000;  // after the last fault
  Bug bug = Bug::kNone;
  bool users_go_back = true;  // they roll jobs back, and try them again
  bool trace = false;
  uint64_t trace_lines = 400;  // the newest ones
};

// Sizes and kinds of faults follow from the seed: most worlds are small and few are large.
Settings SettingsOf(uint64_t seed);
std::string Describe(const Settings& settings);
std::string FaultName(Fault fault);
std::string BugName(Bug bug);

}  // namespace ravel::coordinator::simulation
