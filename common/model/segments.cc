// Activations that each segment touches, by the names of model_activations. Two facts decide where
// an activation lies: whether the recompute policy keeps it, and whether the pass comes before the
// recomputation, when what it will make again lies in an area of the workspace.

#include "common/model/segments.h"

#include <algorithm>
#include <utility>

#include <absl/strings/str_cat.h>

#include "common/check.h"
#include "common/model/architecture/architecture.h"
#include "common/shape.h"

namespace ravel::plan {
namespace {

enum class Does { kRead, kWrite, kChange, kScratch };

bool Declares(const std::vector<ActivationSpec>& specs, std::string_view name) {
  return FindActivation(specs, name) != nullptr;
}

// Lists the uses of one segment.
class Uses {
 public:
  Uses(const UnitSpec& unit, UnitPass pass) : unit_(unit), pass_(pass) {}

  // An activation that is kept, or made again, or else, in a forward, lies in `area` of the
  // workspace; without an area it is then nowhere.
  Uses& Kept(const std::string& name, const char* area, Does does) {
    const bool forward = pass_ == UnitPass::kForward || pass_ == UnitPass::kEvaluate;
    if (Declares(unit_.saved, name)) {
      Add(ActivationList::kSaved, name, does);
    } else if (Declares(unit_.remade, name) && !forward) {
      Add(ActivationList::kRemade, name, does);
    } else if (Declares(unit_.remade, name) && *area != 0) {
      Add(ActivationList::kWorkspace, area, does);
    }
    return *this;
  }
  Uses& Workspace(const char* name, Does does) {
    if (Declares(unit_.workspace, name)) {
      Add(ActivationList::kWorkspace, name, does);
    }
    return *this;
  }
  Uses& Shared(const char* name, Does does) {
    Add(ActivationList::kShared, name, does);
    return *this;
  }
  Uses& InputGradient(Does does) {
    Add(ActivationList::kInputGradient, "dn", does);
    return *this;
  }
  // Statistics of a norm; LayerNorm alone has a mean.
  Uses& Statistics(const std::string& index, Does does) {
    return Kept("mean" + index, "mean", does).Kept("rstd" + index, "rstd", does);
  }
  // Scratch of gemms with quantized weights.
  Uses& Codes() {
    for (const ActivationSpec& spec : unit_.workspace) {
      if (spec.name.starts_with("q_")) {
        Add(ActivationList::kWorkspace, spec.name, Does::kScratch);
      }
    }
    return *this;
  }

  std::vector<SegmentUse> Take() { return std::move(uses_); }

 private:
  void Add(ActivationList list, const std::string& name, Does does) {
    auto found = std::find_if(uses_.begin(), uses_.end(), [&](const SegmentUse& use) {
      return use.list == list && use.name == name;
    });
    if (found == uses_.end()) {
      found = uses_.insert(uses_.end(), {.list = list, .name = name});
    }
    found->reads = found->reads || does == Does::kRead || does == Does::kChange;
    found->writes = found->writes || does == Does::kWrite || does == Does::kChange;
  }

  const UnitSpec& unit_;
  const UnitPass pass_;
  std::vector<SegmentUse> uses_;
};

class SegmentList {
 public:
  SegmentList(const ModelInventory& inventory, UnitId unit, UnitPass pass)
      : inventory_(inventory),
        architecture_(ArchitectureOf(inventory.config.architecture)),
        unit_(inventory.units[unit]),
        pass_(pass),
        heads_have_norms_(!architecture_.query_norm.empty()) {
    if (unit_.kind == UnitKind::kLayer) {
      prefix_ = absl::StrCat(std::string(architecture_.layers), ".", unit_.layer, ".");
    }
  }

  std::vector<SegmentSpec> Make() {
    switch (unit_.kind) {
      case UnitKind::kEmbedding:
        Table();
        break;
      case UnitKind::kPositions:
        Positions();
        break;
      case UnitKind::kLayer:
        Layer();
        break;
      case UnitKind::kHead:
        Head();
        break;
    }
    return std::move(segments_);
  }

 private:
  bool cut() const { return TensorRanks(inventory_) > 1; }
  // Ranks have their own tokens of the residual stream alone.
  bool sequence() const { return cut() && inventory_.cut.sequence; }
  bool backward() const { return pass_ == UnitPass::kBackward; }
  bool recomputes() const { return pass_ == UnitPass::kRecompute; }
  bool remade(std::string_view name) const { return Declares(unit_.remade, name); }
  Uses Begin() const { return Uses(unit_, pass_); }

