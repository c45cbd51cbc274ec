#pragma once

// One unit of a model on one rank of a tensor axis: the rank's share of each weight, its gradients,
// and memory for its activations.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include <absl/strings/str_cat.h>

#include "common/model/architecture/architecture.h"
#include "common/model/model_inventory.h"
#include "kernels/philox.h"
#include "kernels/scalar/bfloat16.h"
#include "worker/model/unit_parts.h"

namespace ravel::model {

inline constexpr float kUnset = std::numeric_limits<float>::quiet_NaN();

// Elements as fp32, whatever they are stored as.
inline std::vector<float> FloatsOf(const TensorView& view) {
  std::vector<float> values;
  for (int64_t row = 0; row < view.rows(); ++row) {
    for (int64_t column = 0; column < view.columns(); ++column) {
      const int64_t at = row * view.row_stride + column;
      values.push_back(view.dtype == DType::kF32 ? view.As<float>()[at]
                                                 : Bf16ToFloat(view.As<uint16_t>()[at]));
    }
  }
  return values;
}

inline void Store(const std::vector<float>& values, const TensorView& view) {
  for (int64_t i = 0; i < view.elements(); ++i) {
    const float value = values[static_cast<size_t>(i)];
    if (view.dtype == DType::kF32) {
      view.As<float>()[i] = value;
    } else {
      view.As<uint16_t>()[i] = FloatToBf16(value);
    }
  }
}

// Ranges of one dimension of a tensor that a rank has; dimension -1: all of it.
struct Cut {
  int dimension = -1;
  std::vector<plan::VocabularyBlock> ranges = {};  // first, rows
  bool apart = false;  // each range is a matrix of its own, one after another
};

class CutRules {
 public:
  CutRules(const plan::ModelInventory& inventory, const plan::UnitSpec& unit)
      : inventory_(inventory),
        architecture_(plan::ArchitectureOf(inventory.config.architecture)),
        unit_(unit) {}

  Cut Of(const plan::TensorSpec& tensor) const {
    const plan::ModelConfig& config = inventory_.config;
    const plan::TensorCut& cut = inventory_.cut;
    const plan::LocalSizes sizes = plan::LocalSizesOf(config, cut);
    const bool bias = tensor.name.ends_with(".bias");
    const bool output_first = architecture_.layout == plan::MatrixLayout::kOutputInput;
    const int outputs = bias || output_first ? 0 : 1;
    const int64_t query = sizes.query_heads * config.head_dim;
    const int64_t first_kv =
        cut.coordinate * config.num_key_value_heads / cut.degree * config.head_dim;
    const int64_t kv = sizes.kv_heads * config.head_dim;
    const plan::VocabularyBlock q = {cut.coordinate * query, query};
    const auto& names = architecture_.qkv.names;
    if (names.size() == 1 && Is(tensor, names[0])) {
      const int64_t all = config.hidden_size;
      return {outputs, {q, {all + first_kv, kv}, {2 * all + first_kv, kv}}, cut.degree > 1};
    }
    for (size_t i = 0; i < names.size(); ++i) {
      if (Is(tensor, names[i])) {
        return {outputs, {i == 0 ? q : plan::VocabularyBlock{first_kv, kv}}};
      }
    }
    const plan::VocabularyBlock inner = {cut.coordinate * sizes.inner, sizes.inner};
    for (const std::string_view name : architecture_.mlp_input.names) {
      if (Is(tensor, name)) {
        return {outputs, {inner}};
      }
    }
    if (!bias && Is(tensor, architecture_.attention_output.names[0])) {
      return {1 - outputs, {q}};
    }
    if (!bias && Is(tensor, architecture_.mlp_output.names[0])) {
      return {1 - outputs, {inner}};
    }
    if (tensor.name.starts_with("lm_head") || Is(tensor, architecture_.token_table)) {
      return {0, {{sizes.first_row, sizes.vocabulary_rows}}};
    }
    return {};
  }

 private:
  bool Is(const plan::TensorSpec& tensor, std::string_view name) const {
    const std::string prefix =
        unit_.kind == plan::UnitKind::kLayer
            ? absl::StrCat(std::string(architecture_.layers), ".", unit_.layer, ".")
            : std::string();
    return tensor.name.starts_with(absl::StrCat(prefix, std::string(name), "."));
  }

  const plan::ModelInventory& inventory_;
  const plan::Architecture& architecture_;
  const plan::UnitSpec& unit_;
};

inline Shape LocalShape(const Shape& shape, const Cut& cut) {
  Shape local = shape;
  if (cut.dimension >= 0) {
    local[static_cast<size_t>(cut.dimension)] = 0;
    for (const auto& range : cut.ranges) {
      local[static_cast<size_t>(cut.dimension)] += range.rows;
    }
  }
  return local;
}

// visit(global index, local index) of every element that a rank has.
template <typename Visit>
void ForEachLocal(const Shape& shape, const Cut& cut, const Visit& visit) {
  const int64_t rows = shape[0];
  const int64_t columns = shape.size() > 1 ? shape[1] : 1;
  int64_t local = 0;
  const size_t matrices = cut.apart ? cut.ranges.size() : 1;
  for (size_t matrix = 0; matrix < matrices; ++matrix) {
    const auto owned = [&](int64_t at) {
      bool inside = cut.dimension < 0;
      for (size_t i = 0; i < cut.ranges.size(); ++i) {
        const auto& range = cut.ranges[i];
        inside = inside || ((!cut.apart || i == matrix) && at >= range.first &&
                            at < range.first + range.rows);
      }
      return inside;
    };
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t column = 0; column < columns; ++column) {
        if (owned(cut.dimension == 1 ? column : row)) {
          visit(static_cast<size_t>(row * columns + column), static_cast<size_t>(local++));
        }
      }
    }
  }
}

