#pragma once

// Looks at the paths of jobs that are not accepted yet, for the coordinator, which opens no path of
// users itself. A mount that hangs is named and holds up nothing.

#include <chrono>
#include <functional>
#include <memory>

#include "common/status.h"
#include "common/store/data_set_look.h"
#include "worker/daemon/bounded_threads.h"
#include "worker/daemon/launch_settings_proto.h"

namespace ravel::daemon {

// Used only from the thread of its io_context.
class PathLooks {
 public:
  using LookFunction = std::function<PathFacts(const PathQuery&, const LookHooks&)>;

  // `each_limit`: for one path that stands still.
  PathLooks(boost::asio::io_context& context,
            std::chrono::milliseconds each_limit,
            LookFunction look = store::LookAtJobPaths);
  ~PathLooks();
  PathLooks(const PathLooks&) = delete;
  PathLooks& operator=(const PathLooks&) = delete;
  // `done` is called once, on the io_context's thread. The facts may be those of a path that was
  // silent for `each_limit` or was being looked at when `all_limit` was over. From inside this
  // call: the same of a path in whose folder an earlier look still hangs, which costs no thread;
  // ResourceExhausted while too many hang.
  void Start(const PathQuery& query,
             std::chrono::milliseconds all_limit,
             const std::function<void(absl::StatusOr<PathFacts>)>& done);

  // More than the coordinator asks of a node at once: the others hang.
  static constexpr int kMaxThreads = 32;
  static constexpr std::chrono::milliseconds kLongest{60'000};

 private:
  struct Hanging;

  const std::chrono::milliseconds each_limit_;
  const std::shared_ptr<Hanging> hanging_;  // shared with threads that hang
  const LookFunction look_;
  BoundedThreads threads_;
};

// Looks at no path that does not lie beneath `roots`, and says the same of it whatever is there. At
// none at all for a job whose other needs `rules` refuse.
PathLooks::LookFunction LookBeneath(const PathRoots& roots, const LaunchRules& rules = {});

}  // namespace ravel::daemon
