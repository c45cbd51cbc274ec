#include "worker/model/projection.h"

#include "common/check.h"

namespace ravel::model {
namespace {

const TensorView& ViewOf(const TensorView& view) {
  return view;
}
template <typename Gradient>
const TensorView& ViewOf(const Gradient& gradient) {
  return gradient.view;
}

size_t IndexOfTensor(const plan::ModelInventory& inventory,
                     const std::vector<int>& unit_tensors,
                     std::string_view suffix) {
  for (size_t i = 0; i < unit_tensors.size(); ++i) {
    if (inventory.tensors[static_cast<size_t>(unit_tensors[i])].name.ends_with(suffix)) {
      return i;
    }
  }
  CheckFailed(__FILE__, __LINE__, "tensor of unit", "the inventory lacks a tensor of the module");
}

}  // namespace

Projection::Projection(const plan::ModelInventory& inventory,
                       const std::vector<int>& unit_tensors,
                       const std::vector<std::string_view>& names) {
  for (const std::string_view name : names) {
    indices_.push_back(IndexOfTensor(inventory, unit_tensors, name));
  }
  const auto bundle_of = [&](size_t index) {
    return inventory.tensors[static_cast<size_t>(unit_tensors[index])].bundle;
  };
  bundled_ = names.size() > 1 && bundle_of(indices_[0]) >= 0;
  for (const size_t index : indices_) {
    CHECK(!bundled_ || bundle_of(index) == bundle_of(indices_[0]));
  }
}

template <typename View>
std::vector<TensorView> Projection::Matrices(const std::vector<View>& views) const {
  std::vector<TensorView> matrices;
  for (const size_t index : indices_) {
    const TensorView& view = ViewOf(views[index]);
    CHECK(view.rank == 2 && view.contiguous());
    if (!bundled_ || matrices.empty()) {
      matrices.push_back(view);
      continue;
    }
    TensorView& all = matrices.front();
    CHECK_MSG(all.Row<float>(all.size[0]) == view.As<float>(), "a bundle's parts are adjacent");
    all.size[0] += view.size[0];
  }
  return matrices;
}

void Projection::Forward(kernels::Stream& stream, const ForwardArgs& args) const {
  int64_t column = 0;
  for (const TensorView& weight : Matrices(args.memory.weights)) {
    kernels::Gemm(stream,
                  {.a = args.x,
                   .transpose_a = kernels::Transpose::kNo,
                   .b = weight,
                   .transpose_b = kernels::Transpose::kYes,
                   .c = ColumnsOf(args.y, column, weight.size[0]),
                   .output = args.output});
    column += weight.size[0];
  }
  CHECK_EQ(column, args.y.size[1]);
}

void Projection::InputGradient(kernels::Stream& stream, const InputGradientArgs& args) const {
  int64_t column = 0;
  for (const TensorView& weight : Matrices(args.memory.weights)) {
    kernels::Gemm(
        stream,
        {.a = ColumnsOf(args.dy, column, weight.size[0]),
         .transpose_a = kernels::Transpose::kNo,
         .b = weight,
         .transpose_b = kernels::Transpose::kNo,
         .c = args.dx,
         .output = column == 0 ? kernels::Output::kOverwrite : kernels::Output::kAccumulate});
    column += weight.size[0];
  }
  CHECK_EQ(column, args.dy.size[1]);
}

template <typename Gradient>
void Projection::WeightGradient(kernels::Stream& stream,
                                const TensorView& x,
                                const TensorView& dy,
                                const std::vector<Gradient>& gradients) const {
  int64_t column = 0;
  for (const TensorView& gradient : Matrices(gradients)) {
    kernels::Gemm(stream,
                  {.a = ColumnsOf(dy, column, gradient.size[0]),
                   .transpose_a = kernels::Transpose::kYes,
                   .b = x,
                   .transpose_b = kernels::Transpose::kNo,
                   .c = gradient,
                   .output = Gradient::kOutput});
    column += gradient.size[0];
  }
  CHECK_EQ(column, dy.size[1]);
}

template void Projection::WeightGradient(kernels::Stream& stream,
                                         const TensorView& x,
                                         const TensorView& dy,
                                         const std::vector<FreshGradient>& gradients) const;
template void Projection::WeightGradient(kernels::Stream& stream,
                                         const TensorView& x,
                                         const TensorView& dy,
                                         const std::vector<AccumulatingGradient>& gradients) const;

}  // namespace ravel::model
