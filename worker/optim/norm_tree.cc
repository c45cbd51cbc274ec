#include "worker/optim/norm_tree.h"

#include <algorithm>
#include <bit>

#include "common/check.h"
#include "common/plan/plan_pieces.h"
#include "common/shape.h"
#include "kernels/row_sum.h"

namespace ravel::optim {
namespace {

constexpr int64_t kVectorRowElements = 256;

struct PartialSum {
  int level = 0;
  int64_t index = 0;
  double value = 0;
};

// Merges the last two subtrees while they are siblings.
void MergeSiblings(std::vector<PartialSum>& stack) {
  while (stack.size() >= 2) {
    PartialSum& left = stack[stack.size() - 2];
    const PartialSum& right = stack.back();
    if (left.level != right.level || left.index % 2 != 0 || right.index != left.index + 1) {
      return;
    }
    left = {.level = left.level + 1, .index = left.index / 2, .value = left.value + right.value};
    stack.pop_back();
  }
}

// What a rank measures of a group's gradients, where that counts.
std::vector<plan::OwnedPiece> CountedPieces(const plan::ShardingPlan& plan, int group, int rank) {
  if (!plan.rules[static_cast<size_t>(group)].trainable || !plan::Counts(plan, group, rank)) {
    return {};
  }
  return plan::MeasuredPieces(plan, group, rank);
}

}  // namespace

int64_t StatisticsRowElements(const Shape& shape) {
  if (shape.size() <= 1) {
    return std::max<int64_t>(1, std::min(kVectorRowElements, ElementCount(shape)));
  }
  return RowElements(shape);
}

std::vector<TreeNode> NodesOfRows(int tensor, int64_t begin, int64_t end) {
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
    for (int group = 0; group < static_cast<int>(plan.groups.size()); ++group) {
      for (const plan::OwnedPiece& piece : CountedPieces(plan, group, rank)) {
        const Shape& shape = plan.inventory.tensors[static_cast<size_t>(piece.tensor)].shape;
        const int64_t row = StatisticsRowElements(shape);
        CHECK_MSG(piece.begin % row == 0, "a shard boundary cuts a row");
        for (const TreeNode& node :
             NodesOfRows(piece.tensor, piece.begin / row, DivCeil(piece.end, row))) {
          sources_[static_cast<size_t>(piece.tensor)].push_back(
              {.rank = rank, .position = mine.size(), .node = node});
          mine.push_back(node);
        }
      }
    }
    longest_ = std::max(longest_, static_cast<int64_t>(mine.size()));
  }
  for (std::vector<Source>& sources : sources_) {
    std::sort(sources.begin(), sources.end(), [](const Source& a, const Source& b) {
      return a.node.first_row() < b.node.first_row();
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
  std::vector<PartialSum> stack;
  for (const std::vector<Source>& sources : sources_) {
    stack.clear();
    for (const Source& source : sources) {
      stack.push_back({.level = source.node.level,
                       .index = source.node.index,
                       .value = values[static_cast<size_t>(source.rank)][source.position]});
      MergeSiblings(stack);
    }
    // What is left grows smaller to the right; rows that do not exist are +0, which changes
    // nothing.
    double sum = 0;
    for (; !stack.empty(); stack.pop_back()) {
      sum = stack.back().value + sum;
    }
    sums.push_back(sum);
  }
  return sums;
}

size_t MeasureNodes(kernels::Stream& stream, const NodeMeasure& measure, size_t next) {
  const std::vector<TreeNode>& nodes = measure.nodes;
  std::vector<float> row_sums;
  std::vector<double> wide_sums;
  for (const plan::OwnedPiece& piece : measure.pieces) {
    const auto tensor = static_cast<size_t>(piece.tensor);
    const int64_t columns = StatisticsRowElements(measure.inventory.tensors[tensor].shape);
    const int64_t elements = piece.end - piece.begin;
    const int64_t rows = elements / columns;
    const int64_t rest = elements - rows * columns;  // the short last row of a vector
    row_sums.resize(static_cast<size_t>(rows + 1));
    float* values = const_cast<float*>(measure.base) + piece.shard_offset;
    int64_t* non_finite = measure.non_finite == nullptr ? nullptr : &(*measure.non_finite)[tensor];
    kernels::RowSumSquares(stream,
                           {.x = MatrixView(values, rows, columns),
                            .sums = VectorView(row_sums.data(), rows),
                            .non_finite = non_finite});
    if (rest > 0) {
      kernels::RowSumSquares(stream,
                             {.x = MatrixView(values + rows * columns, 1, rest),
                              .sums = VectorView(row_sums.data() + rows, 1),
                              .non_finite = non_finite});
    }
    const int64_t all_rows = rows + (rest > 0 ? 1 : 0);
    wide_sums.assign(row_sums.begin(), row_sums.begin() + all_rows);
    const int64_t first = piece.begin / columns;
    for (; next < nodes.size() && nodes[next].tensor == piece.tensor; ++next) {
      const int64_t begin = nodes[next].first_row() - first;
      CHECK(begin >= 0 && begin + nodes[next].rows() <= all_rows);
      measure.out[next] = kernels::TreeSumDouble(wide_sums.data() + begin, nodes[next].rows());
    }
  }
  return next;
}

double NormTree::Total(const std::vector<double>& tensor_sums) const {
  std::vector<double> ordered;
  for (const size_t tensor : by_name_) {
    ordered.push_back(tensor_sums[tensor]);
  }
  return kernels::TreeSumDouble(ordered.data(), static_cast<int64_t>(ordered.size()));
}

}  // namespace ravel::optim
