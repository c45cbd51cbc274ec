#include "tests/kernels/op_case.h"

#include <algorithm>

namespace ravel::kernels::testing {
namespace {

constexpr char kPoison = '\xFF';  // NaN in fp32, bf16 and fp16

OperandPlace*& ActivePlace() {
  static OperandPlace* place = nullptr;
  return place;
}

char* HostOf(void* data) {
  return ActivePlace() != nullptr ? ActivePlace()->HostOf(data) : static_cast<char*>(data);
}

void Send(const void* data, int64_t bytes) {
  if (ActivePlace() != nullptr) {
    ActivePlace()->Send(data, bytes);
  }
}

}  // namespace

void UseOperandPlace(OperandPlace* place) {
  ActivePlace() = place;
}

Operands::Operands(MemoryLayout layout)
    : stream(ActivePlace() != nullptr ? ActivePlace()->stream() : cpu_stream_), layout_(layout) {
  if (ActivePlace() != nullptr) {
    types_ = ActivePlace()->types();
    ActivePlace()->Clear();
  }
}

TensorView Operands::Allocate(DType dtype, int64_t rows, int64_t columns, int64_t row_gap) {
  const int64_t stride = columns + row_gap;
  Allocation& allocation = allocations_.emplace_back();
  allocation.element_bytes = DTypeBytes(dtype);
  allocation.begin = layout_.offset;
  allocation.rows = rows;
  allocation.columns = columns;
  allocation.row_stride = stride;
  allocation.elements = layout_.offset + rows * stride + 1;
  const int64_t bytes = allocation.elements * allocation.element_bytes;
  char* data = nullptr;
  if (ActivePlace() != nullptr) {
    data = static_cast<char*>(ActivePlace()->Allocate(bytes));
  } else {
    allocation.heap.resize(static_cast<size_t>(DivCeil(bytes, int64_t{sizeof(float)})));
    data = reinterpret_cast<char*>(allocation.heap.data());
  }
  allocation.storage = HostOf(data);
  std::fill_n(allocation.storage, bytes, kPoison);
  Send(data, bytes);
  return {.data = data + layout_.offset * allocation.element_bytes,
          .dtype = dtype,
          .rank = 2,
          .size = {rows, columns},
          .row_stride = stride};
}

TensorView Operands::AllocateVector(DType dtype, int64_t n) {
  TensorView view = Allocate(dtype, 1, n, 0);
  view.rank = 1;
  view.size = {n};
  view.row_stride = 1;
  return view;
}

namespace {

// A vector is a row.
TensorView Filled(const TensorView& view, const std::vector<double>& values) {
  CHECK_EQ(static_cast<int64_t>(values.size()), view.elements());
  const int64_t columns = view.columns();
  TensorView host = view;
  host.data = HostOf(view.data);
  for (int64_t i = 0; i < view.elements(); ++i) {
    const int64_t at = i / columns * view.row_stride + i % columns;
    const float value = static_cast<float>(values[static_cast<size_t>(i)]);
    if (view.dtype == DType::kBF16) {
      host.As<uint16_t>()[at] = FloatToBf16(value);
    } else if (view.dtype == DType::kF16) {
      host.As<uint16_t>()[at] = FloatToFp16(value);
    } else {
      host.As<float>()[at] = value;
    }
  }
  if (view.elements() > 0) {
    const int64_t rows = view.elements() / columns;
    Send(view.data, ((rows - 1) * view.row_stride + columns) * DTypeBytes(view.dtype));
  }
  return view;
}

}  // namespace

TensorView Operands::Matrix(int64_t rows, int64_t columns, const std::vector<double>& values) {
  return Filled(Matrix(rows, columns), values);
}

TensorView Operands::Matrix(int64_t rows, int64_t columns) {
  return Allocate(types_.activations, rows, columns, layout_.row_gap);
}

TensorView Operands::Vector(int64_t n) {
  return AllocateVector(types_.activations, n);
}

TensorView Operands::Vector(int64_t n, const std::vector<double>& values) {
  return Filled(Vector(n), values);
}

TensorView Operands::Workspace(int64_t rows, int64_t columns) {
  return Allocate(types_.activations, rows, columns, 0);
}

TensorView Operands::Gradient(int64_t rows, int64_t columns, const std::vector<double>& values) {
  return Filled(Gradient(rows, columns), values);
}

TensorView Operands::Gradient(int64_t rows, int64_t columns) {
  return Allocate(types_.gradients, rows, columns, layout_.row_gap);
}

TensorView Operands::Gradient(int64_t n, const std::vector<double>& values) {
  return Filled(Gradient(n), values);
}

TensorView Operands::Gradient(int64_t n) {
  return AllocateVector(types_.gradients, n);
}

TensorView Operands::Floats(int64_t rows, int64_t columns) {
  return Allocate(DType::kF32, rows, columns, layout_.row_gap);
}

TensorView Operands::Floats(int64_t n, const std::vector<double>& values) {
  return Filled(Floats(n), values);
}

TensorView Operands::Floats(int64_t n) {
  return AllocateVector(DType::kF32, n);
}

TensorView Operands::Ids(const std::vector<double>& values) {
  int32_t* ids = nullptr;
  const auto bytes = static_cast<int64_t>((values.size() + 1) * sizeof(int32_t));
  if (ActivePlace() != nullptr) {
    ids = static_cast<int32_t*>(ActivePlace()->Allocate(bytes));
  } else {
    ids = ids_.emplace_back(values.size() + 1).data();
  }
  auto* const host = reinterpret_cast<int32_t*>(HostOf(ids));
  for (size_t i = 0; i < values.size(); ++i) {
    host[i] = static_cast<int32_t>(values[i]);
  }
  Send(ids, bytes);
  return {.data = ids,
          .dtype = DType::kI32,
          .rank = 1,
          .size = {static_cast<int64_t>(values.size())},
          .row_stride = 1};
}

bool Operands::GapsUntouched() const {
  if (ActivePlace() != nullptr) {
    ActivePlace()->Receive();
  }
  for (const Allocation& allocation : allocations_) {
    for (int64_t i = 0; i < allocation.elements; ++i) {
      const int64_t at = i - allocation.begin;
      const bool inside = at >= 0 && at < allocation.rows * allocation.row_stride &&
                          at % allocation.row_stride < allocation.columns;
      const char* element = allocation.storage + i * allocation.element_bytes;
      if (!inside && std::count(element, element + allocation.element_bytes, kPoison) !=
                         allocation.element_bytes) {
        return false;
      }
    }
  }
  return true;
}

std::vector<float> Read(const TensorView& view) {
  if (ActivePlace() != nullptr) {
    ActivePlace()->Receive();
  }
  TensorView host = view;
  host.data = HostOf(view.data);
  std::vector<float> values(static_cast<size_t>(view.elements()));
  const int64_t columns = view.columns();
  for (int64_t i = 0; i < view.elements(); ++i) {
    const int64_t at = i / columns * view.row_stride + i % columns;
    float& value = values[static_cast<size_t>(i)];
    if (host.dtype == DType::kBF16) {
      value = Bf16ToFloat(host.As<uint16_t>()[at]);
    } else if (host.dtype == DType::kF16) {
      value = Fp16ToFloat(host.As<uint16_t>()[at]);
    } else {
      value = host.As<float>()[at];
    }
  }
  return values;
}

std::vector<double> RandomValues(int64_t n, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<double> values(static_cast<size_t>(n));
  for (double& value : values) {
    value = static_cast<double>(normal(random));
  }
  return values;
}

Values MakeInputs(const OpCase& op_case, uint64_t seed) {
  Values inputs;
  for (const InputSpec& spec : op_case.inputs) {
    ++seed;
    if (spec.kind != InputSpec::Kind::kIds) {
      inputs.push_back(RandomValues(spec.elements, seed));
      continue;
    }
    std::mt19937_64 random(seed);
    std::uniform_int_distribution<int64_t> ids(spec.id_lowest, spec.id_limit - 1);
    std::vector<double>& values = inputs.emplace_back(static_cast<size_t>(spec.elements));
    for (double& value : values) {
      value = static_cast<double>(ids(random));
    }
  }
  return inputs;
}

}  // namespace ravel::kernels::testing
