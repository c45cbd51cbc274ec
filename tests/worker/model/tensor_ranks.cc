#include "tests/worker/model/tensor_ranks.h"

#include <algorithm>
#include <cstring>

#include <absl/strings/str_cat.h>

#include "common/check.h"
#include "common/model/architecture/architecture.h"
#include "common/model/compute_type.h"
#include "common/model/logits_chunk.h"
#include "common/model/segments.h"
#include "common/model/tensor_parts.h"
#include "common/signed_size.h"
#include "kernels/part_sum.h"
#include "kernels/scalar/bfloat16.h"
#include "tests/worker/model/segment_watch.h"
#include "tests/worker/model/tensor_mistakes.h"
#include "tests/worker/model/unit_of_rank.h"

namespace ravel::model {
namespace {

using plan::SegmentKind;
using plan::SegmentMove;
using plan::TensorCut;
using plan::UnitPass;

constexpr int64_t kChunkTokens = 5;  // of logits; the last chunk is shorter

plan::ModelInventory InventoryOf(const RankTestModel& model,
                                 const TensorCut& cut,
                                 Mistake mistake) {
  plan::ModelInventory inventory = plan::BuildInventory(
      *plan::ValidateModelConfig(model.config), model.shape, model.recompute, cut);
  const int64_t degree = mistake == Mistake::kLogitsByRank ? cut.degree : 1;
  plan::ReserveLogits(degree * kChunkTokens, model.shape, inventory);
  plan::NarrowActivations(model.dtype, inventory);
  plan::ReserveTensorParts(inventory);
  if (mistake == Mistake::kHeadNormsInOrder) {
    DropHeadNormLeaves(inventory);
  }
  return inventory;
}

// Memory of one rank, and its modules. The head may have another cut.
struct Rank {
  Rank(const RankTestModel& model, const TensorCut& cut, const TensorCut& head_cut, Mistake mistake)
      : inventory(InventoryOf(model, cut, mistake)),
        head_inventory(InventoryOf(model, head_cut, mistake)) {
    for (const plan::UnitId unit : inventory.units.ids()) {
      units.push_back(std::make_unique<UnitOfRank>(Of(unit), unit, model.dtype));
    }
    modules = MakeModules(inventory, model.shape, cut.coordinate);
    modules.back() =
        std::move(MakeModules(head_inventory, model.shape, head_cut.coordinate).back());
    storage.resize(static_cast<size_t>(plan::ActivationOffsets(inventory.shared).back()));
    shared = UnitOfRank::Views(inventory.shared, storage);
    FillRopeTables(stream, inventory, shared);
    addend.resize(static_cast<size_t>(ElementCount(plan::StreamShape(inventory))), kUnset);
    input_gradient.resize(
        static_cast<size_t>(plan::ActivationOffsets({plan::InputGradientSpec(inventory)}).back()));
    rows.resize(std::max(addend.size(), size_t{4096}), kUnset);
  }

  const plan::ModelInventory& Of(plan::UnitId unit) const {
    return inventory.units[unit].kind == plan::UnitKind::kHead ? head_inventory : inventory;
  }
  TensorView Shared(const char* name) const {
    return shared[ActivationIndex(inventory.shared, name)];
  }
  UnitMemory Memory(plan::UnitId unit, UnitPass pass, const plan::SegmentSpec& segment) {
    UnitMemory memory = At(units, unit.value())->Memory(shared, pass);
    if (inventory.cut.degree > 1) {
      const Shape shape = plan::StreamShape(inventory);
      memory.addend =
          MatrixView(addend.data(), shape[0] / (segment.chunked ? segment.chunks : 1), shape[1]);
      memory.input_gradient =
          UnitOfRank::Views({plan::InputGradientSpec(inventory)}, input_gradient).front();
    }
    memory.chunk = segment.chunk;
    return memory;
  }
  // The activation that a move makes whole.
  TensorView Target(plan::UnitId unit, const plan::SegmentUse& use, const UnitMemory& memory) {
    const plan::UnitSpec& spec = Of(unit).units[unit];
    switch (use.list) {
      case plan::ActivationList::kSaved:
        return memory.saved[ActivationIndex(spec.saved, use.name)];
      case plan::ActivationList::kRemade:
        return memory.remade[ActivationIndex(spec.remade, use.name)];
      case plan::ActivationList::kWorkspace:
        return memory.workspace[ActivationIndex(spec.workspace, use.name)];
      case plan::ActivationList::kInputGradient:
        return memory.input_gradient;
      case plan::ActivationList::kShared:
        break;
    }
    return shared[ActivationIndex(inventory.shared, use.name)];
  }

