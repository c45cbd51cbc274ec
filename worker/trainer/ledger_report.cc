#include "worker/trainer/ledger_report.h"

#include <algorithm>
#include <memory>
#include <string>

#include <absl/strings/str_cat.h>

#include "common/signed_size.h"
#include "worker/comm/collective_ledger.h"

namespace ravel::trainer {
namespace {

LedgerEntry EntryOf(const comm::IssueLog::Entry& issued, const std::vector<std::string>& names) {
  const comm::IssueRecord& record = issued.record;
  std::string unit;
  if (record.unit >= 0) {
    unit = record.unit < std::ssize(names) ? At(names, record.unit)
                                           : absl::StrCat("unit ", record.unit);
  }
  return {.sequence = record.sequence,
          .hash = record.hash,
          .order = issued.order,
          .kind = comm::CollectiveKindName(record.kind),
          .op = plan::OpName(static_cast<plan::OpLabel>(record.op)),
          .unit = unit,
          .call = record.call,
          .phase = plan::PhaseName(static_cast<plan::Phase>(record.phase)),
          .generation = record.generation,
          .elements = record.elements,
          .element_bytes = record.element_bytes,
          .age_ms = issued.age_ms,
          .group = record.group};
}

}  // namespace

std::vector<CollectiveState> CollectiveStates(comm::Communicator& communicator) {
  const std::vector<std::string> names = communicator.ledger().unit_names();
  std::vector<CollectiveState> states;
  for (const std::shared_ptr<const comm::IssueLog>& log : communicator.ledger().logs()) {
    const comm::IssueLog::Snapshot snapshot = log->snapshot();
    states.push_back({.group = log->group().name,
                      .first_member = log->group().members.front(),
                      .sequence = snapshot.sequence,
                      .hash = snapshot.hash,
                      .completed = snapshot.completed,
                      .waiting_ms = snapshot.waiting_ms,
                      .mark_sequence = snapshot.mark_sequence,
                      .mark_hash = snapshot.mark_hash,
                      .waiting_in = {}});
    const std::vector<comm::IssueLog::Entry> last = log->Last(1);
    if (snapshot.waiting_ms > 0 && !last.empty() && last[0].record.sequence == snapshot.sequence) {
      states.back().waiting_in = comm::DescribeIssue(last[0].record, names);
    }
  }
  return states;
}

std::vector<LedgerOfGroup> LedgerGroups(comm::Communicator& communicator, int64_t most) {
  const std::vector<std::string> names = communicator.ledger().unit_names();
  std::vector<LedgerOfGroup> groups;
  for (const std::shared_ptr<const comm::IssueLog>& log : communicator.ledger().logs()) {
    LedgerOfGroup group = {.group = log->group().name,
                           .members = {log->group().members.begin(), log->group().members.end()},
                           .completed = log->snapshot().completed,
                           .entries = {}};
    for (const comm::IssueLog::Entry& issued : log->Last(Size(std::max<int64_t>(most, 0)))) {
      group.entries.push_back(EntryOf(issued, names));
    }
    groups.push_back(std::move(group));
  }
  return groups;
}

}  // namespace ravel::trainer
