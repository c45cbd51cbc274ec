// The options of a planned program. A type travels as the bytes of an element, and 0 has the
// meaning it had before there was a choice.

#include <algorithm>
#include <cstdint>

#include <absl/strings/str_cat.h>

#include "common/model/attention_workspace.h"
#include "common/model/gemm_paths.h"
#include "common/model/logits_chunk.h"
#include "common/model/recipes.h"
#include "common/plan/plan_parts_proto.h"
#include "common/plan/plan_proto.h"
#include "common/plan/sharding_plan.h"

namespace ravel::plan {
namespace {

// 0 in the second field, as in plans that were made before the two could differ: as the first.
absl::Status StateTypesFromProto(const v1::PlannedOptions& proto, StateTypes& types) {
  const auto read = [](const char* name, int64_t bytes, DType fp8, DType& to) {
    to = bytes == 2 ? DType::kBF16 : bytes == 1 ? fp8 : DType::kF32;
    return bytes == 0 || bytes == 1 || bytes == 2 || bytes == 4
               ? absl::OkStatus()
               : Invalid(absl::StrCat("options.", name, ": expected 1, 2 or 4, got ", bytes));
  };
  const int64_t mean = proto.state_element_bytes();
  const int64_t square = proto.square_element_bytes();
  RETURN_IF_ERROR(read("state_element_bytes", mean, kFp8Mean, types.mean));
  RETURN_IF_ERROR(
      read("square_element_bytes", square == 0 ? mean : square, kFp8Square, types.square));
  return absl::OkStatus();
}

// A type travels as the bytes of an element. 0: fp32, written before there was a choice.
absl::Status TypesFromProto(const v1::PlannedOptions& proto, ProgramOptions& options) {
  const auto read = [](const char* name, int64_t bytes, DType narrow, DType& to) {
    to = bytes == 2 ? narrow : DType::kF32;
    return bytes == 0 || bytes == 2 || bytes == 4
               ? absl::OkStatus()
               : Invalid(absl::StrCat("options.", name, ": expected 2 or 4, got ", bytes));
  };
  const DType narrow_weight = proto.fp16_weights() ? DType::kF16 : DType::kBF16;
  RETURN_IF_ERROR(read(
      "weight_element_bytes", proto.weight_element_bytes(), narrow_weight, options.weight_type));
  if (proto.fp16_weights() && options.weight_type != DType::kF16) {
    return Invalid("options.fp16_weights: needs weight_element_bytes 2");
  }
  RETURN_IF_ERROR(
      read("main_element_bytes", proto.main_element_bytes(), DType::kI16, options.main_type));
  RETURN_IF_ERROR(StateTypesFromProto(proto, options.state_types));
  RETURN_IF_ERROR(read(
      "staged_element_bytes", proto.staged_element_bytes(), DType::kBF16, options.staged_type));
  return options.weight_type != DType::kBF16 && options.main_type != DType::kF32
             ? Invalid("options: fp16 and fp32 weights have fp32 main weights")
             : absl::OkStatus();
}

// The options of quantized matrices and their gemms.
absl::Status RecipeFromProto(const v1::PlannedOptions& proto, ProgramOptions& options) {
  options.amax_history = proto.amax_history();
  options.amax_margin = proto.amax_margin();
  if (proto.amax_history() < 0 || proto.amax_history() > kMostAmaxHistory ||
      proto.amax_margin() < 0 || proto.amax_margin() > kMostAmaxMargin) {
    return Invalid("options: amax_history or amax_margin out of range");
  }
  GemmPath& path = options.gemm_path;
  RETURN_IF_ERROR(ReadEnum("options.gemm_path", proto.gemm_path(), kLastGemmPath, path));
  FastAccumulation& fast = options.fast_accumulation;
  RETURN_IF_ERROR(ReadEnum(
      "options.fast_accumulation", proto.fast_accumulation(), kLastFastAccumulation, fast));
  if (fast != FastAccumulation::kForward && !MayAccumulateFast(path)) {
    return Invalid("options.fast_accumulation: not of this gemm path");
  }
  RETURN_IF_ERROR(ReadEnum("options.amax_algorithm",
                           proto.amax_algorithm(),
                           AmaxAlgorithm::kMostRecent,
                           options.amax_algorithm));
  RETURN_IF_ERROR(
      ReadEnum("options.first_scale", proto.first_scale(), FirstScale::kOnes, options.first_scale));
  options.amax_epsilon = proto.amax_epsilon();
  if (!(proto.amax_epsilon() >= 0 && proto.amax_epsilon() <= kMostAmaxEpsilon)) {
    return Invalid("options.amax_epsilon: out of range");
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status OptionsFromProto(const v1::PlannedOptions& proto, ShardingPlan& plan) {
  plan.options = {.ranks = plan.ranks,
                  .gather_in_place = proto.gather_in_place(),
                  .read_peers_in_place = proto.read_peers_in_place(),
                  .gather_window_bytes = proto.gather_window_bytes(),
                  .staging_window_bytes = proto.staging_window_bytes(),
                  .prefetch = proto.prefetch(),
                  .replicas = plan.lanes.replicas,
                  .communication_blocks = proto.communication_blocks()};
  if (plan.options.communication_blocks < 0 ||
      plan.options.communication_blocks > kMostCommunicationBlocks) {
    return Invalid(absl::StrCat("options.communication_blocks: expected 0 to ",
                                kMostCommunicationBlocks,
                                ", got ",
                                plan.options.communication_blocks));
  }
  plan.options.attention_workspace_bytes = proto.attention_workspace_bytes();
  if (proto.attention_workspace_bytes() < 0 ||
      proto.attention_workspace_bytes() > kMostPlannedBytes) {
    return Invalid("options.attention_workspace_bytes: out of range");
  }
  if (proto.logits_chunk_tokens() != 0) {
    plan.options.logits_chunk_tokens = proto.logits_chunk_tokens();
  }
  if (plan.options.logits_chunk_tokens < 1 ||
      plan.options.logits_chunk_tokens > kMostLogitsTokens) {
    return Invalid(absl::StrCat("options.logits_chunk_tokens: expected 1 to ",
                                kMostLogitsTokens,
                                ", got ",
                                plan.options.logits_chunk_tokens));
  }
  plan.options.tensor_parts = std::max<int64_t>(1, proto.tensor_parts());
  RETURN_IF_ERROR(CheckLayerDrop("options.layer_drop", proto.layer_drop()));
  plan.options.layer_drop = proto.layer_drop();
  RETURN_IF_ERROR(RecipeFromProto(proto, plan.options));
  RETURN_IF_ERROR(CheckOffloadFraction("options.offload_fraction", proto.offload_fraction()));
  plan.options.offload_fraction = proto.offload_fraction();
  plan.options.offload_copies = proto.offload_copies();
  RETURN_IF_ERROR(TypesFromProto(proto, plan.options));
  RETURN_IF_ERROR(
      ReadEnum("options.optimizer", proto.optimizer(), kLastOptimizer, plan.options.optimizer));
  RETURN_IF_ERROR(ReadEnum(
      "options.gradient_wire", proto.gradient_wire(), WireType::kBF16, plan.options.gradient_wire));
  if (plan.options.staged_type != kGradientType &&
      (plan.options.gradient_wire != WireType::kBF16 || plan.options.weight_type != DType::kBF16)) {
    return Invalid("options.staged_element_bytes: 2 needs a bf16 wire and bf16 weights");
  }
  return ReadEnum(
      "options.recompute", proto.recompute(), RecomputePolicy::kBlock, plan.options.recompute);
}

void OptionsToProto(const ProgramOptions& options, v1::PlannedOptions& proto) {
  proto.set_gather_in_place(options.gather_in_place);
  proto.set_read_peers_in_place(options.read_peers_in_place);
  proto.set_gather_window_bytes(options.gather_window_bytes);
  proto.set_staging_window_bytes(options.staging_window_bytes);
  proto.set_prefetch(options.prefetch);
  proto.set_recompute(static_cast<int32_t>(options.recompute));
  proto.set_weight_element_bytes(DTypeBytes(options.weight_type));
  proto.set_fp16_weights(options.weight_type == DType::kF16);
  proto.set_gradient_wire(static_cast<int32_t>(options.gradient_wire));
  proto.set_communication_blocks(options.communication_blocks);
  proto.set_attention_workspace_bytes(options.attention_workspace_bytes);
  // Plans that were made before there was a choice keep their hashes.
  const auto bytes_of = [](DType type) { return type == DType::kF32 ? 0 : DTypeBytes(type); };
  proto.set_main_element_bytes(bytes_of(options.main_type));
  proto.set_state_element_bytes(bytes_of(options.state_types.mean));
  if (DTypeBytes(options.state_types.square) != DTypeBytes(options.state_types.mean)) {
    proto.set_square_element_bytes(DTypeBytes(options.state_types.square));
  }
  proto.set_staged_element_bytes(bytes_of(options.staged_type));
  proto.set_optimizer(static_cast<int32_t>(options.optimizer));
  proto.set_layer_drop(options.layer_drop);
  proto.set_amax_history(options.amax_history);
  proto.set_amax_margin(options.amax_margin);
  proto.set_offload_fraction(options.offload_fraction);
  proto.set_offload_copies(options.offload_copies);
  proto.set_gemm_path(static_cast<int32_t>(options.gemm_path));
  proto.set_fast_accumulation(static_cast<int32_t>(options.fast_accumulation));
  proto.set_amax_algorithm(static_cast<int32_t>(options.amax_algorithm));
  proto.set_first_scale(static_cast<int32_t>(options.first_scale));
  proto.set_amax_epsilon(options.amax_epsilon);
  proto.set_tensor_parts(options.tensor_parts == 1 ? 0 : options.tensor_parts);
  proto.set_logits_chunk_tokens(
      options.logits_chunk_tokens == kLogitsChunkTokens ? 0 : options.logits_chunk_tokens);
}

}  // namespace ravel::plan
