#pragma once

#include <string>

namespace ravel::ctl {

// A random UUID: the same request may be sent again and happens once.
std::string MakeRequestId();

}  // namespace ravel::ctl