  SegmentSpec& Add(SegmentKind kind, Uses& uses, const std::vector<std::string_view>& names = {}) {
    SegmentSpec segment = {.kind = kind};
    segment.uses = uses.Take();
    for (const std::vector<TensorId>* tensors : {&unit_.tensors, &unit_.borrowed}) {
      for (const TensorId tensor : *tensors) {
        const std::string& full = inventory_.tensors[tensor].name;
        const bool named = std::any_of(names.begin(), names.end(), [&](std::string_view name) {
          const std::string start = absl::StrCat(prefix_, std::string(name), ".");
          return full == start + "weight" || full == start + "bias";
        });
        if (named) {
          segment.weights.push_back(tensor);
        }
      }
    }
    if (backward()) {
      segment.gradients = segment.weights;
    }
    return segments_.emplace_back(std::move(segment));
  }
  void SetChunk(int chunk) {
    segments_.back().chunk = chunk;
    segments_.back().chunks = inventory_.cut.chunks;
    segments_.back().chunked = true;
  }
  // The sum of what the segment before it leaves as an addend, which the move makes `target`.
  void AddSum(SegmentKind kind,
              Uses target,
              Uses uses,
              const std::vector<std::string_view>& names = {}) {
    segments_.back().addend = true;
    SegmentSpec& sum = Add(kind, uses, names);
    sum.move = sequence() ? SegmentMove::kScatterRows : SegmentMove::kSumRows;
    sum.target = target.Take().front();
    if (sum.move == SegmentMove::kScatterRows) {
      AddTarget(sum);
    }
  }
  // The segment itself writes the target.
  static void AddTarget(SegmentSpec& sum) {
    for (SegmentUse& use : sum.uses) {
      if (use.list == sum.target.list && use.name == sum.target.name) {
        use.writes = true;
        use.reads = use.reads || sum.target.reads;
        return;
      }
    }
    sum.uses.push_back(sum.target);
  }
  // Rows of all ranks, of what each has of its own tokens.
  void AddGather(SegmentKind kind, Uses own, Uses target) {
    SegmentSpec& gather = Add(kind, own);
    gather.move = SegmentMove::kGather;
    gather.target = target.Take().front();
  }
  // Products read a norm's result of all tokens: under sequence parallelism it is gathered first.
  void GatherNormed(SegmentKind kind, const std::string& index, const char* area) {
    if (sequence()) {
      AddGather(kind,
                Begin().Kept("n" + index, area, Does::kRead),
                Begin().Workspace("n_all", Does::kWrite));
    }
  }
  void GatherGradient(SegmentKind kind) {
    if (sequence()) {
      AddGather(
          kind, Begin().Shared("dhidden", Does::kRead), Begin().Workspace("dy_all", Does::kWrite));
    }
  }
  void UseNormed(Uses& uses, const std::string& index, const char* area) const {
    if (sequence()) {
      uses.Workspace("n_all", Does::kRead);
    } else {
      uses.Kept("n" + index, area, Does::kRead);
    }
  }
  void UseGradient(Uses& uses) const {
    if (sequence()) {
      uses.Workspace("dy_all", Does::kRead);
    } else {
      uses.Shared("dhidden", Does::kRead);
    }
  }

  void Table() {
    if (recomputes()) {
      return;
    }
    Uses uses = Begin();
    uses.Shared("ids", Does::kRead);
    if (backward()) {
      GatherGradient(SegmentKind::kTableGradient);
      UseGradient(uses);
    } else if (!cut()) {
      uses.Shared("hidden", Does::kWrite);
    }
    Add(SegmentKind::kTable, uses, {architecture_.token_table});
    if (cut() && !backward()) {
      AddSum(SegmentKind::kTableSum, Begin().Shared("hidden", Does::kWrite), Begin());
    }
  }

  // Products of chunks of tokens, each before its sum. The bias is added once, with the residual.
  void Outputs(SegmentKind product, Uses from, SegmentKind sum, const LinearNames& output) {
    from.Workspace("parts", Does::kScratch).Codes();
    for (int chunk = 0; chunk < inventory_.cut.chunks; ++chunk) {
      Uses uses = from;
      Add(product, uses, output.names);
      SetChunk(chunk);
      std::erase_if(segments_.back().weights, [&](TensorId tensor) {
        const std::string& name = inventory_.tensors[tensor].name;
        return name == absl::StrCat(prefix_, std::string(output.names[0]), ".bias");
      });
      Residual(sum, output, DoesSum(chunk));
      SetChunk(chunk);
    }
  }

