#pragma once

// The address of a coordinator, and the caller's identity.

#include <memory>
#include <string>
#include <utility>

#include "coordinator/access/context_file.h"

namespace ravel::ctl {

struct Endpoint {
  Endpoint() = default;
  // Plaintext, which only loopback addresses get.
  Endpoint(std::string plain) : address(std::move(plain)) {}
  Endpoint(const char* plain) : address(plain) {}

  std::string address;  // HOST:PORT
  // Shared by the clients that one command makes; null: plaintext.
  std::shared_ptr<const coordinator::ContextFile> context;
};

}  // namespace ravel::ctl
