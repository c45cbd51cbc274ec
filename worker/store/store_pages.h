#pragma once

// /livez, /readyz and /metrics of a store.

#include <memory>
#include <string>

#include "common/http/http_server.h"
#include "common/http/page_access.h"
#include "common/status.h"
#include "worker/store/store_service.h"

namespace ravel::store_server {

// Disks, service and trust outlive it; trust may be null. Errors as those of http::Server::Start.
absl::StatusOr<std::unique_ptr<http::Server>> ServeStorePages(const http::PageFlags& flags,
                                                              const DiskSet* disks,
                                                              const StoreService* service,
                                                              const TrustBook* trust);

}  // namespace ravel::store_server