  // The same of what products read, and then, while the last chunk is summed, what their weights
  // have of it.
  void InputGradients(SegmentKind product,
                      const Uses& from,
                      SegmentKind sum,
                      const std::vector<std::string_view>& names) {
    for (int chunk = 0; chunk < inventory_.cut.chunks; ++chunk) {
      Uses uses = from;
      uses.Workspace("parts", Does::kScratch).Codes();
      Add(product, uses, names).gradients.clear();
      SetChunk(chunk);
      AddSum(sum, Begin().InputGradient(DoesSum(chunk)), Begin());
      SetChunk(chunk);
    }
  }
  void InputWeights(SegmentKind kind,
                    Uses from,
                    const std::string& index,
                    const std::vector<std::string_view>& names) {
    UseNormed(from, index, "d_c");
    from.Codes();
    Add(kind, from, names).weights.clear();
  }

  // A later chunk leaves what those before it have written.
  static Does DoesSum(int chunk) { return chunk == 0 ? Does::kWrite : Does::kChange; }
  void Residual(SegmentKind kind, const LinearNames& output, Does does) {
    const auto names = output.bias ? output.names : std::vector<std::string_view>();
    if (recomputes()) {
      AddSum(kind, Begin().Kept("x1", "", does), Begin().Kept("x0", "", Does::kRead), names);
    } else {
      AddSum(kind,
             Begin().Shared("hidden", Does::kWrite),
             Begin().Shared("hidden", Does::kRead),
             names);
    }
  }

  void Positions() {
    if (recomputes()) {
      return;
    }
    Uses uses = Begin();
    if (backward()) {
      GatherGradient(SegmentKind::kTableGradient);
      UseGradient(uses);
    } else {
      uses.Shared("hidden", Does::kChange);
    }
    Add(SegmentKind::kPositions, uses, {architecture_.position_table});
  }

  // A norm over the residual stream that keeps its input as `input`.
  void Norm(SegmentKind kind,
            const std::string& index,
            const std::string& input,
            std::string_view name) {
    Uses uses = Begin();
    if (backward()) {
      cut() ? uses.InputGradient(Does::kRead) : uses.Workspace("d_c", Does::kRead);
      uses.Kept(input, "", Does::kRead);
      uses.Statistics(index, Does::kRead).Shared("dhidden", Does::kChange);
    } else {
      if (recomputes()) {
        uses.Kept(input, "", Does::kRead);
      } else {
        uses.Shared("hidden", Does::kRead).Kept(input, "", Does::kWrite);
      }
      uses.Statistics(index, Does::kWrite).Kept("n" + index, "d_c", Does::kWrite);
    }
    Add(kind, uses, {name});
  }

  void Attention() {
    const bool projects = !recomputes() || remade("qkv");
    const bool attends = !recomputes() || remade("att");
    Uses uses = Begin();
    if (projects) {
      GatherNormed(SegmentKind::kAttentionNormed, "0", "d_c");
      uses.Codes();
    }
    if (projects && !(cut() && backward())) {
      UseNormed(uses, "0", "d_c");
    }
    if (architecture_.positions == PositionKind::kRotary) {
      uses.Shared("rope_cos", Does::kRead).Shared("rope_sin", Does::kRead);
    }
    if (backward()) {
      GatherGradient(SegmentKind::kAttentionGradient);
      UseGradient(uses);
      uses.Kept("att", "", Does::kRead).Kept("lse", "", Does::kRead);
      uses.Kept("qkv", "", Does::kRead).Kept("qk", "", Does::kRead);
      uses.Workspace("d_a", cut() ? Does::kWrite : Does::kScratch);
      uses.Workspace("d_b", Does::kScratch).Workspace("scratch", Does::kScratch);
      if (!cut()) {
        uses.Workspace("parts", Does::kScratch).Workspace("d_c", Does::kWrite);
      }
    } else {
      uses.Kept("qkv", "d_a", projects ? Does::kWrite : Does::kRead);
      if (heads_have_norms_) {
        uses.Kept("qk", "d_a", Does::kWrite);
      }
      if (attends) {
        uses.Kept("att", "d_b", Does::kWrite).Kept("lse", "lse", Does::kWrite);
        uses.Workspace("scratch", Does::kScratch);
      }
      if (attends && !cut()) {
        uses.Workspace("parts", Does::kScratch);
      }
      if (recomputes() && remade("att") && !cut()) {
        uses.Kept("x0", "", Does::kRead).Kept("x1", "", Does::kWrite);
      } else if (!recomputes() && !cut()) {
        uses.Shared("hidden", Does::kChange);
      }
    }
    const std::vector<std::string_view>& inputs = architecture_.qkv.names;
    std::vector<std::string_view> names =
        NamesOf(architecture_.qkv, architecture_.attention_output);
    if (heads_have_norms_) {
      names.push_back(architecture_.query_norm);
      names.push_back(architecture_.key_norm);
    }
    Add(SegmentKind::kAttention, uses, names);
    if (cut() && backward()) {
      const Uses from = Begin().Workspace("d_a", Does::kRead);
      InputGradients(
          SegmentKind::kAttentionInputProduct, from, SegmentKind::kAttentionInput, inputs);
      InputWeights(SegmentKind::kAttentionWeights, from, "0", inputs);
    } else if (cut() && attends) {
      Outputs(SegmentKind::kAttentionOutput,
              Begin().Kept("att", "d_b", Does::kRead),
              SegmentKind::kAttentionResidual,
              architecture_.attention_output);
    }
  }

