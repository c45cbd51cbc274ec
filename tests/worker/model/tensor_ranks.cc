#include "tests/worker/model/tensor_ranks.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include <absl/strings/str_cat.h>

#include "common/check.h"
#include "common/model/architecture/architecture.h"
#include "common/model/compute_type.h"
#include "common/model/tensor_parts.h"
#include "kernels/part_sum.h"
#include "kernels/philox.h"
#include "kernels/scalar/bfloat16.h"
#include "tests/worker/model/unit_of_rank.h"

namespace ravel::model {
namespace {

using plan::TensorCut;

plan::ModelInventory InventoryOf(const RankTestModel& model, const TensorCut& cut) {
  plan::ModelInventory inventory = plan::BuildInventory(
      *plan::ValidateModelConfig(model.config), model.shape, model.recompute, cut);
  plan::NarrowActivations(model.dtype, inventory);
  plan::ReserveTensorParts(inventory);
  return inventory;
}

struct Rank {
  Rank(const RankTestModel& model, const TensorCut& cut) : inventory(InventoryOf(model, cut)) {
    for (const plan::UnitId unit : inventory.units.ids()) {
      units.push_back(std::make_unique<UnitOfRank>(inventory, unit, model.dtype));
      const UnitTensors tensors(inventory, unit);
      if (inventory.units[unit].kind == plan::UnitKind::kLayer) {
        attention.push_back(std::make_unique<AttentionBlock>(tensors, model.shape));
        mlp.push_back(std::make_unique<MlpBlock>(tensors));
      } else if (inventory.units[unit].kind == plan::UnitKind::kHead) {
        const plan::Architecture& architecture =
            plan::ArchitectureOf(inventory.config.architecture);
        norm = std::make_unique<Norm>(tensors, architecture.final_norm);
        normed = std::make_unique<NormActivations>(tensors, "");
        vocabulary = std::make_unique<VocabularyParts>(tensors);
        const bool tied = inventory.config.tie_word_embeddings;
        projection = tensors.Index(tied ? architecture.token_table : architecture.head, "weight");
      }
    }
    storage.resize(static_cast<size_t>(plan::ActivationOffsets(inventory.shared).back()));
    shared = UnitOfRank::Views(inventory.shared, storage);
    FillRopeTables(stream, inventory, shared);
  }

  TensorView Shared(const char* name) const {
    return shared[ActivationIndex(inventory.shared, name)];
  }
  UnitMemory Memory(size_t unit, bool backward) { return units[unit]->Memory(shared, backward); }

  plan::ModelInventory inventory;
  std::vector<std::unique_ptr<UnitOfRank>> units;
  std::vector<std::unique_ptr<AttentionBlock>> attention;
  std::vector<std::unique_ptr<MlpBlock>> mlp;
  std::unique_ptr<Norm> norm;
  std::unique_ptr<NormActivations> normed;
  std::unique_ptr<VocabularyParts> vocabulary;
  size_t projection = 0;
  std::vector<std::byte> storage;
  std::vector<TensorView> shared;
  kernels::CpuStream stream;
};

using Pieces = std::vector<TensorView>;

class Ranks {
 public:
  Ranks(const RankTestModel& model, int64_t degree, Mistake mistake)
      : model_(model), degree_(degree), mistake_(mistake) {
    for (int64_t coordinate = 0; coordinate < degree; ++coordinate) {
      TensorCut cut = {.parts = model.parts, .degree = degree, .coordinate = coordinate};
      if (mistake == Mistake::kSumByRank) {
        cut.parts = degree;
      }
      ranks_.push_back(std::make_unique<Rank>(model, cut));
      if (mistake == Mistake::kLossByRank) {
        cut.parts = degree;
        others_.push_back(std::make_unique<Rank>(model, cut));
      }
    }
    first_layer_ = ranks_[0]->inventory.units.size() - 1 - ranks_[0]->attention.size();
  }