  plan::ModelInventory inventory, head_inventory;
  std::vector<std::unique_ptr<UnitOfRank>> units;
  Modules modules;
  std::vector<std::byte> storage, input_gradient;
  std::vector<TensorView> shared;
  std::vector<float> addend, rows;
  kernels::CpuStream stream;
};

// Runs passes of all ranks, segment by segment, with the moves between them.
class Ranks {
 public:
  Ranks(const RankTestModel& model, int64_t degree, Mistake mistake)
      : model_(model), degree_(degree), mistake_(mistake) {
    for (int64_t coordinate = 0; coordinate < degree; ++coordinate) {
      TensorCut cut = {.parts = model.parts,
                       .degree = degree,
                       .coordinate = coordinate,
                       .sequence = model.sequence && degree > 1,
                       .chunks = degree > 1 ? model.chunks : 1};
      TensorCut head_cut = cut;
      cut.parts = mistake == Mistake::kSumByRank ? degree : cut.parts;
      head_cut.parts = mistake == Mistake::kLossByRank ? degree : cut.parts;
      ranks_.push_back(std::make_unique<Rank>(model, cut, head_cut, mistake));
    }
  }

  RankResults Run() {
    const auto& units = ranks_[0]->inventory.units;
    for (int64_t m = 0; m < model_.micro_batches; ++m) {
      Load(m);
      for (const plan::UnitId unit : units.ids()) {
        Pass(unit, UnitPass::kEvaluate);
      }
      Keep(absl::StrCat("evaluated", m), "loss");
      for (const std::unique_ptr<Rank>& rank : ranks_) {  // the backward makes them again
        Store(std::vector<float>(FloatsOf(rank->Shared("loss")).size(), kUnset),
              rank->Shared("loss"));
      }
      for (const plan::UnitId unit : units.ids()) {
        Pass(unit, UnitPass::kForward);
        Keep(absl::StrCat("hidden", m, " of ", units[unit].name), "hidden");
      }
      output_ = m == 0 || mistake_ == Mistake::kFoldMicroBatches ? kernels::Output::kOverwrite
                                                                 : kernels::Output::kAccumulate;
      if (m == 0 && mistake_ == Mistake::kHeadNormsInOrder) {
        StartFromZero();
      }
      for (size_t i = units.size(); i-- > 0;) {
        const plan::UnitId unit = static_cast<int>(i);
        if (!units[unit].remade.empty()) {
          Pass(unit, UnitPass::kRecompute);
        }
        Pass(unit, UnitPass::kBackward);
      }
      Keep(absl::StrCat("loss", m), "loss");
      Keep(absl::StrCat("dhidden", m), "dhidden");
      if (m + 1 == model_.micro_batches || mistake_ == Mistake::kFoldMicroBatches) {
        KeepGradients();
      }
    }
    return results_;
  }

 private:
  void Load(int64_t micro_batch) {
    const int64_t tokens = model_.shape.sequences * model_.shape.sequence_tokens;
    for (const std::unique_ptr<Rank>& rank : ranks_) {
      auto* ids = rank->Shared("ids").As<int32_t>();
      auto* targets = rank->Shared("targets").As<int32_t>();
      for (int64_t i = 0; i < tokens; ++i) {
        ids[i] = static_cast<int32_t>((3 * i + 5 * micro_batch) % model_.config.vocab_size);
        targets[i] = static_cast<int32_t>(
            i == 3 ? -1 : (5 * i + 1 + 7 * micro_batch) % model_.config.vocab_size);
      }
    }
  }

  void Pass(plan::UnitId unit, UnitPass pass) {
    for (const plan::SegmentSpec& segment : plan::SegmentsOf(ranks_[0]->Of(unit), unit, pass)) {
      std::vector<UnitMemory> memories;
      for (const std::unique_ptr<Rank>& rank : ranks_) {
        memories.push_back(rank->Memory(unit, pass, segment));
        UnitMemory& memory = memories.back();
        if (segment.move != SegmentMove::kNone) {
          memory.rows = rank->Target(unit, segment.target, memory);
        }
        if (segment.move != SegmentMove::kNone && segment.chunked) {
          const int64_t rows = DivExact(memory.rows.size[0], segment.chunks);
          memory.first_row = segment.chunk * rows;
          memory.rows = RowsOf(memory.rows, memory.first_row, rows);
        }
        if (plan::GathersRows(segment.move)) {
          memory.rows.size[0] = DivExact(memory.rows.size[0], degree_);
          memory.rows.data = rank->rows.data();
          memory.first_row += rank->inventory.cut.coordinate * memory.rows.size[0];
        }
      }
      for (size_t i = 0; i < ranks_.size(); ++i) {
        if (plan::ExchangesAddends(segment.move)) {
          const bool first = mistake_ == Mistake::kFirstRows;
          memories[i].pieces = PiecesFor(memories[i], segment.kind, first ? 0 : i);
        }
        RunSegment(*ranks_[i], unit, pass, segment, memories[i]);
      }
      if (plan::GathersRows(segment.move)) {
        Gather(unit, segment.target, memories);
      }
      if (mistake_ == Mistake::kPlusZero && segment.kind == SegmentKind::kTable) {
        MakeZerosPositive();
      }
    }
  }

