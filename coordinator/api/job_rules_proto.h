#pragma once

// The rules behind Canonicalize of job_file_proto.h, section by section.

#include <cstdint>
#include <optional>
#include <set>
#include <string>

#include "common/plan/layout/strategy_table.h"
#include "coordinator/api/job_file_proto.h"

namespace ravel {

// Collects violations while one job is made canonical. Used only by Canonicalize.
class JobRules {
 public:
  JobRules(const v1::TrainingJob& job, const CanonicalizeOptions& options);
  CanonicalJob Run();

 private:
  void Fail(const std::string& path, std::string expected, std::string got);
  void Warn(std::string warning) { result_.warnings.push_back(std::move(warning)); }
  // Reports an error of the planner: its fields have the names of the job file, below `spec`.
  void FailAs(const absl::Status& status);
  bool Failed(const std::string& path) const { return failed_.count(path) > 0; }
  bool KnowsData() const { return options_.facts != nullptr && options_.check_data; }

  // Sizes of everything, and characters that no field may hold. False: nothing else is looked at,
  // so that no message repeats what is too long.
  bool CheckLimits();
  // Defaults and ranges that stand beside the fields.
  void ApplyRules();
  // Each fills its part of the canonical job and of the spec, and checks rules between fields.
  void CheckHeader();
  void CheckMetadata();
  void CheckTop();
  void CheckModel();
  void CheckInlineConfig();
  void CheckModelDirectory();
  void CheckData();
  void CheckTokenFiles();
  void CheckSupply(int64_t train_samples);
  void CheckTokenizer();
  void CheckTraining();
  void CheckSteps();
  void CheckOptimizer();
  void CheckOffload();
  void CheckSchedule();
  void CheckEvaluation();
  void CheckFreeze();
  void CheckParallelism();
  void CheckStrategy();
  void CheckUnits(const plan::StrategyChoice& of_job);
  void CheckUnitNames();
  // The strategy that a field names, whose text becomes its plain name; nothing after a violation.
  std::optional<plan::NamedStrategy> StrategyAt(const std::string& path,
                                                std::string* text,
                                                bool of_one_axis);
  // Checks that a strategy between replicas may be there, and runs with the one within them. `path`
  // is the field at fault: that of the first, or where it is `inherited` that of the second.
  bool CheckReplicate(const std::string& path, bool inherited, const plan::StrategyChoice& choice);
  void CheckReplicas();
  // The axis, and once the micro-batch is known what it cuts.
  void CheckTensor();
  void CheckTensorCuts();
  void CheckDevices();
  void CheckPrecision();
  void CheckRecipe(v1::PrecisionSpec& precision);
  void CheckLossScale(v1::PrecisionSpec& precision);
  void CheckScales(bool delayed, bool per_tensor, v1::PrecisionSpec& precision);
  void CheckEmulation(v1::PrecisionSpec& precision);
  void CheckFastAccumulation(plan::GemmPath path, v1::PrecisionSpec& precision);
  void CheckShapesOf(const plan::RecipeSpec& recipe);
  void CheckElastic();
  void ExpandSizes();
  void CheckDeterminism();
  void CheckCheckpoint();
  void CheckResume();
  void CheckRestart();
  void CheckRest();
  void CheckEnvironment();
  void CheckVariable(int index);
  void CheckCommunication();
  void CheckTrace();
  void ResolveLanes();

  // An index into `names`; the first is the default of empty text. Stores the chosen name.
  int Choice(const std::string& path, std::string* text, const std::vector<std::string>& names);
  // An absolute path from a path or a file:// URL, without trailing slashes; "" after a violation.
  std::string AbsolutePath(const std::string& path, const std::string& text);
  // The same, or the URL of what nodes fetch: of a file or prefix in a data set, or of the data
  // set.
  enum class DataPart { kMember, kWhole };
  std::string DataPath(const std::string& path, const std::string& text, DataPart part);
  void CheckRemoteStore(const std::string& field, const std::string& url);
  // Sample count of one token file, or -1 when it cannot be told.
  int64_t CheckTokenFile(const std::string& path,
                         const TokenFileFacts& facts,
                         plan::DataSource& source);

  v1::JobSpec& job() { return *result_.job.mutable_spec(); }
  plan::JobSpec& spec() { return result_.spec; }

  CanonicalizeOptions options_;
  CanonicalJob result_;
  std::set<std::string> failed_;
};

// The tokenizer that a job takes when it names none and this one is there.
NamedPath TokenizerBeside(const plan::JobSpec& spec);

}  // namespace ravel
