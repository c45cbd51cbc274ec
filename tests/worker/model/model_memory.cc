#include "tests/worker/model/model_memory.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <utility>

#include <gtest/gtest.h>

#include "common/model/tensor_parts.h"
#include "common/signed_size.h"
#include "kernels/philox.h"

namespace ravel::model {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

TensorView ViewOf(float* data, const Shape& shape) {
  return shape.size() == 1 ? VectorView(data, shape[0]) : MatrixView(data, shape[0], shape[1]);
}

}  // namespace

ModelMemory::ModelMemory(const plan::ModelConfig& config,
                         plan::MicroBatchShape shape,
                         Options options)
    : inventory_(plan::BuildInventory(
          *plan::ValidateModelConfig(config), shape, options.recompute, {.parts = options.parts})),
      calls_(inventory_.calls()) {
  for (plan::TensorSpec& tensor : inventory_.tensors) {
    tensor.trainable =
        options.frozen.empty() || tensor.name.find(options.frozen) == std::string::npos;
  }
  plan::ReserveTensorParts(inventory_);
  modules_ = MakeModules(inventory_, shape);
  for (const plan::TensorSpec& tensor : inventory_.tensors) {
    const int64_t elements = ElementCount(tensor.shape);
    std::vector<float>& weight = weights_.emplace_back(static_cast<size_t>(elements));
    kernels::InitNormal(stream_,
                        {.out = VectorView(weight.data(), elements),
                         .seed = 7,
                         .site = tensor.site,
                         .first_index = 0,
                         .standard_deviation = 0.2f});
    if (tensor.init == plan::InitKind::kOnes) {
      for (float& value : weight) {
        value += 1.0f;
      }
    }
  }
  flat_.resize(static_cast<size_t>(PlaceTensors()));
  for (const plan::UnitSpec& unit : inventory_.units) {
    remade_.emplace_back(static_cast<size_t>(plan::ActivationOffsets(unit.remade).back()));
    workspace_.emplace_back(static_cast<size_t>(plan::ActivationOffsets(unit.workspace).back()));
    leaves_.emplace_back(static_cast<size_t>(plan::ActivationOffsets(unit.leaves).back()));
  }
  for (const plan::UnitId unit : calls_) {
    const plan::UnitSpec& spec = inventory_.units[unit];
    saved_.emplace_back(static_cast<size_t>(plan::ActivationOffsets(spec.saved).back()));
  }
  shared_storage_.resize(static_cast<size_t>(plan::ActivationOffsets(inventory_.shared).back()));
  shared_ = Views(inventory_.shared, shared_storage_);
  FillRopeTables(stream_, inventory_, shared_);
  const int64_t tokens = shape.sequences * shape.sequence_tokens;
  for (int64_t i = 0; i < tokens; ++i) {
    ids_.push_back(static_cast<int32_t>((i * i + 3 * i) % config.vocab_size));
    targets_.push_back(static_cast<int32_t>((5 * i + 1) % config.vocab_size));
  }
}

// Bundles first: the parts of each side by side.
int64_t ModelMemory::PlaceTensors() {
  int64_t total = 0;
  offsets_.assign(inventory_.tensors.size(), -1);
  const auto place = [&](plan::TensorId tensor) {
    const auto index = static_cast<size_t>(tensor);
    if (offsets_[index] < 0) {
      offsets_[index] = total;
      total += ElementCount(inventory_.tensors[index].shape);
    }
  };
  for (const plan::BundleSpec& bundle : inventory_.bundles) {
    for (const plan::TensorId tensor : bundle.tensors) {
      place(tensor);
    }
  }
  for (size_t i = 0; i < inventory_.tensors.size(); ++i) {
    place(static_cast<int>(i));
  }
  return total;
}

std::vector<TensorView> ModelMemory::weight_views() {
  std::vector<TensorView> views;
  for (size_t i = 0; i < weights_.size(); ++i) {
    views.push_back(ViewOf(weights_[i].data(), inventory_.tensors[i].shape));
  }
  return views;
}

