#include "coordinator/setup_main.h"

#include <cstdio>
#include <cstdlib>
#include <memory>

#include <CLI/CLI.hpp>
#include <absl/base/thread_annotations.h>
#include <sys/stat.h>

#include "common/clock.h"
#include "common/mutex.h"
#include "common/store/ravel_store_client.h"
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

// Prints the authorities that are in force in the state directory now.
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

int Certify(const StoreCertificateOrder& order) {
  const absl::Status made = CertifyStore(order, SystemClock::Get().WallMs());
  if (!made.ok()) {
    return Complain(made);
  }
  std::printf("identity of a store in %s: ravel-store --identity %s --coordinator HOST:PORT\n",
              order.output.c_str(),
              order.output.c_str());
  return 0;
}

void AddCertify(CLI::App& app, StoreCertificateOrder& order) {
  CLI::App* const certify = app.add_subcommand(
      "certify-store", "Make the certificate of a ravel-store, good for a year; again to renew it");
  certify->add_option("--state-dir", order.state_dir, "Of the coordinator")->required();
  certify->add_option("--name", order.names, "How clients call the store: names and addresses")
      ->required()
      ->delimiter(',');
  certify->add_option("--out", order.output, "Folder for certificate, key and authority")
      ->required();
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
  init->add_option("--authority",
                   order.authority.folder,
                   "Folder with tls.crt and tls.key of an authority that signs itself, as a secret "
                   "of cert-manager has them; default: a new authority");
  init->add_option("--cluster",
                   order.authority.cluster,
                   "Name of the cluster in certificates, spiffe://CLUSTER.ravel/...; default: a "
                   "random one");
  init->add_option("--node-token",
                   order.node_token.path,
                   "File with a token that nodes will join by, made elsewhere for the authority of "
                   "--authority: ravel1.FINGERPRINT.SECRET, SHA-256 of its certificate and 160 "
                   "random bits as hex digits");
  init->add_option("--node-token-uses", order.node_token.uses, "How many nodes may join by it")
      ->capture_default_str();
  init->add_option("--node-token-ttl", order.node_token.ttl, "How long it is good")
      ->capture_default_str();
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
  AddCertify(app, verbs.certify);
}

void UseOwnIdentityForStores(const std::string& state_dir) {
  if (std::getenv("RAVEL_STORE_IDENTITY") != nullptr) {
    return;
  }
  struct Held {
    Mutex mutex;
    StoreClientCertificate made ABSL_GUARDED_BY(mutex);
  };
  store::SetStoreIdentitySource(
      [state_dir,
       held = std::make_shared<Held>()]() -> absl::StatusOr<std::optional<store::StoreIdentity>> {
        const int64_t now_ms = SystemClock::Get().WallMs();
        const MutexLock lock(held->mutex);
        if (now_ms >= held->made.renew_ms) {
          ASSIGN_OR_RETURN(const AuthorityFiles files, LoadAuthorityFiles(state_dir));
          ASSIGN_OR_RETURN(held->made, MakeStoreClientCertificate(files, now_ms));
        }
        return std::optional<store::StoreIdentity>(
            store::StoreIdentity{held->made.trusted, held->made.certificate, held->made.key});
      });
}

std::optional<int> RunSetupVerb(const CLI::App& app, const SetupVerbs& verbs) {
  if (!app.got_subcommand("init") && !app.got_subcommand("authority") &&
      !app.got_subcommand("certify-store")) {
    return std::nullopt;
  }
  umask(077);
  if (app.got_subcommand("certify-store")) {
    return Certify(verbs.certify);
  }
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