  void RunSegment(Rank& rank,
                  plan::UnitId unit,
                  UnitPass pass,
                  const plan::SegmentSpec& segment,
                  const UnitMemory& memory) {
    const Module& module = *rank.modules[unit];
    const WeightGradients gradients = At(rank.units, unit.value())->Gradients(output_);
    const bool backward = pass == UnitPass::kBackward;
    const Mistaken mistaken = {
        .mistake = mistake_, .inventory = rank.Of(unit), .unit = unit, .memory = memory};
    SegmentWatch watch(model_.without);
    watch.Run({.inventory = rank.Of(unit),
               .unit = unit,
               .pass = pass,
               .segment = segment,
               .memory = memory,
               .gradients = backward ? gradients.views : std::vector<TensorView>()},
              [&] {
                if (!backward) {
                  module.RunSegment(rank.stream, memory, pass, segment.kind);
                  AfterForward(mistaken, segment.kind);
                  return;
                }
                const auto run = [&](kernels::Output output) {
                  if (output == kernels::Output::kOverwrite) {
                    module.RunSegment(
                        rank.stream, memory, segment.kind, TypedOf<FreshGradient>(gradients.views));
                  } else {
                    module.RunSegment(rank.stream,
                                      memory,
                                      segment.kind,
                                      TypedOf<AccumulatingGradient>(gradients.views));
                  }
                };
                RunBackward(mistaken, segment.kind, output_, run);
              });
    if (!watch.fault().empty()) {
      Fault(watch.fault());
    }
  }

  template <typename Gradient>
  static std::vector<Gradient> TypedOf(const std::vector<TensorView>& views) {
    std::vector<Gradient> gradients;
    for (const TensorView& view : views) {
      gradients.push_back({view});
    }
    return gradients;
  }

  // Addends of the tokens of the rank at `owner`.
  std::vector<TensorView> PiecesFor(const UnitMemory& memory, SegmentKind kind, size_t owner) {
    std::vector<TensorView> pieces;
    const int64_t columns = memory.rows.size[1];
    const int64_t first = static_cast<int64_t>(owner) * memory.rows.elements();
    for (const std::unique_ptr<Rank>& rank : ranks_) {
      pieces.push_back(MatrixView(rank->addend.data() + first, memory.rows.size[0], columns));
    }
    const bool residual =
        kind == SegmentKind::kAttentionResidual || kind == SegmentKind::kMlpResidual;
    return mistake_ == Mistake::kRoundBeforeAdding && residual ? Rounded(pieces) : pieces;
  }

  // The sum, rounded to the type of activations before the residual is added.
  std::vector<TensorView> Rounded(const std::vector<TensorView>& pieces) {
    sum_.resize(static_cast<size_t>(pieces[0].elements()));
    const TensorView sum = MatrixView(sum_.data(), pieces[0].size[0], pieces[0].size[1]);
    kernels::CpuStream stream;
    kernels::SumParts(stream, {.pieces = pieces, .out = sum});
    for (float& value : sum_) {
      value = Bf16ToFloat(FloatToBf16(value));
    }
    return {sum};
  }

  void Gather(plan::UnitId unit,
              const plan::SegmentUse& use,
              const std::vector<UnitMemory>& memories) {
    for (size_t to = 0; to < ranks_.size(); ++to) {
      const TensorView target = ranks_[to]->Target(unit, use, memories[to]);
      for (const UnitMemory& from : memories) {
        const int64_t bytes = from.rows.elements() * DTypeBytes(target.dtype);
        std::memcpy(RowsOf(target, from.first_row, from.rows.size[0]).data,
                    from.rows.data,
                    static_cast<size_t>(bytes));
      }
    }
  }

  // Gradients that are then added to: x + -0 is x, of -0 too.
  void StartFromZero() {
    output_ = kernels::Output::kAccumulate;
    for (const std::unique_ptr<Rank>& rank : ranks_) {
      for (const std::unique_ptr<UnitOfRank>& unit : rank->units) {
        unit->FillGradients(-0.0f);
      }
    }
  }

