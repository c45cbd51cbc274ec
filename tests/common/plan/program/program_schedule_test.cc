// Programs on simulated streams with random delays: what the checker proves is also what happens.
// Independent of the checker: memory is a set of address ranges that a later writer overwrites.

#include <algorithm>
#include <array>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "common/plan/check/program_checker.h"
#include "common/plan/program/program_order.h"
#include "tests/common/plan/plan_testing.h"

namespace ravel::plan {
namespace {

// Runs a program once. Instructions of a stream start in order, after their waits have finished,
// and finish at random.
class Simulation {
 public:
  Simulation(const ShardingPlan& plan, const StepProgram& program, uint64_t seed)
      : plan_(plan),
        program_(program),
        random_(seed),
        intact_(plan.buffers.size(), false),
        finished_(program.instructions.size(), false) {
    for (size_t i = 0; i < plan.buffers.size(); ++i) {
      intact_[i] = plan.buffers[i].persistent;
    }
    for (const BufferId buffer : program.live_at_start) {
      intact_[static_cast<size_t>(buffer)] = true;
    }
    for (size_t i = 0; i < program.instructions.size(); ++i) {
      queues_[static_cast<size_t>(program.instructions[i].stream) - 1].push_back(
          static_cast<int>(i));
    }
  }

  // What went wrong first, or "".
  std::string Run() {
    while (fault_.empty() && Step()) {
    }
    return fault_;
  }

 private:
  struct Stream {
    size_t next = 0;
    bool running = false;
  };

  // Starts or finishes one instruction of a random stream; false when all is done.
  bool Step() {
    std::vector<size_t> able;
    for (size_t s = 0; s < queues_.size(); ++s) {
      if (streams_[s].running || Ready(s)) {
        able.push_back(s);
      }
    }
    if (able.empty()) {
      for (size_t s = 0; s < queues_.size(); ++s) {
        if (streams_[s].next < queues_[s].size()) {
          fault_ = "stuck";
        }
      }
      return false;
    }
    const size_t s = able[random_() % able.size()];
    const InstructionId instruction = queues_[s][streams_[s].next];
    if (streams_[s].running) {
      Finish(instruction);
      ++streams_[s].next;
    } else {
      Start(instruction);
    }
    streams_[s].running = !streams_[s].running;
    return true;
  }

  bool Ready(size_t s) const {
    if (streams_[s].next >= queues_[s].size()) {
      return false;
    }
    const Instruction& at =
        program_.instructions[static_cast<size_t>(queues_[s][streams_[s].next])];
    return std::all_of(at.waits.begin(), at.waits.end(), [&](InstructionId wait) {
      return finished_[static_cast<size_t>(wait)];
    });
  }

  // Whether the instruction gives the buffer its first content.
  bool Fills(const Instruction& at, BufferId buffer) const {
    switch (plan_.buffers[static_cast<size_t>(buffer)].kind) {
      case BufferKind::kGathered:
        return at.op == OpCode::kGather;
      case BufferKind::kStaging:
        return at.op == OpCode::kAllocStaging;
      case BufferKind::kSaved:
        return at.op == OpCode::kForward;
      case BufferKind::kRemade:
        return at.op == OpCode::kForward || at.op == OpCode::kRecompute;
      case BufferKind::kFullGrad:
        return at.op == OpCode::kGather;
      default:
        return !plan_.buffers[static_cast<size_t>(buffer)].persistent;
    }
  }

  void Start(InstructionId instruction) {
    const Instruction& at = program_.instructions[static_cast<size_t>(instruction)];
    for (const Operand& access : at.operands) {
      if (Fills(at, access.buffer)) {
        Overwrite(access.buffer);
        // Content is there when the writer has finished; scratch belongs to the writer at once.
        const BufferKind kind = plan_.buffers[static_cast<size_t>(access.buffer)].kind;
        intact_[static_cast<size_t>(access.buffer)] = kind != BufferKind::kGathered;
      } else {
        Expect(instruction, access.buffer);
      }
    }
  }

