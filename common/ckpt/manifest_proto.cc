// The codec of manifest.pb and of seals. The bytes are deterministic (a string table in order of
// first use, deterministic serialisation), because COMMIT holds their SHA-256 and two coordinators
// that describe the same save must write the same file. A preamble with magic, version and length
// and a trailing checksum let a reader tell a foreign, a newer and a damaged file apart.

#include "common/ckpt/manifest_proto.h"

#include <algorithm>
#include <map>
#include <optional>

#include <absl/strings/str_cat.h>
#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>

#include "common/crc32c.h"
#include "proto/manifest.pb.h"

namespace ravel::ckpt {
namespace {

constexpr std::string_view kMagic = "RVLMANIF";
constexpr size_t kPreambleBytes = 8 + 4 + 8;
constexpr uint64_t kMaxPayloadBytes = uint64_t{1} << 30;
constexpr int kMaxChunkDimensions = 8;

void AppendLittle(uint64_t value, int bytes, std::string& out) {
  for (int byte = 0; byte < bytes; ++byte) {
    out.push_back(static_cast<char>((value >> (8 * byte)) & 0xffu));
  }
}

uint64_t ReadLittle(std::string_view bytes) {
  uint64_t value = 0;
  for (size_t byte = 0; byte < bytes.size(); ++byte) {
    value |= static_cast<uint64_t>(static_cast<unsigned char>(bytes[byte])) << (8 * byte);
  }
  return value;
}

std::string SerializeDeterministic(const google::protobuf::Message& message) {
  std::string bytes;
  {
    google::protobuf::io::StringOutputStream stream(&bytes);
    google::protobuf::io::CodedOutputStream coded(&stream);
    coded.SetSerializationDeterministic(true);
    message.SerializeToCodedStream(&coded);
  }
  return bytes;
}

// Strings in order of their first use; strings[0] is "".
class StringTable {
 public:
  explicit StringTable(v1::Manifest& message) : message_(message) { Index(""); }
  uint32_t Index(const std::string& text) {
    const auto [at, added] = index_.emplace(text, static_cast<uint32_t>(message_.strings_size()));
    if (added) {
      message_.add_strings(text);
    }
    return at->second;
  }

