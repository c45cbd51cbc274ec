// Computes the squared norm of every tensor so that the bits do not depend on the number of ranks.
// The order of additions is fixed as a binary tree over row indices; a rank that owns rows [a, b)
// sends the sums of the largest aligned subtrees inside them, and any rank completes the tree from
// those. Missing rows are +0, which changes nothing. SumRecorder runs the same code on indices
// instead of numbers and so produces the list of additions that a device executes: one
// implementation of the order, used twice. Cost: O(log rows) numbers per rank and contiguous range.

#include "worker/optim/norm_tree.h"

#include <algorithm>
#include <bit>
#include <numeric>

#include "common/check.h"
#include "common/model/tensor_parts.h"
#include "common/plan/plan_pieces.h"
#include "common/shape.h"
#include "common/signed_size.h"
#include "kernels/row_sum.h"

namespace ravel::optim {
namespace {

constexpr int64_t kVectorRowElements = 256;

template <typename Value>
struct PartialSum {
  int level = 0;
  int64_t index = 0;
  Value value;
};

// Merges the last two subtrees while they are siblings.
template <typename Value, typename Add>
void MergeSiblings(std::vector<PartialSum<Value>>& stack, const Add& add) {
  while (stack.size() >= 2) {
    PartialSum<Value>& left = stack[stack.size() - 2];
    const PartialSum<Value>& right = stack.back();
    if (left.level != right.level || left.index % 2 != 0 || right.index != left.index + 1) {
      return;
    }
    left = {
        .level = left.level + 1, .index = left.index / 2, .value = add(left.value, right.value)};
    stack.pop_back();
  }
}

// Adds the remaining subtrees, which grow smaller to the right; rows that do not exist are +0,
// which changes nothing.
template <typename Value, typename Add>
Value SumOfStack(std::vector<PartialSum<Value>>& stack, Value none, const Add& add) {
  Value sum = none;
  for (; !stack.empty(); stack.pop_back()) {
    sum = add(stack.back().value, sum);
  }
  return sum;
}

// The sum of a tensor's nodes: those of each block of columns, ascending and without gaps, one
// block after another; then the blocks by a tree of their own. `none` where there are none.
template <typename Value, typename Sources, typename ValueOf, typename Add>
Value SumOfNodes(const Sources& sources, Value none, const ValueOf& value_of, const Add& add) {
  std::vector<PartialSum<Value>> blocks;
  std::vector<PartialSum<Value>> rows;
  int64_t block = 0;
  for (size_t i = 0; i < sources.size(); ++i) {
    const TreeNode& node = sources[i].node;
    rows.push_back({.level = node.level, .index = node.index, .value = value_of(sources[i])});
    MergeSiblings(rows, add);
    if (i + 1 == sources.size() || sources[i + 1].columns != sources[i].columns) {
      blocks.push_back({.level = 0, .index = block++, .value = SumOfStack(rows, none, add)});
      MergeSiblings(blocks, add);
    }
  }
  return SumOfStack(blocks, none, add);
}

// Additions that are noted, not done. A number of none is +0.
class SumRecorder {
 public:
  int32_t Add(int32_t a, int32_t b) {
    if (a == kernels::kNoOperand || b == kernels::kNoOperand) {
      return a == kernels::kNoOperand ? b : a;
    }
    noted_.push_back({.step = {.a = a, .b = b}, .level = 1 + std::max(LevelOf(a), LevelOf(b))});
    return -static_cast<int32_t>(noted_.size());
  }
  // As kernels::TreeSumDouble.
  int32_t Tree(std::span<const int32_t> values, size_t width) {
    if (values.empty()) {
      return kernels::kNoOperand;
    }
    if (width == 1) {
      return values[0];
    }
    const size_t half = std::min(values.size(), width / 2);
    const int32_t left = Tree(values.first(half), width / 2);
    return Add(left, Tree(values.subspan(half), width / 2));
  }
  SumProgram Finish(int32_t total) const {
    std::vector<size_t> order(noted_.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
      return noted_[a].level < noted_[b].level;
    });
    std::vector<int32_t> place(noted_.size());
    for (size_t i = 0; i < order.size(); ++i) {
      place[order[i]] = -1 - static_cast<int32_t>(i);
    }
    const auto moved = [&](int32_t operand) {
      return operand >= 0 || operand == kernels::kNoOperand ? operand : place[Index(operand)];
    };
    SumProgram program = {.steps = {}, .level_ends = {}, .total = moved(total)};
    for (size_t i = 0; i < order.size(); ++i) {
      const Noted& noted = noted_[order[i]];
      if (i > 0 && noted.level != noted_[order[i - 1]].level) {
        program.level_ends.push_back(static_cast<int64_t>(i));
      }
      program.steps.push_back({.a = moved(noted.step.a), .b = moved(noted.step.b)});
    }
    program.level_ends.push_back(static_cast<int64_t>(noted_.size()));
    return program;
  }

