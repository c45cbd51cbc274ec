// Verbs that take a job file: submit, validate. The file is checked here with the coordinator's own
// rules before anything is sent; violations are printed as FILE:LINE:COLUMN. A refusal of the
// coordinator names fields, which are mapped back to lines of the file. A job that was submitted
// twice through a lost connection is created once, by its request id.

#include "coordinator/ctl/job_verbs.h"

#include <algorithm>
#include <cstdio>

#include <absl/strings/str_cat.h>

#include "common/file_writer.h"
#include "common/yaml.h"
#include "coordinator/ctl/exit_code.h"
#include "coordinator/ctl/follow.h"
#include "coordinator/ctl/request_id.h"

namespace ravel::ctl {
namespace {

struct LoadedJobFile {
  std::string origin;
  ParsedJobFile parsed;
};

absl::StatusOr<std::string> ReadInput(const std::string& file) {
  constexpr int64_t kMaxBytes = static_cast<int64_t>(yaml::kMaxBytes);
  return ReadStream(file == "-" ? "/dev/stdin" : file, kMaxBytes);
}

void SayViolations(const std::string& origin, const std::vector<JobViolation>& violations) {
  for (const JobViolation& violation : violations) {
    Say(FormatViolation(violation, origin));
  }
}

absl::Status Invalid(const std::string& origin, std::size_t count) {
  return absl::InvalidArgumentError(
      absl::StrCat(origin, ": ", count, count == 1 ? " problem" : " problems"));
}

absl::StatusOr<LoadedJobFile> Load(const std::string& file) {
  LoadedJobFile loaded;
  loaded.origin = file == "-" ? "stdin" : file;
  ASSIGN_OR_RETURN(const std::string text, ReadInput(file));
  loaded.parsed = ParseJobFile(text);
  return loaded;
}

// --namespace is that of a file that names none.
absl::Status ApplyNamespace(const CommonOptions& common, LoadedJobFile& loaded) {
  if (!common.namespace_given) {
    return absl::OkStatus();
  }
  auto& metadata = *loaded.parsed.job.mutable_metadata();
  if (metadata.namespace_().empty()) {
    metadata.set_namespace_(common.namespace_name);
  }
  return metadata.namespace_() == common.namespace_name
             ? absl::OkStatus()
             : absl::InvalidArgumentError(absl::StrCat(loaded.origin,
                                                       ": metadata.namespace: expected \"",
                                                       common.namespace_name,
                                                       "\", as --namespace says, got \"",
                                                       metadata.namespace_(),
                                                       "\""));
}

// Both what the parser and what the rules found, in the order of the file.
std::vector<JobViolation> Judge(const LoadedJobFile& loaded,
                                PathScope paths,
                                CanonicalJob& canonical) {
  std::vector<JobViolation> violations = loaded.parsed.violations;
  if (violations.empty() || violations[0].path != "") {  // else: no document at all
    canonical = CanonicalizeHere(loaded.parsed.job, paths);
    for (const JobViolation& violation : canonical.violations) {
      // A field that could not be read is missing for the rules: say only the first.
      const bool known =
          std::any_of(violations.begin(), violations.end(), [&](const JobViolation& other) {
            return other.path == violation.path;
          });
      if (!known) {
        violations.push_back(violation);
      }
    }
  }
  LocateViolations(loaded.parsed.positions, violations);
  return violations;
}

// The same, said.
absl::StatusOr<CanonicalJob> Check(const LoadedJobFile& loaded, PathScope paths) {
  CanonicalJob canonical;
  const std::vector<JobViolation> violations = Judge(loaded, paths, canonical);
  for (const std::string& warning : canonical.warnings) {
    Say(absl::StrCat(loaded.origin, ": warning: ", warning));
  }
  if (!violations.empty()) {
    SayViolations(loaded.origin, violations);
    return Invalid(loaded.origin, violations.size());
  }
  return canonical;
}

// A refusal of the coordinator, with the lines of the file. What had no room in it is asked for.
int ReportRefusal(JobsClient& client, const LoadedJobFile& loaded, const absl::Status& status) {
  std::vector<JobViolation> violations = ViolationsOf(status);
  const int64_t more = MoreViolationsOf(status);
  if (more > 0) {
    absl::StatusOr<ValidateResult> all = client.Validate(loaded.parsed.job);
    if (all.ok() && all->violations.size() > violations.size()) {
      violations = std::move(all->violations);
      LocateViolations(loaded.parsed.positions, violations);
      SayViolations(loaded.origin, violations);
      return Report(Invalid(loaded.origin, violations.size()));
    }
  }
  LocateViolations(loaded.parsed.positions, violations);
  SayViolations(loaded.origin, violations);
  if (more > 0) {
    Say(absl::StrCat(loaded.origin, ": and ", more, " more"));
  }
  // Not the same fields once more.
  return Report(
      violations.empty()
          ? status
          : absl::Status(status.code(),
                         Invalid(loaded.origin, violations.size() + static_cast<std::size_t>(more))
                             .message()));
}

std::string ShowCanonical(const CanonicalJob& canonical, Format format) {
  const absl::StatusOr<json::Value> document = json::Parse(CanonicalJson(canonical.job));
  return FormatDocument(*document, format == Format::kTable ? Format::kYaml : format);
}

void PrintSubmitted(const CommonOptions& common, const JobView& job, const char* verb) {
  if (common.format == Format::kName) {
    Print(job.name + "\n");
  } else if (common.format == Format::kTable) {
    Print(absl::StrCat("job ", job.namespace_name, "/", job.name, " ", verb, "\n"));
  } else {
    Print(FormatDocument(WithSchemaVersion(job.document), common.format));
  }
}

}  // namespace

absl::StatusOr<CanonicalJob> LoadJobFile(const std::string& file, PathScope paths) {
  return LoadJobFile(file, paths, [](v1::TrainingJob&) {});
}

absl::StatusOr<CanonicalJob> LoadJobFile(const std::string& file,
                                         PathScope paths,
                                         const std::function<void(v1::TrainingJob&)>& change) {
  ASSIGN_OR_RETURN(LoadedJobFile loaded, Load(file));
  change(loaded.parsed.job);
  return Check(loaded, paths);
}

bool IsValidJobFile(const std::string& file, PathScope paths) {
  const absl::StatusOr<LoadedJobFile> loaded = Load(file);
  CanonicalJob canonical;
  return loaded.ok() && Judge(*loaded, paths, canonical).empty();
}

int RunSubmit(const CommonOptions& common, const SubmitOptions& options) {
  absl::StatusOr<LoadedJobFile> loaded = Load(options.file);
  const absl::Status named = loaded.ok() ? ApplyNamespace(common, *loaded) : loaded.status();
  if (!named.ok()) {
    return Report(named);
  }
  // A node looks at the paths; this machine may not have them.
  const absl::StatusOr<CanonicalJob> local =
      Check(*loaded, options.dry_run == "client" ? PathScope::kAll : PathScope::kNone);
  if (!local.ok()) {
    return Report(local.status());
  }
  if (options.dry_run == "client") {
    Print(ShowCanonical(*local, common.format));
    return kExitOk;
  }
  const absl::StatusOr<std::unique_ptr<JobsClient>> client =
      JobsClient::Connect(common.coordinator);
  if (!client.ok()) {
    return Report(client.status());
  }
  const bool dry_run = options.dry_run == "server";
  const std::string request_id = options.request_id.empty() ? MakeRequestId() : options.request_id;
  const absl::StatusOr<SubmitResult> result =
      (*client)->Submit(loaded->parsed.job, request_id, dry_run);
  if (!result.ok()) {
    return ReportRefusal(**client, *loaded, result.status());
  }
  for (const std::string& warning : result->warnings) {
    Say(absl::StrCat(loaded->origin, ": warning: ", warning));
  }
  PrintSubmitted(common, result->job, dry_run ? "would be accepted" : "submitted");
  if (dry_run || (!options.wait && !options.follow)) {
    return kExitOk;
  }
  return FollowJob(**client,
                   {result->job.namespace_name, result->job.name},
                   options.follow ? FollowMode::kProgress : FollowMode::kQuiet);
}

int RunValidate(const CommonOptions& common, const ValidateOptions& options) {
  const absl::StatusOr<CanonicalJob> canonical =
      LoadJobFile(options.file, options.check_paths ? PathScope::kAll : PathScope::kNone);
  if (!canonical.ok()) {
    return Report(canonical.status());
  }
  if (common.format == Format::kTable) {
    Print(absl::StrCat(options.file == "-" ? "stdin" : options.file, ": valid\n"));
  } else if (common.format == Format::kName) {
    Print(canonical->job.metadata().name() + "\n");
  } else {
    Print(ShowCanonical(*canonical, common.format));
  }
  return kExitOk;
}

}  // namespace ravel::ctl
