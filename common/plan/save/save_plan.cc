// Divides the saved state into files: each rank writes what it measures, cut into rectangles of
// limited size. The same function runs in the coordinator and in every trainer and must give the
// same result, so everything is ordered by key or rank and nothing depends on hashing or time.
// Scalars that all ranks hold go to the rank with least to write. The result is proved before it is
// returned: the chunks of each tensor cover it exactly once.

#include "common/plan/save/save_plan.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <span>
#include <utility>

#include <absl/strings/str_cat.h>

#include "common/check.h"
#include "common/ckpt/safetensors.h"
#include "common/ckpt/step_layout.h"
#include "common/model/recipes.h"
#include "common/model/state_groups.h"
#include "common/plan/layout/quant_layout.h"
#include "common/plan/layout/state_scales.h"
#include "common/plan/plan_pieces.h"
#include "common/signed_size.h"

namespace ravel::plan {
namespace {

constexpr size_t kMostRectangles = 8;  // of one tensor on one writer

// A rectangle that has a writer but no file yet.
struct Rectangle {
  StateId tensor = 0;
  Box box;
  GroupId group = {};
  int64_t shard_offset = 0;
  int64_t bytes = 0;
};

constexpr StateSpec kWeight = {.name = "weight", .role = StateRole::kParam};

// Weights, and what is kept of those that are trained.
std::vector<StateSpec> ElementsOf(const ShardingPlan& plan, const TensorSpec& parameter) {
  std::vector<StateSpec> kept = {kWeight};
  if (parameter.trainable) {
    const std::vector<StateSpec> states =
        StatesOf(plan.options.optimizer, plan.options.state_types);
    kept.insert(kept.end(), states.begin(), states.end());
  }
  return kept;
}

Shape SavedShape(const TensorSpec& parameter, const StateSpec& state) {
  switch (state.shape) {
    case StateShape::kScale:
      return ScaleShape(parameter.shape);
    case StateShape::kScalar:
      return {};
    case StateShape::kParameter:
      break;
  }
  return parameter.shape;
}

// Every rank holds this of a delayed scale: each tensor of a domain has the domain's.
std::vector<StateTensor> ScalesOf(const ShardingPlan& plan, const TensorSpec& parameter) {
  if (parameter.recipe != Recipe::kDelayed) {
    return {};
  }
  std::vector<StateTensor> tensors;
  for (const StateRole role : {StateRole::kCastScale, StateRole::kAmaxHistory}) {
    Shape shape = {kSlotsPerDomain};
    if (role == StateRole::kAmaxHistory) {
      shape.push_back(plan.options.amax_history);
    }
    tensors.push_back({.key = StateKey(parameter.name, role),
                       .of_param = parameter.name,
                       .role = role,
                       .dtype = DType::kF32,
                       .shape = std::move(shape)});
  }
  return tensors;
}

std::vector<StateTensor> TensorsOf(const ShardingPlan& plan) {
  std::vector<StateTensor> tensors;
  for (const TensorSpec& parameter : plan.inventory.tensors) {
    for (const StateSpec& state : ElementsOf(plan, parameter)) {
      tensors.push_back({.key = StateKey(parameter.name, state.role),
                         .of_param = parameter.name,
                         .role = state.role,
                         .dtype = SavedType(plan, state.role),
                         .shape = SavedShape(parameter, state)});
    }
    for (StateTensor& scale : ScalesOf(plan, parameter)) {
      tensors.push_back(std::move(scale));
    }
  }
  std::sort(tensors.begin(), tensors.end(), [](const StateTensor& a, const StateTensor& b) {
    return a.key < b.key;
  });
  return tensors;
}

ckpt::QuantRecord QuantOf(const ShardingPlan& plan) {
  const ModelInventory& inventory = plan.inventory;
  ckpt::QuantRecord quant;
  quant.amax_epsilon = plan.options.amax_epsilon;
  const QuantLayout layout = QuantLayoutOf(inventory);
  for (const QuantTensor& tensor : layout.tensors) {
    quant.recipe = RecipeName(tensor.recipe);
    quant.rounding = ckpt::kRoundsMainWeights;
    quant.tensors.push_back({.name = inventory.tensors[tensor.tensor].name,
                             .domain = layout.domain(tensor).name,
                             .site = inventory.tensors[tensor.tensor].site});
  }
  return quant;
}

// Cuts a box along its outermost dimension longer than 1 until each part is at most
// `most` bytes.
void CutBox(const Box& box, int64_t element_bytes, int64_t most, std::vector<Box>& parts) {
  size_t dim = 0;
  while (dim < box.length.size() && box.length[dim] <= 1) {
    ++dim;
  }
  const int64_t bytes = ElementCount(box.length) * element_bytes;
  if (bytes <= most || dim == box.length.size()) {
    parts.push_back(box);
    return;
  }
  const int64_t slice = bytes / box.length[dim];
  const int64_t step = std::max<int64_t>(1, most / slice);
  for (int64_t at = 0; at < box.length[dim]; at += step) {
    Box part = box;
    part.offset[dim] += at;
    part.length[dim] = std::min(step, box.length[dim] - at);
    CutBox(part, element_bytes, most, parts);
  }
}

class SavePlanner {
 public:
  SavePlanner(const ShardingPlan& plan, const SaveLimits& limits)
      : plan_(plan), limits_(limits), rectangles_(Size(plan.ranks)) {
    save_.tensors = TensorsOf(plan);
    for (const StateId i : save_.tensors.ids()) {
      tensor_of_[save_.tensors[i].key] = i;
    }
  }

