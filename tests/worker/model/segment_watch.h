#pragma once

// Runs segments with nothing but what their SegmentSpec names: while one runs, all activations that
// it does not read, and all weights that it does not name, are NaN; afterwards they, and the
// gradients of such weights, are what they were, unless it writes them.

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "common/model/model_inventory.h"
#include "common/model/segments.h"
#include "worker/model/module.h"

namespace ravel::model {

class SegmentWatch {
 public:
  // `without`: says which uses are taken not to be named; `Part` of a use at a time.
  enum class Part { kRead, kWrite, kScratch };
  using Without =
      std::function<bool(plan::UnitPass pass, plan::SegmentKind, const plan::SegmentUse&, Part)>;
  explicit SegmentWatch(Without without = nullptr) : without_(std::move(without)) {}

  struct Call {
    const plan::ModelInventory& inventory;
    plan::UnitId unit;
    plan::UnitPass pass;
    const plan::SegmentSpec& segment;
    const UnitMemory& memory;
    std::vector<TensorView> gradients = {};  // of a backward
  };
  void Run(const Call& call, const std::function<void()>& run);

  // The first activation or gradient that was written without being named; empty: none.
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
  plan::SegmentSpec Named(plan::UnitPass pass, plan::SegmentSpec segment) const;
  void Add(const std::string& name,
           const TensorView& view,
           const plan::SegmentUse& use,
           bool named);
  void AddList(plan::ActivationList list,
               const std::vector<plan::ActivationSpec>& specs,
               const std::vector<TensorView>& views,
               const plan::SegmentSpec& segment);
  void Hide(const Call& call, const plan::SegmentSpec& segment);
  void Restore();

  const Without without_;
  std::string name_;  // of the segment that runs
  std::string fault_;
  std::vector<Area> areas_;
};

}  // namespace ravel::model
