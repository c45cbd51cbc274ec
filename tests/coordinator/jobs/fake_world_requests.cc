// FakeWorld: what people ask, and the writer that holds its writes.

#include <optional>
#include <utility>

#include "common/check.h"
#include "tests/coordinator/jobs/fake_world.h"

namespace ravel::coordinator {
namespace {

template <typename Value, typename Request>
absl::StatusOr<Value> Told(const Request& request) {
  std::optional<absl::StatusOr<Value>> told;
  request(Answer<Value>([&told](absl::StatusOr<Value> value) { told = std::move(value); }));
  CHECK(told.has_value());
  return *std::move(told);
}

}  // namespace

void HeldStoreWriter::Add(StoreWrite write) {
  if (held) {
    queue_.push_back(std::move(write));
  } else {
    InlineStoreWriter(store_).Add(std::move(write));
  }
}

void HeldStoreWriter::WriteQueued() {
  const std::vector<StoreWrite> group = std::exchange(queue_, {});
  const std::vector<absl::Status> results = WriteGroup(*store_, group);
  for (size_t i = 0; i < group.size(); ++i) {
    group[i].done(results[i]);
  }
}

absl::StatusOr<JobView> FakeWorld::Submit(SubmitDraft draft) {
  return Told<JobView>([&](const auto& answer) { controller_->Submit(std::move(draft), answer); });
}

absl::StatusOr<JobView> FakeWorld::Cancel(const JobKey& key, const std::string& reason) {
  return Told<JobView>([&](const auto& answer) { controller_->Cancel(key, reason, answer); });
}

absl::StatusOr<JobView> FakeWorld::Delete(const JobKey& key, const DeleteDraft& draft) {
  return Told<JobView>([&](const auto& answer) { controller_->Delete(key, draft, answer); });
}

absl::StatusOr<JobView> FakeWorld::Retry(const JobKey& key, const RetryDraft& draft) {
  return Told<JobView>([&](const auto& answer) { controller_->Retry(key, draft, answer); });
}

absl::StatusOr<NodeView> FakeWorld::HoldNode(const std::string& node_id,
                                             NodeHold hold,
                                             bool lift,
                                             const std::string& reason) {
  return Told<NodeView>(
      [&](const auto& answer) { controller_->HoldNode(node_id, hold, lift, reason, answer); });
}

absl::StatusOr<OperationRecord> FakeWorld::CheckpointNow(const JobKey& key,
                                                         const std::string& request_id,
                                                         int64_t deadline_ms) {
  return Told<OperationRecord>([&](const auto& answer) {
    controller_->CheckpointNow(key, request_id, deadline_ms, answer);
  });
}

absl::StatusOr<JobView> FakeWorld::Rollback(const JobKey& key,
                                            const std::string& request_id,
                                            int64_t step,
                                            const std::string& path,
                                            const std::string& reason) {
  return Told<JobView>([&](const auto& answer) {
    controller_->Rollback(key, request_id, step, path, reason, answer);
  });
}

absl::Status FakeWorld::NoteMark(const JobKey& key,
                                 int64_t step,
                                 MarkChange change,
                                 const std::string& reason) {
  std::optional<absl::Status> told;
  controller_->NoteMark(
      key, step, change, reason, [&told](const absl::Status& status) { told = status; });
  CHECK(told.has_value());
  return *told;
}

absl::Status FakeWorld::ForgetNode(const std::string& node_id) {
  std::optional<absl::Status> told;
  controller_->ForgetNode(node_id, [&told](const absl::Status& status) { told = status; });
  CHECK(told.has_value());
  return *told;
}

}  // namespace ravel::coordinator
