#pragma once

// Mutated protobuf messages: every field of a message may appear, vanish, repeat and hold values
// that nobody should send.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <google/protobuf/message.h>

#include "tests/testing/fuzz.h"

namespace ravel::testing {

// Protobuf writes no line for each message that does not parse from now on.
void SilenceProtobuf();

// Changes one to four fields, at any depth. `words` are texts that mean something to the receiver,
// such as names of jobs: a third of all texts.
void MutateMessage(google::protobuf::Message& message,
                   const std::vector<std::string>& words,
                   FuzzRandom& random);

// FuzzTarget::mutate over serialized messages: half of the inputs by fields, half by bytes. The
// seeds are not empty, and of the type of `prototype`, which must outlive the result.
std::function<std::string(FuzzRandom&)> MessageMutation(const google::protobuf::Message& prototype,
                                                        std::vector<std::string> seeds,
                                                        std::vector<std::string> words);

}  // namespace ravel::testing
