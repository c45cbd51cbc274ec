#pragma once

// The arguments of the kernels that decide a step; a part of kernel_params.h, whose rules hold
// here.

#include <cstdint>

#include "kernels/cuda/update_params.h"

namespace ravel::kernels::cuda {

struct SumLossParams {
  const float* losses;
  const int32_t* targets;
  double* sum;
  int64_t* tokens;
  int64_t elements;
};

// kernels::RowNode.
struct DeviceRowNode {
  int64_t first_row;
  int64_t level;
};

// A block per node.
struct SumRowNodesParams {
  const float* row_sums;
  const DeviceRowNode* nodes;
  double* out;
  int64_t rows;
  int64_t count;
};

struct CountFlagsParams {
  uint32_t* flags;
  int64_t* counts;
  int64_t count;
};

// kernels::SumStep.
struct DeviceSumStep {
  int32_t a;
  int32_t b;
};

// kernels::StepOutcome.
struct DeviceStepOutcome {
  int64_t updates;
  int64_t step;
  double squared_norm;
  int64_t non_finite;
  int64_t target_tokens;
  int32_t apply;
  DeviceUpdateScalars scalars;
  float loss_scale;
  int64_t good_steps;
};

// kernels::UpdateHyper.
struct DeviceUpdateHyper {
  double beta1;
  double beta2;
  double epsilon;
  double weight_decay;
  double learning_rate;
};

// kernels::LossScaleRule.
struct DeviceLossScaleRule {
  double growth_factor;
  double backoff_factor;
  double minimum;
  double maximum;
  int64_t growth_interval;
};

// One block.
struct DecideUpdateParams {
  const int64_t* messages;  // words; some are fp64
  const DeviceSumStep* steps;
  const int64_t* level_ends;
  double* sums;
  DeviceStepOutcome* outcome;
  int64_t ranks;
  int64_t words;
  int64_t tensors;
  int64_t levels;
  int64_t step_count;
  double clip_norm;
  DeviceUpdateHyper hyper;
  DeviceLossScaleRule loss_scale;
  int32_t total;
  int32_t unused = 0;
};

}  // namespace ravel::kernels::cuda
