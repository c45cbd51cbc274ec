#pragma once

// Rights of identities in a store. Pure.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "common/job_token.h"
#include "common/status.h"
#include "worker/store/fence_book.h"

namespace ravel::store_server {

enum class CallerKind {
  kAnyone,       // plaintext on loopback: all, within fences
  kCoordinator,  // all
  kOperator,     // a user that the store's flags name: all
  kNode,         // and a trainer of it: reads all; writes unfinished saves alone, within fences
  kUser,         // reads all; writes and removes pins
};

struct Caller {
  CallerKind kind = CallerKind::kUser;
  std::string text = {};     // "node/n1", "trainer/n1/JOB_UID"
  std::string serial = {};   // of the certificate, in hex; empty for anyone
  int64_t not_after_ms = 0;  // end of the certificate
  std::string node = {};     // of kNode: its name
  // The tag of its certificate's job in names of saves that a trainer writes; none: not a trainer.
  std::optional<uint32_t> job_tag = {};
  // A node writes saves of the job that its token names, and of no other. False where the store
  // knows no key for tokens.
  bool needs_token = false;
  absl::StatusOr<JobToken> token = absl::PermissionDeniedError("no token of a job came with it");
};

// The caller that a certificate's URI names: spiffe://CLUSTER.ravel/node/NAME, .../user/NAME,
// .../trainer/NODE/JOB_UID, .../coordinator. Unauthenticated for one of another cluster or another
// form.
absl::StatusOr<Caller> CallerOf(std::string_view cluster, std::string_view uri);
// CLUSTER of such a URI; InvalidArgument when it is none.
absl::StatusOr<std::string> ClusterOf(std::string_view uri);

enum class Act { kWrite, kMakeFolder, kMakeFolders, kWithdraw };

// PermissionDenied when the caller may never do it there; FailedPrecondition when the save's epoch
// is over.
absl::Status CheckAct(const Caller& caller,
                      Act act,
                      std::string_view path,
                      const FenceBook& fences);
absl::Status CheckPublish(const Caller& caller, std::string_view from, std::string_view to);
absl::Status CheckFence(const Caller& caller);

}  // namespace ravel::store_server
