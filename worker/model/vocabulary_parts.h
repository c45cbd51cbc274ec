#pragma once

// Output projection and cross-entropy where the vocabulary is in blocks of rows, one for each part
// (plan::VocabularyBlockOf; kernels/vocabulary_loss.h): chunk by chunk of tokens, in steps between
// which ranks that have some of the blocks each meet.

#include <vector>

#include "worker/model/part_sums.h"

namespace ravel::model {

class VocabularyParts {
 public:
  explicit VocabularyParts(const UnitTensors& tensors);
  bool cuts() const { return sums_.cuts(); }

  // x [tokens, hidden]; w, dw [this rank's rows, hidden]; logits [chunk, this rank's rows].
  struct Args {
    const UnitMemory& memory;
    TensorView x;
    TensorView w;
    TensorView targets;
    TensorView loss;
    TensorView logits;
    TensorView dx;
    TensorView dw;  // absent: not computed
    kernels::Output dw_output = kernels::Output::kOverwrite;
    float loss_scale = 1.0f;
  };
  // Tokens [begin, begin + count), as many at a time as `logits` has rows, in this order.
  struct Chunk {
    int64_t begin = 0;
    int64_t count = 0;
  };
  static std::vector<Chunk> ChunksOf(const Args& args);

  // Logits, and this rank's rows of the statistics.
  void Statistics(kernels::Stream& stream, const Args& args, const Chunk& chunk) const;
  // Numbers of all blocks, [3 parts, chunk] fp32; this rank fills those of its own.
  TensorView StatisticsOf(const Args& args, const Chunk& chunk) const;
  // From the statistics of all blocks.
  void Loss(kernels::Stream& stream, const Args& args, const Chunk& chunk) const;
  // dw, and the input gradient of the chunk in parts, as PartSums::Products returns it.
  std::vector<TensorView> GradientParts(kernels::Stream& stream,
                                        const Args& args,
                                        const Chunk& chunk) const;
  // dx of the chunk's rows, from the pieces of all ranks.
  void FinishGradient(kernels::Stream& stream,
                      const Args& args,
                      const Chunk& chunk,
                      const std::vector<TensorView>& pieces) const;

 private:
  // This rank's block `part`, as columns of its logits.
  plan::VocabularyBlock Local(int64_t part) const;

  PartSums sums_;
  int64_t vocabulary_;
  int64_t first_row_;      // of this rank's
  size_t statistics_ = 0;  // workspace
};

}  // namespace ravel::model
