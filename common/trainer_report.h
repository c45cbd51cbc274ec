#pragma once

// Reports of a trainer that its daemon passes on to the coordinator, as plain values: the one
// definition for both sides. trainer_report_proto.h has their messages.

#include <cstdint>
#include <string>
#include <vector>

namespace ravel {

// A remark about a start for the job's owner: an event of the job.
struct StartRemark {
  std::string reason;  // one word in CamelCase
  std::string message;
};

struct TrainerReady {
  int64_t step = 0;  // finished steps of the restored state
  int64_t planned_bytes = 0;
  int64_t measured_bytes = 0;
  double restore_seconds = 0;
  std::vector<StartRemark> remarks = {};
};

struct StepReport {
  int64_t step = 0;  // finished steps
  float loss = 0;
  double grad_norm = 0;
  double lr = 0;
  int64_t tokens = 0;
  double step_seconds = 0;
  bool skipped = false;
  double loss_scale = 0;  // that gradients were multiplied by; 0: by none
  bool has_validation_loss = false;
  float validation_loss = 0;
  int64_t time_ms = 0;
  int64_t planned_bytes = 0;
  int64_t measured_bytes = 0;
};

// The place of a rank in the collectives of one group of ranks, which is known by its name and its
// first member.
struct CollectiveState {
  std::string group;
  int64_t first_member = 0;
  uint64_t sequence = 0;  // issued so far ...
  uint64_t hash = 0;      // ... and the rolling hash of these
  uint64_t completed = 0;
  int64_t waiting_ms = 0;      // since the last was issued, when it is not through
  uint64_t mark_sequence = 0;  // a round number of issued collectives, and the hash there
  uint64_t mark_hash = 0;
  std::string waiting_in = {};  // the last that was issued, when it is not through
};

// A save without a seal of this rank.
struct SaveFailed {
  int64_t step = 0;
  int64_t sequence = 0;
  int64_t attempt = 1;
  std::string reason = {};  // StoreFull, StoreUnavailable, SaveAbandoned, SaveSkipped, SaveRemoved
  std::string message = {};
  bool skipped = false;  // no failure: it was not begun, or it was complete and is gone
};

// One issued collective.
struct LedgerEntry {
  uint64_t sequence = 0;
  uint64_t hash = 0;
  uint64_t order = 0;  // among all that the rank issued
  std::string kind;
  std::string op;
  std::string unit;  // empty: of the whole step
  int64_t call = 0;
  std::string phase;
  int64_t generation = 0;
  int64_t elements = 0;
  int64_t element_bytes = 0;
  int64_t age_ms = 0;
  int64_t group = -1;  // parameter group; -1: none
};
struct LedgerOfGroup {
  std::string group;
  std::vector<int64_t> members;
  uint64_t completed = 0;
  std::vector<LedgerEntry> entries;  // oldest first
};
struct LedgerReport {
  std::vector<LedgerOfGroup> groups;
  int64_t epoch = 0;
};

}  // namespace ravel
