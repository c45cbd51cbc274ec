#pragma once

// An ObjectStore over another one, which tells a test of every call before it is made: what others
// do meanwhile, or an error instead of the call.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/status.h"
#include "common/store/object_store.h"

namespace ravel::testing {

enum class StoreCall { kCreate, kPut, kOpen, kList, kMakeDirectory, kPublish, kWithdraw };

// Used from one thread at a time.
class WatchedStore : public store::ObjectStore {
 public:
  // Returns the error that the call fails with, or OK. `path` is the source of a publication.
  using Before = std::function<absl::Status(StoreCall call, std::string_view path)>;
  WatchedStore(store::ObjectStore* inner, Before before)
      : inner_(inner), before_(std::move(before)) {}

  // Runs `act` before call number `at`, from 0, and lets all calls through.
  WatchedStore(store::ObjectStore* inner, int64_t at, std::function<void()> act)
      : WatchedStore(inner, [at, count = int64_t{0}, run = std::move(act)](auto, auto) mutable {
          if (count++ == at) {
            run();
          }
          return absl::OkStatus();
        }) {}

  absl::Status MakeRoot() override { return inner_->MakeRoot(); }
  absl::Status ProbeWritable() const override { return inner_->ProbeWritable(); }
  absl::StatusOr<std::unique_ptr<store::FileWriter>> Create(std::string_view path,
                                                            int64_t expected_bytes) override {
    RETURN_IF_ERROR(before_(StoreCall::kCreate, path));
    return inner_->Create(path, expected_bytes);
  }
  absl::Status Put(std::string_view path, std::string_view contents) override {
    RETURN_IF_ERROR(before_(StoreCall::kPut, path));
    return inner_->Put(path, contents);
  }
  absl::StatusOr<std::unique_ptr<store::FileReader>> Open(std::string_view path) const override {
    RETURN_IF_ERROR(before_(StoreCall::kOpen, path));
    return inner_->Open(path);
  }
  absl::StatusOr<std::vector<store::ListedEntry>> List(std::string_view directory) const override {
    RETURN_IF_ERROR(before_(StoreCall::kList, directory));
    return inner_->List(directory);
  }
  absl::Status MakeDirectory(std::string_view path) override {
    RETURN_IF_ERROR(before_(StoreCall::kMakeDirectory, path));
    return inner_->MakeDirectory(path);
  }
  absl::Status PublishIfAbsent(std::string_view from, std::string_view to) override {
    RETURN_IF_ERROR(before_(StoreCall::kPublish, from));
    return inner_->PublishIfAbsent(from, to);
  }
  bool RenamesWhole() const override { return inner_->RenamesWhole(); }
  absl::Status Withdraw(std::string_view path) override {
    RETURN_IF_ERROR(before_(StoreCall::kWithdraw, path));
    return inner_->Withdraw(path);
  }
  absl::StatusOr<int64_t> ChangedMs(std::string_view path) const override {
    return inner_->ChangedMs(path);
  }
  std::string Locate(std::string_view path) const override { return inner_->Locate(path); }

 private:
  store::ObjectStore* const inner_;
  mutable Before before_;
};

}  // namespace ravel::testing
