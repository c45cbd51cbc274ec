#pragma once

// Which engine computes which attention: asked once per description, before the first step. A plan
// may need more workspace than there is; then it is for a part of the sequences or of the key heads
// and runs as often as there are parts. Where cuDNN takes a description under no circumstances, our
// own kernel does, and the reason is kept.

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include <absl/status/statusor.h>

#include "kernels/cuda/cuda_abi.h"

namespace ravel::kernels::cuda {

// A description as a word: direction, type where it is fp16, sizes, strides, scale, deterministic
// or not; "fwd-1x8192x32of8x128-s6144,6144,6144,4096-l8192-c3db504f3".
std::string AttentionKey(const RavelCudaAttention& attention);

// How a description is cut: sequences of a part, then key heads of a part; both divide.
struct AttentionPart {
  int64_t sequences = 0;
  int64_t kv_heads = 0;
};
// The description of a part. Strides stay: parts lie in the same matrices.
RavelCudaAttention PartOf(const RavelCudaAttention& attention, const AttentionPart& part);
// Operands of the part that begins with this sequence and this key head.
RavelCudaAttentionBuffers PartOf(const RavelCudaAttention& attention,
                                 const RavelCudaAttentionBuffers& buffers,
                                 int64_t first_sequence,
                                 int64_t first_kv_head);
// Returns true if every part's statistics begin on 16 bytes where the whole's do: cuDNN refuses
// operands that do not. Rows of heads do so whenever one of them does.
bool PartsOnVectors(const RavelCudaAttention& attention, const AttentionPart& part);
// The next smaller part: fewer sequences first, by their smallest prime factor; zeros after the
// smallest.
AttentionPart SmallerPart(const AttentionPart& part);

struct AttentionChoice {
  void* plan = nullptr;  // null: our own kernel
  AttentionPart part;
  uint64_t workspace_bytes = 0;        // of the plan
  uint64_t whole_workspace_bytes = 0;  // of a plan for everything at once
  std::string text;                    // what runs, or why not cuDNN
};

// One device's choices. Thread-compatible.
class AttentionPlans {
 public:
  // Builds a plan; Unavailable with the reason where no engine takes the description.
  using Build = std::function<absl::StatusOr<RavelCudaAttentionPlan>(const RavelCudaAttention&)>;
  using Destroy = std::function<void(void* plan)>;

  explicit AttentionPlans(Destroy destroy) : destroy_(std::move(destroy)) {}
  ~AttentionPlans();
  AttentionPlans(const AttentionPlans&) = delete;
  AttentionPlans& operator=(const AttentionPlans&) = delete;

  // Null before Choose.
  const AttentionChoice* Find(const RavelCudaAttention& attention) const;
  // Builds until a plan's workspace fits. Once per description.
  const AttentionChoice& Choose(const RavelCudaAttention& attention,
                                uint64_t workspace_bytes,
                                const Build& build);
  // Forgets all choices, as for another size of workspace.
  void Clear();

  // One line per description, in the order of keys: "KEY: TEXT".
  std::string ToText() const;
  // The largest workspace that a plan without parts would need.
  uint64_t WholeWorkspaceBytes() const;

 private:
  Destroy destroy_;
  std::map<std::string, AttentionChoice> choices_;
};

}  // namespace ravel::kernels::cuda
