#include "kernels/cuda/kernel_table.h"

#include <array>
#include <cstddef>

namespace ravel::kernels::cuda {
namespace {

std::vector<KernelEntry> JoinEntries() {
  std::vector<KernelEntry> all;
  for (const auto& part :
       {NormKernels(),       HeadNormKernels(),  LayerNormKernels(),   ActivationKernels(),
        GeluKernels(),       BiasKernels(),      RopeKernels(),        EmbeddingKernels(),
        LossKernels(),       AdamWKernels(),     ReduceKernels(),      CastKernels(),
        GemmKernels(),       AttentionKernels(), QuantizeKernels(),    TensorCodesKernels(),
        BlockCodesKernels(), Fp4CodesKernels(),  WeightCodeKernels(),  StatisticsKernels(),
        StartKernels(),      PartKernels(),      WeightUpdateKernels()}) {
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

using KernelIndex = std::array<const KernelEntry*, kKernelIds>;

KernelIndex MakeIndex() {
  KernelIndex index = {};
  for (const KernelEntry& entry : AllKernels()) {
    index[static_cast<size_t>(KernelId(entry.kernel, entry.variant))] = &entry;
  }
  return index;
}

}  // namespace

const std::vector<KernelEntry>& AllKernels() {
  static const std::vector<KernelEntry> entries = JoinEntries();
  return entries;
}

const KernelEntry* FindKernel(int32_t kernel) {
  static const KernelIndex index = MakeIndex();
  return kernel >= 0 && kernel < kKernelIds ? index[static_cast<size_t>(kernel)] : nullptr;
}

}  // namespace ravel::kernels::cuda