std::vector<TensorView> ModelMemory::Views(const std::vector<plan::ActivationSpec>& specs,
                                           std::vector<std::byte>& storage) {
  const std::vector<int64_t> offsets = plan::ActivationOffsets(specs);
  std::vector<TensorView> views;
  for (size_t i = 0; i < specs.size(); ++i) {
    TensorView view = ViewOf(reinterpret_cast<float*>(storage.data() + offsets[i]), specs[i].shape);
    view.dtype = specs[i].dtype;
    views.push_back(view);
  }
  return views;
}

std::vector<plan::TensorId> ModelMemory::TensorsOf(size_t unit) const {
  const plan::UnitSpec& spec = inventory_.units[unit];
  std::vector<plan::TensorId> tensors = spec.tensors;
  tensors.insert(tensors.end(), spec.borrowed.begin(), spec.borrowed.end());
  return tensors;
}

UnitMemory ModelMemory::MemoryOf(size_t call, Pass pass) {
  const auto unit = static_cast<size_t>(calls_[call]);
  const plan::UnitSpec& spec = inventory_.units[unit];
  UnitMemory memory;
  for (const plan::TensorId tensor : TensorsOf(unit)) {
    const auto index = static_cast<size_t>(tensor);
    std::copy(weights_[index].begin(), weights_[index].end(), flat_.begin() + offsets_[index]);
    memory.weights.push_back(
        ViewOf(flat_.data() + offsets_[index], inventory_.tensors[index].shape));
  }
  memory.saved = Views(spec.saved, saved_[call]);
  if (pass == Pass::kBackward) {
    memory.remade = Views(spec.remade, remade_[unit]);
  }
  std::fill(workspace_[unit].begin(), workspace_[unit].end(), std::byte{0xFF});
  memory.workspace = Views(spec.workspace, workspace_[unit]);
  memory.leaves = Views(spec.leaves, leaves_[unit]);
  memory.shared = shared_;
  return memory;
}

void ModelMemory::LoadBatch() {
  std::copy(
      ids_.begin(), ids_.end(), shared_[ActivationIndex(inventory_.shared, "ids")].As<int32_t>());
  std::copy(targets_.begin(),
            targets_.end(),
            shared_[ActivationIndex(inventory_.shared, "targets")].As<int32_t>());
}

double ModelMemory::Loss() {
  LoadBatch();
  for (size_t call = 0; call < calls_.size(); ++call) {
    modules_[calls_[call]]->ForwardOnly(stream_, MemoryOf(call, Pass::kForward));
  }
  const std::vector<float> losses = TokenLosses();
  return std::accumulate(losses.begin(), losses.end(), 0.0);
}

std::vector<float> ModelMemory::TokenLosses() const {
  const float* loss = shared_[ActivationIndex(inventory_.shared, "loss")].As<float>();
  return {loss, loss + ids_.size()};
}

void ModelMemory::RunWatched(SegmentWatch& watch,
                             plan::UnitId unit,
                             plan::UnitPass pass,
                             const UnitMemory& memory,
                             const std::vector<FreshGradient>& gradients) {
  const Module& module = *modules_[unit];
  std::vector<TensorView> views;
  for (const FreshGradient& gradient : gradients) {
    views.push_back(gradient.view);
  }
  size_t at = 0;
  for (const plan::SegmentSpec& segment : plan::SegmentsOf(inventory_, unit, pass)) {
    ASSERT_EQ(At(module.segments(pass), at++), segment.kind);
    watch.Run({.inventory = inventory_,
               .unit = unit,
               .pass = pass,
               .segment = segment,
               .memory = memory,
               .gradients = views},
              [&] {
                if (pass == plan::UnitPass::kBackward) {
                  module.RunSegment(stream_, memory, segment.kind, gradients);
                } else {
                  module.RunSegment(stream_, memory, pass, segment.kind);
                }
              });
  }
  ASSERT_EQ(at, module.segments(pass).size());
}

