#include "coordinator/ctl/request_id.h"

#include <cstdint>
#include <cstdio>
#include <random>

namespace ravel::ctl {

std::string MakeRequestId() {
  std::random_device random;
  uint32_t words[4] = {random(), random(), random(), random()};
  words[1] = (words[1] & 0xFFFF0FFFu) | 0x4000u;      // version 4
  words[2] = (words[2] & 0x3FFFFFFFu) | 0x80000000u;  // variant 1
  char text[40];
  std::snprintf(text,
                sizeof text,
                "%08x-%04x-%04x-%04x-%04x%08x",
                words[0],
                words[1] >> 16,
                words[1] & 0xFFFFu,
                words[2] >> 16,
                words[2] & 0xFFFFu,
                words[3]);
  return text;
}

}  // namespace ravel::ctl
