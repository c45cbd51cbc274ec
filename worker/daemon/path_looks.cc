#include "worker/daemon/path_looks.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include <absl/strings/str_cat.h>

namespace ravel::daemon {
namespace {

using std::chrono::milliseconds;

std::string SecondsText(milliseconds time) {
  return time.count() % 1000 == 0 ? absl::StrCat(time.count() / 1000, " s")
                                  : absl::StrCat(time.count(), " ms");
}

}  // namespace

PathLooks::PathLooks(boost::asio::io_context& context, milliseconds each_limit, LookFunction look)
    : each_limit_(each_limit), look_(std::move(look)), threads_(context, kMaxThreads) {}

void PathLooks::Start(PathQuery query,
                      milliseconds all_limit,
                      std::function<void(absl::StatusOr<PathFacts>)> done) {
  BoundedThreads::Work work =
      [look = look_, query = std::move(query), done](WorkProgress& progress) {
        PathFacts facts = look(query,
                               {.at = [&progress](const std::string& field) { progress.At(field); },
                                .abandoned = [&progress] { return progress.abandoned(); }});
        return [done, facts = std::move(facts)]() mutable { done(std::move(facts)); };
      };
  const bool started =
      threads_.Run({each_limit_, std::clamp(all_limit, milliseconds(1), kLongest)},
                   std::move(work),
                   [done](const std::string& field, milliseconds limit) {
                     done(PathFacts{.silent_field = field.empty() ? "spec" : field,
                                    .silence = "no answer within " + SecondsText(limit)});
                   });
  if (!started) {
    done(absl::ResourceExhaustedError("earlier looks at paths still hang in file systems"));
  }
}

}  // namespace ravel::daemon
