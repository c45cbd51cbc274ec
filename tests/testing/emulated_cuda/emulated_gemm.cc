#include "tests/testing/emulated_cuda/emulated_gemm.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <vector>

#include "common/gemm_scales.h"
#include "kernels/cpu/reference_ops.h"
#include "kernels/scalar/float4.h"
#include "kernels/scalar/float8.h"

namespace ravel::kernels::cuda::emulated {
namespace {

constexpr uint64_t kWorkspaceBytes = 1 << 16;
constexpr uint64_t kMagic = 0x656D756C61746564;  // "emulated"
constexpr uint64_t kRefused = ~uint64_t{0};  // of an algorithm that is proposed and does not run

DType TypeOf(int32_t dtype) {
  return static_cast<DType>(dtype);
}

constexpr uint64_t kBySize = 4;  // in place of pieces

uint64_t PiecesOf(const RavelCudaGemm& gemm) {
  constexpr int kMost = 3;
  return static_cast<uint64_t>(1 + std::bit_width(static_cast<uint64_t>(gemm.m * gemm.n)) % kMost);
}

uint64_t ProposedPieces(const RavelCudaGemm& gemm) {
  const char* order = std::getenv("RAVEL_EMULATED_GEMM_ORDER");
  const std::string_view word = order == nullptr ? "0" : order;
  return word == "1" ? PiecesOf(gemm) : word == "2" ? kBySize : 1;
}

// Operand columns, or rows where it is transposed, [first, first + count).
TensorView AlongK(const TensorView& view, bool columns, int64_t first, int64_t count) {
  return columns ? ColumnsOf(view, first, count) : RowsOf(view, first, count);
}

// Each piece of k is a sum by itself, added to c in turn.
void GemmInPieces(const GemmArgs& args, int64_t k, int64_t pieces) {
  GemmArgs piece = args;
  for (int64_t i = 0; i < pieces; ++i) {
    const int64_t first = k * i / pieces;
    const int64_t count = k * (i + 1) / pieces - first;
    piece.a = AlongK(args.a, args.transpose_a == Transpose::kNo, first, count);
    piece.b = AlongK(args.b, args.transpose_b == Transpose::kYes, first, count);
    cpu::Gemm(piece);
    piece.output = Output::kAccumulate;
  }
}

bool IsFloat(int32_t dtype) {
  return TypeOf(dtype) == DType::kF32 || TypeOf(dtype) == DType::kBF16 ||
         TypeOf(dtype) == DType::kF16;
}

bool IsPacked(int32_t dtype) {
  return TypeOf(dtype) == DType::kU8;
}

bool IsCodes(int32_t dtype) {
  return TypeOf(dtype) == DType::kF8E4M3 || TypeOf(dtype) == DType::kF8E5M2 || IsPacked(dtype);
}

// Scales of blocks: those of Hopper, not squares twice, or those of Blackwell; of E4M3, or of
// packed codes on Blackwell.
bool FormsAreOffered(const RavelCudaGemm& gemm, int32_t compute_major) {
  const auto a = static_cast<ScaleForm>(gemm.a_form);
  const auto b = static_cast<ScaleForm>(gemm.b_form);
  const auto hopper = [](ScaleForm form) {
    return form == ScaleForm::kBlocks128 || form == ScaleForm::kSquares128;
  };
  constexpr int32_t kHopper = 9;
  if (IsPacked(gemm.input_type) || IsPacked(gemm.b_type)) {
    return gemm.input_type == gemm.b_type && a == ScaleForm::kBlocks16 &&
           b == ScaleForm::kBlocks16 && compute_major > kHopper && gemm.fast_accumulation == 0;
  }
  if (a == ScaleForm::kTensor && b == ScaleForm::kTensor) {
    return true;
  }
  const bool blocks = hopper(a) && hopper(b) && compute_major == kHopper &&
                      (a != ScaleForm::kSquares128 || b != ScaleForm::kSquares128);
  const bool tiles =
      a == ScaleForm::kBlocks32 && b == ScaleForm::kBlocks32 && compute_major > kHopper;
  return gemm.input_type == gemm.b_type && gemm.fast_accumulation == 0 && (blocks || tiles);
}

// The codes that cuBLASLt takes: both along k, sizes and strides of 16 bytes, not E5M2 twice.
bool CodesAreOffered(const RavelCudaGemm& gemm, int32_t compute_major) {
  const auto whole = [](int64_t size) { return size % 16 == 0; };
  const auto along_k = [&](int64_t size) { return size % (IsPacked(gemm.b_type) ? 32 : 16) == 0; };
  return IsCodes(gemm.input_type) && IsCodes(gemm.b_type) && IsFloat(gemm.output_type) &&
         TypeOf(gemm.output_type) != DType::kF16 &&
         (gemm.input_type != gemm.b_type || TypeOf(gemm.b_type) != DType::kF8E5M2) &&
         FormsAreOffered(gemm, compute_major) && gemm.transpose_a == 0 && gemm.transpose_b != 0 &&
         whole(gemm.m) && whole(gemm.n) && along_k(gemm.k) && along_k(gemm.a_stride) &&
         along_k(gemm.b_stride) && whole(gemm.c_stride) && gemm.a_align >= 16 &&
         gemm.b_align >= 16 && gemm.c_align >= 16;
}

Shape ShapeOf(int64_t rows, int64_t columns, int64_t stride, bool transposed) {
  return transposed ? Shape{columns, rows, stride} : Shape{rows, columns, stride};
}

// The bytes of an operand along k, where codes may lie two to a byte.
Shape BytesOf(const Shape& shape, DType dtype) {
  return dtype == DType::kU8 ? Shape{shape.rows, shape.columns / 2, shape.stride / 2} : shape;
}

// What the description claims of an operand's address and stride.
bool Aligned(const void* data, const Shape& shape, DType dtype, int32_t align) {
  return align > 0 && reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(align) == 0 &&
         (shape.rows <= 1 || shape.stride * DTypeBytes(dtype) % align == 0);
}

void ReadScales(Operands& operands,
                const char* name,
                const void* scales,
                ScaleForm form,
                int64_t outer,
                int64_t inner) {
  operands.Touch(Access::Kind::kRead, name, scales, ScaleBytes(form, outer, inner));
  operands.Require(form == ScaleForm::kTensor || reinterpret_cast<uintptr_t>(scales) % 16 == 0,
                   "scales of blocks are not aligned");
}

// The scale of an element's block; 1 with one scale for all, which the gemm itself takes.
float ScaleAt(ScaleForm form, const void* scales, const Operand& codes, int64_t row, int64_t at) {
  if (form == ScaleForm::kTensor) {
    return 1.0f;
  }
  const int64_t columns = codes.columns * CodesOfByte(form);
  const int64_t index =
      ScaleIndex(form, row, at / CodesOfScale(form), codes.rows, ScaleBlocks(form, columns));
  switch (form) {
    case ScaleForm::kBlocks16:
      return scalar::E4M3::ValueOfCode(static_cast<const uint8_t*>(scales)[index]);
    case ScaleForm::kBlocks32:
      return scalar::E8M0Value(static_cast<const uint8_t*>(scales)[index]);
    default:
      return static_cast<const float*>(scales)[index];
  }
}

float ValueAt(const Operand& codes, int64_t row, int64_t column) {
  const auto* line = static_cast<const uint8_t*>(codes.data) + row * codes.stride;
  switch (codes.dtype) {
    case DType::kU8:
      return scalar::E2M1Value(uint32_t{line[column / 2]} >> (column % 2 * 4) & 0xFu);
    case DType::kF8E5M2:
      return scalar::E5M2::ValueOfCode(line[column]);
    default:
      return scalar::E4M3::ValueOfCode(line[column]);
  }
}

// The values of codes, times the scales of blocks.
TensorView Decoded(const Operand& codes,
                   ScaleForm form,
                   const void* scales,
                   std::vector<float>& to) {
  const int64_t columns = codes.columns * CodesOfByte(form);
  to.resize(static_cast<size_t>(codes.rows * columns));
  for (int64_t row = 0; row < codes.rows; ++row) {
    for (int64_t column = 0; column < columns; ++column) {
      to[static_cast<size_t>(row * columns + column)] =
          ValueAt(codes, row, column) * ScaleAt(form, scales, codes, row, column);
    }
  }
  return MatrixView(to.data(), codes.rows, columns);
}

struct GemmOperands {
  Operand a;
  Operand b;
  Operand c;
};

void Multiply(const RavelCudaGemm& gemm,
              const RavelCudaGemmBuffers& buffers,
              const GemmOperands& operands,
              int64_t pieces) {
  const bool codes = gemm.b_type != 0;
  const auto a_form = static_cast<ScaleForm>(gemm.a_form);
  const auto b_form = static_cast<ScaleForm>(gemm.b_form);
  Staging on;
  std::vector<float> decoded[2];
  GemmArgs args = {
      .a = codes ? Decoded(operands.a, a_form, buffers.scale_a, decoded[0]) : on.View(operands.a),
      .transpose_a = gemm.transpose_a != 0 ? Transpose::kYes : Transpose::kNo,
      .b = codes ? Decoded(operands.b, b_form, buffers.scale_b, decoded[1]) : on.View(operands.b),
      .transpose_b = gemm.transpose_b != 0 ? Transpose::kYes : Transpose::kNo,
      .c = on.View(operands.c),
      .output = gemm.accumulate != 0 ? Output::kAccumulate : Output::kOverwrite};
  if (codes && a_form == ScaleForm::kTensor) {
    args.scale_a = VectorView(static_cast<float*>(const_cast<void*>(buffers.scale_a)), 1);
    args.scale_b = VectorView(static_cast<float*>(const_cast<void*>(buffers.scale_b)), 1);
  }
  if (buffers.factors != nullptr) {
    // The library reads both where the product ends, whatever the host knew.
    args.scale_a = VectorView(const_cast<float*>(buffers.factors), 1);
    args.output = buffers.factors[1] == 0.0f ? Output::kOverwrite : Output::kAccumulate;
  }
  GemmInPieces(args, gemm.k, pieces);
  on.Finish();
}

}  // namespace

bool GemmIsOffered(const RavelCudaGemm& gemm, int32_t compute_major) {
  const auto fits = [](const Shape& shape) { return shape.stride >= shape.columns; };
  const bool types = gemm.b_type != 0
                         ? CodesAreOffered(gemm, compute_major)
                         : IsFloat(gemm.input_type) && (TypeOf(gemm.output_type) == DType::kF32 ||
                                                        gemm.input_type == gemm.output_type);
  return gemm.m > 0 && gemm.n > 0 && gemm.k > 0 && types &&
         fits(ShapeOf(gemm.m, gemm.k, gemm.a_stride, gemm.transpose_a != 0)) &&
         fits(ShapeOf(gemm.k, gemm.n, gemm.b_stride, gemm.transpose_b != 0)) &&
         gemm.c_stride >= gemm.n;
}

int32_t GemmAlgorithms(const RavelCudaGemm& gemm,
                       uint64_t workspace_bytes,
                       RavelCudaAlgorithm* algorithms,
                       int32_t limit) {
  int32_t count = 0;
  for (const uint64_t workspace : {kWorkspaceBytes, uint64_t{0}}) {
    if (count < limit && workspace <= workspace_bytes) {
      algorithms[count] = {};
      algorithms[count].words[0] = kMagic;
      algorithms[count].words[1] = workspace;
      algorithms[count].words[2] = ProposedPieces(gemm);
      algorithms[count].workspace_bytes = workspace;
      ++count;
    }
  }
  if (count > 1 && count < limit) {
    algorithms[count] = {};
    algorithms[count].words[0] = kMagic;
    algorithms[count].words[1] = kRefused;
    ++count;
  }
  return count;
}

PlannedLaunch PlanCublasGemm(const RavelCudaGemm& gemm,
                             const RavelCudaAlgorithm& algorithm,
                             const RavelCudaGemmBuffers& buffers,
                             int32_t compute_major) {
  const KernelLaunch launch = {.name = "gemm", .variant = 0};
  Operands operands(launch);
  operands.Require(GemmIsOffered(gemm, compute_major),
                   "sizes, strides or types that no algorithm takes");
  operands.Require(algorithm.words[1] != kRefused, "an algorithm that does not run here");
  operands.Require(algorithm.words[0] == kMagic && algorithm.words[1] == algorithm.workspace_bytes,
                   "an algorithm of another library");
  operands.Require(algorithm.workspace_bytes <= buffers.workspace_bytes, "too little workspace");
  const bool codes = gemm.b_type != 0;
  const DType input = TypeOf(gemm.input_type);
  const DType b_input = codes ? TypeOf(gemm.b_type) : input;
  operands.Require(codes == (buffers.scale_a != nullptr && buffers.scale_b != nullptr) &&
                       (codes || (buffers.scale_a == nullptr && buffers.scale_b == nullptr)),
                   "codes have scales, and nothing else has");
  const DType output = TypeOf(gemm.output_type);
  const bool flip_a = gemm.transpose_a != 0;
  const bool flip_b = gemm.transpose_b != 0;
  const bool accumulate = gemm.accumulate != 0;
  const Shape a_shape = BytesOf(ShapeOf(gemm.m, gemm.k, gemm.a_stride, flip_a), input);
  const Shape b_shape = BytesOf(ShapeOf(gemm.k, gemm.n, gemm.b_stride, flip_b), b_input);
  const Shape c_shape = {gemm.m, gemm.n, gemm.c_stride};
  operands.Require(Aligned(buffers.a, a_shape, input, gemm.a_align), "a is not aligned as said");
  operands.Require(Aligned(buffers.b, b_shape, b_input, gemm.b_align), "b is not aligned as said");
  operands.Require(Aligned(buffers.c, c_shape, output, gemm.c_align), "c is not aligned as said");
  const Operand a = operands.Add(Access::Kind::kRead, "a", buffers.a, a_shape, input);
  const Operand b = operands.Add(Access::Kind::kRead, "b", buffers.b, b_shape, b_input);
  const auto a_form = static_cast<ScaleForm>(gemm.a_form);
  const auto b_form = static_cast<ScaleForm>(gemm.b_form);
  if (codes) {
    ReadScales(operands, "scale_a", buffers.scale_a, a_form, gemm.m, gemm.k);
    ReadScales(operands, "scale_b", buffers.scale_b, b_form, gemm.n, gemm.k);
  }
  const bool packed = codes && IsPacked(gemm.b_type);
  operands.Require(packed == (buffers.factors != nullptr),
                   "packed codes have factors in memory of the device, and nothing else has");
  operands.Array(Access::Kind::kRead, "factors", buffers.factors, 2);
  const Operand c = operands.Add(
      accumulate ? Access::Kind::kUpdate : Access::Kind::kWrite, "c", buffers.c, c_shape, output);
  const auto pieces =
      static_cast<int64_t>(algorithm.words[2] == kBySize ? PiecesOf(gemm) : algorithm.words[2]);
  operands.Require(pieces > 0 && pieces < static_cast<int64_t>(kBySize), "no number of pieces");
  const uint64_t workspace_bytes = algorithm.workspace_bytes;
  void* workspace = workspace_bytes > 0 ? buffers.workspace : nullptr;
  operands.Require(workspace != nullptr || workspace_bytes == 0, "no workspace");
  operands.Touch(
      Access::Kind::kWrite, "workspace", workspace, static_cast<int64_t>(workspace_bytes));
  return operands.Plan([=] {
    if (workspace != nullptr) {
      std::memset(workspace, 0xFF, workspace_bytes);
    }
    Multiply(gemm, buffers, {a, b, c}, pieces);
  });
}

}  // namespace ravel::kernels::cuda::emulated
