#include "coordinator/http/http_pages.h"

#include <atomic>
#include <utility>

#include "common/http/prometheus_text.h"

namespace ravel::coordinator {

absl::StatusOr<std::unique_ptr<http::Server>> ServeHttpPages(const http::PageFlags& flags,
                                                             HttpPagesParts parts) {
  http::ServerOptions options = {.listen = flags.listen, .pages = {}};
  ASSIGN_OR_RETURN(options.security, http::SecurityOf(flags));
  options.pages["/livez"] = [strand = parts.strand](http::Respond respond) {
    strand->PostNamed("livez", [respond = std::move(respond)] { respond({200, "alive\n"}); });
  };
  options.pages["/readyz"] = [strand = parts.strand,
                              writable = parts.writable](http::Respond respond) {
    strand->PostNamed("readyz", [writable, respond = std::move(respond)] {
      respond(writable() ? http::Answer{200, "ready\n"}
                         : http::Answer{503,
                                        "the database takes no changes: its disk is full, or the "
                                        "newest commit failed\n"});
    });
  };
  // The server counts too, and is there only after its pages. Its thread ends before it goes.
  const auto server = std::make_shared<std::atomic<const http::Server*>>(nullptr);
  options.pages["/metrics"] = [parts, server](http::Respond respond) {
    parts.strand->PostNamed("metrics", [parts, server, respond = std::move(respond)] {
      // The strand copies numbers; their text is made on the server's thread.
      http::Answer answer = {.content_type = std::string(http::PrometheusText::kContentType)};
      answer.make_body = [parts, server, metrics = parts.controller->Measure()] {
        ProcessMetrics process = parts.process();
        if (const http::Server* const itself = server->load()) {
          process.http = itself->counts();
        }
        return MetricsPage(metrics, process);
      };
      respond(std::move(answer));
    });
  };
  ASSIGN_OR_RETURN(std::unique_ptr<http::Server> started, http::Server::Start(std::move(options)));
  server->store(started.get());
  return started;
}

}  // namespace ravel::coordinator
