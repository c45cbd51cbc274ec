#include "coordinator/jobs/rpc_meter.h"

namespace ravel::coordinator {

void RpcMeter::Record(const std::string& method, const std::string& code, double seconds) {
  MutexLock lock(mutex_);
  auto found = methods_.find(method);
  if (found == methods_.end()) {
    if (methods_.size() >= kMostMethods) {
      return;
    }
    found = methods_.emplace(method, std::make_unique<Method>()).first;
  }
  ++found->second->by_code[code];
  if (seconds >= 0) {
    found->second->seconds.Record(seconds);
  }
}

std::vector<RpcLook> RpcMeter::Get() const {
  std::vector<RpcLook> looks;
  MutexLock lock(mutex_);
  for (const auto& [name, method] : methods_) {
    looks.push_back({name, method->by_code, method->seconds.Get()});
  }
  return looks;
}

}  // namespace ravel::coordinator
