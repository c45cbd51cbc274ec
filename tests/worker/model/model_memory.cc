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

// Runs passes of a unit segment by segment, each with nothing but what its SegmentSpec names.
class ModelMemory::SegmentWatch {
 public:
  SegmentWatch(const ModelMemory& model, const Without& without)
      : model_(model), without_(without) {}

  void Run(kernels::Stream& stream,
           plan::UnitId unit,
           plan::UnitPass pass,
           const UnitMemory& memory,
           const std::vector<FreshGradient>& gradients) {
    const Module& module = *model_.modules_[unit];
    size_t at = 0;
    for (const plan::SegmentSpec& segment : plan::SegmentsOf(model_.inventory_, unit, pass)) {
      ASSERT_EQ(At(module.segments(pass), at++), segment.kind);
      name_ = std::string(plan::UnitPassName(pass)) + " " + plan::SegmentName(segment.kind) +
              " of " + model_.inventory_.units[unit].name;
      Hide(unit, Named(pass, segment), memory, gradients);
      if (pass == plan::UnitPass::kBackward) {
        module.RunSegment(stream, memory, segment.kind, gradients);
      } else {
        module.RunSegment(stream, memory, pass, segment.kind);
      }
      Restore();
    }
    ASSERT_EQ(at, module.segments(pass).size());
  }

  const std::string& fault() const { return fault_; }

 private:
  // Bytes that a segment does not own: it may not read them, or not change them, or neither.
  struct Area {
    std::string name;
    TensorView view;
    std::vector<std::byte> kept;  // what they held
    bool reads = false;
    bool writes = false;
    bool scratch = false;
  };
  static size_t BytesOf(const TensorView& view) {
    return static_cast<size_t>(view.elements() * DTypeBytes(view.dtype));
  }

  plan::SegmentSpec Named(plan::UnitPass pass, plan::SegmentSpec segment) const {
    std::vector<plan::SegmentUse> uses;
    for (plan::SegmentUse use : std::exchange(segment.uses, {})) {
      const auto lacks = [&](Part part) {
        return without_ && without_(pass, segment.kind, use, part);
      };
      if (!use.reads && !use.writes && lacks(Part::kScratch)) {
        continue;
      }
      const bool reads = use.reads && !lacks(Part::kRead);
      const bool writes = use.writes && !lacks(Part::kWrite);
      if (reads == use.reads && writes == use.writes) {
        uses.push_back(use);
      } else if (reads || writes) {
        use.reads = reads;
        use.writes = writes;
        uses.push_back(use);
      }
    }
    segment.uses = std::move(uses);
    return segment;
  }

  void Add(const std::string& name,
           const TensorView& view,
           const plan::SegmentUse& use,
           bool named) {
    const auto* data = static_cast<const std::byte*>(view.data);
    areas_.push_back({.name = name,
                      .view = view,
                      .kept = {data, data + BytesOf(view)},
                      .reads = use.reads,
                      .writes = use.writes,
                      .scratch = named && !use.reads && !use.writes});
    if (!use.reads) {
      std::memset(view.data, 0xFF, BytesOf(view));
    }
  }

  void AddList(plan::ActivationList list,
               const std::vector<plan::ActivationSpec>& specs,
               const std::vector<TensorView>& views,
               const plan::SegmentSpec& segment) {
    for (size_t i = 0; i < views.size(); ++i) {
      const auto use =
          std::find_if(segment.uses.begin(), segment.uses.end(), [&](const plan::SegmentUse& at) {
            return at.list == list && at.name == specs[i].name;
          });
      const bool named = use != segment.uses.end();
      Add(specs[i].name, views[i], named ? *use : plan::SegmentUse(), named);
    }
  }

  void Hide(plan::UnitId unit,
            const plan::SegmentSpec& segment,
            const UnitMemory& memory,
            const std::vector<FreshGradient>& gradients) {
    areas_.clear();
    const plan::UnitSpec& spec = model_.inventory_.units[unit];
    AddList(plan::ActivationList::kSaved, spec.saved, memory.saved, segment);
    AddList(plan::ActivationList::kRemade, spec.remade, memory.remade, segment);
    AddList(plan::ActivationList::kWorkspace, spec.workspace, memory.workspace, segment);
    AddList(plan::ActivationList::kShared, model_.inventory_.shared, memory.shared, segment);
    const std::vector<plan::TensorId> tensors = model_.TensorsOf(static_cast<size_t>(unit));
    for (size_t i = 0; i < tensors.size(); ++i) {
      const bool named = std::find(segment.weights.begin(), segment.weights.end(), tensors[i]) !=
                         segment.weights.end();
      const std::string& name = model_.inventory_.tensors[tensors[i]].name;
      Add(name, memory.weights[i], {.name = name, .reads = named}, named);
      if (!gradients.empty() && gradients[i].view.present() && !named) {
        Add("gradient of " + name, gradients[i].view, {.name = name, .reads = true}, named);
      }
    }
  }

  void Restore() {
    for (const Area& area : areas_) {
      auto* data = static_cast<std::byte*>(area.view.data);
      const bool changed = area.reads
                               ? !std::equal(area.kept.begin(), area.kept.end(), data)
                               : std::any_of(data, data + area.kept.size(), [](std::byte at) {
                                   return at != std::byte{0xFF};
                                 });
      if (area.scratch) {
        std::memset(data, 0xFF, area.kept.size());
      } else if (!area.writes) {
        if (changed && fault_.empty()) {
          fault_ = name_ + " writes " + area.name;
        }
        std::copy(area.kept.begin(), area.kept.end(), data);
      }
    }
  }

  const ModelMemory& model_;
  const Without& without_;
  std::string name_;  // of the segment that runs
  std::string fault_;
  std::vector<Area> areas_;
};

ModelMemory::Watched ModelMemory::WatchedGradients(const Without& without) {
  SegmentWatch watch(*this, without);
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
      watch->Run(stream_, unit, pass, memory, {});
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
        watch->Run(stream_,
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
