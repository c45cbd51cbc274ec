#include "kernels/update.h"

#include <algorithm>
#include <vector>

#include "common/check.h"
#include "kernels/scalar/decide_step.h"

namespace ravel::kernels {

UpdateScalars MakeUpdateScalars(const UpdateHyper& hyper, int64_t t, float gradient_scale) {
  CHECK_MSG(t >= 1, "t counts from 1: updates applied so far + 1");
  return scalar::ScalarsOfUpdate<UpdateScalars>(hyper, t, gradient_scale);
}

namespace {

// As many whole rows as a block takes, or parts of one that is longer.
void CutRows(UpdatePiece rest, std::vector<UpdatePiece>& cut) {
  const int64_t row = rest.row;
  const int64_t rows = std::max<int64_t>(1, kMaxBlockElements / row) * row;
  for (int64_t done = 0; done < rest.elements;) {
    UpdatePiece part = rest;
    const int64_t most =
        row <= kMaxBlockElements ? rows : std::min(kMaxBlockElements, row - done % row);
    part.elements = std::min(rest.elements - done, most);
    part.offset += done;
    part.first_index += done;
    part.first_scale += done / row * DivCeil(row, kUpdateGroup) + done % row / kUpdateGroup;
    part.row = std::min(row, part.elements);
    cut.push_back(part);
    done += part.elements;
  }
}

}  // namespace

std::vector<UpdatePiece> CutForBlocks(const std::vector<UpdatePiece>& pieces) {
  static_assert(kMaxBlockElements % kUpdateGroup == 0);
  std::vector<UpdatePiece> cut;
  for (UpdatePiece rest : pieces) {
    if (rest.row > 0) {
      CutRows(rest, cut);
      continue;
    }
    while (rest.elements > 0) {
      UpdatePiece part = rest;
      part.elements = std::min(rest.elements, kMaxBlockElements - rest.offset % kMaxBlockElements);
      cut.push_back(part);
      rest.offset += part.elements;
      rest.first_index += part.elements;
      rest.elements -= part.elements;
    }
  }
  return cut;
}

void CheckPieces(const PieceTable& table, int64_t elements) {
  for (int64_t i = 0; i < table.count; ++i) {
    const UpdatePiece& piece = table.pieces[i];
    CHECK_MSG(piece.offset >= 0 && piece.elements >= 0 && piece.first_index >= 0 &&
                  piece.elements <= elements - piece.offset,
              "a piece outside its ranges");
  }
}

}  // namespace ravel::kernels
