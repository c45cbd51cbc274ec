// The verb version: the versions of ravelctl and of the coordinator, and the lag of its strand.

#include <absl/strings/str_cat.h>

#include "common/version.h"
#include "coordinator/ctl/exit_code.h"
#include "coordinator/ctl/look_verbs.h"

namespace ravel::ctl {

int RunVersion(const CommonOptions& common, bool client_only) {
  json::Value document;
  document.Set("client", kVersion);
  std::string text = absl::StrCat("ravelctl ", kVersion, "\n");
  absl::Status status;
  if (!client_only) {
    const absl::StatusOr<std::unique_ptr<JobsClient>> client =
        JobsClient::Connect(common.coordinator);
    absl::StatusOr<ServerView> server =
        client.ok() ? (*client)->Server() : absl::StatusOr<ServerView>(client.status());
    status = server.status();
    if (server.ok()) {
      document.Set("server", server->version);
      document.Set("clusterId", server->cluster_id);
      document.Set("term", server->term);
      document.Set("insecure", server->insecure);
      json::Value lag;
      lag.Set("p50Ms", server->lag.p50_ms);
      lag.Set("p99Ms", server->lag.p99_ms);
      lag.Set("maxMs", server->lag.max_ms);
      lag.Set("longestTurnMs", server->lag.longest_turn_ms);
      lag.Set("longestTurn", server->lag.longest_turn);
      lag.Set("alarms", server->lag_alarms);
      document.Set("strandLag", std::move(lag));
      absl::StrAppend(&text,
                      "coordinator ",
                      server->version,
                      " at ",
                      common.coordinator.address,
                      ", cluster ",
                      server->cluster_id,
                      ", term ",
                      server->term,
                      server->insecure ? ", without certificates" : "",
                      "\n");
    }
  }
  Print(common.format == Format::kTable ? text : FormatDocument(document, common.format));
  return Report(status);
}

}  // namespace ravel::ctl