  // The maps of a block that one segment multiplies by.
  std::vector<std::string_view> NamesOf(const LinearNames& input, const LinearNames& output) const {
    std::vector<std::string_view> names;
    if (!cut() || !backward()) {
      names = input.names;
    }
    if (!cut() || backward()) {
      names.insert(names.end(), output.names.begin(), output.names.end());
    }
    return names;
  }

  void Mlp() {
    Uses uses = Begin();
    GatherNormed(SegmentKind::kMlpNormed, "1", "d_c");
    uses.Codes();
    if (!(cut() && backward())) {
      UseNormed(uses, "1", "d_c");
    }
    if (backward()) {
      GatherGradient(SegmentKind::kMlpGradient);
      UseGradient(uses);
      uses.Kept("mlp_in", "", Does::kChange);
      uses.Workspace("d_a", Does::kScratch).Workspace("d_b", Does::kScratch);
      if (!cut()) {
        uses.Workspace("parts", Does::kScratch).Workspace("d_c", Does::kWrite);
      }
    } else {
      uses.Kept("mlp_in", "d_b", Does::kWrite);
      if (!recomputes()) {
        uses.Workspace("d_a", cut() ? Does::kWrite : Does::kScratch);
      }
      if (!recomputes() && !cut()) {
        uses.Workspace("parts", Does::kScratch).Shared("hidden", Does::kChange);
      }
    }
    const std::vector<std::string_view>& inputs = architecture_.mlp_input.names;
    Add(SegmentKind::kMlp, uses, NamesOf(architecture_.mlp_input, architecture_.mlp_output));
    if (cut() && backward()) {
      const Uses from = Begin().Kept("mlp_in", "", Does::kRead);
      InputGradients(SegmentKind::kMlpInputProduct, from, SegmentKind::kMlpInput, inputs);
      InputWeights(SegmentKind::kMlpWeights, from, "1", inputs);
    } else if (cut() && !recomputes()) {
      Outputs(SegmentKind::kMlpOutput,
              Begin().Workspace("d_a", Does::kRead),
              SegmentKind::kMlpResidual,
              architecture_.mlp_output);
    }
  }

  void AttentionNorm() {
    Norm(SegmentKind::kAttentionNorm, "0", "x0", architecture_.attention_norm);
  }
  void MlpNorm() { Norm(SegmentKind::kMlpNorm, "1", "x1", architecture_.mlp_norm); }

  void Layer() {
    if (backward()) {
      Mlp();
      MlpNorm();
      Attention();
      AttentionNorm();
      return;
    }
    if (!recomputes() || remade("n0")) {
      AttentionNorm();
    }
    if (!recomputes() || remade("qkv") || remade("qk")) {
      Attention();
    }
    if (!recomputes() || remade("n1")) {
      MlpNorm();
    }
    if (!recomputes() || remade("mlp_in")) {
      Mlp();
    }
  }

  // The norm's input is `hidden` itself, which nothing writes between the passes.
  void FinalNorm() {
    Uses uses = Begin();
    uses.Shared("hidden", Does::kRead).Statistics("", backward() ? Does::kRead : Does::kWrite);
    if (backward()) {
      uses.Workspace("dn", Does::kRead).Shared("dhidden", Does::kWrite);
    } else {
      uses.Kept("n", "", Does::kWrite);
    }
    Add(SegmentKind::kFinalNorm, uses, {architecture_.final_norm});
  }

