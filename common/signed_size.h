#pragma once

// Counts and positions are signed in this project, so that differences and "none" are plain; those
// of the standard library are not. These are the places where one becomes the other, each checked:
// a negative count would be a huge one.

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <span>

#include "common/check.h"

namespace ravel {

// A count for the standard library.
constexpr size_t Size(int64_t count) {
  CHECK_MSG(count >= 0, "a negative size");
  return static_cast<size_t>(count);
}

// The element at `position` of a vector, span, string or array.
template <typename Elements>
constexpr decltype(auto) At(Elements&& elements, int64_t position) {
  CHECK_MSG(position >= 0 && position < std::ssize(elements), "a position outside its container");
  return elements[static_cast<size_t>(position)];
}

// Elements [begin, begin + count) of contiguous ones.
template <typename Elements>
constexpr auto Part(Elements&& elements, int64_t begin, int64_t count) {
  return std::span(elements).subspan(Size(begin), Size(count));
}

}  // namespace ravel
