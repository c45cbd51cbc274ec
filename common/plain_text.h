#pragma once

// Text that others wrote, made fit for a terminal: control characters can move the cursor, rewrite
// what was printed and, on some terminals, run things.

#include <string>
#include <string_view>

namespace ravel {

// Returns true if the text has a control character (C0, DEL, C1) or a byte that is not UTF-8. Tab
// and newline count too.
bool HasControlText(std::string_view text);

// Control characters but tab and newline as `\x1b`, bytes that are not UTF-8 alike, characters that
// turn the reading direction around as `\u202e`.
std::string EscapeControlText(std::string_view text);

// At most so many bytes, cut at a character's end, with "..." where something is missing.
std::string CutText(std::string text, std::size_t max_bytes);

}  // namespace ravel