  void Loss() {
    const std::string_view table =
        inventory_.config.tie_word_embeddings ? architecture_.token_table : architecture_.head;
    Uses uses = Begin();
    uses.Kept("n", "", Does::kRead).Shared("targets", Does::kRead).Shared("loss", Does::kWrite);
    uses.Workspace("logits", Does::kScratch).Workspace("vocabulary", Does::kScratch);
    if (backward()) {
      uses.Workspace("dn", Does::kWrite).Workspace("parts", Does::kScratch);
    }
    Add(SegmentKind::kLoss, uses, {table});
  }

  // The loss of a vocabulary that ranks have parts of, chunk by chunk of tokens.
  void CutLoss() {
    const std::string_view table =
        inventory_.config.tie_word_embeddings ? architecture_.token_table : architecture_.head;
    const int64_t chunks = LossChunks(inventory_, unit_);
    GatherNormed(SegmentKind::kLossNormed, "", "");
    for (int chunk = 0; chunk < chunks; ++chunk) {
      Uses own = Begin();
      UseNormed(own, "", "");
      own.Shared("targets", Does::kRead);
      own.Workspace("logits", Does::kWrite);
      SegmentSpec& statistics = Add(SegmentKind::kLossStatistics, own, {table});
      statistics.gradients.clear();
      statistics.chunk = chunk;
      statistics.chunks = chunks;
      statistics.move = SegmentMove::kGather;
      statistics.target = Begin().Workspace("vocabulary", Does::kWrite).Take().front();
      Uses all = Begin();
      all.Shared("targets", Does::kRead).Shared("loss", Does::kChange);
      all.Workspace("vocabulary", Does::kChange);
      if (backward()) {
        UseNormed(all, "", "");
        all.Workspace("logits", Does::kChange);
        all.Workspace("parts", Does::kScratch);
      }
      const auto names = std::vector<std::string_view>(backward() ? 1 : 0, table);
      SegmentSpec& losses = Add(SegmentKind::kLossOfChunk, all, names);
      losses.chunk = chunk;
      losses.chunks = chunks;
      losses.addend = backward();
    }
    if (backward()) {
      AddSum(SegmentKind::kLossInput, Begin().Workspace("dn", Does::kWrite), Begin());
    }
  }

  void Head() {
    if (recomputes()) {
      return;
    }
    if (!backward()) {
      FinalNorm();
    }
    // A forward leaves losses to the backward, which follows at once.
    if (pass_ != UnitPass::kForward) {
      cut() ? CutLoss() : Loss();
    }
    if (backward()) {
      FinalNorm();
    }
  }

  const ModelInventory& inventory_;
  const Architecture& architecture_;
  const UnitSpec& unit_;
  const UnitPass pass_;
  const bool heads_have_norms_;
  std::string prefix_;
  std::vector<SegmentSpec> segments_;
};

}  // namespace

int64_t TensorRanks(const ModelInventory& inventory) {
  return inventory.cut.degree;
}

const ActivationSpec* FindActivation(const std::vector<ActivationSpec>& specs,
                                     std::string_view name) {
  const auto found = std::find_if(
      specs.begin(), specs.end(), [&](const ActivationSpec& spec) { return spec.name == name; });
  return found == specs.end() ? nullptr : &*found;
}

int64_t LossChunks(const ModelInventory& inventory, const UnitSpec& head) {
  const ActivationSpec* losses = FindActivation(inventory.shared, "loss");
  const ActivationSpec* logits = FindActivation(head.workspace, "logits");
  CHECK_MSG(losses != nullptr && logits != nullptr, "a head has losses and logits");
  return DivCeil(losses->shape[0], logits->shape[0]);
}

const ActivationSpec& InputGradientSpec(const ModelInventory& inventory) {
  const ActivationSpec* hidden = FindActivation(inventory.shared, "hidden");
  CHECK_MSG(hidden != nullptr, "units hand `hidden` to each other");
  return *hidden;
}

Shape StreamShape(const ModelInventory& inventory) {
  Shape shape = InputGradientSpec(inventory).shape;
  shape[0] *= inventory.cut.sequence ? inventory.cut.degree : 1;
  return shape;
}

std::vector<SegmentSpec> SegmentsOf(const ModelInventory& inventory, UnitId unit, UnitPass pass) {
  return SegmentList(inventory, unit, pass).Make();
}

}  // namespace ravel::plan
