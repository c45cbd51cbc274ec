#pragma once

// Places of the scales of an operand for gemms of codes, as cuBLASLt reads them. An operand has
// `outer` rows of `inner` codes; the gemm sums over the latter, and blocks lie along them.

#include <cstdint>

namespace ravel {

// Values are those of cublasLtMatmulMatrixScale_t.
enum class ScaleForm : uint8_t {
  kTensor = 0,     // one fp32
  kBlocks16 = 1,   // E4M3, not negative, of 16 codes that lie two to a byte; in tiles as kBlocks32
  kBlocks32 = 2,   // E8M0 of 32 codes, in tiles of 128 rows by 4 blocks
  kBlocks128 = 4,  // fp32 of 128 codes: [blocks][outer]
  kSquares128 = 5  // fp32 of 128 x 128 codes: [outer / 128][blocks, rounded up to 4]
};

// Codes that share a scale along the inner index; 0: all.
constexpr int64_t CodesOfScale(ScaleForm form) {
  switch (form) {
    case ScaleForm::kTensor:
      return 0;
    case ScaleForm::kBlocks16:
      return 16;
    case ScaleForm::kBlocks32:
      return 32;
    case ScaleForm::kBlocks128:
    case ScaleForm::kSquares128:
      return 128;
  }
  return 0;
}

// Codes that lie in one byte.
constexpr int64_t CodesOfByte(ScaleForm form) {
  return form == ScaleForm::kBlocks16 ? 2 : 1;
}

constexpr int64_t ScaleBlocks(ScaleForm form, int64_t inner) {
  const int64_t codes = CodesOfScale(form);
  return codes == 0 ? 1 : (inner + codes - 1) / codes;
}

inline constexpr int64_t kScaleTileRows = 128;
inline constexpr int64_t kScaleTileBlocks = 4;

// Bytes of all scales of an operand; those of tiles and columns that stand for no codes are zero.
constexpr int64_t ScaleBytes(ScaleForm form, int64_t outer, int64_t inner) {
  constexpr int64_t kFloat = 4;
  const int64_t blocks = ScaleBlocks(form, inner);
  const int64_t by_four = (blocks + kScaleTileBlocks - 1) / kScaleTileBlocks * kScaleTileBlocks;
  const int64_t squares = (outer + kScaleTileRows - 1) / kScaleTileRows;
  switch (form) {
    case ScaleForm::kTensor:
      return kFloat;
    case ScaleForm::kBlocks16:
    case ScaleForm::kBlocks32:
      return squares * kScaleTileRows * by_four;
    case ScaleForm::kBlocks128:
      return blocks * outer * kFloat;
    case ScaleForm::kSquares128:
      return squares * by_four * kFloat;
  }
  return 0;
}

// The index, in elements, of the scale of a row's block. With kSquares128 all rows of a square have
// one.
constexpr int64_t ScaleIndex(
    ScaleForm form, int64_t row, int64_t block, int64_t outer, int64_t blocks) {
  const int64_t tiles = (blocks + kScaleTileBlocks - 1) / kScaleTileBlocks;
  switch (form) {
    case ScaleForm::kTensor:
      return 0;
    case ScaleForm::kBlocks16:
    case ScaleForm::kBlocks32: {
      constexpr int64_t kTileBytes = kScaleTileRows * kScaleTileBlocks;
      const int64_t r = row % kScaleTileRows;
      return (row / kScaleTileRows * tiles + block / kScaleTileBlocks) * kTileBytes + r % 32 * 16 +
             r / 32 * 4 + block % kScaleTileBlocks;
    }
    case ScaleForm::kBlocks128:
      return block * outer + row;
    case ScaleForm::kSquares128:
      return row / kScaleTileRows * tiles * kScaleTileBlocks + block;
  }
  return 0;
}

}  // namespace ravel
