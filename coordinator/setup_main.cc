#include "coordinator/setup_main.h"

#include <cstdio>

#include <CLI/CLI.hpp>
#include <sys/stat.h>

#include "common/clock.h"
#include "common/time_text.h"
#include "coordinator/access/authority_files.h"

namespace ravel::coordinator {
namespace {

constexpr int kFault = 1;
constexpr int kUsage = 2;

int Complain(const absl::Status& status) {
  std::fprintf(stderr, "ravel-coordinator: %s\n", std::string(status.message()).c_str());
  return absl::IsInvalidArgument(status) ? kUsage : kFault;
}

int Init(const InitOrder& order) {
  const absl::StatusOr<InitResult> made = InitCluster(order, SystemClock::Get());
  if (!made.ok()) {
    return Complain(made.status());
  }
  std::printf(
      "certificates in %s/tls, authority %s\n"
      "administrator: ravelctl --context %s (coordinator %s)\n",
      order.state_dir.c_str(),
      made->fingerprint.c_str(),
      made->context_path.c_str(),
      made->coordinator.c_str());
  return 0;
}

// What is in force in the state directory now.
int Show(const std::string& state_dir) {
  const absl::StatusOr<AuthorityFiles> files = LoadAuthorityFiles(state_dir);
  if (!files.ok()) {
    return Complain(Annotate(files.status(), "--state-dir"));
  }
  const absl::StatusOr<CertificateFacts> signer = ReadCertificate(files->authority.certificate);
  const absl::StatusOr<CertificateFacts> server = ReadCertificate(files->server_signer.certificate);
  if (!signer.ok() || !server.ok()) {
    return Complain(signer.ok() ? server.status() : signer.status());
  }
  std::printf("users and nodes: %s, until %s\ncoordinator:     %s, until %s\nrotation:        %s\n",
              signer->fingerprint.c_str(),
              FormatTime(signer->not_after_ms).c_str(),
              server->fingerprint.c_str(),
              FormatTime(server->not_after_ms).c_str(),
              files->rotating ? "under way" : "none");
  return 0;
}

void AddInit(CLI::App& app, InitOrder& order) {
  CLI::App* const init =
      app.add_subcommand("init", "Make the certificates of a new cluster, and its administrator");
  init->add_option("--state-dir", order.state_dir, "Of the coordinator")->required();
  init->add_option("--name",
                   order.names,
                   "How clients call the coordinator: host names and addresses; the first one goes "
                   "into the administrator's context")
      ->required()
      ->delimiter(',');
  init->add_option("--port", order.port, "Of the coordinator, for the administrator's context")
      ->check(CLI::Range(1, 65535))
      ->capture_default_str();
  init->add_option("--admin", order.admin, "Name of the administrator")->capture_default_str();
}

void AddAuthority(CLI::App& app, SetupVerbs& verbs) {
  CLI::App* const authority =
      app.add_subcommand("authority", "Show or rotate what signs the certificates of a cluster");
  authority->require_subcommand(1);
  const auto add = [&](const char* name, const char* help) {
    CLI::App* const verb = authority->add_subcommand(name, help);
    verb->add_option("--state-dir", verbs.state_dir, "Of the coordinator, which may run")
        ->required();
    return verb;
  };
  add("show", "The authorities in force");
  add("rotate", "A new authority signs users and nodes from now on; the old one stays trusted");
  add("finish", "The old authority is trusted no more")
      ->add_flag("--force",
                 verbs.force,
                 "Also before the last certificate that it signed has ended: whoever has not "
                 "renewed since the rotation must enrol again");
}

}  // namespace

void AddSetupVerbs(CLI::App& app, SetupVerbs& verbs) {
  AddInit(app, verbs.init);
  AddAuthority(app, verbs);
}

std::optional<int> RunSetupVerb(const CLI::App& app, const SetupVerbs& verbs) {
  if (!app.got_subcommand("init") && !app.got_subcommand("authority")) {
    return std::nullopt;
  }
  umask(077);
  if (app.got_subcommand("init")) {
    return Init(verbs.init);
  }
  const CLI::App* const authority = app.get_subcommand("authority");
  const int64_t now_ms = SystemClock::Get().WallMs();
  absl::Status done;
  if (authority->got_subcommand("rotate")) {
    done = BeginRotation(verbs.state_dir, now_ms);
  } else if (authority->got_subcommand("finish")) {
    done = FinishRotation(verbs.state_dir, now_ms, verbs.force);
  }
  return done.ok() ? Show(verbs.state_dir) : Complain(done);
}

}  // namespace ravel::coordinator
