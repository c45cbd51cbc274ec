// Samples of a token file: kSamplePlaces runs of ids, place i at i * (tokens - kSampleIds) /
// (kSamplePlaces - 1), so that the first and the last ids are among them. Two files that were
// tokenised from different text, or shuffled, differ at nearly every place. As many pages are read.

#include "common/token_sample.h"

#include <algorithm>
#include <vector>

#include "common/crypto.h"

namespace ravel {
namespace {

// Little-endian, of `bytes` bytes.
void AddNumber(uint64_t number, int bytes, std::string& text) {
  for (int i = 0; i < bytes; ++i) {
    text.push_back(static_cast<char>(number >> (8 * i)));
  }
}

// place * room / (kSamplePlaces - 1), whatever the size of room.
int64_t PlaceAt(int64_t place, int64_t room) {
  constexpr int64_t kGaps = kSamplePlaces - 1;
  return room / kGaps * place + room % kGaps * place / kGaps;
}

}  // namespace

absl::StatusOr<std::string> TokenSampleDigest(int64_t tokens, const ReadIdsFunction& read) {
  std::string text;
  AddNumber(static_cast<uint64_t>(tokens), 8, text);
  const int64_t length = std::min(tokens, kSampleIds);
  std::vector<int32_t> ids(static_cast<size_t>(length));
  for (int64_t place = 0; place < kSamplePlaces && length > 0; ++place) {
    RETURN_IF_ERROR(read(PlaceAt(place, tokens - length), ids));
    for (const int32_t id : ids) {
      AddNumber(static_cast<uint32_t>(id), 4, text);
    }
  }
  return Hex(Sha256(text));
}

}  // namespace ravel
