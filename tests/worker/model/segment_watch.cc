#include "tests/worker/model/segment_watch.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace ravel::model {
namespace {

size_t BytesOf(const TensorView& view) {
  return static_cast<size_t>(view.elements() * DTypeBytes(view.dtype));
}

}  // namespace

void SegmentWatch::Run(const Call& call, const std::function<void()>& run) {
  name_ = std::string(plan::UnitPassName(call.pass)) + " " + plan::SegmentName(call.segment.kind) +
          " of " + call.inventory.units[call.unit].name;
  Hide(call, Named(call.pass, call.segment));
  run();
  Restore();
}

plan::SegmentSpec SegmentWatch::Named(plan::UnitPass pass, plan::SegmentSpec segment) const {
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

void SegmentWatch::Add(const std::string& name,
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
  if (!use.reads && view.data != nullptr) {  // null: a view of no elements
    std::memset(view.data, 0xFF, BytesOf(view));
  }
}

void SegmentWatch::AddList(plan::ActivationList list,
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

void SegmentWatch::Hide(const Call& call, const plan::SegmentSpec& segment) {
  areas_.clear();
  const plan::UnitSpec& spec = call.inventory.units[call.unit];
  AddList(plan::ActivationList::kSaved, spec.saved, call.memory.saved, segment);
  AddList(plan::ActivationList::kRemade, spec.remade, call.memory.remade, segment);
  AddList(plan::ActivationList::kWorkspace, spec.workspace, call.memory.workspace, segment);
  AddList(plan::ActivationList::kShared, call.inventory.shared, call.memory.shared, segment);
  if (call.memory.input_gradient.present()) {
    AddList(plan::ActivationList::kInputGradient,
            {{"dn", plan::InputGradientSpec(call.inventory).shape}},
            {call.memory.input_gradient},
            segment);
  }
  std::vector<plan::TensorId> tensors = spec.tensors;
  tensors.insert(tensors.end(), spec.borrowed.begin(), spec.borrowed.end());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const bool named = std::find(segment.weights.begin(), segment.weights.end(), tensors[i]) !=
                       segment.weights.end();
    const std::string& name = call.inventory.tensors[tensors[i]].name;
    Add(name, call.memory.weights[i], {.name = name, .reads = named}, named);
    const bool writes = std::find(segment.gradients.begin(), segment.gradients.end(), tensors[i]) !=
                        segment.gradients.end();
    if (!call.gradients.empty() && call.gradients[i].present() && !writes) {
      Add("gradient of " + name, call.gradients[i], {.name = name, .reads = true}, writes);
    }
  }
}

void SegmentWatch::Restore() {
  for (const Area& area : areas_) {
    auto* data = static_cast<std::byte*>(area.view.data);
    const bool changed = area.reads ? !std::equal(area.kept.begin(), area.kept.end(), data)
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

}  // namespace ravel::model