  // Turns rows that are another rank's from -0 to +0.
  void MakeZerosPositive() {
    for (const std::unique_ptr<Rank>& rank : ranks_) {
      const auto columns = static_cast<size_t>(model_.config.hidden_size);
      for (size_t row = 0; row < rank->addend.size(); row += columns) {
        const auto begin = rank->addend.begin() + static_cast<std::ptrdiff_t>(row);
        const auto end = begin + static_cast<std::ptrdiff_t>(columns);
        if (std::all_of(begin, end, [](float value) { return value == 0; })) {
          std::fill(begin, end, 0.0f);
        }
      }
    }
  }

  // Differs between degrees.
  void Fault(const std::string& what) { results_[what] = {static_cast<float>(degree_)}; }

  void Keep(const std::string& name, const char* shared) {
    const TensorView first = ranks_[0]->Shared(shared);
    std::vector<float>& kept = results_[name];
    kept = FloatsOf(first);
    if (ranks_[0]->inventory.cut.sequence && std::string(shared) != "loss") {
      for (size_t i = 1; i < ranks_.size(); ++i) {
        const std::vector<float> rows = FloatsOf(ranks_[i]->Shared(shared));
        kept.insert(kept.end(), rows.begin(), rows.end());
      }
      return;
    }
    for (const std::unique_ptr<Rank>& rank : ranks_) {
      const auto bytes = static_cast<size_t>(first.elements() * DTypeBytes(first.dtype));
      if (std::memcmp(rank->Shared(shared).data, first.data, bytes) != 0) {
        Fault("ranks differ in " + name);
      }
    }
  }

  // Gradients of a tensor that ranks have parts of, put together; of one that several ranks sum a
  // share of, as the tree over these ranks.
  void KeepGradients() {
    for (const plan::UnitId unit : ranks_[0]->inventory.units.ids()) {
      const std::vector<plan::TensorId>& tensors = At(ranks_[0]->units, unit.value())->tensors();
      for (size_t i = 0; i < tensors.size(); ++i) {
        const std::vector<float> whole = Join(unit, i);
        std::vector<float>& kept = results_[ranks_[0]->inventory.tensors[tensors[i]].name];
        kept.resize(whole.size(), -0.0f);
        for (size_t e = 0; e < whole.size(); ++e) {
          kept[e] += whole[e];
        }
      }
    }
  }

  std::vector<float> Join(plan::UnitId unit, size_t i) {
    const plan::TensorSpec& tensor =
        ranks_[0]->inventory.tensors[At(ranks_[0]->units, unit.value())->tensors()[i]];
    std::vector<std::vector<float>> shares(static_cast<size_t>(ElementCount(tensor.shape)));
    for (const std::unique_ptr<Rank>& rank : ranks_) {
      UnitOfRank& memory = *At(rank->units, unit.value());
      const std::vector<float> local = FloatsOf(memory.Gradient(i));
      ForEachLocal(tensor.shape, memory.cut(i), [&](size_t to, size_t from) {
        shares[to].push_back(local[from]);
      });
    }
    const bool partial = tensor.cut.partial_gradient ||
                         (mistake_ == Mistake::kPositionsByRank &&
                          ranks_[0]->inventory.units[unit].kind == plan::UnitKind::kPositions);
    std::vector<float> whole;
    for (std::vector<float>& share : shares) {
      CHECK(!share.empty());
      for (; partial && share.size() > 1; share.resize(share.size() / 2)) {
        for (size_t at = 0; 2 * at < share.size(); ++at) {
          share[at] = share[2 * at] + share[2 * at + 1];
        }
      }
      for (const float value : share) {  // what all ranks compute is the same on all
        if (std::memcmp(&value, share.data(), sizeof(value)) != 0) {
          Fault("ranks differ in the gradient of " + tensor.name);
        }
      }
      whole.push_back(share[0]);
    }
    return whole;
  }

  const RankTestModel& model_;
  const int64_t degree_;
  const Mistake mistake_;
  kernels::Output output_ = kernels::Output::kOverwrite;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::vector<float> sum_;
  RankResults results_;
};

}  // namespace

RankResults RunRanks(const RankTestModel& model, int64_t degree, Mistake mistake) {
  return Ranks(model, degree, mistake).Run();
}

std::vector<std::string> Differences(const RankResults& a, const RankResults& b) {
  std::vector<std::string> names;
  for (const auto& [name, values] : a) {
    const auto other = b.find(name);
    if (other == b.end() || other->second.size() != values.size() ||
        std::memcmp(other->second.data(), values.data(), values.size() * sizeof(float)) != 0) {
      names.push_back(name);
    }
  }
  for (const auto& [name, values] : b) {  // faults of one alone
    if (!a.contains(name)) {
      names.push_back(name);
    }
  }
  return names;
}

}  // namespace ravel::model
