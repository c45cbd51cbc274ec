#pragma once

// manifest.pb and seals as bytes and messages. On disk.

#include <string>
#include <string_view>

#include "common/ckpt/manifest.h"
#include "common/status.h"

namespace ravel::v1 {
class Seal;  // proto/manifest.proto
}

namespace ravel::ckpt {

// "RVLMANIF", u32 version, u64 payload length, payload, u32 crc32c of all before it. Deterministic.
std::string EncodeManifest(const Manifest& manifest);
// Checks length, version (naming both), checksum, bounds of everything, and ValidateManifest.
absl::StatusOr<Manifest> DecodeManifest(std::string_view bytes);

v1::Seal SealToProto(const Seal& seal);
absl::StatusOr<Seal> SealFromProto(const v1::Seal& message);
// The contents of seals/<writer>: the message followed by its u32 crc32c.
std::string EncodeSeal(const Seal& seal);
absl::StatusOr<Seal> DecodeSeal(std::string_view bytes);

}  // namespace ravel::ckpt
