// Updates whose main weights, gradients or states are not all fp32, in blocks of a row: a state of
// fp8 takes the new scale of a group from all of its new values.

#include "kernels/cpu/grouped_update.h"

#include <algorithm>
#include <span>

#include "common/check.h"
#include "common/signed_size.h"
#include "kernels/cpu/simd_ops.h"
#include "kernels/cpu/update_block.h"

namespace ravel::kernels::cpu {
namespace {

// Elements from `at` on; null where they are absent.
template <typename T>
T* From(const TensorView& view, int64_t at) {
  return view.present() ? view.As<T>() + at : nullptr;
}

StateBlock StateFrom(const TensorView& state, const TensorView& scales, int64_t at, int64_t scale) {
  if (!state.present()) {
    return {};
  }
  switch (state.dtype) {
    case DType::kBF16:
      return {.values = state.As<uint16_t>() + at, .form = StateForm::kBf16};
    case DType::kF8E4M3:
    case DType::kU8:
      return {.values = state.As<uint8_t>() + at,
              .form = StateForm::kFp8,
              .scale = scales.As<uint8_t>() + scale};
    default:
      return {.values = state.As<float>() + at, .form = StateForm::kF32};
  }
}

}  // namespace

void UpdateBlocks(const GroupedUpdateArgs& args,
                  const UpdatePiece& piece,
                  const UpdateScalars& scalars,
                  uint32_t step) {
  const ElementUpdateArgs& update = args.update;
  const bool bf16_gradient = update.g.dtype == DType::kBF16;
  UpdateBlock block = {.fp16_weight = update.weight.dtype == DType::kF16,
                       .bf16_gradient = bf16_gradient,
                       .seed = update.seed,
                       .site = piece.site,
                       .step = step,
                       .rule = update.rule,
                       .scalars = scalars};
  // Rows matter where groups of fp8 states end with them.
  const bool groups = args.m_scales.present() || args.v_scales.present();
  const bool by_rows = groups && piece.row > 0 && piece.row % kUpdateGroup != 0;
  const int64_t row = by_rows ? piece.row : std::max<int64_t>(1, piece.elements);
  int64_t scale = piece.first_scale;
  for (int64_t done = 0; done < piece.elements; done += block.elements) {
    const int64_t at = piece.offset + done;
    block.elements = std::min(row - done % row, piece.elements - done);
    block.index = static_cast<uint64_t>(piece.first_index + done);
    block.main = From<float>(update.main_weight, at);
    block.weight = From<uint16_t>(update.weight, at);
    block.remainder = From<int16_t>(update.remainder, at);
    block.gradient = update.g.As<char>() + at * (bf16_gradient ? 2 : 4);
    block.mean = StateFrom(update.m, args.m_scales, at, scale);
    block.square = StateFrom(update.v, args.v_scales, at, scale);
    ActiveOps().update_block(block);
    scale += DivCeil(block.elements, kUpdateGroup);
  }
}

void GroupedUpdate(const GroupedUpdateArgs& args) {
  const ElementUpdateArgs& update = args.update;
  if (update.apply != nullptr && *update.apply == 0) {
    return;
  }
  scalar::ForEachRule([&](auto rule) {
    using Rule = decltype(rule);
    if (Rule::kRule == update.rule) {
      CHECK_MSG(Rule::kNarrowStates, "states are fp32");
      CHECK_MSG(update.v.present() == (Rule::kStates > 1) || update.g.elements() == 0,
                "another number of states");
    }
  });
  UpdateScalars scalars =
      update.device_scalars != nullptr ? *update.device_scalars : update.scalars;
  const float decay = scalars.weight_decay;
  const uint32_t step =
      update.device_step != nullptr ? static_cast<uint32_t>(*update.device_step) : update.step;
  for (const UpdatePiece& piece : std::span(update.table.pieces, Size(update.table.count))) {
    scalars.weight_decay = piece.decays != 0 ? decay : 0.0f;
    UpdateBlocks(args, piece, scalars, step);
  }
}

}  // namespace ravel::kernels::cpu
