#include "common/model/architecture/architecture.h"

#include "common/check.h"

namespace ravel::plan {

const std::vector<const Architecture*>& AllArchitectures() {
  static const std::vector<const Architecture*> all = {
      &LlamaArchitecture(), &Qwen2Architecture(), &Qwen3Architecture(), &Gpt2Architecture()};
  return all;
}

const Architecture& ArchitectureOf(ArchitectureKind kind) {
  const auto index = static_cast<size_t>(kind);
  CHECK(index < AllArchitectures().size() && AllArchitectures()[index]->kind == kind);
  return *AllArchitectures()[index];
}

const Architecture* FindArchitecture(std::string_view model_type) {
  for (const Architecture* architecture : AllArchitectures()) {
    if (architecture->model_type == model_type) {
      return architecture;
    }
  }
  return nullptr;
}

}  // namespace ravel::plan
