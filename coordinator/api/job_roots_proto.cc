#include "coordinator/api/job_roots_proto.h"

#include <algorithm>
#include <string>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>

namespace ravel::coordinator {
namespace {

// Not `auto`, `none` or the number of a step of the job's own store.
bool NamesPlace(const std::string& resume_from) {
  return absl::StartsWith(resume_from, "/") || absl::StrContains(resume_from, "://");
}

std::vector<RootedPath> PlacesOf(const plan::JobSpec& spec) {
  std::vector<RootedPath> places;
  const auto add_sources = [&places](const char* name, const auto& sources) {
    for (std::size_t i = 0; i < sources.size(); ++i) {
      places.push_back({absl::StrCat("spec.data.", name, "[", i, "].path"), sources[i].path});
    }
  };
  places.push_back({"spec.model.from", spec.model_from});
  add_sources("train", spec.data.train);
  add_sources("validation", spec.data.validation);
  places.push_back({"spec.data.tokenizer", spec.data.tokenizer});
  places.push_back(
      {"spec.training.optimizer.offload.path", spec.optimizer.offload.path, PathUse::kWrite});
  places.push_back({"spec.checkpoint.store", spec.checkpoint.store, PathUse::kWrite});
  places.push_back({"spec.checkpoint.resumeFrom",
                    NamesPlace(spec.checkpoint.resume_from) ? spec.checkpoint.resume_from : ""});
  places.push_back({"spec.observability.trace.directory", spec.trace_directory, PathUse::kWrite});
  std::erase_if(places, [](const RootedPath& place) { return place.path.empty(); });
  return places;
}

// A name of data opens files beside a prefix, and all of the data set that a URL is
// in.
std::vector<std::string> OpenedBy(const RootedPath& place) {
  const bool data = absl::StartsWith(place.field, "spec.data.");
  if (!data) {
    return {place.path};
  }
  if (IsServiceUrl(place.path)) {
    return {place.path.substr(0, place.path.rfind('/'))};
  }
  return place.field == "spec.data.tokenizer"
             ? std::vector<std::string>{place.path}
             : std::vector<std::string>{place.path, place.path + ".idx"};
}

}  // namespace

std::vector<JobViolation> RootViolations(const NamespaceRoots& roots, const plan::JobSpec& spec) {
  std::vector<JobViolation> violations;
  for (const RootedPath& place : PlacesOf(spec)) {
    for (const std::string& opened : OpenedBy(place)) {
      std::string expected = roots.Expected(spec.namespace_name, opened, place.use);
      if (!expected.empty()) {
        violations.push_back({place.field, 0, 0, std::move(expected), place.path});
        break;
      }
    }
  }
  return violations;
}

absl::Status CheckStoreBeneath(const NamespaceRoots& roots, const plan::JobSpec& spec) {
  ASSIGN_OR_RETURN(const PathRoots folders,
                   PathRoots::Create(roots.FoldersOf(spec.namespace_name)));
  std::vector<RootedPath> places = PlacesOf(spec);
  std::erase_if(places, [](const RootedPath& place) {
    return !absl::StartsWith(place.field, "spec.checkpoint.");
  });
  const absl::Status beneath = folders.CheckAll(places);
  return absl::IsPermissionDenied(beneath) ? absl::InvalidArgumentError(beneath.message())
                                           : beneath;
}

}  // namespace ravel::coordinator
