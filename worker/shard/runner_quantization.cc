// What instructions do with scales and codes of quantized weights. An update takes amaxes of what
// it has just written, and makes the codes whose scales it knows; the reduction of amaxes and the
// refresh do what that has left.

#include <algorithm>
#include <utility>

#include "common/check.h"
#include "common/plan/program/buffer_index.h"
#include "common/signed_size.h"
#include "worker/shard/instruction_runner.h"

namespace ravel::shard {

using plan::BufferKind;
using plan::Instruction;
using plan::OpCode;
using plan::Operand;
using plan::Role;

// On a host the collective of amaxes compares these.
void InstructionRunner::DigestScales(kernels::Stream& stream) {
  if (stream.backend() == kernels::Backend::kCpu) {
    return;
  }
  uint64_t index = 0;
  const auto add = [&](const auto& words) {
    TensorView view = VectorView(nullptr, std::ssize(words));
    view.dtype = DType::kU32;
    view.data = const_cast<void*>(static_cast<const void*>(words.data()));
    args_.actions->DigestScales(stream, view, index);
    index += words.size();
  };
  add(quant_->weight_amaxes());
  add(quant_->delayed_scales());
}

void InstructionRunner::BeginAmaxes(kernels::Stream& stream) {
  if (amaxes_begun_) {
    return;
  }
  amaxes_begun_ = true;
  measured_.assign(args_.groups.size(), false);
  if (stream.backend() == kernels::Backend::kCpu) {
    scales_digest_ = quant_->ReplicatedDigest();
  }
  const plan::BufferId amax = plan::FindBuffer(args_.plan.buffers, {.kind = BufferKind::kAmax});
  args_.backend.FillBytes(stream, args_.buffers.bytes(amax), 0, quant_->weight_bytes());
}

// Each rank finds the maximum of its part of the vector, and takes the others' parts. On hosts the
// collective also compares the scales that codes had until now: they have no collective of their
// own. On a device their digest is in the statistics.
absl::Status InstructionRunner::ReduceAmaxes(const Instruction& instruction,
                                             comm::CollectiveTag tag) {
  kernels::Stream& stream = StreamOf(instruction);
  BeginAmaxes(stream);
  for (const ParameterGroup& group : args_.groups) {
    if (!measured_[group.index()] && !args_.actions->EncodesOnHost(group.index())) {
      RETURN_IF_ERROR(args_.actions->ReadMainWeights(
          group.index(), group.quant_pieces(), [&](const auto& pieces) {
            quant_->MeasureWeights(stream, pieces);
          }));
    }
  }
  const plan::BufferId all = plan::BufferOf(instruction, Role::kAmax);
  TensorView weights =
      VectorView(nullptr, DivExact(quant_->weight_bytes(), int64_t{sizeof(uint32_t)}));
  weights.dtype = DType::kU32;
  weights.data = args_.buffers.bytes(all);
  args_.actions->AddHostAmaxes(stream, weights);
  amaxes_begun_ = false;
  if (stream.backend() == kernels::Backend::kCpu) {
    tag.generation = static_cast<int64_t>(scales_digest_);
  }
  float* amax = FloatsOf(instruction, Role::kAmax);
  float* part = FloatsOf(instruction, Role::kSum);
  const int64_t words = args_.buffers.elements(plan::BufferOf(instruction, Role::kSum));
  comm::Communicator& ranks = RanksOf(instruction);
  ASSIGN_OR_RETURN(const comm::PieceViews views,
                   ranks.ExchangePieces({.tag = tag,
                                         .staging = amax,
                                         .receive = FloatsOf(instruction, Role::kReceive),
                                         .shard_elements = words,
                                         .contributors = ranks.size(),
                                         .stream = &stream}));
  TensorView largest = VectorView(part, words);
  largest.dtype = DType::kU32;
  kernels::LargestWordsArgs maximum = {.pieces = {}, .out = largest};
  for (const float* piece : views.pieces) {
    maximum.pieces.push_back(reinterpret_cast<const uint32_t*>(piece));
  }
  kernels::LargestWords(stream, maximum);
  RETURN_IF_ERROR(ranks.ReleasePieces(tag));
  return ranks.AllGather(
      {.tag = tag, .shard = part, .gathered = amax, .shard_elements = words, .stream = &stream});
}

void InstructionRunner::FinishAmaxes(kernels::Stream& stream, const TensorView& apply) {
  quant_->FinishStep(stream, apply);
  args_.actions->TakeScales(stream, *quant_);
}

// No amax of an activation is left from a step before, and new histories are empty.
void InstructionRunner::ClearQuantization(kernels::Stream& stream, Refresh refresh) {
  for (const plan::BufferId id : args_.plan.buffers.ids()) {
    const plan::ProgramBuffer& buffer = args_.plan.buffers[id];
    const bool begins = buffer.kind == BufferKind::kDelayedScales && refresh == Refresh::kNew;
    if (begins || buffer.kind == BufferKind::kAmax || buffer.kind == BufferKind::kAmaxFlags) {
      args_.backend.FillBytes(stream, args_.buffers.bytes(id), 0, buffer.bytes);
    }
  }
}

absl::Status InstructionRunner::RefreshAll(Refresh refresh) {
  if (quant_ == nullptr) {
    return absl::OkStatus();
  }
  const Instruction* reduce = nullptr;
  for (const plan::StepProgram& program : args_.plan.programs) {
    for (const Instruction& at : program.instructions) {
      reduce = at.op == OpCode::kAmaxReduce ? &at : reduce;
    }
  }
  CHECK_MSG(reduce != nullptr, "a plan of quantized weights reduces their amaxes");
  ClearQuantization(StreamOf(*reduce), refresh);
  RETURN_IF_ERROR(args_.actions->MeasureHostWeights());
  RETURN_IF_ERROR(ReduceAmaxes(*reduce, {.op = plan::OpLabel::kAmaxReduce, .unit = -1}));
  kernels::Stream& stream = StreamOf(*reduce);
  if (refresh == Refresh::kLoaded) {
    quant_->FinishLoad(stream);
    args_.actions->TakeScales(stream, *quant_);
  } else {
    FinishAmaxes(stream, {});
  }
  for (const ParameterGroup& group : args_.groups) {
    RETURN_IF_ERROR(Quantize(stream, group));
  }
  return absl::OkStatus();
}

std::vector<quant::QuantPiece> InstructionRunner::LeftToQuantize(
    const ParameterGroup& group) const {
  std::vector<quant::QuantPiece> left;
  const std::vector<quant::QuantPiece>& pieces = group.quant_pieces();
  std::vector<Encoded> done = encoded_[group.index()];
  std::sort(done.begin(), done.end(), [](const Encoded& a, const Encoded& b) {
    return std::pair(a.piece, a.first) < std::pair(b.piece, b.first);
  });
  auto encoded = done.begin();
  for (size_t i = 0; i < pieces.size(); ++i) {
    int64_t row = 0;
    const auto add = [&](int64_t end) {
      if (row < end) {
        left.push_back(quant::RowsOf(pieces[i], row, end - row));
      }
    };
    for (; encoded != done.end() && encoded->piece == i; ++encoded) {
      add(encoded->first);
      row = encoded->end;
    }
    add(pieces[i].main_weight.rows());
  }
  return left;
}

absl::Status InstructionRunner::Quantize(kernels::Stream& stream, const ParameterGroup& group) {
  if (args_.actions->EncodesOnHost(group.index())) {
    args_.actions->RefreshOnHost(group.index());
    return absl::OkStatus();
  }
  RETURN_IF_ERROR(
      args_.actions->ReadMainWeights(group.index(), LeftToQuantize(group), [&](const auto& pieces) {
        quant_->Quantize(stream, pieces, has_targets_[group.index()] != 0);
      }));
  encoded_[group.index()].clear();
  has_targets_[group.index()] = 0;
  return absl::OkStatus();
}

absl::Status InstructionRunner::Update(const Instruction& instruction) {
  RETURN_IF_ERROR(state_.BeginUpdate(instruction.group));
  kernels::Stream& stream = StreamOf(instruction);
  StepActions::QuantizedUpdate quantized;
  if (plan::BufferOf(instruction, Role::kAmax) >= 0) {
    const std::vector<quant::QuantPiece>& pieces = Group(instruction).quant_pieces();
    const bool encodes = std::any_of(
        instruction.operands.begin(), instruction.operands.end(), [&](const Operand& operand) {
          return args_.plan.buffers[operand.buffer].kind == BufferKind::kModelWeight;
        });
    const auto begin = [&] {
      BeginAmaxes(stream);
      measured_[instruction.group] = true;
    };
    const auto done = [&](const quant::QuantPiece& piece, quant::QuantState::RowRange rows) {
      if (rows.rows > 0) {
        encoded_[instruction.group].push_back({.piece = Size(&piece - pieces.data()),
                                               .first = rows.first,
                                               .end = rows.first + rows.rows});
      }
    };
    quantized.visit = [=, this, &stream](
                          const quant::QuantPiece& piece, int64_t first, int64_t count) {
      begin();
      quant_->MeasureElements(stream, piece, first, count);
      // A device knows only in its kernels whether there is a scale: the refresh makes all codes.
      if (encodes && stream.backend() == kernels::Backend::kCpu) {
        done(piece, quant_->QuantizeUpdated(stream, piece, first, count));
      }
    };
    quantized.target = [=, this](const quant::QuantPiece& piece) {
      begin();
      const auto [target, rows] = quant_->TargetOf(piece, encodes);
      has_targets_[instruction.group] = encodes ? 1 : 0;
      done(piece, rows);
      return target;
    };
  }
  RETURN_IF_ERROR(args_.actions->UpdateGroup(stream, instruction.group, quantized));
  state_.EndUpdate(instruction.group);
  return absl::OkStatus();
}

}  // namespace ravel::shard
