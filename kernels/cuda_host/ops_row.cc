// Host half of ops over rows: activations, rotary and learned positions, embedding, bias. All are
// bound by memory, so the one decision is the vector width: 16-byte accesses where every view's
// address and row stride allow them, single elements elsewhere. The variant never changes the
// result, only its speed. Gradients that several tokens add to are computed by one owner per
// element in a fixed order, without atomics.

#include <algorithm>

#include "common/check.h"
#include "kernels/cuda_host/launch_rules.h"
#include "kernels/cuda_host/ops.h"

namespace ravel::kernels::cuda {

void SwiGluForward(Stream& stream, const SwiGluForwardArgs& args) {
  LaunchStream& on = LaunchStreamOf(stream);
  const int64_t rows = args.gate.size[0];
  const int64_t columns = args.gate.size[1];
  RequireFloat(args.gate);
  for (const TensorView& view : {args.gate, args.up, args.y}) {
    RequireMatrix(view, rows, columns, args.gate.dtype);
  }
  if (rows == 0 || columns == 0) {
    return;
  }
  const Variant variant = VariantFor({args.gate, args.up, args.y});
  on.Run({.kernel = Kernel::kSwiGluForward,
          .variant = variant,
          .grid = RowGrid(on, rows, columns / WidthOf(variant))},
         SwiGluForwardParams{.gate = args.gate.data,
                             .up = args.up.data,
                             .y = args.y.data,
                             .gate_stride = args.gate.row_stride,
                             .up_stride = args.up.row_stride,
                             .y_stride = args.y.row_stride,
                             .rows = rows,
                             .columns = columns});
}

void SwiGluBackward(Stream& stream, const SwiGluBackwardArgs& args) {
  LaunchStream& on = LaunchStreamOf(stream);
  const int64_t rows = args.gate.size[0];
  const int64_t columns = args.gate.size[1];
  RequireFloat(args.gate);
  for (const TensorView& view : {args.gate, args.up, args.dy, args.dgate, args.dup}) {
    RequireMatrix(view, rows, columns, args.gate.dtype);
  }
  if (args.y.present()) {
    RequireMatrix(args.y, rows, columns, args.gate.dtype);
  }
  if (rows == 0 || columns == 0) {
    return;
  }
  const Variant variant = VariantFor({args.gate, args.up, args.dy, args.dgate, args.dup, args.y});
  on.Run({.kernel = Kernel::kSwiGluBackward,
          .variant = variant,
          .grid = RowGrid(on, rows, columns / WidthOf(variant))},
         SwiGluBackwardParams{.gate = args.gate.data,
                              .up = args.up.data,
                              .dy = args.dy.data,
                              .dgate = args.dgate.data,
                              .dup = args.dup.data,
                              .y = args.y.data,
                              .gate_stride = args.gate.row_stride,
                              .up_stride = args.up.row_stride,
                              .dy_stride = args.dy.row_stride,
                              .dgate_stride = args.dgate.row_stride,
                              .dup_stride = args.dup.row_stride,
                              .y_stride = args.y.row_stride,
                              .rows = rows,
                              .columns = columns});
}

namespace {

// A flat range as one row, a matrix as it is.
TensorView AsMatrix(const TensorView& view) {
  if (view.rank == 2) {
    return view;
  }
  TensorView matrix = view;
  matrix.rank = 2;
  matrix.size = {1, view.elements()};
  matrix.row_stride = view.elements();
  return matrix;
}

}  // namespace

void AddInPlace(Stream& stream, const AddArgs& args) {
  LaunchStream& on = LaunchStreamOf(stream);
  const bool flat = args.x.rank != 2 || args.y.rank != 2;
  if (flat) {
    RequireFlat(args.x, args.x.elements(), args.x.dtype);
    RequireFlat(args.y, args.x.elements(), args.x.dtype);
  }
  TensorView x = args.x;
  TensorView y = args.y;
  if (flat) {
    x.rank = y.rank = 1;
    x.size = y.size = {args.x.elements()};
  }
  x = AsMatrix(x);
  y = AsMatrix(y);
  RequireFloat(x);
  RequireMatrix(x, x.size[0], x.size[1], x.dtype);
  RequireMatrix(y, x.size[0], x.size[1], x.dtype);
  if (x.elements() == 0) {
    return;
  }
  const Variant variant = VariantFor({x, y});
  on.Run({.kernel = Kernel::kAddInPlace,
          .variant = variant,
          .grid = RowGrid(on, x.size[0], x.size[1] / WidthOf(variant))},
         AddInPlaceParams{.x = x.data,
                          .y = y.data,
                          .x_stride = x.row_stride,
                          .y_stride = y.row_stride,
                          .rows = x.size[0],
                          .columns = x.size[1]});
}

void BuildRopeTable(Stream& stream, const RopeTableArgs& args) {
  LaunchStream& on = LaunchStreamOf(stream);
  const int64_t positions = args.cosine.size[0];
  const int64_t half = args.cosine.size[1];
  RequireFlat(args.inverse_frequency, half, DType::kF32);
  RequireMatrix(args.cosine, positions, half, DType::kF32);
  RequireMatrix(args.sine, positions, half, DType::kF32);
  if (positions * half == 0) {
    return;
  }
  on.Run({.kernel = Kernel::kRopeTable, .grid = {FlatGrid(on, positions * half), 1, 1}},
         RopeTableParams{.inverse_frequency = args.inverse_frequency.As<float>(),
                         .cosine = args.cosine.As<float>(),
                         .sine = args.sine.As<float>(),
                         .cosine_stride = args.cosine.row_stride,
                         .sine_stride = args.sine.row_stride,
                         .positions = positions,
                         .half = half});
}

void Rope(Stream& stream, const RopeArgs& args) {
  LaunchStream& on = LaunchStreamOf(stream);
  const int64_t rows = args.x.size[0];
  const int64_t half = args.head_size / 2;
  CHECK_MSG(args.head_size > 0 && args.head_size % 2 == 0, "a head has an even size");
  CHECK_MSG(args.sequence_tokens > 0, "a sequence has tokens");
  CHECK_MSG(args.x.size[1] % args.head_size == 0, "columns are whole heads");
  CHECK_MSG(args.cosine.rows() >= std::min(args.sequence_tokens, rows),
            "the table is shorter than a sequence");
  RequireFloat(args.x);
  RequireMatrix(args.x, rows, args.x.size[1], args.x.dtype);
  RequireMatrix(args.cosine, args.cosine.rows(), half, DType::kF32);
  RequireMatrix(args.sine, args.cosine.rows(), half, DType::kF32);
  if (args.x.elements() == 0) {
    return;
  }
  Variant variant = VariantFor({args.x});
  if (half % WidthOf(variant) != 0) {  // both halves of a head begin at 16 bytes
    variant = ScalarVariantOf(args.x.dtype);
  }
  on.Run({.kernel = Kernel::kRope,
          .variant = variant,
          .grid = RowGrid(on, rows, args.x.size[1] / 2 / WidthOf(variant))},
         RopeParams{.x = args.x.data,
                    .cosine = args.cosine.As<float>(),
                    .sine = args.sine.As<float>(),
                    .x_stride = args.x.row_stride,
                    .cosine_stride = args.cosine.row_stride,
                    .sine_stride = args.sine.row_stride,
                    .rows = rows,
                    .heads = args.x.size[1] / args.head_size,
                    .half = half,
                    .sequence_tokens = args.sequence_tokens,
                    .sign = args.direction == RopeDirection::kForward ? 1.0f : -1.0f});
}

namespace {

int64_t VocabularyOf(const TableRows& rows, const TensorView& table) {
  CHECK_MSG(rows.first >= 0, "rows of a table begin in the vocabulary");
  return rows.vocabulary == 0 ? table.size[0] : rows.vocabulary;
}

}  // namespace

void EmbeddingForward(Stream& stream, const EmbeddingForwardArgs& args) {
  LaunchStream& on = LaunchStreamOf(stream);
  const int64_t tokens = args.ids.elements();
  const int64_t hidden = args.table.size[1];
  RequireFloat(args.table);
  RequireMatrix(args.table, args.table.size[0], hidden, args.table.dtype);
  CHECK_MSG(args.out.dtype == args.table.dtype || args.out.dtype == DType::kF32,
            "rows of a table are of its type, or fp32");
  RequireMatrix(args.out, tokens, hidden, args.out.dtype);
  RequireFlat(args.ids, tokens, DType::kI32);
  if (tokens == 0 || hidden == 0) {
    return;
  }
  // A narrow table whose rows become fp32 is read by vectors, and written one by one.
  const bool mixed = args.out.dtype != args.table.dtype;
  const Variant variant =
      mixed ? MixedVariantFor({args.table}) : VariantFor({args.table, args.out});
  on.Run({.kernel = Kernel::kEmbeddingForward,
          .variant = variant,
          .grid = {BlockPerRow(on, tokens), 1, 1},
          .block = RowThreads(hidden / WidthOf(variant), 2, kFlatThreads)},
         EmbeddingForwardParams{.ids = args.ids.As<int32_t>(),
                                .table = args.table.data,
                                .out = args.out.data,
                                .table_stride = args.table.row_stride,
                                .out_stride = args.out.row_stride,
                                .tokens = tokens,
                                .hidden = hidden,
                                .vocabulary = VocabularyOf(args.rows, args.table),
                                .first = args.rows.first,
                                .rows = args.table.size[0]});
}

void EmbeddingBackward(Stream& stream, const EmbeddingBackwardArgs& args) {
  LaunchStream& on = LaunchStreamOf(stream);
  const int64_t tokens = args.ids.elements();
  const int64_t hidden = args.dtable.size[1];
  RequireFloat(args.dout);
  RequireGradient(args.dtable);
  CHECK_MSG(args.dtable.dtype == DType::kF32 || args.dout.dtype == DType::kBF16,
            "the gradient of a table is fp32, or bf16 like dout");
  RequireMatrix(args.dtable, args.dtable.size[0], hidden, args.dtable.dtype);
  RequireMatrix(args.dout, tokens, hidden, args.dout.dtype);
  RequireFlat(args.ids, tokens, DType::kI32);
  if (args.output == Output::kOverwrite) {
    ZeroMatrix(on, args.dtable);
  }
  if (tokens == 0 || hidden == 0) {
    return;
  }
  // Only reads of dout are vectors: a row of the table is written once.
  const bool mixed = args.dout.dtype != args.dtable.dtype;
  const Variant variant = mixed ? MixedVariantFor({args.dout}) : VariantFor({args.dout});
  const int64_t blocks = DivCeil(hidden / WidthOf(variant), int64_t{kFlatThreads});
  on.Run({.kernel = Kernel::kEmbeddingBackward,
          .variant = variant,
          .grid = {static_cast<uint32_t>(tokens), static_cast<uint32_t>(blocks), 1}},
         EmbeddingBackwardParams{.ids = args.ids.As<int32_t>(),
                                 .dout = args.dout.data,
                                 .dtable = args.dtable.data,
                                 .dout_stride = args.dout.row_stride,
                                 .dtable_stride = args.dtable.row_stride,
                                 .tokens = tokens,
                                 .hidden = hidden,
                                 .vocabulary = VocabularyOf(args.rows, args.dtable),
                                 .first = args.rows.first,
                                 .rows = args.dtable.size[0]});
}

void GeluForward(Stream& stream, const GeluForwardArgs& args) {
  LaunchStream& on = LaunchStreamOf(stream);
  const int64_t rows = args.x.size[0];
  const int64_t columns = args.x.size[1];
  RequireFloat(args.x);
  RequireMatrix(args.x, rows, columns, args.x.dtype);
  RequireMatrix(args.y, rows, columns, args.x.dtype);
  if (rows == 0 || columns == 0) {
    return;
  }
  const Variant variant = VariantFor({args.x, args.y});
  GeluParams params = {};
  params.x = args.x.data;
  params.y = args.y.data;
  params.x_stride = args.x.row_stride;
  params.y_stride = args.y.row_stride;
  params.rows = rows;
  params.columns = columns;
  on.Run({.kernel = Kernel::kGeluForward,
          .variant = variant,
          .grid = RowGrid(on, rows, columns / WidthOf(variant))},
         params);
}

void GeluBackward(Stream& stream, const GeluBackwardArgs& args) {
  LaunchStream& on = LaunchStreamOf(stream);
  const int64_t rows = args.x.size[0];
  const int64_t columns = args.x.size[1];
  RequireFloat(args.x);
  for (const TensorView& view : {args.x, args.dy, args.dx}) {
    RequireMatrix(view, rows, columns, args.x.dtype);
  }
  if (args.y.present()) {
    RequireMatrix(args.y, rows, columns, args.x.dtype);
  }
  if (rows == 0 || columns == 0) {
    return;
  }
  const Variant variant = VariantFor({args.x, args.dy, args.dx, args.y});
  on.Run({.kernel = Kernel::kGeluBackward,
          .variant = variant,
          .grid = RowGrid(on, rows, columns / WidthOf(variant))},
         GeluParams{.x = args.x.data,
                    .dy = args.dy.data,
                    .dx = args.dx.data,
                    .y = args.y.data,
                    .x_stride = args.x.row_stride,
                    .dy_stride = args.dy.row_stride,
                    .dx_stride = args.dx.row_stride,
                    .y_stride = args.y.row_stride,
                    .rows = rows,
                    .columns = columns});
}

namespace {

// x[t] (=|+=) table[t % period].
void AddRows(LaunchStream& on,
             Kernel kernel,
             const TensorView& table,
             const TensorView& x,
             int64_t period,
             Output output) {
  if (x.elements() == 0) {
    return;
  }
  const Variant variant = VariantFor({x, table});
  on.Run({.kernel = kernel,
          .variant = variant,
          .grid = RowGrid(on, x.size[0], x.size[1] / WidthOf(variant))},
         AddRowsParams{.table = table.data,
                       .x = x.data,
                       .table_stride = table.row_stride,
                       .x_stride = x.row_stride,
                       .rows = x.size[0],
                       .columns = x.size[1],
                       .period = period,
                       .accumulate = output == Output::kAccumulate ? 1 : 0});
}

}  // namespace

void AddBias(Stream& stream, const AddBiasArgs& args) {
  RequireFloat(args.y);
  RequireMatrix(args.y, args.y.size[0], args.y.size[1], args.y.dtype);
  RequireFlat(args.bias, args.y.size[1], args.y.dtype);
  AddRows(LaunchStreamOf(stream), Kernel::kAddBias, args.bias, args.y, 1, args.output);
}

void AddPositions(Stream& stream, const AddPositionsArgs& args) {
  RequireFloat(args.x);
  RequireMatrix(args.x, args.x.size[0], args.x.size[1], args.x.dtype);
  RequireMatrix(args.table, args.table.size[0], args.x.size[1], args.x.dtype);
  CHECK_MSG(args.sequence_tokens > 0 && args.sequence_tokens <= args.table.size[0],
            "the table is shorter than a sequence");
  AddRows(LaunchStreamOf(stream),
          Kernel::kAddPositions,
          args.table,
          args.x,
          args.sequence_tokens,
          Output::kAccumulate);
}

void PositionGradient(Stream& stream, const PositionGradientArgs& args) {
  LaunchStream& on = LaunchStreamOf(stream);
  const int64_t rows = args.dx.size[0];
  const int64_t columns = args.dx.size[1];
  RequireFloat(args.dx);
  RequireGradient(args.dtable);
  CHECK_MSG(args.dtable.dtype == DType::kF32 || args.dx.dtype == DType::kBF16,
            "the gradient of a table is fp32, or bf16 like dx");
  RequireMatrix(args.dx, rows, columns, args.dx.dtype);
  RequireMatrix(args.dtable, args.dtable.size[0], columns, args.dtable.dtype);
  CHECK_MSG(args.sequence_tokens > 0 && args.sequence_tokens <= args.dtable.size[0],
            "the table is shorter than a sequence");
  if (args.output == Output::kOverwrite) {
    ZeroMatrix(on, args.dtable);
  }
  if (rows == 0 || columns == 0) {
    return;
  }
  const bool mixed = args.dx.dtype != args.dtable.dtype;
  const Variant variant = mixed ? MixedVariantFor({args.dx}) : VariantFor({args.dx});
  on.Run({.kernel = Kernel::kPositionGradient,
          .variant = variant,
          .grid = RowGrid(on, args.sequence_tokens, columns / WidthOf(variant))},
         PositionGradientParams{.dx = args.dx.data,
                                .dtable = args.dtable.data,
                                .dx_stride = args.dx.row_stride,
                                .dtable_stride = args.dtable.row_stride,
                                .rows = rows,
                                .columns = columns,
                                .period = args.sequence_tokens});
}

}  // namespace ravel::kernels::cuda