ModelMemory::Watched ModelMemory::WatchedGradients(const Without& without) {
  SegmentWatch watch(without);
  Watched watched;
  watched.gradients = Gradients<FreshGradient>(0, &watch);
  watched.fault = watch.fault();
  return watched;
}

template <typename Gradient>
std::vector<std::vector<float>> ModelMemory::Gradients(float start) {
  return Gradients<Gradient>(start, nullptr);
}

template <typename Gradient>
std::vector<std::vector<float>> ModelMemory::Gradients(float start, SegmentWatch* watch) {
  LoadBatch();
  const auto run = [&](plan::UnitId unit, plan::UnitPass pass, const UnitMemory& memory) {
    if (watch == nullptr) {
      modules_[unit]->Run(stream_, memory, pass);
    } else {
      RunWatched(*watch, unit, pass, memory, {});
    }
  };
  for (size_t call = 0; call < calls_.size(); ++call) {
    run(calls_[call], plan::UnitPass::kForward, MemoryOf(call, Pass::kForward));
  }
  std::vector<std::vector<float>> sums;
  for (size_t i = 0; i < weights_.size(); ++i) {
    sums.emplace_back(inventory_.tensors[i].trainable ? weights_[i].size() : 0, 0.0f);
  }
  const bool fresh = std::is_same_v<Gradient, FreshGradient>;
  for (size_t call = calls_.size(); call-- > 0;) {
    const auto unit = static_cast<size_t>(calls_[call]);
    const std::vector<plan::TensorId> tensors = TensorsOf(unit);
    std::vector<float> staging(flat_.size(), fresh ? kNaN : start);
    std::vector<Gradient> gradients;
    for (const plan::TensorId tensor : tensors) {
      const auto index = static_cast<size_t>(tensor);
      TensorView view = ViewOf(staging.data() + offsets_[index], inventory_.tensors[index].shape);
      if (!inventory_.tensors[index].trainable) {
        view.data = nullptr;
      }
      gradients.push_back({view});
    }
    const std::vector<plan::ActivationSpec>& leaf_specs = inventory_.units[unit].leaves;
    const std::vector<TensorView> leaves = Views(leaf_specs, leaves_[unit]);
    for (size_t i = 0; i < leaves.size(); ++i) {
      // `start` is shared out among the leaves that an element of the gradient is the sum of.
      const plan::TensorId tensor = inventory_.FindTensor(leaf_specs[i].name);
      const int64_t each = leaves[i].elements() / ElementCount(inventory_.tensors[tensor].shape);
      std::fill_n(leaves[i].As<float>(),
                  leaves[i].elements(),
                  fresh ? kNaN : start / static_cast<float>(each));
    }
    if (!inventory_.units[unit].remade.empty()) {
      std::fill(remade_[unit].begin(), remade_[unit].end(), std::byte{0xFF});
      run(calls_[call], plan::UnitPass::kRecompute, MemoryOf(call, Pass::kBackward));
    }
    if constexpr (std::is_same_v<Gradient, FreshGradient>) {
      if (watch != nullptr) {
        RunWatched(*watch,
                   calls_[call],
                   plan::UnitPass::kBackward,
                   MemoryOf(call, Pass::kBackward),
                   gradients);
      }
    }
    if (watch == nullptr) {
      modules_[unit]->Backward(stream_, MemoryOf(call, Pass::kBackward), gradients);
    }
    for (const plan::TensorId tensor : tensors) {
      const auto index = static_cast<size_t>(tensor);
      for (size_t i = 0; i < sums[index].size(); ++i) {
        sums[index][i] += staging[static_cast<size_t>(offsets_[index]) + i];
      }
    }
  }
  return sums;
}

template std::vector<std::vector<float>> ModelMemory::Gradients<FreshGradient>(float start);
template std::vector<std::vector<float>> ModelMemory::Gradients<AccumulatingGradient>(float start);

}  // namespace ravel::model
