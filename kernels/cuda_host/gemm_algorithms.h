#pragma once

// Which cuBLASLt algorithm computes which gemm: measured once, kept in a file, the same for
// every rank of a job. Pure bookkeeping; measuring is CudaStream's
// (kernels/cuda_host/cuda_device.h).

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include <absl/base/thread_annotations.h>
#include <absl/status/status.h>

#include "common/mutex.h"
#include "kernels/cuda/cuda_abi.h"
#include "kernels/gemm.h"

namespace ravel::kernels::cuda {

// A gemm as a word of the file: sizes, strides, transpositions, types, beta, alignments and
// multiprocessors; "8192x4096x4096-nt-bf16-f32-b1-s4096,4096,4096-a256,256,256-m0".
std::string GemmKey(const RavelCudaGemm& gemm);

// The gemm that an algorithm is chosen for: of one part, with operands that have no gaps, where c
// is of parts; else the gemm itself. Strides and the sizes that ranks cut do not depend on the
// number of ranks then. Alignments are those of rows without gaps, 16 bytes at most.
RavelCudaGemm GemmOfPart(const RavelCudaGemm& gemm, const GemmPart& part);

struct GemmChoice {
  RavelCudaAlgorithm algorithm = {};
  double microseconds = 0.0;  // 0: the library's first proposal, not measured
  bool none = false;          // the library has no algorithm: our own kernel computes it
};

// Thread-safe.
class GemmAlgorithms {
 public:
  // `identity`: device, its compute capability, multiprocessors, and the version of cuBLASLt. An
  // algorithm is valid for no other.
  explicit GemmAlgorithms(std::string identity) : identity_(std::move(identity)) {}

  std::optional<GemmChoice> Find(const std::string& key) const;
  // A measured choice replaces any; one that is not measured replaces none.
  void Set(const std::string& key, const GemmChoice& choice);
  // Replaces any.
  void Put(const std::string& key, const GemmChoice& choice);
  // Gemms, by the key of the whole, whose parts are computed one by one: at once, their bits would
  // not be those of parts. Found anew at each start; in no file.
  void ComputeInParts(const std::string& whole_key);
  bool ComputesInParts(const std::string& whole_key) const;
  std::map<std::string, GemmChoice> choices() const;
  size_t size() const;
  const std::string& identity() const { return identity_; }
  // A name for the file of this identity, within a folder that may hold several.
  std::string FileName() const;

  // The file's text: a first line with the identity, then one line per gemm in the order of
  // keys, and a sum over all that.
  std::string ToText() const;
  // Takes over what a text says, as Set does; nothing at all if any line is wrong.
  // FailedPrecondition for another identity, InvalidArgument naming `source` and the line for
  // anything else.
  absl::Status AddText(const std::string& text, const std::string& source);
  // NotFound where there is no file yet.
  absl::Status Load(const std::string& path);
  // Written beside the file, under a name of its own, and renamed over it: several processes may
  // save at once, and the last one's file stays.
  absl::Status Save(const std::string& path) const;

 private:
  const std::string identity_;
  mutable Mutex mutex_;
  std::map<std::string, GemmChoice> choices_ ABSL_GUARDED_BY(mutex_);
  std::set<std::string> in_parts_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ravel::kernels::cuda
