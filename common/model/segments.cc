// What each segment touches, by the names of model_activations. Two facts decide where an
// activation lies: whether the recompute policy keeps it, and whether the pass comes before the
// recomputation, when what it will make again lies in an area of the workspace.

#include "common/model/segments.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include <absl/strings/str_cat.h>

#include "common/model/architecture/architecture.h"

namespace ravel::plan {
namespace {

enum class Does { kRead, kWrite, kChange, kScratch };

bool Declares(const std::vector<ActivationSpec>& specs, std::string_view name) {
  return std::any_of(
      specs.begin(), specs.end(), [&](const ActivationSpec& spec) { return spec.name == name; });
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
    if (pass_ == UnitPass::kBackward) {
      std::reverse(segments_.begin(), segments_.end());
    }
    return std::move(segments_);
  }

 private:
  bool backward() const { return pass_ == UnitPass::kBackward; }
  bool recomputes() const { return pass_ == UnitPass::kRecompute; }
  bool remade(std::string_view name) const { return Declares(unit_.remade, name); }
  Uses Begin() const { return Uses(unit_, pass_); }

  void Add(SegmentKind kind, Uses& uses, const std::vector<std::string_view>& names) {
    SegmentSpec segment = {.kind = kind, .uses = uses.Take(), .weights = {}};
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
    segments_.push_back(std::move(segment));
  }

  void Table() {
    if (recomputes()) {
      return;
    }
    Uses uses = Begin();
    uses.Shared("ids", Does::kRead);
    uses.Shared(backward() ? "dhidden" : "hidden", backward() ? Does::kRead : Does::kWrite);
    Add(SegmentKind::kTable, uses, {architecture_.token_table});
  }

  void Positions() {
    if (recomputes()) {
      return;
    }
    Uses uses = Begin();
    uses.Shared(backward() ? "dhidden" : "hidden", backward() ? Does::kRead : Does::kChange);
    Add(SegmentKind::kPositions, uses, {architecture_.position_table});
  }

