// The parts of a step's statistics that host and device share: layout of the message and of its
// memory, and the kernels, which exist for both.

#include "worker/optim/step_statistics.h"

#include <algorithm>
#include <utility>

#include "common/check.h"
#include "common/signed_size.h"

namespace ravel::optim {
namespace {

constexpr int64_t kAlignment = 256;

// Parts of one allocation.
class Carver {
 public:
  explicit Carver(std::byte* begin) : begin_(begin) {}
  template <typename T>
  void Take(int64_t count, T*& part) {
    part = begin_ == nullptr ? nullptr : reinterpret_cast<T*>(begin_ + bytes_);
    bytes_ += RoundUp(std::max<int64_t>(1, count) * static_cast<int64_t>(sizeof(T)), kAlignment);
  }
  int64_t bytes() const { return bytes_; }

 private:
  std::byte* begin_;
  int64_t bytes_ = 0;
};

}  // namespace

StepStatistics::StepStatistics(const Args& args) : args_(args), tree_(args.plan) {
  words_ = nodes_word() + (args.norms ? 3 : 1) * longest();
  CHECK_MSG(words_ * args.plan.ranks <= INT32_MAX, "words of messages are counted in 31 bits");
  tables_ = MakeTables();
}

int64_t StepStatistics::nodes_word() const {
  return kernels::kStatisticsHeaderWords +
         static_cast<int64_t>(args_.plan.inventory.tensors.size()) + args_.plan.lanes.turns();
}

int64_t StepStatistics::gathered_bytes() const {
  return words_ * args_.plan.ranks * int64_t{sizeof(int64_t)};
}

// Rows lie in the order of groups and their measured pieces, as the nodes do.
StepStatistics::Tables StepStatistics::MakeTables() {
  Tables made;
  const std::vector<TreeNode>& mine = tree_.nodes(args_.rank);
  size_t next = 0;
  for (const shard::ParameterGroup& group : args_.groups) {
    for (const plan::OwnedPiece& piece : group.measured_pieces()) {
      const PieceRows rows = RowsOf(args_.plan.inventory, piece);
      const size_t each = NodesOfRows(piece.tensor, rows.first, rows.first + rows.rows).size();
      for (int64_t block = 0; block < rows.blocks; ++block) {
        for (size_t i = 0; i < each; ++i, ++next) {
          CHECK(next < mine.size() && mine[next].tensor == piece.tensor);
          made.nodes.push_back({.first_row = rows_ + mine[next].first_row() - rows.first,
                                .level = mine[next].level});
        }
        rows_ += rows.rows;
      }
    }
  }
  CHECK_EQ(next, mine.size());
  made.sums = tree_.Program([this](int rank, size_t position) {
    return static_cast<int32_t>(rank * words_ + nodes_word() + static_cast<int64_t>(position));
  });
  return made;
}

int64_t StepStatistics::Place(std::byte* memory) {
  const SumProgram& sums = tables_.sums;
  const auto steps = static_cast<int64_t>(sums.steps.size());
  Carver carver(memory);
  carver.Take(rows_, row_sums_);
  carver.Take(words_, message_);
  carver.Take(words_ * args_.plan.ranks, gathered_);
  carver.Take(static_cast<int64_t>(tables_.nodes.size()), nodes_);
  carver.Take(steps, steps_);
  carver.Take(static_cast<int64_t>(sums.level_ends.size()), level_ends_);
  carver.Take(steps, sums_);
  carver.Take(1, outcome_);
  carver.Take(args_.plan.lanes.turns(), evaluation_);
  return carver.bytes();
}

void StepStatistics::AddMicroBatch(kernels::Stream& stream,
                                   int64_t turn,
                                   const TensorView& losses,
                                   const TensorView& targets) {
  const int64_t loss_word = nodes_word() - args_.plan.lanes.turns() + turn;
  kernels::SumLoss(stream,
                   {.losses = losses,
                    .targets = targets,
                    .sum = reinterpret_cast<double*>(message_ + loss_word),
                    .tokens = message_});
}

shard::StatisticsMessages StepStatistics::Measure(kernels::Stream& stream) {
  float* sums = row_sums_;
  for (const shard::ParameterGroup& group : args_.groups) {
    for (const plan::OwnedPiece& piece : group.measured_pieces()) {
      MeasureRows(stream,
                  args_.plan.inventory,
                  piece,
                  group.reduced(0) + piece.shard_offset,
                  sums,
                  message_ + kernels::kStatisticsHeaderWords + piece.tensor.value());
      sums += RowsOf(args_.plan.inventory, piece).sums();
    }
  }
  kernels::SumRowNodes(stream,
                       {.row_sums = row_sums_,
                        .rows = rows_,
                        .nodes = nodes_,
                        .count = static_cast<int64_t>(tables_.nodes.size()),
                        .out = reinterpret_cast<double*>(message_ + nodes_word())});
  return {.mine = message_, .all = gathered_, .words = words_};
}

void StepStatistics::Decide(kernels::Stream& stream,
                            double clip_norm,
                            const kernels::LossScaleRule& loss_scale,
                            const kernels::UpdateHyper& hyper) {
  const SumProgram& sums = tables_.sums;
  kernels::DecideUpdate(stream,
                        {.messages = gathered_,
                         .ranks = args_.plan.ranks,
                         .words = words_,
                         .tensors = static_cast<int64_t>(args_.plan.inventory.tensors.size()),
                         .steps = steps_,
                         .level_ends = level_ends_,
                         .levels = static_cast<int64_t>(sums.level_ends.size()),
                         .step_count = static_cast<int64_t>(sums.steps.size()),
                         .sums = sums_,
                         .total = sums.total,
                         .clip_norm = clip_norm,
                         .loss_scale = loss_scale,
                         .hyper = hyper,
                         .outcome = outcome_});
}

void StepStatistics::AddEvaluation(kernels::Stream& stream,
                                   int64_t turn,
                                   const TensorView& losses,
                                   const TensorView& targets) {
  LaneLoss& lane = evaluation_[turn];
  kernels::SumLoss(
      stream, {.losses = losses, .targets = targets, .sum = &lane.sum, .tokens = &lane.tokens});
}

}  // namespace ravel::optim