  absl::StatusOr<SavePlan> Build() {
    for (int64_t rank = 0; rank < plan_.ranks; ++rank) {
      for (const GroupId group : plan_.groups.ids()) {
        const std::vector<OwnedPiece> pieces = SavedPieces(plan_, group, rank);
        std::vector<OwnedPiece> scales;
        if (UpdatesInGroups(plan_.options.optimizer, plan_.options.state_types)) {
          scales = ScalePieces(plan_.inventory, StoredPieces(plan_, group, rank), pieces);
        }
        for (size_t i = 0; i < pieces.size(); ++i) {
          for (const StateSpec& state :
               ElementsOf(plan_, plan_.inventory.tensors[pieces[i].tensor])) {
            if (state.shape != StateShape::kScalar) {
              const bool scale = state.shape == StateShape::kScale;
              RETURN_IF_ERROR(AddPiece(rank, group, state.role, scale ? scales[i] : pieces[i]));
            }
          }
        }
      }
    }
    save_.quant = QuantOf(plan_);
    AddSteps();
    for (int64_t rank = 0; rank < plan_.ranks; ++rank) {
      FileRectangles(rank, ckpt::kModelFolder);
      FileRectangles(rank, ckpt::kOptimizerFolder);
    }
    RETURN_IF_ERROR(ProveCover(save_));
    return std::move(save_);
  }

 private:
  std::vector<Rectangle>& Of(int64_t rank) { return At(rectangles_, rank); }

  absl::Status AddPiece(int64_t rank, GroupId group, StateRole role, const OwnedPiece& piece) {
    const TensorSpec& parameter = plan_.inventory.tensors[piece.tensor];
    std::vector<Box> boxes;
    const int64_t element_bytes = DTypeBytes(SavedType(plan_, role));
    for (const Box& box : piece.Boxes()) {
      CutBox(box, element_bytes, limits_.chunk_bytes, boxes);
    }
    if (boxes.size() > kMostRectangles) {
      return absl::InvalidArgumentError(absl::StrCat(
          "save plan: ", parameter.name, " has ", boxes.size(), " rectangles on one writer"));
    }
    int64_t offset = piece.shard_offset;
    for (const Box& box : boxes) {
      const int64_t elements = ElementCount(box.length);
      Of(rank).push_back({.tensor = tensor_of_.at(StateKey(parameter.name, role)),
                          .box = box,
                          .group = group,
                          .shard_offset = offset,
                          .bytes = elements * element_bytes});
      offset += elements;
    }
    return absl::OkStatus();
  }

  // Every rank holds the step of every parameter, and all delayed scales: each goes to whoever has
  // least to write, ties to the lowest rank.
  void AddSteps() {
    std::vector<int64_t> load(rectangles_.size(), 0);
    for (size_t rank = 0; rank < rectangles_.size(); ++rank) {
      for (const Rectangle& rectangle : rectangles_[rank]) {
        load[rank] += rectangle.bytes;
      }
    }
    const QuantLayout layout = QuantLayoutOf(plan_.inventory);
    for (const StateId i : save_.tensors.ids()) {
      const StateTensor& tensor = save_.tensors[i];
      if (tensor.role != StateRole::kStep && !IsOfScales(tensor.role)) {
        continue;
      }
      const size_t writer = Size(std::min_element(load.begin(), load.end()) - load.begin());
      const int64_t bytes = ElementCount(tensor.shape) * DTypeBytes(tensor.dtype);
      Rectangle made = {.tensor = i, .box = {}, .group = {}, .bytes = bytes};
      if (IsOfScales(tensor.role)) {
        const TensorId parameter = plan_.inventory.FindTensor(tensor.of_param);
        made.box = {.offset = Shape(tensor.shape.size(), 0), .length = tensor.shape};
        made.shard_offset = int64_t{layout.Find(parameter)->domain} * ElementCount(tensor.shape);
      }
      rectangles_[writer].push_back(std::move(made));
      load[writer] += bytes;
    }
  }