  RankResults Run() {
    for (int64_t m = 0; m < model_.micro_batches; ++m) {
      Load(m);
      const size_t layers = ranks_[0]->attention.size();
      for (size_t layer = 0; layer < layers; ++layer) {
        Forward(layer,
                [](Rank& rank, size_t at) -> AttentionBlock& { return *rank.attention[at]; });
        Forward(layer, [](Rank& rank, size_t at) -> MlpBlock& { return *rank.mlp[at]; });
      }
      Keep(absl::StrCat("hidden", m), ranks_[0]->Shared("hidden"));
      const auto output = m == 0 || mistake_ == Mistake::kFoldMicroBatches
                              ? kernels::Output::kOverwrite
                              : kernels::Output::kAccumulate;
      Head(output);
      Keep(absl::StrCat("loss", m), ranks_[0]->Shared("loss"));
      for (size_t layer = layers; layer-- > 0;) {
        Backward(layer, output, [](Rank& rank, size_t at) -> MlpBlock& { return *rank.mlp[at]; });
        Backward(layer, output, [](Rank& rank, size_t at) -> AttentionBlock& {
          return *rank.attention[at];
        });
      }
      Keep(absl::StrCat("dhidden", m), ranks_[0]->Shared("dhidden"));
      if (m + 1 == model_.micro_batches || mistake_ == Mistake::kFoldMicroBatches) {
        KeepGradients();
      }
    }
    return results_;
  }

 private:
  void Load(int64_t micro_batch) {
    const int64_t tokens = model_.shape.sequences * model_.shape.sequence_tokens;
    std::vector<float> x(static_cast<size_t>(tokens * model_.config.hidden_size));
    kernels::CpuStream stream;
    kernels::InitNormal(stream,
                        {.out = VectorView(x.data(), static_cast<int64_t>(x.size())),
                         .seed = 11,
                         .site = static_cast<uint32_t>(micro_batch),
                         .first_index = 0,
                         .standard_deviation = 1.0f});
    for (const std::vector<std::unique_ptr<Rank>>* list : {&ranks_, &others_}) {
      for (const std::unique_ptr<Rank>& rank : *list) {
        Store(x, rank->Shared("hidden"));
        auto* targets = rank->Shared("targets").As<int32_t>();
        for (int64_t i = 0; i < tokens; ++i) {
          targets[i] = static_cast<int32_t>(
              i == 3 ? -1 : (5 * i + 1 + 7 * micro_batch) % model_.config.vocab_size);
        }
      }
    }
  }

  // The trees of all ranks, each in memory that lives on.
  Pieces Collect(const std::vector<Pieces>& of_ranks) {
    if (of_ranks.size() == 1) {
      return of_ranks[0];
    }
    Pieces pieces;
    for (const Pieces& piece : of_ranks) {
      CHECK_EQ(piece.size(), 1u);
      pieces.push_back(piece[0]);
    }
    return pieces;
  }

  // The sum, rounded to the type of activations before the residual is added.
  Pieces Rounded(const Pieces& pieces) {
    sums_.emplace_back(static_cast<size_t>(pieces[0].elements()));
    const TensorView sum = MatrixView(sums_.back().data(), pieces[0].size[0], pieces[0].size[1]);
    kernels::CpuStream stream;
    kernels::SumParts(stream, {.pieces = pieces, .out = sum});
    for (float& value : sums_.back()) {
      value = Bf16ToFloat(FloatToBf16(value));
    }
    return {sum};
  }

  template <typename Of>
  void Forward(size_t layer, const Of& of) {
    const size_t unit = first_layer_ + layer;
    std::vector<Pieces> pieces;
    for (const std::unique_ptr<Rank>& rank : ranks_) {
      of(*rank, layer).ForwardNorm(rank->stream, rank->Memory(unit, false));
      pieces.push_back(of(*rank, layer).ForwardParts(rank->stream, rank->Memory(unit, false)));
    }
    Pieces all = Collect(pieces);
    if (mistake_ == Mistake::kRoundBeforeAdding) {
      all = Rounded(all);
    }
    for (const std::unique_ptr<Rank>& rank : ranks_) {
      of(*rank, layer).FinishForward(rank->stream, rank->Memory(unit, false), all);
    }
  }

