#include "worker/trainer/initial_state.h"

#include <span>
#include <string>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>

#include "common/store/file_store.h"
#include "worker/checkpoint/loader.h"

namespace ravel::trainer {
namespace {

std::span<float> Shard(float* data, const shard::ParameterGroup& group) {
  return {data, static_cast<size_t>(group.shard_elements())};
}

// A checkpoint of another model is the job's fault; anything else is the store's.
absl::Status MarkLoadError(const absl::Status& status) {
  return WithCode(status,
                  absl::IsFailedPrecondition(status) ? ExitCode::kPlanMismatch : ExitCode::kStore);
}

absl::Status ReadGroups(checkpoint::StepLoader& loader, RankEngine& engine) {
  for (shard::ParameterGroup& group : engine.groups()) {
    RETURN_IF_ERROR(loader.ReadPieces(
        plan::StateRole::kParam, group.pieces(), Shard(group.main_weight(), group)));
    RETURN_IF_ERROR(
        loader.ReadPieces(plan::StateRole::kExpAvg, group.pieces(), Shard(group.exp_avg(), group)));
    RETURN_IF_ERROR(loader.ReadPieces(
        plan::StateRole::kExpAvgSq, group.pieces(), Shard(group.exp_avg_sq(), group)));
  }
  return absl::OkStatus();
}

// Adds everybody's digest parts and compares with the manifest.
absl::Status CheckDigests(const checkpoint::StepLoader& loader, comm::Communicator& communicator) {
  const std::vector<uint64_t>& mine = loader.digest_sums();
  std::vector<uint64_t> all(mine.size() * static_cast<size_t>(communicator.size()));
  RETURN_IF_ERROR(
      communicator.AllGatherBytes({.op = plan::OpCode::kEndPhase, .unit = -1, .call = 1},
                                  std::as_bytes(std::span<const uint64_t>(mine)),
                                  std::as_writable_bytes(std::span<uint64_t>(all))));
  std::vector<uint64_t> sums(mine.size(), 0);
  for (size_t i = 0; i < all.size(); ++i) {
    sums[i % mine.size()] += all[i];
  }
  return MarkLoadError(loader.CheckDigests(sums));
}

absl::Status Restore(const Assignment& assignment,
                     comm::Communicator& communicator,
                     RankEngine& engine) {
  std::string path = assignment.restore_path;
  while (path.size() > 1 && path.ends_with('/')) {
    path.pop_back();
  }
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos || slash + 1 == path.size()) {
    return WithCode(absl::InvalidArgumentError(absl::StrCat(
                        "restore path: expected an absolute step directory, got ", path)),
                    ExitCode::kPlanMismatch);
  }
  const store::FileStore files(slash == 0 ? "/" : path.substr(0, slash));
  auto loader =
      checkpoint::StepLoader::Open(&files, path.substr(slash + 1), &assignment.plan.inventory);
  if (!loader.ok()) {
    return MarkLoadError(loader.status());
  }
  RETURN_IF_ERROR(MarkLoadError(ReadGroups(*loader, engine)));
  auto updates =
      loader->ReadOptimizerStep(communicator.rank() == 0 ? checkpoint::DigestShare::kOwner
                                                         : checkpoint::DigestShare::kReplica);
  if (!updates.ok()) {
    return MarkLoadError(updates.status());
  }
  engine.set_updates(*updates);
  return CheckDigests(*loader, communicator);
}

absl::Status LoadHuggingFace(const Assignment& assignment, RankEngine& engine) {
  ASSIGN_OR_RETURN(
      auto loader,
      checkpoint::HuggingFaceLoader::Open(assignment.spec.model_from, &assignment.plan.inventory));
  for (shard::ParameterGroup& group : engine.groups()) {
    RETURN_IF_ERROR(loader.ReadPieces(group.pieces(), Shard(group.main_weight(), group)));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status PrepareState(const Assignment& assignment,
                          comm::Communicator& communicator,
                          RankEngine& engine) {
  if (!assignment.restore_path.empty()) {
    return Restore(assignment, communicator, engine);
  }
  if (!assignment.spec.model_from.empty()) {
    const absl::Status loaded = LoadHuggingFace(assignment, engine);
    return WithCode(loaded.ok() ? loaded : Annotate(loaded, "model.from"), ExitCode::kPlanMismatch);
  }
  engine.InitializeWeights();
  return absl::OkStatus();
}

}  // namespace ravel::trainer
