// Reads a committed step into this rank's shards, on any mesh: pieces are boxes of tensors, so the
// layout that saved them does not matter. Stored bf16 is read into the end of its fp32 range and
// widened from the front, which needs no second buffer. Each element is digested by exactly one
// rank (DigestShare::kOwner); the digests are sums, so the ranks' parts add up to the manifest's
// whatever the cut.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>
#include <absl/strings/str_join.h>

#include "common/check.h"
#include "common/ckpt/digest.h"
#include "common/model/state_groups.h"
#include "common/plan/layout/state_scales.h"
#include "common/signed_size.h"
#include "worker/checkpoint/loader.h"

namespace ravel::checkpoint {
namespace {

static_assert(static_cast<int>(plan::StateRole::kParam) ==
              static_cast<int>(ckpt::TensorRole::kParam));
static_assert(static_cast<int>(plan::StateRole::kStep) ==
              static_cast<int>(ckpt::TensorRole::kStep));

// Returns the end of `out`, into which values stored as `stored` are read before they are widened
// to fp32 in all of `out`.
std::span<std::byte> StoredPart(std::span<std::byte> out, DType stored) {
  return out.last(out.size() / sizeof(float) * Size(DTypeBytes(stored)));
}

// From StoredPart to all of `out`: the part that is still to be read lies behind what is written.
void WidenBf16(std::span<std::byte> out) {
  const std::span<const std::byte> narrow = StoredPart(out, DType::kBF16);
  for (size_t i = 0; i < out.size() / sizeof(float); ++i) {
    uint16_t bits = 0;
    std::memcpy(&bits, narrow.data() + i * sizeof(bits), sizeof(bits));
    const float value = Bf16ToFloat(bits);
    std::memcpy(out.data() + i * sizeof(value), &value, sizeof(value));
  }
}

Shape ShapeOf(const plan::TensorSpec& tensor, plan::StateRole role) {
  if (role == plan::StateRole::kStep) {
    return {};
  }
  const bool scales =
      role == plan::StateRole::kExpAvgScale || role == plan::StateRole::kExpAvgSqScale;
  return scales ? plan::ScaleShape(tensor.shape) : tensor.shape;
}

// Differences beyond this many are counted, not listed.
constexpr size_t kMaxListed = 8;

}  // namespace

absl::StatusOr<StepLoader> StepLoader::Open(const store::ObjectStore* store,
                                            std::string_view directory,
                                            const plan::ModelInventory* inventory,
                                            std::optional<plan::OptimizerKind> optimizer) {
  ASSIGN_OR_RETURN(store::CommittedStep step, store::CommittedStep::Open(store, directory));
  StepLoader loader(std::move(step), inventory, optimizer);
  RETURN_IF_ERROR(Annotate(loader.CompareInventory(), store->Locate(directory)));
  loader.digest_sums_.assign(loader.manifest().tensors.size(), 0);
  return loader;
}

std::vector<plan::StateRole> StepLoader::RolesOf(const plan::TensorSpec& tensor) const {
  std::vector<plan::StateRole> roles = {plan::StateRole::kParam};
  if (!tensor.trainable || !optimizer_.has_value()) {
    return roles;
  }
  for (const plan::StateSpec& state : plan::StatesOf(*optimizer_)) {
    // Scales were saved with states that were fp8.
    const plan::StateSpec& scaled = state.shape == plan::StateShape::kScale
                                        ? At(plan::BufferStatesOf(*optimizer_), state.scales)
                                        : state;
    const ckpt::TensorRecord* saved =
        manifest().FindTensor(plan::StateKey(tensor.name, scaled.role));
    if (state.shape != plan::StateShape::kScale ||
        (saved != nullptr && plan::IsFp8State(saved->stored_dtype))) {
      roles.push_back(state.role);
    }
  }
  return roles;
}

std::optional<DType> StepLoader::Fp8TypeOf(plan::StateRole role) const {
  if (role != plan::StateRole::kParam) {
    for (const plan::StateSpec& state : plan::StatesOf(*optimizer_)) {
      if (state.role == role && state.element != plan::StateElement::kF32) {
        return plan::StateTypeOf(state, plan::kFp8States);
      }
    }
  }
  return std::nullopt;
}

// States are saved in the type that they lived in.
bool StepLoader::CanRead(plan::StateRole role, DType stored) const {
  if (stored == DType::kF32) {
    return true;
  }
  const std::optional<DType> fp8 = Fp8TypeOf(role);
  return fp8.has_value() && (stored == DType::kBF16 || stored == *fp8);
}

DType StepLoader::StoredType(plan::StateRole role) const {
  for (const plan::TensorSpec& tensor : inventory_->tensors) {
    if (tensor.trainable) {
      return manifest().tensors[FindState(role, tensor)].stored_dtype;
    }
  }
  return DType::kF32;
}

absl::Status StepLoader::CompareOptimizer() const {
  for (const ckpt::TensorRecord& tensor : manifest().tensors) {
    const auto role = static_cast<plan::StateRole>(tensor.role);
    if (optimizer_.has_value() && plan::StateName(role) != nullptr &&
        !plan::HasRole(*optimizer_, role)) {
      return absl::FailedPreconditionError(
          absl::StrCat(tensor.name,
                       ": is of another optimizer; training.optimizer.name: expected the one that "
                       "saved it, got ",
                       plan::OptimizerName(*optimizer_)));
    }
  }
  return absl::OkStatus();
}

// "" without a difference.
std::string StepLoader::CompareTensor(const plan::TensorSpec& tensor, plan::StateRole role) const {
  const std::string key = plan::StateKey(tensor.name, role);
  const Shape expected = ShapeOf(tensor, role);
  const ckpt::TensorRecord* found = manifest().FindTensor(key);
  if (found == nullptr) {
    return absl::StrCat(key, ": missing");
  }
  if (found->shape != expected) {
    return absl::StrCat(
        key, ": shape ", ShapeText(found->shape), ", the job has ", ShapeText(expected));
  }
  const std::optional<DType> fp8 = Fp8TypeOf(role);
  if (!CanRead(role, found->stored_dtype) || found->dtype != found->stored_dtype ||
      found->role != static_cast<ckpt::TensorRole>(role)) {
    return absl::StrCat(key,
                        ": ",
                        std::string(DTypeName(found->dtype)),
                        " stored as ",
                        std::string(DTypeName(found->stored_dtype)),
                        ", expected F32",
                        fp8.has_value() ? ", BF16 or " : "",
                        fp8.has_value() ? std::string(DTypeName(*fp8)) : "");
  }
  return "";
}

absl::Status StepLoader::CompareInventory() const {
  RETURN_IF_ERROR(CompareOptimizer());
  std::vector<std::string> differences;
  std::set<std::string> parameters;
  for (const plan::TensorSpec& tensor : inventory_->tensors) {
    parameters.insert(tensor.name);
    for (const plan::StateRole role : RolesOf(tensor)) {
      if (std::string difference = CompareTensor(tensor, role); !difference.empty()) {
        differences.push_back(std::move(difference));
      }
    }
  }
  for (const ckpt::TensorRecord& tensor : manifest().tensors) {
    // States of tensors that are frozen now were left by a run that trained them.
    const auto role = static_cast<plan::StateRole>(tensor.role);
    const bool known = role == plan::StateRole::kParam
                           ? parameters.contains(tensor.name)
                           : plan::StateName(role) != nullptr &&
                                 parameters.contains(tensor.of_param) &&
                                 tensor.name == plan::StateKey(tensor.of_param, role);
    if (!known) {
      differences.push_back(absl::StrCat(tensor.name, ": not a tensor of the job's model"));
    }
  }
  if (differences.empty()) {
    return absl::OkStatus();
  }
  const size_t count = differences.size();
  if (count > kMaxListed) {
    differences.resize(kMaxListed);
    differences.push_back(absl::StrCat("and ", count - kMaxListed, " more"));
  }
  return absl::FailedPreconditionError(absl::StrCat("the checkpoint is of another model, ",
                                                    count,
                                                    " difference(s): ",
                                                    absl::StrJoin(differences, "; ")));
}

size_t StepLoader::FindState(plan::StateRole role, const plan::TensorSpec& tensor) const {
  const ckpt::TensorRecord* found = manifest().FindTensor(plan::StateKey(tensor.name, role));
  CHECK(found != nullptr);  // Open has compared the inventory
  return Size(found - manifest().tensors.data());
}

absl::StatusOr<std::string> StepLoader::Blob(std::string_view name) const {
  const ckpt::Blob* blob = manifest().FindBlob(name);
  if (blob == nullptr) {
    return absl::NotFoundError(
        absl::StrCat("step ", step(), " has no blob \"", std::string(name), "\""));
  }
  return blob->content;
}

absl::StatusOr<int64_t> StepLoader::ReadOptimizerStep(DigestShare share) {
  float first = -1;
  for (const plan::TensorSpec& tensor : inventory_->tensors) {
    if (!tensor.trainable) {
      continue;
    }
    const size_t index = FindState(plan::StateRole::kStep, tensor);
    const ckpt::TensorRecord& record = manifest().tensors[index];
    float value = 0;
    const std::span<std::byte> bytes = std::as_writable_bytes(std::span(&value, 1));
    RETURN_IF_ERROR(step_.ReadElements(record, 0, 1, bytes));
    if (share == DigestShare::kOwner) {
      digest_sums_[index] += ckpt::DigestRange(record.stored_dtype, bytes, 0);
    }
    first = first < 0 ? value : first;
    if (value != first || value < 0 || value != std::floor(value)) {
      return absl::DataLossError(absl::StrCat(
          record.name, ": is ", value, ", expected ", first, " as in the other parameters"));
    }
  }
  return static_cast<int64_t>(std::max(first, 0.0f));
}

absl::StatusOr<bool> StepLoader::ReadScales(const plan::TensorSpec& tensor,
                                            plan::StateRole role,
                                            const Shape& shape,
                                            std::span<float> to,
                                            DigestShare share) {
  CHECK_EQ(ElementCount(shape), static_cast<int64_t>(to.size()));
  const ckpt::TensorRecord* record = manifest().FindTensor(plan::StateKey(tensor.name, role));
  if (record == nullptr || record->shape != shape || record->stored_dtype != DType::kF32) {
    return false;
  }
  const std::span<std::byte> bytes = std::as_writable_bytes(to);
  RETURN_IF_ERROR(step_.ReadElements(*record, 0, ElementCount(shape), bytes));
  if (share == DigestShare::kOwner) {
    const auto index = Size(record - manifest().tensors.data());
    digest_sums_[index] += ckpt::DigestRange(record->stored_dtype, bytes, 0);
  }
  scales_read_.insert(record->name);
  for (const float value : to) {
    if (!(value >= 0) || std::isinf(value)) {
      return absl::DataLossError(
          absl::StrCat(record->name, ": ", value, " is no scale and no magnitude"));
    }
  }
  return true;
}

absl::Status StepLoader::ReadPieces(plan::StateRole role,
                                    std::span<const plan::OwnedPiece> pieces,
                                    std::span<float> shard,
                                    DigestShare share) {
  for (const plan::OwnedPiece& piece : pieces) {
    const size_t index = FindState(role, inventory_->tensors[piece.tensor]);
    const DType stored = manifest().tensors[index].stored_dtype;
    const std::span<std::byte> out =
        std::as_writable_bytes(Part(shard, piece.shard_offset, piece.elements()));
    RETURN_IF_ERROR(ReadPiece(index, piece, StoredPart(out, stored), share));
    if (stored == DType::kBF16) {
      WidenBf16(out);
    } else if (plan::IsFp8State(stored)) {
      RETURN_IF_ERROR(WidenFp8(role, piece, out, share));
    }
  }
  return absl::OkStatus();
}

absl::Status StepLoader::ReadStored(plan::StateRole role,
                                    std::span<const plan::OwnedPiece> pieces,
                                    std::span<std::byte> shard,
                                    DigestShare share) {
  for (const plan::OwnedPiece& piece : pieces) {
    const size_t index = FindState(role, inventory_->tensors[piece.tensor]);
    const int64_t bytes = DTypeBytes(manifest().tensors[index].stored_dtype);
    RETURN_IF_ERROR(ReadPiece(
        index, piece, Part(shard, piece.shard_offset * bytes, piece.elements() * bytes), share));
  }
  return absl::OkStatus();
}

absl::Status StepLoader::ReadPiece(size_t index,
                                   const plan::OwnedPiece& piece,
                                   std::span<std::byte> to,
                                   DigestShare share) {
  const ckpt::TensorRecord& record = manifest().tensors[index];
  RETURN_IF_ERROR(step_.ReadBox(record, piece.item, piece.range.begin, piece.range.end, to));
  if (share == DigestShare::kOwner) {
    digest_sums_[index] +=
        ckpt::DigestBoxPart(record.stored_dtype, record.shape, piece.item, piece.range.begin, to);
  }
  return absl::OkStatus();
}

absl::Status StepLoader::WidenFp8(plan::StateRole role,
                                  const plan::OwnedPiece& piece,
                                  std::span<std::byte> out,
                                  DigestShare share) {
  const Shape& shape = inventory_->tensors[piece.tensor].shape;
  const plan::OwnedPiece of_scales = plan::ScalesOf(shape, piece);
  std::vector<float> scales(Size(of_scales.elements()));
  RETURN_IF_ERROR(ReadPieces(*plan::ScaleRoleOf(role), {&of_scales, 1}, scales, share));
  const bool square = role == plan::StateRole::kExpAvgSq;
  const std::span<const std::byte> codes = StoredPart(out, DType::kU8);
  const int64_t row = plan::StateRow(piece.item.length);
  size_t scale = 0;
  for (int64_t i = 0; i < piece.elements(); ++i) {
    scale += i > 0 && (i % row == 0 || i % row % plan::kStateGroup == 0) ? 1 : 0;
    const auto code = static_cast<uint8_t>(codes[Size(i)]);
    const float value = scales[scale] * (square ? plan::SquareOfCode(code) : Fp8E4M3ToFloat(code));
    std::memcpy(out.data() + Size(i) * sizeof(value), &value, sizeof(value));
  }
  return absl::OkStatus();
}

absl::Status StepLoader::CheckDigests(std::span<const uint64_t> sums) const {
  CHECK_EQ(sums.size(), manifest().tensors.size());
  std::set<std::string> all_read = scales_read_;
  for (const plan::TensorSpec& tensor : inventory_->tensors) {
    for (const plan::StateRole role : RolesOf(tensor)) {
      all_read.insert(plan::StateKey(tensor.name, role));
    }
  }
  std::vector<std::string> wrong;
  for (size_t i = 0; i < sums.size(); ++i) {
    const ckpt::TensorRecord& tensor = manifest().tensors[i];
    if (all_read.contains(tensor.name) && sums[i] != tensor.digest64 && wrong.size() < kMaxListed) {
      wrong.push_back(absl::StrFormat(
          "%s: digest64 %016x, the manifest says %016x", tensor.name, sums[i], tensor.digest64));
    }
  }
  return wrong.empty() ? absl::OkStatus()
                       : absl::DataLossError(absl::StrCat("step ",
                                                          step(),
                                                          ": what was read is not what was saved: ",
                                                          absl::StrJoin(wrong, "; ")));
}

}  // namespace ravel::checkpoint