 private:
  v1::Manifest& message_;
  std::map<std::string, uint32_t> index_;
};

void ChunkToProto(const ChunkRecord& chunk, v1::ManifestChunk& message) {
  message.set_file(static_cast<uint32_t>(chunk.file));
  message.set_data_offset(chunk.data_offset);
  message.set_bytes(chunk.bytes);
  message.mutable_offset()->Add(chunk.box.offset.begin(), chunk.box.offset.end());
  message.mutable_length()->Add(chunk.box.length.begin(), chunk.box.length.end());
  message.set_crc32c(chunk.crc32c);
  message.mutable_block_crc32c()->Add(chunk.block_crc32c.begin(), chunk.block_crc32c.end());
}

absl::StatusOr<ChunkRecord> ChunkFromProto(const v1::ManifestChunk& message) {
  ChunkRecord chunk;
  if (message.offset_size() > kMaxChunkDimensions ||
      message.offset_size() != message.length_size() ||
      message.file() > static_cast<uint32_t>(INT32_MAX)) {
    return absl::DataLossError("a chunk has impossible dimensions or file index");
  }
  int64_t elements = 1;
  for (const int64_t length : message.length()) {
    if (length < 0 || __builtin_mul_overflow(elements, length, &elements)) {
      return absl::DataLossError("a chunk has impossible lengths");
    }
  }
  chunk.file = static_cast<int>(message.file());
  chunk.data_offset = message.data_offset();
  chunk.bytes = message.bytes();
  chunk.box.offset.assign(message.offset().begin(), message.offset().end());
  chunk.box.length.assign(message.length().begin(), message.length().end());
  chunk.crc32c = message.crc32c();
  chunk.block_crc32c.assign(message.block_crc32c().begin(), message.block_crc32c().end());
  return chunk;
}

std::optional<DType> DTypeFromNumber(int32_t number) {
  if (number < static_cast<int32_t>(DType::kF32) || number > static_cast<int32_t>(DType::kF8E5M2)) {
    return std::nullopt;
  }
  return static_cast<DType>(number);
}

template <size_t kSize>
bool CopyBytes(const std::string& from, std::array<uint8_t, kSize>& to) {
  if (from.size() != kSize) {
    return false;
  }
  std::copy(from.begin(), from.end(), to.begin());
  return true;
}

void BlobToProto(const Blob& blob, v1::ManifestBlob& message) {
  message.set_crc32c(Crc32c(0, blob.content.data(), blob.content.size()));
  message.set_content(blob.content);
}

absl::StatusOr<Blob> BlobFromProto(const v1::ManifestBlob& message, const std::string& name) {
  if (Crc32c(0, message.content().data(), message.content().size()) != message.crc32c()) {
    return absl::DataLossError(absl::StrCat("blob \"", name, "\": wrong crc32c"));
  }
  return Blob{name, message.content()};
}

void TensorToProto(const TensorRecord& tensor, StringTable& strings, v1::ManifestTensor& message) {
  message.set_name(strings.Index(tensor.name));
  message.set_role(static_cast<int32_t>(tensor.role));
  message.set_of_param(strings.Index(tensor.of_param));
  message.set_dtype(static_cast<int32_t>(tensor.dtype));
  message.set_stored_dtype(static_cast<int32_t>(tensor.stored_dtype));
  message.mutable_shape()->Add(tensor.shape.begin(), tensor.shape.end());
  message.set_tied_to(strings.Index(tensor.tied_to));
  message.set_digest64(tensor.digest64);
  for (const ChunkRecord& chunk : tensor.chunks) {
    ChunkToProto(chunk, *message.add_chunks());
  }
}

absl::StatusOr<TensorRecord> TensorFromProto(const v1::Manifest& manifest,
                                             const v1::ManifestTensor& message) {
  const auto strings = static_cast<uint32_t>(manifest.strings_size());
  const std::optional<DType> dtype = DTypeFromNumber(message.dtype());
  const std::optional<DType> stored = DTypeFromNumber(message.stored_dtype());
  const bool role = message.role() >= 1 && message.role() <= kMaxTensorRole;
  if (message.name() >= strings || message.of_param() >= strings || message.tied_to() >= strings ||
      !dtype || !stored || !role) {
    return absl::DataLossError("manifest: a tensor has an index, a role or a dtype out of range");
  }
  TensorRecord tensor;
  tensor.name = manifest.strings(static_cast<int>(message.name()));
  tensor.role = static_cast<TensorRole>(message.role());
  tensor.of_param = manifest.strings(static_cast<int>(message.of_param()));
  tensor.dtype = *dtype;
  tensor.stored_dtype = *stored;
  tensor.shape.assign(message.shape().begin(), message.shape().end());
  tensor.tied_to = manifest.strings(static_cast<int>(message.tied_to()));
  tensor.digest64 = message.digest64();
  for (const v1::ManifestChunk& part : message.chunks()) {
    absl::StatusOr<ChunkRecord> chunk = ChunkFromProto(part);
    if (!chunk.ok()) {
      return Annotate(chunk.status(), absl::StrCat("manifest: tensor ", tensor.name));
    }
    tensor.chunks.push_back(*std::move(chunk));
  }
  return tensor;
}

void QuantToProto(const QuantRecord& quant, StringTable& strings, v1::ManifestQuant& message) {
  message.set_recipe(quant.recipe);
  message.set_rounding(quant.rounding);
  message.set_amax_epsilon(quant.amax_epsilon);
  for (const QuantizedRecord& tensor : quant.tensors) {
    v1::ManifestQuantTensor* added = message.add_tensors();
    added->set_name(strings.Index(tensor.name));
    added->set_domain(strings.Index(tensor.domain));
    added->set_site(tensor.site);
    added->set_digest64(tensor.digest64);
  }
}

absl::StatusOr<QuantRecord> QuantFromProto(const v1::Manifest& manifest) {
  const auto strings = static_cast<uint32_t>(manifest.strings_size());
  QuantRecord quant = {.recipe = manifest.quant().recipe(),
                       .rounding = manifest.quant().rounding(),
                       .amax_epsilon = manifest.quant().amax_epsilon()};
  for (const v1::ManifestQuantTensor& tensor : manifest.quant().tensors()) {
    if (tensor.name() >= strings || tensor.domain() >= strings) {
      return absl::DataLossError("manifest: quant: an index is out of range");
    }
    quant.tensors.push_back({.name = manifest.strings(static_cast<int>(tensor.name())),
                             .domain = manifest.strings(static_cast<int>(tensor.domain())),
                             .site = tensor.site(),
                             .digest64 = tensor.digest64()});
  }
  return quant;
}

v1::Manifest ToProto(const Manifest& manifest) {
  v1::Manifest message;
  StringTable strings(message);
  message.set_format_version(static_cast<uint32_t>(manifest.format_version));
  message.set_job(manifest.job);
  message.set_step(manifest.step);
  message.set_save_id(manifest.save_id.data(), manifest.save_id.size());
  message.set_epoch(manifest.epoch);
  message.set_attempt(manifest.attempt);
  message.set_created_ns(manifest.created_ns);
  message.set_build(manifest.build);
  message.set_numerics(manifest.numerics);
  message.set_virtual_ranks(manifest.virtual_ranks);
  for (const MeshAxisRecord& axis : manifest.mesh) {
    v1::MeshAxis* added = message.add_mesh();
    added->set_name(axis.name);
    added->set_size(axis.size);
  }
  message.set_authoritative(manifest.authoritative);
  message.set_dual(manifest.dual);
  for (const FileRecord& file : manifest.files) {
    v1::ManifestFile* added = message.add_files();
    added->set_path(strings.Index(file.path));
    added->set_size(file.size);
    added->set_header_bytes(file.header_bytes);
    added->set_crc32c(file.crc32c);
    added->set_writer(file.writer);
  }
  for (const TensorRecord& tensor : manifest.tensors) {
    TensorToProto(tensor, strings, *message.add_tensors());
  }
  for (const Blob& blob : manifest.blobs) {
    v1::ManifestBlob* added = message.add_blobs();
    BlobToProto(blob, *added);
    added->set_name(strings.Index(blob.name));
  }
  message.set_state_digest(manifest.state_digest.data(), manifest.state_digest.size());
  if (!manifest.quant.tensors.empty()) {
    QuantToProto(manifest.quant, strings, *message.mutable_quant());
  }
  return message;
}

absl::Status FillLists(const v1::Manifest& message, Manifest& manifest) {
  const auto strings = static_cast<uint32_t>(message.strings_size());
  for (const v1::ManifestFile& file : message.files()) {
    if (file.path() >= strings) {
      return absl::DataLossError("manifest: a file's path index is out of range");
    }
    manifest.files.push_back({.path = message.strings(static_cast<int>(file.path())),
                              .size = file.size(),
                              .header_bytes = file.header_bytes(),
                              .crc32c = file.crc32c(),
                              .writer = file.writer()});
  }
  for (const v1::ManifestTensor& part : message.tensors()) {
    ASSIGN_OR_RETURN(TensorRecord tensor, TensorFromProto(message, part));
    manifest.tensors.push_back(std::move(tensor));
  }
  for (const v1::ManifestBlob& part : message.blobs()) {
    if (part.name() >= strings) {
      return absl::DataLossError("manifest: a blob's name index is out of range");
    }
    ASSIGN_OR_RETURN(Blob blob,
                     BlobFromProto(part, message.strings(static_cast<int>(part.name()))));
    manifest.blobs.push_back(std::move(blob));
  }
  return absl::OkStatus();
}

absl::StatusOr<Manifest> FromProto(const v1::Manifest& message) {
  Manifest manifest;
  manifest.format_version = static_cast<int>(message.format_version());
  manifest.job = message.job();
  manifest.step = message.step();
  manifest.epoch = message.epoch();
  manifest.attempt = message.attempt();
  manifest.created_ns = message.created_ns();
  manifest.build = message.build();
  manifest.numerics = message.numerics();
  manifest.virtual_ranks = message.virtual_ranks();
  for (const v1::MeshAxis& axis : message.mesh()) {
    manifest.mesh.push_back({axis.name(), axis.size()});
  }
  manifest.authoritative = message.authoritative();
  manifest.dual = message.dual();
  if (!CopyBytes(message.save_id(), manifest.save_id) ||
      !CopyBytes(message.state_digest(), manifest.state_digest)) {
    return absl::DataLossError("manifest: save_id must have 16 bytes and state_digest 32");
  }
  RETURN_IF_ERROR(FillLists(message, manifest));
  ASSIGN_OR_RETURN(manifest.quant, QuantFromProto(message));
  return manifest;
}

std::string WithCrc(std::string bytes) {
  AppendLittle(Crc32c(0, bytes.data(), bytes.size()), 4, bytes);
  return bytes;
}

// `bytes` without its last four, which must be their checksum.
absl::StatusOr<std::string_view> CheckedBody(std::string_view bytes, std::string_view what) {
  const size_t body_bytes = bytes.size() < 4 ? 0 : bytes.size() - 4;
  const std::string_view body = bytes.substr(0, body_bytes);
  if (bytes.size() < 4 ||
      Crc32c(0, body.data(), body.size()) != ReadLittle(bytes.substr(body_bytes))) {
    return absl::DataLossError(absl::StrCat(std::string(what), ": wrong crc32c"));
  }
  return body;
}

}  // namespace

std::string EncodeManifest(const Manifest& manifest) {
  const std::string payload = SerializeDeterministic(ToProto(manifest));
  std::string bytes(kMagic);
  AppendLittle(static_cast<uint64_t>(kFormatVersion), 4, bytes);
  AppendLittle(payload.size(), 8, bytes);
  return WithCrc(bytes + payload);
}

absl::StatusOr<Manifest> DecodeManifest(std::string_view bytes) {
  if (bytes.size() < kPreambleBytes + 4 || bytes.substr(0, kMagic.size()) != kMagic) {
    return absl::DataLossError("manifest: does not begin with RVLMANIF, or is truncated");
  }
  const uint64_t version = ReadLittle(bytes.substr(8, 4));
  if (version != static_cast<uint64_t>(kFormatVersion)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "manifest: format version ", version, "; this program reads version ", kFormatVersion));
  }
  const uint64_t payload_bytes = ReadLittle(bytes.substr(12, 8));
  if (payload_bytes > kMaxPayloadBytes || payload_bytes != bytes.size() - kPreambleBytes - 4) {
    return absl::DataLossError(
        absl::StrCat("manifest: payload of ", payload_bytes, " bytes in a file of ", bytes.size()));
  }
  ASSIGN_OR_RETURN(const std::string_view body, CheckedBody(bytes, "manifest"));
  const std::string_view payload = body.substr(kPreambleBytes);
  v1::Manifest message;
  if (!message.ParseFromArray(payload.data(), static_cast<int>(payload.size()))) {
    return absl::DataLossError("manifest: payload is not a Manifest message");
  }
  ASSIGN_OR_RETURN(Manifest manifest, FromProto(message));
  RETURN_IF_ERROR(ValidateManifest(manifest));
  return manifest;
}

