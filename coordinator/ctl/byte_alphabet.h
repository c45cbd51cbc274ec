#pragma once

// GPT-2's printable stand-ins for bytes: how byte-level BPE writes its tokens in tokenizer.json.

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "common/status.h"

namespace ravel::ctl {

// The stand-in of each byte, in UTF-8.
const std::array<std::string, 256>& ByteStandIns();
std::string BytesToStandIns(std::string_view bytes);
// InvalidArgument when a character stands for no byte.
absl::StatusOr<std::string> StandInsToBytes(std::string_view text);

}  // namespace ravel::ctl
