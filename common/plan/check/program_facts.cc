#include "common/plan/check/program_facts.h"

#include <absl/strings/str_cat.h>

namespace ravel::plan {

absl::Status ProgramFacts::Fault(const char* rule,
                                 InstructionId instruction,
                                 const std::string& what) const {
  return absl::FailedPreconditionError(
      absl::StrCat(rule, ": ", InstructionName(program, instruction), ": ", what));
}

}  // namespace ravel::plan
