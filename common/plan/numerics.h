#pragma once

// The choices that decide the bits of a training step beside the state, the model, the data and the
// hyper-parameters. Checkpoints carry them, and a resume under other numerics is refused. A
// function of the job, never of its size, strategy or transport, which change no bit.

#include <string>
#include <string_view>

#include "common/model/job_spec.h"

namespace ravel::plan {

// Entries "name=value" in the order of their names, with a space between them:
//
//   compute       precision.compute
//   determinism   determinism.mode: it restricts the attention engines of GPUs
//   device        devices.kind: cpu or gpu. CPUs of all instruction sets compute the same bits. The
//                 kind of GPU and the algorithms of its library are in the blob "algorithms", which
//                 trainers compare.
//   fastAccum     precision.fastAccum; only of gemms of FP8 codes with one scale for each operand
//   gemmPath      how gemms of quantized matrices are computed; only beside a recipe
//   gradientWire  parallelism.gradientWire
//   layerDrop     training.layerDrop
//   logitsChunk   tokens of one chunk of head and loss (logits_chunk.h)
//   microBatch    sequences whose gemms are computed at once
//   recipe        precision.recipe, scaling and what scales follow from (amaxHistory, amaxMargin,
//                 amaxAlgorithm, firstScale, amaxEpsilon), and keepBf16
//   stateDtype    training.optimizer.stateDtype
//   tensorParts   determinism.tensorParts: the tree in which products are summed
//   virtualRanks  lanes: the tree in which gradients are summed
//
// Not in it, because they change no bit: training.optimizer.mainWeights and offload,
// parallelism.recompute, determinism.algorithms (a checkpoint's algorithms stay in force). The
// batch of `spec` is resolved.
std::string NumericsOf(const JobSpec& spec);

// "compute was bf16 and is fp32; virtualRanks was 4 and is 8", or "" where nothing differs. An
// entry that one of the two lacks is not known and differs from nothing: older releases wrote other
// texts, "f32" for every job. tensorParts alone is then 1.
std::string NumericsChange(std::string_view saved, std::string_view now);

// The message of a job that does not resume from the step at `path`, and what allows it.
std::string NumericsRefusal(std::string_view path, std::string_view change);

}  // namespace ravel::plan
