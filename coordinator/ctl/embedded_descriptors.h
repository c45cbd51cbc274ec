#pragma once

#include <cstddef>

namespace ravel::ctl {

// A serialized FileDescriptorSet of proto/jobs.proto with comments; written by the build
// (embed_file.cmake).
extern const unsigned char kEmbeddedDescriptors[];
extern const std::size_t kEmbeddedDescriptorsBytes;

}  // namespace ravel::ctl
