#pragma once

// The content of a committed step as plain values; common/ckpt/manifest_proto turns it into
// manifest.pb and back.

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "common/crypto.h"
#include "common/dtype.h"
#include "common/shape.h"
#include "common/status.h"

namespace ravel::ckpt {

inline constexpr int kFormatVersion = 1;
// Checksums are kept for blocks of this many bytes, counted from the first byte of a chunk.
inline constexpr int64_t kBlockBytes = 4 << 20;
inline constexpr int64_t kMaxBlobBytes = 64 << 10;
inline constexpr int64_t kMaxNumericsBytes = 4 << 10;
inline constexpr int64_t kMaxMeshRanks = int64_t{1} << 24;

// On disk: do not renumber. plan::StateRole (optimizer_states.h) uses the same numbers, and those
// from 10 to kMaxTensorRole for states of optimizers, which nothing here tells apart.
enum class TensorRole : uint8_t {
  kParam = 1,
  kBuffer = 2,
  kMaster = 3,
  kRemainder = 4,
  kExpAvg = 5,
  kExpAvgSq = 6,
  kStep = 7,
  kScale = 8,
  kAmax = 9,
};
inline constexpr int kMaxTensorRole = 63;

using SaveId = std::array<uint8_t, 16>;

// The codes and scales that a quantized weight had: they follow from the saved main weight, so only
// their digest is kept.
struct QuantizedRecord {
  std::string name = {};    // of the weight
  std::string domain = {};  // weights of one domain share the scale of the whole
  int64_t site = 0;         // ordinal in the model
  uint64_t digest64 = 0;    // kernels/scalar/code_digest.h; parts of ranks add up
  bool operator==(const QuantizedRecord&) const = default;
};
struct QuantRecord {
  std::string recipe = {};                    // plan::RecipeName; empty: nothing is quantized
  std::string rounding = {};                  // what codes are cast from: kRoundsMainWeights
  double amax_epsilon = 0;                    // the least amax that scales follow from
  std::vector<QuantizedRecord> tensors = {};  // in the order of the model
  bool operator==(const QuantRecord&) const = default;
};
inline constexpr char kRoundsMainWeights[] = "fp32";

// A rectangle of a tensor in a file.
struct ChunkRecord {
  int file = 0;             // index into files
  int64_t data_offset = 0;  // absolute, from the start of the file
  int64_t bytes = 0;
  Box box = {};
  uint32_t crc32c = 0;
  std::vector<uint32_t> block_crc32c = {};  // one per kBlockBytes
  bool operator==(const ChunkRecord&) const = default;
};

struct TensorRecord {
  std::string name = {};
  TensorRole role = TensorRole::kParam;
  std::string of_param = {};
  DType dtype = DType::kF32;
  DType stored_dtype = DType::kF32;
  Shape shape = {};
  std::string tied_to = {};
  uint64_t digest64 = 0;
  std::vector<ChunkRecord> chunks = {};  // by offset
  bool operator==(const TensorRecord&) const = default;
};

struct FileRecord {
  std::string path;  // relative to the step
  int64_t size = 0;
  int64_t header_bytes = 0;  // 0: not a safetensors file (hf/*)
  uint32_t crc32c = 0;
  int64_t writer = 0;
  bool operator==(const FileRecord&) const = default;
};

// Small state without a shape: "rng", "data", "hyper", "schedule".
struct Blob {
  std::string name;
  std::string content;  // at most kMaxBlobBytes
  bool operator==(const Blob&) const = default;
};

struct MeshAxisRecord {
  std::string name;
  int64_t size = 1;
  bool operator==(const MeshAxisRecord&) const = default;
};

struct Manifest {
  int format_version = kFormatVersion;
  std::string job;
  int64_t step = 0;
  SaveId save_id = {};
  int64_t epoch = 0;
  int64_t attempt = 0;  // save attempt
  int64_t created_ns = 0;
  std::string build;
  std::string numerics;  // of common/plan/numerics.h; "f32" of every job in older steps
  int64_t virtual_ranks = 0;
  // Every axis of the job, outermost first. Older steps name one axis of all ranks.
  std::vector<MeshAxisRecord> mesh;
  std::string authoritative = "param";
  bool dual = false;
  std::vector<FileRecord> files;      // by path
  std::vector<TensorRecord> tensors;  // by name
  std::vector<Blob> blobs;            // by name
  Sha256Digest state_digest = {};
  QuantRecord quant = {};
  bool operator==(const Manifest&) const = default;

  // The tensor of that name; nullptr when there is none.
  const TensorRecord* FindTensor(std::string_view name) const;
  const Blob* FindBlob(std::string_view name) const;
  int64_t total_bytes() const;  // of all files
  int64_t ranks() const;        // of the mesh; 0 without one
};

// Everything that can be known without reading a data file: paths and indices in range, sizes,
// block counts, no overlap of chunks in a file, exact cover of every tensor, order, state_digest.
// Errors name the tensor or file.
absl::Status ValidateManifest(const Manifest& manifest);

// A chunk that one rank wrote for one save.
struct SealedChunk {
  std::string tensor;
  ChunkRecord chunk;  // `file` is an index into the seal's files
};
struct SealedTensor {
  std::string name;
  uint64_t digest64 = 0;  // this rank's part
};
struct Seal {
  int64_t step = 0;
  int64_t epoch = 0;
  int64_t attempt = 0;  // save attempt
  int64_t writer = 0;   // rank
  int64_t sequence = 0;
  Sha256Digest save_plan_hash = {};
  std::vector<FileRecord> files;  // in the plan's order, then hf/*
  std::vector<SealedChunk> chunks;
  std::vector<SealedTensor> tensors;
  std::vector<Blob> blobs;                   // rank 0 only
  std::vector<SealedTensor> quantized = {};  // parts of QuantizedRecord::digest64, in their order
  double seconds = 0;
  int64_t bytes = 0;
};

// Proves that the boxes cover a tensor of this shape exactly once: in bounds, disjoint, volumes add
// up. A tensor without elements has no boxes.
absl::Status ProveBoxCover(const Shape& shape, std::vector<Box> boxes);

}  // namespace ravel::ckpt
