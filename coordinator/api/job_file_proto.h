#pragma once

// From job file to plan::JobSpec, in two steps that admission and ravelctl share: text ->
// v1::TrainingJob (every key and type checked against the message's descriptor), then defaults and
// rules -> canonical TrainingJob and plan::JobSpec.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "common/model/job_spec.h"
#include "common/path_facts.h"
#include "common/status.h"
#include "proto/jobs.pb.h"

namespace ravel {

inline constexpr int64_t kMaxRequestBytes = int64_t{4} << 20;  // of any request or answer of Jobs

// Something wrong with a job file or a submitted job. `path` is that of the file:
// "spec.training.optimizer.lr", "spec.data.train[1].path".
struct JobViolation {
  std::string path;
  int line = 0;  // from 1; 0: unknown
  int column = 0;
  std::string expected;  // empty: `got` alone says what is wrong
  std::string got;
};
// "job.yaml:12:5: spec.training.optimizer.lr: expected a number above 0, got -1"; without a
// position or an origin those parts are left out.
std::string FormatViolation(const JobViolation& violation, std::string_view origin);
v1::Violation ToProto(const JobViolation& violation);
JobViolation FromProto(const v1::Violation& violation);

// The position of a field in the file, by path.
struct FieldPosition {
  std::string path;
  int line = 0;
  int column = 0;
};

struct ParsedJobFile {
  v1::TrainingJob job;
  std::vector<FieldPosition> positions;
  std::vector<JobViolation>
      violations;  // unknown and duplicate keys, wrong types; `job` holds what could be read
};
// YAML or JSON. All violations at once, in the order of the file. A document that ravelctl printed
// (it has a `schemaVersion`) may hold what only a coordinator knows, which is passed over.
ParsedJobFile ParseJobFile(std::string_view text);

struct CanonicalJob {
  v1::TrainingJob job;  // every default filled in; Canonicalize of it gives the same again
  plan::JobSpec spec;   // meaningful only without violations
  std::vector<JobViolation> violations;
  std::vector<std::string> warnings;
  bool ok() const { return violations.empty(); }
};

struct CanonicalizeOptions {
  // Findings of a look at PathsOf this job: config.json of model.from, tokenizer, token files.
  // Null: only what the file itself can tell; `spec.model` may then be absent. The silence of a
  // path is the caller's to tell.
  const PathFacts* facts = nullptr;
  // With facts: also of the token files and the tokenizer. Off: a plan needs none.
  bool check_data = true;
};

// Every rule of the job file: required fields, ranges, enums, durations and sizes, cross-field
// rules, batch and lanes (plan::ResolveBatch). Pure: no path is opened here.
CanonicalJob Canonicalize(const v1::TrainingJob& job, const CanonicalizeOptions& options);

// The paths that a job names, as far as they are absolute, from what Canonicalize without facts has
// made of it.
PathQuery PathsOf(const CanonicalJob& job);
// Its other needs of a node, likewise.
JobNeeds NeedsOf(const CanonicalJob& job);

// Gives violations the positions of their fields (or of the nearest parent that has one) and sorts
// them by position.
void LocateViolations(const std::vector<FieldPosition>& positions,
                      std::vector<JobViolation>& violations);

// Proto JSON with sorted keys: what is stored, hashed and compared.
std::string CanonicalJson(const v1::TrainingJob& job);

}  // namespace ravel
