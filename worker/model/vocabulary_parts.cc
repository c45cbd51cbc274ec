// Sums of a chunk of c tokens; b: a block of the vocabulary, W_b: its rows.
//   z_b = x W_b^T;  m_b, s_b, and the target's logit                     statistics
//   loss, and the factor of each block                                   from those of all blocks
//   dz_b = z_b's gradient;  dW_b += dz_b^T x;  dx = the tree over b of dz_b W_b, rounded once

#include "worker/model/vocabulary_parts.h"

#include <algorithm>

#include "kernels/part_sum.h"
#include "kernels/vocabulary_loss.h"

namespace ravel::model {
namespace {

TensorView RangeOf(const TensorView& vector, int64_t begin, int64_t count) {
  TensorView range = vector;
  range.data = ElementAt(vector.data, begin, vector.dtype);
  range.size[0] = count;
  return range;
}

}  // namespace

VocabularyParts::VocabularyParts(const UnitTensors& tensors)
    : sums_(tensors), vocabulary_(tensors.inventory().config.vocab_size) {
  const plan::LocalSizes sizes = plan::LocalSizesOf(tensors.inventory().config, sums_.cut());
  first_row_ = sizes.first_row;
  rows_ = sizes.vocabulary_rows;
  if (cuts()) {
    statistics_ = ActivationIndex(tensors.spec().workspace, "vocabulary");
  }
}

std::vector<VocabularyParts::Chunk> VocabularyParts::ChunksOf(const Args& args) {
  std::vector<Chunk> chunks;
  const int64_t tokens = args.x.size[0];
  const int64_t rows = args.logits.size[0];
  for (int64_t begin = 0; begin < tokens; begin += rows) {
    chunks.push_back({.begin = begin, .count = std::min(rows, tokens - begin)});
  }
  return chunks;
}

plan::VocabularyBlock VocabularyParts::Local(int64_t part) const {
  plan::VocabularyBlock block =
      plan::VocabularyBlockOf(sums_.cut(), vocabulary_, sums_.cut().first_part() + part);
  block.first -= first_row_;
  return block;
}

int64_t VocabularyParts::BlockRows() const {
  return plan::VocabularyBlockOf(sums_.cut(), vocabulary_, 0).rows;
}

TensorView VocabularyParts::LogitsOf(const Args& args, const Chunk& chunk) const {
  return ColumnsOf(RowsOf(args.logits, 0, chunk.count), 0, rows_);
}

// The last chunk may be shorter than the others; rows lie where those of a long one do.
TensorView VocabularyParts::StatisticsOf(const Args& args, const Chunk& chunk) const {
  return ColumnsOf(args.memory.workspace[statistics_], 0, chunk.count);
}

void VocabularyParts::Statistics(kernels::Stream& stream,
                                 const Args& args,
                                 const Chunk& chunk) const {
  const TensorView logits = LogitsOf(args, chunk);
  kernels::Gemm(stream,
                {.a = RowsOf(args.x, chunk.begin, chunk.count),
                 .b = args.w,
                 .transpose_b = kernels::Transpose::kYes,
                 .c = logits,
                 .part = {.rows = chunk.count, .columns = BlockRows()}});
  const TensorView mine = sums_.cut().degree > 1 ? ColumnsOf(args.memory.rows, 0, chunk.count)
                                                 : StatisticsOf(args, chunk);
  for (int64_t part = 0; part < sums_.cut().local_parts(); ++part) {
    const plan::VocabularyBlock block = Local(part);
    kernels::VocabularyStatistics(stream,
                                  {.logits = ColumnsOf(logits, block.first, block.rows),
                                   .targets = RangeOf(args.targets, chunk.begin, chunk.count),
                                   .first_id = first_row_ + block.first,
                                   .statistics = RowsOf(mine, 3 * part, 3)});
  }
}

void VocabularyParts::Loss(kernels::Stream& stream, const Args& args, const Chunk& chunk) const {
  kernels::VocabularyLoss(stream,
                          {.statistics = StatisticsOf(args, chunk),
                           .targets = RangeOf(args.targets, chunk.begin, chunk.count),
                           .vocabulary = vocabulary_,
                           .loss = RangeOf(args.loss, chunk.begin, chunk.count)});
}

std::vector<TensorView> VocabularyParts::GradientParts(kernels::Stream& stream,
                                                       const Args& args,
                                                       const Chunk& chunk) const {
  const TensorView logits = LogitsOf(args, chunk);
  const TensorView all = StatisticsOf(args, chunk);
  for (int64_t part = 0; part < sums_.cut().local_parts(); ++part) {
    const plan::VocabularyBlock block = Local(part);
    kernels::VocabularyGradient(
        stream,
        {.logits = ColumnsOf(logits, block.first, block.rows),
         .targets = RangeOf(args.targets, chunk.begin, chunk.count),
         .first_id = first_row_ + block.first,
         .statistics = RowsOf(all, 3 * (sums_.cut().first_part() + part), 3),
         .loss_scale = args.loss_scale,
         .device_loss_scale = args.device_loss_scale});
  }
  if (args.dw.present()) {
    const bool first = chunk.begin == 0;
    kernels::Gemm(stream,
                  {.a = logits,
                   .transpose_a = kernels::Transpose::kYes,
                   .b = RowsOf(args.x, chunk.begin, chunk.count),
                   .c = args.dw,
                   .output = first ? args.dw_output : kernels::Output::kAccumulate,
                   .part = {.rows = BlockRows(), .columns = args.dw.size[1]}});
  }
  return sums_.Products(stream,
                        args.memory,
                        {.first = chunk.begin, .rows = chunk.count, .columns = args.x.size[1]},
                        [&](int64_t part, const TensorView& to) {
                          const plan::VocabularyBlock block = Local(part);
                          kernels::Gemm(stream,
                                        {.a = ColumnsOf(logits, block.first, block.rows),
                                         .b = RowsOf(args.w, block.first, block.rows),
                                         .c = to,
                                         .part = {.rows = to.size[0], .columns = to.size[1]}});
                        });
}

void VocabularyParts::FinishGradient(kernels::Stream& stream,
                                     const Args& args,
                                     const Chunk& chunk,
                                     const std::vector<TensorView>& pieces) const {
  kernels::SumParts(stream, {.pieces = pieces, .out = RowsOf(args.dx, chunk.begin, chunk.count)});
}

}  // namespace ravel::model