  // The j-th rectangle of a tensor goes to the j-th file of the writer, or a later one where that
  // is full: a file holds one chunk of a tensor.
  void FileRectangles(int64_t rank, std::string_view folder) {
    std::vector<std::vector<Rectangle>> layers;
    std::vector<int64_t> layer_bytes;
    std::map<StateId, size_t> next_layer;
    for (const Rectangle& rectangle : Of(rank)) {
      const bool parameter = save_.tensors[rectangle.tensor].role == StateRole::kParam;
      if (parameter != (folder == ckpt::kModelFolder)) {
        continue;
      }
      size_t layer = next_layer[rectangle.tensor];
      while (layer < layers.size() && layer_bytes[layer] > 0 &&
             layer_bytes[layer] + rectangle.bytes > limits_.file_bytes) {
        ++layer;
      }
      if (layer >= layers.size()) {
        layers.resize(layer + 1);
        layer_bytes.resize(layer + 1, 0);
      }
      layers[layer].push_back(rectangle);
      layer_bytes[layer] += rectangle.bytes;
      next_layer[rectangle.tensor] = layer + 1;
    }
    const int count = static_cast<int>(layers.size());
    int number = 0;
    for (const std::vector<Rectangle>& layer : layers) {
      CHECK(!layer.empty());
      AddFile(
          rank, ckpt::ShardFileName(folder, static_cast<int>(rank) + 1, ++number, count), layer);
    }
  }

  void AddFile(int64_t rank, std::string path, const std::vector<Rectangle>& rectangles) {
    std::vector<ckpt::SafetensorsEntry> entries;
    std::map<std::string, const Rectangle*> by_key;
    for (const Rectangle& rectangle : rectangles) {
      const StateTensor& tensor = save_.tensors[rectangle.tensor];
      entries.push_back({.key = tensor.key,
                         .dtype = tensor.dtype,
                         .shape = rectangle.box.length,
                         .saved_offset = rectangle.box.offset});
      CHECK(by_key.emplace(tensor.key, &rectangle).second);
    }
    std::sort(entries.begin(), entries.end(), ckpt::SafetensorsOrder);
    ckpt::PlaceSafetensorsEntries(entries);
    SaveFile file = {.path = std::move(path),
                     .writer = static_cast<int>(rank),
                     .header_bytes = ckpt::SafetensorsHeaderBytes(entries),
                     .size = 0,
                     .chunks = {}};
    file.size = file.header_bytes + entries.back().end;
    for (const ckpt::SafetensorsEntry& entry : entries) {
      const Rectangle& rectangle = *by_key.at(entry.key);
      file.chunks.push_back({.tensor = rectangle.tensor,
                             .box = rectangle.box,
                             .group = rectangle.group,
                             .shard_offset = rectangle.shard_offset,
                             .file_offset = file.header_bytes + entry.begin,
                             .bytes = entry.end - entry.begin});
    }
    save_.files.push_back(std::move(file));
  }

  const ShardingPlan& plan_;
  const SaveLimits limits_;
  SavePlan save_;
  std::map<std::string, StateId> tensor_of_;
  std::vector<std::vector<Rectangle>> rectangles_;  // per writer, in buffer order
};

}  // namespace

DType SavedType(const ShardingPlan& plan, StateRole role) {
  for (const StateSpec& state : StatesOf(plan.options.optimizer)) {
    if (state.role == role) {
      return StateTypeOf(state, plan.options.state_types);
    }
  }
  return DType::kF32;
}

absl::Status ProveCover(const SavePlan& plan) {
  IdVector<StateId, std::vector<Box>> boxes(plan.tensors.size());
  for (const SaveFile& file : plan.files) {
    std::vector<StateId> in_file;
    for (const SaveChunk& chunk : file.chunks) {
      if (!plan.tensors.Has(chunk.tensor)) {
        return absl::InvalidArgumentError(absl::StrCat(file.path, ": a chunk of no tensor"));
      }
      const StateTensor& tensor = plan.tensors[chunk.tensor];
      if (chunk.bytes != ElementCount(chunk.box.length) * DTypeBytes(tensor.dtype) ||
          chunk.file_offset < file.header_bytes || chunk.file_offset + chunk.bytes > file.size) {
        return absl::InvalidArgumentError(
            absl::StrCat(file.path, ": ", tensor.key, ": does not lie inside the file"));
      }
      in_file.push_back(chunk.tensor);
      boxes[chunk.tensor].push_back(chunk.box);
    }
    std::sort(in_file.begin(), in_file.end());
    const auto twice = std::adjacent_find(in_file.begin(), in_file.end());
    if (twice != in_file.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat(file.path, ": ", plan.tensors[*twice].key, ": two chunks in one file"));
    }
  }
  for (const StateId i : plan.tensors.ids()) {
    RETURN_IF_ERROR(Annotate(ckpt::ProveBoxCover(plan.tensors[i].shape, std::move(boxes[i])),
                             plan.tensors[i].key));
  }
  return absl::OkStatus();
}

absl::StatusOr<SavePlan> BuildSavePlan(const ShardingPlan& plan, const SaveLimits& limits) {
  return SavePlanner(plan, limits).Build();
}

}  // namespace ravel::plan
