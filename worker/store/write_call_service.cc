#include "worker/store/write_call_service.h"

#include <utility>

namespace ravel::store_server {
namespace {

// Messages of 2 MiB that have arrived and wait for the disk.
constexpr size_t kMaxAhead = 4;

}  // namespace

WriteCall* WriteCall::Start(Work work) {
  auto* const call = new WriteCall;
  const MutexLock lock(call->mutex_);
  call->ReadAhead();
  call->thread_ = std::thread([call, work = std::move(work)]() mutable {
    {
      const MutexLock started(call->mutex_);  // thread_ is set: OnDone joins it
    }
    const grpc::Status status = work(*call);
    work = nullptr;
    call->Finish(status);
  });
  return call;
}

WriteCall* WriteCall::Refuse(const grpc::Status& status) {
  auto* const call = new WriteCall;
  call->Finish(status);
  return call;
}

void WriteCall::ReadAhead() {
  if (reading_ || over_ || arrived_.size() >= kMaxAhead) {
    return;
  }
  reading_ = true;
  StartRead(&incoming_);
}

const grpc::ByteBuffer* WriteCall::Read() {
  current_.Clear();  // its slices go back before more arrive
  const MutexLock lock(mutex_);
  while (arrived_.empty() && !over_) {
    changed_.Wait(mutex_);
  }
  if (arrived_.empty()) {
    return nullptr;
  }
  current_.Swap(&arrived_.front());
  arrived_.pop_front();
  ReadAhead();
  return &current_;
}

bool WriteCall::HasArrived() {
  const MutexLock lock(mutex_);
  return !arrived_.empty();
}

bool WriteCall::Write(const v1::StoreWriteReply& reply) {
  bool own = false;
  if (!grpc::SerializationTraits<v1::StoreWriteReply>::Serialize(reply, &reply_, &own).ok()) {
    return false;
  }
  const MutexLock lock(mutex_);
  writing_ = true;
  StartWrite(&reply_);
  while (writing_) {
    changed_.Wait(mutex_);
  }
  return !write_failed_;
}

void WriteCall::OnReadDone(bool ok) {
  const MutexLock lock(mutex_);
  reading_ = false;
  if (ok) {
    arrived_.emplace_back().Swap(&incoming_);
    ReadAhead();
  } else {
    over_ = true;
  }
  changed_.NotifyAll();
}

void WriteCall::OnWriteDone(bool ok) {
  const MutexLock lock(mutex_);
  writing_ = false;
  write_failed_ = write_failed_ || !ok;
  changed_.NotifyAll();
}

void WriteCall::OnDone() {
  if (thread_.joinable()) {
    if (thread_.get_id() == std::this_thread::get_id()) {
      thread_.detach();  // it ends with this
    } else {
      thread_.join();
    }
  }
  delete this;
}

}  // namespace ravel::store_server