 private:
  struct Noted {
    kernels::SumStep step;
    int level = 0;
  };
  static size_t Index(int32_t operand) { return Size(-1 - operand); }
  int LevelOf(int32_t operand) const { return operand >= 0 ? 0 : noted_[Index(operand)].level; }

  std::vector<Noted> noted_;
};

// Elements of a row of a vector. Where sums are in parts and the tensor axis would cut it, rows end
// where any of its parts does, and with each 256 elements, at which alone shards end.
int64_t VectorRow(const plan::ModelInventory& inventory, const plan::TensorSpec& tensor) {
  const plan::DimensionCut& cut = tensor.cut;
  if (!inventory.cut.cuts() || cut.dim != 0) {
    return StatisticsRowElements(tensor.shape);
  }
  const int64_t pieces =
      cut.heads > 0 ? std::min(inventory.cut.parts, cut.heads) : inventory.cut.parts;
  if (cut.parts[0] == 0) {
    return std::gcd(kVectorRowElements, ElementCount(tensor.shape) / pieces);
  }
  int64_t row = kVectorRowElements;
  for (const int64_t part : cut.parts) {
    row = std::gcd(row, part / pieces);
  }
  return row;
}

// Elements of a row of a piece's item.
int64_t ItemColumns(const plan::ModelInventory& inventory, const plan::OwnedPiece& piece) {
  const plan::TensorSpec& tensor = inventory.tensors[piece.tensor];
  return tensor.shape.size() <= 1 ? VectorRow(inventory, tensor) : RowElements(piece.item.length);
}

}  // namespace

int64_t StatisticsRowElements(const Shape& shape) {
  if (shape.size() <= 1) {
    return std::max<int64_t>(1, std::min(kVectorRowElements, ElementCount(shape)));
  }
  return RowElements(shape);
}

std::vector<TreeNode> NodesOfRows(plan::TensorId tensor, int64_t begin, int64_t end) {
  std::vector<TreeNode> nodes;
  while (begin < end) {
    int level = static_cast<int>(std::bit_width(static_cast<uint64_t>(end - begin))) - 1;
    if (begin != 0) {
      level = std::min(level, std::countr_zero(static_cast<uint64_t>(begin)));
    }
    nodes.push_back({.tensor = tensor, .level = level, .index = begin >> level});
    begin += int64_t{1} << level;
  }
  return nodes;
}

NormTree::NormTree(const plan::ShardingPlan& plan) : sources_(plan.inventory.tensors.size()) {
  const auto ranks = static_cast<int>(plan.ranks);
  for (int rank = 0; rank < ranks; ++rank) {
    std::vector<TreeNode>& mine = nodes_.emplace_back();
    for (const plan::GroupId group : plan.groups.ids()) {
      if (!plan.groups[group].trainable) {
        continue;
      }
      for (const plan::OwnedPiece& piece : plan::CountedPieces(plan, group, rank)) {
        const PieceRows rows = RowsOf(plan.inventory, piece);
        Shape columns = piece.item.offset;
        if (!columns.empty()) {
          columns[0] = 0;
        }
        for (int64_t block = 0; block < rows.blocks; ++block) {
          for (const TreeNode& node :
               NodesOfRows(piece.tensor, rows.first, rows.first + rows.rows)) {
            sources_[piece.tensor].push_back(
                {.rank = rank, .position = mine.size(), .node = node, .columns = columns});
            mine.push_back(node);
          }
          if (columns.size() > 1) {
            columns[1] += rows.columns;
          }
        }
      }
    }
    longest_ = std::max(longest_, static_cast<int64_t>(mine.size()));
  }
  for (std::vector<Source>& sources : sources_) {
    std::sort(sources.begin(), sources.end(), [](const Source& a, const Source& b) {
      return a.columns != b.columns ? a.columns < b.columns
                                    : a.node.first_row() < b.node.first_row();
    });
  }
  for (size_t tensor = 0; tensor < sources_.size(); ++tensor) {
    by_name_.push_back(tensor);
  }
  std::sort(by_name_.begin(), by_name_.end(), [&](size_t a, size_t b) {
    return plan.inventory.tensors[a].site < plan.inventory.tensors[b].site;
  });
}

std::vector<double> NormTree::Combine(const std::vector<std::span<const double>>& values) const {
  std::vector<double> sums;
  for (const std::vector<Source>& sources : sources_) {
    sums.push_back(SumOfNodes(
        sources,
        0.0,
        [&](const Source& source) { return At(values, source.rank)[source.position]; },
        [](double a, double b) { return a + b; }));
  }
  return sums;
}

