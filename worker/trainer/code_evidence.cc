// Every rank digests the rows that it would save, so each row counts once; rank 0 adds the scales,
// which all ranks have. Sums of the ranks' parts are the digests of whole weights on any mesh.

#include "worker/trainer/code_evidence.h"

#include <span>
#include <string>
#include <utility>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>
#include <absl/strings/str_join.h>

#include "common/check.h"
#include "common/model/recipes.h"
#include "common/plan/plan_pieces.h"
#include "common/signed_size.h"
#include "kernels/scalar/code_digest.h"

namespace ravel::trainer {
namespace {

// Differences beyond this many are counted, not listed.
constexpr size_t kMaxListed = 8;

absl::Status AddGroup(const plan::ShardingPlan& plan,
                      int64_t rank,
                      const shard::ParameterGroup& group,
                      RankEngine& engine,
                      std::vector<uint64_t>& sums) {
  std::vector<std::byte> copy;
  for (const plan::OwnedPiece& piece : plan::SavedPieces(plan, group.index(), rank)) {
    const int64_t columns = piece.item.length[1];
    std::byte* const codes =
        group.stored_model_weight() + group.ModelWeightBytes(piece.shard_offset);
    std::span<const std::byte> bytes(codes, Size(group.ModelWeightBytes(piece.elements())));
    if (!engine.memory().in_place()) {
      copy.resize(bytes.size());
      RETURN_IF_ERROR(engine.memory().Read(codes, copy));
      bytes = copy;
    }
    const int index = engine.quant()->layout().index_of[piece.tensor];
    const int64_t row_bytes = group.ModelWeightBytes(plan.inventory.tensors[piece.tensor].shape[1]);
    const int64_t item_bytes = group.ModelWeightBytes(columns);
    const int64_t first_row = piece.item.offset[0] + DivExact(piece.range.begin, columns);
    const int64_t rows = DivExact(piece.elements(), columns);
    for (int64_t row = 0; row < rows; ++row) {
      const auto codes_of_row = bytes.subspan(Size(row * item_bytes), Size(item_bytes));
      At(sums, index) += kernels::scalar::CodesDigest(
          {reinterpret_cast<const uint8_t*>(codes_of_row.data()), codes_of_row.size()},
          row_bytes,
          (first_row + row) * row_bytes + group.ModelWeightBytes(piece.item.offset[1]));
    }
  }
  return absl::OkStatus();
}

absl::Status AddScales(RankEngine& engine, std::vector<uint64_t>& sums) {
  const quant::QuantState& quant = *engine.quant();
  std::vector<uint32_t> amaxes(quant.weight_amaxes().size());
  std::vector<float> delayed(quant.delayed_scales().size());
  RETURN_IF_ERROR(engine.memory().Read(quant.weight_amaxes().data(),
                                       std::as_writable_bytes(std::span<uint32_t>(amaxes))));
  if (!delayed.empty()) {
    RETURN_IF_ERROR(engine.memory().Read(quant.delayed_scales().data(),
                                         std::as_writable_bytes(std::span<float>(delayed))));
  }
  for (size_t i = 0; i < sums.size(); ++i) {
    sums[i] += quant.ScalesDigest(quant.layout().tensors[i].tensor, amaxes, delayed);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<uint64_t>> CodeDigests(const plan::ShardingPlan& plan,
                                                  int64_t rank,
                                                  RankEngine& engine) {
  std::vector<uint64_t> sums;
  if (engine.quant() == nullptr) {
    return sums;
  }
  const plan::QuantLayout& layout = engine.quant()->layout();
  sums.resize(layout.tensors.size(), 0);
  for (const shard::ParameterGroup& group : engine.groups()) {
    if (group.recipe() != plan::Recipe::kNone) {
      RETURN_IF_ERROR(AddGroup(plan, rank, group, engine, sums));
    }
  }
  if (rank == 0) {
    RETURN_IF_ERROR(AddScales(engine, sums));
  }
  return sums;
}

absl::Status CheckCodes(const ckpt::QuantRecord& saved,
                        const plan::ShardingPlan& plan,
                        comm::Communicator& communicator,
                        RankEngine& engine) {
  ASSIGN_OR_RETURN(const std::vector<uint64_t> mine,
                   CodeDigests(plan, communicator.rank(), engine));
  if (mine.empty() || saved.tensors.empty()) {
    return absl::OkStatus();  // of the plan and the manifest: so on all ranks
  }
  std::vector<uint64_t> all(mine.size() * Size(communicator.size()));
  RETURN_IF_ERROR(
      communicator.AllGatherBytes({.op = plan::OpLabel::kEndPhase, .unit = -1, .call = 2},
                                  std::as_bytes(std::span<const uint64_t>(mine)),
                                  std::as_writable_bytes(std::span<uint64_t>(all))));
  std::vector<uint64_t> sums(mine.size(), 0);
  for (size_t i = 0; i < all.size(); ++i) {
    sums[i % sums.size()] += all[i];
  }
  size_t differ = 0;
  std::vector<std::string> listed;
  for (const ckpt::QuantizedRecord& record : saved.tensors) {
    const plan::TensorId id = plan.inventory.FindTensor(record.name);
    const plan::QuantTensor* tensor = id < 0 ? nullptr : engine.quant()->layout().Find(id);
    if (tensor == nullptr || saved.recipe != plan::RecipeName(tensor->recipe) ||
        saved.amax_epsilon != plan.options.amax_epsilon) {
      continue;
    }
    const uint64_t sum = At(sums, engine.quant()->layout().index_of[id]);
    if (sum != record.digest64 && ++differ <= kMaxListed) {
      listed.push_back(absl::StrFormat(
          "%s: digest64 %016x, the manifest says %016x", record.name, sum, record.digest64));
    }
  }
  return differ == 0 ? absl::OkStatus()
                     : absl::DataLossError(absl::StrCat(
                           "codes of ",
                           differ,
                           " quantized weight(s) are not those that were trained with: ",
                           absl::StrJoin(listed, "; ")));
}

}  // namespace ravel::trainer
