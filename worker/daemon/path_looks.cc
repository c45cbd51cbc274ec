#include "worker/daemon/path_looks.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>

#include "common/mutex.h"

namespace ravel::daemon {
namespace {

using std::chrono::milliseconds;

std::string SecondsText(milliseconds time) {
  return time.count() % 1000 == 0 ? absl::StrCat(time.count() / 1000, " s")
                                  : absl::StrCat(time.count(), " ms");
}

std::string FolderOf(const std::string& path) {
  return path.substr(0, path.rfind('/'));
}

// The place where all secrets lie, whatever its path is.
constexpr char kSecrets[] = "the secrets of jobs/";

bool HasSecrets(const JobNeeds& needs) {
  return std::any_of(needs.environment.begin(),
                     needs.environment.end(),
                     [](const NeededVariable& variable) { return !variable.secret.empty(); });
}

// One look, of its thread and of the loop.
struct OneLook {
  std::string folder;    // of the path at hand
  bool ended = false;    // the thread came back
  bool counted = false;  // among the folders that hang
};

}  // namespace

struct PathLooks::Hanging {
  Mutex mutex;
  std::multiset<std::string> folders ABSL_GUARDED_BY(mutex);

  bool Has(const std::string& path) {
    const MutexLock lock(mutex);
    return !path.empty() && folders.contains(FolderOf(path));
  }
  // The first path that cannot answer.
  std::optional<NamedPath> Find(const PathQuery& query) {
    std::vector<NamedPath> paths = {
        {query.model_directory.field, query.model_directory.path + "/config.json"},
        query.tokenizer};
    paths.insert(paths.end(), query.token_files.begin(), query.token_files.end());
    if (HasSecrets(query.needs)) {
      paths.push_back({"spec.environment", kSecrets});
    }
    const auto found = std::find_if(
        paths.begin(), paths.end(), [this](const NamedPath& path) { return Has(path.path); });
    return found == paths.end() ? std::nullopt : std::optional<NamedPath>(*found);
  }
};

PathLooks::PathLooks(boost::asio::io_context& context, milliseconds each_limit, LookFunction look)
    : each_limit_(each_limit),
      hanging_(std::make_shared<Hanging>()),
      look_(std::move(look)),
      threads_(context, kMaxThreads) {}

PathLooks::~PathLooks() = default;

PathLooks::LookFunction LookBeneath(const PathRoots& roots, const LaunchRules& rules) {
  return [roots, rules](const PathQuery& query, LookHooks hooks) {
    if (!query.needs.empty()) {
      if (hooks.at) {  // they may lie on a mount that hangs
        hooks.at({"spec.environment", kSecrets});
      }
      if (const std::optional<NeedRefusal> refused = RefusalOf(query.needs, rules)) {
        return PathFacts{.refused_field = refused->field, .refusal = refused->why};
      }
    }
    hooks.roots = &roots;
    return store::LookAtJobPaths(query, hooks);
  };
}

void PathLooks::Start(const PathQuery& query,
                      milliseconds all_limit,
                      const std::function<void(absl::StatusOr<PathFacts>)>& done) {
  if (const std::optional<NamedPath> path = hanging_->Find(query)) {
    done(PathFacts{.silent_field = path->field,
                   .silence = absl::StrCat(
                       "no answer: an earlier look at ", FolderOf(path->path), " still hangs")});
    return;
  }
  const auto one = std::make_shared<OneLook>();  // under the mutex of `hanging`
  BoundedThreads::Work work =
      [look = look_, hanging = hanging_, one, query, done](WorkProgress& progress) {
        const auto at = [&](const NamedPath& path) {
          progress.At(path.field);
          const MutexLock lock(hanging->mutex);
          if (!one->counted) {
            one->folder = FolderOf(path.path);
          }
        };
        PathFacts facts = look(query, {.at = at, .abandoned = [&] { return !progress.GoesOn(); }});
        const MutexLock lock(hanging->mutex);
        one->ended = true;
        if (one->counted) {
          hanging->folders.extract(one->folder);
        }
        return [done, facts = std::move(facts)] { done(facts); };
      };
  BoundedThreads::Late late = [hanging = hanging_, one, done](const std::string& field,
                                                              milliseconds limit) {
    {
      const MutexLock lock(hanging->mutex);
      one->counted = !one->ended && !one->folder.empty();
      if (one->counted) {
        hanging->folders.insert(one->folder);
      }
    }
    done(PathFacts{.silent_field = field.empty() ? "spec" : field,
                   .silence = "no answer within " + SecondsText(limit)});
  };
  const bool started = threads_.Run({each_limit_, std::clamp(all_limit, milliseconds(1), kLongest)},
                                    std::move(work),
                                    std::move(late));
  if (!started) {
    done(absl::ResourceExhaustedError("earlier looks at paths still hang in file systems"));
  }
}

}  // namespace ravel::daemon
