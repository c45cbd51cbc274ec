#include "tests/kernels/op_case.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace ravel::kernels::testing {
namespace {

constexpr float kPoison = std::numeric_limits<float>::quiet_NaN();

OperandPlace*& ActivePlace() {
  static OperandPlace* place = nullptr;
  return place;
}

}  // namespace

void UseOperandPlace(OperandPlace* place) {
  ActivePlace() = place;
}

Operands::Operands(MemoryLayout layout)
    : stream(ActivePlace() != nullptr ? ActivePlace()->stream() : cpu_stream_), layout_(layout) {
  if (ActivePlace() != nullptr) {
    ActivePlace()->Clear();
  }
}

TensorView Operands::Allocate(int64_t rows, int64_t columns, int64_t row_gap) {
  const int64_t stride = columns + row_gap;
  Allocation& allocation = allocations_.emplace_back();
  allocation.begin = layout_.offset;
  allocation.rows = rows;
  allocation.columns = columns;
  allocation.row_stride = stride;
  allocation.elements = layout_.offset + rows * stride + 1;
  if (ActivePlace() != nullptr) {
    const int64_t bytes = allocation.elements * static_cast<int64_t>(sizeof(float));
    allocation.storage = static_cast<float*>(ActivePlace()->Allocate(bytes));
  } else {
    allocation.heap.resize(static_cast<size_t>(allocation.elements));
    allocation.storage = allocation.heap.data();
  }
  std::fill_n(allocation.storage, allocation.elements, kPoison);
  TensorView view = MatrixView(allocation.storage + layout_.offset, rows, columns);
  view.row_stride = stride;
  return view;
}

TensorView Operands::Matrix(int64_t rows, int64_t columns, const std::vector<double>& values) {
  CHECK_EQ(static_cast<int64_t>(values.size()), rows * columns);
  const TensorView view = Matrix(rows, columns);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t column = 0; column < columns; ++column) {
      view.Row<float>(row)[column] =
          static_cast<float>(values[static_cast<size_t>(row * columns + column)]);
    }
  }
  return view;
}

TensorView Operands::Matrix(int64_t rows, int64_t columns) {
  return Allocate(rows, columns, layout_.row_gap);
}

TensorView Operands::Vector(int64_t n) {
  return VectorView(Allocate(1, n, 0).As<float>(), n);
}

TensorView Operands::Vector(int64_t n, const std::vector<double>& values) {
  CHECK_EQ(static_cast<int64_t>(values.size()), n);
  const TensorView view = Vector(n);
  for (int64_t i = 0; i < n; ++i) {
    view.As<float>()[i] = static_cast<float>(values[static_cast<size_t>(i)]);
  }
  return view;
}

TensorView Operands::Workspace(int64_t rows, int64_t columns) {
  return Allocate(rows, columns, 0);
}

TensorView Operands::Ids(const std::vector<double>& values) {
  int32_t* ids = nullptr;
  if (ActivePlace() != nullptr) {
    const size_t bytes = (values.size() + 1) * sizeof(int32_t);
    ids = static_cast<int32_t*>(ActivePlace()->Allocate(static_cast<int64_t>(bytes)));
  } else {
    ids = ids_.emplace_back(values.size() + 1).data();
  }
  for (size_t i = 0; i < values.size(); ++i) {
    ids[i] = static_cast<int32_t>(values[i]);
  }
  return {.data = ids,
          .dtype = DType::kI32,
          .rank = 1,
          .size = {static_cast<int64_t>(values.size())},
          .row_stride = 1};
}

bool Operands::GapsUntouched() const {
  for (const Allocation& allocation : allocations_) {
    for (int64_t i = 0; i < allocation.elements; ++i) {
      const int64_t at = i - allocation.begin;
      const bool inside = at >= 0 && at < allocation.rows * allocation.row_stride &&
                          at % allocation.row_stride < allocation.columns;
      if (!inside && !std::isnan(allocation.storage[i])) {
        return false;
      }
    }
  }
  return true;
}

std::vector<float> Read(const TensorView& view) {
  if (ActivePlace() != nullptr) {
    ActivePlace()->Finish();
  }
  std::vector<float> values(static_cast<size_t>(view.elements()));
  const int64_t columns = view.columns();
  for (int64_t row = 0; row < view.rows() && columns > 0; ++row) {
    std::memcpy(values.data() + row * columns,
                view.Row<float>(row),
                sizeof(float) * static_cast<size_t>(columns));
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
