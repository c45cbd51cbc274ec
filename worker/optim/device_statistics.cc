#include "worker/optim/device_statistics.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include <absl/strings/str_cat.h>

#include "common/check.h"
#include "common/signed_size.h"

namespace ravel::optim {
namespace {

constexpr int64_t kAlignment = 256;
constexpr int64_t kWordBytes = sizeof(int64_t);

kernels::CudaStream& CudaStreamOf(kernels::Stream& stream) {
  CHECK_MSG(stream.backend() == kernels::Backend::kCuda, "a stream of the device is expected");
  return static_cast<kernels::CudaStream&>(stream);
}

// Parts of one allocation.
class Carver {
 public:
  explicit Carver(void* begin) : begin_(static_cast<std::byte*>(begin)) {}
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

int64_t DeviceStatistics::nodes_word() const {
  return kernels::kStatisticsHeaderWords +
         static_cast<int64_t>(args_.plan.inventory.tensors.size()) + args_.plan.lanes.turns();
}

// Rows lie in the order of groups and their measured pieces, as the nodes do.
std::vector<kernels::RowNode> DeviceStatistics::RowNodes() {
  const std::vector<TreeNode>& mine = tree_.nodes(args_.rank);
  std::vector<kernels::RowNode> nodes;
  size_t next = 0;
  for (const shard::ParameterGroup& group : args_.groups) {
    for (const plan::OwnedPiece& piece : group.measured_pieces()) {
      const int64_t first = FirstRowOf(args_.plan.inventory, piece);
      for (; next < mine.size() && mine[next].tensor == piece.tensor; ++next) {
        nodes.push_back(
            {.first_row = rows_ + mine[next].first_row() - first, .level = mine[next].level});
      }
      rows_ += RowsOf(args_.plan.inventory, piece);
    }
  }
  CHECK_EQ(next, mine.size());
  return nodes;
}

void DeviceStatistics::Place(const std::vector<kernels::RowNode>& nodes, const SumProgram& sums) {
  Carver carver(device_.data());
  carver.Take(rows_, row_sums_);
  carver.Take(words_, message_);
  carver.Take(words_ * args_.plan.ranks, gathered_);
  carver.Take(static_cast<int64_t>(nodes.size()), nodes_);
  carver.Take(static_cast<int64_t>(sums.steps.size()), steps_);
  carver.Take(static_cast<int64_t>(sums.level_ends.size()), level_ends_);
  carver.Take(static_cast<int64_t>(sums.steps.size()), sums_);
  carver.Take(1, outcome_);
  carver.Take(args_.plan.lanes.turns(), evaluation_);
  bytes_ = carver.bytes();
}

absl::Status DeviceStatistics::CopyTables(const std::vector<kernels::RowNode>& nodes,
                                          const SumProgram& sums) {
  kernels::CudaStream& stream = args_.streams.compute();
  stream.FillZero(device_.data(), device_.bytes());
  const auto copy = [&](const auto& values, auto* to) -> absl::Status {
    const auto bytes = static_cast<int64_t>(values.size() * sizeof(values[0]));
    if (bytes == 0) {
      return absl::OkStatus();
    }
    ASSIGN_OR_RETURN(kernels::CudaMemory from, args_.streams.gpu().AllocatePinned(bytes));
    std::memcpy(from.data(), values.data(), Size(bytes));
    stream.CopyMemory(to, from.data(), bytes);
    copied_.push_back(std::move(from));
    return absl::OkStatus();
  };
  RETURN_IF_ERROR(copy(nodes, nodes_));
  RETURN_IF_ERROR(copy(sums.steps, steps_));
  RETURN_IF_ERROR(copy(sums.level_ends, level_ends_));
  return args_.streams.Finish(stream);
}

absl::StatusOr<std::unique_ptr<DeviceStatistics>> DeviceStatistics::Create(const Args& args) {
  std::unique_ptr<DeviceStatistics> made(new DeviceStatistics(args));
  const auto tensors = static_cast<int64_t>(args.plan.inventory.tensors.size());
  const std::vector<kernels::RowNode> nodes = made->RowNodes();
  made->node_count_ = static_cast<int64_t>(nodes.size());
  made->words_ = made->nodes_word() + made->lists() * made->tree_.longest();
  CHECK_MSG(made->words_ * args.plan.ranks <= INT32_MAX,
            "words of messages are counted in 31 bits");
  const SumProgram sums = made->tree_.Program([&](int rank, size_t position) {
    return static_cast<int32_t>(rank * made->words_ + made->nodes_word() +
                                static_cast<int64_t>(position));
  });
  kernels::CudaGpu& gpu = args.streams.gpu();
  made->Place(nodes, sums);
  auto device = gpu.AllocateDevice(made->bytes_);
  if (!device.ok()) {
    return Annotate(device.status(), "statistics");
  }
  made->device_ = *std::move(device);
  made->Place(nodes, sums);
  RETURN_IF_ERROR(made->CopyTables(nodes, sums));
  const auto outcome_bytes = static_cast<int64_t>(sizeof(kernels::StepOutcome));
  for (Slot& slot : made->slots_) {
    ASSIGN_OR_RETURN(slot.begins, gpu.AllocatePinned((made->words_ + 2) * kWordBytes));
    ASSIGN_OR_RETURN(
        slot.records,
        gpu.AllocatePinned(made->words_ * args.plan.ranks * kWordBytes + outcome_bytes));
    ASSIGN_OR_RETURN(slot.recorded, gpu.MakeEvent());
  }
  made->decide_ = {.messages = made->gathered_,
                   .ranks = args.plan.ranks,
                   .words = made->words_,
                   .tensors = tensors,
                   .steps = made->steps_,
                   .level_ends = made->level_ends_,
                   .levels = static_cast<int64_t>(sums.level_ends.size()),
                   .step_count = static_cast<int64_t>(sums.steps.size()),
                   .sums = made->sums_,
                   .total = sums.total,
                   .outcome = made->outcome_};
  return made;
}

void DeviceStatistics::BeginStep(kernels::Stream& stream, const Beginning& beginning) {
  CHECK_MSG(begun_ - read_ < kUnread, "the slot's record has not been read");
  kernels::CudaStream& on = CudaStreamOf(stream);
  Slot& slot = At(slots_, begun_++ % kUnread);
  auto* words = static_cast<int64_t*>(slot.begins.data());
  std::fill_n(words, nodes_word(), 0);
  std::memcpy(words, &beginning.header, sizeof(beginning.header));
  on.CopyMemory(message_, words, nodes_word() * kWordBytes);
  if (!beginning.weight_nodes.empty()) {
    CHECK_MSG(args_.norms, "norms have no room in the message");
    const int64_t longest = tree_.longest();
    const int64_t list = nodes_word() + longest;
    std::copy(beginning.weight_nodes.begin(),
              beginning.weight_nodes.end(),
              reinterpret_cast<double*>(words + list));
    std::copy(beginning.update_nodes.begin(),
              beginning.update_nodes.end(),
              reinterpret_cast<double*>(words + list + longest));
    on.CopyMemory(message_ + list, words + list, 2 * longest * kWordBytes);
  }
  words[words_] = beginning.step;
  on.CopyMemory(&outcome_->step, words + words_, kWordBytes);
  if (beginning.updates.has_value()) {
    words[words_ + 1] = *beginning.updates;
    on.CopyMemory(&outcome_->updates, words + words_ + 1, kWordBytes);
  }
}

void DeviceStatistics::AddMicroBatch(kernels::Stream& stream,
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

void DeviceStatistics::MeasureGradients(kernels::Stream& stream) {
  float* sums = row_sums_;
  for (const shard::ParameterGroup& group : args_.groups) {
    for (const plan::OwnedPiece& piece : group.measured_pieces()) {
      MeasureRows(stream,
                  args_.plan.inventory,
                  piece,
                  group.reduced(0) + piece.shard_offset,
                  sums,
                  message_ + kernels::kStatisticsHeaderWords + piece.tensor.value());
      sums += RowsOf(args_.plan.inventory, piece);
    }
  }
  kernels::SumRowNodes(stream,
                       {.row_sums = row_sums_,
                        .rows = rows_,
                        .nodes = nodes_,
                        .count = node_count_,
                        .out = reinterpret_cast<double*>(message_ + nodes_word())});
}

shard::DeviceMessages DeviceStatistics::messages() const {
  return {.mine = message_, .all = gathered_, .words = words_};
}

void DeviceStatistics::Decide(kernels::Stream& stream,
                              double clip_norm,
                              const kernels::AdamWHyper& hyper) {
  decide_.clip_norm = clip_norm;
  decide_.hyper = hyper;
  kernels::DecideUpdate(stream, decide_);
}

void DeviceStatistics::EndStep(kernels::Stream& stream) {
  CHECK_EQ(ended_ + 1, begun_);
  kernels::CudaStream& on = CudaStreamOf(stream);
  Slot& slot = At(slots_, ended_++ % kUnread);
  const int64_t bytes = words_ * args_.plan.ranks * kWordBytes;
  auto* to = static_cast<std::byte*>(slot.records.data());
  on.CopyMemory(to, gathered_, bytes);
  on.CopyMemory(to + bytes, outcome_, sizeof(kernels::StepOutcome));
  on.Record(slot.recorded);
}

absl::StatusOr<DeviceStatistics::Record> DeviceStatistics::Read() {
  CHECK_MSG(unread() > 0, "no step is left to read");
  Slot& slot = At(slots_, read_ % kUnread);
  RETURN_IF_ERROR(args_.streams.WaitFor(slot.recorded));
  ++read_;
  const auto* from = static_cast<const std::byte*>(slot.records.data());
  const size_t bytes = Size(words_ * args_.plan.ranks * kWordBytes);
  return Record{.messages = {from, bytes},
                .outcome = reinterpret_cast<const kernels::StepOutcome*>(from + bytes)};
}

void DeviceStatistics::BeginEvaluation(kernels::Stream& stream) {
  CudaStreamOf(stream).FillZero(evaluation_,
                                args_.plan.lanes.turns() * static_cast<int64_t>(sizeof(LaneLoss)));
}

void DeviceStatistics::AddEvaluation(kernels::Stream& stream,
                                     int64_t turn,
                                     const TensorView& losses,
                                     const TensorView& targets) {
  LaneLoss& lane = evaluation_[turn];
  kernels::SumLoss(
      stream, {.losses = losses, .targets = targets, .sum = &lane.sum, .tokens = &lane.tokens});
}

}  // namespace ravel::optim
