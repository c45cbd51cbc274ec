#pragma once

// login, context, enrol, revoke, identities, whoami, audit: who may speak to a coordinator.

#include <cstdint>
#include <string>

#include "coordinator/ctl/common_options.h"

namespace ravel::ctl {

struct LoginOptions {
  std::string coordinator;
  std::string context = {};  // empty: named for the coordinator's host
  std::string token = {};
};
int RunLogin(const LoginOptions& options);
int RunContextList(const CommonOptions& common);
int RunContextUse(const std::string& name);

struct EnrolOptions {
  bool node = false;
  std::string name = {};
  std::string role = {};
  int64_t uses = 1;
  std::string ttl = "1h";
};
// Prints the token, which is not shown again.
int RunEnrol(const CommonOptions& common, const EnrolOptions& options);
int RunRevoke(const CommonOptions& common, bool node, const std::string& name);
int RunIdentities(const CommonOptions& common);
int RunWhoAmI(const CommonOptions& common);
int RunAudit(const CommonOptions& common, int64_t after_seq);

// Renews the certificate of a context, and learns whom it is to trust.
absl::Status RenewNow(const std::string& context_path, Endpoint& endpoint);
// The same when two thirds of its time have passed. A failure is said
// and otherwise ignored: the certificate may still be good.
void RenewWhenDue(const std::string& context_path, Endpoint& endpoint);

}  // namespace ravel::ctl
