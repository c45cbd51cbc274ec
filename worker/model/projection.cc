// y = x W^T for matrices [out, in] (torch's Linear), y = x W for [in, out] (GPT-2's Conv1D).
//   dx = dy W   or dy W^T         the parts of a bundle add up in order of their columns
//   dW = dy^T x or x^T dy         [out, in] or [in, out];  db = the sum of dy's rows
// A bias is written to y first and the gemm accumulates onto it.

#include "worker/model/projection.h"

#include "common/check.h"
#include "kernels/bias.h"

namespace ravel::model {

using kernels::Output;
using kernels::Transpose;
using plan::MatrixLayout;

Projection::Projection(const UnitTensors& tensors, const plan::LinearNames& names)
    : layout_(tensors.architecture().layout) {
  CHECK_MSG(names.names.size() == 1 || layout_ == MatrixLayout::kOutputInput,
            "matrices of [in, out] are fused, not bundled");
  for (const std::string_view name : names.names) {
    Part part;
    part.weight = tensors.Index(name, "weight");
    if (names.bias) {
      part.bias = tensors.Index(name, "bias");
    }
    part.columns = tensors.tensor(part.weight).shape[layout_ == MatrixLayout::kOutputInput ? 0 : 1];
    parts_.push_back(part);
  }
  // A bundle of which some parts are frozen is not laid out as one.
  const plan::TensorSpec& first = tensors.tensor(parts_[0].weight);
  bundled_ = parts_.size() > 1 && first.bundle >= 0;
  for (const Part& part : parts_) {
    const plan::TensorSpec& tensor = tensors.tensor(part.weight);
    bundled_ = bundled_ && tensor.bundle == first.bundle && tensor.trainable == first.trainable;
  }
}

std::vector<Projection::Block> Projection::Blocks(const std::vector<TensorView>& views) const {
  std::vector<Block> blocks;
  for (const Part& part : parts_) {
    const TensorView& view = views[part.weight];
    CHECK(!view.present() || (view.rank == 2 && view.contiguous()));
    if (!bundled_ || blocks.empty()) {
      blocks.push_back({view, part.columns});
      continue;
    }
    Block& all = blocks.front();
    all.columns += part.columns;
    CHECK_EQ(all.matrix.present(), view.present());
    if (view.present()) {
      CHECK_MSG(ElementAt(all.matrix.data, all.matrix.elements(), view.dtype) == view.data,
                "a bundle's parts are adjacent");
      all.matrix.size[0] += view.size[0];
    }
  }
  return blocks;
}

void Projection::Forward(kernels::Stream& stream, const ForwardArgs& args) const {
  int64_t column = 0;
  bool biased = false;
  for (const Part& part : parts_) {
    if (part.bias.has_value()) {
      kernels::AddBias(stream,
                       {.bias = args.memory.weights[*part.bias],
                        .y = ColumnsOf(args.y, column, part.columns),
                        .output = args.output});
      biased = true;
    }
    column += part.columns;
  }
  CHECK_EQ(column, args.y.size[1]);
  column = 0;
  for (const Block& block : Blocks(args.memory.weights)) {
    kernels::Gemm(
        stream,
        {.a = args.x,
         .transpose_a = Transpose::kNo,
         .b = block.matrix,
         .transpose_b = layout_ == MatrixLayout::kOutputInput ? Transpose::kYes : Transpose::kNo,
         .c = ColumnsOf(args.y, column, block.columns),
         .output = biased ? Output::kAccumulate : args.output});
    column += block.columns;
  }
}

void Projection::InputGradient(kernels::Stream& stream, const InputGradientArgs& args) const {
  int64_t column = 0;
  for (const Block& block : Blocks(args.memory.weights)) {
    kernels::Gemm(
        stream,
        {.a = ColumnsOf(args.dy, column, block.columns),
         .transpose_a = Transpose::kNo,
         .b = block.matrix,
         .transpose_b = layout_ == MatrixLayout::kOutputInput ? Transpose::kNo : Transpose::kYes,
         .c = args.dx,
         .output = column == 0 ? Output::kOverwrite : Output::kAccumulate});
    column += block.columns;
  }
  CHECK_EQ(column, args.dy.size[1]);
}

void Projection::WeightGradient(kernels::Stream& stream, const WeightGradientArgs& args) const {
  int64_t column = 0;
  for (const Block& block : Blocks(args.gradients.views)) {
    const TensorView dy = ColumnsOf(args.dy, column, block.columns);
    const bool rows_are_outputs = layout_ == MatrixLayout::kOutputInput;
    if (block.matrix.present()) {
      kernels::Gemm(stream,
                    {.a = rows_are_outputs ? dy : args.x,
                     .transpose_a = Transpose::kYes,
                     .b = rows_are_outputs ? args.x : dy,
                     .transpose_b = Transpose::kNo,
                     .c = block.matrix,
                     .output = args.gradients.output});
    }
    column += block.columns;
  }
  CHECK_EQ(column, args.dy.size[1]);
  column = 0;
  for (const Part& part : parts_) {
    const TensorView db = part.bias.has_value() ? args.gradients.views[*part.bias] : TensorView{};
    if (db.present()) {
      kernels::BiasGradient(stream,
                            {.dy = ColumnsOf(args.dy, column, part.columns),
                             .db = db,
                             .output = args.gradients.output});
    }
    column += part.columns;
  }
}

}  // namespace ravel::model
