#include "common/plan/program/program_steps.h"

#include <map>
#include <vector>

namespace ravel::plan {
namespace {

struct History {
  InstructionId write = {};
  std::vector<InstructionId> reads;  // since then
};

}  // namespace

void OrderSteps(StepProgram& program) {
  std::map<BufferId, History> histories;
  for (const InstructionId id : program.instructions.ids()) {
    Instruction& at = program.instructions[id];
    if (!IsCompute(at.op) || at.segment < 0) {
      continue;
    }
    const auto wait_for = [&](InstructionId other) {
      if (other >= 0 && program.instructions[other].stream != at.stream) {
        at.waits.push_back(other);
      }
    };
    for (const Operand& operand : at.operands) {
      History& history = histories[operand.buffer];
      wait_for(history.write);
      if (!operand.writes()) {
        history.reads.push_back(id);
        continue;
      }
      for (const InstructionId read : history.reads) {
        wait_for(read);
      }
      history = {.write = id, .reads = {}};
    }
  }
}

}  // namespace ravel::plan