  void Finish(InstructionId instruction) {
    const Instruction& at = program_.instructions[static_cast<size_t>(instruction)];
    for (const Operand& access : at.operands) {
      if (at.op == OpCode::kGather && access.role == Role::kWeights) {
        intact_[static_cast<size_t>(access.buffer)] = true;
      }
      Expect(instruction, access.buffer);
    }
    finished_[static_cast<size_t>(instruction)] = true;
  }

  void Overwrite(BufferId buffer) {
    const auto id = static_cast<size_t>(buffer);
    const int64_t begin = plan_.memory.offsets[id];
    const int64_t end = begin + plan_.buffers[id].bytes;
    for (size_t other = 0; other < intact_.size(); ++other) {
      const int64_t other_begin = plan_.memory.offsets[other];
      if (!plan_.buffers[other].persistent &&
          plan_.buffers[other].memory == plan_.buffers[id].memory &&
          begin < other_begin + plan_.buffers[other].bytes && other_begin < end) {
        intact_[other] = false;
      }
    }
  }

  void Expect(InstructionId instruction, BufferId buffer) {
    if (!intact_[static_cast<size_t>(buffer)] && fault_.empty()) {
      fault_ = InstructionName(program_, instruction) + " finds " +
               plan_.buffers[static_cast<size_t>(buffer)].name + " overwritten or not yet written";
    }
  }

  const ShardingPlan& plan_;
  const StepProgram& program_;
  std::mt19937_64 random_;
  std::vector<bool> intact_;
  std::vector<bool> finished_;
  std::array<std::vector<InstructionId>, kStreamCount> queues_;
  std::array<Stream, kStreamCount> streams_;
  std::string fault_;
};

std::vector<ShardingPlan> Plans() {
  std::vector<ShardingPlan> plans;
  for (const bool tied : {false, true}) {
    for (const bool shared : {false, true}) {
      ModelConfig config = testing::Llama(64, 4, 96, 257);
      config.tie_word_embeddings = tied;
      plans.push_back(testing::PlanOf(config, 2, 8, shared));
      for (const Strategy strategy : {Strategy::kNoShard, Strategy::kOptimGradsParams}) {
        JobSpec spec = testing::SpecOf(config, 8);
        spec.strategy = strategy;
        spec.replicas = 2;
        spec.replicate_strategy =
            strategy == Strategy::kNoShard ? Strategy::kNoShard : Strategy::kOptim;
        spec.recompute = RecomputePolicy::kBlock;
        plans.push_back(*BuildShardingPlan({.spec = spec, .ranks = 4, .shared_memory = shared}));
      }
    }
  }
  return plans;
}

TEST(ProgramSchedule, RandomDelaysNeverMeetOverwrittenMemory) {
  for (const ShardingPlan& plan : Plans()) {
    for (const StepProgram& program : plan.programs) {
      for (uint64_t schedule = 0; schedule < 200; ++schedule) {
        const uint64_t seed = testing::kSeed + schedule;
        EXPECT_EQ(Simulation(plan, program, seed).Run(), "") << "seed " << seed;
      }
    }
  }
}

// A mutant that goes wrong in a simulation must be one that the checker refuses.
TEST(ProgramSchedule, WhatGoesWrongIsRefused) {
  int wrong = 0;
  for (const ShardingPlan& plan : Plans()) {
    for (const StepProgram& program : plan.programs) {
      for (size_t i = 0; i < program.instructions.size(); ++i) {
        for (size_t w = 0; w < program.instructions[i].waits.size(); ++w) {
          StepProgram mutant = program;
          std::vector<InstructionId>& waits = mutant.instructions[i].waits;
          waits.erase(waits.begin() + static_cast<std::ptrdiff_t>(w));
          bool fails = false;
          for (uint64_t schedule = 0; schedule < 20 && !fails; ++schedule) {
            fails = !Simulation(plan, mutant, testing::kSeed + schedule).Run().empty();
          }
          wrong += fails ? 1 : 0;
          EXPECT_TRUE(!fails || !CheckProgram(plan, mutant).ok());
        }
      }
    }
  }
  EXPECT_GT(wrong, 100) << "the simulation notices deleted waits";
}

}  // namespace
}  // namespace ravel::plan
