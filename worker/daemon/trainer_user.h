#pragma once

// Another user for trainers (--trainer-user): they cannot read the node's key, its secrets or its
// logs, and leave no file of the daemon's user.

#include <functional>
#include <string>
#include <vector>

#include <sys/types.h>

#include "common/status.h"

namespace ravel::daemon {

struct TrainerUser {
  std::string name;
  uid_t uid = 0;
  gid_t gid = 0;
  std::string home;
};

// NAME or NAME:GROUP of this host's users; without a group the user's own. NotFound for one that is
// not there; InvalidArgument for root, root's group, and the user of this process.
absl::StatusOr<TrainerUser> FindTrainerUser(const std::string& text);

// PermissionDenied names the capabilities that this process lacks to start and end processes of
// another user and to give folders to them.
absl::Status CheckMayBecome(const TrainerUser& user);

// Between fork and exec: async-signal-safe. Groups, user and capabilities of this process become
// those of the trainers for good; no program that it executes gets more. False: errno says why.
bool BecomeTrainerUser(uid_t uid, gid_t gid);

// Runs `work` on a thread that opens files as that user, and joins it. For checks of paths.
absl::Status AsTrainerUser(const TrainerUser& user, const std::function<absl::Status()>& work);
// The same for a thread that opens files as that user until it ends.
absl::Status TakeFileRights(const TrainerUser& user);

// Variables that tell programs of their user: HOME, USER, LOGNAME.
std::vector<std::string> UserVariables(const TrainerUser& user);

// The folders of a daemon that trainers reach; empty names are passed over.
struct SharedFolders {
  std::string work_dir;    // they pass through it and list nothing
  std::string gemm_cache;  // theirs to write; made if it is absent
  std::string data_cache;  // theirs to read, with all that will be made beneath it
};
absl::Status ShareFolders(const TrainerUser& user, const SharedFolders& folders);

}  // namespace ravel::daemon
