#include "worker/model/unit_parts.h"

#include <absl/strings/str_cat.h>

#include "common/check.h"
#include "common/shape.h"
#include "kernels/tree_reduce.h"

namespace ravel::model {
namespace {

int IndexIn(const std::vector<plan::ActivationSpec>& specs, std::string_view name) {
  for (size_t i = 0; i < specs.size(); ++i) {
    if (specs[i].name == name) {
      return static_cast<int>(i);
    }
  }
  return -1;
}

template <typename Gradient>
WeightGradients Collect(const std::vector<Gradient>& gradients) {
  WeightGradients all;
  all.output = Gradient::kOutput;
  all.views.reserve(gradients.size());
  for (const Gradient& gradient : gradients) {
    all.views.push_back(gradient.view);
  }
  return all;
}

Module::Segments KindsOf(const plan::ModelInventory& inventory, plan::UnitId unit) {
  Module::Segments kinds;
  for (const plan::UnitPass pass : {plan::UnitPass::kForward,
                                    plan::UnitPass::kEvaluate,
                                    plan::UnitPass::kRecompute,
                                    plan::UnitPass::kBackward}) {
    for (const plan::SegmentSpec& segment : plan::SegmentsOf(inventory, unit, pass)) {
      kinds[pass].push_back(segment.kind);
    }
  }
  return kinds;
}

}  // namespace

UnitTensors::UnitTensors(const plan::ModelInventory& inventory, plan::UnitId unit)
    : inventory_(inventory),
      spec_(inventory.units[unit]),
      architecture_(plan::ArchitectureOf(inventory.config.architecture)),
      tensors_(spec_.tensors) {
  tensors_.insert(tensors_.end(), spec_.borrowed.begin(), spec_.borrowed.end());
  if (spec_.kind == plan::UnitKind::kLayer) {
    prefix_ = absl::StrCat(std::string(architecture_.layers), ".", spec_.layer, ".");
  }
}

size_t UnitTensors::Index(std::string_view name, std::string_view suffix) const {
  const std::string full = absl::StrCat(prefix_, std::string(name), ".", std::string(suffix));
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (tensor(i).name == full) {
      return i;
    }
  }
  CheckFailed(__FILE__, __LINE__, "tensor of unit", "the inventory lacks a tensor of the module");
}

const plan::TensorSpec& UnitTensors::tensor(size_t index) const {
  return inventory_.tensors[tensors_[index]];
}

Activation::Activation(const plan::UnitSpec& unit, std::string_view name, std::string_view area) {
  const int kept = IndexIn(unit.saved, name);
  remade_ = kept < 0;
  const std::vector<plan::ActivationSpec>& specs = remade_ ? unit.remade : unit.saved;
  index_ = ActivationIndex(specs, name);
  const Shape& shape = specs[index_].shape;
  elements_ = ElementCount(shape);
  columns_ = shape.size() > 1 ? RowElements(shape) : 0;
  if (remade_ && !area.empty()) {
    area_ = ActivationIndex(unit.workspace, area);
  }
}

TensorView Activation::IfKept(const UnitMemory& memory) const {
  const std::vector<TensorView>& views = remade_ ? memory.remade : memory.saved;
  return index_ < views.size() ? views[index_] : TensorView{};
}

TensorView Activation::In(const UnitMemory& memory) const {
  const TensorView kept = IfKept(memory);
  if (kept.present()) {
    return kept;
  }
  CHECK_MSG(area_.has_value(), "an activation of the module has no memory in this pass");
  const TensorView& area = memory.workspace[*area_];
  if (columns_ > 0) {
    return Carve(area, elements_ / columns_, columns_);
  }
  CHECK(area.contiguous() && area.elements() >= elements_);
  TensorView vector = area;
  vector.rank = 1;
  vector.size = {elements_};
  vector.row_stride = 1;
  return vector;
}

void CopyView(kernels::Stream& stream, const TensorView& from, const TensorView& to) {
  CHECK(from.contiguous() && to.contiguous() && from.dtype == to.dtype);
  CHECK_EQ(from.elements(), to.elements());
  kernels::CopyBytes(
      stream,
      {.to = to.data, .from = from.data, .bytes = from.elements() * DTypeBytes(from.dtype)});
}

TensorView Carve(const TensorView& workspace, int64_t rows, int64_t columns) {
  CHECK(workspace.contiguous() && workspace.elements() >= rows * columns);
  TensorView matrix = workspace;
  matrix.rank = 2;
  matrix.size = {rows, columns};
  matrix.row_stride = columns;
  return matrix;
}

UnitModule::UnitModule(const plan::ModelInventory& inventory, plan::UnitId unit)
    : Module(KindsOf(inventory, unit)) {}

void UnitModule::RunSegment(kernels::Stream& stream,
                            const UnitMemory& memory,
                            plan::UnitPass pass,
                            plan::SegmentKind kind) const {
  CHECK_MSG(pass != plan::UnitPass::kBackward, "a backward has gradients");
  if (pass == plan::UnitPass::kRecompute) {
    RemakeSegment(stream, memory, kind);
  } else {
    ForwardSegment(stream, memory, kind);
  }
}

void UnitModule::RunSegment(kernels::Stream& stream,
                            const UnitMemory& memory,
                            plan::SegmentKind kind,
                            const std::vector<FreshGradient>& gradients) const {
  BackwardSegment(stream, memory, kind, Collect(gradients));
}

void UnitModule::RunSegment(kernels::Stream& stream,
                            const UnitMemory& memory,
                            plan::SegmentKind kind,
                            const std::vector<AccumulatingGradient>& gradients) const {
  BackwardSegment(stream, memory, kind, Collect(gradients));
}

void UnitModule::RemakeSegment(kernels::Stream&, const UnitMemory&, plan::SegmentKind) const {
  CheckFailed(__FILE__, __LINE__, "segment", "the unit recomputes nothing");
}

}  // namespace ravel::model
