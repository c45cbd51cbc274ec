#include "coordinator/ctl/access_main.h"

#include <utility>

#include <CLI/CLI.hpp>

#include "coordinator/ctl/exit_code.h"

namespace ravel::ctl {
namespace {

CLI::App* Verb(CLI::App& app,
               std::function<int()>& run,
               const std::string& name,
               const std::string& help,
               std::function<int()> action) {
  CLI::App* const verb = app.add_subcommand(name, help);
  verb->fallthrough();
  verb->callback([&run, action = std::move(action)] { run = action; });
  return verb;
}

CLI::App* Group(CLI::App& app, const std::string& name, const std::string& help) {
  CLI::App* const group = app.add_subcommand(name, help);
  group->fallthrough();
  group->require_subcommand(1);
  return group;
}

void AddEnrolVerbs(CLI::App& app,
                   CommonOptions& common,
                   AccessLine& line,
                   std::function<int()>& run) {
  CLI::App* const enrol = Group(app, "enrol", "Make a one-time token for a node or a user");
  CLI::App* const revoke = Group(app, "revoke", "End a node's or a user's certificates");
  for (const bool node : {true, false}) {
    const char* const kind = node ? "node" : "user";
    CLI::App* verb = Verb(*enrol, run, kind, "Print a token, once", [&common, &line, node] {
      line.enrol.node = node;
      return RunEnrol(common, line.enrol);
    });
    verb->add_option("--ttl", line.enrol.ttl, "How long the token is good")->capture_default_str();
    CLI::Option* const name =
        verb->add_option("NAME",
                         line.enrol.name,
                         node ? "Only for the node of that name; default any" : "Of the user");
    if (node) {
      verb->add_option("--uses", line.enrol.uses, "How many nodes may join by it")
          ->capture_default_str();
    } else {
      name->required();
      verb->add_option("--role",
                       line.enrol.role,
                       "viewer, user (changes jobs of --namespace), operator or admin")
          ->required();
    }
    verb = Verb(*revoke, run, kind, "At once, with its calls under way", [&common, &line, node] {
      return RunRevoke(common, node, line.revoked);
    });
    verb->add_option("NAME", line.revoked, "As `identities` lists it")->required();
  }
}

}  // namespace

void AddEndpoint(CLI::App& app, AccessLine& line) {
  app.add_option("--coordinator",
                 line.endpoint.coordinator,
                 "Address of the coordinator, plaintext unless --context is given too; default: "
                 "the context in use, else 127.0.0.1:7070")
      ->envname("RAVEL_COORDINATOR");
  app.add_option("--context",
                 line.endpoint.context,
                 "Coordinator and certificate: a name of `context list`, or a file's path")
      ->envname("RAVEL_CONTEXT");
}

void AddAccessVerbs(CLI::App& app,
                    CommonOptions& common,
                    AccessLine& line,
                    std::function<int()>& run) {
  CLI::App* verb = Verb(app, run, "login", "Become a user, by a token", [&line] {
    if (!line.endpoint.coordinator) {
      return ReportUsage("login needs --coordinator HOST:PORT");
    }
    line.login.coordinator = *line.endpoint.coordinator;
    line.login.context = line.endpoint.context;
    return RunLogin(line.login);
  });
  verb->add_option("TOKEN",
                   line.login.token,
                   "Of `ravelctl enrol user`; -: from the input, where other users of this host do "
                   "not see it")
      ->required();
  CLI::App* const context = Group(app, "context", "Coordinators that this user has logged in to");
  Verb(*context, run, "list", "List them", [&common] { return RunContextList(common); });
  verb = Verb(*context, run, "use", "Choose one", [&line] { return RunContextUse(line.context); });
  verb->add_option("NAME", line.context, "Of `context list`")->required();
  AddEnrolVerbs(app, common, line, run);
  Verb(app, run, "identities", "List users and nodes", [&common] { return RunIdentities(common); });
  verb = Verb(app, run, "whoami", "Show whose certificate is used", [&common] {
    return RunWhoAmI(common);
  });
  verb->add_flag("--renew", line.renew, "First get a new one, as before it ends by itself");
  verb = Verb(app, run, "audit", "Show who changed what, and what was refused", [&common, &line] {
    return RunAudit(common, line.after_seq);
  });
  verb->add_option("--after", line.after_seq, "Only records after this number");
}

bool NeedsEndpoint(const CLI::App& app) {
  return !app.got_subcommand("login") && !app.got_subcommand("context") &&
         !app.got_subcommand("completion");
}

absl::Status FindCoordinator(const AccessLine& line, CommonOptions& common) {
  ASSIGN_OR_RETURN(const ChosenEndpoint chosen, ChooseEndpoint(line.endpoint));
  common.coordinator = chosen.endpoint;
  if (line.renew) {
    return chosen.context_path.empty() ? absl::FailedPreconditionError(
                                             "--renew: a plaintext coordinator has no certificates")
                                       : RenewNow(chosen.context_path, common.coordinator);
  }
  if (!chosen.context_path.empty()) {
    RenewWhenDue(chosen.context_path, common.coordinator);
    // Towards stores, too; and the trainer that `generate` starts.
    setenv("RAVEL_STORE_IDENTITY", chosen.context_path.c_str(), 0);
  }
  return absl::OkStatus();
}

}  // namespace ravel::ctl
