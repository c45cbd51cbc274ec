#pragma once

// Ordered work on a device. Every op takes a Stream; its results are ready when the stream reaches
// that point.

namespace ravel::kernels {

enum class Backend { kCpu, kCuda };

// A CPU stream of this slice runs each op on the calling thread before the op returns, so it needs
// no waits. Used only from the thread that issues the work of one rank.
class Stream {
 public:
  virtual ~Stream() = default;
  virtual Backend backend() const = 0;
};

class CpuStream final : public Stream {
 public:
  Backend backend() const override { return Backend::kCpu; }
};

}  // namespace ravel::kernels