SumProgram NormTree::Program(
    const std::function<int32_t(int rank, size_t position)>& word_of) const {
  SumRecorder recorder;
  std::vector<int32_t> ordered;
  for (const size_t tensor : by_name_) {
    ordered.push_back(SumOfNodes(
        sources_[tensor],
        kernels::kNoOperand,
        [&](const Source& source) { return word_of(source.rank, source.position); },
        [&](int32_t a, int32_t b) { return recorder.Add(a, b); }));
  }
  return recorder.Finish(recorder.Tree(ordered, std::bit_ceil(ordered.size())));
}

PieceRows RowsOf(const plan::ModelInventory& inventory, const plan::OwnedPiece& piece) {
  const int64_t columns = ItemColumns(inventory, piece);
  const int64_t above =
      piece.item.offset.empty() ? 0 : piece.item.offset[0] * RowElements(piece.item.length);
  CHECK_MSG((above + piece.range.begin) % columns == 0, "a shard boundary cuts a row");
  PieceRows made = {.first = (above + piece.range.begin) / columns,
                    .rows = DivCeil(piece.elements(), columns),
                    .blocks = 1,
                    .columns = columns};
  const Shape& shape = inventory.tensors[piece.tensor].shape;
  if (shape.size() == 2) {
    made.columns = shape[1] / plan::ColumnBlocksOf(inventory, piece.tensor);
    made.blocks = columns / made.columns;
    CHECK_MSG(made.blocks * made.columns == columns, "an item cuts a block of columns");
  }
  return made;
}

void MeasureRows(kernels::Stream& stream,
                 const plan::ModelInventory& inventory,
                 const plan::OwnedPiece& piece,
                 const float* values,
                 float* sums,
                 int64_t* non_finite) {
  const PieceRows piece_rows = RowsOf(inventory, piece);
  const int64_t columns = piece_rows.columns * piece_rows.blocks;
  const int64_t elements = piece.elements();
  const int64_t rows = elements / columns;
  const int64_t rest = elements - rows * columns;  // the short last row of a vector
  float* first = const_cast<float*>(values);
  for (int64_t block = 0; block < piece_rows.blocks; ++block) {
    kernels::RowSumSquares(
        stream,
        {.x = ColumnsOf(
             MatrixView(first, rows, columns), block * piece_rows.columns, piece_rows.columns),
         .sums = VectorView(sums + block * rows, rows),
         .non_finite = non_finite});
  }
  if (rest > 0) {
    kernels::RowSumSquares(stream,
                           {.x = MatrixView(first + rows * columns, 1, rest),
                            .sums = VectorView(sums + rows, 1),
                            .non_finite = non_finite});
  }
}

void NodeSums::Add(const plan::OwnedPiece& piece, const float* row_sums) {
  const PieceRows rows = RowsOf(inventory_, piece);
  wide_.assign(row_sums, row_sums + rows.sums());
  const size_t each = NodesOfRows(piece.tensor, rows.first, rows.first + rows.rows).size();
  for (int64_t block = 0; block < rows.blocks; ++block) {
    for (size_t i = 0; i < each; ++i, ++next_) {
      CHECK(next_ < nodes_.size() && nodes_[next_].tensor == piece.tensor);
      const int64_t begin = nodes_[next_].first_row() - rows.first;
      CHECK(begin >= 0 && begin + nodes_[next_].rows() <= rows.rows);
      out_[next_] =
          kernels::TreeSumDouble(wide_.data() + block * rows.rows + begin, nodes_[next_].rows());
    }
  }
}

size_t MeasureNodes(kernels::Stream& stream, const NodeMeasure& measure, size_t next) {
  std::vector<float> row_sums;
  NodeSums nodes(measure.inventory, measure.nodes, measure.out, next);
  for (const plan::OwnedPiece& piece : measure.pieces) {
    row_sums.resize(Size(RowsOf(measure.inventory, piece).sums()));
    MeasureRows(stream,
                measure.inventory,
                piece,
                measure.base + piece.shard_offset,
                row_sums.data(),
                nullptr);
    nodes.Add(piece, row_sums.data());
  }
  return nodes.next();
}

double NormTree::Total(const std::vector<double>& tensor_sums) const {
  std::vector<double> ordered;
  for (const size_t tensor : by_name_) {
    ordered.push_back(tensor_sums[tensor]);
  }
  return kernels::TreeSumDouble(ordered.data(), static_cast<int64_t>(ordered.size()));
}

}  // namespace ravel::optim
