#pragma once

// Records the calls issued to CUDA streams. A recording becomes a CUDA graph; later steps are
// compared call by call and, if equal, replaced by one graph launch. A graph is launched only for
// the very calls that it was made of, arguments included.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace ravel::kernels {

class CudaStream;

// One call of the C interface on a stream. Arguments have no padding.
struct CudaCall {
  enum class Kind : int32_t {
    kLaunch,
    kCopy,
    kFill,
    kHostWork,
    kGemm,
    kAttention,
    kRecord,
    kWait,
    kGather,    // of NCCL
    kExchange,  // of NCCL
  };
  Kind kind = Kind::kLaunch;
  CudaStream* stream = nullptr;
  std::span<const std::byte> arguments;
};
// "kernel 123", "a copy of 64 bytes", "a wait for an event".
std::string NameOf(const CudaCall& call);

class CudaCalls {
 public:
  void Append(const CudaCall& call);
  void Clear();
  size_t size() const { return places_.size(); }
  CudaCall operator[](size_t index) const;

 private:
  struct Place {
    CudaCall::Kind kind;
    CudaStream* stream;
    size_t begin;
    size_t bytes;
  };
  std::vector<Place> places_;
  std::vector<std::byte> arguments_;
};

// Set on all streams of a thread at once (CudaStream::set_log). Used only from that thread.
class CudaCallLog {
 public:
  // Collectives of NCCL are kept as other calls are, or refused. Whether they are part of a graph
  // is one decision of all ranks: where they are kept, calls that are not those followed are not
  // done, nor any before them, and the owner reports that.
  enum class Collectives { kRefused, kKept };
  explicit CudaCallLog(Collectives collectives = Collectives::kRefused)
      : collectives_(collectives) {}
  bool keeps_collectives() const { return collectives_ == Collectives::kKept; }

  // From here on calls are done and kept.
  void Record();
  // From here on calls are not done as long as they are those of `calls`, in that order; with the
  // first that is not, all before it are done, and every later one (but see Collectives). `calls`
  // stays until Finish.
  void Follow(const CudaCalls& calls);
  // The recorded calls.
  const CudaCalls& calls() const { return kept_; }
  // Ends either. True where a capture can hold what was recorded, or where the calls followed were
  // all of `calls` and nothing else: none of them was done. Otherwise `difference` says why.
  bool Finish();
  const std::string& difference() const { return difference_; }

  // From streams: whether the call is to be done now.
  bool Takes(const CudaCall& call);
  // From what no graph can hold, by name: a wait of the host.
  void Refuse(const std::string& what);

 private:
  enum class Mode { kIdle, kRecording, kFollowing, kDiverged, kLost };
  // Does what was only followed, or loses it.
  void Diverge(const std::string& why);

  const Collectives collectives_;
  Mode mode_ = Mode::kIdle;
  CudaCalls kept_;
  const CudaCalls* expected_ = nullptr;
  size_t position_ = 0;
  std::string difference_;
};

}  // namespace ravel::kernels
