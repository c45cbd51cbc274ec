#pragma once

// The sum of squares of every tensor with the same bits for every number of ranks: fp32 sums of
// rows, added by a binary tree over the row index, fp64; blocks of columns, where a mesh axis cuts
// them, have a tree each and are added by another. A rank sends only the nodes of the largest
// aligned subtrees inside the rows it owns.

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "common/plan/layout/owned_boxes.h"
#include "common/plan/sharding_plan.h"
#include "common/signed_size.h"
#include "kernels/step_statistics.h"
#include "kernels/stream.h"

namespace ravel::optim {

// Elements that one row sum covers: a matrix row; 256 elements of a vector, or all of a shorter
// one.
int64_t StatisticsRowElements(const Shape& shape);

// A node of the tree over a tensor's rows: rows [index * 2^level, (index + 1) * 2^level).
struct TreeNode {
  plan::TensorId tensor = 0;
  int level = 0;
  int64_t index = 0;
  int64_t first_row() const { return index << level; }
  int64_t rows() const { return int64_t{1} << level; }
  bool operator==(const TreeNode&) const = default;
};

// Rows [begin, end) as maximal aligned nodes, ascending.
std::vector<TreeNode> NodesOfRows(plan::TensorId tensor, int64_t begin, int64_t end);

// The sum over all tensors as additions, level by level, of the numbers that ranks send.
struct SumProgram {
  std::vector<kernels::SumStep> steps;
  std::vector<int64_t> level_ends;
  int32_t total = kernels::kNoOperand;
};

// Which nodes each rank sends, and how all of them add up. Pure; equal on all ranks.
class NormTree {
 public:
  explicit NormTree(const plan::ShardingPlan& plan);

  // Nodes that `rank` sends: of what it measures and counts (plan_pieces.h), in that order, group
  // by group.
  const std::vector<TreeNode>& nodes(int rank) const { return At(nodes_, rank); }
  // Most nodes of any rank: the length of everybody's message.
  int64_t longest() const { return longest_; }

  // Sum of squares per tensor. values[rank][i] belongs to nodes(rank)[i].
  std::vector<double> Combine(const std::vector<std::span<const double>>& values) const;
  // The sum over tensors, in the order of their canonical names.
  double Total(const std::vector<double>& tensor_sums) const;
  // Total(Combine(values)) with the same bits, where values[rank][i] is word word_of(rank, i) of
  // the messages.
  SumProgram Program(const std::function<int32_t(int rank, size_t position)>& word_of) const;

 private:
  struct Source {
    int rank = 0;
    size_t position = 0;
    TreeNode node;
    Shape columns;  // where the item's block of columns begins; zeros unless columns are cut
  };
  std::vector<std::vector<TreeNode>> nodes_;                     // by rank
  plan::IdVector<plan::TensorId, std::vector<Source>> sources_;  // ascending rows
  std::vector<size_t> by_name_;                                  // tensors in canonical order
  int64_t longest_ = 0;
};

// The rows that a piece is measured in: the short last row of a vector is one. Where sums are in
// parts, those of a matrix's columns are measured block by block, each with all rows.
struct PieceRows {
  int64_t first = 0;  // row of the tensor
  int64_t rows = 0;
  int64_t blocks = 1;   // of columns, one after another
  int64_t columns = 0;  // of a block
  int64_t sums() const { return rows * blocks; }
};
PieceRows RowsOf(const plan::ModelInventory& inventory, const plan::OwnedPiece& piece);
// Sums of squares of a piece's rows, whose first element is at `values`: into `sums`
// [PieceRows::sums], block by block, and its elements that are not finite: += *non_finite
// (optional). All is memory of the stream's backend.
void MeasureRows(kernels::Stream& stream,
                 const plan::ModelInventory& inventory,
                 const plan::OwnedPiece& piece,
                 const float* values,
                 float* sums,
                 int64_t* non_finite);
// The sums of the rows of one piece after another -> values of nodes. Host memory.
class NodeSums {
 public:
  // NormTree::nodes of the rank, and their values: those from `next` on are filled.
  NodeSums(const plan::ModelInventory& inventory,
           const std::vector<TreeNode>& nodes,
           std::vector<double>& out,
           size_t next)
      : inventory_(inventory), nodes_(nodes), out_(out), next_(next) {}
  void Add(const plan::OwnedPiece& piece, const float* row_sums);
  // The first node that is not filled yet.
  size_t next() const { return next_; }

 private:
  const plan::ModelInventory& inventory_;
  const std::vector<TreeNode>& nodes_;
  std::vector<double>& out_;
  size_t next_;
  std::vector<double> wide_;
};

// Sums of squares of a rank's pieces as nodes of the tree, on a host.
struct NodeMeasure {
  const plan::ModelInventory& inventory;
  const std::vector<plan::OwnedPiece>& pieces;
  const float* base = nullptr;         // piece p's elements begin at base + p.shard_offset
  const std::vector<TreeNode>& nodes;  // NormTree::nodes of the rank
  std::vector<double>& out;            // value per node
};
// Fills the nodes of the pieces, which are those from `next` on; returns the first node after them.
size_t MeasureNodes(kernels::Stream& stream, const NodeMeasure& measure, size_t next);

}  // namespace ravel::optim
