#pragma once

namespace ravel {

// Of all binaries; client and server may differ by one minor version.
inline constexpr char kVersion[] = "0.1.0";

}  // namespace ravel