v1::Seal SealToProto(const Seal& seal) {
  v1::Seal message;
  message.set_step(seal.step);
  message.set_epoch(seal.epoch);
  message.set_attempt(seal.attempt);
  message.set_writer(seal.writer);
  message.set_sequence(seal.sequence);
  message.set_save_plan_hash(seal.save_plan_hash.data(), seal.save_plan_hash.size());
  for (const FileRecord& file : seal.files) {
    v1::SealedFile* added = message.add_files();
    added->set_path(file.path);
    added->set_size(file.size);
    added->set_header_bytes(file.header_bytes);
    added->set_crc32c(file.crc32c);
  }
  for (const SealedChunk& chunk : seal.chunks) {
    v1::SealedChunk* added = message.mutable_files(chunk.chunk.file)->add_chunks();
    added->set_tensor(chunk.tensor);
    ChunkToProto(chunk.chunk, *added->mutable_chunk());
  }
  for (const SealedTensor& tensor : seal.tensors) {
    v1::SealedTensor* added = message.add_tensors();
    added->set_name(tensor.name);
    added->set_digest64(tensor.digest64);
  }
  for (const SealedTensor& tensor : seal.quantized) {
    v1::SealedTensor* added = message.add_quantized();
    added->set_name(tensor.name);
    added->set_digest64(tensor.digest64);
  }
  for (const Blob& blob : seal.blobs) {
    BlobToProto(blob, *message.add_blobs());
    message.add_blob_names(blob.name);
  }
  message.set_seconds(seal.seconds);
  message.set_bytes(seal.bytes);
  return message;
}

