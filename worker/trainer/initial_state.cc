// Fills an engine's state from a checkpoint, from Hugging Face files or at random. Every rank reads
// what it stores, but only the rank that would save a piece adds it to the digests. All ranks then
// compare the summed digests with the manifest, so damaged data is found before the first step, at
// the cost of one small all-gather. Values that bf16 states could not hold are refused, never
// rounded.

#include "worker/trainer/initial_state.h"

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>

#include "common/logging.h"
#include "common/plan/plan_pieces.h"
#include "common/signed_size.h"
#include "common/store/open_store.h"
#include "common/store/store_refusal.h"
#include "worker/checkpoint/loader.h"
#include "worker/optim/loss_scale.h"
#include "worker/optim/stored_state.h"
#include "worker/trainer/code_evidence.h"

namespace ravel::trainer {
namespace {

// States that live as bf16 take what it has: a save of bf16 states, in either type. Values that
// were kept as fp32 are not rounded in silence.
absl::Status CheckFits(RankEngine& engine,
                       const shard::ParameterGroup& group,
                       plan::StateRole role,
                       std::span<const float> shard) {
  if (role == plan::StateRole::kParam || optim::StoredType(group, role) != DType::kBF16) {
    return absl::OkStatus();
  }
  for (const plan::OwnedPiece& piece : group.pieces()) {
    const std::span<const float> values =
        shard.subspan(Size(piece.shard_offset), Size(piece.elements()));
    const size_t at = optim::FirstNotBf16(values);
    if (at != values.size()) {
      const plan::TensorSpec& tensor = engine.tensor(piece.tensor);
      return absl::FailedPreconditionError(
          absl::StrCat(plan::StateKey(tensor.name, role),
                       ": saved as F32, with values that BF16 does not have (",
                       values[at],
                       " in element ",
                       piece.IndexOf(tensor.shape, static_cast<int64_t>(at)),
                       "); training.optimizer.stateDtype: expected fp32, got bf16"));
    }
  }
  return absl::OkStatus();
}

// Pieces that this rank reads of a group: those that it stores, and, of these, those that it counts
// in the digests.
struct PiecesToRead {
  const std::vector<plan::OwnedPiece>& stored;
  const std::vector<plan::OwnedPiece>& counted;
};

// Updates read codes of NaN as if they were values, and write none.
absl::Status CheckCodes(RankEngine& engine,
                        plan::StateRole role,
                        const std::vector<plan::OwnedPiece>& pieces,
                        std::span<const std::byte> codes) {
  for (const plan::OwnedPiece& piece : pieces) {
    const std::span<const std::byte> part =
        codes.subspan(Size(piece.shard_offset), Size(piece.elements()));
    const size_t at = optim::FirstNanCode(part, role == plan::StateRole::kExpAvgSq);
    if (at != part.size()) {
      const plan::TensorSpec& tensor = engine.tensor(piece.tensor);
      return absl::DataLossError(absl::StrCat(plan::StateKey(tensor.name, role),
                                              ": the code of element ",
                                              piece.IndexOf(tensor.shape, static_cast<int64_t>(at)),
                                              " is NaN, which no state has"));
    }
  }
  return absl::OkStatus();
}

// An fp8 state takes the codes and scales of a save of fp8, as they are.
absl::Status FillCodes(RankEngine& engine,
                       const shard::ParameterGroup& group,
                       plan::StateRole role,
                       const PiecesToRead& pieces,
                       checkpoint::StepLoader& loader) {
  const DType saved = loader.StoredType(role);
  if (!plan::IsFp8State(saved)) {
    return absl::FailedPreconditionError(absl::StrCat(plan::StateName(role),
                                                      ": saved as ",
                                                      std::string(DTypeName(saved)),
                                                      "; training.optimizer.stateDtype: expected ",
                                                      saved == DType::kBF16 ? "bf16" : "fp32",
                                                      ", got fp8, which would round it"));
  }
  std::vector<std::byte> codes(Size(group.shard_elements()));
  std::vector<float> scales(Size(group.scale_count()));
  const plan::StateRole scale_role = *plan::ScaleRoleOf(role);
  const auto read = [&](const std::vector<plan::OwnedPiece>& part,
                        checkpoint::DigestShare share) -> absl::Status {
    RETURN_IF_ERROR(loader.ReadStored(role, part, codes, share));
    return loader.ReadPieces(scale_role, group.ScalesOf(part), scales, share);
  };
  if (pieces.counted != pieces.stored) {
    RETURN_IF_ERROR(read(pieces.stored, checkpoint::DigestShare::kReplica));
  }
  RETURN_IF_ERROR(read(pieces.counted, checkpoint::DigestShare::kOwner));
  const size_t at = optim::FirstNotScale(scales);
  if (at != scales.size()) {
    return absl::DataLossError(absl::StrCat(
        plan::StateName(scale_role), ": ", scales[at], " is no power of two from 2^-127 on"));
  }
  RETURN_IF_ERROR(CheckCodes(engine, role, pieces.stored, codes));
  return WithCode(optim::WriteCodes(engine.memory(), group, role, codes, scales),
                  ExitCode::kDevice);
}

// Fills what is stored: in place, or, where that is not fp32 in host memory, on the host first.
absl::Status FillShard(RankEngine& engine,
                       const shard::ParameterGroup& group,
                       plan::StateRole role,
                       const std::function<absl::Status(std::span<float>)>& read) {
  const size_t elements = Size(group.shard_elements());
  float* const floats = optim::StoredFloats(group, role);
  if (engine.memory().in_place() && (floats != nullptr || elements == 0)) {
    RETURN_IF_ERROR(read({floats, elements}));
    return WithCode(engine.memory().Settle(std::as_bytes(std::span<const float>(floats, elements))),
                    ExitCode::kDevice);
  }
  std::vector<float> shard(elements, 0.0f);
  RETURN_IF_ERROR(read(shard));
  RETURN_IF_ERROR(CheckFits(engine, group, role, shard));
  return WithCode(optim::WriteStored(engine.memory(), group, role, 0, shard), ExitCode::kDevice);
}

// A checkpoint of another model is the job's fault; anything else is the store's, settings to reach
// it among that.
absl::Status MarkLoadError(const absl::Status& status) {
  const bool mismatch =
      absl::IsFailedPrecondition(status) && store::RefusalOf(status) == store::RefusalCause::kNone;
  return WithCode(status, mismatch ? ExitCode::kPlanMismatch : ExitCode::kStore);
}

// Every rank reads what it stores; an element counts in the digests on the rank that would save it.
absl::Status ReadGroups(const plan::ShardingPlan& plan,
                        int64_t rank,
                        checkpoint::StepLoader& loader,
                        RankEngine& engine,
                        Position& position) {
  for (shard::ParameterGroup& group : engine.groups()) {
    const std::vector<plan::OwnedPiece> counted = plan::SavedPieces(plan, group.index(), rank);
    const auto read = [&](plan::StateRole role) {
      return FillShard(engine, group, role, [&](std::span<float> shard) -> absl::Status {
        if (counted != group.pieces()) {
          RETURN_IF_ERROR(
              loader.ReadPieces(role, group.pieces(), shard, checkpoint::DigestShare::kReplica));
        }
        RETURN_IF_ERROR(loader.ReadPieces(role, counted, shard));
        position.Move(loader.bytes_read());
        return absl::OkStatus();
      });
    };
    RETURN_IF_ERROR(read(plan::StateRole::kParam));
    if (group.layout().trainable) {
      for (const plan::StateSpec& state : plan::BufferStatesOf(plan.options.optimizer)) {
        const bool fp8 = plan::IsFp8State(optim::StoredType(group, state.role));
        RETURN_IF_ERROR(
            fp8 ? FillCodes(engine, group, state.role, {group.pieces(), counted}, loader)
                : read(state.role));
        position.Move(loader.bytes_read());
      }
    }
  }
  return absl::OkStatus();
}

// Adds everybody's digest parts and compares with the manifest.
absl::Status CheckDigests(const checkpoint::StepLoader& loader, comm::Communicator& communicator) {
  const std::vector<uint64_t>& mine = loader.digest_sums();
  std::vector<uint64_t> all(mine.size() * Size(communicator.size()));
  RETURN_IF_ERROR(
      communicator.AllGatherBytes({.op = plan::OpLabel::kEndPhase, .unit = -1, .call = 1},
                                  std::as_bytes(std::span<const uint64_t>(mine)),
                                  std::as_writable_bytes(std::span<uint64_t>(all))));
  std::vector<uint64_t> sums(mine.size(), 0);
  for (size_t i = 0; i < all.size(); ++i) {
    sums[i % mine.size()] += all[i];
  }
  return MarkLoadError(loader.CheckDigests(sums));
}

// The step directory that the job resumes from, in the store that holds it.
struct SavedStep {
  std::unique_ptr<store::ObjectStore> files;
  std::optional<checkpoint::StepLoader> loader;
};

absl::StatusOr<SavedStep> OpenSaved(const Assignment& assignment) {
  absl::StatusOr<store::StorePlace> place = store::OpenParent(assignment.restore_path);
  if (!place.ok()) {
    return WithCode(Annotate(place.status(), "restore path"), ExitCode::kPlanMismatch);
  }
  SavedStep saved;
  saved.files = std::move(place->parent);
  auto loader = checkpoint::StepLoader::Open(saved.files.get(),
                                             place->name,
                                             &assignment.plan.inventory,
                                             assignment.plan.options.optimizer);
  if (!loader.ok()) {
    return MarkLoadError(loader.status());
  }
  saved.loader.emplace(*std::move(loader));
  return saved;
}

// One tensor's delayed scales, as they were saved.
struct SavedScales {
  plan::StateRole role = plan::StateRole::kCastScale;
  int64_t first = 0;  // element of QuantState
  std::vector<float> values;
};

// kNew: codes are cast by other scales than those that were saved.
enum class ScalesStart { kNew, kAsSaved };

// Delayed scales go on from their histories, if those of all tensors are there; else they begin.
absl::StatusOr<ScalesStart> RestoreScales(const plan::ShardingPlan& plan,
                                          checkpoint::DigestShare share,
                                          checkpoint::StepLoader& loader,
                                          RankEngine& engine) {
  using Refresh = shard::UnitExecutor::Refresh;
  quant::QuantState* const quant = engine.quant();
  if (quant == nullptr || quant->layout().slots == 0) {
    RETURN_IF_ERROR(engine.RefreshWeights(Refresh::kNew));
    return ScalesStart::kAsSaved;
  }
  std::vector<SavedScales> saved;
  for (const plan::QuantTensor& tensor : quant->layout().tensors) {
    for (const plan::StateRole role :
         {plan::StateRole::kCastScale, plan::StateRole::kAmaxHistory}) {
      Shape shape = {plan::kSlotsPerDomain};
      if (role == plan::StateRole::kAmaxHistory) {
        shape.push_back(plan.options.amax_history);
      }
      const int64_t elements = ElementCount(shape);
      SavedScales& read = saved.emplace_back(
          SavedScales{.role = role, .first = tensor.domain * elements, .values = {}});
      read.values.resize(Size(elements));
      ASSIGN_OR_RETURN(
          const bool found,
          loader.ReadScales(engine.tensor(tensor.tensor), role, shape, read.values, share));
      if (!found) {
        RETURN_IF_ERROR(engine.RefreshWeights(Refresh::kNew));
        return ScalesStart::kNew;
      }
    }
  }
  for (const SavedScales& scales : saved) {
    RETURN_IF_ERROR(WithCode(
        optim::WriteScales(engine.memory(), *quant, scales.role, scales.first, scales.values),
        ExitCode::kDevice));
  }
  RETURN_IF_ERROR(engine.RefreshWeights(Refresh::kLoaded));
  return ScalesStart::kAsSaved;
}

// Codes must be those of the run that was saved; without determinism that is told and not asked
// for.
absl::Status CompareCodes(const Assignment& assignment,
                          const ckpt::QuantRecord& saved,
                          comm::Communicator& communicator,
                          RankEngine& engine) {
  const absl::Status same = CheckCodes(saved, assignment.plan, communicator, engine);
  if (absl::IsDataLoss(same) && assignment.spec.determinism == plan::DeterminismMode::kFast) {
    log::Warning(std::string(same.message()));
    return absl::OkStatus();
  }
  return MarkLoadError(same);
}

// A save of another compute type has none: the scale begins anew.
absl::Status RestoreLossScale(const checkpoint::StepLoader& loader, RankEngine& engine) {
  if (!engine.optimizer().scales_loss()) {
    return absl::OkStatus();
  }
  const absl::StatusOr<std::string> saved = loader.Blob(optim::kLossScaleBlob);
  if (absl::IsNotFound(saved.status())) {
    return absl::OkStatus();
  }
  RETURN_IF_ERROR(saved.status());
  ASSIGN_OR_RETURN(const optim::LossScale scale,
                   optim::ParseLossScale(*saved, engine.optimizer().loss_scale_spec()));
  engine.set_loss_scale(scale);
  return absl::OkStatus();
}

absl::Status Restore(const Assignment& assignment,
                     comm::Communicator& communicator,
                     RankEngine& engine,
                     Position& position) {
  ASSIGN_OR_RETURN(SavedStep saved, OpenSaved(assignment));
  std::optional<checkpoint::StepLoader>& loader = saved.loader;
  RETURN_IF_ERROR(
      MarkLoadError(ReadGroups(assignment.plan, assignment.rank, *loader, engine, position)));
  const checkpoint::DigestShare share = communicator.rank() == 0
                                            ? checkpoint::DigestShare::kOwner
                                            : checkpoint::DigestShare::kReplica;
  auto updates = loader->ReadOptimizerStep(share);
  if (!updates.ok()) {
    return MarkLoadError(updates.status());
  }
  engine.set_updates(*updates);
  RETURN_IF_ERROR(MarkLoadError(RestoreLossScale(*loader, engine)));
  const auto scales = RestoreScales(assignment.plan, share, *loader, engine);
  if (!scales.ok()) {
    return MarkLoadError(scales.status());
  }
  RETURN_IF_ERROR(CheckDigests(*loader, communicator));
  return *scales == ScalesStart::kNew
             ? absl::OkStatus()
             : CompareCodes(assignment, loader->manifest().quant, communicator, engine);
}

absl::Status LoadHuggingFace(const Assignment& assignment, RankEngine& engine, Position& position) {
  ASSIGN_OR_RETURN(
      auto loader,
      checkpoint::HuggingFaceLoader::Open(assignment.spec.model_from, &assignment.plan.inventory));
  for (shard::ParameterGroup& group : engine.groups()) {
    RETURN_IF_ERROR(FillShard(engine, group, plan::StateRole::kParam, [&](std::span<float> shard) {
      return loader.ReadPieces(group.pieces(), shard);
    }));
    position.Move(loader.bytes_read());
  }
  return engine.RefreshWeights();
}

}  // namespace

absl::StatusOr<std::string> SavedGemms(const Assignment& assignment) {
  if (assignment.restore_path.empty()) {
    return std::string();
  }
  ASSIGN_OR_RETURN(const SavedStep saved, OpenSaved(assignment));
  const absl::StatusOr<std::string> table = saved.loader->Blob(kGemmsBlob);
  return table.ok() ? *table : std::string();
}

absl::Status PrepareState(const Assignment& assignment,
                          comm::Communicator& communicator,
                          RankEngine& engine,
                          Position& position) {
  if (!assignment.restore_path.empty()) {
    return Restore(assignment, communicator, engine, position);
  }
  if (!assignment.spec.model_from.empty()) {
    const absl::Status loaded = LoadHuggingFace(assignment, engine, position);
    return WithCode(loaded.ok() ? loaded : Annotate(loaded, "model.from"), ExitCode::kPlanMismatch);
  }
  return WithCode(engine.InitializeWeights(), ExitCode::kDevice);
}

}  // namespace ravel::trainer
