// Decides, with all ranks, which cuBLASLt algorithm computes each gemm. A rehearsal lists the gemms
// that this rank's programs will issue. Each is chosen by the first of the ranks on equal devices
// that needs it: from the checkpoint, else from the disk, else by timing up to 24 candidates in the
// plan's still unused memory with a cold cache. The tables are then gathered, so equal devices use
// equal algorithms and results do not depend on which rank computes. Then every gemm runs once,
// so that lazy loading in the library cannot happen while a collective is in flight.
//
// Where sums are in parts (determinism.tensorParts), a choice is of the shape of one part, and so
// the same for every number of ranks on the tensor axis. A rank with several parts computes them at
// once: a probe compares that with the parts one by one, on numbers that make orders of sums
// visible, and where a bit differs they run one by one from then on.

#include "worker/trainer/gemm_choices.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <system_error>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>
#include <absl/strings/str_split.h>

#include "common/check.h"
#include "common/logging.h"
#include "common/signed_size.h"
#include "kernels/cast.h"
#include "kernels/digest.h"
#include "kernels/philox.h"
#include "worker/trainer/exit_code.h"

namespace ravel::trainer {
namespace {

using kernels::CudaStream;
using kernels::cuda::GemmAlgorithms;
using kernels::cuda::GemmChoice;
using kernels::cuda::RavelCudaGemm;
using Bytes = std::span<std::byte>;

// Candidates of a gemm that are timed: the library's order is by its own estimate, and an algorithm
// that it ranks lower than this is rarely the best.
constexpr int32_t kMostCandidates = 24;
constexpr uint64_t kSeed = 0x70726F6475637473;  // of numbers that are multiplied once and forgotten

// The calls of this file on the communicator.
comm::CollectiveTag TagOf(int call) {
  constexpr int kFirstCall = 4;
  return {.op = plan::OpLabel::kEndPhase, .unit = -1, .call = kFirstCall + call};
}

// All ranks' texts, which may differ in length.
absl::StatusOr<std::vector<std::string>> GatherTexts(comm::Communicator& communicator,
                                                     int call,
                                                     const std::string& mine) {
  const size_t ranks = Size(communicator.size());
  const uint64_t size = mine.size();
  std::vector<uint64_t> sizes(ranks);
  RETURN_IF_ERROR(communicator.AllGatherBytes(TagOf(call),
                                              std::as_bytes(std::span<const uint64_t>(&size, 1)),
                                              std::as_writable_bytes(std::span<uint64_t>(sizes))));
  const uint64_t longest = *std::max_element(sizes.begin(), sizes.end());
  std::string padded = mine;
  padded.resize(longest);
  std::string all(longest * ranks, '\0');
  if (longest > 0) {
    RETURN_IF_ERROR(communicator.AllGatherBytes(TagOf(call),
                                                std::as_bytes(std::span<const char>(padded)),
                                                std::as_writable_bytes(std::span<char>(all))));
  }
  std::vector<std::string> texts;
  for (size_t rank = 0; rank < ranks; ++rank) {
    texts.push_back(all.substr(rank * longest, sizes[rank]));
  }
  return texts;
}

// From the first element to the last. Operands of kU8 are packed codes, two to a byte, whose
// strides count codes.
Bytes ExtentOf(const void* data, int64_t rows, int64_t columns, int64_t stride, DType dtype) {
  const int64_t elements = (rows - 1) * stride + columns;
  const int64_t bytes =
      dtype == DType::kU8 ? DivCeil(elements, int64_t{2}) : elements * DTypeBytes(dtype);
  return {static_cast<std::byte*>(const_cast<void*>(data)), Size(bytes)};
}

struct Extents {
  Bytes a;
  Bytes b;
  Bytes c;
};

Extents ExtentsOf(const CudaStream::GemmRequest& request) {
  const RavelCudaGemm& gemm = request.gemm;
  const auto input = static_cast<DType>(gemm.input_type);
  const auto b_input = static_cast<DType>(gemm.b_type != 0 ? gemm.b_type : gemm.input_type);
  const auto output = static_cast<DType>(gemm.output_type);
  const bool flip_a = gemm.transpose_a != 0;
  const bool flip_b = gemm.transpose_b != 0;
  return {
      .a = ExtentOf(
          request.a, flip_a ? gemm.k : gemm.m, flip_a ? gemm.m : gemm.k, gemm.a_stride, input),
      .b = ExtentOf(
          request.b, flip_b ? gemm.n : gemm.k, flip_b ? gemm.k : gemm.n, gemm.b_stride, b_input),
      .c = ExtentOf(request.c, gemm.m, gemm.n, gemm.c_stride, output)};
}

class Chooser {
 public:
  explicit Chooser(const GemmChoicesArgs& args)
      : args_(args),
        stream_(args.streams.compute()),
        algorithms_(args.streams.gpu().algorithms()),
        saved_(algorithms_.identity()),
        cached_(algorithms_.identity()),
        chosen_(algorithms_.identity()) {}

