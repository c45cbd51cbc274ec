#pragma once

// One rank of the collectives' benchmark, told what to do over its standard input. Ours and the
// Gloo library's ranks speak the same lines, so that a harness can let them take turns:
//   verify CASE BYTES              -> ok | wrong: WHAT
//   time CASE BYTES TURNS          -> SECONDS of TURNS turns together
// CASE is all_gather, all_gather_in_place, reduce_scatter or barrier. BYTES is what a gather puts
// out and a reduction takes in, over all ranks' shards. Two cases of ours, never verified, tell
// what the machine allows: `copy`, every rank copies BYTES of its own at once; `ping`, a cache line
// goes from rank 0 to rank 1 and back.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace ravel::bench {

// Buffers change from turn to turn so that together they are larger than this.
inline constexpr int64_t kRotatedBytes = int64_t{96} << 20;
inline constexpr int64_t kMostBytes = int64_t{64} << 20;

inline int64_t SlotsOf(int64_t bytes) {
  return std::max<int64_t>(2, kRotatedBytes / std::max<int64_t>(bytes, 1));
}

// What a library does in one turn. `slot` says which of the rotated buffers are used.
class Collectives {
 public:
  virtual ~Collectives() = default;
  // False for a case that the library does not have.
  virtual bool Has(const std::string& name) const = 0;
  // Before turns of `bytes`: everything that is made once.
  virtual void Prepare(const std::string& name, int64_t bytes) = 0;
  virtual void Turn(const std::string& name, int64_t bytes, int64_t slot) = 0;
  virtual void Barrier() = 0;
  // This rank's input of a slot, and its result.
  virtual float* input(const std::string& name, int64_t bytes, int64_t slot) = 0;
  virtual const float* output(const std::string& name, int64_t bytes, int64_t slot) = 0;
};

// Serves the lines until the input ends. Returns the exit code.
int ServeRank(Collectives& collectives, int rank, int ranks);

// How the ranks find each other: "record TEXT" goes out, "records TEXT ..." comes back.
std::vector<std::string> ExchangeRecords(const std::string& own);

std::unique_ptr<Collectives> MakeOurs(int rank, int ranks);
// Rendezvous through files in `folder`, over the loopback interface.
std::unique_ptr<Collectives> MakeGloo(int rank, int ranks, const std::string& folder);

}  // namespace ravel::bench
