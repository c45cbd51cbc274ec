#pragma once

// The arguments of the kernels that update weights, as kernel_params.h has those of all others.

#include <cstdint>

namespace ravel::kernels::cuda {

// The fields of kernels::UpdateScalars, in its order.
struct DeviceUpdateScalars {
  float beta1;
  float beta2;
  float one_minus_beta1;
  float one_minus_beta2;
  float inverse_correction1;
  float inverse_correction2;
  float epsilon;
  float learning_rate;
  float weight_decay;
  float gradient_scale;
};

// kernels::kMaxBlockElements.
inline constexpr int64_t kBlockElements = 4096;

// kernels::UpdatePiece.
struct DeviceUpdatePiece {
  int64_t offset;
  int64_t elements;
  int64_t first_index;
  uint32_t site;
  uint32_t decays;
  int64_t row;
  int64_t first_scale;
  int64_t unused[2];  // a power of two: its address is a shift, which saves a register
};

// kernels::PieceTable, or, where there is none, all of `elements` cut for blocks.
struct DevicePieces {
  const DeviceUpdatePiece* table;
  int64_t count;
  int64_t elements;
  int64_t first_index;  // without a table
  uint32_t site;
  int32_t unused;
};

struct AdamWParams {
  float* p;
  const float* g;
  float* m;
  float* v;
  DevicePieces pieces;
  const DeviceUpdateScalars* device_scalars;  // read in place of `scalars` when present
  const int32_t* apply;                       // when present and 0 nothing changes
  DeviceUpdateScalars scalars;
};

struct ElementUpdateParams {
  float* main_weight;  // fp32 form, or null
  uint16_t* weight;    // bf16 or fp16 model weight; may be null in the fp32 form
  int16_t* remainder;  // remainder form, or null
  const void* g;       // fp32, or bf16 in the bf16 variants
  void* m;             // fp32 or bf16
  void* v;
  DevicePieces pieces;
  const DeviceUpdateScalars* device_scalars;  // read in place of `scalars` when present
  const int64_t* device_step;                 // read in place of `step` when present
  const int32_t* apply;                       // when present and 0 nothing changes
  uint64_t seed;
  uint32_t step;
  DeviceUpdateScalars scalars;
  int32_t fp16_weight;  // not 0: of the fp32 form
};

// Argument of kGroupedUpdate, which has a variant per rule and type of the gradient
// (GroupedVariantOf); the types of the states are values.
enum class StateForm : int32_t { kF32 = 0, kBf16 = 1, kFp8 = 2 };
struct GroupedUpdateParams {
  ElementUpdateParams update;
  uint8_t* m_scales;  // of kFp8, or null
  uint8_t* v_scales;
  StateForm m_form;
  StateForm v_form;
};

// Argument of kWeightUpdate, whose variant is the rule. Its pieces give the first index and the
// site alone.
struct WeightUpdateParams {
  GroupedUpdateParams grouped;
  uint32_t* amax;
  uint32_t* whole_amax;  // null: none
  uint8_t* codes;        // null: none
  const float* encode;   // of codes with one scale; null: of those of blocks
  int64_t first_row;
  int64_t rows;
  int64_t columns;
  int64_t row_step;  // in global indices
  int64_t grid_columns;
  int32_t edge;           // 0: one block
  uint32_t least;         // that an amax is set to at least
  uint32_t decays;        // 0: without weight decay
  int32_t bf16_gradient;  // 0: fp32
};

}  // namespace ravel::kernels::cuda
