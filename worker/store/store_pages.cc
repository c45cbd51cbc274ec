#include "worker/store/store_pages.h"

#include <utility>

#include "common/http/prometheus_text.h"

namespace ravel::store_server {
namespace {

std::string Metrics(const DiskSet& disks, const StoreService& service, const TrustBook* trust) {
  const StoreCounts& counts = service.counts();
  http::PrometheusText text;
  const auto counter = [&text](std::string_view name, std::string_view help, int64_t value) {
    text.Counter(name, help).Add(static_cast<double>(value));
  };
  const auto gauge = [&text](std::string_view name, std::string_view help, int64_t value) {
    text.Gauge(name, help).Add(static_cast<double>(value));
  };
  counter("ravel_store_calls_total", "Calls that have ended.", counts.calls);
  counter("ravel_store_refused_total", "Calls of callers or epochs that may not.", counts.refused);
  counter("ravel_store_failed_total", "Calls that failed otherwise.", counts.failed);
  counter("ravel_store_written_bytes_total", "Bytes of files that arrived.", counts.written_bytes);
  counter("ravel_store_read_bytes_total", "Bytes of files that were sent.", counts.read_bytes);
  counter("ravel_store_finished_files_total", "Files that got their name.", counts.finished_files);
  counter("ravel_store_resumed_uploads_total", "Uploads that went on.", counts.resumed_uploads);
  counter("ravel_store_bad_blocks_total", "Blocks that arrived damaged.", counts.bad_blocks);
  gauge("ravel_store_streams", "Reads and writes under way.", counts.streams);
  gauge("ravel_store_used_bytes", "Bytes of all files.", disks.used_bytes());
  gauge("ravel_store_free_bytes", "Bytes that one more file may have.", disks.FreeBytes());
  gauge("ravel_store_quota_bytes", "The quota; 0: none.", disks.quota_bytes());
  if (trust != nullptr) {
    gauge("ravel_store_trust_heard_seconds",
          "Time of the coordinator's last word on who is revoked, since 1970; 0: none yet.",
          trust->heard_ms() / 1000);
  }
  return text.Take();
}

}  // namespace

absl::StatusOr<std::unique_ptr<http::Server>> ServeStorePages(const http::PageFlags& flags,
                                                              const DiskSet* disks,
                                                              const StoreService* service,
                                                              const TrustBook* trust) {
  http::ServerOptions options;
  options.listen = flags.listen;
  ASSIGN_OR_RETURN(options.security, http::SecurityOf(flags));
  const auto good = [](const http::Respond& respond) { respond({.body = "ok\n"}); };
  options.pages["/livez"] = good;
  options.pages["/readyz"] = [disks](const http::Respond& respond) {
    const bool room = disks->FreeBytes() > 0;
    respond({.status = room ? 200 : 503, .body = room ? "ok\n" : "full\n"});
  };
  options.pages["/metrics"] = [disks, service, trust](const http::Respond& respond) {
    respond({.content_type = std::string(http::PrometheusText::kContentType),
             .make_body = [disks, service, trust] { return Metrics(*disks, *service, trust); }});
  };
  return http::Server::Start(std::move(options));
}

}  // namespace ravel::store_server
