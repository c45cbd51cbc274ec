// Codes of quantized weights that the host has. An update makes those whose scales it knows, which
// go up with its chunk. The reduction of amaxes tells the scales of the others: they are made from
// main weights once more, in parts of rows, in the slots of chunks that have gone up.

#include <algorithm>
#include <utility>

#include "common/check.h"
#include "common/fault_point.h"
#include "common/signed_size.h"
#include "worker/optim/host_updater.h"

namespace ravel::optim {

void HostUpdater::AddCodes(const OffloadChunk& cut, Chunk& chunk) const {
  chunk.work = args_.codes->WorkOf(cut);
  chunk.work.VisitEncodings([&](const HostCodes::Encoding& at) {
    Run* const last = chunk.codes.empty() ? nullptr : &chunk.codes.back();
    if (last != nullptr && last->begin + last->elements == at.offset) {
      last->elements += at.elements();
    } else {
      chunk.codes.push_back({.begin = at.offset, .elements = at.elements()});
    }
  });
}

void HostUpdater::AddRows(const shard::ParameterGroup& group) {
  GroupRows& rows = rows_[group.index()];
  const Chunks& chunks = of_group_[group.index()];
  for (const quant::QuantPiece& piece : group.quant_pieces()) {
    std::vector<std::pair<int64_t, int64_t>> encoded;
    for (size_t i = chunks.begin; i < chunks.end; ++i) {
      chunks_[i].work.VisitEncodings([&](const HostCodes::Encoding& at) {
        if (at.piece == &piece) {
          encoded.emplace_back(at.rows.first, at.rows.first + at.rows.rows);
        }
      });
    }
    std::sort(encoded.begin(), encoded.end());
    const int64_t most = std::max<int64_t>(
        1, ring_.chunk_elements / std::max<int64_t>(1, piece.main_weight.columns()));
    const auto add = [&](int64_t first, int64_t end, std::vector<Rows>& to) {
      for (; first < end; first += most) {
        to.push_back({.piece = RowsOf(piece, first, std::min(most, end - first)), .owner = this});
      }
    };
    const int64_t end = piece.main_weight.rows();
    add(0, end, rows.all);
    int64_t row = 0;
    for (const auto& [first, after] : encoded) {
      add(row, first, rows.left);
      row = std::max(row, after);
    }
    add(row, end, rows.left);
  }
}

void HostUpdater::PlaceRows() {
  const auto place = [&](std::vector<Rows>& list, size_t& next) {
    for (Rows& rows : list) {
      rows.slot = &slots_[next++ % slots_.size()];
      CHECK_LE(rows.piece.codes.elements(), ring_.slot_bytes);
    }
  };
  size_t all = 0;
  size_t left = 0;
  for (GroupRows& group : rows_) {
    place(group.all, all);
    place(group.left, left);
  }
}

bool HostUpdater::SendsCodes(plan::GroupId group) const {
  return args_.groups[group].recipe() != plan::Recipe::kDelayed || codes_ahead_;
}

absl::Status HostUpdater::MeasureWeights() {
  if (args_.codes == nullptr) {
    return absl::OkStatus();
  }
  RETURN_IF_ERROR(args_.streams.FinishAll());
  args_.codes->Begin();
  args_.codes->Forget();
  all_rows_ = true;
  for (const Chunk& chunk : chunks_) {
    DoWork(chunk, nullptr, nullptr, HostCodes::Cast::kAsIs);
  }
  return absl::OkStatus();
}

void HostUpdater::DoWork(const Chunk& chunk,
                         const ApplyPieces& apply,
                         std::byte* codes,
                         HostCodes::Cast cast) {
  const std::vector<HostCodes::Part>& parts = chunk.work.parts;
  const int64_t count = std::ssize(parts);
  pool_.Run(count, [&](int64_t part) {
    if (part == count / 2) {
      FaultPoint(kHalfOfAChunk).IgnoreError();
    }
    if (apply != nullptr) {
      apply(At(parts, part).pieces);
    }
    args_.codes->Follow(At(parts, part), codes, cast);
  });
  const std::vector<HostCodes::Encoding>& after = chunk.work.after;
  pool_.Run(codes == nullptr ? 0 : std::ssize(after),
            [&](int64_t encoding) { args_.codes->Encode(At(after, encoding), codes, cast); });
}

void HostUpdater::AddAmaxes(kernels::CudaStream& stream, const TensorView& amaxes) {
  // Without chunks nothing has measured. Others are updated before it (rule K7), or outside of
  // steps.
  if (args_.codes != nullptr && !chunks_.empty()) {
    args_.codes->AddAmaxes(stream, amaxes);
  }
}

void HostUpdater::TakeScales(kernels::CudaStream& stream, const quant::QuantState& scales) {
  if (args_.codes != nullptr) {
    args_.codes->TakeScales(stream, scales);
    stream.Record(scales_there_);
    args_.streams.host_work().Wait(scales_there_);
  }
}

void HostUpdater::Refresh(plan::GroupId group) {
  kernels::CudaStream& host = args_.streams.host_work();
  kernels::CudaStream& upload = args_.streams.of(plan::StreamId::kUpload);
  GroupRows& rows = rows_[group];
  for (Rows& at : all_rows_ || !SendsCodes(group) ? rows.all : rows.left) {
    Slot& slot = *at.slot;
    host.Wait(slot.free);
    host.RunOnHost(&EncodeRows, &at, AccessesOf(slot));
    host.Record(slot.updated);
    upload.Wait(slot.updated);
    upload.CopyMemory(at.piece.codes.data, slot.pinned, at.piece.codes.elements());
    upload.Record(slot.free);
  }
  if (!args_.overlap) {
    args_.streams.Join();
  }
}

void HostUpdater::EncodeRows(void* rows) {
  const auto* at = static_cast<const Rows*>(rows);
  at->owner->Encode(*at);
}

void HostUpdater::Encode(const Rows& rows) {
  const int64_t begin = NowNs();
  const int64_t count = rows.piece.codes.rows();
  const int64_t parts = std::min(count, pool_.threads() + 1);
  pool_.Run(parts, [&](int64_t part) {
    const int64_t first = count * part / parts;  // NOLINT(bugprone-integer-division): rounds down
    const int64_t end = count * (part + 1) / parts;
    args_.codes->Encode(RowsOf(rows.piece, first, end - first),
                        rows.slot->pinned + first * rows.piece.codes.columns());
  });
  Note(args_.plan.inventory.tensors[rows.piece.tensor].unit,
       "HostEncode",
       last_.has_value() ? last_->step : 0,
       begin,
       NowNs());
}

}  // namespace ravel::optim