// The memory of one unit on one rank.
class UnitOfRank {
 public:
  UnitOfRank(const plan::ModelInventory& inventory, plan::UnitId unit, DType dtype)
      : inventory_(inventory), spec_(inventory.units[unit]), dtype_(dtype) {
    tensors_ = spec_.tensors;
    tensors_.insert(tensors_.end(), spec_.borrowed.begin(), spec_.borrowed.end());
    const CutRules rules(inventory, spec_);
    int64_t total = 0;
    for (const plan::TensorId id : tensors_) {
      cuts_.push_back(rules.Of(inventory.tensors[id]));
      shapes_.push_back(LocalShape(inventory.tensors[id].shape, cuts_.back()));
      offsets_.push_back(0);
    }
    // Weights before biases, so that the parts of a bundle are side by side.
    for (const size_t rank : {size_t{2}, size_t{1}}) {
      for (size_t i = 0; i < tensors_.size(); ++i) {
        if (shapes_[i].size() == rank) {
          offsets_[i] = total;
          total += ElementCount(shapes_[i]);
        }
      }
    }
    weights_.resize(static_cast<size_t>(total));
    gradients_.resize(static_cast<size_t>(total), kUnset);
    for (size_t i = 0; i < tensors_.size(); ++i) {
      const plan::TensorSpec& tensor = inventory.tensors[tensors_[i]];
      std::vector<float> whole(static_cast<size_t>(ElementCount(tensor.shape)));
      kernels::CpuStream stream;
      kernels::InitNormal(stream,
                          {.out = VectorView(whole.data(), ElementCount(tensor.shape)),
                           .seed = 7,
                           .site = tensor.site,
                           .first_index = 0,
                           .standard_deviation = 0.3f});
      whole[0] = -0.0f;
      std::vector<float> local(static_cast<size_t>(ElementCount(shapes_[i])));
      ForEachLocal(
          tensor.shape, cuts_[i], [&](size_t from, size_t to) { local[to] = whole[from]; });
      Store(local, Weight(i));
    }
    Fill(saved_, spec_.saved);
    Fill(remade_, spec_.remade);
    Fill(workspace_, spec_.workspace);
    Fill(leaves_, spec_.leaves);
  }

  UnitMemory Memory(const std::vector<TensorView>& shared, plan::UnitPass pass) {
    UnitMemory memory;
    for (size_t i = 0; i < tensors_.size(); ++i) {
      memory.weights.push_back(Weight(i));
    }
    memory.saved = Views(spec_.saved, saved_);
    if (pass == plan::UnitPass::kRecompute || pass == plan::UnitPass::kBackward) {
      memory.remade = Views(spec_.remade, remade_);
      memory.leaves = Views(spec_.leaves, leaves_);
    }
    memory.workspace = Views(spec_.workspace, workspace_);
    memory.shared = shared;
    return memory;
  }

  WeightGradients Gradients(kernels::Output output) {
    WeightGradients gradients = {.views = {}, .output = output};
    for (size_t i = 0; i < tensors_.size(); ++i) {
      gradients.views.push_back(Gradient(i));
    }
    return gradients;
  }

  const std::vector<plan::TensorId>& tensors() const { return tensors_; }
  const Cut& cut(size_t i) const { return cuts_[i]; }
  TensorView Gradient(size_t i) { return View(gradients_.data() + offsets_[i], i, DType::kF32); }
  const plan::UnitSpec& spec() const { return spec_; }
  // Gradients, and the leaves that they are added from.
  void FillGradients(float value) {
    std::fill(gradients_.begin(), gradients_.end(), value);
    for (const TensorView& leaf : Views(spec_.leaves, leaves_)) {
      std::fill_n(leaf.As<float>(), leaf.elements(), value);
    }
  }

  static std::vector<TensorView> Views(const std::vector<plan::ActivationSpec>& specs,
                                       std::vector<std::byte>& storage) {
    const std::vector<int64_t> offsets = plan::ActivationOffsets(specs);
    std::vector<TensorView> views;
    for (size_t i = 0; i < specs.size(); ++i) {
      auto* data = reinterpret_cast<float*>(storage.data() + offsets[i]);
      const Shape& shape = specs[i].shape;
      TensorView view = shape.size() == 1 ? VectorView(data, shape[0])
                                          : MatrixView(data, shape[0], RowElements(shape));
      view.dtype = specs[i].dtype;
      views.push_back(view);
    }
    return views;
  }

 private:
  static void Fill(std::vector<std::byte>& storage,
                   const std::vector<plan::ActivationSpec>& specs) {
    storage.assign(static_cast<size_t>(plan::ActivationOffsets(specs).back()), std::byte{0xFF});
  }
  TensorView View(void* data, size_t i, DType dtype) const {
    const Shape& shape = shapes_[i];
    TensorView view =
        shape.size() == 1 ? VectorView(nullptr, shape[0]) : MatrixView(nullptr, shape[0], shape[1]);
    view.data = data;
    view.dtype = dtype;
    return view;
  }
  TensorView Weight(size_t i) {
    return View(ElementAt(weights_.data(), offsets_[i], dtype_), i, dtype_);
  }

  const plan::ModelInventory& inventory_;
  const plan::UnitSpec& spec_;
  const DType dtype_;
  std::vector<plan::TensorId> tensors_;  // its own, then what it borrows
  std::vector<Cut> cuts_;
  std::vector<Shape> shapes_;
  std::vector<int64_t> offsets_;
  std::vector<float> weights_;  // room for fp32, whatever they are
  std::vector<float> gradients_;
  std::vector<std::byte> saved_, remade_, workspace_, leaves_;
};

}  // namespace ravel::model