  template <typename Of>
  void Backward(size_t layer, kernels::Output output, const Of& of) {
    const size_t unit = first_layer_ + layer;
    std::vector<Pieces> pieces;
    for (const std::unique_ptr<Rank>& rank : ranks_) {
      pieces.push_back(of(*rank, layer)
                           .BackwardParts(rank->stream,
                                          rank->Memory(unit, true),
                                          rank->units[unit]->Gradients(output)));
    }
    const Pieces all = Collect(pieces);
    for (const std::unique_ptr<Rank>& rank : ranks_) {
      of(*rank, layer)
          .FinishBackward(
              rank->stream, rank->Memory(unit, true), rank->units[unit]->Gradients(output), all);
      of(*rank, layer)
          .BackwardNorm(
              rank->stream, rank->Memory(unit, true), rank->units[unit]->Gradients(output));
    }
  }

  void Head(kernels::Output output) {
    const size_t unit = ranks_[0]->units.size() - 1;
    // The final norm is every rank's own; with a mistake in the loss alone, the others' head.
    std::vector<Rank*> heads;
    for (size_t i = 0; i < ranks_.size(); ++i) {
      heads.push_back(others_.empty() ? ranks_[i].get() : others_[i].get());
      if (!others_.empty()) {
        Store(FloatsOf(ranks_[i]->Shared("hidden")), others_[i]->Shared("hidden"));
      }
    }
    std::vector<UnitMemory> memories;
    std::vector<WeightGradients> gradients;
    std::vector<VocabularyParts::Args> args;
    for (Rank* rank : heads) {
      memories.push_back(rank->Memory(unit, true));
      gradients.push_back(rank->units[unit]->Gradients(output));
    }
    for (size_t i = 0; i < heads.size(); ++i) {
      Rank& rank = *heads[i];
      rank.norm->Forward(rank.stream,
                         {.memory = memories[i],
                          .x = rank.Shared("hidden"),
                          .copy = {},
                          .y = rank.normed->ResultIn(memories[i]),
                          .statistics = rank.normed->StatisticsIn(memories[i])});
      const auto workspace = [&](const char* name) {
        return memories[i].workspace[ActivationIndex(rank.units[unit]->spec().workspace, name)];
      };
      args.push_back({.memory = memories[i],
                      .x = rank.normed->ResultIn(memories[i]),
                      .w = memories[i].weights[rank.projection],
                      .targets = rank.Shared("targets"),
                      .loss = rank.Shared("loss"),
                      .logits = RowsOf(workspace("logits"), 0, 5),
                      .dx = workspace("dn"),
                      .dw = gradients[i].views[rank.projection],
                      .dw_output = output});
    }
    for (const VocabularyParts::Chunk& chunk : VocabularyParts::ChunksOf(args[0])) {
      Chunk(heads, args, chunk);
    }
    for (size_t i = 0; i < heads.size(); ++i) {
      Rank& rank = *heads[i];
      rank.norm->Backward(rank.stream,
                          {.memory = memories[i],
                           .gradients = gradients[i],
                           .dy = args[i].dx,
                           .x = rank.Shared("hidden"),
                           .dresidual = {},
                           .dx = rank.Shared("dhidden"),
                           .statistics = rank.normed->StatisticsIn(memories[i])});
      if (!others_.empty()) {
        Store(FloatsOf(rank.Shared("dhidden")), ranks_[i]->Shared("dhidden"));
        Store(FloatsOf(rank.Shared("loss")), ranks_[i]->Shared("loss"));
      }
    }
  }

