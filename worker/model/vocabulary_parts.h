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

  // x [tokens, hidden]; w, dw [this rank's rows, hidden]; logits [chunk, the most rows of a rank].
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
    const float* device_loss_scale = nullptr;
  };
  // Tokens [begin, begin + count), as many at a time as `logits` has rows, in this order.
  struct Chunk {
    int64_t begin = 0;
    int64_t count = 0;
  };
  static std::vector<Chunk> ChunksOf(const Args& args);

  // Logits, and this rank's rows of the statistics: UnitMemory::rows where others have the rest.
  void Statistics(kernels::Stream& stream, const Args& args, const Chunk& chunk) const;
  // From the statistics of all blocks.
  void Loss(kernels::Stream& stream, const Args& args, const Chunk& chunk) const;
  // dw, and the input gradient of the chunk in parts, as PartSums::Products returns it or leaves it
  // in the chunk's rows of the addend.
  std::vector<TensorView> GradientParts(kernels::Stream& stream,
                                        const Args& args,
                                        const Chunk& chunk) const;
  // dx of the chunk's rows, from the pieces of one rank.
  void FinishGradient(kernels::Stream& stream,
                      const Args& args,
                      const Chunk& chunk,
                      const std::vector<TensorView>& pieces) const;

 private:
  // This rank's block `part`, as columns of its logits.
  plan::VocabularyBlock Local(int64_t part) const;
  // Rows of the first block; only the last ones have less.
  int64_t BlockRows() const;
  // Parts of a chunk: its logits of this rank's rows; numbers of all blocks, [3 parts, chunk] fp32.
  TensorView LogitsOf(const Args& args, const Chunk& chunk) const;
  TensorView StatisticsOf(const Args& args, const Chunk& chunk) const;

  PartSums sums_;
  int64_t vocabulary_;
  int64_t first_row_ = 0;  // of this rank's
  int64_t rows_ = 0;       // that it has
  size_t statistics_ = 0;  // workspace
};

}  // namespace ravel::model
