#pragma once

#include <cstdint>
#include <functional>
#include <iosfwd>
#include <string>

#include "common/dtype.h"
#include "common/status.h"
#include "coordinator/ctl/output.h"

namespace ravel::ctl {

struct CheckpointExportOptions {
  std::string step;
  std::string format = "huggingface";
  std::string output = {};    // must not exist
  DType dtype = DType::kF32;  // kF32 or kBF16 (nearest even)
  int64_t max_file_bytes = 5'000'000'000;
  // Quantized weights as the codes that were trained with, with scales beside them and a
  // quantization_config; other tensors as `dtype`.
  bool quantized = false;
  // Names the scale of weights that have one NAME_scale, which vLLM reads, in place of
  // NAME_scale_inv, since vLLM refuses names that it does not know; and adds ignored_layers.
  // Refused (InvalidArgument) without `quantized`, and of recipes that vLLM reads in no such form.
  bool for_vllm = false;
  Format print = Format::kTable;
  // Asked at each block; true ends the export with Cancelled. None: never.
  std::function<bool()> cancelled = {};
};
// Writes OUTPUT.part (config.json, tokenizer files, model.safetensors or
// model-00001-of-0000N.safetensors with an index), reads it back, then renames. AlreadyExists when
// OUTPUT exists, or when another export writes OUTPUT.part; what a killed one left there is
// removed. Every block that is read is verified.
absl::Status ExportCheckpoint(const CheckpointExportOptions& options, std::ostream& out);

}  // namespace ravel::ctl