  static void Chunk(const std::vector<Rank*>& heads,
                    const std::vector<VocabularyParts::Args>& args,
                    const VocabularyParts::Chunk& chunk) {
    for (size_t i = 0; i < heads.size(); ++i) {
      heads[i]->vocabulary->Statistics(heads[i]->stream, args[i], chunk);
    }
    // Every rank gets the rows of the others.
    for (size_t from = 0; from < heads.size(); ++from) {
      const TensorCut& cut = heads[from]->inventory.cut;
      const TensorView source = heads[from]->vocabulary->StatisticsOf(args[from], chunk);
      for (size_t to = 0; to < heads.size(); ++to) {
        const TensorView target = heads[to]->vocabulary->StatisticsOf(args[to], chunk);
        for (int64_t row = 3 * cut.first_part();
             row < 3 * (cut.first_part() + cut.local_parts()) && to != from;
             ++row) {
          std::copy_n(source.Row<float>(row), source.size[1], target.Row<float>(row));
        }
      }
    }
    std::vector<Pieces> pieces;
    for (size_t i = 0; i < heads.size(); ++i) {
      heads[i]->vocabulary->Loss(heads[i]->stream, args[i], chunk);
      pieces.push_back(heads[i]->vocabulary->GradientParts(heads[i]->stream, args[i], chunk));
    }
    Pieces all = pieces[0];
    if (pieces.size() > 1) {
      all.clear();
      for (const Pieces& piece : pieces) {
        all.push_back(piece[0]);
      }
    }
    for (size_t i = 0; i < heads.size(); ++i) {
      heads[i]->vocabulary->FinishGradient(heads[i]->stream, args[i], chunk, all);
    }
  }

  void Keep(const std::string& name, const TensorView& view) { results_[name] = FloatsOf(view); }

  // Gradients of a tensor that ranks have parts of, put together; of one that several ranks sum a
  // share of, as the tree over these ranks.
  void KeepGradients() {
    for (size_t unit = first_layer_; unit < ranks_[0]->units.size(); ++unit) {
      const bool head = unit + 1 == ranks_[0]->units.size();
      const auto& list = head && !others_.empty() ? others_ : ranks_;
      const plan::ModelInventory& inventory = list[0]->inventory;
      const std::vector<plan::TensorId>& tensors = list[0]->units[unit]->tensors();
      for (size_t i = 0; i < tensors.size(); ++i) {
        const plan::TensorSpec& tensor = inventory.tensors[tensors[i]];
        std::vector<float> whole = Join(list, unit, i);
        std::vector<float>& kept = results_[tensor.name];
        if (kept.empty()) {
          kept = std::move(whole);
        } else {
          for (size_t e = 0; e < whole.size(); ++e) {
            kept[e] += whole[e];
          }
        }
      }
    }
  }

  std::vector<float> Join(const std::vector<std::unique_ptr<Rank>>& list, size_t unit, size_t i) {
    const plan::TensorSpec& tensor = list[0]->inventory.tensors[list[0]->units[unit]->tensors()[i]];
    std::vector<std::vector<float>> shares(static_cast<size_t>(ElementCount(tensor.shape)));
    for (const std::unique_ptr<Rank>& rank : list) {
      const std::vector<float> local = FloatsOf(rank->units[unit]->Gradient(i));
      ForEachLocal(tensor.shape, rank->units[unit]->cut(i), [&](size_t to, size_t from) {
        shares[to].push_back(local[from]);
      });
    }
    const plan::Architecture& architecture =
        plan::ArchitectureOf(list[0]->inventory.config.architecture);
    const auto of = [&](std::string_view name) {
      return !name.empty() && tensor.name.find(std::string(name) + ".") != std::string::npos;
    };
    const bool partial = of(architecture.query_norm) || of(architecture.key_norm) ||
                         list[0]->units[unit]->cut(i).dimension >= 0;
    std::vector<float> whole;
    for (std::vector<float>& share : shares) {
      CHECK(!share.empty());
      for (; partial && share.size() > 1; share.resize(share.size() / 2)) {
        for (size_t at = 0; 2 * at < share.size(); ++at) {
          share[at] = share[2 * at] + share[2 * at + 1];
        }
      }
      for (const float value : share) {  // what all ranks compute is the same on all
        CHECK(std::memcmp(&value, share.data(), sizeof(value)) == 0);
      }
      whole.push_back(share[0]);
    }
    return whole;
  }

  const RankTestModel& model_;
  const int64_t degree_;
  const Mistake mistake_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::vector<std::unique_ptr<Rank>> others_;  // heads of another cut
  size_t first_layer_ = 0;
  std::vector<std::vector<float>> sums_;
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
  return names;
}

}  // namespace ravel::model
