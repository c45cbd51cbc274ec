#pragma once

// A digest that tells a token file from another one of the same length, without reading all of it.

#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "common/status.h"

namespace ravel {

// Places of a file whose ids are sampled, spread evenly from its first id to its last, and ids at
// each place. Places of a short file overlap.
inline constexpr int64_t kSamplePlaces = 16;
inline constexpr int64_t kSampleIds = 64;

// ids[i] = token (begin + i).
using ReadIdsFunction = std::function<absl::Status(int64_t begin, std::span<int32_t> ids)>;

// SHA-256, as 64 lower-case hexadecimal digits, of the number of ids and the sampled ones. It does
// not depend on the format or the width of ids in the file. A change of a few ids between the
// places keeps it: it finds files that were mistaken for each other, and no forgery. Errors are
// those of `read`.
absl::StatusOr<std::string> TokenSampleDigest(int64_t tokens, const ReadIdsFunction& read);

}  // namespace ravel
