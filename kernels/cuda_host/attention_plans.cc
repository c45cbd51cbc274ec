// Chooses an attention plan once per description and keeps it. A plan whose workspace is too large
// is built again for fewer sequences, then for fewer key heads (divided by the smallest prime
// factor each time), until it fits; the op then runs once per part. Sequences and heads are
// independent, so the parts compute what the whole would. Every refusal falls back to our own
// kernel with the reason kept as text.

#include "kernels/cuda_host/attention_plans.h"

#include <algorithm>
#include <bit>
#include <type_traits>

#include <absl/strings/str_cat.h>

#include "common/check.h"
#include "common/dtype.h"

namespace ravel::kernels::cuda {
namespace {

constexpr int64_t kNarrowBytes = 2;  // of bf16 and fp16

int64_t SmallestPrimeFactor(int64_t number) {
  for (int64_t factor = 2; factor * factor <= number; ++factor) {
    if (number % factor == 0) {
      return factor;
    }
  }
  return number;
}

template <typename Pointer>
Pointer Advance(Pointer pointer, int64_t elements) {
  using Byte =
      std::conditional_t<std::is_const_v<std::remove_pointer_t<Pointer>>, const char, char>;
  return pointer == nullptr ? pointer : static_cast<Byte*>(pointer) + elements * kNarrowBytes;
}

std::string TextOf(const RavelCudaAttentionPlan& plan,
                   const AttentionPart& part,
                   const RavelCudaAttention& attention) {
  std::string text = absl::StrCat("cuDNN, ",
                                  plan.unified != 0 ? "one node" : "chain",
                                  ", engine ",
                                  plan.engine,
                                  ", workspace ",
                                  plan.workspace_bytes);
  if (part.sequences < attention.sequences || part.kv_heads < attention.kv_heads) {
    absl::StrAppend(
        &text, ", in parts of ", part.sequences, " sequences and ", part.kv_heads, " key heads");
  }
  return text;
}

}  // namespace

std::string AttentionKey(const RavelCudaAttention& a) {
  std::string key = absl::StrCat(a.backward != 0 ? "bwd" : "fwd",
                                 a.backward != 0 && a.deterministic != 0 ? "-det-" : "-",
                                 static_cast<DType>(a.type) == DType::kF16 ? "fp16-" : "",
                                 a.sequences,
                                 "x",
                                 a.sequence_tokens,
                                 "x",
                                 a.query_heads,
                                 "of",
                                 a.kv_heads,
                                 "x",
                                 a.head_size);
  absl::StrAppend(&key, "-s", a.q_stride, ",", a.k_stride, ",", a.v_stride, ",", a.out_stride);
  if (a.backward != 0) {
    absl::StrAppend(&key, ",", a.dout_stride, ",", a.dq_stride, ",", a.dk_stride, ",", a.dv_stride);
  }
  // All bits of the scale: a plan keeps it.
  return absl::StrCat(key, "-c", absl::Hex(std::bit_cast<uint32_t>(a.scale)));
}

RavelCudaAttention PartOf(const RavelCudaAttention& attention, const AttentionPart& part) {
  RavelCudaAttention cut = attention;
  const int64_t group = DivExact(attention.query_heads, attention.kv_heads);
  cut.sequences = part.sequences;
  cut.kv_heads = part.kv_heads;
  cut.query_heads = part.kv_heads * group;
  return cut;
}

RavelCudaAttentionBuffers PartOf(const RavelCudaAttention& a,
                                 const RavelCudaAttentionBuffers& whole,
                                 int64_t first_sequence,
                                 int64_t first_kv_head) {
  const int64_t token = first_sequence * a.sequence_tokens;
  const int64_t query_head = first_kv_head * DivExact(a.query_heads, a.kv_heads);
  const int64_t query = query_head * a.head_size;
  const int64_t key = first_kv_head * a.head_size;
  RavelCudaAttentionBuffers part = whole;
  part.q = Advance(whole.q, token * a.q_stride + query);
  part.k = Advance(whole.k, token * a.k_stride + key);
  part.v = Advance(whole.v, token * a.v_stride + key);
  part.out = Advance(whole.out, token * a.out_stride + query);
  part.log_sum_exp = whole.log_sum_exp + token * a.query_heads + query_head * a.sequence_tokens;
  part.dout = Advance(whole.dout, token * a.dout_stride + query);
  part.dq = Advance(whole.dq, token * a.dq_stride + query);
  part.dk = Advance(whole.dk, token * a.dk_stride + key);
  part.dv = Advance(whole.dv, token * a.dv_stride + key);
  return part;
}

bool PartsOnVectors(const RavelCudaAttention& a, const AttentionPart& part) {
  constexpr int64_t kVectorElements = 4;  // of fp32
  const int64_t heads = part.kv_heads * DivExact(a.query_heads, a.kv_heads);
  return (part.sequences == a.sequences ||
          part.sequences * a.query_heads * a.sequence_tokens % kVectorElements == 0) &&
         (part.kv_heads == a.kv_heads || heads * a.sequence_tokens % kVectorElements == 0);
}

AttentionPart SmallerPart(const AttentionPart& part) {
  if (part.sequences > 1) {
    return {DivExact(part.sequences, SmallestPrimeFactor(part.sequences)), part.kv_heads};
  }
  if (part.kv_heads > 1) {
    return {1, DivExact(part.kv_heads, SmallestPrimeFactor(part.kv_heads))};
  }
  return {};
}

AttentionPlans::~AttentionPlans() {
  Clear();
}

void AttentionPlans::Clear() {
  for (auto& [key, choice] : choices_) {
    if (choice.plan != nullptr) {
      destroy_(choice.plan);
    }
  }
  choices_.clear();
}

const AttentionChoice* AttentionPlans::Find(const RavelCudaAttention& attention) const {
  const auto found = choices_.find(AttentionKey(attention));
  return found == choices_.end() ? nullptr : &found->second;
}

const AttentionChoice& AttentionPlans::Choose(const RavelCudaAttention& attention,
                                              uint64_t workspace_bytes,
                                              const Build& build) {
  const auto [place, fresh] = choices_.try_emplace(AttentionKey(attention));
  AttentionChoice& choice = place->second;
  if (!fresh) {
    return choice;
  }
  AttentionPart part = {attention.sequences, attention.kv_heads};
  for (; part.sequences > 0; part = SmallerPart(part)) {
    if (!PartsOnVectors(attention, part)) {
      continue;
    }
    const absl::StatusOr<RavelCudaAttentionPlan> plan = build(PartOf(attention, part));
    if (!plan.ok()) {
      choice.text = absl::StrCat("our own kernel, because ", plan.status().message());
      return choice;
    }
    if (choice.whole_workspace_bytes == 0) {
      choice.whole_workspace_bytes = plan->workspace_bytes;
    }
    if (plan->workspace_bytes <= workspace_bytes) {
      choice.plan = plan->plan;
      choice.part = part;
      choice.workspace_bytes = plan->workspace_bytes;
      choice.text = TextOf(*plan, part, attention);
      return choice;
    }
    destroy_(plan->plan);
  }
  choice.text =
      absl::StrCat("our own kernel, because cuDNN needs a workspace of ",
                   choice.whole_workspace_bytes,
                   " bytes and even the smallest part that begins on 16 bytes more than the ",
                   workspace_bytes,
                   " that there are");
  return choice;
}

std::string AttentionPlans::ToText() const {
  std::string text;
  for (const auto& [key, choice] : choices_) {
    absl::StrAppend(&text, key, ": ", choice.text, "\n");
  }
  return text;
}

uint64_t AttentionPlans::WholeWorkspaceBytes() const {
  uint64_t bytes = 0;
  for (const auto& [key, choice] : choices_) {
    bytes = std::max(bytes, choice.whole_workspace_bytes);
  }
  return bytes;
}

}  // namespace ravel::kernels::cuda
