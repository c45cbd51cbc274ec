#include "coordinator/saves/step_claims.h"

namespace ravel::coordinator {

bool StepClaims::Reserve(const std::string& uid, int64_t step) {
  const MutexLock lock(mutex_);
  Claims& claims = claims_[uid];
  if (claims.deleting.contains(step)) {
    return false;
  }
  claims.reserved = step;
  return true;
}

void StepClaims::EndRestore(const std::string& uid) {
  const MutexLock lock(mutex_);
  claims_[uid].reserved = -1;
  Tidy(uid);
}

bool StepClaims::Want(const std::string& uid, int64_t step) {
  const MutexLock lock(mutex_);
  Claims& claims = claims_[uid];
  return !claims.deleting.contains(step) && (claims.wanted.insert(step), true);
}

void StepClaims::Unwant(const std::string& uid, int64_t step) {
  const MutexLock lock(mutex_);
  claims_[uid].wanted.erase(step);
  Tidy(uid);
}

void StepClaims::EndWant(const std::string& uid) {
  const MutexLock lock(mutex_);
  claims_[uid].wanted.clear();
  Tidy(uid);
}

bool StepClaims::MayDelete(const std::string& uid, int64_t step) {
  const MutexLock lock(mutex_);
  Claims& claims = claims_[uid];
  if (claims.reserved == step || claims.wanted.contains(step)) {
    return false;
  }
  claims.deleting.insert(step);
  return true;
}

void StepClaims::EndDeleting(const std::string& uid) {
  const MutexLock lock(mutex_);
  claims_[uid].deleting.clear();
  Tidy(uid);
}

void StepClaims::Tidy(const std::string& uid) {
  const Claims& claims = claims_[uid];
  if (claims.reserved < 0 && claims.wanted.empty() && claims.deleting.empty()) {
    claims_.erase(uid);
  }
}

}  // namespace ravel::coordinator