absl::StatusOr<Seal> SealFromProto(const v1::Seal& message) {
  Seal seal;
  seal.step = message.step();
  seal.epoch = message.epoch();
  seal.attempt = message.attempt();
  seal.writer = message.writer();
  seal.sequence = message.sequence();
  seal.seconds = message.seconds();
  seal.bytes = message.bytes();
  if (!CopyBytes(message.save_plan_hash(), seal.save_plan_hash)) {
    return absl::InvalidArgumentError("seal: save_plan_hash must have 32 bytes");
  }
  for (const v1::SealedFile& file : message.files()) {
    const auto index = static_cast<int>(seal.files.size());
    seal.files.push_back({.path = file.path(),
                          .size = file.size(),
                          .header_bytes = file.header_bytes(),
                          .crc32c = file.crc32c(),
                          .writer = message.writer()});
    for (const v1::SealedChunk& part : file.chunks()) {
      absl::StatusOr<ChunkRecord> chunk = ChunkFromProto(part.chunk());
      if (!chunk.ok()) {
        return Annotate(chunk.status(), absl::StrCat("seal: tensor ", part.tensor()));
      }
      chunk->file = index;
      seal.chunks.push_back({part.tensor(), *std::move(chunk)});
    }
  }
  for (const v1::SealedTensor& tensor : message.tensors()) {
    seal.tensors.push_back({tensor.name(), tensor.digest64()});
  }
  for (const v1::SealedTensor& tensor : message.quantized()) {
    seal.quantized.push_back({tensor.name(), tensor.digest64()});
  }
  if (message.blobs_size() != message.blob_names_size()) {
    return absl::InvalidArgumentError("seal: blobs and blob_names differ in number");
  }
  for (int i = 0; i < message.blobs_size(); ++i) {
    ASSIGN_OR_RETURN(Blob blob, BlobFromProto(message.blobs(i), message.blob_names(i)));
    seal.blobs.push_back(std::move(blob));
  }
  return seal;
}

std::string EncodeSeal(const Seal& seal) {
  return WithCrc(SerializeDeterministic(SealToProto(seal)));
}

absl::StatusOr<Seal> DecodeSeal(std::string_view bytes) {
  ASSIGN_OR_RETURN(const std::string_view body, CheckedBody(bytes, "seal"));
  v1::Seal message;
  if (!message.ParseFromArray(body.data(), static_cast<int>(body.size()))) {
    return absl::DataLossError("seal: not a Seal message");
  }
  return SealFromProto(message);
}

}  // namespace ravel::ckpt
