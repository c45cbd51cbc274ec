#pragma once

#include <string>

#include <google/protobuf/message.h>

namespace ravel::testing {

// Puts the text into every string of a message, and one element into every list, four messages
// deep.
void SetEveryText(google::protobuf::Message& message, const std::string& text, int depth = 0);

}  // namespace ravel::testing