  absl::StatusOr<GemmChoices> Run();

 private:
  int rank() const { return args_.communicator.rank(); }
  absl::Status FindPeers();
  absl::Status FindOwn();
  void ReadSaved();
  void ReadCache();
  absl::Status ChooseOwn();
  GemmChoice Choose(const std::string& key, const CudaStream::GemmRequest& request);
  std::optional<GemmChoice> Known(const GemmAlgorithms& table,
                                  const char* source,
                                  const std::string& key,
                                  const CudaStream::GemmRequest& request);
  GemmChoice Measure(const CudaStream::GemmRequest& request);
  absl::Status ProbeParts();
  absl::StatusOr<uint64_t> DigestOf(const CudaStream::GemmRequest& request,
                                    CudaStream::GemmForm form);
  void FillRandom(Bytes memory, DType dtype, uint32_t site);
  absl::Status FillProbe(Bytes memory, DType dtype);
  void WriteCache();
  absl::Status Share();
  absl::Status TryAll();

  const GemmChoicesArgs& args_;
  CudaStream& stream_;
  GemmAlgorithms& algorithms_;
  CudaStream::GemmRequests requests_;
  std::map<std::string, CudaStream::GemmRequest> by_choice_;  // the first that a choice is for
  std::vector<bool> peers_;                                   // by rank: on a device as this one's
  std::set<std::string> own_;  // keys that this rank chooses for all of them
  bool leads_ = false;         // the first of its peers
  GemmAlgorithms saved_;
  GemmAlgorithms cached_;
  GemmAlgorithms chosen_;  // by this rank, then by all peers
  std::map<std::string, GemmChoice> measured_;
  std::optional<kernels::CudaMemory> probe_;  // pinned
  GemmChoices result_;
};

std::string CachePath(const GemmChoicesArgs& args, const GemmAlgorithms& table) {
  return absl::StrCat(args.options.cache_folder, "/", table.FileName());
}

absl::Status Chooser::FindPeers() {
  ASSIGN_OR_RETURN(const std::vector<std::string> identities,
                   GatherTexts(args_.communicator, 0, algorithms_.identity()));
  for (size_t other = 0; other < identities.size(); ++other) {
    peers_.push_back(identities[other] == algorithms_.identity());
  }
  leads_ = std::find(peers_.begin(), peers_.end(), true) - peers_.begin() == rank();
  const auto unlike = std::find_if(identities.begin(), identities.end(), [&](const auto& other) {
    return other != identities.front();
  });
  if (unlike == identities.end()) {
    return absl::OkStatus();
  }
  const std::string text = absl::StrCat("rank 0 computes gemms on '",
                                        identities.front(),
                                        "', rank ",
                                        unlike - identities.begin(),
                                        " on '",
                                        *unlike,
                                        "'");
  if (args_.exact) {
    return WithCode(
        absl::FailedPreconditionError(absl::StrCat(
            text,
            "; determinism.mode: exact needs one kind of device and one version of cuBLASLt")),
        ExitCode::kPlanMismatch);
  }
  if (leads_) {
    log::Warning(absl::StrCat("gemms: ", text, ": each kind chooses by itself"));
  }
  return absl::OkStatus();
}

// The first of the peers chooses all gemms that it needs; each other gemm is chosen by the first
// peer that needs it.
absl::Status Chooser::FindOwn() {
  std::string mine;
  for (const auto& [key, request] : requests_) {
    by_choice_.emplace(CudaStream::ChoiceKey(request), request);
  }
  for (const auto& [key, request] : by_choice_) {
    absl::StrAppend(&mine, key, "\n");
  }
  ASSIGN_OR_RETURN(const std::vector<std::string> lists, GatherTexts(args_.communicator, 1, mine));
  for (const auto& [key, request] : by_choice_) {
    own_.insert(key);
  }
  for (size_t other = 0; other < Size(rank()); ++other) {
    const std::vector<std::string> keys = absl::StrSplit(lists[other], '\n');
    for (const std::string& key : keys) {
      if (peers_[other]) {
        own_.erase(key);
      }
    }
  }
  return absl::OkStatus();
}

void Chooser::ReadSaved() {
  if (args_.options.saved.empty()) {
    return;
  }
  const absl::Status read = saved_.AddText(args_.options.saved, "the checkpoint's table");
  if (!read.ok() && leads_) {
    result_.chosen_again =
        absl::StrCat("gemms are chosen again, so bits may differ from those before: ",
                     std::string(read.message()));
    log::Warning(result_.chosen_again);
  }
}

void Chooser::ReadCache() {
  if (args_.options.cache_folder.empty() || !args_.options.measure || own_.empty()) {
    return;
  }
  const absl::Status read = cached_.Load(CachePath(args_, cached_));
  if (!read.ok() && !absl::IsNotFound(read)) {
    log::Warning(absl::StrCat("gemms measured before are left out, and will be measured again: ",
                              std::string(read.message())));
  }
}

std::optional<GemmChoice> Chooser::Known(const GemmAlgorithms& table,
                                         const char* source,
                                         const std::string& key,
                                         const CudaStream::GemmRequest& request) {
  const std::optional<GemmChoice> choice = table.Find(key);
  if (!choice.has_value()) {
    return std::nullopt;
  }
  if (const absl::Status tried = stream_.TryGemm(request, *choice); !tried.ok()) {
    log::Warning(absl::StrCat("gemm ",
                              key,
                              ": the choice of ",
                              source,
                              " does not run and is made again: ",
                              std::string(tried.message())));
    return std::nullopt;
  }
  return choice;
}

GemmChoice Chooser::Choose(const std::string& key, const CudaStream::GemmRequest& request) {
  if (const auto known = Known(saved_, "the checkpoint", key, request); known.has_value()) {
    ++result_.saved;
    return *known;
  }
  if (saved_.Find(key).has_value() && result_.chosen_again.empty()) {
    result_.chosen_again =
        absl::StrCat("gemm ",
                     key,
                     ", and maybe more: what the checkpoint chose does not run here and "
                     "is chosen again, so bits may differ from those before");
  }
  if (const auto known = Known(cached_, "the disk", key, request); known.has_value()) {
    ++result_.cached;
    return *known;
  }
  if (!args_.options.measure) {
    ++result_.proposed;
    return stream_.ChooseGemm(request, nullptr);
  }
  ++result_.measured;
  const GemmChoice choice = Measure(request);
  measured_.emplace(key, choice);
  return choice;
}

// In pieces, through the stream's scratch where numbers are rounded.
void Chooser::FillRandom(Bytes memory, DType dtype, uint32_t site) {
  constexpr int64_t kPiece = kernels::cuda::kScratchBytes / int64_t{sizeof(float)};
  const int64_t elements = static_cast<int64_t>(memory.size()) / DTypeBytes(dtype);
  for (int64_t first = 0; first < elements; first += kPiece) {
    const int64_t count = std::min(kPiece, elements - first);
    TensorView to = VectorView(nullptr, count);
    to.dtype = dtype;
    to.data = memory.data() + first * DTypeBytes(dtype);
    TensorView drawn = to;
    if (dtype != DType::kF32) {
      drawn = VectorView(static_cast<float*>(stream_.Scratch(kernels::cuda::kScratchBytes)), count);
    }
    kernels::InitNormal(stream_, {.out = drawn, .seed = kSeed, .site = site, .first_index = first});
    if (dtype != DType::kF32) {
      kernels::Cast(stream_, {.from = drawn, .to = to});
    }
  }
}

// Numbers of this kind whose products span more than the 24 bits of a sum. Large ones often cancel,
// and which small ones they have swallowed by then depends on the order: it shows in bf16 and fp16,
// too.
uint32_t ProbeBits(DType dtype, bool negative, bool large) {
  constexpr uint32_t kNegative = 0x80000000;
  const auto narrow = [&](uint32_t bits, int shift) {
    return bits | (negative ? kNegative >> shift : 0);
  };
  switch (dtype) {
    case DType::kF16:
      return narrow(large ? 0x4C00 : 0x1C00,
                    16);  // 2^4, 2^-8: most sums of 2^16 products are finite
    case DType::kBF16:
      return narrow(large ? 0x4580 : 0x3F80, 16);  // 2^12, 1
    case DType::kF8E4M3:
      return narrow(large ? 0x78 : 0x08, 24);  // 2^8, 2^-6
    case DType::kF8E5M2:
      return narrow(large ? 0x6C : 0x24, 24);  // 2^12, 2^-6
    case DType::kU8:
      return narrow(large ? 0x77 : 0x11, 24);  // two of E2M1: 6, 0.5; one of them negative
    default:
      return narrow(large ? 0x45800000 : 0x3F800000, 0);  // 2^12, 1
  }
}

absl::Status Chooser::FillProbe(Bytes memory, DType dtype) {
  constexpr size_t kPiece = size_t{1} << 20;
  constexpr uint64_t kFactor = 6364136223846793005;  // of Knuth's generator
  constexpr uint64_t kStep = 1442695040888963407;
  if (!probe_.has_value()) {
    ASSIGN_OR_RETURN(probe_, args_.streams.gpu().AllocatePinned(kPiece));
  }
  const auto bytes = Size(DTypeBytes(dtype));
  uint64_t state = memory.size();
  for (size_t at = 0; at < std::min(kPiece, memory.size()); at += bytes) {
    state = state * kFactor + kStep;
    const uint32_t bits = ProbeBits(dtype, (state >> 63) != 0, (state >> 62 & 1) != 0);
    std::memcpy(static_cast<std::byte*>(probe_->data()) + at, &bits, bytes);
  }
  for (size_t first = 0; first < memory.size(); first += kPiece) {
    const size_t count = std::min(kPiece, memory.size() - first);
    stream_.CopyMemory(memory.data() + first, probe_->data(), static_cast<int64_t>(count));
  }
  return stream_.Synchronize();
}

// The flush is the stream's scratch, which holds nothing between two gemms, and where the cache
// is larger than that, what the arena has free besides.
GemmChoice Chooser::Measure(const CudaStream::GemmRequest& request) {
  const Extents extents = ExtentsOf(request);
  // Random bytes are codes, too.
  const auto input =
      request.gemm.b_type != 0 ? DType::kBF16 : static_cast<DType>(request.gemm.input_type);
  FillRandom(extents.a, input, 0);
  FillRandom(extents.b, input, 1);
  const size_t cold = Size(2 * args_.streams.gpu().properties().cache_bytes);
  const auto scratch = std::min<size_t>(cold, kernels::cuda::kScratchBytes);
  CudaStream::Measuring measuring = {.flush = {}, .most_candidates = kMostCandidates};
  measuring.flush.push_back(
      {static_cast<std::byte*>(stream_.Scratch(kernels::cuda::kScratchBytes)), scratch});
  if (scratch < cold) {
    const Bytes arena = {args_.communicator.arena(plan::MemoryKind::kPrivate),
                         Size(args_.plan.memory.private_bytes)};
    const Bytes gap = LongestGap(arena, {extents.a, extents.b, extents.c});
    measuring.flush.push_back(gap.first(std::min(cold - scratch, gap.size())));
  }
  const GemmChoice choice = stream_.ChooseGemm(request, &measuring);
  for (const Bytes& written : {extents.a, extents.b, extents.c}) {
    stream_.FillZero(written.data(), static_cast<int64_t>(written.size()));
  }
  return choice;
}

absl::Status Chooser::ChooseOwn() {
  int64_t unknown = 0;
  for (const std::string& key : own_) {
    unknown += saved_.Find(key).has_value() || cached_.Find(key).has_value() ? 0 : 1;
  }
  if (unknown > 0 && args_.options.measure) {
    log::Info(absl::StrCat("gemms: measuring ",
                           unknown,
                           " of ",
                           by_choice_.size(),
                           ", at most ",
                           kMostCandidates,
                           " algorithms of each"));
  }
  if (leads_) {  // what an earlier size of the job needed, too
    for (const auto& [key, choice] : saved_.choices()) {
      chosen_.Put(key, choice);
    }
  }
  for (const std::string& key : own_) {
    chosen_.Put(key, Choose(key, by_choice_.at(key)));
  }
  return args_.streams.Finish(stream_);
}

// Choices that another process wrote in the meantime stay; a file that was wrong is replaced.
void Chooser::WriteCache() {
  if (measured_.empty() || args_.options.cache_folder.empty()) {
    return;
  }
  std::error_code error;
  std::filesystem::create_directories(args_.options.cache_folder, error);
  GemmAlgorithms merged(algorithms_.identity());
  const std::string path = CachePath(args_, merged);
  merged.Load(path).IgnoreError();  // told by ReadCache
  for (const auto& [key, choice] : measured_) {
    merged.Put(key, choice);
  }
  const absl::Status saved =
      error
          ? absl::UnavailableError(absl::StrCat(args_.options.cache_folder, ": ", error.message()))
          : merged.Save(path);
  if (!saved.ok()) {
    log::Warning(absl::StrCat("gemms measured now are not kept: ", std::string(saved.message())));
  }
}

absl::Status Chooser::Share() {
  ASSIGN_OR_RETURN(const std::vector<std::string> tables,
                   GatherTexts(args_.communicator, 2, chosen_.ToText()));
  for (size_t other = 0; other < tables.size(); ++other) {
    if (!peers_[other] || static_cast<int>(other) == rank()) {
      continue;
    }
    GemmAlgorithms theirs(algorithms_.identity());
    RETURN_IF_ERROR(theirs.AddText(tables[other], absl::StrCat("gemms of rank ", other)));
    for (const auto& [key, choice] : theirs.choices()) {
      if (static_cast<int>(other) < rank() || !chosen_.Find(key).has_value()) {
        chosen_.Put(key, choice);
      }
    }
  }
  for (const auto& [key, request] : by_choice_) {
    const std::optional<GemmChoice> choice = chosen_.Find(key);
    if (!choice.has_value()) {
      return absl::InternalError(absl::StrCat("gemm ", key, ": no rank has chosen for it"));
    }
    algorithms_.Put(key, *choice);
  }
  return absl::OkStatus();
}

// The digest of c, which was zero and is again.
absl::StatusOr<uint64_t> Chooser::DigestOf(const CudaStream::GemmRequest& request,
                                           CudaStream::GemmForm form) {
  const GemmChoice choice = *chosen_.Find(CudaStream::ChoiceKey(request));
  RETURN_IF_ERROR(WithCode(stream_.TryGemm(request, choice, form), ExitCode::kDevice));
  const Bytes c = ExtentsOf(request).c;
  const auto dtype = static_cast<DType>(request.gemm.output_type);
  TensorView all = VectorView(nullptr, static_cast<int64_t>(c.size()) / DTypeBytes(dtype));
  all.dtype = dtype;
  all.data = c.data();
  const uint64_t digest = kernels::DigestRange(stream_, all, 0);
  stream_.FillZero(c.data(), static_cast<int64_t>(c.size()));
  return digest;
}

absl::Status Chooser::ProbeParts() {
  for (const auto& [key, request] : requests_) {
    if (!request.whole() || chosen_.Find(CudaStream::ChoiceKey(request))->none) {
      continue;  // our own kernel's bits depend on k alone
    }
    if (!CudaStream::CanBeCut(request)) {
      log::Info(
          absl::StrCat("gemm ", key, ": at once, unprobed: its scales of blocks are not cut"));
      continue;
    }
    const Extents extents = ExtentsOf(request);
    const auto input = static_cast<DType>(request.gemm.input_type);
    const auto b_input = static_cast<DType>(request.gemm.b_type);
    RETURN_IF_ERROR(FillProbe(extents.a, input));
    RETURN_IF_ERROR(FillProbe(extents.b, request.gemm.b_type != 0 ? b_input : input));
    std::vector<Bytes> drawn = {extents.a, extents.b};
    for (const void* scale : {request.scale_a, request.scale_b}) {
      if (scale != nullptr) {
        drawn.push_back(ExtentOf(scale, 1, 1, 1, DType::kF32));
        FillRandom(drawn.back(), DType::kF32, 2);
      }
    }
    ASSIGN_OR_RETURN(const uint64_t at_once, DigestOf(request, CudaStream::GemmForm::kAtOnce));
    ASSIGN_OR_RETURN(const uint64_t in_parts, DigestOf(request, CudaStream::GemmForm::kInParts));
    for (const Bytes& written : drawn) {
      stream_.FillZero(written.data(), static_cast<int64_t>(written.size()));
    }
    if (at_once != in_parts) {
      ++result_.in_parts;
      algorithms_.ComputeInParts(key);
      log::Info(absl::StrCat("gemm ", key, ": other bits at once than in parts, so part by part"));
    }
  }
  return absl::OkStatus();
}

// Every gemm once, of zeros: what a library loads on first use is loaded while no collective of
// this rank is in flight.
absl::Status Chooser::TryAll() {
  for (const auto& [key, request] : requests_) {
    RETURN_IF_ERROR(
        WithCode(stream_.TryGemm(request, *chosen_.Find(CudaStream::ChoiceKey(request))),
                 ExitCode::kDevice));
  }
  RETURN_IF_ERROR(ProbeParts());
  RETURN_IF_ERROR(args_.streams.FinishAll());
  // Weights that ranks of one device share are written next.
  return args_.communicator.Barrier(TagOf(3));
}

absl::StatusOr<GemmChoices> Chooser::Run() {
  const auto begin = std::chrono::steady_clock::now();
  stream_.Rehearse(&requests_);
  args_.executor.IssueComputes();
  stream_.Rehearse(nullptr);
  RETURN_IF_ERROR(FindPeers());
  RETURN_IF_ERROR(FindOwn());
  ReadSaved();
  ReadCache();
  RETURN_IF_ERROR(ChooseOwn());
  WriteCache();
  RETURN_IF_ERROR(Share());
  RETURN_IF_ERROR(TryAll());
  result_.gemms = static_cast<int64_t>(by_choice_.size());
  result_.table = chosen_.size() == 0 ? "" : chosen_.ToText();
  result_.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  log::Info(absl::StrFormat(
      "gemms: %d needed; chosen here %d by the checkpoint, %d by the disk, %d by measuring, %d "
      "as proposed; %d part by part; %.3f s",
      result_.gemms,
      result_.saved,
      result_.cached,
      result_.measured,
      result_.proposed,
      result_.in_parts,
      result_.seconds));
  return result_;
}

}  // namespace

Bytes LongestGap(Bytes memory, std::vector<Bytes> used) {
  std::sort(
      used.begin(), used.end(), [](Bytes left, Bytes right) { return left.data() < right.data(); });
  Bytes longest;
  std::byte* from = memory.data();
  std::byte* const end = memory.data() + memory.size();
  used.push_back({end, 0});
  for (const Bytes& one : used) {
    std::byte* const to = std::clamp(one.data(), memory.data(), end);
    if (to > from && to - from > std::ssize(longest)) {
      longest = {from, Size(to - from)};
    }
    from = std::max(from, std::clamp(one.data() + one.size(), memory.data(), end));
  }
  return longest;
}

absl::StatusOr<GemmChoices> ChooseGemms(const GemmChoicesArgs& args) {
  return Chooser(args).Run();
}

}  // namespace ravel::trainer
