#include "tests/testing/local_store_service.h"

#include <chrono>
#include <filesystem>
#include <utility>

#include <absl/strings/str_cat.h>
#include <grpcpp/grpcpp.h>

#include "common/check.h"
#include "worker/store/store_service.h"

namespace ravel::testing {

using store_server::DiskSet;
using store_server::FenceBook;
using store_server::StoreGate;
using store_server::StoreService;

struct LocalStore::Parts {
  std::unique_ptr<DiskSet> disks;
  std::unique_ptr<FenceBook> fences;
  StoreGate gate;
  std::unique_ptr<StoreService> service;
  std::unique_ptr<grpc::Server> server;
  int port = 0;
};

LocalStore::LocalStore(std::vector<std::string> folders, int64_t quota_bytes, int port)
    : parts_(std::make_unique<Parts>()) {
  store_server::DiskOptions options;
  options.quota_bytes = quota_bytes;
  for (const std::string& folder : folders) {
    std::filesystem::create_directories(folder + "/files");
    options.folders.push_back(folder + "/files");
  }
  parts_->disks = *DiskSet::Open(options);
  parts_->fences = *FenceBook::Open(folders.front() + "/fences");
  parts_->service =
      std::make_unique<StoreService>(parts_->disks.get(), parts_->fences.get(), &parts_->gate, 16);
  grpc::ServerBuilder builder;
  builder.AddListeningPort(
      absl::StrCat("127.0.0.1:", port), grpc::InsecureServerCredentials(), &parts_->port);
  builder.RegisterService(parts_->service.get());
  builder.SetMaxReceiveMessageSize(4 << 20);
  parts_->server = builder.BuildAndStart();
  CHECK(parts_->server != nullptr && parts_->port > 0);
}

LocalStore::~LocalStore() {
  parts_->server->Shutdown(std::chrono::system_clock::now());
}

int LocalStore::port() const {
  return parts_->port;
}

std::string LocalStore::Url(std::string_view path) const {
  return absl::StrCat("ravel://127.0.0.1:", parts_->port, "/", std::string(path));
}

int64_t LocalStore::Count(std::string_view name) const {
  const store_server::StoreCounts& counts = parts_->service->counts();
  if (name == "resumed_uploads") {
    return counts.resumed_uploads;
  }
  if (name == "bad_blocks") {
    return counts.bad_blocks;
  }
  CHECK(name == "refused");
  return counts.refused;
}

}  // namespace ravel::testing
