#pragma once

// The table of op cases: each op with an oracle in fp64, written separately, and its forward and
// backward calls. Tests run every row over memory layouts and over the SIMD paths of this machine.

#include <cstdint>
#include <deque>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "common/tensor_view.h"
#include "kernels/stream.h"

namespace ravel::kernels::testing {

// Where operands lie: elements before the first one of a buffer (misalignment), and unused elements
// after each row.
struct MemoryLayout {
  int64_t offset = 0;
  int64_t row_gap = 0;
};

// Element types of a case: of activations and weights, and of gradients of weights.
struct OperandTypes {
  DType activations = DType::kF32;
  DType gradients = DType::kF32;
};

// Another place for operands than the heap, and the stream that their ops run on: memory of a
// device with a copy on the host.
class OperandPlace {
 public:
  virtual ~OperandPlace() = default;
  virtual OperandTypes types() const { return {}; }
  virtual Stream& stream() = 0;
  // Device memory; lives until the next Clear.
  virtual void* Allocate(int64_t bytes) = 0;
  // The host's copy of an address that Allocate gave, or of one behind it.
  virtual char* HostOf(const void* data) = 0;
  // Copies bytes of the host to the device, before the ops that follow.
  virtual void Send(const void* data, int64_t bytes) = 0;
  // All ops are done, and the host's copy has what they wrote.
  virtual void Receive() = 0;
  virtual void Clear() = 0;
};
// For all operands from now on; null is the heap and a CPU stream.
void UseOperandPlace(OperandPlace* place);

// Owns the operands of one call. What ops may not write (gaps) and must overwrite (outputs) starts
// as NaN.
class Operands {
 public:
  explicit Operands(MemoryLayout layout);

  // Activations and weights. Matrices may have gaps between rows; vectors are contiguous.
  TensorView Matrix(int64_t rows, int64_t columns, const std::vector<double>& values);
  TensorView Matrix(int64_t rows, int64_t columns);
  TensorView Vector(int64_t n, const std::vector<double>& values);
  TensorView Vector(int64_t n);
  // A contiguous matrix, for scratch.
  TensorView Workspace(int64_t rows, int64_t columns);
  // Gradients of weights, and what gemms add up.
  TensorView Gradient(int64_t rows, int64_t columns, const std::vector<double>& values);
  TensorView Gradient(int64_t rows, int64_t columns);
  TensorView Gradient(int64_t n, const std::vector<double>& values);
  TensorView Gradient(int64_t n);
  // Statistics and tables: always fp32.
  TensorView Floats(int64_t rows, int64_t columns);
  TensorView Floats(int64_t n, const std::vector<double>& values);
  TensorView Floats(int64_t n);
  TensorView Ids(const std::vector<double>& values);
  // True if nothing outside the operands' elements was written.
  bool GapsUntouched() const;  // waits for all ops

  Stream& stream;

 private:
  struct Allocation {
    std::vector<float> heap;  // empty in another place
    char* storage;            // on the host
    int64_t element_bytes;
    int64_t elements;
    int64_t begin;
    int64_t rows;
    int64_t columns;
    int64_t row_stride;
  };
  TensorView Allocate(DType dtype, int64_t rows, int64_t columns, int64_t row_gap);
  TensorView AllocateVector(DType dtype, int64_t n);
  MemoryLayout layout_;
  OperandTypes types_;
  std::deque<Allocation> allocations_;
  std::deque<std::vector<int32_t>> ids_;  // on the heap
  CpuStream cpu_stream_;
};

// The elements of a view of fp32, bf16 or fp16, row by row.
std::vector<float> Read(const TensorView& view);

using Values = std::vector<std::vector<double>>;
using Results = std::vector<std::vector<float>>;

struct InputSpec {
  enum class Kind { kReal, kConstant, kIds };  // kConstant: real, but no gradient is asked for
  std::string name;
  int64_t elements;
  Kind kind = Kind::kReal;
  int64_t id_limit = 0;
  int64_t id_lowest = 0;
};

struct OpCase {
  std::string name;
  std::vector<InputSpec> inputs;
  std::function<Values(const Values& inputs)> oracle;
  std::function<Results(Operands&, const Values& inputs)> forward;
  // Gradients of sum(cotangent * output) with respect to the kReal inputs, in order. Empty: the op
  // has none.
  std::function<Results(Operands&, const Values& inputs, const Values& cotangents)> backward;
  bool unit_cotangents = false;      // the backward op fixes the cotangents at one
  double forward_tolerance = 3e-6;   // of the largest magnitude of an output
  double backward_tolerance = 2e-5;  // of the largest magnitude of a gradient
};

// All rows of the table.
std::vector<OpCase> AllOpCases();

// Values that are exact in fp32, from a seed.
Values MakeInputs(const OpCase& op_case, uint64_t seed);
std::vector<double> RandomValues(int64_t n, uint64_t seed);

}  // namespace ravel::kernels::testing