  // A norm over the residual stream that keeps its input as `input`.
  void Norm(SegmentKind kind,
            const std::string& index,
            const std::string& input,
            std::string_view name) {
    Uses uses = Begin();
    if (backward()) {
      uses.Workspace("d_c", Does::kRead).Kept(input, "", Does::kRead);
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
    Uses uses = Begin();
    if (projects) {
      uses.Kept("n0", "d_c", Does::kRead).Codes();
    }
    if (architecture_.positions == PositionKind::kRotary) {
      uses.Shared("rope_cos", Does::kRead).Shared("rope_sin", Does::kRead);
    }
    if (backward()) {
      uses.Shared("dhidden", Does::kRead).Kept("att", "", Does::kRead).Kept("lse", "", Does::kRead);
      uses.Kept("qkv", "", Does::kRead).Kept("qk", "", Does::kRead);
      uses.Workspace("d_a", Does::kScratch).Workspace("d_b", Does::kScratch);
      uses.Workspace("d_c", Does::kWrite).Workspace("scratch", Does::kScratch);
      uses.Workspace("parts", Does::kScratch);
    } else {
      uses.Kept("qkv", "d_a", projects ? Does::kWrite : Does::kRead);
      if (heads_have_norms_) {
        uses.Kept("qk", "d_a", Does::kWrite);
      }
      if (!recomputes() || remade("att")) {
        uses.Kept("att", "d_b", Does::kWrite).Kept("lse", "lse", Does::kWrite);
        uses.Workspace("scratch", Does::kScratch).Workspace("parts", Does::kScratch);
      }
      if (recomputes() && remade("att")) {
        uses.Kept("x0", "", Does::kRead).Kept("x1", "", Does::kWrite);
      } else if (!recomputes()) {
        uses.Shared("hidden", Does::kChange);
      }
    }
    std::vector<std::string_view> names = architecture_.qkv.names;
    for (const std::string_view name : architecture_.attention_output.names) {
      names.push_back(name);
    }
    if (heads_have_norms_) {
      names.push_back(architecture_.query_norm);
      names.push_back(architecture_.key_norm);
    }
    Add(SegmentKind::kAttention, uses, names);
  }

  void Mlp() {
    Uses uses = Begin();
    uses.Kept("n1", "d_c", Does::kRead).Codes();
    if (backward()) {
      uses.Shared("dhidden", Does::kRead).Kept("mlp_in", "", Does::kChange);
      uses.Workspace("d_a", Does::kScratch).Workspace("d_b", Does::kScratch);
      uses.Workspace("d_c", Does::kWrite).Workspace("parts", Does::kScratch);
    } else {
      uses.Kept("mlp_in", "d_b", Does::kWrite);
      if (!recomputes()) {
        uses.Workspace("d_a", Does::kScratch).Workspace("parts", Does::kScratch);
        uses.Shared("hidden", Does::kChange);
      }
    }
    std::vector<std::string_view> names = architecture_.mlp_input.names;
    for (const std::string_view name : architecture_.mlp_output.names) {
      names.push_back(name);
    }
    Add(SegmentKind::kMlp, uses, names);
  }

  void Layer() {
    if (!recomputes() || remade("n0")) {
      Norm(SegmentKind::kAttentionNorm, "0", "x0", architecture_.attention_norm);
    }
    if (!recomputes() || remade("qkv") || remade("qk")) {
      Attention();
    }
    if (!recomputes() || remade("n1")) {
      Norm(SegmentKind::kMlpNorm, "1", "x1", architecture_.mlp_norm);
    }
    if (!recomputes() || remade("mlp_in")) {
      Mlp();
    }
  }

  // The norm's input is `hidden` itself, which nothing writes between the passes.
  void Head() {
    if (recomputes()) {
      return;
    }
    Uses norm = Begin();
    norm.Shared("hidden", Does::kRead);
    const Does kept = backward() ? Does::kRead : Does::kWrite;
    norm.Statistics("", kept);
    if (backward()) {
      norm.Workspace("dn", Does::kRead).Shared("dhidden", Does::kWrite);
    } else {
      norm.Kept("n", "", Does::kWrite);
    }
    Add(SegmentKind::kFinalNorm, norm, {architecture_.final_norm});
    if (pass_ == UnitPass::kForward) {
      return;  // losses are made by the backward, which follows at once
    }
    Uses loss = Begin();
    loss.Kept("n", "", Does::kRead).Shared("targets", Does::kRead).Shared("loss", Does::kWrite);
    loss.Workspace("logits", Does::kScratch);
    loss.Workspace("vocabulary", Does::kScratch);
    if (backward()) {
      loss.Workspace("dn", Does::kWrite).Workspace("parts", Does::kScratch);
    }
    const bool tied = inventory_.config.tie_word_embeddings;
    Add(SegmentKind::kLoss, loss, {tied ? architecture_.token_table : architecture_.head});
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

const char* SegmentName(SegmentKind kind) {
  switch (kind) {
    case SegmentKind::kTable:
      return "table";
    case SegmentKind::kPositions:
      return "positions";
    case SegmentKind::kAttentionNorm:
      return "attention_norm";
    case SegmentKind::kAttention:
      return "attention";
    case SegmentKind::kMlpNorm:
      return "mlp_norm";
    case SegmentKind::kMlp:
      return "mlp";
    case SegmentKind::kFinalNorm:
      return "final_norm";
    case SegmentKind::kLoss:
      return "loss";
  }
  return "?";
}

const char* UnitPassName(UnitPass pass) {
  switch (pass) {
    case UnitPass::kForward:
      return "forward";
    case UnitPass::kEvaluate:
      return "evaluate";
    case UnitPass::kRecompute:
      return "recompute";
    case UnitPass::kBackward:
      return "backward";
  }
  return "?";
}

std::vector<SegmentSpec> SegmentsOf(const ModelInventory& inventory, UnitId unit, UnitPass pass) {
  return SegmentList(inventory, unit, pass).Make();
}

}  // namespace ravel::plan
